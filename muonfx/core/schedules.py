"""Schedules: a hyperparameter as a function of the step count.

A `Schedule` is a recorded value like a transform: it prints as the code that built it, compares, pickles, and its
numeric arguments are leaves that can be batched or differentiated. Called with the count of a transform's state (a 0-d
integer tensor), it returns a 0-d tensor without Python branches. Called with an int, it returns a float, for example
for a plot. Step 0 is the first update.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec, overload

import torch
from torch import Tensor

from muonfx.core import checks
from muonfx.core.definition import InitAndUpdate, make_factory
from muonfx.core.recorded import Recorded
from muonfx.tree import PyTree, device_of
from muonfx.tree.tracing import is_wrapped

__all__ = [
    "Scalar",
    "ScalarOrSchedule",
    "Schedule",
    "ScheduleFunction",
    "ScheduledState",
    "constant_schedule",
    "cosine_decay_schedule",
    "exponential_decay",
    "join_schedules",
    "linear_schedule",
    "schedule",
    "warmup_cosine_decay_schedule",
    "warmup_stable_decay_schedule",
]


def __dir__() -> list[str]:
    return sorted(__all__)


P = ParamSpec("P")

Scalar = float | Tensor
"""A number, which may be a 0-d tensor."""


class Schedule(Recorded):
    """A function of the step count that records its arguments; made by a factory that `schedule` decorates.

    >>> import muonfx as mfx
    >>> mfx.linear_schedule(1.0, 0.0, 10)
    linear_schedule(start=1.0, end=0.0, steps=10)
    >>> mfx.linear_schedule(1.0, 0.0, 10)(5)
    0.5
    """

    def prepare(self) -> None:
        """Call the constructor now, and require that it returns a function of the count."""
        super().prepare()
        if not callable(self.built):
            name = self.factory.__name__
            raise TypeError(f"{name}: the decorated function must return a function of the count, found {self.built!r}")

    @overload
    def __call__(self, count: int) -> float: ...

    @overload
    def __call__(self, count: Tensor) -> Tensor: ...

    def __call__(self, count: int | Tensor) -> Any:
        """Evaluate at a step count: a float for an int, a 0-d tensor for a tensor."""
        function = self.built
        if isinstance(count, Tensor):
            return function(count.to(torch.float32 if count.device.type == "mps" else torch.float64))
        value = function(torch.tensor(float(count), dtype=torch.float64))
        is_recorded = isinstance(value, Tensor) and (value.requires_grad or is_wrapped(value))
        return value if is_recorded else float(value)


ScalarOrSchedule = float | Tensor | Schedule
"""A number, a 0-d tensor, or a schedule that gives the number of each step.

A constructor under `muonfx.transform` receives the number of the step for an argument of this type.
"""

ScheduleFunction = Callable[[Tensor], Any]
"""A function of the step count, a 0-d floating tensor, as one under `schedule` returns it."""


def schedule(constructor: Callable[P, ScheduleFunction]) -> Callable[P, Schedule]:
    """Make a factory of schedules from a function that returns a function of the count (a 0-d floating tensor).

    >>> @schedule
    ... def inverse_sqrt(rate: float):
    ...     return lambda count: rate / (count + 1).sqrt()
    >>> inverse_sqrt(2.0)(3)
    1.0
    """
    return make_factory(Schedule, constructor)


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
def exponential_decay(start: Scalar, steps: int, rate: Scalar) -> ScheduleFunction:
    """Decay exponentially: the value is multiplied by `rate` in every `steps` steps.

    >>> [exponential_decay(1.0, 2, 0.25)(count) for count in (0, 1, 2, 4)]
    [1.0, 0.5, 0.25, 0.0625]
    """
    checks.finite("start", start)
    checks.positive_int("steps", steps)
    checks.positive("rate", rate)
    return lambda count: start * rate ** (count / steps)


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


class ScheduledState(NamedTuple):
    """State of a transform that was given schedules in place of numbers."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64: the next update uses the schedules' values at this count."""
    inner: PyTree
    """The state that the transform has with plain numbers."""


def follow(schedules: Mapping[str, Schedule], build: Callable[[Mapping[str, Any]], InitAndUpdate]) -> InitAndUpdate:
    """Build the ``init`` and ``update`` that call the constructor with the scheduled numbers of each step."""

    def functions_at(count: Tensor) -> InitAndUpdate:
        dtype = torch.float32 if count.device.type == "mps" else torch.float64
        return build({name: schedule(count).to(dtype) for name, schedule in schedules.items()})

    def functions_at_start() -> InitAndUpdate:
        # On the CPU, because a schedule that looks values up in a table cannot run on the meta device.
        return functions_at(torch.zeros((), dtype=torch.int64, device="cpu"))

    def init(params: PyTree) -> ScheduledState:
        inner, _ = functions_at_start()
        return ScheduledState(torch.zeros((), dtype=torch.int64, device=device_of(params)), inner(params))

    def update(updates: PyTree, state: ScheduledState, params: PyTree = None, **extras: Any):
        _, inner = functions_at(state.count)
        updates, inner_state = inner(updates, state.inner, params, **extras)
        return updates, ScheduledState(state.count + 1, inner_state)

    if torch.compiler.is_compiling():  # the signature was read before tracing
        return init, update
    _, like = functions_at_start()
    return init, functools.wraps(like)(update)
