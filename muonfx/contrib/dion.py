"""Dion and Dion2: orthonormalized low-rank updates, by power iteration or by sampling."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.compact.noise import uniform
from muonfx.core import checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.polar.iteration import power_of_two
from muonfx.select import MatrixView
from muonfx.transforms._pinned import WideStateDtype
from muonfx.transforms.leafwise import Slot
from muonfx.transforms.matrixwise import MatrixSlot, matrixwise
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew

__all__ = ["DionState", "SampledMomentumState", "sampled_momentum", "scale_by_dion"]


class DionState(NamedTuple):
    """State of `scale_by_dion`."""

    trace: PyTree
    """The part of the summed gradients that no update has applied yet, like the parameters, in the pinned dtype."""
    basis: PyTree
    """The right factor of the last update, (..., columns, rank): a `MatrixSlot` in the pinned dtype."""


class SampledMomentumState(NamedTuple):
    """State of `sampled_momentum`."""

    trace: PyTree
    """The part of the summed gradients that no update has applied yet, like the parameters, in the pinned dtype."""


@matrixwise(short_names={"momentum": "decay"}, position="sets_size")
def scale_by_dion(
    rank: int = 768, decay: ScalarOrSchedule = 0.95, *, dtype: WideStateDtype = "auto", view: MatrixView = MatrixView()
):
    r"""Replace each matrix by $P Q^T$ of low rank, with orthonormal columns of $P$ and unit columns of $Q$.

    A step of power iteration on $M = M_{t-1} + G$ from the last right factor: $P = \mathrm{qr}(M Q_{t-1})$, $R = M^T
    P$, and $Q$ is $R$ with unit columns. The part that the update approximates is subtracted from the sum, and the rest
    is kept for later steps: $M_t = M - (1 - \beta) P R^T$. `scale_by_shape` ("spectral") follows it in a chain.

    The first right factors are the same for all matrices of one shape, uniform in [-1, 1). A column of $Q$ that would
    be zero keeps its old direction and adds nothing to the update.

    Args:
        rank: the maximal rank of the update; the rank is lower if a side of the matrix is shorter.
        decay: $\beta$, in [0, 1).
        dtype: pinned dtype of both states; "auto" is float32, but float64 for a float64 parameter; None is the dtype of
            each parameter.
        view: which matrices a leaf consists of, as for `orthogonalize`.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto"; at `init`, a leaf is not a
            matrix or does not fit the view.

    Follows Dion (Ahn et al., arXiv 2504.05295), computed on the whole matrix by one rank.

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

    def first_basis(matrix: Tensor) -> Tensor:
        *batch, rows, columns = matrix.shape
        short = min(rank, rows, columns)
        noise = uniform(torch.full((), columns, dtype=torch.int64, device=matrix.device), columns * short)
        return (noise * 2 - 1).reshape(columns, short).expand(*batch, columns, short).clone()

    def step(u: Tensor, s: DionState) -> tuple[Tensor, DionState]:
        total = s.trace + u
        # Scale by an exact power of two, so that no product overflows or underflows.
        power = power_of_two(total.detach().abs().amax((-2, -1), keepdim=True))
        small = total * power
        left, _ = torch.linalg.qr(small @ s.basis)
        right = small.mT @ left
        lengths = ew.safe_sqrt(right.square().sum(-2, keepdim=True))
        unit = torch.where(lengths > 0, right / torch.where(lengths > 0, lengths, 1.0), 0.0)
        trace = total - (1.0 - decay) * ((left @ right.mT) / power)
        # NaN stays visible in the update of its matrix; the state of this matrix is lost, as with any average.
        return left @ unit.mT, DionState(trace, torch.where(lengths > 0, unit, s.basis))

    return DionState(Slot(dtype), MatrixSlot(first_basis, dtype)), step


@matrixwise(short_names={"momentum": "decay"})
def sampled_momentum(
    one_in: int = 4, decay: ScalarOrSchedule = 0.95, *, dtype: WideStateDtype = "auto", view: MatrixView = MatrixView()
):
    r"""Sum the gradients, and return only the rows, or columns, of the sum with the largest magnitudes.

    The slices of each matrix $M = M_{t-1} + G$ along its shorter side are ranked by their sum of magnitudes. The update
    contains the largest slices, and zeros elsewhere. The state keeps the sum, with the returned slices multiplied by
    $\beta$. `orthogonalize` can follow, because zero rows do not affect the polar factor of the others; its cost
    stays the same.

    Args:
        one_in: one of this many slices is returned, rounded up. It is the reciprocal of the authors' ``fraction``.
        decay: $\beta$, in [0, 1).
        dtype: pinned dtype of the sum; "auto" is float32, but float64 for a float64 parameter; None is each parameter's
            own.
        view: which matrices a leaf consists of, as for `orthogonalize`.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto"; at `init`, a leaf is not a
            matrix or does not fit the view.

    Follows Dion2 in Microsoft's ``dion``, which selects along the sharded side of a sharded matrix instead.

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

    def step(u: Tensor, s: SampledMomentumState):
        total = s.trace + u
        chosen = _largest_slices(total, one_in)
        return torch.where(chosen, total, 0.0), SampledMomentumState(torch.where(chosen, total * decay, total))

    return SampledMomentumState(Slot(dtype)), step


def _largest_slices(matrix: Tensor, one_in: int) -> Tensor:
    """Return a mask of the elements in the largest slices along the shorter side."""
    side, other = (-2, -1) if matrix.shape[-2] <= matrix.shape[-1] else (-1, -2)
    sums = matrix.detach().abs().sum(other, keepdim=True)
    order = sums.argsort(dim=side, descending=True, stable=True)  # topk does not define its choice among ties
    places = order.narrow(side, 0, -(-matrix.shape[side] // one_in))
    return torch.zeros_like(sums, dtype=torch.bool).scatter(side, places, True).expand_as(matrix)
