"""Schedules: a hyperparameter as a function of the step count.

A `Schedule` is a recorded value like a transform: it prints as the code that built it, compares, pickles, and its
numeric arguments are leaves that can be batched or differentiated. Called with the count held in a transform's state
(a 0-d integer tensor) it returns a 0-d tensor and branches on nothing; called with an int it returns a float, for a
look or a plot. Step 0 is the first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from muonfx import checks
from muonfx.recorded import Recorded, make_factory
from muonfx.tracing import is_wrapped

__all__ = ["Schedule", "constant", "cosine", "join", "linear", "schedule", "warmup_cosine", "warmup_stable_decay"]


class Schedule(Recorded):
    """A function of the step count that remembers its arguments; made by a factory that `schedule` decorates.

    >>> linear(1.0, 0.0, 10)
    linear(start=1.0, end=0.0, steps=10)
    >>> linear(1.0, 0.0, 10)(5)
    0.5
    """

    def __call__(self, count: int | Tensor) -> Any:
        """Evaluate at a step count: a float for an int, a 0-d tensor for a tensor."""
        function = self.built
        if isinstance(count, Tensor):
            return function(count.to(torch.float32 if count.device.type == "mps" else torch.float64))
        value = function(torch.tensor(float(count), dtype=torch.float64))
        return float(value) if not isinstance(value, Tensor) or not _is_traced(value) else value


def _is_traced(value: Tensor) -> bool:
    return value.requires_grad or is_wrapped(value)


def schedule(constructor: Callable[..., Callable[[Tensor], Any]] | None = None, *, name: str | None = None) -> Any:
    """Make a factory of schedules from a function that returns a function of the count (a 0-d floating tensor).

    Args:
        constructor: the function.
        name: a public name that stays when the function moves, as in `muonfx.transform`.

    Raises:
        ValueError: ``name`` is not made of identifiers and dots.

    >>> @schedule
    ... def inverse_sqrt(rate: float):
    ...     return lambda count: rate / (count + 1).sqrt()
    >>> inverse_sqrt(2.0)(3)
    1.0
    """

    def decorate(constructor: Callable[..., Callable[[Tensor], Any]]) -> Callable[..., Schedule]:
        return make_factory(Schedule, constructor, name=name)

    return decorate if constructor is None else decorate(constructor)


def _function(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Give a lambda its type."""
    return function


@schedule
def constant(value: float):
    """Hold one value.

    >>> constant(0.5)(100)
    0.5
    """
    checks.finite("value", value)
    return _function(lambda count: value + 0.0 * count)


def _fraction(count: Tensor, steps: int) -> Tensor:
    """How much of a phase has passed, in [0, 1]; a phase of no steps has passed at once."""
    return (count / steps).clamp(0.0, 1.0) if steps else torch.ones_like(count)


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an int of 0 or more, found {value!r}")


@schedule
def linear(start: float, end: float, steps: int):
    """Go from one value to another on a straight line, then stay.

    Args:
        start: the value at step 0.
        end: the value at step ``steps`` and after.
        steps: the length in steps.

    >>> [linear(0.0, 1.0, 4)(count) for count in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """
    checks.finite("start", start)
    checks.finite("end", end)
    _whole("steps", steps)
    return _function(lambda count: start + (end - start) * _fraction(count, steps))


@schedule
def cosine(start: float, steps: int, end: float = 0.0):
    """Go from one value to another on half a cosine, then stay.

    >>> [round(cosine(1.0, 10)(count), 3) for count in (0, 5, 10)]
    [1.0, 0.5, 0.0]
    """
    checks.finite("start", start)
    checks.finite("end", end)
    _whole("steps", steps)
    return _function(lambda count: end + (start - end) * 0.5 * (1.0 + torch.cos(math.pi * _fraction(count, steps))))


@schedule
def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, start: float = 0.0, end: float = 0.0):
    """Rise on a line to a peak, then fall on half a cosine until the last step.

    Args:
        peak: the value at step ``warmup_steps``.
        warmup_steps: the length of the rise.
        total_steps: the step at which ``end`` is reached, the rise included.
        start: the value at step 0, unless there is no rise.
        end: the value from ``total_steps`` on.

    Raises:
        ValueError: the rise is longer than the whole.

    >>> [round(warmup_cosine(1.0, 2, 10)(count), 3) for count in (0, 1, 2, 6, 10)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _within(warmup_steps, total_steps, "warmup_steps")
    return _joined([linear(start, peak, warmup_steps), cosine(peak, total_steps - warmup_steps, end)], [warmup_steps])


@schedule
def warmup_stable_decay(
    peak: float, warmup_steps: int, decay_steps: int, total_steps: int, start: float = 0.0, end: float = 0.0
):
    """Rise on a line, hold, and fall on a line over the last steps: the trapezoid.

    Raises:
        ValueError: rise and fall together are longer than the whole.

    >>> wsd = warmup_stable_decay(1.0, 2, 4, 10)
    >>> [wsd(count) for count in (0, 1, 2, 5, 6, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    _whole("decay_steps", decay_steps)
    _within(warmup_steps + decay_steps, total_steps, "warmup_steps + decay_steps")
    fall_at = total_steps - decay_steps
    return _joined(
        [linear(start, peak, warmup_steps), constant(peak), linear(peak, end, decay_steps)], [warmup_steps, fall_at]
    )


def _within(steps: int, total_steps: int, name: str) -> None:
    _whole(name, steps)
    _whole("total_steps", total_steps)
    if steps > total_steps:
        raise ValueError(f"{name} must be at most total_steps ({total_steps}), found {steps}")


@schedule
def join(schedules: list[Schedule], boundaries: list[int]):
    """Follow one schedule after another, each counting from its own start.

    Args:
        schedules: one more than the boundaries.
        boundaries: the steps at which the next schedule takes over, rising.

    Raises:
        ValueError: the numbers do not fit, or the boundaries do not rise.

    >>> joined = join([constant(1.0), linear(1.0, 0.0, 10)], [5])
    >>> [joined(count) for count in (0, 5, 10, 15)]
    [1.0, 1.0, 0.5, 0.0]
    """
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(f"expected one schedule more than boundaries, found {len(schedules)} and {len(boundaries)}")
    if any(later <= earlier for earlier, later in pairwise(boundaries)):
        raise ValueError(f"boundaries must rise, found {boundaries}")
    return _joined(schedules, boundaries)


def _joined(schedules: list[Schedule], boundaries: list[int]) -> Callable[[Tensor], Tensor]:
    def value(count: Tensor) -> Tensor:
        result = schedules[0](count)
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            result = torch.where(count < boundary, result, following(count - boundary))
        return result

    return value
