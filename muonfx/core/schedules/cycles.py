"""Schedules that pass through given values at given steps, and cyclic schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from muonfx.core import checks
from muonfx.core.schedules.base import Scalar, schedule, whole_number
from muonfx.core.schedules.curves import joined, warmup_cosine

__all__ = ["one_cycle", "piecewise_constant", "piecewise_interpolate", "sgdr"]

Interpolation = Literal["linear", "cosine"]


@schedule
def piecewise_constant(start: Scalar, scales: dict[int, float]):
    """Multiply by a number at each of some steps, and hold in between.

    Args:
        start: the value at first.
        scales: what the value is multiplied by, by step.

    >>> [piecewise_constant(1.0, {100: 0.5, 200: 0.1})(count) for count in (99, 100, 200)]
    [1.0, 0.5, 0.05]
    """
    checks.finite("start", start)
    return _piecewise(start, _ordered(scales), None)


@schedule
def piecewise_interpolate(start: float, scales: dict[int, float], interpolation: Interpolation = "linear"):
    """Reach, at each of some steps, a multiple of the value at the one before.

    Args:
        start: the value at step 0.
        scales: what the value is multiplied by on the way to a step, by step.
        interpolation: "linear", or "cosine" for half a cosine between two steps.

    >>> [piecewise_interpolate(1.0, {4: 0.5, 8: 0.1})(count) for count in (0, 2, 4, 8, 9)]
    [1.0, 0.75, 0.5, 0.05, 0.05]
    """
    checks.finite("start", start)
    return _piecewise(start, _ordered(scales), interpolation)


@schedule
def one_cycle(
    peak: float,
    total_steps: int,
    interpolation: Interpolation = "linear",
    *,
    pct_start: float = 0.3,
    pct_final: float = 0.85,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
):
    """Rise to a peak, fall back, and fall further until the last step; on half cosines, fall once.

    Args:
        peak: the largest value.
        total_steps: the length in steps.
        interpolation: "linear" or "cosine".
        pct_start: the share of the steps after which the peak is reached.
        pct_final: the share of the steps after which the first value is reached again; for lines only.
        div_factor: the peak over the first value.
        final_div_factor: the first value over the last.

    Follows Smith and Topin (arXiv 1708.07120); ``linear_onecycle_schedule`` and ``cosine_onecycle_schedule`` of Optax.

    >>> [one_cycle(1.0, 100, div_factor=4.0, final_div_factor=5.0)(count) for count in (0, 15, 30, 85, 100)]
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
    _interpolation(interpolation)

    def at(share: float | Tensor) -> float | Tensor:
        return (share * total_steps).floor() if isinstance(share, Tensor) else math.floor(share * total_steps)

    fall = [(at(pct_final), 1.0 / div_factor), (total_steps, 1.0 / final_div_factor)]
    if interpolation == "cosine":
        fall = [(total_steps, 1.0 / (div_factor * final_div_factor))]
    return _piecewise(peak / div_factor, [(at(pct_start), div_factor), *fall], interpolation)


@schedule
def sgdr(
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
    """Fall on half a cosine again and again, each time from the peak: warm restarts.

    Args:
        peak: the largest value of the first cycle.
        steps: the length of the first cycle.
        cycles: how many there are; after the last the value stays.
        growth: how many times longer each cycle is than the one before.
        decay: each cycle's peak over that of the one before.
        warmup_steps: of each cycle, the steps in which it rises to its peak.
        start: the value from which it rises.
        end: the value to which each cycle falls.

    Follows Loshchilov and Hutter (arXiv 1608.03983); `join` puts other cycles together.

    >>> [round(sgdr(1.0, 4, 2, growth=2)(count), 3) for count in (0, 2, 4, 8, 12)]
    [1.0, 0.5, 1.0, 0.5, 0.0]
    """
    checks.positive_int("steps", steps)
    checks.positive_int("cycles", cycles)
    checks.positive_int("growth", growth)
    checks.finite("decay", decay)
    lengths = [steps * growth**cycle for cycle in range(cycles)]
    parts = [
        warmup_cosine(peak * decay**cycle, warmup_steps, length, start, end) for cycle, length in enumerate(lengths)
    ]
    return joined(parts, [sum(lengths[:cycle]) for cycle in range(1, cycles)])


def _ordered(scales: dict[int, float]) -> list[tuple[float | Tensor, float | Tensor]]:
    if not isinstance(scales, dict):
        raise TypeError(f"scales must be a dict from steps to numbers, found {scales!r}")
    for step, scale in scales.items():
        whole_number("a step of scales", step)
        checks.at_least(f"the scale at step {step}", scale, 0.0)
    return sorted(scales.items())


def _interpolation(name: object) -> None:
    if name not in ("linear", "cosine"):
        raise ValueError(f'interpolation must be "linear" or "cosine", found {name!r}')


def _piecewise(
    start: float | Tensor, scales: Sequence[tuple[float | Tensor, float | Tensor]], interpolation: str | None
) -> Callable[[Tensor], Tensor]:
    """Return a function of the count that interpolates between scaled values, or jumps if interpolation is None."""
    if interpolation is not None:
        _interpolation(interpolation)

    def value(count: Tensor) -> Tensor:
        result, before, low = start + 0.0 * count, 0, start
        for step, scale in scales:
            high = low * scale
            if interpolation is not None:
                span = step - before
                way = (count - before) / (span.clamp(min=1.0) if isinstance(span, Tensor) else max(span, 1))
                way = 0.5 - 0.5 * torch.cos(math.pi * way) if interpolation == "cosine" else way
                result = torch.where(count >= before, low + (high - low) * way, result)
            result = torch.where(count >= step, high, result)
            before, low = step, high
        return result

    return value
