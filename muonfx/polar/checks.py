"""Checks of the matrices that `orthogonalize` receives, and of the memory that tensors share."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from muonfx.polar.policy import SUPPORTED


def check_matrix(x: torch.Tensor, name: str) -> None:
    """Raise unless `x` is a dense tensor `(..., m, n)` of a supported floating dtype."""
    if not isinstance(x, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name}: found {type(x).__name__}, expected a torch.Tensor of shape (..., m, n)")
    if x.dtype not in SUPPORTED:
        raise TypeError(
            f"{name}: found dtype {x.dtype} (shape {tuple(x.shape)}), expected one of {', '.join(map(str, SUPPORTED))}"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: found layout {x.layout}, expected a dense tensor: x.to_dense()")
    if x.ndim < 2:
        raise ValueError(
            f"{name}: found shape {tuple(x.shape)}, expected (..., m, n); "
            "flatten it to a matrix, or leave vectors and scalars to another transform"
        )


def check_out(out: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise unless each tensor of `out` fits its input and shares memory with no other tensor."""
    if len(out) != len(xs):
        raise ValueError(f"out: found {len(out)} tensors for {len(xs)} inputs, expected one for each")
    for y, x, name in zip(out, xs, names, strict=True):
        if not isinstance(y, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name}: found {type(y).__name__}, expected a torch.Tensor")
        if y.dtype != x.dtype:
            raise TypeError(f"{name}: found dtype {y.dtype}, expected that of its input, {x.dtype}")
        if y.shape != x.shape or y.device != x.device:
            raise ValueError(
                f"{name}: found shape {tuple(y.shape)} on {y.device}, "
                f"expected those of its input, {tuple(x.shape)} on {x.device}"
            )
        if overlaps_itself(y):
            raise ValueError(f"{name}: found an expanded tensor, whose elements share memory; expected one to write to")
    others = [x for x, y in zip(xs, out, strict=True) if not _is_same(x, y)]
    for i in sharing([*out, *others]):
        if i < len(out):
            raise ValueError(
                f"{names[i]}: found memory shared with another input or output, expected its own, or exactly that of "
                "its own input"
            )


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if two tensors of one shape are the same elements in memory."""
    same = x.untyped_storage()._cdata == y.untyped_storage()._cdata
    return same and x.storage_offset() == y.storage_offset() and x.stride() == y.stride()


def sharing(xs: Sequence[torch.Tensor]) -> set[int]:
    """Return the indices of the tensors whose memory overlaps another's, or that overlap themselves."""
    starts = list(map(torch.Tensor.data_ptr, xs))
    if all(map(torch.Tensor.is_contiguous, xs)):
        # Spans are disjoint if each ends, in the order of the ends, before the next begins, in the order of the starts.
        ends = sorted(map(operator.add, starts, [x.nbytes for x in xs]))
        if all(map(operator.le, ends, sorted(starts)[1:])):
            return set()
    spans: list[tuple[int, int, int]] = []
    found: set[int] = set()
    for i, (x, start) in enumerate(zip(xs, starts, strict=True)):
        size = x.nbytes
        if not size:
            continue
        if not x.is_contiguous():
            if overlaps_itself(x):
                found.add(i)
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            size = (last + 1) * x.itemsize
        if start:  # meta tensors have no memory
            spans.append((start, start + size, i))
    spans.sort()
    end, holder = 0, -1
    for start, stop, i in spans:
        if start < end:
            found |= {i, holder}
        if stop > end:
            end, holder = stop, i
    return found


def overlaps_itself(x: torch.Tensor) -> bool:
    """Return True if elements of a tensor may share memory, as in an expanded tensor."""
    if x.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
