"""`Box`: a rectangular part of an n-dimensional tensor, and the algebra of boxes.

A shard of a `DTensor` is a box. An interval of a flattened tensor, which ZeRO gives to a rank, is a few boxes: for a
matrix the end of the first row, the whole rows, and the start of the last row. Every shard is therefore described by
boxes (see `ShardPosition`), so that two shards of any two layouts can be intersected in one way. It is also the unit
in which torch.distributed.checkpoint saves and loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

Span = tuple[int, int]
"""A range of indices along one dim: the start and the exclusive end."""


class Box(NamedTuple):
    """A rectangular part of an n-dimensional tensor, such as some rows of a matrix: an offset and a size per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of_spans(cls, spans: Sequence[Span]) -> Box:
        """Return the box with these ranges of indices (start, exclusive end), one for each dim."""
        offsets: list[int] = []
        sizes: list[int] = []
        for start, stop in spans:
            offsets.append(start)
            sizes.append(stop - start)
        return cls(tuple(offsets), tuple(sizes))

    @property
    def numel(self) -> int:
        """The number of elements in the box."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """The exclusive end of the box in each dim: offset plus size."""
        return tuple(map(int.__add__, self.offsets, self.sizes))

    def contains(self, box: Box) -> bool:
        """Return True if all elements of another box are in this box."""
        starts_inside = all(map(int.__le__, self.offsets, box.offsets))
        return starts_inside and all(map(int.__le__, box.ends, self.ends))

    def of(self, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor that are in this box, as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, size)
        return tensor


def numel_of(boxes: Iterable[Box]) -> int:
    """Return the number of elements in some boxes that do not overlap."""
    return sum(box.numel for box in boxes)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box in which two boxes overlap, or None if they do not overlap."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = tuple(map(min, a.ends, b.ends))
    is_empty = any(map(int.__ge__, offsets, ends))
    if is_empty:
        return None
    spans = list(zip(offsets, ends, strict=True))
    return Box.of_spans(spans)


def boxes_of_interval(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the elements ``start:stop`` of a flattened tensor as a list of boxes, in order.

    They are at most the end of a row, some whole rows, and the start of a row; within a row of more than one dim, the
    same once more.

    >>> boxes_of_interval((4, 5), 3, 10)  # the end of row 0, and row 1
    [Box(offsets=(0, 3), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(1, 5))]
    """
    if stop <= start:
        return []
    if not shape:  # a 0-d tensor has one element
        return [Box((), ())]
    # The row in which each end is, and the elements of this row before it. In the shape (4, 5), element 13 is in row 2
    # behind three others: divmod(13, 5) is (2, 3).
    row_numel = prod(shape[1:])
    first_row, head = divmod(start, row_numel)
    last_row, tail = divmod(stop, row_numel)
    # 1. All elements are in one row, which is divided like a tensor with one dim fewer.
    if first_row == last_row:
        return _boxes_in_row(shape, first_row, head, tail)
    # 2. The end of the first row, whole rows, and the start of the last row. Each of the three may be absent.
    boxes: list[Box] = []
    if head:  # the first row is not whole
        boxes += _boxes_in_row(shape, first_row, head, row_numel)
        first_row += 1
    if first_row < last_row:  # all whole rows are one box
        zeros = (0,) * (len(shape) - 1)
        rows = last_row - first_row
        boxes.append(Box((first_row, *zeros), (rows, *shape[1:])))
    boxes += _boxes_in_row(shape, last_row, 0, tail)  # no box if the interval ends with a whole row
    return boxes


def _boxes_in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    """Return the elements ``start:stop`` of ``tensor[row]``, flattened, as boxes of the tensor with this shape."""
    boxes_of_row = boxes_of_interval(shape[1:], start, stop)
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes_of_row]


def cover(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Check that boxes contain each element of a tensor exactly once. Return None, or the reason why they do not.

    The reason is the end of a sentence in an error, such as "the chunks of 'w' overlap".

    >>> cover((4,), [Box((0,), (3,))])
    'hold 3 elements of 4'
    """
    # 1. Each box is inside the tensor.
    whole = Box((0,) * len(shape), tuple(shape))
    for box in boxes:
        has_all_dims = len(box.offsets) == len(shape) and len(box.sizes) == len(shape)
        if not has_all_dims or not whole.contains(box):
            return "go beyond its sides"
    # 2. Boxes inside the tensor that do not overlap contain all of its elements if they have as many elements.
    numel = numel_of(boxes)
    if numel < whole.numel:
        return f"hold {numel} elements of {whole.numel}"
    nonempty = [box for box in boxes if box.numel]  # an empty box overlaps no other
    # More elements than the tensor has cannot be without overlap, so the slower comparison is not needed then.
    if numel > whole.numel or _do_overlap(nonempty):
        return "overlap"
    return None


def _do_overlap(boxes: list[Box]) -> bool:
    """Return True if two of some nonempty boxes have an element in common.

    A sweep along one dim compares each box only with those that are still open where it begins. For rows ``0:2``,
    ``1:3`` and ``4:5`` of a matrix, the third is compared with none.

    >>> _do_overlap([Box((0,), (2,)), Box((1,), (2,)), Box((4,), (1,))])
    True
    """
    if len(boxes) < 2:
        return False
    # 1. Sweep along the dim in which boxes begin at the most different indices: few of them are open at a time there.
    offsets_by_dim = list(zip(*[box.offsets for box in boxes], strict=True))
    dim = max(range(len(offsets_by_dim)), key=lambda dim: len(set(offsets_by_dim[dim])))
    # 2. Visit the boxes in the order in which they begin along this dim.
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        start = box.offsets[dim]
        # A box that ends where this one begins, or before, overlaps neither this one nor any later one.
        open_boxes = [earlier for earlier in open_boxes if earlier.ends[dim] > start]
        if any(intersection(box, earlier) for earlier in open_boxes):
            return True
        open_boxes.append(box)
    return False
