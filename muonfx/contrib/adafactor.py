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


class _MeanSquares(NamedTuple):
    """The mean squares of one parameter. An unused one has the shape (0,)."""

    v_row: Tensor
    v_col: Tensor
    v: Tensor


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
        states = [_zeros(param, min_dim_size_to_factor, dtype) for param in present.pick(params)]
        return FactoredRmsState(
            count=ew.new_count(device_of(params)),
            v_row=present.fill([s.v_row for s in states]),
            v_col=present.fill([s.v_col for s in states]),
            v=present.fill([s.v for s in states]),
        )

    def update(updates: PyTree, state: FactoredRmsState, params: PyTree = None, *, donate: Donation = NOTHING):
        """Divide each leaf by the root of its mean square. The decay of the averages grows with the count."""
        count = state.count + 1
        t = ew.new_number(count, count.device)
        beta = 1.0 - torch.pow(t, -decay_rate)
        present = Present(updates)  # the leaves that have a gradient; the others keep their state
        leaves = present.pick(updates)
        old_rows = present.pick(state.v_row)
        old_columns = present.pick(state.v_col)
        old_states = map(_MeanSquares, old_rows, old_columns, present.pick(state.v))
        new_leaves: list[Tensor] = []
        new_states: list[_MeanSquares] = []
        for leaf, old_state in zip(leaves, old_states, strict=True):
            new_leaf, new_state = _step(leaf, old_state, beta, eps, min_dim_size_to_factor)
            new_leaves.append(new_leaf)
            new_states.append(new_state)
        return present.fill(new_leaves), FactoredRmsState(
            count=count,
            v_row=present.fill([s.v_row for s in new_states], state.v_row),
            v_col=present.fill([s.v_col for s in new_states], state.v_col),
            v=present.fill([s.v for s in new_states], state.v),
        )

    return init, update


def _factored_dims(shape: Sequence[int], min_size: int) -> tuple[int, int] | None:
    """Return (second largest dim, largest dim) of a shape, or None if one of them is shorter than ``min_size``.

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


def _zeros(param: Tensor, min_size: int, dtype_option: WideStateDtype) -> _MeanSquares:
    """Return mean squares of zero for a parameter. Those that it does not need are empty, of shape (0,).

    A factored parameter of shape (4, 8) has ``v_row`` of shape (4,) and ``v_col`` of shape (8,); any other has ``v`` of
    its own shape.
    """
    dtype = state_dtype(dtype_option, param.dtype)
    dims = _factored_dims(param.shape, min_size)
    empty = param.new_zeros((0,), dtype=dtype)
    if dims is None:
        v = param.new_zeros(param.shape, dtype=dtype)
        return _MeanSquares(v_row=empty, v_col=empty.clone(), v=v)  # two states never share storage
    second, largest = dims
    row_shape = _without(param.shape, largest)
    column_shape = _without(param.shape, second)
    return _MeanSquares(
        v_row=param.new_zeros(row_shape, dtype=dtype),
        v_col=param.new_zeros(column_shape, dtype=dtype),
        v=empty,
    )


def _step(leaf: Tensor, s: _MeanSquares, beta: Tensor, eps: Scalar, min_size: int) -> tuple[Tensor, _MeanSquares]:
    """Return the update of one leaf and its new mean squares: v of all elements, or r and c of rows and columns.

    Args:
        leaf: the gradient g.
        s: the mean squares before this step. Unused ones are returned as copies.
        beta: the decay rate of the averages, 0-d.
        eps: added to each square.
        min_size: the shortest dim that is factored.
    """
    wide = ew.wide_dtype(leaf.dtype, s.v.dtype)
    beta = beta.to(wide)
    g = leaf.to(wide).contiguous()  # strides would change the rounding of the means
    square = g.square() + ew.scalar_like(eps, g)  # a 0-d leaf would be promoted to the dtype of a tensor eps
    dims = _factored_dims(leaf.shape, min_size)
    if dims is None:
        v = _average(s.v, square, beta)
        u = g * v.rsqrt()
        return u.to(leaf.dtype), _MeanSquares(
            v_row=s.v_row.clone(),
            v_col=s.v_col.clone(),
            v=v.to(s.v.dtype),
        )

    # r has all dims of the leaf except the largest, and c all except the second largest. The mean square of element
    # (i, j) is about r_i c_j / mean(r).
    second, largest = dims
    r = _average(s.v_row, square.mean(largest), beta)
    c = _average(s.v_col, square.mean(second), beta)
    second_in_r = second
    if second > largest:  # r has one dim less in front of it
        second_in_r = second - 1
    relative_r = r / r.mean(second_in_r, keepdim=True)
    row_factor = relative_r.rsqrt().unsqueeze(largest)
    column_factor = c.rsqrt().unsqueeze(second)
    u = g * row_factor * column_factor
    return u.to(leaf.dtype), _MeanSquares(
        v_row=r.to(s.v_row.dtype),
        v_col=c.to(s.v_col.dtype),
        v=s.v.clone(),
    )


def _average(stored: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    """Return ``beta * stored + (1 - beta) * value``, in the dtype of the value."""
    return beta * stored.to(value.dtype) + (1.0 - beta) * value


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return a shape without one of its dims."""
    return (*shape[:dim], *shape[dim + 1 :])
