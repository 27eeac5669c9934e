"""Dion2: orthogonalization of the largest rows or columns of the momentum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx import polar
from muonfx.core import Transform, checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.polar.cost import newton_schulz_cost
from muonfx.polar.iteration import unit_power
from muonfx.transforms.leafwise import Slot, WideStateDtype
from muonfx.transforms.matrices import MatrixView
from muonfx.transforms.matrixwise import MatrixCost, matrixwise
from muonfx.tree import PyTree

_LEVELS = 2.0**24
"""The inverse of the step to which magnitudes are rounded, relative to the largest power of two among them."""


class Dion2State(NamedTuple):
    """State of the transform `scale_by_dion2`: the momentum, a sum of gradients."""

    trace: PyTree
    """The sum $M$ of past gradients, whose selected rows or columns decay: a tree like the parameters."""


def _cost(tx: Transform, device: str, compute: torch.dtype) -> MatrixCost:
    """Return a function from the shape of a matrix to the work of orthogonalizing its selected rows or columns.

    A quarter of the rows of a 1024 by 4096 matrix costs as much as `orthogonalize` of a 256 by 4096 matrix.
    """
    shrink = tx.arguments["shrink"]
    coefficients = tx.arguments["coefficients"]

    def cost(rows: int, columns: int, dtype: torch.dtype) -> float:
        short, long = sorted((rows, columns))
        selected_shape = (_number_of_selected(short, shrink), long)
        compute_dtype = torch.float64 if dtype == torch.float64 else compute
        work = newton_schulz_cost(
            selected_shape, device, dtype=compute_dtype, coefficients=coefficients
        )
        return work.load

    return cost


@matrixwise(short_names={"momentum": "decay"}, position="sets_size", cost=_cost)
def scale_by_dion2(
    shrink: int = 4,
    decay: ScalarOrSchedule = 0.95,
    *,
    coefficients: polar.CoefficientsLike = "polar_express_5",
    dtype: WideStateDtype = "auto",
    view: MatrixView = MatrixView(),
):
    r"""Orthogonalize the rows of the momentum that have the largest norms. The update of other rows is zero.

    Each step adds the gradient to the sum in the state, $M = M_{t-1} + G$, and selects the rows with the largest
    $\sum_j |M_{ij}|$, by default a quarter of all rows. If a matrix has more rows than columns, columns are selected
    instead. The update has the orthogonalized submatrix at the selected rows, and zeros elsewhere. The selected rows of
    $M_t$ are multiplied by $\beta$, and the others are kept (error feedback). Put ``scale_by_shape("spectral")`` after
    it.

    Newton-Schulz runs on the selected rows only. With a quarter of the rows, its products with the long side have a
    sixteenth of the operations.

    The rows are selected from whole matrices (``selection_scope="global"`` of the authors' code), so the update is
    independent of the sharding. So the rank that updates a sharded matrix receives the whole matrix and sends the whole
    update: as many bytes as `orthogonalize`. The authors' default selects rows within each shard, which saves
    bytes, but its update depends on the number of shards.

    The norms are sums of integers: elements are rounded toward zero to multiples of $2^{-24}$ of the largest element,
    rounded down to a power of two. Such sums are exact in any order, so all kernels and batch sizes select the same
    rows. Of rows with equal norms, the first is selected.

    Args:
        shrink: the shorter side divided by ``shrink``, rounded up, is the number of selected rows. It is the inverse of
            the authors' fraction of 0.25.
        decay: $\beta$, in [0, 1).
        coefficients: the coefficients of the Newton-Schulz iteration, as for `orthogonalize`.
        dtype: storage dtype of the sum. "auto" is float32, or float64 for float64 parameters; None is the dtype of each
            parameter.
        view: a `MatrixView`, which divides each parameter into matrices, as for `orthogonalize`.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto"; at `init`, a leaf is not a
            matrix or does not fit the view.

    Follows Dion2 (Ahn, Amsel and Langford, arXiv 2512.16928).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.scale_by_dion2(2, coefficients="polar_express")
        >>> grads = {"w": torch.tensor([[0.0, 1.0], [0.0, -5.0]])}
        >>> first, state = tx.update(grads, tx.init(grads))
        >>> first["w"].round(decimals=2) + 0.0, state.trace["w"]
        (tensor([[ 0.,  0.],
                [ 0., -1.]]), tensor([[ 0.0000,  1.0000],
                [ 0.0000, -4.7500]]))
    """
    checks.positive_int("shrink", shrink)
    decay = checks.in_unit_interval("decay", decay)
    polar.explain((0, 0), coefficients=coefficients)  # raises if they are malformed

    def step(u: Tensor, s: Dion2State) -> tuple[Tensor, Dion2State]:
        """Orthogonalize the largest rows of the momentum, or columns if there are fewer, and decay these alone."""
        m = s.trace + u
        rows, columns = m.shape[-2:]
        side = -2
        if rows > columns:
            side = -1
        number = _number_of_selected(m.shape[side], shrink)
        indices = _indices_of_largest(m, side, number)
        selected = m.take_along_dim(indices, side)
        direction = polar.orthogonalize(selected, coefficients=coefficients)

        element_indices = indices.expand_as(selected)
        zeros = torch.zeros_like(m)
        update = zeros.scatter(side, element_indices, direction)
        new_m = m.scatter(side, element_indices, decay * selected)
        return update, Dion2State(trace=new_m)

    return Dion2State(trace=Slot(dtype)), step


def _number_of_selected(side: int, shrink: int) -> int:
    """Return the number of selected rows: ``side / shrink``, rounded up."""
    return (side + shrink - 1) // shrink


def _indices_of_largest(x: Tensor, side: int, number: int) -> Tensor:
    """Return the indices of the rows (``side=-2``) or columns (-1) with the largest sums of magnitudes, in order.

    The result has the shape (..., number, 1) for rows, or (..., 1, number) for columns.

    >>> x = torch.tensor([[5.0, 0.0], [1.0, 1.0], [0.0, 7.0]])
    >>> _indices_of_largest(x, side=-2, number=2)
    tensor([[0],
            [2]])
    """
    x = x.detach()
    # Integers below 2^25, as elements times `unit_power` are below 2. In fp64, their sums are exact for up to 2^28
    # elements, so that no rounding depends on the order of the summands.
    scaled = x * unit_power(x) * _LEVELS
    magnitudes = scaled.abs().trunc()
    summed_side = -1 if side == -2 else -2
    sums = magnitudes.sum(summed_side, keepdim=True, dtype=torch.float64)
    # Select a row with NaN, so that the update shows it.
    sums = sums.nan_to_num(nan=torch.inf, posinf=torch.inf)
    order = sums.argsort(dim=side, descending=True, stable=True)
    largest = order.narrow(side, 0, number)
    return largest.sort(dim=side).values
