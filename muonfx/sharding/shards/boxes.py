"""`Box`: a rectangular part of an n-dimensional array, given by its offset and its size in each dim.

A shard of a `DTensor` is a box. An interval of a flattened array, which ZeRO gives to a rank, is a few boxes: for a
matrix the end of the first row, the whole rows, and the start of the last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of an n-dimensional array, such as some rows of a matrix: an offset and a size per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements in the box."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """The exclusive end of the box in each dim: offset plus size."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box (rectangular part of an array) in which two boxes overlap, or None if they do not overlap."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    sizes = tuple(min(x, y) - offset for x, y, offset in zip(a.ends, b.ends, offsets, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def boxes_of_interval(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the elements ``start:stop`` of a flattened array as a list of boxes (rectangular parts), in order."""
    if stop <= start:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, last = start // row, stop // row  # whole rows begin at `first`, or one row later, and end before `last`
    head, tail = start % row, stop % row

    def within(index: int, begin: int, end: int) -> list[Box]:
        inner = boxes_of_interval(shape[1:], begin, end)
        return [Box((index, *box.offsets), (1, *box.sizes)) for box in inner]

    if first == last:
        return within(first, head, tail)
    found: list[Box] = []
    if head:
        found += within(first, head, row)
        first += 1
    if first < last:
        found.append(Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + within(last, 0, tail)


def cover(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Check that boxes contain each element of an array exactly once. Return None, or the reason why they do not."""
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape) or any(map(int.__gt__, box.ends, shape)):
            return "go beyond its sides"
    held, wanted = sum(box.numel for box in boxes), prod(shape)
    if held > wanted:
        return "overlap"
    if held != wanted:
        return f"hold {held} elements of {wanted}"
    filled = [box for box in boxes if box.numel]
    if len(filled) < 2:
        return None
    # Sweep along the dim with the most distinct offsets, where the fewest boxes overlap at a time.
    dim = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box in filled}))
    filled.sort(key=lambda box: box.offsets[dim])
    opened: list[Box] = []
    for box in filled:
        opened = [other for other in opened if other.ends[dim] > box.offsets[dim]]
        if any(intersection(box, other) for other in opened):
            return "overlap"
        opened.append(box)
    return None
