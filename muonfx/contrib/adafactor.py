"""Adafactor's scaling of updates by running mean squares of rows and columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms.leafwise import WideStateDtype, state_dtype
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew


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

    def dims_of(shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return (second largest dim, largest dim), or None if the parameter is not factored."""
        if len(shape) < 2:
            return None
        *_, second, largest = sorted(range(len(shape)), key=shape.__getitem__)
        return (second, largest) if shape[second] >= min_dim_size_to_factor else None

    def shapes_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of ``v_row``, ``v_col`` and ``v`` in the state of a parameter of this shape."""
        dims = dims_of(shape)
        if dims is None:
            return (0,), (0,), shape
        second, largest = dims
        return _without(shape, largest), _without(shape, second), (0,)

    def init(params: PyTree) -> FactoredRmsState:
        def zeros(field: int) -> PyTree:
            return tree.map(lambda p: p.new_zeros(shapes_of(tuple(p.shape))[field], dtype=dtype_of(p)), params)

        return FactoredRmsState(ew.new_count(device_of(params)), zeros(0), zeros(1), zeros(2))

    def dtype_of(param: Tensor) -> torch.dtype:
        return state_dtype(dtype, param.dtype)

    def step(decay: Tensor, leaf: Tensor, v_row: Tensor, v_col: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return the update of one leaf and its new ``v_row``, ``v_col`` and ``v``."""
        wide = ew.wide_dtype(leaf.dtype, v.dtype)
        beta = decay.to(wide)
        g = leaf.to(wide).contiguous()  # strides would change the rounding of the means
        square = g.square() + ew.scalar_like(eps, g)  # a 0-d leaf would be promoted to the dtype of a tensor eps
        dims = dims_of(tuple(leaf.shape))
        if dims is None:
            new_v = beta * v.to(wide) + (1.0 - beta) * square
            u = g * new_v.rsqrt()
            return u.to(leaf.dtype), v_row.clone(), v_col.clone(), new_v.to(v.dtype)
        second, largest = dims
        r = beta * v_row.to(wide) + (1.0 - beta) * square.mean(largest)
        c = beta * v_col.to(wide) + (1.0 - beta) * square.mean(second)
        r_mean = r.mean(second - (second > largest), keepdim=True)  # `r` does not have the largest dim
        u = g * (r / r_mean).rsqrt().unsqueeze(largest) * c.rsqrt().unsqueeze(second)
        return u.to(leaf.dtype), r.to(v_row.dtype), c.to(v_col.dtype), v.clone()

    def update(updates: PyTree, state: FactoredRmsState, params: PyTree = None, *, donate: Donation = NOTHING):
        """Apply `step` to each leaf, with a decay of the average that grows with the count."""
        present = Present(updates)
        count = state.count + 1
        decay = 1.0 - torch.pow(ew.new_number(count, count.device), -decay_rate)
        operands = [present.pick(values) for values in (updates, state.v_row, state.v_col, state.v)]
        results = [step(decay, *tensors) for tensors in zip(*operands, strict=True)]

        def filled(index: int, old: PyTree) -> PyTree:
            return present.fill([result[index] for result in results], old)

        v_row = filled(1, state.v_row)
        v_col = filled(2, state.v_col)
        v = filled(3, state.v)
        return filled(0, None), FactoredRmsState(count, v_row, v_col, v)

    return init, update


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]
