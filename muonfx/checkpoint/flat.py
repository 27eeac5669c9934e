"""A rank's piece of a flattened tensor: what ZeRO leaves on a rank, as a leaf that a checkpoint understands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from muonfx.boxes import Box, boxes_of_interval

__all__ = ["FlatPiece"]


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
        """Where the values are."""
        return self.data.device

    @property
    def boxes(self) -> list[Box]:
        """The piece as boxes of the whole, in order; a tensor without elements is one, empty, box."""
        if not prod(self.shape):
            return [Box((0,) * len(self.shape), self.shape)]
        return boxes_of_interval(self.shape, self.start, self.stop)

    def part(self, box: Box) -> Tensor:
        """The values of one of its boxes, as a view."""
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        begin = sum(map(int.__mul__, box.offsets, strides)) - self.start if box.numel else 0
        return self.data[begin : begin + box.numel].view(box.sizes)

    def empty_like(self, device: torch.device | str | None = None) -> FlatPiece:
        """The same piece with room for other values."""
        return FlatPiece(self.shape, self.start, torch.empty_like(self.data, device=device))

    def copy_(self, other: FlatPiece) -> FlatPiece:
        """Overwrite the values by those of the same piece elsewhere."""
        self.data.copy_(other.data)
        return self

    # ------------------------------------------------------------- the protocol of torch.distributed._checkpointable

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """What torch.distributed.checkpoint is to write: one item for each box."""
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

    def __create_chunk_list__(self) -> list[Any]:
        """The boxes in torch's words."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The values of the box that begins at the offset of an index."""
        offset: Sequence[int] = index.offset
        box = next((box for box in self.boxes if box.offsets == tuple(offset)), None)
        if box is None:
            raise ValueError(f"{self!r} has no box that begins at {tuple(offset)}")
        return self.part(box)
