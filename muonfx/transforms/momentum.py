"""Momentum: a running average of gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx import checks
from muonfx import elementwise as ew
from muonfx.core import NOTHING, Donation, Locality, transform
from muonfx.transforms._pinned import new_count, power, store, widen, zeros
from muonfx.tree import Present, PyTree, device_of

__all__ = ["DebiasedMomentumState", "MomentumState", "momentum"]


class MomentumState(NamedTuple):
    """State of `momentum`."""

    trace: PyTree
    """The average, like the parameters, in the pinned dtype."""


class DebiasedMomentumState(NamedTuple):
    """State of `momentum` with ``debias=True``."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64."""
    trace: PyTree
    """The average, like the parameters, in the pinned dtype."""


@transform(locality=Locality.ELEMENT)
def momentum(
    decay: float = 0.95,
    *,
    nesterov: bool = True,
    debias: bool = False,
    heavy_ball: bool = False,
    dtype: torch.dtype | None = torch.float32,
):
    r"""Average gradients over time.

    $m_t = \beta m_{t-1} + (1 - \beta) g_t$ and the update is $\beta m_t + (1 - \beta) g_t$ with Nesterov's look-ahead,
    else $m_t$. With ``heavy_ball`` the average is a sum, $m_t = \beta m_{t-1} + g_t$, and the look-ahead $g_t + \beta
    m_t$.

    Args:
        decay: $\beta$, in [0, 1).
        nesterov: look one step ahead.
        debias: divide by the weight that the average has gathered, as Adam does; with Nesterov both terms, as NAdam
            does: $\beta m_t / (1 - \beta^{t+1}) + (1 - \beta) g_t / (1 - \beta^t)$.
            The count t is one for all parameters.
        heavy_ball: sum instead of averaging; it has no bias to correct.
        dtype: the dtype of the state, pinned at `init`; None pins each parameter's own. The arithmetic is done in the
            wider of gradient and state, at least fp32.

    Returns:
        A transform of locality ELEMENT with a `MomentumState`, or a `DebiasedMomentumState`.

    Raises:
        ValueError: ``decay`` is out of range, or ``debias`` is combined with ``heavy_ball``.
        TypeError: ``dtype`` is not a floating-point dtype.

    Follows ``torch.optim.Muon`` (EMA form), ``torch.optim.SGD`` (heavy ball) and ``optax.contrib.muon`` (bias
    correction).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.momentum(0.9, nesterov=False)
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init({"w": torch.zeros(2)}))
        >>> state.trace["w"]
        tensor([0.1000, 0.1000])
    """
    checks.in_unit_interval("decay", decay)
    checks.floating_dtype("dtype", dtype)
    if debias and heavy_ball:
        raise ValueError("debias corrects an average; a heavy-ball sum (heavy_ball=True) has no bias to correct")

    def init(params: PyTree) -> MomentumState | DebiasedMomentumState:
        trace = zeros(params, dtype)
        return DebiasedMomentumState(new_count(device_of(params)), trace) if debias else MomentumState(trace)

    def update(
        updates: PyTree,
        state: MomentumState | DebiasedMomentumState,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
    ):
        at = Present(updates)
        given, old = at.pick(updates), at.pick(state.trace)
        grads, trace, fresh = widen(given, old)
        may_write = donate.updates or fresh
        count = state.count + 1 if isinstance(state, DebiasedMomentumState) else None

        def copied(trace: list[Tensor]) -> list[Tensor]:
            return ew.copy(trace, into=grads) if may_write else ew.clone(trace)

        if heavy_ball:
            trace = ew.add(ew.mul(trace, decay, reuse=donate.state), grads, reuse=donate.state)
            looked = ew.add(grads, trace, decay, reuse=may_write) if nesterov else copied(trace)
        else:
            trace = ew.lerp(trace, grads, 1.0 - decay, reuse=donate.state)
            if count is not None:
                looked = _debiased(trace, grads, decay, count, nesterov, may_write)
            else:
                looked = ew.lerp(grads, trace, decay, reuse=may_write) if nesterov else copied(trace)
        kept = at.fill(store(trace, old, reuse=donate.state), state.trace)
        out = at.fill(ew.cast_like(looked, given))
        return out, MomentumState(kept) if count is None else DebiasedMomentumState(count, kept)

    return init, update


def _debiased(
    trace: list[Tensor], grads: list[Tensor], decay: float | Tensor, count: Tensor, nesterov: bool, may_write: bool
) -> list[Tensor]:
    if not nesterov:
        return ew.mul(trace, 1.0 / (1.0 - power(decay, count)))
    of_grads = (1.0 - decay) / (1.0 - power(decay, count))
    return ew.add(ew.mul(grads, of_grads, reuse=may_write), trace, decay / (1.0 - power(decay, count + 1)), reuse=True)
