"""`FlatPiece`: an interval of a flattened tensor with its values, as a leaf of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muonfx.sharding.shards.boxes import Box
from muonfx.sharding.shards.position import Piece

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True, eq=False)
class FlatPiece:
    """Some consecutive elements of a flattened tensor, with their position and the shape of the whole tensor.

    ZeRO concatenates all parameters in one flat buffer and splits it among the ranks, even within a matrix or a row.
    If each rank saves its parts as `FlatPiece`, a checkpoint contains parameters in their full shapes, not the buffer.
    Any number of ranks can load them, as shards, as `torch.distributed.tensor.DTensor` or whole. The class follows
    the protocol of ``torch.distributed._checkpointable``.

    Attributes:
        shape: the shape of the whole tensor.
        start: the index of the interval's first element in the flattened tensor.
        data: the values, contiguous and with one dim. May be empty, and may be a view of a rank's buffer.

    Raises:
        ValueError: the interval is not within the tensor, or ``data`` is not contiguous or does not have one dim.

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
            raise ValueError(
                f"data: found shape {tuple(self.data.shape)} and strides {self.data.stride()}, expected a contiguous "
                "tensor with one dim"
            )
        if not 0 <= self.start <= self.stop <= prod(self.shape):
            raise ValueError(
                f"found elements {self.start} to {self.stop}, expected a range within the {prod(self.shape)} elements "
                f"of a tensor of shape {self.shape}"
            )

    @classmethod
    def cut(cls, whole: Tensor, start: int, stop: int) -> FlatPiece:
        """Return elements ``start:stop`` of a flattened tensor. They are a view if the tensor is contiguous."""
        return cls(tuple(whole.shape), start, whole.detach().reshape(-1)[start:stop])

    def __repr__(self) -> str:
        return f"FlatPiece(elements {self.start} to {self.stop} of {self.shape}, {self.dtype})"

    @property
    def stop(self) -> int:
        """The index after the last element of the interval, in the flattened tensor."""
        return self.start + self.data.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values in ``data``."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values in ``data``."""
        return self.data.device

    @property
    def boxes(self) -> list[Box]:
        """The interval as a list of rectangular parts of the whole tensor. An empty interval has one empty part."""
        if not prod(self.shape):
            return [Box((0,) * len(self.shape), self.shape)]
        return list(self.piece.boxes)

    @property
    def piece(self) -> Piece:
        """The position of the interval in the whole tensor, without the values, as a `Piece`."""
        return Piece.interval(self.shape, self.start, self.stop)

    @property
    def whole(self) -> Tensor | None:
        """The whole tensor as a view, if the interval contains all of its elements; otherwise None."""
        return self.data.view(self.shape) if self.data.numel() == prod(self.shape) else None

    def part(self, box: Box) -> Tensor:
        """Return the values of one of the ``boxes``, as a view with the shape of this box."""
        return self.piece.window(box).of(self.data) if box.numel else self.data.view(box.sizes)

    def empty_like(self, device: torch.device | str | None = None) -> FlatPiece:
        """Return a `FlatPiece` of the same interval with uninitialized values. Default: on the same device."""
        return FlatPiece(self.shape, self.start, torch.empty_like(self.data, device=device))

    def copy_(self, other: FlatPiece) -> FlatPiece:
        """Copy the values of another `FlatPiece` of the same interval into this one, and return ``self``."""
        self.data.copy_(other.data)
        return self

    # ------------------------------------------------------------- the protocol of torch.distributed._checkpointable

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """List the rectangular parts of the interval for torch.distributed.checkpoint, which saves each of them."""
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
        """List the offsets and sizes of the interval's rectangular parts, for torch.distributed.checkpoint."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the rectangular part that begins at ``index.offset``, for torch.distributed.checkpoint."""
        offset = tuple(index.offset or ())
        box = next((box for box in self.boxes if box.offsets == offset), None)
        if box is None:
            raise ValueError(f"{self!r} has no box that begins at {offset}")
        return self.part(box)


@dataclass(frozen=True, eq=False)
class ShardPiece(FlatPiece):
    """The values of a flattened shard whose elements are not an interval of the whole tensor, such as some columns.

    A checkpoint treats it like a `FlatPiece`.

    Attributes:
        position: which elements of the whole tensor the values are, in the order of ``data``.

    >>> columns = Piece.grid([((0, 2),), ((1, 3),)]).interval_of_shard(0, 4)
    >>> piece = ShardPiece((2, 4), 0, torch.arange(4.0), columns)
    >>> [(box.offsets, piece.part(box).tolist()) for box in piece.boxes]
    [((0, 1), [[0.0, 1.0], [2.0, 3.0]])]
    """

    position: Piece

    def __repr__(self) -> str:
        return f"ShardPiece({self.data.numel()} elements of {self.shape}, {self.dtype})"

    @property
    def piece(self) -> Piece:
        """The elements of the whole tensor that the values are."""
        return self.position

    @property
    def whole(self) -> Tensor | None:
        """None: the values are a part of the tensor, or in another order."""
        return None

    def empty_like(self, device: torch.device | str | None = None) -> ShardPiece:
        """Return a `ShardPiece` of the same elements with uninitialized values. Default: on the same device."""
        return ShardPiece(self.shape, self.start, torch.empty_like(self.data, device=device), self.position)


aten: Any = torch.ops.aten


class IntervalTensor(Tensor):
    """Makes a `FlatPiece` a tensor of the whole shape. The state of a torch optimizer may contain only tensors."""

    piece: FlatPiece

    @classmethod
    def of(cls, piece: FlatPiece) -> IntervalTensor:
        """Wrap a `FlatPiece` as a tensor without copying its values."""
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
        """Apply a copy, a conversion or a fill to the values of the interval. Raise for every other operation."""
        first, *rest = args
        if func not in _ON_VALUES or any(isinstance(other, Tensor) and not _same_place(first, other) for other in rest):
            raise NotImplementedError(
                f"{func} on {first!r}: only a part of the whole tensor is on this rank; use its attribute piece"
            )
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
        # Pickle the `FlatPiece`, because this tensor has no storage of its own.
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
