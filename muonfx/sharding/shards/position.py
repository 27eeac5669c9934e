"""`ShardPosition`: which elements of a tensor a rank holds.

A *shard* is the part of a tensor that one rank holds. The *whole* is the tensor as one process would hold it. There is
one class for the position of a shard, `ShardPosition`, whether its elements are some indices of each dim or an interval
of the flattened whole. It has no values: these are in the *local tensor* of the rank, which has one dim if the shard
is an interval, else as many dims as the whole.

Three classes are about less than a shard or about more than its position, and cannot be one of them:

- a `Box` is a rectangular part of the whole. A shard consists of boxes, and so does the overlap of two shards.
- a `ShardView` says where one box is in the local tensor, and is computed once. A box has offsets in the whole only.
- a `FlatShard` is the position of an interval together with its values, as a leaf of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.sharding.shards.boxes import Box, Span, boxes_of_interval, intersection


class ShardView(NamedTuple):
    """Where one box (a rectangular part) of a whole tensor is within a shard. `of` returns it as a view.

    It is computed once from shapes, and applied in each step.
    """

    interval: tuple[int, int] | None
    """For a 1-d shard, the start and the number of the elements to view in the shape `sizes`; None for an n-d shard."""
    sizes: tuple[int, ...]
    """The shape in which the interval is viewed."""
    narrowed: tuple[tuple[int, int, int], ...]
    """The arguments (dim, start, length) of each call of `torch.narrow` that selects the box."""

    def of(self, local: Tensor) -> Tensor:
        """Return this box of a shard, given as the tensor `local`, as a view.

        For a 1-d shard, the elements 2 to 7 may be viewed as a matrix of shape (3, 2), of which a column is selected:

        >>> view = ShardView(interval=(2, 6), sizes=(3, 2), narrowed=((1, 0, 1),))
        >>> view.of(torch.arange(10)).flatten()
        tensor([2, 4, 6])
        """
        box = local
        if self.interval is not None:
            start, numel = self.interval
            is_whole_shard = numel == local.numel()
            if not is_whole_shard:
                box = box.narrow(0, start, numel)
            box = box.view(self.sizes)
        for dim, start, length in self.narrowed:
            box = box.narrow(dim, start, length)
        return box

    def of_each(self, stack: Tensor) -> tuple[Tensor, ...]:
        """Return this box of each of several shards of one shape, which are stacked along dim 0, as views.

        The result is equal to ``[self.of(shard) for shard in stack]``. In each step, a few calls for the whole stack
        take less time than a few for each shard.

        >>> rows = ShardView(None, (4, 2), ((0, 1, 2),))  # rows 1 and 2 of a shard of shape (4, 2)
        >>> [view.tolist() for view in rows.of_each(torch.arange(16).view(2, 4, 2))]
        [[[2, 3], [4, 5]], [[10, 11], [12, 13]]]
        """
        # Dim 0 of the stack counts the shards, so each dim of a shard is one dim later in the stack.
        if self.interval is not None:
            start, numel = self.interval
            stack = stack.narrow(1, start, numel).view(len(stack), *self.sizes)
        for dim, start, length in self.narrowed:
            stack = stack.narrow(dim + 1, start, length)
        return stack.unbind()


def boxes_in(local: Tensor, views: Iterable[ShardView]) -> list[Tensor]:
    """Return some boxes of a shard as views of its local tensor."""
    return [view.of(local) for view in views]


class ShardPosition(NamedTuple):
    """Which elements of a whole tensor are in a rank's shard, without their values.

    Build it by `whole`, `interval` or `grid`. `cut` copies the shard out of a whole tensor, and `paste` copies it back.
    The attribute ``boxes`` lists the elements as rectangular parts.

    >>> position = ShardPosition.interval(
    ...     (4, 5), 3, 8
    ... )  # elements 3 to 7: the end of row 0 and the start of row 1
    >>> position.shape, [box.sizes for box in position.boxes]
    ((5,), [(1, 2), (1, 3)])
    >>> position.cut(torch.arange(20.0).reshape(4, 5))
    tensor([3., 4., 5., 6., 7.])
    """

    shape: tuple[int, ...]
    """The shape of the shard: one dim for an interval, also of a shard, else as many dims as the whole tensor."""
    boxes: tuple[Box, ...]
    """The elements as nonempty boxes (offsets and sizes) of the whole tensor, in the order of the shard."""
    start: int | None = None
    """The first element of an interval in the flattened whole tensor; None if it was not built by `interval`."""
    spans: tuple[tuple[Span, ...], ...] = ()
    """For each dim of the whole tensor, the spans (start, end) of indices in the shard; empty for a 1-d shard."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> ShardPosition:
        """Return the position of a shard with all elements of a tensor of this shape."""
        return cls.grid([[(0, size)] for size in shape])

    @classmethod
    def interval(cls, shape: Sequence[int], start: int, stop: int) -> ShardPosition:
        """Return the position of elements ``start:stop`` of a tensor of this shape, flattened. The shard is 1-d."""
        numel = max(0, stop - start)
        boxes = boxes_of_interval(tuple(shape), start, stop)
        return cls((numel,), tuple(boxes), start)

    @classmethod
    def grid(cls, spans: Sequence[Sequence[Span]]) -> ShardPosition:
        """Return the position of some indices of each dim. `spans` lists index ranges (start, end) for each dim.

        The shard has the elements at all combinations of these indices.

        >>> ShardPosition.grid([[(0, 1), (2, 3)], [(0, 4)]]).shape  # rows 0 and 2, columns 0 to 3
        (2, 4)
        """
        spans_by_dim = tuple(map(_nonempty, spans))
        shape = tuple(map(_count, spans_by_dim))
        # Each combination of one span for each dim is one box: here two spans of rows with one of columns, two boxes.
        combinations = product(*spans_by_dim)
        boxes = tuple(map(Box.of_spans, combinations))
        return cls(shape, boxes, spans=spans_by_dim)

    def interval_of_shard(self, start: int, stop: int) -> ShardPosition:
        """Return the position of elements ``start:stop`` of this shard, flattened. The new shard is 1-d.

        ZeRO flattens the shard of a tensor-parallel rank, and partitions it once more. Elements 4 to 8 of the shard
        below are the end of its row 1, which has three elements in all, and row 2:

        >>> columns = ShardPosition.grid(
        ...     [((0, 4),), ((2, 5),)]
        ... )  # columns 2 to 4 of a matrix of shape (4, 5)
        >>> [(box.offsets, box.sizes) for box in columns.interval_of_shard(4, 9).boxes]
        [((1, 3), (1, 2)), ((2, 2), (1, 3))]
        """
        # The interval is first divided into boxes of the shard, and each of these into boxes of the whole tensor.
        boxes: list[Box] = []
        for local_box in boxes_of_interval(self.shape, start, stop):
            boxes += self._boxes_of_whole(local_box)
        numel = max(0, stop - start)
        return ShardPosition((numel,), tuple(boxes))

    def _boxes_of_whole(self, local_box: Box) -> list[Box]:
        """Find a rectangular part of the shard in the whole tensor. Return it as boxes, in the order of the shard.

        It is one box, unless the shard has gaps: the shard below has columns 0, 1, 4 and 5, so each row of the part is
        two boxes.

        >>> columns = ShardPosition.grid([[(0, 2)], [(0, 2), (4, 6)]])
        >>> [box.offsets for box in columns._boxes_of_whole(Box((0, 0), (2, 4)))]
        [(0, 0), (0, 4), (1, 0), (1, 4)]
        """
        # For each dim, the indices of the part in the whole tensor, as spans: here rows (0, 2), columns (0, 2), (4, 6).
        spans_by_dim = list(map(_spans_within, self.spans, local_box.offsets, local_box.sizes))
        # The shard has its elements row by row: after columns 0 and 1 of row 0 come its columns 4 and 5. A box of
        # columns 0 and 1 of both rows would have another order. So where a dim has gaps, each index of the dims before
        # it (here each row) has boxes of its own.
        dims_with_gaps = [dim for dim, spans in enumerate(spans_by_dim) if len(spans) > 1]
        if dims_with_gaps:
            for dim in range(dims_with_gaps[-1]):
                spans_by_dim[dim] = _one_by_one(spans_by_dim[dim])
        combinations = product(*spans_by_dim)
        return list(map(Box.of_spans, combinations))

    @property
    def numel(self) -> int:
        """The number of elements in the shard."""
        return prod(self.shape)

    def fits(self, local: Tensor) -> bool:
        """Return True if a tensor has the shape of the shard. Any empty tensor fits an empty shard."""
        return tuple(local.shape) == self.shape or (self.numel == 0 and local.numel() == 0)

    def blank(self, like: Tensor) -> Tensor:
        """Return a new uninitialized shard with the dtype and the device of ``like``."""
        return torch.empty(self.shape, dtype=like.dtype, device=like.device)

    def cut(self, whole: Tensor) -> Tensor:
        """Copy the elements of the shard out of a whole tensor, and return them."""
        local = self.blank(whole)
        for box in self.boxes:
            self.view(box).of(local).copy_(box.of(whole))
        return local

    def paste(self, local: Tensor, whole: Tensor) -> None:
        """Copy a shard, the tensor ``local``, into its place in a whole tensor. This overwrites ``whole``."""
        for box in self.boxes:
            box.of(whole).copy_(self.view(box).of(local))

    def overlaps(self, boxes: Sequence[Box]) -> list[Box]:
        """Return the overlaps of this shard with some boxes of the whole tensor, also as boxes.

        >>> rows = ShardPosition.grid(
        ...     [[(0, 2)], [(0, 5)]]
        ... )  # rows 0 and 1 of a matrix with 5 columns
        >>> rows.overlaps([Box((1, 0), (2, 3))])  # of rows 1 and 2, columns 0 to 2
        [Box(offsets=(1, 0), sizes=(1, 3))]
        """
        overlaps: list[Box] = []
        for shard_box in self.boxes:
            for box in boxes:
                overlap = intersection(shard_box, box)
                if overlap is not None:
                    overlaps.append(overlap)
        return overlaps

    def view(self, box: Box) -> ShardView:
        """Find a box of the whole tensor in the shard. The result returns the box of a local tensor as a view.

        Raises:
            ValueError: the box is not inside one of the ``boxes`` of the shard.

        >>> position = ShardPosition.interval((4, 5), 3, 17)  # elements 3 to 16
        >>> box = Box((3, 0), (1, 2))  # the first two elements of row 3
        >>> position.view(box).of(torch.arange(3, 17))
        tensor([[15, 16]])
        """
        start = 0  # the index in a 1-d shard at which the elements of the current `shard_box` begin
        for shard_box in self.boxes:
            if shard_box.contains(box):
                if self.spans:  # an n-d shard
                    return _view_in_grid(box, self.spans, self.shape)
                return _view_in_interval(box, shard_box, start)
            start += shard_box.numel
        raise ValueError(f"found {box}, expected a box that is within one box of {self}")


def _view_in_grid(box: Box, spans: Sequence[Sequence[Span]], shape: tuple[int, ...]) -> ShardView:
    """Return the place of a box in an n-d shard: in each dim, behind the indices of the shard that are lower."""
    offsets = list(map(_count_before, spans, box.offsets))
    narrowed = _narrowed(offsets, box.sizes, shape)
    return ShardView(None, shape, narrowed)


def _view_in_interval(box: Box, shard_box: Box, start: int) -> ShardView:
    """Return where a box is in a 1-d shard, which has the elements of the larger `shard_box` from index `start` on.

    These elements are viewed in the shape of the `shard_box`, and narrowed to the box. Here the shard has rows 1 and 2
    of a matrix with five columns from index 3 on, and the box is row 1:

    >>> _view_in_interval(Box((1, 0), (1, 5)), shard_box=Box((1, 0), (2, 5)), start=3)
    ShardView(interval=(3, 10), sizes=(2, 5), narrowed=((0, 0, 1),))
    """
    interval = (start, shard_box.numel)
    shape = shard_box.sizes
    offsets = list(map(int.__sub__, box.offsets, shard_box.offsets))
    narrowed = _narrowed(offsets, box.sizes, shape)
    return ShardView(interval, shape, narrowed)


def _nonempty(spans: Sequence[Span]) -> tuple[Span, ...]:
    return tuple([(start, stop) for start, stop in spans if start < stop])


def _count(spans: Sequence[Span]) -> int:
    """Return the number of indices in some disjoint spans."""
    return sum(stop - start for start, stop in spans)


def _count_before(spans: Sequence[Span], offset: int) -> int:
    """Return the number of indices in some disjoint spans that are lower than ``offset``."""
    return sum(max(0, min(stop, offset) - start) for start, stop in spans)


def _one_by_one(spans: Sequence[Span]) -> list[Span]:
    """Split spans (start, exclusive end) into a span for each index.

    >>> _one_by_one([(0, 2), (5, 6)])
    [(0, 1), (1, 2), (5, 6)]
    """
    single: list[Span] = []
    for start, stop in spans:
        for index in range(start, stop):
            single.append((index, index + 1))
    return single


def _spans_within(spans: Sequence[Span], offset: int, size: int) -> list[Span]:
    """Convert a range of indices in a shard, ``offset`` to ``offset + size``, to indices in the whole tensor.

    All are along one dim. ``spans`` has the indices of the shard in the whole tensor, as ranges (start, exclusive end).
    The shard below has the indices 0, 1, 6, 7, 8 of the whole tensor. Those at 1, 2 and 3 in the shard are 1, 6, 7:

    >>> _spans_within([(0, 2), (6, 9)], 1, 3)
    [(1, 2), (6, 8)]
    """
    inner_spans: list[Span] = []
    local_start = 0  # the index in the shard of the first index of the span
    for start, stop in spans:
        # Add this to an index in the shard, to get the index in the whole.
        to_whole = start - local_start
        # The requested indices that are in this span: none if they end before it, or begin after it.
        first = max(start, offset + to_whole)
        end = min(stop, offset + size + to_whole)
        if first < end:
            inner_spans.append((first, end))
        local_start += stop - start
    return inner_spans


def _narrowed(
    offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    """Return arguments (dim, start, length) of `torch.narrow`, for each dim in which a box is smaller than `shape`."""
    arguments: list[tuple[int, int, int]] = []
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        if length != shape[dim]:
            arguments.append((dim, start, length))
    return tuple(arguments)
