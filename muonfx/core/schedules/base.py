"""The class `Schedule`, and the decorator `schedule` of its factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, overload

import torch
from torch import Tensor

from muonfx.core.definition import make_factory
from muonfx.core.recorded import Recorded
from muonfx.tree.tracing import is_wrapped

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


@overload
def schedule(constructor: Callable[P, ScheduleFunction], /) -> Callable[P, Schedule]: ...


@overload
def schedule(*, name: str | None = None) -> Callable[[Callable[P, ScheduleFunction]], Callable[P, Schedule]]: ...


def schedule(constructor: Callable[..., ScheduleFunction] | None = None, *, name: str | None = None) -> Any:
    """Make a factory of schedules from a function that returns a function of the count (a 0-d floating tensor).

    Args:
        constructor: takes the schedule's arguments, and returns a function from count to value.
        name: a public name that stays when the function moves, as in `muonfx.transform`.

    Raises:
        ValueError: ``name`` is not made of identifiers and dots.

    >>> @schedule
    ... def inverse_sqrt(rate: float):
    ...     return lambda count: rate / (count + 1).sqrt()
    >>> inverse_sqrt(2.0)(3)
    1.0
    """

    def decorate(constructor: Callable[..., ScheduleFunction]) -> Callable[..., Schedule]:
        return make_factory(Schedule, constructor, name=name)

    return decorate if constructor is None else decorate(constructor)
