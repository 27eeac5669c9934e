"""Check the inputs of `orthogonalize`, and find tensors that share memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from muonfx.polar.policy import SUPPORTED


def check_matrix(x: Tensor, name: str) -> None:
    """Raise an error unless `x` is a dense tensor `(..., m, n)` of a supported dtype; the error begins with `name`."""
    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"{name}: found {type(x).__name__}, expected a torch.Tensor of shape (..., m, n)"
        )
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


def sharing(xs: Sequence[Tensor]) -> set[int]:
    """Return the indices of tensors that cannot be overwritten one by one, because they share memory.

    For ``[x, x[:1], y]``, the result is ``{0, 1}``. A tensor whose own elements share memory, as after `expand`, counts
    too.
    """
    if _are_disjoint(xs):
        return set()
    # The memory of each tensor from its first element to its last: (start, end, index).
    overlapping: set[int] = set()
    spans: list[tuple[int, int, int]] = []
    for i, x in enumerate(xs):
        if overlaps_itself(x):
            overlapping.add(i)
        if x.numel() and x.data_ptr():  # meta tensors have no memory
            spans.append((x.data_ptr(), x.data_ptr() + _bytes_spanned(x), i))
    # In the order of their starts, a span overlaps an earlier one if it starts before the largest end of those.
    largest_end = 0
    index_of_largest_end = -1
    for start, end, i in sorted(spans):
        if start < largest_end:
            overlapping |= {i, index_of_largest_end}
        if end > largest_end:
            largest_end = end
            index_of_largest_end = i
    return overlapping


def _are_disjoint(xs: Sequence[Tensor]) -> bool:
    """Return True if all tensors are contiguous and share no memory: the usual case, in few calls."""
    if not all(map(Tensor.is_contiguous, xs)):
        return False
    starts = list(map(Tensor.data_ptr, xs))
    ends = sorted(map(operator.add, starts, [x.nbytes for x in xs]))
    # Spans are disjoint if each ends, in the order of the ends, before the next begins, in the order of the starts.
    return all(map(operator.le, ends, sorted(starts)[1:]))


def _bytes_spanned(x: Tensor) -> int:
    """Return the number of bytes from the first element of a nonempty tensor to its last, with the gaps between."""
    last_offset = sum(
        [(side - 1) * stride for side, stride in zip(x.shape, x.stride(), strict=True)]
    )
    return (last_offset + 1) * x.itemsize


def overlaps_itself(x: Tensor) -> bool:
    """Return True if several elements of the tensor may be in the same memory, as after `expand`."""
    if x.is_contiguous():
        return False
    # Go from the dim with the smallest stride to the largest: a step in a dim must go beyond all elements of the dims
    # before it. ``last_offset`` is the offset of the last of these elements.
    last_offset = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= last_offset:
            return True
        last_offset += (size - 1) * stride
    return False
