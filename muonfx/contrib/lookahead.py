"""Lookahead: slow weights that move towards the trained parameters (fast weights) every few steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.core import Combinator, Donation, Locality, Transform, checks, transform
from muonfx.core.contract import NOTHING, require_transform
from muonfx.core.schedules import Scalar
from muonfx.transforms._pinned import WideStateDtype, copies, new_count, widest
from muonfx.transforms.leafwise import params_for
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew

__all__ = ["LookaheadState", "lookahead"]


class LookaheadState(NamedTuple):
    """State of `lookahead`."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates since the parameters were last reset to the slow weights, int64."""
    slow: PyTree
    """The slow weights, like the parameters, in ``dtype``; use them for evaluation."""
    inner: PyTree
    """The inner transform's state."""


@transform(
    locality=lambda inner, *_, **__: inner.locality,
    combinator=Combinator(Locality.ELEMENT),
    position="last",
)
def lookahead(inner: Transform, sync_period: int, slow_step_size: Scalar, *, dtype: WideStateDtype = "auto"):
    """Run a transform, and every few steps reset the parameters to slow weights that follow them.

    At every ``sync_period``-th update, the slow weights move towards the parameters by the fraction ``slow_step_size``
    of the distance, and the parameters are set to the slow weights. The state of the inner transform is not reset.

    Args:
        inner: the whole chain, including the learning rate; no transform may change the updates after `lookahead`.
        sync_period: the number of updates between two resets, 1 or more.
        slow_step_size: the fraction of the distance that the slow weights move, usually 0.5.
        dtype: storage dtype of the slow weights. "auto" is float32, or float64 for float64 parameters; None is the
            dtype of each parameter.

    The slow weights are a part of the state, whereas Optax keeps fast and slow weights as a pair of trees.

    Raises:
        TypeError: ``sync_period`` is not an int.
        ValueError: ``sync_period`` is below 1, ``slow_step_size`` is negative or not finite, or ``dtype`` is a string
            other than "auto"; at `update`, ``params`` is missing.

    Follows Zhang et al. (arXiv 1907.08610) and Optax's transform of this name.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.lookahead(mfx.scale(-1.0), sync_period=2, slow_step_size=0.5)
        >>> params = {"w": torch.zeros(1)}
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update({"w": -torch.ones(1)}, state, params)
        ...     params = mfx.apply_updates(params, updates)
        ...     print(params, state.slow)
        {'w': tensor([1.])} {'w': tensor([0.])}
        {'w': tensor([1.])} {'w': tensor([1.])}
    """
    require_transform("lookahead: inner", inner)
    checks.positive_int("sync_period", sync_period)
    slow_step_size = checks.at_least("slow_step_size", slow_step_size, 0.0)
    checks.state_dtype("dtype", dtype)

    def init(params: PyTree) -> LookaheadState:
        return LookaheadState(new_count(device_of(params)), copies(params, dtype), inner.functions.init(params))

    def update(
        updates: PyTree, state: LookaheadState, params: PyTree = None, *, donate: Donation = NOTHING, **extras: object
    ):
        params = params_for("lookahead", params)
        out, inner_state = inner.run(updates, state.inner, params, donate=donate, **extras)
        count = (state.count + 1) % sync_period
        is_due = count == 0
        at = Present(out)
        given, held = at.pick(out), at.pick(state.slow)
        u, slow, fast = widest(given, held, at.pick(params))
        moved = ew.lerp(slow, ew.add(fast, u), slow_step_size)
        # Use torch.where: NaN or infinity in the fast weights must not reach the slow weights between syncs.
        back = [torch.where(is_due.to(x.device), m - x, y) for m, x, y in zip(moved, fast, u, strict=True)]
        moved = [torch.where(is_due.to(x.device), m, x) for m, x in zip(moved, slow, strict=True)]
        new_slow = at.fill(ew.store(moved, held, reuse=donate.state), state.slow)
        return at.fill(ew.cast_like(back, given)), LookaheadState(count, new_slow, inner_state)

    return init, update
