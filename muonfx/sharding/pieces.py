"""What a rank holds of a tensor.

Four names. The *whole* is the tensor as one process would hold it. A *piece* is the part of it that a rank holds, as
boxes of the whole. The *local tensor* holds a piece's values: for a piece that is an interval of the flattened whole it
has one dim, else as many as the whole. A *window* is a view of a local tensor: the place of one box in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.boxes import Box, boxes_of_interval, intersection

__all__ = ["Piece", "Window"]

Span = tuple[int, int]
"""A beginning and the first index behind the end."""


class Window(NamedTuple):
    """The place of a box in local tensors of one piece; found once, used at every step.

    >>> Piece.interval((4, 5), 3, 17).window(Box((1, 1), (2, 2))).of(torch.arange(14))
    tensor([[3, 4],
            [8, 9]])
    """

    interval: tuple[int, int] | None
    """The elements of a local tensor of one dim; None: of one with the dims of the whole."""
    sizes: tuple[int, ...]
    """In which these are viewed."""
    narrowed: tuple[tuple[int, int, int], ...]
    """Dim, first index and length, of each dim that is not taken whole."""

    def of(self, local: Tensor) -> Tensor:
        """The view of a local tensor."""
        if self.interval is not None:
            first, numel = self.interval
            local = (local if numel == local.numel() else local.narrow(0, first, numel)).view(self.sizes)
        for dim, first, length in self.narrowed:
            local = local.narrow(dim, first, length)
        return local


class Piece(NamedTuple):
    """The part of a tensor that a rank holds: a value, made by `whole`, `interval` or `grid`.

    >>> piece = Piece.interval((4, 5), 3, 8)
    >>> piece.shape, [box.sizes for box in piece.boxes]
    ((5,), [(1, 2), (1, 3)])
    >>> piece.cut(torch.arange(20.0).reshape(4, 5))
    tensor([3., 4., 5., 6., 7.])
    """

    shape: tuple[int, ...]
    """Of the local tensor."""
    boxes: tuple[Box, ...]
    """Of the whole, in the order of the local tensor; none of them is empty."""
    start: int | None = None
    """Where the interval begins in the flattened whole; None for a piece that is no interval."""
    spans: tuple[tuple[Span, ...], ...] = ()
    """For a piece that is no interval: along each dim, the indices of the whole that it has."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Piece:
        """All of a tensor, in its own shape.

        >>> Piece.whole((2, 3)).numel
        6
        """
        return cls.grid([((0, size),) for size in shape])

    @classmethod
    def interval(cls, shape: Sequence[int], start: int, stop: int) -> Piece:
        """An interval of the flattened tensor, as a local tensor of one dim; it may be empty.

        >>> Piece.interval((4, 5), 3, 3)
        Piece(shape=(0,), boxes=(), start=3, spans=())
        """
        return cls((max(0, stop - start),), tuple(boxes_of_interval(tuple(shape), start, stop)), start)

    @classmethod
    def grid(cls, spans: Sequence[Sequence[Span]]) -> Piece:
        """Some indices along each dim, one after another, and all their combinations.

        >>> Piece.grid([[(0, 1), (2, 3)], [(0, 4)]]).shape
        (2, 4)
        """
        kept = tuple(tuple(span for span in along if span[1] > span[0]) for along in spans)
        boxes = [
            Box(tuple(start for start, _ in corner), tuple(stop - start for start, stop in corner))
            for corner in product(*kept)
        ]
        return cls(tuple(sum(stop - start for start, stop in along) for along in kept), tuple(boxes), None, kept)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    def fits(self, local: Tensor) -> bool:
        """Whether a tensor has the shape of the local tensor; of a piece without elements, whether it has none.

        >>> Piece.whole((0, 3)).fits(torch.zeros(0, 0)), Piece.whole((1, 3)).fits(torch.zeros(3))
        (True, False)
        """
        return tuple(local.shape) == self.shape or (self.numel == 0 and local.numel() == 0)

    def blank(self, like: Tensor) -> Tensor:
        """A local tensor with room for the piece, of another tensor's dtype and device.

        >>> Piece.interval((4, 5), 3, 8).blank(torch.zeros(1)).shape
        torch.Size([5])
        """
        return torch.empty(self.shape, dtype=like.dtype, device=like.device)

    def cut(self, whole: Tensor) -> Tensor:
        """Copy the piece out of a whole tensor.

        >>> Piece.grid([[(0, 1), (2, 3)]]).cut(torch.arange(4.0))
        tensor([0., 2.])
        """
        local = self.blank(whole)
        for box in self.boxes:
            self.window(box).of(local).copy_(part(whole, box))
        return local

    def paste(self, local: Tensor, whole: Tensor) -> None:
        """Copy a local tensor to its place in a whole one.

        >>> whole = torch.zeros(4)
        >>> Piece.interval((4,), 1, 3).paste(torch.ones(2), whole)
        >>> whole
        tensor([0., 1., 1., 0.])
        """
        for box in self.boxes:
            part(whole, box).copy_(self.window(box).of(local))

    def shared(self, boxes: Sequence[Box]) -> list[Box]:
        """What the piece has in common with other boxes of the whole, each within one box of the piece.

        >>> Piece.interval((4, 5), 3, 17).shared([Box((0, 0), (4, 4))])
        [Box(offsets=(0, 3), sizes=(1, 1)), Box(offsets=(1, 0), sizes=(2, 4)), Box(offsets=(3, 0), sizes=(1, 2))]
        """
        return [common for own in self.boxes for box in boxes if (common := intersection(own, box)) is not None]

    def window(self, box: Box) -> Window:
        """The place in a local tensor of a box of the whole, which lies within one box of the piece.

        Raises:
            ValueError: it does not.

        >>> Piece.interval((4, 5), 3, 17).window(Box((3, 0), (1, 2)))
        Window(interval=(12, 2), sizes=(1, 2), narrowed=())
        """
        before = 0
        for own in self.boxes:
            if all(
                o <= b and b + n <= e for o, b, n, e in zip(own.offsets, box.offsets, box.sizes, own.ends, strict=True)
            ):
                inner = [b - o for b, o in zip(box.offsets, own.offsets, strict=True)]
                if self.start is not None:
                    return Window((before, own.numel), own.sizes, _narrowed(inner, box.sizes, own.sizes))
                starts = [_place(along, start) for along, start in zip(self.spans, own.offsets, strict=True)]
                firsts = [start + offset for start, offset in zip(starts, inner, strict=True)]
                return Window(None, self.shape, _narrowed(firsts, box.sizes, self.shape))
            before += own.numel
        raise ValueError(f"box {box} does not lie within one box of {self}")


def _narrowed(firsts: Sequence[int], lengths: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """The dims that are not taken whole."""
    dims = enumerate(zip(firsts, lengths, sizes, strict=True))
    return tuple((dim, first, length) for dim, (first, length, size) in dims if length != size)


def _place(along: tuple[Span, ...], start: int) -> int:
    """Where an index of the whole, the first of a span, lies among those that a piece has."""
    before = 0
    for span in along:
        if span[0] == start:
            return before
        before += span[1] - span[0]
    raise ValueError(f"index {start} begins none of {along}")


def part(tensor: Tensor, box: Box) -> Tensor:
    """The view of a box of a tensor.

    >>> part(torch.eye(3), Box((1, 0), (1, 2)))
    tensor([[0., 1.]])
    """
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor
