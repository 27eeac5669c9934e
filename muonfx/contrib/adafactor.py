"""Adafactor's scaling of updates by running mean squares of rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.core import Donation, Locality, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.internal.tracing import fixed
from muonfx.transforms.leafwise import WideStateDtype, state_dtype
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew
from muonfx.tree.elementwise import Scalar


class FactoredRmsState(NamedTuple):
    """State of `scale_by_factored_rms`: mean squares of rows and columns, or of elements if a side is short."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of updates so far, 0-d int64."""
    v_row: PyTree
    """Running mean squares over the parameter's largest dim, without this dim; shape (0,) if not factored."""
    v_col: PyTree
    """Running mean squares over the second largest dim, without this dim; shape (0,) if not factored."""
    v: PyTree
    """Running squares of all elements, like the parameters; shape (0,) if factored."""


# LEAF even if nothing is factored, because this choice depends on the shape of the whole leaf.
@transform(locality=Locality.LEAF, reads_params=False, position="sets_size")
def scale_by_factored_rms(
    *,
    decay_rate: ScalarOrSchedule = 0.8,
    min_dim_size_to_factor: int = 128,
    eps: ScalarOrSchedule = 1e-30,
    dtype: WideStateDtype = "auto",
):
    r"""Divide gradients by the root of a running mean square that is stored for rows and columns only, as in Adafactor.

    The mean square of element (i, j) is estimated as $r_i c_j / \bar r$ from the running mean squares $r$ of the rows
    and $c$ of the columns. The decay rate of both averages at step t is $1 - t^{-\rho}$.

    Args:
        decay_rate: the exponent $\rho$, not negative.
        min_dim_size_to_factor: a parameter is factored along its two largest dims if both are at least this long.
            Otherwise the mean square of every element is stored.
        eps: added to each square, not negative.
        dtype: storage dtype of the mean squares. "auto" is float32, or float64 for float64 parameters; None is the
            dtype of each parameter.

    Raises:
        ValueError: an argument is out of range, or the dtype is a string other than "auto".

    Follows Shazeer and Stern (arXiv 1804.04235) and Optax's ``scale_by_factored_rms``, which calls ``eps`` ``epsilon``.
    With `clip_by_block_rms` after it, it is Adafactor.

    The square of a gradient beyond 1.8e19 overflows fp32. The mean squares of its row and column are then infinite, and
    its updates are NaN or zero. `clip_by_global_norm` in front keeps squares finite.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.scale_by_factored_rms(min_dim_size_to_factor=2)
        >>> grads = {"w": torch.tensor([[1.0, 2.0], [2.0, 4.0]])}
        >>> updates, state = tx.update(grads, tx.init({"w": torch.zeros(2, 2)}))
        >>> updates["w"].sum(), state.v_row["w"]
        (tensor(4.), tensor([ 2.5000, 10.0000]))
    """
    decay_rate = checks.at_least("decay_rate", decay_rate, 0.0)
    checks.positive_int("min_dim_size_to_factor", min_dim_size_to_factor)
    eps = checks.at_least("eps", eps, 0.0)
    checks.state_dtype("dtype", dtype)

    def init(params: PyTree) -> FactoredRmsState:
        """Return mean squares of zero: of rows and columns for a factored parameter, else of all elements."""
        present = Present(params)
        v_row: list[Tensor] = []
        v_col: list[Tensor] = []
        v: list[Tensor] = []
        for param in present.pick(params):
            stored_dtype = state_dtype(dtype, param.dtype)
            row_shape, column_shape, element_shape = _shapes(param.shape, min_dim_size_to_factor)
            v_row.append(param.new_zeros(row_shape, dtype=stored_dtype))
            v_col.append(param.new_zeros(column_shape, dtype=stored_dtype))
            v.append(param.new_zeros(element_shape, dtype=stored_dtype))
        return FactoredRmsState(
            count=ew.new_count(device_of(params)),
            v_row=present.fill(v_row),
            v_col=present.fill(v_col),
            v=present.fill(v),
        )

    def update(
        updates: PyTree,
        state: FactoredRmsState,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
    ):
        """Divide each leaf by the root of its mean square. The decay of the averages grows with the count."""
        count = state.count + 1
        t = ew.new_number(count, count.device)
        beta = 1.0 - torch.pow(t, -decay_rate)

        present = Present(updates)  # the leaves that have a gradient; the others keep their state
        # The gradients; the loop replaces each by its update, and each mean square likewise.
        u = present.pick(updates)
        v_row = present.pick(state.v_row)
        v_col = present.pick(state.v_col)
        v = present.pick(state.v)
        for index, g in enumerate(u):
            u[index], v_row[index], v_col[index], v[index] = _step(
                g, v_row[index], v_col[index], v[index], beta, eps, min_dim_size_to_factor
            )
        return present.fill(u), FactoredRmsState(
            count=count,
            v_row=present.fill(v_row, state.v_row),
            v_col=present.fill(v_col, state.v_col),
            v=present.fill(v, state.v),
        )

    return init, update


def _factored_dims(shape: Sequence[int], min_size: int) -> tuple[int, int] | None:
    """Return the two dims over which second moments are factored: (second largest dim, largest dim) of a shape.

    None if one of them is shorter than ``min_size``, so that factoring would save little.

    >>> _factored_dims((256, 3, 512), 128)
    (0, 2)
    """
    if len(shape) < 2:
        return None
    sizes = [fixed(size) for size in shape]  # a tracer cannot sort symbols
    dims = sorted(range(len(shape)), key=sizes.__getitem__)
    second = dims[-2]
    largest = dims[-1]
    if shape[second] < min_size:
        return None
    return second, largest


def _shapes(
    shape: Sequence[int], min_size: int
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return the shapes of the state of a parameter: of ``v_row``, ``v_col`` and ``v``.

    A factored parameter has mean squares of rows and of columns, any other one squares of all elements. A tensor that
    is not used has the shape (0,).

    >>> _shapes((4, 8), 4), _shapes((4, 8), 128)
    (((4,), (8,), (0,)), ((0,), (0,), (4, 8)))
    """
    dims = _factored_dims(shape, min_size)
    if dims is None:
        return (0,), (0,), shape
    second, largest = dims
    return _without(shape, largest), _without(shape, second), (0,)


def _step(
    leaf: Tensor, v_row: Tensor, v_col: Tensor, v: Tensor, beta: Tensor, eps: Scalar, min_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the update of one leaf, ``g / sqrt(v)``, and its new mean squares: of rows, of columns, of elements.

    v is the running average of the squares of the gradient g. For a matrix with two long dims, only the means r of its
    rows and c of its columns are stored, and v is about ``r_i c_j / mean(r)`` at element (i, j).

    Args:
        leaf: the gradient g.
        v_row: r before this step. It is empty if v is stored, and is then returned as a copy.
        v_col: c before this step, likewise.
        v: v before this step, which is empty if r and c are stored.
        beta: the decay rate of the averages, 0-d.
        eps: added to each square.
        min_size: the shortest dim that is factored.
    """
    wide = ew.wide_dtype(leaf.dtype, v.dtype)
    beta = beta.to(wide)
    g = leaf.to(wide).contiguous()  # strides would change the rounding of the means
    # A 0-d leaf would be promoted to the dtype of a tensor eps.
    square = g.square() + ew.scalar_like(eps, g)
    dims = _factored_dims(leaf.shape, min_size)
    if dims is None:  # not factored: as in RMSProp
        new_v = _average(v, square, beta)
        u = g * new_v.rsqrt()
        return u.to(leaf.dtype), v_row.clone(), v_col.clone(), new_v.to(v.dtype)

    # r has all dims of the leaf except the largest, and c all except the second largest.
    second, largest = dims
    r = _average(v_row, square.mean(largest), beta)
    c = _average(v_col, square.mean(second), beta)
    u = _divided_by_root(g, r, c, second, largest)
    return u.to(leaf.dtype), r.to(v_row.dtype), c.to(v_col.dtype), v.clone()


def _divided_by_root(g: Tensor, r: Tensor, c: Tensor, second: int, largest: int) -> Tensor:
    """Divide a gradient g by the root of its mean square, which is about ``r_i c_j / mean(r)`` at element (i, j).

    r has no dim ``largest``, and c has no dim ``second``, the dims of the columns and of the rows.
    """
    r = r.unsqueeze(largest)
    c = c.unsqueeze(second)
    relative_r = r / r.mean(second, keepdim=True)
    return g * relative_r.rsqrt() * c.rsqrt()


def _average(stored: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    """Return ``beta * stored + (1 - beta) * value``, in the dtype of the value."""
    return beta * stored.to(value.dtype) + (1.0 - beta) * value


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return a shape without one of its dims."""
    return (*shape[:dim], *shape[dim + 1 :])
