"""Arithmetic with states of a pinned dtype: compute wide, store as pinned."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Literal

import torch
from torch import Tensor

from muonfx import tree
from muonfx.compact import Compact
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
    "store",
    "to_floating",
    "widen",
    "widest",
    "zeros",
]

WideStateDtype = torch.dtype | Literal["auto"] | None
"""The dtype that pins a state: "auto" for at least fp32 and never narrower than the parameter, a floating dtype for
all, or None for each parameter's own."""

StateDtype = WideStateDtype | Compact
"""The dtype that pins a state that may also be compact."""


def state_dtype(pinned: WideStateDtype, own: torch.dtype) -> torch.dtype:
    """The dtype of a leaf of a state, where its parameter has a dtype of its own.

    >>> state_dtype("auto", torch.bfloat16), state_dtype("auto", torch.float64), state_dtype(None, torch.float16)
    (torch.float32, torch.float64, torch.float16)
    """
    if pinned is None:
        return own
    return ew.wide_dtype(own) if isinstance(pinned, str) else pinned


def zeros(params: PyTree, dtype: WideStateDtype) -> PyTree:
    """Zeros like the parameters, in a pinned dtype."""
    return tree.map(lambda p: torch.zeros_like(p, dtype=state_dtype(dtype, p.dtype), requires_grad=False), params)


def copies(values: PyTree, dtype: WideStateDtype) -> PyTree:
    """Copies of some values, in a pinned dtype."""
    return tree.map(lambda value: value.detach().to(state_dtype(dtype, value.dtype), copy=True), values)


def widen(updates: list[Tensor], stored: list[Tensor]) -> tuple[list[Tensor], list[Tensor], bool]:
    """Bring updates and a state to the dtype to compute in: the wider of the two, and at least fp32.

    Returns:
        The updates, the state, and whether every tensor of the updates is a fresh copy.
    """
    kinds = {(x.dtype, y.dtype) for x, y in zip(updates, stored, strict=True)}
    if len(kinds) == 1:
        ((given, kept),) = kinds
        wide = ew.wide_dtype(given, kept)
        return ew.cast(updates, wide), ew.cast(stored, wide), given != wide
    each = [ew.wide_dtype(x.dtype, y.dtype) for x, y in zip(updates, stored, strict=True)]
    new = ew.cast(updates, each)
    return new, ew.cast(stored, each), all(a is not b for a, b in zip(new, updates, strict=True))


def widest(*lists: Sequence[Tensor]) -> list[list[Tensor]]:
    """Bring lists of tensors to the dtype to compute in: of each place, the widest there, and at least fp32."""
    wide = [ew.wide_dtype(*[x.dtype for x in xs]) for xs in zip(*lists, strict=True)]
    return [ew.cast(xs, wide) for xs in lists]


def new_number(value: float | Tensor, device: torch.device) -> Tensor:
    """A number for a state: 0-d, in fp64 where the device has it, and a storage of its own."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype, copy=True)
    return torch.full((), value, dtype=dtype, device=device)


def store(values: list[Tensor], old: Sequence[Tensor], *, reuse: bool) -> list[Tensor]:
    """Round values to the pinned dtypes of the old state; with ``reuse``, into its storage."""
    if reuse and not all(map(is_, values, old)):
        return ew.copy(values, into=old)
    return ew.cast_like(values, old)


def new_count(device: torch.device) -> Tensor:
    """A step count: a 0-d int64 tensor."""
    return torch.zeros((), dtype=torch.int64, device=device)


def power(base: float | Tensor, count: Tensor) -> Tensor:
    """Raise to a step count, in fp64 where the device has it."""
    return torch.pow(base, to_floating(count))


def to_floating(count: Tensor) -> Tensor:
    """A step count to compute with: fp64 where the device has it."""
    return count.to(torch.float32 if count.device.type == "mps" else torch.float64)
