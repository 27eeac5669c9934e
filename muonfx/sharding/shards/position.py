"""Shards: the part of a tensor that a rank holds.

The *whole* is the tensor as one process would hold it. A `Piece` describes which elements of the whole a rank holds, as
boxes (rectangular parts; see `muonfx.sharding.shards.boxes`). The *local tensor* holds the values of these elements. It
has one dim if they are an interval of the flattened whole, else as many dims as the whole. A `Window` is the position
of one box in a local tensor.

A `FlatPiece` is an interval together with its values, as a leaf of a checkpoint. An `IntervalTensor` wraps a
`FlatPiece` where torch requires a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from muonfx.sharding.shards.boxes import Box, boxes_of_interval, intersection

if TYPE_CHECKING:
    pass


Span = tuple[int, int]
"""A start and an exclusive end."""


class Window(NamedTuple):
    """Where one rectangular part (a box) of a whole tensor is within a shard. `of` returns it as a view."""

    interval: tuple[int, int] | None
    """For a 1-d shard, the start and the number of the elements to view in the shape `sizes`; None for an n-d shard."""
    sizes: tuple[int, ...]
    """The shape in which the interval is viewed."""
    narrowed: tuple[tuple[int, int, int], ...]
    """The arguments (dim, start, length) of each call of `torch.narrow` that selects the box."""

    def of(self, local: Tensor) -> Tensor:
        """Return this rectangular part of a shard, given as the tensor `local`, as a view."""
        if self.interval is not None:
            first, numel = self.interval
            local = (local if numel == local.numel() else local.narrow(0, first, numel)).view(self.sizes)
        for dim, first, length in self.narrowed:
            local = local.narrow(dim, first, length)
        return local

    def of_each(self, stack: Tensor) -> tuple[Tensor, ...]:
        """Return this part of each of several shards of one shape, which are stacked along dim 0, as views."""
        # A few calls for the whole stack take less time than `of` for each shard.
        if self.interval is not None:
            first, numel = self.interval
            stack = stack.narrow(1, first, numel).view(len(stack), *self.sizes)
        for dim, first, length in self.narrowed:
            stack = stack.narrow(dim + 1, first, length)
        return stack.unbind()


class Piece(NamedTuple):
    """Which elements of a whole tensor a rank holds: their positions, without values.

    Build it by `whole`, `interval` or `grid`. A *shard* is the tensor of these elements: `cut` copies it out of a whole
    tensor, and `paste` copies it back. The attribute ``boxes`` lists the elements as rectangular parts.

    >>> piece = Piece.interval((4, 5), 3, 8)  # elements 3 to 7: the end of row 0 and the start of row 1
    >>> piece.shape, [box.sizes for box in piece.boxes]
    ((5,), [(1, 2), (1, 3)])
    >>> piece.cut(torch.arange(20.0).reshape(4, 5))
    tensor([3., 4., 5., 6., 7.])
    """

    shape: tuple[int, ...]
    """The shape of the shard: one dim for an interval, also of a shard, else as many dims as the whole tensor."""
    boxes: tuple[Box, ...]
    """The elements as nonempty boxes (offsets and sizes) of the whole tensor, in the order of the shard."""
    start: int | None = None
    """The first element of an interval in the flattened whole tensor; None if the piece was not built by `interval`."""
    spans: tuple[tuple[Span, ...], ...] = ()
    """For each dim of the whole tensor, the spans (start, end) of indices in the piece; empty for a 1-d shard."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Piece:
        """Return the `Piece` with all elements of a tensor of this shape."""
        return cls.grid([((0, size),) for size in shape])

    @classmethod
    def interval(cls, shape: Sequence[int], start: int, stop: int) -> Piece:
        """Return the `Piece` with elements ``start:stop`` of a tensor of this shape, flattened. Its shard is 1-d."""
        return cls((max(0, stop - start),), tuple(boxes_of_interval(tuple(shape), start, stop)), start)

    @classmethod
    def grid(cls, spans: Sequence[Sequence[Span]]) -> Piece:
        """Return the `Piece` with some indices of each dim. `spans` lists index ranges (start, end) for each dim.

        >>> Piece.grid([[(0, 1), (2, 3)], [(0, 4)]]).shape  # rows 0 and 2, columns 0 to 3
        (2, 4)
        """
        kept = tuple(tuple(span for span in along if span[1] > span[0]) for along in spans)
        boxes = [
            Box(tuple(start for start, _ in corner), tuple(stop - start for start, stop in corner))
            for corner in product(*kept)
        ]
        return cls(tuple(sum(stop - start for start, stop in along) for along in kept), tuple(boxes), None, kept)

    def interval_of_shard(self, start: int, stop: int) -> Piece:
        """Return the `Piece` with elements ``start:stop`` of this shard, flattened. Its own shard is 1-d.

        ZeRO flattens the shard of a tensor-parallel rank, and partitions it once more.

        >>> columns = Piece.grid([((0, 4),), ((2, 5),)])  # columns 2 to 4 of a matrix of shape (4, 5)
        >>> [(box.offsets, box.sizes) for box in columns.interval_of_shard(4, 9).boxes]
        [((1, 3), (1, 2)), ((2, 2), (1, 3))]
        """
        boxes: list[Box] = []
        for local_box in boxes_of_interval(self.shape, start, stop):
            boxes += self._boxes_of_whole(local_box)
        return Piece((max(0, stop - start),), tuple(boxes))

    def _boxes_of_whole(self, local_box: Box) -> list[Box]:
        """Return the boxes of the whole tensor with the elements of a box of the shard, in the order of the shard."""
        spans_by_dim = [
            _spans_within(spans, offset, size)
            for spans, offset, size in zip(self.spans, local_box.offsets, local_box.sizes, strict=True)
        ]
        several = [dim for dim, spans in enumerate(spans_by_dim) if len(spans) > 1]
        # A box must be contiguous in the shard: before a dim with several spans, each index has its own boxes.
        for dim in range(several[-1] if several else 0):
            spans_by_dim[dim] = [(index, index + 1) for span in spans_by_dim[dim] for index in range(*span)]
        boxes: list[Box] = []
        for corner in product(*spans_by_dim):
            offsets = tuple(start for start, _ in corner)
            sizes = tuple(stop - start for start, stop in corner)
            boxes.append(Box(offsets, sizes))
        return boxes

    @property
    def numel(self) -> int:
        """The number of elements that the rank holds."""
        return prod(self.shape)

    def fits(self, local: Tensor) -> bool:
        """Return True if a tensor has the shape of the shard. Any empty tensor fits an empty shard."""
        return tuple(local.shape) == self.shape or (self.numel == 0 and local.numel() == 0)

    def blank(self, like: Tensor) -> Tensor:
        """Return a new uninitialized shard with the dtype and the device of ``like``."""
        return torch.empty(self.shape, dtype=like.dtype, device=like.device)

    def cut(self, whole: Tensor) -> Tensor:
        """Copy the elements that the rank holds out of a whole tensor. Return them as the rank's shard."""
        local = self.blank(whole)
        for box in self.boxes:
            self.window(box).of(local).copy_(part(whole, box))
        return local

    def paste(self, local: Tensor, whole: Tensor) -> None:
        """Copy a shard, the tensor ``local``, into its place in a whole tensor. This overwrites ``whole``."""
        for box in self.boxes:
            part(whole, box).copy_(self.window(box).of(local))

    def shared(self, boxes: Sequence[Box]) -> list[Box]:
        """Return the overlaps of this shard with some boxes (rectangular parts of the whole tensor), also as boxes."""
        return [common for own in self.boxes for box in boxes if (common := intersection(own, box)) is not None]

    def window(self, box: Box) -> Window:
        """Find a box (a rectangular part of the whole tensor) in the shard, and return its place as a `Window`.

        Raises:
            ValueError: the box is not inside one of the piece's ``boxes``.

        >>> piece = Piece.interval((4, 5), 3, 17)
        >>> box = Box((3, 0), (1, 2))  # the first two elements of row 3
        >>> piece.window(box).of(torch.arange(3, 17))
        tensor([[15, 16]])
        """
        before = 0
        for own in self.boxes:
            if all(
                o <= b and b + n <= e for o, b, n, e in zip(own.offsets, box.offsets, box.sizes, own.ends, strict=True)
            ):
                if not self.spans:  # a 1-d shard, in which the boxes follow one another
                    inner = [b - o for b, o in zip(box.offsets, own.offsets, strict=True)]
                    return Window((before, own.numel), own.sizes, _narrowed(inner, box.sizes, own.sizes))
                # The local index along a dim: the indices of the spans before, and the offset within its own span.
                firsts = [
                    sum(stop - start for start, stop in along if stop <= o) + b - o
                    for along, o, b in zip(self.spans, own.offsets, box.offsets, strict=True)
                ]
                return Window(None, self.shape, _narrowed(firsts, box.sizes, self.shape))
            before += own.numel
        raise ValueError(f"found {box}, expected a box that is within one box of {self}")


def _spans_within(spans: Sequence[Span], offset: int, size: int) -> list[Span]:
    """Return the spans of indices that a dim of a shard has from ``offset`` on, for ``size`` indices of the shard.

    >>> _spans_within([(0, 2), (6, 9)], 1, 3)
    [(1, 2), (6, 8)]
    """
    parts: list[Span] = []
    first_index = 0  # of the current span, in the shard
    for start, stop in spans:
        begin = max(start, start + offset - first_index)
        end = min(stop, start + offset + size - first_index)
        if begin < end:
            parts.append((begin, end))
        first_index += stop - start
    return parts


def _narrowed(firsts: Sequence[int], lengths: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return arguments (dim, start, length) of `torch.narrow`, for each dim in which a box is smaller than `sizes`."""
    dims = enumerate(zip(firsts, lengths, sizes, strict=True))
    return tuple((dim, first, length) for dim, (first, length, size) in dims if length != size)


def part(tensor: Tensor, box: Box) -> Tensor:
    """Return the elements of a tensor in a rectangular part (a box), as a view."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor
