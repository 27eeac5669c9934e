"""Shards: the part of a tensor that a rank holds.

The *whole* is the tensor as one process would hold it. A `Piece` describes a rank's shard as boxes of the whole (see
`muonfx.sharding.boxes`). The *local tensor* holds the values of the shard: it has one dim if the shard is an interval
of the flattened whole, else as many dims as the whole. A `Window` is the position of one box in a local tensor.

A `FlatPiece` is an interval together with its values, as a leaf of a checkpoint. An `IntervalTensor` wraps a
`FlatPiece` where torch requires a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from muonfx.sharding.boxes import Box, boxes_of_interval, intersection

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["FlatPiece", "IntervalTensor", "Piece", "Span", "Window", "part"]

Span = tuple[int, int]
"""A start and an exclusive end."""


class Window(NamedTuple):
    """The position of a box in the local tensors of one shard, computed once and used at every step."""

    interval: tuple[int, int] | None
    """The start and the number of elements in a 1-d local tensor; None if the local tensor has the whole's dims."""
    sizes: tuple[int, ...]
    """The shape in which the interval is viewed."""
    narrowed: tuple[tuple[int, int, int], ...]
    """Dim, first index and length, for each dim that is narrowed."""

    def of(self, local: Tensor) -> Tensor:
        """Return the view of a local tensor."""
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
    """The place at which the interval begins in the flattened whole; None for a piece that is no interval."""
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
        """The number of its elements."""
        return prod(self.shape)

    def fits(self, local: Tensor) -> bool:
        """True if a tensor has the shape of the local tensor; of a piece without elements, whether it has none.

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
        """The boxes that the piece shares with other boxes of the whole, each within one box of the piece.

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
    """Return dim, first index and length of each dim that is narrowed."""
    dims = enumerate(zip(firsts, lengths, sizes, strict=True))
    return tuple((dim, first, length) for dim, (first, length, size) in dims if length != size)


def _place(along: tuple[Span, ...], start: int) -> int:
    """Return the local index of the span that begins at index `start` of the whole."""
    before = 0
    for span in along:
        if span[0] == start:
            return before
        before += span[1] - span[0]
    raise ValueError(f"index {start} begins none of {along}")


def part(tensor: Tensor, box: Box) -> Tensor:
    """Return the view of a box of a tensor."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


@dataclass(frozen=True, eq=False)
class FlatPiece:
    """An interval of a tensor that was flattened row by row, with the shape of the whole.

    ZeRO lays all parameters into one flat buffer and cuts it among the ranks, across matrices and rows. A checkpoint
    does not store that buffer: it stores the matrix, of which an interval is at most three boxes. So what one number of
    ranks has saved, any other loads, as pieces, as `torch.distributed.tensor.DTensor` or whole.

    Follows the protocol of ``torch.distributed._checkpointable``.

    Attributes:
        shape: of the whole tensor.
        start: place in the flattened tensor at which the piece begins.
        data: the values, one dim; may be empty. It may be a view of a rank's buffer.

    Raises:
        ValueError: the piece does not lie within the tensor, or ``data`` has not one dim.

    >>> whole = torch.arange(20.0).reshape(4, 5)
    >>> piece = FlatPiece.cut(whole, 3, 17)
    >>> piece
    FlatPiece(elements 3 to 17 of (4, 5), torch.float32)
    >>> for box in piece.boxes:
    ...     print(box.offsets, piece.part(box).tolist())
    (0, 3) [[3.0, 4.0]]
    (1, 0) [[5.0, 6.0, 7.0, 8.0, 9.0], [10.0, 11.0, 12.0, 13.0, 14.0]]
    (3, 0) [[15.0, 16.0]]
    """

    shape: tuple[int, ...]
    start: int
    data: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.data.ndim != 1 or not self.data.is_contiguous():
            raise ValueError(f"data must be dense and have one dim, found shape {tuple(self.data.shape)}")
        if not 0 <= self.start <= self.stop <= prod(self.shape):
            raise ValueError(
                f"elements {self.start} to {self.stop} do not lie within a tensor of shape {self.shape}, which has "
                f"{prod(self.shape)}"
            )

    @classmethod
    def cut(cls, whole: Tensor, start: int, stop: int) -> FlatPiece:
        """Cut a piece out of a whole tensor; a copy only where the tensor is not dense.

        >>> FlatPiece.cut(torch.eye(2), 1, 4).data
        tensor([0., 0., 1.])
        """
        return cls(tuple(whole.shape), start, whole.detach().reshape(-1)[start:stop])

    def __repr__(self) -> str:
        return f"FlatPiece(elements {self.start} to {self.stop} of {self.shape}, {self.dtype})"

    @property
    def stop(self) -> int:
        """The first place behind the piece."""
        return self.start + self.data.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.data.device

    @property
    def boxes(self) -> list[Box]:
        """The piece as boxes of the whole, in order; a tensor without elements is one, empty, box."""
        if not prod(self.shape):
            return [Box((0,) * len(self.shape), self.shape)]
        return list(self.piece.boxes)

    @property
    def piece(self) -> Piece:
        """Its place in the whole."""
        return Piece.interval(self.shape, self.start, self.stop)

    @property
    def whole(self) -> Tensor | None:
        """The tensor, as a view of the values, if the piece is all of it; else None.

        >>> FlatPiece((1, 2), 0, torch.ones(2)).whole
        tensor([[1., 1.]])
        """
        return self.data.view(self.shape) if self.data.numel() == prod(self.shape) else None

    def part(self, box: Box) -> Tensor:
        """The values of one of its boxes, as a view."""
        return self.piece.window(box).of(self.data) if box.numel else self.data.view(box.sizes)

    def empty_like(self, device: torch.device | str | None = None) -> FlatPiece:
        """The same piece with room for other values."""
        return FlatPiece(self.shape, self.start, torch.empty_like(self.data, device=device))

    def copy_(self, other: FlatPiece) -> FlatPiece:
        """Overwrite the values by those of the same piece elsewhere."""
        self.data.copy_(other.data)
        return self

    # ------------------------------------------------------------- the protocol of torch.distributed._checkpointable

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Return one write item for each box."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(self.dtype), torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes as torch's chunks."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the values of the box that begins at the offset of an index."""
        offset = tuple(index.offset or ())
        box = next((box for box in self.boxes if box.offsets == offset), None)
        if box is None:
            raise ValueError(f"{self!r} has no box that begins at {offset}")
        return self.part(box)


aten: Any = torch.ops.aten


class IntervalTensor(Tensor):
    """A `muonfx.checkpoint.FlatPiece` as a tensor of the whole's shape, for the state of a torch optimizer."""

    piece: FlatPiece

    @classmethod
    def of(cls, piece: FlatPiece) -> IntervalTensor:
        """Wrap a shard without a copy."""
        make: Any = torch.Tensor._make_wrapper_subclass
        found: IntervalTensor = make(cls, piece.shape, dtype=piece.dtype, device=piece.device, requires_grad=False)
        found.piece = piece
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"IntervalTensor({str(self.piece).removeprefix('FlatPiece(')}"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply elementwise copies and fills to the values; refuse every other operation."""
        # A shard supports no other operation, because only a part of the whole is on this rank.
        first, *rest = args
        if func not in _ON_VALUES or any(isinstance(other, Tensor) and not _same_place(first, other) for other in rest):
            raise NotImplementedError(f"{func} on {first!r}: only a part of the whole is here; use its piece")
        values = func(
            first.piece.data, *[other.piece.data if isinstance(other, cls) else other for other in rest], **kwargs or {}
        )
        return first if values is first.piece.data else cls.of(FlatPiece(first.piece.shape, first.piece.start, values))

    # The protocol of torch.distributed._checkpointable: torch.distributed.checkpoint saves and loads the boxes.

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        return self.piece.__create_write_items__(fqn, object)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.piece.__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.piece.__get_tensor_shard__(index)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the shard, since a wrapper subclass has no storage."""
        return _rebuild, (self.piece.shape, self.piece.start, self.piece.data)


def _same_place(one: object, other: object) -> bool:
    places = [(it.shape, it.piece.start, it.piece.stop) for it in (one, other) if isinstance(it, IntervalTensor)]
    return len(places) == 2 and places[0] == places[1]


def _rebuild(shape: tuple[int, ...], start: int, data: Tensor) -> IntervalTensor:
    return IntervalTensor.of(FlatPiece(shape, start, data))


_ON_VALUES = {
    aten.detach.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
}
