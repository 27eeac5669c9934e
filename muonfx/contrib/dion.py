"""Dion and Dion2: orthonormalized low-rank updates, by power iteration or by sampling."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.compact.noise import uniform
from muonfx.core import Donation, checks, transform
from muonfx.core.contract import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.polar.scaling import power_of_two
from muonfx.transforms._matrices import (
    MatrixView,
    check_matrices,
    map_matrices,
    matrix_locality,
    name_patterns,
    on_stacks,
)
from muonfx.transforms._pinned import WideStateDtype, state_dtype, store, widen, zeros
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew

__all__ = ["DionState", "SampledMomentumState", "sampled_momentum", "scale_by_dion"]


class DionState(NamedTuple):
    """State of `scale_by_dion`."""

    trace: PyTree
    """The part of the summed gradients that no update has stood for yet, like the parameters, in the pinned dtype."""
    basis: PyTree
    """The right factor of the last update, in the pinned dtype: shape (..., columns, rank) for a leaf of shape (...,
    rows, columns)."""


class SampledMomentumState(NamedTuple):
    """State of `sampled_momentum`."""

    trace: PyTree
    """The part of the summed gradients that no update has stood for yet, like the parameters, in the pinned dtype."""


@transform(
    locality=matrix_locality,
    reads_params=False,
    name_patterns=name_patterns,
    short_names={"momentum": "decay"},
    position="sets_size",
)
def scale_by_dion(
    rank: int = 768,
    decay: ScalarOrSchedule = 0.95,
    *,
    dtype: WideStateDtype = "auto",
    view: MatrixView = MatrixView(),
):
    r"""Replace each matrix by $P Q^T$ of low rank, with orthonormal columns of $P$ and unit columns of $Q$.

    A step of power iteration on $M = M_{t-1} + G$ from the last right factor: $P = \mathrm{qr}(M Q_{t-1})$, $R = M^T
    P$, and $Q$ is $R$ with unit columns. What the update stands for is taken out of the sum, the rest stays for later
    steps: $M_t = M - (1 - \beta) P R^T$. `scale_by_shape` ("spectral") follows it in a chain.

    The first right factors are the same for all matrices of one shape, uniform in [-1, 1). A column of $Q$ that would
    be zero keeps its old direction and adds nothing to the update.

    Args:
        rank: of the update, at most; a matrix with a shorter side has that rank.
        decay: $\beta$, in [0, 1).
        dtype: pinned dtype of both; "auto" is float32, but float64 for a float64 parameter; None is each parameter's
            own.
        view: which matrices a leaf consists of, as for `orthogonalize`; without blocks.

    Raises:
        ValueError: an argument is out of range, a dtype is a string other than "auto", or the view has blocks; at
            `init`, a leaf is not a matrix.

    Follows Dion (Ahn et al., arXiv 2504.05295) with the whole matrix at one owner.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.scale_by_dion(rank=1)
        >>> grads = {"w": torch.outer(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0, 0.0]))}
        >>> tx.update(grads, tx.init(grads))[0]["w"] + 0.0
        tensor([[0.6000, 0.0000, 0.0000],
                [0.8000, 0.0000, 0.0000]])
    """
    checks.positive_int("rank", rank)
    decay = checks.in_unit_interval("decay", decay)
    checks.state_dtype("dtype", dtype)
    if view.blocks is not None:
        raise ValueError(
            f"scale_by_dion: view must not have blocks, found {view!r}: make each block a parameter of its own"
        )

    def init(params: PyTree) -> DionState:
        at = Present(params)
        names, leaves = at.names(), at.pick(params)
        bases = [
            _first_basis(own.split(leaf, name)[0], rank, state_dtype(dtype, leaf.dtype))
            for own, leaf, name in zip(view.of(names), leaves, names, strict=True)
        ]
        return DionState(zeros(params, dtype), at.fill(bases))

    def update(updates: PyTree, state: DionState, params: PyTree = None, *, donate: Donation = NOTHING):
        at = Present(updates)
        leaves, traces, bases = at.pick(updates), at.pick(state.trace), at.pick(state.basis)
        names = at.names() if view.needs_names else [""] * len(leaves)
        found = [
            _step(own.split(leaf, name)[0], own.split(trace, name)[0], basis, decay)
            for own, leaf, trace, basis, name in zip(view.of(names), leaves, traces, bases, names, strict=True)
        ]
        views = view.of(names)
        out = [own.join([u], leaf) for own, (u, _, _), leaf in zip(views, found, leaves, strict=True)]
        trace = [own.join([m], leaf) for own, (_, m, _), leaf in zip(views, found, leaves, strict=True)]
        return at.fill(out), DionState(at.fill(trace, state.trace), at.fill([q for *_, q in found], state.basis))

    return init, update


def _first_basis(matrix: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    *batch, rows, columns = matrix.shape
    short = min(rank, rows, columns)
    noise = uniform(torch.full((), columns, dtype=torch.int64, device=matrix.device), columns * short)
    return (noise * 2 - 1).reshape(columns, short).to(dtype).expand(*batch, columns, short).clone()


def _step(gradient: Tensor, trace: Tensor, basis: Tensor, decay: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the update of a matrix, the new trace and the new basis."""
    wide = ew.wide_dtype(gradient.dtype, trace.dtype)
    total = trace.to(wide) + gradient.to(wide)
    if total.numel() == 0:
        return gradient.clone(), total.to(trace.dtype), basis.clone()
    old = basis.to(wide)
    # Scale by an exact power of two, so that no product overflows or underflows.
    power = power_of_two(total.detach().abs().amax((-2, -1), keepdim=True))
    small = total * power
    left, _ = torch.linalg.qr(small @ old)
    right = small.mT @ left
    lengths = ew.safe_sqrt(right.square().sum(-2, keepdim=True))
    unit = torch.where(lengths > 0, right / torch.where(lengths > 0, lengths, 1.0), 0.0)
    new_trace = total - (1.0 - decay) * ((left @ right.mT) / power)
    new_basis = torch.where(lengths > 0, unit, old)
    # NaN stays visible in the update of its matrix; the state of this matrix is lost, as with any average.
    return (left @ unit.mT).to(gradient.dtype), new_trace.to(trace.dtype), new_basis.to(basis.dtype)


@transform(
    locality=matrix_locality,
    reads_params=False,
    on_stacks=on_stacks,
    name_patterns=name_patterns,
    short_names={"momentum": "decay"},
)
def sampled_momentum(
    one_in: int = 4,
    decay: ScalarOrSchedule = 0.95,
    *,
    dtype: WideStateDtype = "auto",
    view: MatrixView = MatrixView(),
):
    r"""Sum up gradients, and pass on only the rows, or columns, in which most has gathered.

    Of each matrix $M = M_{t-1} + G$ the update has the largest of the slices along the shorter side, by their sum of
    magnitudes, and zeros elsewhere; in the state these slices are multiplied by $\beta$, the others wait. The polar
    factor of a matrix with zero rows is that of the others, so `orthogonalize` follows it; no products are saved.

    Args:
        one_in: of how many slices one is taken, rounded up: the authors' ``fraction`` is the reciprocal.
        decay: $\beta$, in [0, 1).
        dtype: pinned dtype of the sum; "auto" is float32, but float64 for a float64 parameter; None is each parameter's
            own.
        view: which matrices a leaf consists of, as for `orthogonalize`.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto"; at `init`, a leaf is no
            matrix or does not fit the view.

    Follows Dion2 in Microsoft's ``dion``, where a sharded matrix is cut along the sharded side instead.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.sampled_momentum(one_in=2, decay=0.5)
        >>> params = {"w": torch.zeros(2, 2)}
        >>> updates, state = tx.update({"w": torch.tensor([[3.0, 0.0], [2.0, 0.0]])}, tx.init(params))
        >>> updates["w"].tolist(), state.trace["w"].tolist()
        ([[3.0, 0.0], [0.0, 0.0]], [[1.5, 0.0], [2.0, 0.0]])
    """
    checks.positive_int("one_in", one_in)
    decay = checks.in_unit_interval("decay", decay)
    checks.state_dtype("dtype", dtype)

    def init(params: PyTree) -> SampledMomentumState:
        check_matrices(view, params)
        return SampledMomentumState(zeros(params, dtype))

    def update(updates: PyTree, state: SampledMomentumState, params: PyTree = None, *, donate: Donation = NOTHING):
        at = Present(updates)
        leaves, old = at.pick(updates), at.pick(state.trace)
        wide, held, _ = widen(leaves, old)
        total = at.fill(ew.add(held, wide))
        chosen = map_matrices(view, lambda matrix: _largest_slices(matrix, one_in), total)
        sums, kept = at.pick(total), at.pick(chosen)
        out = [torch.where(keep, m, 0.0).to(u.dtype) for m, keep, u in zip(sums, kept, leaves, strict=True)]
        trace = [torch.where(keep, m * decay, m) for m, keep in zip(sums, kept, strict=True)]
        return at.fill(out), SampledMomentumState(at.fill(store(trace, old, reuse=False), state.trace))

    return init, update


def _largest_slices(matrix: Tensor, one_in: int) -> Tensor:
    """Return a mask of the elements in the largest slices along the shorter side."""
    if matrix.numel() == 0:
        return torch.zeros_like(matrix, dtype=torch.bool)
    side, other = (-2, -1) if matrix.shape[-2] <= matrix.shape[-1] else (-1, -2)
    sums = matrix.detach().abs().sum(other, keepdim=True)
    order = sums.argsort(dim=side, descending=True, stable=True)  # topk does not define its choice among ties
    places = order.narrow(side, 0, -(-matrix.shape[side] // one_in))
    return torch.zeros_like(sums, dtype=torch.bool).scatter(side, places, True).expand_as(matrix)
