"""Control of the norms of weights, matrix by matrix, and of updates relative to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.core import EmptyState
from muonfx.polar.iteration import power_of_two
from muonfx.select import MatrixView
from muonfx.transforms.leafwise import WideStateDtype
from muonfx.transforms.matrixwise import MatrixSlot, matrixwise
from muonfx.transforms.normalize import to_unit_rms
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew

__all__ = ["WeightNormsState", "keep_weight_norms", "match_weight_norms"]


class WeightNormsState(NamedTuple):
    """State of `keep_weight_norms`."""

    radius: PyTree
    """The Frobenius norm that each matrix keeps, of shape (..., 1, 1), in ``dtype``."""


@matrixwise(reads_params=True, position="sets_size")
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

    def step(u: Tensor, s: EmptyState, p: Tensor):
        size = norm(p) * (p.shape[-2] * p.shape[-1]) ** -0.5
        return torch.where(size == 0, u, to_unit_rms(u, (-2, -1)) * size), s

    return EmptyState(), step


@matrixwise(reads_params=True, position="last")
def keep_weight_norms(
    *,
    dtype: WideStateDtype = "auto",
    view: MatrixView = MatrixView(),
):
    r"""Change each matrix's update so that its weight keeps the Frobenius norm that it had at `init`.

    $u \leftarrow R\,(w + u) / \|w + u\|_F - w$ with $R = \|w_0\|_F$. Put it after
    `scale_by_learning_rate`. A matrix that was zero at `init` is not constrained.

    Args:
        dtype: storage dtype of the norms, as for `MatrixSlot`.
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

    def step(u: Tensor, s: WeightNormsState, p: Tensor):
        moved = p + u
        found, target = norm(moved), s.radius
        fixed = (found == 0) | (target == 0)
        return torch.where(fixed, u, moved * (target / torch.where(fixed, 1.0, found)) - p), s

    return WeightNormsState(MatrixSlot(norm, dtype)), step


def norm(matrix: Tensor) -> Tensor:
    """Return Frobenius norms as (..., 1, 1) in at least fp32, without overflow or underflow."""
    wide = matrix.to(ew.wide_dtype(matrix.dtype))
    if matrix.numel() == 0:
        return wide.new_zeros((*matrix.shape[:-2], 1, 1))
    power = power_of_two(wide.detach().abs().amax((-2, -1), keepdim=True))
    return ew.safe_sqrt((wide * power).square().sum((-2, -1), keepdim=True)) / power
