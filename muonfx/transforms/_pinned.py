"""Arithmetic with states of a pinned dtype: compute wide, store as pinned."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from muonfx import elementwise as ew
from muonfx import tree
from muonfx.tree import PyTree

__all__ = ["new_count", "power", "store", "widen", "zeros"]


def zeros(params: PyTree, dtype: torch.dtype | None) -> PyTree:
    """Zeros like the parameters, in a pinned dtype; None pins each parameter's own."""
    return tree.map(lambda p: torch.zeros_like(p, dtype=dtype or p.dtype, requires_grad=False), params)


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
    return torch.pow(base, count.to(torch.float32 if count.device.type == "mps" else torch.float64))
