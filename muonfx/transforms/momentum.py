"""Momentum: a running average of gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from muonfx.core import checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms.leafwise import Leaf, Slot, StateDtype, StepCount, leafwise
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew

__all__ = ["DebiasedMomentumState", "MomentumState", "momentum"]


class MomentumState(NamedTuple):
    """State of `momentum`."""

    trace: PyTree
    """The average, like the parameters, in ``dtype``; a `QuantizedState` if it is quantized."""


class DebiasedMomentumState(NamedTuple):
    """State of `momentum` with ``debias=True``."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64."""
    trace: PyTree
    """The average, like the parameters, in ``dtype``; a `QuantizedState` if it is quantized."""


@leafwise(short_names={"momentum": "decay"})
def momentum(
    decay: ScalarOrSchedule = 0.95,
    *,
    nesterov: bool = True,
    debias: bool = False,
    heavy_ball: bool = False,
    dtype: StateDtype = "auto",
):
    r"""Replace gradients by their running average.

    The average is $m_t = \beta m_{t-1} + (1 - \beta) g_t$ and the update is $\beta m_t + (1 - \beta) g_t$ with
    Nesterov's look-ahead, else $m_t$. With ``heavy_ball`` the average is a sum, $m_t = \beta m_{t-1} + g_t$, and the
    look-ahead $g_t + \beta m_t$.

    Args:
        decay: $\beta$, in [0, 1).
        nesterov: use Nesterov's look-ahead.
        debias: divide by the total weight of the average, as Adam does; with Nesterov both terms, as NAdam does:
            $\beta m_t / (1 - \beta^{t+1}) + (1 - \beta) g_t / (1 - \beta^t)$. All parameters share the count t.
        heavy_ball: sum instead of averaging; it has no bias to correct.
        dtype: storage dtype of the average, as for `Slot`. The arithmetic is done in the wider of gradient and state,
            and in at least fp32.

    Returns:
        A transform with a `MomentumState`, or with a `DebiasedMomentumState` if ``debias``.

    Raises:
        ValueError: ``decay`` is out of range, ``debias`` is combined with ``heavy_ball``, or ``dtype`` is a string
            other than "auto".
        TypeError: ``dtype`` is neither a floating-point dtype nor a quantized one.

    Follows ``torch.optim.Muon`` (EMA form), ``torch.optim.SGD`` (heavy ball) and ``optax.contrib.muon`` (bias
    correction).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.momentum(0.9, nesterov=False)
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init({"w": torch.zeros(2)}))
        >>> state.trace["w"]
        tensor([0.1000, 0.1000])
    """
    decay = checks.in_unit_interval("decay", decay)
    if debias and heavy_ball:
        raise ValueError("debias corrects an average; a heavy-ball sum (heavy_ball=True) has no bias to correct")
    slot = Slot(dtype)

    def average(u: Leaf, s: MomentumState):
        trace = s.trace.lerp(u, 1.0 - decay)
        return u.lerp(trace, decay) if nesterov else trace, MomentumState(trace)

    def sum_up(u: Leaf, s: MomentumState):
        trace = s.trace * decay + u
        return u.add(trace, alpha=decay) if nesterov else trace, MomentumState(trace)

    def debiased_average(u: Leaf, s: DebiasedMomentumState):
        count = s.count + 1
        trace = s.trace.lerp(u, 1.0 - decay)
        weight = 1.0 - ew.power(decay, count)
        if nesterov:
            ahead = 1.0 - ew.power(decay, count + 1)
            own = ew.scalar_like(1.0 - decay, weight) / weight
            out = (u * own).add(trace, alpha=ew.scalar_like(decay, ahead) / ahead)
        else:
            out = trace * (1.0 / weight)
        return out, DebiasedMomentumState(count, trace)

    if debias:
        count: Any = StepCount()
        return DebiasedMomentumState(count, slot), debiased_average
    return MomentumState(slot), sum_up if heavy_ball else average
