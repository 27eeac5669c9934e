"""Schedules: a hyperparameter as a function of the step count.

A `Schedule` is a recorded value like a transform: it prints as the code that built it, compares, pickles, and its
numeric arguments are leaves that can be batched or differentiated. Called with the count of a transform's state (a 0-d
integer tensor), it returns a 0-d tensor without Python branches. Called with an int, it returns a float, for example
for a plot. Step 0 is the first update.
"""

from muonfx.core.schedules.base import Scalar, ScalarOrSchedule, Schedule, ScheduleFunction, schedule
from muonfx.core.schedules.curves import (
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    join_schedules,
    linear_schedule,
    onecycle_schedule,
    polynomial_schedule,
    sgdr_schedule,
    warmup_cosine_decay_schedule,
    warmup_stable_decay_schedule,
)

__all__ = [
    "Scalar",
    "ScalarOrSchedule",
    "Schedule",
    "ScheduleFunction",
    "constant_schedule",
    "cosine_decay_schedule",
    "exponential_decay",
    "join_schedules",
    "linear_schedule",
    "onecycle_schedule",
    "polynomial_schedule",
    "schedule",
    "sgdr_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_stable_decay_schedule",
]


def __dir__() -> list[str]:
    return sorted(__all__)
