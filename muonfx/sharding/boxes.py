"""Boxes: parts of an n-dimensional array, by offsets and sizes.

A shard of a `DTensor` is a box. An interval of a flattened array, which is what a rank holds under ZeRO, is a few: of a
matrix the rest of the row that it begins in, the whole rows, and the beginning of the row that it ends in.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

__all__ = ["Box", "boxes_of_interval", "cover", "intersection"]


class Box(NamedTuple):
    """A part of an array: where it begins and how long it is, in each dim.

    >>> Box((2, 0), (3, 8)).numel
    24
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """The first place behind it in each dim."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes of one array have in common; None if they have no element in common.

    >>> intersection(Box((0, 0), (2, 4)), Box((1, 2), (4, 4)))
    Box(offsets=(1, 2), sizes=(1, 2))
    """
    offsets = tuple(map(max, a.offsets, b.offsets))
    sizes = tuple(min(x, y) - offset for x, y, offset in zip(a.ends, b.ends, offsets, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def boxes_of_interval(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut an interval of the flattened array into boxes, in order: at most 2n - 1 for n dims, so three for a matrix.

    Args:
        shape: of the array, which is flattened row by row.
        start: the first element.
        stop: the first behind the last.

    >>> boxes_of_interval((4, 5), 3, 17)
    [Box(offsets=(0, 3), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(2, 5)), Box(offsets=(3, 0), sizes=(1, 2))]
    """
    if stop <= start:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, last = start // row, stop // row  # rows that are whole begin at `first`, or behind it, and end before `last`
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
    """Say what is wrong if boxes do not hold every element of an array exactly once; None if they do.

    >>> cover((4,), [Box((0,), (2,)), Box((2,), (2,))])
    >>> cover((4,), [Box((0,), (2,)), Box((3,), (1,))])
    'hold 3 elements of 4'
    """
    if len(boxes) == 1 and boxes[0].sizes == shape and not any(boxes[0].offsets):
        return None
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape) or any(map(int.__gt__, box.ends, shape)):
            return "go beyond its sides"
    held, wanted = sum(box.numel for box in boxes), prod(shape)
    if held != wanted:
        return f"hold {held} elements of {wanted}"
    filled = [box for box in boxes if box.numel]
    if len(filled) < 2:
        return None
    # Along the dim that cuts finest, few boxes are open at a time.
    dim = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box in filled}))
    filled.sort(key=lambda box: box.offsets[dim])
    opened: list[Box] = []
    for box in filled:
        opened = [other for other in opened if other.ends[dim] > box.offsets[dim]]
        if any(intersection(box, other) for other in opened):
            return "overlap"
        opened.append(box)
    return None
