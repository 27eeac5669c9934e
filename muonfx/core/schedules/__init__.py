"""Schedules: a hyperparameter as a function of the step count.

A `Schedule` is a recorded value like a transform: it prints as the code that built it, compares, pickles, and its
numeric arguments are leaves that can be batched or differentiated. Called with the count of a transform's state (a 0-d
integer tensor), it returns a 0-d tensor without Python branches. Called with an int, it returns a float, for example
for a plot. Step 0 is the first update.
"""

from muonfx.core.schedules.base import Scalar, ScalarOrSchedule, Schedule, ScheduleFunction, schedule
from muonfx.core.schedules.curves import (
    constant,
    cosine,
    exponential,
    join,
    linear,
    one_cycle,
    polynomial,
    sgdr,
    warmup_cosine,
    warmup_stable_decay,
)

__all__ = [
    "Scalar",
    "ScalarOrSchedule",
    "Schedule",
    "ScheduleFunction",
    "constant",
    "cosine",
    "exponential",
    "join",
    "linear",
    "one_cycle",
    "polynomial",
    "schedule",
    "sgdr",
    "warmup_cosine",
    "warmup_stable_decay",
]


def __dir__() -> list[str]:
    return sorted(__all__)
