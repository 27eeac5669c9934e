"""Constant, linear, cosine, polynomial, exponential and cyclic schedules, and sequences of schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from muonfx.core import checks
from muonfx.core.schedules.base import Scalar, Schedule, ScheduleFunction, schedule


@schedule
def constant_schedule(value: Scalar) -> ScheduleFunction:
    """Return the same value at every step.

    >>> constant_schedule(0.5)(100)
    0.5
    """
    checks.finite("value", value)
    return lambda count: value + 0.0 * count


def _fraction(count: Tensor, steps: int) -> Tensor:
    """Return the elapsed fraction of a phase in [0, 1]; 1 if the phase has no steps."""
    return (count / steps).clamp(0.0, 1.0) if steps else torch.ones_like(count)


@schedule
def linear_schedule(start: Scalar, end: Scalar, steps: int) -> ScheduleFunction:
    """Change linearly from `start` to `end` in `steps` steps, then stay at `end`.

    Args:
        start: the value at step 0.
        end: the value at step ``steps`` and after.
        steps: the length in steps.

    >>> [linear_schedule(0.0, 1.0, 4)(count) for count in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """
    checks.finite("start", start)
    checks.finite("end", end)
    checks.whole_number("steps", steps)
    return lambda count: start + (end - start) * _fraction(count, steps)


@schedule
def cosine_decay_schedule(start: Scalar, steps: int, end: Scalar = 0.0) -> ScheduleFunction:
    """Decay from `start` to `end` along half a cosine in `steps` steps, then stay at `end`.

    >>> [round(cosine_decay_schedule(1.0, 10)(count), 3) for count in (0, 5, 10)]
    [1.0, 0.5, 0.0]
    """
    checks.finite("start", start)
    checks.finite("end", end)
    checks.whole_number("steps", steps)
    return lambda count: end + (start - end) * 0.5 * (1.0 + torch.cos(math.pi * _fraction(count, steps)))


@schedule
def polynomial_schedule(
    start: Scalar, end: Scalar, steps: int, power: Scalar = 1.0, begin: int = 0
) -> ScheduleFunction:
    r"""Change from `start` to `end` in proportion to $(1 - t/T)^p$, then stay at `end`.

    Args:
        start: the value until step ``begin``.
        end: the value ``steps`` later and after.
        steps: the length in steps.
        power: the exponent $p$, positive; 1 is linear.
        begin: the step at which the change starts.

    >>> [polynomial_schedule(1.0, 0.0, 4, power=2.0)(count) for count in (0, 2, 4, 9)]
    [1.0, 0.25, 0.0, 0.0]
    """
    checks.finite("start", start)
    checks.finite("end", end)
    checks.positive("power", power)
    checks.whole_number("steps", steps)
    checks.whole_number("begin", begin)
    return lambda count: end + (start - end) * torch.pow(1.0 - _fraction(count - begin, steps), _tensor(power, count))


@schedule
def exponential_decay(
    start: Scalar, steps: int, rate: Scalar, *, begin: int = 0, staircase: bool = False, end: Scalar | None = None
):
    """Decay exponentially: the value is multiplied by `rate` in every `steps` steps, smoothly or in a staircase.

    Args:
        start: the value until step ``begin``.
        steps: the number of steps in which the value is multiplied by ``rate``; 1 or more.
        rate: the factor, positive.
        begin: the step at which the change starts.
        staircase: change at multiples of ``steps`` instead of at every step.
        end: the bound of the value: a lower bound if ``rate`` is below 1, else an upper bound. None: no bound.

    >>> [exponential_decay(1.0, 2, 0.25)(count) for count in (0, 1, 2, 4)]
    [1.0, 0.5, 0.25, 0.0625]
    """
    checks.finite("start", start)
    checks.positive_int("steps", steps)
    checks.positive("rate", rate)
    checks.whole_number("begin", begin)
    if end is not None:
        checks.finite("end", end)

    def value(count: Tensor) -> Tensor:
        times = ((count - begin) / steps).clamp(min=0.0)
        factor = _tensor(rate, count)
        found = start * torch.pow(factor, times.floor() if staircase else times)
        if end is None:
            return found
        bound = _tensor(end, count)
        return torch.where(factor < 1.0, torch.maximum(found, bound), torch.minimum(found, bound))

    return value


def _tensor(number: Scalar, like: Tensor) -> Tensor:
    return number if isinstance(number, Tensor) else torch.full((), number, dtype=like.dtype, device=like.device)


@schedule
def warmup_cosine_decay_schedule(
    peak: Scalar, warmup_steps: int, total_steps: int, start: Scalar = 0.0, end: Scalar = 0.0
):
    """Warm up linearly to a peak, then decay along half a cosine until the last step.

    Args:
        peak: the value at step ``warmup_steps``.
        warmup_steps: the length of the warmup.
        total_steps: the step at which ``end`` is reached, warmup included.
        start: the value at step 0; unused if ``warmup_steps`` is 0.
        end: the value from ``total_steps`` on.

    Raises:
        ValueError: ``warmup_steps`` is larger than ``total_steps``.

    >>> [round(warmup_cosine_decay_schedule(1.0, 2, 10)(count), 3) for count in (0, 1, 2, 6, 10)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _within(warmup_steps, total_steps, "warmup_steps")
    return joined(
        [linear_schedule(start, peak, warmup_steps), cosine_decay_schedule(peak, total_steps - warmup_steps, end)],
        [warmup_steps],
    )


@schedule
def warmup_stable_decay_schedule(
    peak: Scalar, warmup_steps: int, decay_steps: int, total_steps: int, start: Scalar = 0.0, end: Scalar = 0.0
):
    """Warm up linearly, hold the peak, and decay linearly over the last ``decay_steps`` steps.

    Raises:
        ValueError: ``warmup_steps + decay_steps`` is larger than ``total_steps``.

    >>> wsd = warmup_stable_decay_schedule(1.0, 2, 4, 10)
    >>> [wsd(count) for count in (0, 1, 2, 5, 6, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    checks.whole_number("decay_steps", decay_steps)
    _within(warmup_steps + decay_steps, total_steps, "warmup_steps + decay_steps")
    fall_at = total_steps - decay_steps
    return joined(
        [linear_schedule(start, peak, warmup_steps), constant_schedule(peak), linear_schedule(peak, end, decay_steps)],
        [warmup_steps, fall_at],
    )


def _within(steps: int, total_steps: int, name: str) -> None:
    checks.whole_number(name, steps)
    checks.whole_number("total_steps", total_steps)
    if steps > total_steps:
        raise ValueError(f"{name} must be at most total_steps ({total_steps}), found {steps}")


@schedule
def join_schedules(schedules: list[Schedule], boundaries: list[int]):
    """Join schedules in sequence. Each counts its steps from its own start.

    Args:
        schedules: the schedules in order, one more than ``boundaries``.
        boundaries: the ascending steps at which the next schedule starts.

    Raises:
        ValueError: there is not one schedule more than boundaries, or the boundaries do not ascend.

    >>> joined = join_schedules([constant_schedule(1.0), linear_schedule(1.0, 0.0, 10)], [5])
    >>> [joined(count) for count in (0, 5, 10, 15)]
    [1.0, 1.0, 0.5, 0.0]
    """
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(f"expected one schedule more than boundaries, found {len(schedules)} and {len(boundaries)}")
    if any(later <= earlier for earlier, later in pairwise(boundaries)):
        raise ValueError(f"boundaries must rise, found {boundaries}")
    return joined(schedules, boundaries)


def joined(schedules: list[Schedule], boundaries: list[int]) -> Callable[[Tensor], Tensor]:
    """Return the function of `join_schedules` without checking the arguments."""

    def value(count: Tensor) -> Tensor:
        result = schedules[0](count)
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            result = torch.where(count < boundary, result, following(count - boundary))
        return result

    return value


@schedule
def onecycle_schedule(
    peak: float,
    total_steps: int,
    interpolation: Literal["linear", "cosine"] = "linear",
    *,
    pct_start: float = 0.3,
    pct_final: float = 0.85,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
):
    """The 1cycle policy: rise to a peak, fall to the first value, then fall to the last; "cosine" falls directly.

    Args:
        peak: the largest value.
        total_steps: the length in steps.
        interpolation: "linear" or "cosine".
        pct_start: the share of the steps after which the peak is reached.
        pct_final: the share of the steps after which the first value is reached again; for lines only.
        div_factor: the peak over the first value.
        final_div_factor: the first value over the last.

    Follows Smith and Topin (arXiv 1708.07120); ``linear_onecycle_schedule`` and ``cosine_onecycle_schedule`` of Optax.

    >>> [onecycle_schedule(1.0, 100, div_factor=4.0, final_div_factor=5.0)(count) for count in (0, 15, 30, 85, 100)]
    [0.25, 0.625, 1.0, 0.25, 0.05]
    """
    checks.finite("peak", peak)
    checks.positive_int("total_steps", total_steps)
    for name, share in {"pct_start": pct_start, "pct_final": pct_final}.items():
        checks.at_least(name, share, 0.0)
        if isinstance(share, float) and share > 1.0:
            raise ValueError(f"{name} must be at most 1, found {share!r}")
    checks.positive("div_factor", div_factor)
    checks.positive("final_div_factor", final_div_factor)

    def at(share: float | Tensor) -> float | Tensor:
        return (share * total_steps).floor() if isinstance(share, Tensor) else math.floor(share * total_steps)

    low = peak / div_factor
    points = [(0, low), (at(pct_start), peak), (at(pct_final), low), (total_steps, low / final_div_factor)]
    return _through(
        [point for place, point in enumerate(points) if place != 2 or interpolation == "linear"], interpolation
    )


def _through(points: list[tuple[float | Tensor, float | Tensor]], interpolation: str) -> Callable[[Tensor], Tensor]:
    """Return the function of the count that passes through values at given steps, and then stays."""

    def value(count: Tensor) -> Tensor:
        result = points[0][1] + 0.0 * count
        for (begin, low), (end, high) in pairwise(points):
            done = (count - begin) / _tensor(end - begin, count).clamp(min=1.0)
            done = 0.5 - 0.5 * torch.cos(math.pi * done) if interpolation == "cosine" else done
            result = torch.where(count >= begin, low + (high - low) * done, result)
            result = torch.where(count >= end, high, result)
        return result

    return value


@schedule
def sgdr_schedule(
    peak: Scalar,
    steps: int,
    cycles: int,
    *,
    growth: int = 1,
    decay: Scalar = 1.0,
    warmup_steps: int = 0,
    start: Scalar = 0.0,
    end: Scalar = 0.0,
):
    """Repeat a cosine decay with warm restarts (SGDR).

    Args:
        peak: the largest value of the first cycle.
        steps: the length of the first cycle.
        cycles: the number of cycles; after the last one the value stays.
        growth: the length of each cycle over the length of the previous cycle.
        decay: the peak of each cycle over the peak of the previous cycle.
        warmup_steps: the steps of each cycle in which it rises to its peak.
        start: the value from which each cycle rises.
        end: the value to which each cycle falls.

    Follows Loshchilov and Hutter (arXiv 1608.03983); `join_schedules` combines any other cycles.

    >>> [round(sgdr_schedule(1.0, 4, 2, growth=2)(count), 3) for count in (0, 2, 4, 8, 12)]
    [1.0, 0.5, 1.0, 0.5, 0.0]
    """
    checks.positive_int("steps", steps)
    checks.positive_int("cycles", cycles)
    checks.positive_int("growth", growth)
    checks.finite("decay", decay)
    lengths = [steps * growth**cycle for cycle in range(cycles)]
    parts = [
        warmup_cosine_decay_schedule(peak * decay**cycle, warmup_steps, length, start, end)
        for cycle, length in enumerate(lengths)
    ]
    return joined(parts, [sum(lengths[:cycle]) for cycle in range(1, cycles)])
