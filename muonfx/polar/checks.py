"""Check the inputs of `orthogonalize`, and find tensors that share memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from muonfx.polar.policy import SUPPORTED


def check_matrix(x: torch.Tensor, name: str) -> None:
    """Raise an error unless `x` is a dense tensor `(..., m, n)` of a supported dtype; the error begins with `name`."""
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


def sharing(xs: Sequence[torch.Tensor]) -> set[int]:
    """Return the indices of tensors that share memory with another tensor, or whose own elements share memory."""
    starts = list(map(torch.Tensor.data_ptr, xs))
    if all(map(torch.Tensor.is_contiguous, xs)):
        # Spans are disjoint if each ends, in the order of the ends, before the next begins, in the order of the starts.
        ends = sorted(map(operator.add, starts, [x.nbytes for x in xs]))
        if all(map(operator.le, ends, sorted(starts)[1:])):
            return set()
    spans: list[tuple[int, int, int]] = []
    overlapping: set[int] = set()
    for i, (x, start) in enumerate(zip(xs, starts, strict=True)):
        size = x.nbytes
        if not size:
            continue
        if not x.is_contiguous():
            if overlaps_itself(x):
                overlapping.add(i)
            last_offset = sum([(side - 1) * stride for side, stride in zip(x.shape, x.stride(), strict=True)])
            size = (last_offset + 1) * x.itemsize
        if start:  # meta tensors have no memory
            spans.append((start, start + size, i))
    spans.sort()
    end = 0
    last_index = -1  # of the tensor that ends at `end`
    for start, stop, i in spans:
        if start < end:
            overlapping |= {i, last_index}
        if stop > end:
            end = stop
            last_index = i
    return overlapping


def overlaps_itself(x: torch.Tensor) -> bool:
    """Return True if several elements of the tensor may be in the same memory, as after `expand`."""
    if x.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
