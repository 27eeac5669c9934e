"""Transforms whose numbers follow schedules: the constructor is called with the numbers of each step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx.core.schedules import Schedule
from muonfx.tree import PyTree, device_of

InitAndUpdate = tuple[Callable[[PyTree], PyTree], Callable[..., tuple[PyTree, PyTree]]]
"""The pair of functions ``init, update`` that a function under `transform` returns."""


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
