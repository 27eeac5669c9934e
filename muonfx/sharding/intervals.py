"""An interval of a flattened tensor, which torch takes for a tensor of the whole's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from muonfx.checkpoint import FlatPiece

__all__ = ["IntervalTensor"]

aten: Any = torch.ops.aten


class IntervalTensor(Tensor):
    """A `muonfx.checkpoint.FlatPiece` where a tensor has to be: in the state of a torch optimizer.

    Its shape is that of the whole, its storage that of the piece. torch.distributed.checkpoint asks it, by the protocol
    of ``torch.distributed._checkpointable``, what of the whole there is. It can be copied, moved and filled; nothing
    else can be computed with it: ``piece`` has the values.

    >>> tensor = IntervalTensor.of(FlatPiece((4, 5), 3, torch.arange(5.0)))
    >>> tensor
    IntervalTensor(elements 3 to 8 of (4, 5), torch.float32)
    >>> tensor.zero_().piece.data
    tensor([0., 0., 0., 0., 0.])
    """

    piece: FlatPiece

    @classmethod
    def of(cls, piece: FlatPiece) -> IntervalTensor:
        """A piece as a tensor; the storage is the same."""
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
        """Do on the values what keeps each where it is; refuse the rest."""
        first, *rest = args
        if func not in _ON_VALUES or any(isinstance(other, Tensor) and not _same_place(first, other) for other in rest):
            raise NotImplementedError(f"{func} on {first!r}: only a part of the whole is here; use its piece")
        values = func(
            first.piece.data, *[other.piece.data if isinstance(other, cls) else other for other in rest], **kwargs or {}
        )
        return first if values is first.piece.data else cls.of(FlatPiece(first.piece.shape, first.piece.start, values))

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """What torch.distributed.checkpoint is to write."""
        return self.piece.__create_write_items__(fqn, object)

    def __create_chunk_list__(self) -> list[Any]:
        """The boxes of the whole that are here."""
        return self.piece.__create_chunk_list__()

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The values of a box."""
        return self.piece.__get_tensor_shard__(index)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle as the piece."""
        return _rebuild, (self.piece.shape, self.piece.start, self.piece.data)


def _same_place(one: Any, other: Any) -> bool:
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
