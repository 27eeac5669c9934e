"""Control of the norms of weights, matrix by matrix, and of updates relative to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.core import Donation, EmptyState, checks, transform
from muonfx.core.contract import NOTHING
from muonfx.polar.scaling import power_of_two
from muonfx.transforms._matrices import (
    MatrixView,
    check_matrices,
    join_scalars,
    map_matrices,
    matrix_locality,
    name_patterns,
    on_stacks,
    on_stacks_without_blocks,
    split_scalars,
)
from muonfx.transforms._pinned import WideStateDtype, state_dtype
from muonfx.transforms.normalize import to_unit_rms
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew

__all__ = ["WeightNormsState", "keep_weight_norms", "match_weight_norms"]


class WeightNormsState(NamedTuple):
    """State of `keep_weight_norms`."""

    radius: PyTree
    """The norm that each matrix keeps, in the pinned dtype: shape (..., 1, 1) for a leaf of shape (..., rows, columns),
    with a number for each block along the block axis."""


@transform(locality=matrix_locality, on_stacks=on_stacks, name_patterns=name_patterns, position="sets_size")
def match_weight_norms(
    *,
    view: MatrixView = MatrixView(),
):
    """Scale each matrix's update to the Frobenius norm of its weight, so that the learning rate is a relative step.

    The update of a matrix that is zero stays as it is, and a zero update is zero.

    Args:
        view: which matrices a leaf consists of, as for `orthogonalize`.

    Raises:
        ValueError: at `init`, a leaf is no matrix or does not fit the view; at `update`, ``params`` is missing.

    Follows Hyperball (Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them 2.1", 2025); the trust ratio
    of LARS (arXiv 1708.03888), matrix by matrix.

    Example:
        >>> import muonfx as mfx
        >>> params = {"w": torch.full((2, 2), 3.0)}
        >>> mfx.match_weight_norms().update({"w": torch.eye(2)}, mfx.core.EmptyState(), params)[0]["w"].norm()
        tensor(6.)
    """

    def init(params: PyTree) -> EmptyState:
        check_matrices(view, params)
        return EmptyState()

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        if params is None:
            raise ValueError("match_weight_norms needs the parameters: call update(updates, state, params)")
        return map_matrices(view, _match, updates, params), state

    return init, update


def _match(update: Tensor, weight: Tensor) -> Tensor:
    if update.numel() == 0:
        return update.clone()
    u = update.to(ew.wide_dtype(update.dtype, weight.dtype))
    size = norm(weight) * (weight.shape[-2] * weight.shape[-1]) ** -0.5
    return torch.where(size == 0, u, to_unit_rms(u, (-2, -1)) * size).to(update.dtype)


@transform(locality=matrix_locality, on_stacks=on_stacks_without_blocks, name_patterns=name_patterns, position="last")
def keep_weight_norms(
    *,
    dtype: WideStateDtype = "auto",
    view: MatrixView = MatrixView(),
):
    r"""Change each matrix's update so that its weight keeps the Frobenius norm that it had at `init`.

    $u \leftarrow R\,(w + u) / \|w + u\|_F - w$ with $R = \|w_0\|_F$. It comes behind `scale_by_learning_rate`, where
    updates are what is added to the parameters. A matrix that was zero at `init` is left free.

    Args:
        dtype: pinned dtype of the norms; "auto" is float32, but float64 for a float64 parameter; None is each
            parameter's own.
        view: which matrices a leaf consists of, as for `orthogonalize`.

    Raises:
        ValueError: ``dtype`` is a string other than "auto"; at `init`, a leaf is no matrix or does not fit the view; at
            `update`, ``params`` is missing.

    Follows Hyperball (Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them 2.1", 2025), as ``MuonH`` of
    Dion's repository has it, which refuses a zero matrix.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.scale_by_learning_rate(0.5), mfx.keep_weight_norms())
        >>> params = {"w": torch.tensor([[3.0, 4.0]])}
        >>> updates, _ = tx.update({"w": torch.tensor([[6.0, 0.0]])}, tx.init(params), params)
        >>> mfx.apply_updates(params, updates)["w"]
        tensor([[0., 5.]])
    """
    checks.state_dtype("dtype", dtype)

    def init(params: PyTree) -> WeightNormsState:
        at = Present(params)
        names, leaves = at.names(), at.pick(params)
        radii = [
            join_scalars(own, [norm(m.detach()).to(state_dtype(dtype, leaf.dtype)) for m in own.split(leaf, name)])
            for own, leaf, name in zip(view.of(names), leaves, names, strict=True)
        ]
        return WeightNormsState(at.fill(radii))

    def update(updates: PyTree, state: WeightNormsState, params: PyTree = None, *, donate: Donation = NOTHING):
        if params is None:
            raise ValueError("keep_weight_norms needs the parameters: call update(updates, state, params)")
        at = Present(updates)
        leaves = at.pick(updates)
        names = at.names() if view.needs_names else [""] * len(leaves)
        out: list[Tensor] = []
        for own, leaf, weight, radius, name in zip(
            view.of(names), leaves, at.pick(params), at.pick(state.radius), names, strict=True
        ):
            matrices = zip(own.split(leaf, name), own.split(weight, name), split_scalars(own, radius), strict=True)
            out.append(own.join([_keep(*each) for each in matrices], leaf))
        return at.fill(out), state

    return init, update


def _keep(update: Tensor, weight: Tensor, radius: Tensor) -> Tensor:
    if update.numel() == 0:
        return update.clone()
    wide = ew.wide_dtype(update.dtype, weight.dtype, radius.dtype)
    u, w, target = update.to(wide), weight.to(wide), radius.to(wide)
    moved = w + u
    found = norm(moved)
    fixed = (found == 0) | (target == 0)
    return torch.where(fixed, u, moved * (target / torch.where(fixed, 1.0, found)) - w).to(update.dtype)


def norm(matrix: Tensor) -> Tensor:
    """Return Frobenius norms as (..., 1, 1) in at least fp32, without overflow or underflow."""
    wide = matrix.to(ew.wide_dtype(matrix.dtype))
    if matrix.numel() == 0:
        return wide.new_zeros((*matrix.shape[:-2], 1, 1))
    power = power_of_two(wide.detach().abs().amax((-2, -1), keepdim=True))
    return ew.safe_sqrt((wide * power).square().sum((-2, -1), keepdim=True)) / power
