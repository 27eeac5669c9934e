"""`FlatShard`: the values of a flat shard with their position, as a leaf of a checkpoint.

A `FlatShardTensor` wraps a `FlatShard` where torch requires a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muonfx.sharding.shards.boxes import Box
from muonfx.sharding.shards.position import ShardPosition

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True, eq=False)
class FlatShard:
    """A shard with one dim: the values of some elements of a tensor, with their position and the shape of the whole.

    ZeRO concatenates all parameters in one flat buffer and splits it among the ranks, even within a matrix or a row.
    If each rank saves its shards as `FlatShard`, a checkpoint contains parameters in their full shapes, not the buffer.
    Any number of ranks can load them, as shards, as `torch.distributed.tensor.DTensor` or whole. The class follows
    the protocol of ``torch.distributed._checkpointable``.

    Attributes:
        shape: the shape of the whole tensor.
        start: the index of the interval's first element in the flattened tensor.
        data: the values, contiguous and with one dim. May be empty, and may be a view of a rank's buffer.
        elements: the position of the elements, in the order of ``data``, if they are not an interval but, for example,
            some columns. ``start`` is then 0. None: they are the interval that begins at ``start``.

    Raises:
        ValueError: the interval is not within the tensor, or ``data`` is not contiguous or does not have one dim.

    >>> whole = torch.arange(20.0).reshape(4, 5)
    >>> shard = FlatShard.cut(whole, 3, 17)
    >>> shard
    FlatShard(elements 3 to 17 of (4, 5), torch.float32)
    >>> for box in shard.boxes:
    ...     print(box.offsets, shard.values_in(box).tolist())
    (0, 3) [[3.0, 4.0]]
    (1, 0) [[5.0, 6.0, 7.0, 8.0, 9.0], [10.0, 11.0, 12.0, 13.0, 14.0]]
    (3, 0) [[15.0, 16.0]]
    """

    shape: tuple[int, ...]
    start: int
    data: Tensor
    elements: ShardPosition | None = None

    def __post_init__(self) -> None:
        """Raise unless the data are contiguous with one dim, and the elements are within the whole tensor."""
        # The class is frozen: this is the way to set an attribute of it.
        object.__setattr__(self, "shape", tuple(self.shape))
        # 1. The values are one interval of memory.
        if self.data.ndim != 1 or not self.data.is_contiguous():
            raise ValueError(
                f"data: found shape {tuple(self.data.shape)} and strides {self.data.stride()}, expected a contiguous "
                "tensor with one dim"
            )
        # 2. The interval of the whole tensor, of which `stop` follows from the number of values.
        if not 0 <= self.start <= self.stop <= prod(self.shape):
            raise ValueError(
                f"found elements {self.start} to {self.stop}, expected a range within the {prod(self.shape)} elements "
                f"of a tensor of shape {self.shape}"
            )

    @classmethod
    def cut(cls, whole: Tensor, start: int, stop: int) -> FlatShard:
        """Return elements ``start:stop`` of a flattened tensor. They are a view if the tensor is contiguous."""
        return cls(tuple(whole.shape), start, whole.detach().reshape(-1)[start:stop])

    def __repr__(self) -> str:
        elements = f"elements {self.start} to {self.stop}"
        if self.elements is not None:
            elements = f"{self.data.numel()} elements"
        return f"FlatShard({elements} of {self.shape}, {self.dtype})"

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
        """The elements as a list of rectangular parts of the whole tensor. Without elements, it has one empty part."""
        if not prod(self.shape):
            return [Box((0,) * len(self.shape), self.shape)]
        return list(self.position.boxes)

    @property
    def position(self) -> ShardPosition:
        """The position of the elements in the whole tensor, without the values."""
        if self.elements is not None:
            return self.elements
        return ShardPosition.interval(self.shape, self.start, self.stop)

    @property
    def whole(self) -> Tensor | None:
        """The whole tensor as a view, if the interval contains all of its elements; otherwise None."""
        if self.elements is not None or self.data.numel() != prod(self.shape):
            return None
        return self.data.view(self.shape)

    def values_in(self, box: Box) -> Tensor:
        """Return the values in one of the ``boxes``, as a view with the shape of this box."""
        if not box.numel:
            return self.data.view(box.sizes)
        return self.position.view(box).of(self.data)

    def empty_like(self, device: torch.device | str | None = None) -> FlatShard:
        """Return a `FlatShard` of the same elements with uninitialized values. Default: on the same device."""
        return replace(self, data=torch.empty_like(self.data, device=device))

    def copy_(self, other: FlatShard) -> FlatShard:
        """Copy the values of another `FlatShard` of the same elements into this one, and return ``self``."""
        self.data.copy_(other.data)
        return self

    # ------------------------------------------------------------- the protocol of torch.distributed._checkpointable

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """List the rectangular parts of the shard for torch.distributed.checkpoint, which saves each of them.

        torch.distributed.checkpoint calls this by name. ``fqn`` is the name of the whole tensor in the checkpoint.
        """
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties(self.dtype), torch.Size(self.shape)
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List the offsets and sizes of the shard's rectangular parts, for torch.distributed.checkpoint."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the rectangular part that begins at ``index.offset``, for torch.distributed.checkpoint."""
        offset = tuple(index.offset or ())
        for box in self.boxes:
            if box.offsets == offset:
                return self.values_in(box)
        raise ValueError(f"{self!r} has no box that begins at {offset}")


aten: Any = torch.ops.aten


class FlatShardTensor(Tensor):
    """Makes a `FlatShard` a tensor of the whole shape. The state of a torch optimizer may contain only tensors."""

    shard: FlatShard

    @classmethod
    def of(cls, shard: FlatShard) -> FlatShardTensor:
        """Wrap a `FlatShard` as a tensor without copying its values."""
        make: Any = torch.Tensor._make_wrapper_subclass
        tensor: FlatShardTensor = make(
            cls, shard.shape, dtype=shard.dtype, device=shard.device, requires_grad=False
        )
        tensor.shard = shard
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FlatShardTensor({str(self.shard).removeprefix('FlatShard(')}"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Apply an operation to the values of the shard. torch calls this for each operation on such a tensor.

        Only copies, conversions such as ``tensor.to(torch.bfloat16)``, and fills are accepted. Others, such as a sum,
        would need the whole tensor.
        """
        first = args[0]
        if func not in _ON_VALUES:  # `func` is an operation such as ``aten.clone.default``
            raise _not_possible(func, first)
        for argument in args:
            if isinstance(argument, Tensor) and not _are_same_elements(first, argument):
                raise _not_possible(func, first)
        values = func(*map(_values_of, args), **kwargs or {})
        if values is first.shard.data:  # the operation was in place
            return first
        return cls.of(replace(first.shard, data=values))

    # The protocol of torch.distributed._checkpointable: torch.distributed.checkpoint saves and loads the boxes.

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        return self.shard.__create_write_items__(fqn, object)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.shard.__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.shard.__get_tensor_shard__(index)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Pickle the `FlatShard`, because this tensor has no storage of its own.
        return FlatShardTensor.of, (self.shard,)


def _not_possible(func: Any, tensor: Any) -> NotImplementedError:
    return NotImplementedError(
        f"{func} on {tensor!r}: only a shard of the whole tensor is on this rank; use its attribute shard"
    )


def _values_of(argument: Any) -> Any:
    """Return the values in the shard of a `FlatShardTensor`, and any other argument unchanged."""
    if isinstance(argument, FlatShardTensor):
        return argument.shard.data
    return argument


def _are_same_elements(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors are of this class and have values for the same elements of a tensor of one shape."""
    if not isinstance(first, FlatShardTensor) or not isinstance(second, FlatShardTensor):
        return False
    return first.shape == second.shape and first.shard.position == second.shard.position


_ON_VALUES = {
    aten.detach.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
}
