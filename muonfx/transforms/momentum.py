"""Momentum: a running average of gradients."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from muonfx import checks
from muonfx import elementwise as ew
from muonfx.core import NOTHING, Donation, transform
from muonfx.transforms._pinned import FORMER_DEFAULT, Pinned, StateDtype, locality_of, new_count, power, widen
from muonfx.tree import Present, PyTree, device_of

__all__ = ["DebiasedMomentumState", "MomentumState", "momentum"]


class MomentumState(NamedTuple):
    """State of `momentum`."""

    trace: PyTree
    """The average, like the parameters, in the pinned dtype; a `CompactState` for a compact one."""


class DebiasedMomentumState(NamedTuple):
    """State of `momentum` with ``debias=True``."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64."""
    trace: PyTree
    """The average, like the parameters, in the pinned dtype; a `CompactState` for a compact one."""


@transform(
    locality=lambda decay, *, nesterov, debias, heavy_ball, dtype: locality_of(dtype),
    reads_params=False,
    former_defaults={"dtype": FORMER_DEFAULT},
)
def momentum(
    decay: float = 0.95,
    *,
    nesterov: bool = True,
    debias: bool = False,
    heavy_ball: bool = False,
    dtype: StateDtype = "auto",
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
        dtype: the dtype of the state, pinned at `init`; "auto" is float32, but float64 for a float64 parameter, so at
            least fp32 and never narrower than the parameter; None is each parameter's own; `int8` or `fp8` store it in
            eight bits. The arithmetic is done in the wider of gradient and state, at least fp32.

    Returns:
        A transform with a `MomentumState`, or a `DebiasedMomentumState`; of locality ELEMENT, or LEAF with a compact
        dtype.

    Raises:
        ValueError: ``decay`` is out of range, ``debias`` is combined with ``heavy_ball``, or ``dtype`` is a string
            other than "auto".
        TypeError: ``dtype`` is neither a floating-point dtype nor a compact one.

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
    held = Pinned("dtype", dtype, "trace")
    if debias and heavy_ball:
        raise ValueError("debias corrects an average; a heavy-ball sum (heavy_ball=True) has no bias to correct")

    def init(params: PyTree) -> MomentumState | DebiasedMomentumState:
        trace = held.zeros(params)
        return DebiasedMomentumState(new_count(device_of(params)), trace) if debias else MomentumState(trace)

    def update(
        updates: PyTree,
        state: MomentumState | DebiasedMomentumState,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
    ):
        at = Present(updates)
        given, old = at.pick(updates), held.read(at, state.trace)
        grads, trace, fresh = widen(given, old)
        may_write, may_reuse = donate.updates or fresh, donate.state or held.is_fresh
        count = state.count + 1 if isinstance(state, DebiasedMomentumState) else None

        def copied(trace: list[Tensor]) -> list[Tensor]:
            return ew.copy(trace, into=grads) if may_write else ew.clone(trace)

        if heavy_ball:
            trace = ew.add(ew.mul(trace, decay, reuse=may_reuse), grads, reuse=may_reuse)
            looked = ew.add(grads, trace, decay, reuse=may_write) if nesterov else copied(trace)
        else:
            trace = ew.lerp(trace, grads, 1.0 - decay, reuse=may_reuse)
            if count is not None:
                looked = _debiased(trace, grads, decay, count, nesterov, may_write)
            else:
                looked = ew.lerp(grads, trace, decay, reuse=may_write) if nesterov else copied(trace)
        kept = held.write(at, trace, old, state.trace, reuse=may_reuse)
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
