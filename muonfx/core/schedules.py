"""Schedules: hyperparameters that are functions of the step.

A schedule is accepted in place of a number, as in ``scale_by_learning_rate(linear_schedule(0.1, 0.0, 1000))``. Step 0
is the first update. Called with an int, a `Schedule` returns a float, for example for a plot. Called with a 0-d tensor,
as a compiled update does, it returns a 0-d tensor.

Like a transform, a schedule prints as the code that created it, can be compared and pickled, and is a pytree whose
leaves are its numeric arguments.
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
from muonfx.core.extras import InitAndUpdate
from muonfx.core.value import Recorded, make_factory
from muonfx.internal.arguments import float_of, is_real_number, short_repr
from muonfx.internal.tracing import is_wrapped, on_device_of
from muonfx.tree import PyTree, device_of
from muonfx.tree.elementwise import new_number

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
"""A float or a 0-d tensor."""


class Schedule(Recorded):
    """A hyperparameter that is a function of the step, such as the result of `linear_schedule`.

    To write a schedule, use the decorator `schedule`.

    >>> import muonfx as mfx
    >>> mfx.linear_schedule(1.0, 0.0, 10)
    linear_schedule(start=1.0, end=0.0, steps=10)
    >>> mfx.linear_schedule(1.0, 0.0, 10)(5)
    0.5
    """

    def _build(self, arguments: Mapping[str, Any]) -> ScheduleFunction:
        """Call the decorated function, and return its result, a function of the step; raise TypeError if it is none."""
        function_of_step = super()._build(arguments)
        if not callable(function_of_step):
            raise TypeError(
                f"{self.factory.__name__}: found a function that returns {function_of_step!r}, expected a function "
                "that returns a schedule: decorate def f(): return lambda step: ..., and call f()"
            )
        return function_of_step

    @overload
    def __call__(self, count: int) -> float: ...

    @overload
    def __call__(self, count: Tensor) -> Tensor: ...

    def __call__(self, count: int | Tensor) -> Any:
        """Return the value at step ``count``; the first is 0. An int gives a float, a 0-d tensor gives a 0-d tensor.

        >>> linear_schedule(1.0, 0.0, 10)(5), linear_schedule(1.0, 0.0, 10)(torch.tensor(5))
        (0.5, tensor(0.5000, dtype=torch.float64))
        """
        # The function of the step receives a floating-point tensor, on the device of the count.
        device = count.device if isinstance(count, Tensor) else torch.device("cpu")
        step = new_number(count, device)
        value = self._as_tensor(on_device_of(self._built, step), step)
        if isinstance(count, Tensor):
            return value
        # The value may have a derivative by a numeric argument, such as `start`, that is a tensor.
        has_derivative = value.requires_grad or is_wrapped(value)
        if has_derivative:  # a float would lose it
            return value
        return float(value)

    def _as_tensor(self, value: Any, step: Tensor) -> Tensor:
        """Return the value of the schedule at a step as a 0-d tensor. Raise TypeError if it is not one number.

        The function of a schedule may return a Python number, such as a constant, or a tensor of shape (1,).

        >>> constant_schedule(0.1)._as_tensor(0.1, step=torch.tensor(5.0))
        tensor(0.1000)
        """
        if is_real_number(value):
            if not isinstance(value, Tensor):
                return torch.full_like(step, float_of("the value of a schedule", value))
            if value.ndim == step.ndim:  # `step` has dims if a caller plots many steps
                return value
            if value.numel() == 1:
                return value.reshape(())
        raise TypeError(
            f"{self!r}: the function of the step must return a number or a 0-d tensor, found {short_repr(value)}"
        )


ScalarOrSchedule = float | Tensor | Schedule
"""A float, a 0-d tensor or a `Schedule`: the annotation of an argument of a transform that may change with the step.

A constructor under `muonfx.transform` receives the number of the current step for such an argument.
"""

ScheduleFunction = Callable[[Tensor], Any]
"""A function from the step, as a 0-d floating-point tensor, to a number; a constructor under `schedule` returns it."""


def schedule(constructor: Callable[P, ScheduleFunction]) -> Callable[P, Schedule]:
    """Decorate a function that returns a function of the step, so that calling it creates a `Schedule`.

    Args:
        constructor: the decorated function. The function that it returns receives the step as a 0-d floating-point
            tensor, and returns a number or a 0-d tensor. To depend on the step, use `torch.where`: a Python branch on
            its value works in eager mode only, and there it waits for the GPU.

    Returns:
        A factory: a function with the constructor's name, signature and docstring that returns a `Schedule`.

    >>> @schedule
    ... def inverse_sqrt(rate: float):
    ...     return lambda count: rate / (count + 1).sqrt()
    >>> inverse_sqrt(2.0)(3)
    1.0
    """
    return make_factory(Schedule, constructor)


@schedule
def constant_schedule(value: Scalar) -> ScheduleFunction:
    """Make a schedule with the same value at every step.

    >>> constant_schedule(0.5)(100)
    0.5
    """
    checks.finite("value", value)
    return lambda count: value + 0.0 * count


def _fraction(count: Tensor, steps: int) -> Tensor:
    """Return the share of ``steps`` that is over at step ``count``, limited to [0, 1]: 0.25 at step 1 of 4.

    It is 1 if ``steps`` is 0.
    """
    if steps == 0:
        return torch.ones_like(count)
    return (count / steps).clamp(0.0, 1.0)


@schedule
def linear_schedule(start: Scalar, end: Scalar, steps: int) -> ScheduleFunction:
    """Make a schedule that changes linearly from ``start`` to ``end`` in ``steps`` steps, and then stays at ``end``.

    Args:
        start: the value at step 0, the first update.
        end: the value at step ``steps`` and all later steps.
        steps: the number of steps of the change.

    >>> [linear_schedule(0.0, 1.0, 4)(count) for count in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """
    checks.finite("start", start)
    checks.finite("end", end)
    checks.whole_number("steps", steps)
    return lambda count: start + (end - start) * _fraction(count, steps)


@schedule
def cosine_decay_schedule(start: Scalar, steps: int, *, end: Scalar = 0.0) -> ScheduleFunction:
    """Make a schedule that decays from ``start`` to ``end`` along half a cosine in ``steps`` steps, and then stays.

    Args:
        start: the value at step 0, the first update.
        steps: the number of steps of the decay.
        end: the value at step ``steps`` and all later steps. Optax's ``alpha`` is the share ``end / start``.

    >>> [round(cosine_decay_schedule(1.0, 10)(count), 3) for count in (0, 5, 10)]
    [1.0, 0.5, 0.0]
    """
    checks.finite("start", start)
    checks.finite("end", end)
    checks.whole_number("steps", steps)
    return lambda count: (
        end + (start - end) * 0.5 * (1.0 + torch.cos(math.pi * _fraction(count, steps)))
    )


@schedule
def exponential_decay(start: Scalar, steps: int, rate: Scalar) -> ScheduleFunction:
    """Make a schedule of exponential decay: the value at step ``t`` is ``start * rate ** (t / steps)``.

    Args:
        start: the value at step 0, the first update.
        steps: the number of steps in which the value is multiplied by ``rate`` once.
        rate: the positive factor.

    >>> [exponential_decay(1.0, 2, 0.25)(count) for count in (0, 1, 2, 4)]
    [1.0, 0.5, 0.25, 0.0625]
    """
    checks.finite("start", start)
    checks.positive_int("steps", steps)
    checks.positive("rate", rate)
    return lambda count: start * rate ** (count / steps)


@schedule
def warmup_cosine_decay_schedule(
    peak: Scalar, warmup_steps: int, total_steps: int, *, start: Scalar = 0.0, end: Scalar = 0.0
):
    """Make a schedule of linear warmup from ``start`` to ``peak`` and cosine decay to ``end``.

    Args:
        peak: the value at step ``warmup_steps``.
        warmup_steps: the number of steps of the warmup.
        total_steps: the number of steps of the warmup and the decay together.
        start: the value at step 0. Unused if ``warmup_steps`` is 0.
        end: the value at step ``total_steps`` and all later steps.

    Raises:
        ValueError: ``warmup_steps`` is larger than ``total_steps``.

    >>> [round(warmup_cosine_decay_schedule(1.0, 2, 10)(count), 3) for count in (0, 1, 2, 6, 10)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    checks.finite("peak", peak)
    _within(warmup_steps, total_steps, "warmup_steps")
    warmup = linear_schedule(start, peak, warmup_steps)
    decay = cosine_decay_schedule(peak, total_steps - warmup_steps, end=end)
    return joined([warmup, decay], [warmup_steps])


@schedule
def warmup_stable_decay_schedule(
    peak: Scalar,
    warmup_steps: int,
    decay_steps: int,
    total_steps: int,
    *,
    start: Scalar = 0.0,
    end: Scalar = 0.0,
):
    """Make a schedule of linear warmup to ``peak``, a constant phase, and linear decay to ``end``.

    Args:
        peak: the value of the constant phase.
        warmup_steps: the number of steps of the warmup.
        decay_steps: the number of steps of the decay.
        total_steps: the number of steps of all phases together.
        start: the value at step 0. Unused if ``warmup_steps`` is 0.
        end: the value at step ``total_steps`` and all later steps.

    Raises:
        ValueError: ``warmup_steps + decay_steps`` is larger than ``total_steps``.

    >>> wsd = warmup_stable_decay_schedule(1.0, 2, 4, 10)
    >>> [wsd(count) for count in (0, 1, 2, 5, 6, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    checks.finite("peak", peak)
    checks.whole_number("decay_steps", decay_steps)
    _within(warmup_steps + decay_steps, total_steps, "warmup_steps + decay_steps")
    # Three schedules in sequence. The decay begins so that it ends at step `total_steps`.
    warmup = linear_schedule(start, peak, warmup_steps)
    decay = linear_schedule(peak, end, decay_steps)
    return joined(
        [warmup, constant_schedule(peak), decay], [warmup_steps, total_steps - decay_steps]
    )


def _within(steps: int, total_steps: int, name: str) -> None:
    checks.whole_number(name, steps)
    checks.whole_number("total_steps", total_steps)
    if steps > total_steps:
        raise ValueError(f"{name} must be at most total_steps ({total_steps}), found {steps}")


@schedule
def join_schedules(schedules: list[Schedule], boundaries: list[int]):
    """Make a schedule that runs several schedules in sequence. Each of them begins with its own step 0.

    Args:
        schedules: the schedules in order.
        boundaries: the ascending steps at which the second, third, ... schedule begins.

    Raises:
        TypeError: one of ``schedules`` is not a `Schedule`.
        ValueError: there is not one schedule more than boundaries, or the boundaries do not ascend.

    >>> joined = join_schedules([constant_schedule(1.0), linear_schedule(1.0, 0.0, 10)], [5])
    >>> [joined(count) for count in (0, 5, 10, 15)]
    [1.0, 1.0, 0.5, 0.0]
    """
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(
            f"join_schedules: found {len(schedules)} schedules and {len(boundaries)} boundaries, expected "
            f"{len(boundaries) + 1} schedules: a boundary is the step at which the next schedule begins"
        )
    for index, part in enumerate(schedules):
        if not isinstance(part, Schedule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"join_schedules: schedules[{index}] must be a Schedule, found {short_repr(part)}: pass "
                "constant_schedule(number) for a number, and muonfx.schedule(lambda: f)() for a function f of the step"
            )
    if any(later <= earlier for earlier, later in pairwise(boundaries)):
        raise ValueError(f"boundaries must ascend, found {boundaries}")
    return joined(schedules, boundaries)


def joined(schedules: list[Schedule], boundaries: list[int]) -> Callable[[Tensor], Tensor]:
    """Return a function of the step that evaluates several schedules in sequence. Arguments are not checked.

    With the boundary 5, the first schedule gives the value of the steps 0 to 4. At step 7, the second gives its value
    at its own step 2.
    """

    def value(count: Tensor) -> Tensor:
        """Return the value at step ``count`` of the last schedule that has begun, which counts from its boundary."""
        result = schedules[0](count)
        # Each schedule replaces the value of the one before from its boundary on. All are evaluated, without a branch.
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            # Before its boundary, the schedule could overflow, and inf * 0 in its derivative would be NaN: use step 0.
            following_count = (count - boundary).clamp(min=0)
            result = torch.where(count < boundary, result, following(following_count))
        return result

    return value


class ScheduledState(NamedTuple):
    """The state of a transform that has schedules in place of numbers."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of updates so far, a 0-d int64 tensor. The next update uses the schedules' values at this step."""
    inner: PyTree
    """The state that the transform would have with plain numbers."""


def follow(
    schedules: Mapping[str, Schedule], build: Callable[[Mapping[str, Any]], InitAndUpdate]
) -> InitAndUpdate:
    """Return the functions ``(init, update)`` of a transform that has schedules among its arguments.

    The state counts the steps. Each update evaluates the schedules at the current step and calls ``build`` with a dict
    from argument name to number. It returns ``(init, update)`` for these numbers.

    >>> init, update = follow(
    ...     {"factor": linear_schedule(1.0, 0.0, 4)},
    ...     build=lambda numbers: (
    ...         mfx.scale(numbers["factor"]).functions
    ...     ),  # scale(1.0), then scale(0.75)
    ... )
    >>> state = init({"w": torch.zeros(1)})
    >>> _, state = update({"w": torch.ones(1)}, state)
    >>> update({"w": torch.ones(1)}, state)
    ({'w': tensor([0.7500])}, ScheduledState(count=tensor(2), inner=EmptyState()))
    """

    def build_at(count: Tensor) -> InitAndUpdate:
        """Return the functions for the numbers at step ``count``."""
        numbers = {
            name: new_number(schedule(count), count.device) for name, schedule in schedules.items()
        }
        return build(numbers)

    def init(params: PyTree) -> ScheduledState:
        """Return the initial state with the numbers of step 0."""
        inner_init, _ = build_at(_step_zero("cpu"))
        return ScheduledState(_step_zero(device_of(params)), inner_init(params))

    def update(updates: PyTree, state: ScheduledState, params: PyTree = None, **extras: Any):
        """Return the updates with the numbers of the step in the state, and the state of the next step."""
        _, inner_update = build_at(state.count)
        updates, inner_state = inner_update(updates, state.inner, params, **extras)
        return updates, ScheduledState(state.count + 1, inner_state)

    # The names of the extra arguments are read from the signature of `update`, so it must equal the inner `update`'s.
    if torch.compiler.is_compiling():  # they were read before tracing
        return init, update
    _, update_at_start = build_at(_step_zero("cpu"))
    return init, functools.wraps(update_at_start)(update)


def _step_zero(device: torch.device | str) -> Tensor:
    """Return step 0. Schedules need it on the CPU: one that reads a table of values cannot run on the meta device."""
    return torch.zeros((), dtype=torch.int64, device=device)
