"""Adafactor's scaling of updates by running mean squares of rows and columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.internal.tracing import fixed
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


class _Shapes(NamedTuple):
    """The shapes of the state of one parameter; (0,) for those that are not used."""

    v_row: tuple[int, ...]
    v_col: tuple[int, ...]
    v: tuple[int, ...]


class _LeafStep(NamedTuple):
    """The update of one leaf, and its new state."""

    update: Tensor
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

    def dims_of(shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return (second largest dim, largest dim), or None if the parameter is not factored."""
        if len(shape) < 2:
            return None
        sides = [fixed(side) for side in shape]  # a tracer cannot sort symbols
        *_, second, largest = sorted(range(len(shape)), key=sides.__getitem__)
        return (second, largest) if shape[second] >= min_dim_size_to_factor else None

    def shapes_of(param: Tensor) -> _Shapes:
        """Return the shapes of the state: (4, 8) has rows of shape (4,) and columns of shape (8,), if factored."""
        shape = tuple(param.shape)
        dims = dims_of(shape)
        if dims is None:
            return _Shapes(v_row=(0,), v_col=(0,), v=shape)
        second, largest = dims
        return _Shapes(v_row=_without(shape, largest), v_col=_without(shape, second), v=(0,))

    def new_zeros(param: Tensor, shape: tuple[int, ...]) -> Tensor:
        return param.new_zeros(shape, dtype=state_dtype(dtype, param.dtype))

    def init(params: PyTree) -> FactoredRmsState:
        return FactoredRmsState(
            count=ew.new_count(device_of(params)),
            v_row=tree.map(lambda p: new_zeros(p, shapes_of(p).v_row), params),
            v_col=tree.map(lambda p: new_zeros(p, shapes_of(p).v_col), params),
            v=tree.map(lambda p: new_zeros(p, shapes_of(p).v), params),
        )

    def step(decay: Tensor, leaf: Tensor, v_row: Tensor, v_col: Tensor, v: Tensor) -> _LeafStep:
        """Return the update of one leaf and its new state.

        In the formulas, g is the gradient, r and c are the running mean squares of rows and columns, and ``decay`` is
        the decay rate of all averages. An unused state is returned as a copy.
        """
        wide = ew.wide_dtype(leaf.dtype, v.dtype)
        beta = decay.to(wide)
        g = leaf.to(wide).contiguous()  # strides would change the rounding of the means
        square = g.square() + ew.scalar_like(eps, g)  # a 0-d leaf would be promoted to the dtype of a tensor eps
        dims = dims_of(tuple(leaf.shape))
        if dims is None:
            new_v = beta * v.to(wide) + (1.0 - beta) * square
            u = g * new_v.rsqrt()
            return _LeafStep(u.to(leaf.dtype), v_row.clone(), v_col.clone(), new_v.to(v.dtype))
        second, largest = dims
        r = beta * v_row.to(wide) + (1.0 - beta) * square.mean(largest)
        c = beta * v_col.to(wide) + (1.0 - beta) * square.mean(second)
        second_in_r = second - 1 if second > largest else second  # r does not have the largest dim
        r_mean = r.mean(second_in_r, keepdim=True)
        u = g * (r / r_mean).rsqrt().unsqueeze(largest) * c.rsqrt().unsqueeze(second)
        return _LeafStep(u.to(leaf.dtype), r.to(v_row.dtype), c.to(v_col.dtype), v.clone())

    def update(updates: PyTree, state: FactoredRmsState, params: PyTree = None, *, donate: Donation = NOTHING):
        """Apply `step` to each leaf, with a decay of the average that grows with the count."""
        count = state.count + 1
        decay = 1.0 - torch.pow(ew.new_number(count, count.device), -decay_rate)
        present = Present(updates)  # the leaves that have a gradient; the others keep their state
        leaves = present.pick(updates)
        v_rows = present.pick(state.v_row)
        v_cols = present.pick(state.v_col)
        vs = present.pick(state.v)
        steps = [step(decay, *tensors) for tensors in zip(leaves, v_rows, v_cols, vs, strict=True)]
        new_updates = present.fill([leaf_step.update for leaf_step in steps])
        return new_updates, FactoredRmsState(
            count=count,
            v_row=present.fill([leaf_step.v_row for leaf_step in steps], state.v_row),
            v_col=present.fill([leaf_step.v_col for leaf_step in steps], state.v_col),
            v=present.fill([leaf_step.v for leaf_step in steps], state.v),
        )

    return init, update


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Return a shape without one of its dims."""
    return shape[:dim] + shape[dim + 1 :]
