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
    """A shard: which elements of a tensor a rank holds, without their values. Built by `whole`, `interval` or `grid`.

    >>> piece = Piece.interval((4, 5), 3, 8)
    >>> piece.shape, [box.sizes for box in piece.boxes]
    ((5,), [(1, 2), (1, 3)])
    >>> piece.cut(torch.arange(20.0).reshape(4, 5))
    tensor([3., 4., 5., 6., 7.])
    """

    shape: tuple[int, ...]
    """The shape of the local tensor."""
    boxes: tuple[Box, ...]
    """The nonempty boxes of the whole, in the order of the local tensor."""
    start: int | None = None
    """The start of an interval in the flattened whole; None for a shard that is no interval."""
    spans: tuple[tuple[Span, ...], ...] = ()
    """For a shard that is no interval: along each dim, the indices of the whole that it has."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Piece:
        """Return the shard that is all of a tensor, in its own shape."""
        return cls.grid([((0, size),) for size in shape])

    @classmethod
    def interval(cls, shape: Sequence[int], start: int, stop: int) -> Piece:
        """Return an interval of the flattened tensor, as a local tensor of one dim; it may be empty."""
        return cls((max(0, stop - start),), tuple(boxes_of_interval(tuple(shape), start, stop)), start)

    @classmethod
    def grid(cls, spans: Sequence[Sequence[Span]]) -> Piece:
        """Return the shard that is the product of index sets: for each dim, ascending half-open spans (start, end).

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
        """The number of elements."""
        return prod(self.shape)

    def fits(self, local: Tensor) -> bool:
        """Return True if a tensor has the shape of the local tensor, or both have no elements."""
        return tuple(local.shape) == self.shape or (self.numel == 0 and local.numel() == 0)

    def blank(self, like: Tensor) -> Tensor:
        """Return an uninitialized local tensor with another tensor's dtype and device."""
        return torch.empty(self.shape, dtype=like.dtype, device=like.device)

    def cut(self, whole: Tensor) -> Tensor:
        """Copy the shard out of a whole tensor."""
        local = self.blank(whole)
        for box in self.boxes:
            self.window(box).of(local).copy_(part(whole, box))
        return local

    def paste(self, local: Tensor, whole: Tensor) -> None:
        """Copy a local tensor to its position in a whole tensor."""
        for box in self.boxes:
            part(whole, box).copy_(self.window(box).of(local))

    def shared(self, boxes: Sequence[Box]) -> list[Box]:
        """Return the intersections of the shard with boxes of the whole, each within one box of the shard."""
        return [common for own in self.boxes for box in boxes if (common := intersection(own, box)) is not None]

    def window(self, box: Box) -> Window:
        """Return the position in a local tensor of a box that is within one box of the shard.

        Raises:
            ValueError: the box is not within one box of the shard.

        >>> Piece.interval((4, 5), 3, 17).window(Box((3, 0), (1, 2)))
        Window(interval=(12, 2), sizes=(1, 2), narrowed=())
        """
        before = 0
        for own in self.boxes:
            if all(
                o <= b and b + n <= e for o, b, n, e in zip(own.offsets, box.offsets, box.sizes, own.ends, strict=True)
            ):
                if self.start is not None:
                    inner = [b - o for b, o in zip(box.offsets, own.offsets, strict=True)]
                    return Window((before, own.numel), own.sizes, _narrowed(inner, box.sizes, own.sizes))
                # The local index along a dim: the indices of the spans before, and the offset within its own span.
                firsts = [
                    sum(stop - start for start, stop in along if stop <= o) + b - o
                    for along, o, b in zip(self.spans, own.offsets, box.offsets, strict=True)
                ]
                return Window(None, self.shape, _narrowed(firsts, box.sizes, self.shape))
            before += own.numel
        raise ValueError(f"box {box} does not lie within one box of {self}")


def _narrowed(firsts: Sequence[int], lengths: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return dim, first index and length of each dim that is narrowed."""
    dims = enumerate(zip(firsts, lengths, sizes, strict=True))
    return tuple((dim, first, length) for dim, (first, length, size) in dims if length != size)


def part(tensor: Tensor, box: Box) -> Tensor:
    """Return the view of a box of a tensor."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


@dataclass(frozen=True, eq=False)
class FlatPiece:
    """An interval of a flattened tensor, with the shape of the whole.

    ZeRO concatenates all parameters in one flat buffer and splits it among the ranks, across matrices and rows. A
    checkpoint stores the matrix instead of that buffer, so any number of ranks can load it, as shards, as
    `torch.distributed.tensor.DTensor` or whole. Follows the protocol of ``torch.distributed._checkpointable``.

    Attributes:
        shape: the shape of the whole tensor.
        start: the start of the interval in the flattened tensor.
        data: the values, one dim; may be empty, and a view of a rank's buffer.

    Raises:
        ValueError: the interval is not within the tensor, or ``data`` does not have one dim.

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
        """Cut a shard out of a whole tensor, as a view if the tensor is contiguous."""
        return cls(tuple(whole.shape), start, whole.detach().reshape(-1)[start:stop])

    def __repr__(self) -> str:
        return f"FlatPiece(elements {self.start} to {self.stop} of {self.shape}, {self.dtype})"

    @property
    def stop(self) -> int:
        """The exclusive end of the interval."""
        return self.start + self.data.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.data.device

    @property
    def boxes(self) -> list[Box]:
        """The boxes of the whole, in order; one empty box for a tensor without elements."""
        if not prod(self.shape):
            return [Box((0,) * len(self.shape), self.shape)]
        return list(self.piece.boxes)

    @property
    def piece(self) -> Piece:
        """The interval as a `Piece`."""
        return Piece.interval(self.shape, self.start, self.stop)

    @property
    def whole(self) -> Tensor | None:
        """The tensor, as a view of the values, if the shard is all of it; else None."""
        return self.data.view(self.shape) if self.data.numel() == prod(self.shape) else None

    def part(self, box: Box) -> Tensor:
        """Return the values of one of its boxes, as a view."""
        return self.piece.window(box).of(self.data) if box.numel else self.data.view(box.sizes)

    def empty_like(self, device: torch.device | str | None = None) -> FlatPiece:
        """Return the same interval with uninitialized values."""
        return FlatPiece(self.shape, self.start, torch.empty_like(self.data, device=device))

    def copy_(self, other: FlatPiece) -> FlatPiece:
        """Overwrite the values by the values of another shard of the same interval."""
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
