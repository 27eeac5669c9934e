"""Arithmetic with states of a pinned dtype: compute in at least fp32, store in the pinned dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from muonfx import tree
from muonfx.compact import QuantizedDtype
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew

__all__ = [
    "StateDtype",
    "WideStateDtype",
    "copies",
    "new_count",
    "new_number",
    "power",
    "state_dtype",
    "to_floating",
    "widen",
    "widest",
    "zeros",
]

WideStateDtype = torch.dtype | Literal["auto"] | None
""""auto" (at least fp32 and at least the dtype of the parameter), a floating dtype, or None (as the parameter)."""

StateDtype = WideStateDtype | QuantizedDtype
"""A `WideStateDtype` or a quantized dtype."""


def state_dtype(pinned: WideStateDtype, own: torch.dtype) -> torch.dtype:
    """Return the dtype of a state leaf whose parameter has the dtype ``own``."""
    if pinned is None:
        return own
    return ew.wide_dtype(own) if isinstance(pinned, str) else pinned


def zeros(params: PyTree, dtype: WideStateDtype) -> PyTree:
    """Return zeros in the shapes of the parameters and a pinned dtype."""
    return tree.map(lambda p: torch.zeros_like(p, dtype=state_dtype(dtype, p.dtype), requires_grad=False), params)


def copies(values: PyTree, dtype: WideStateDtype) -> PyTree:
    """Return detached copies of values in a pinned dtype."""
    return tree.map(lambda value: value.detach().to(state_dtype(dtype, value.dtype), copy=True), values)


def widen(updates: list[Tensor], stored: list[Tensor]) -> tuple[list[Tensor], list[Tensor], bool]:
    """Cast updates and state to the compute dtype, and return whether all updates are fresh copies."""
    kinds = {(x.dtype, y.dtype) for x, y in zip(updates, stored, strict=True)}
    if len(kinds) == 1:
        ((given, kept),) = kinds
        wide = ew.wide_dtype(given, kept)
        return ew.cast(updates, wide), ew.cast(stored, wide), given != wide
    each = [ew.wide_dtype(x.dtype, y.dtype) for x, y in zip(updates, stored, strict=True)]
    new = ew.cast(updates, each)
    return new, ew.cast(stored, each), all(a is not b for a, b in zip(new, updates, strict=True))


def widest(*lists: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cast corresponding tensors of several lists to their widest dtype, and at least to fp32."""
    wide = [ew.wide_dtype(*[x.dtype for x in xs]) for xs in zip(*lists, strict=True)]
    return [ew.cast(xs, wide) for xs in lists]


def new_number(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a 0-d state tensor with its own storage, in fp64 if the device supports it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype, copy=True)
    return torch.full((), value, dtype=dtype, device=device)


def new_count(device: torch.device) -> Tensor:
    """Return a step count of zero: a 0-d int64 tensor."""
    return torch.zeros((), dtype=torch.int64, device=device)


def power(base: float | Tensor, count: Tensor) -> Tensor:
    """Raise a number to a step count, in fp64 if the device supports it."""
    return torch.pow(base, to_floating(count))


def to_floating(count: Tensor) -> Tensor:
    """Convert a step count to fp64 if the device supports it, else to fp32."""
    return count.to(torch.float32 if count.device.type == "mps" else torch.float64)
