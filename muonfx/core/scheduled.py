"""Transforms whose numbers follow schedules: the constructor is called with the numbers of each step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx.core.schedules import Schedule
from muonfx.tree import PyTree, device_of

__all__ = ["ScheduledHyperparamsState", "follow", "numbers_at"]

Functions = tuple[Callable[..., Any], Callable[..., Any]]


class ScheduledHyperparamsState(NamedTuple):
    """State of a transform that was given schedules in the place of numbers."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64."""
    hyperparams: dict[str, Tensor]
    """The numbers that the last update has used, by argument; before the first, those that it will use. 0-d tensors,
    float64 where the device has it."""
    inner: PyTree
    """The state that the transform has with plain numbers."""


def numbers_at(schedules: Mapping[str, Schedule], count: int | Tensor) -> dict[str, Any]:
    """Return the value of each schedule at a step."""
    return {name: schedule(count) for name, schedule in schedules.items()}


def follow(schedules: Mapping[str, Schedule], build: Callable[[Mapping[str, Any]], Functions]) -> Functions:
    """Build the ``init`` and ``update`` that call the constructor with the scheduled numbers of each step."""

    def values(count: Tensor) -> dict[str, Tensor]:
        dtype = torch.float32 if count.device.type == "mps" else torch.float64
        if count.is_meta:
            return {name: torch.zeros((), dtype=dtype, device="meta") for name in schedules}
        return {name: value.to(dtype) for name, value in numbers_at(schedules, count).items()}

    def init(params: PyTree) -> ScheduledHyperparamsState:
        count = torch.zeros((), dtype=torch.int64, device=device_of(params))
        current = values(count)
        inner, _ = build(current)
        return ScheduledHyperparamsState(count, current, inner(params))

    def update(updates: PyTree, state: ScheduledHyperparamsState, params: PyTree = None, **extras: Any):
        current = values(state.count)
        _, inner = build(current)
        updates, inner_state = inner(updates, state.inner, params, **extras)
        return updates, ScheduledHyperparamsState(state.count + 1, current, inner_state)

    if torch.compiler.is_compiling():  # the signature was read before tracing
        return init, update
    _, like = build(values(torch.zeros((), dtype=torch.int64)))
    return init, functools.wraps(like)(update)
