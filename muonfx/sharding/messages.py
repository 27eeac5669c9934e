"""The one exchange between ranks, in which each sends to each as many bytes as it has for it; and what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Buffers", "Exchange", "ShardingError", "collective", "copied", "cut_places", "octets"]


class ShardingError(RuntimeError):
    """Ranks disagree, or one of them is gone; raised on all that are left, with what each has found.

    >>> raise ShardingError("rank 2 has another tree")
    Traceback (most recent call last):
    muonfx.sharding.messages.ShardingError: rank 2 has another tree
    """


class Buffers:
    """Memory of messages in host memory, kept from one exchange to the next: pages that are new cost as much as travel.

    It holds as many buffers as exchanges under way at once have taken, each as long as the longest that it has served.
    On other devices the allocator of torch keeps memory by itself, and new tensors come from there.

    >>> buffers = Buffers()
    >>> first = buffers.take(6, torch.float32, torch.device("cpu"))
    >>> buffers.give_back(first)
    >>> buffers.take(3, torch.bfloat16, torch.device("cpu")).data_ptr() == first.data_ptr()
    True
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """The bytes that are kept and not given out."""
        return sum(map(len, self._free))

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of one dim with any values, which is the caller's until it is given back."""
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        nbytes = numel * dtype.itemsize
        place = next((place for place, one in enumerate(self._free) if len(one) >= nbytes), None)
        if place is not None:
            memory = self._free.pop(place)
        else:
            if self._free:
                self._free.pop()  # the longest, which is too short: a longer one takes its place
            memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory[:nbytes].view(dtype)

    def give_back(self, tensor: Tensor) -> None:
        """Take back what was given out; one that nobody gives back is forgotten."""
        if tensor.device.type == "cpu" and tensor.numel():
            whole = tensor.untyped_storage()
            self._free.append(torch.empty(0, dtype=torch.uint8).set_(whole))
            self._free.sort(key=len)


class Exchange:
    """An exchange under way: made, it has been begun; `wait` ends it.

    What is sent is copied into one buffer, and what is received out of one, each as long as its values: nothing is
    padded. What a rank has for itself is copied directly.

    Args:
        outgoing: for each rank of the group, the tensors for it, in an order that both know.
        expected: for each rank of the group, how many elements come from it.
        dtype: in which values travel; they are rounded to it, and from it to the dtype of what takes them.
        group: the ranks; every one of them must begin the same exchanges in the same order.
        what: what this is, for an error.
        buffers: where the memory of messages comes from; None: it is made anew.

    Raises:
        ShardingError: another rank is gone, or did not come within the group's timeout.
    """

    def __init__(
        self,
        outgoing: Sequence[Sequence[Tensor]],
        expected: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        what: str,
        buffers: Buffers | None = None,
    ) -> None:
        self._buffers = buffers = buffers or Buffers()
        self._me = me = dist.get_rank(group)
        self._own = list(outgoing[me])
        sent = [tensors if rank != me else [] for rank, tensors in enumerate(outgoing)]
        self.what = what
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        self._sizes = [number if rank != me else 0 for rank, number in enumerate(expected)]
        self._sent = buffers.take(sum(sizes), dtype, device)
        packed = [tensor for tensors in sent for tensor in tensors]
        copied(packed, _places(self._sent, [tensor.shape for tensor in packed]))
        self._received = buffers.take(sum(self._sizes), dtype, device)
        with collective(what):
            self._work: Any = dist.all_to_all_single(
                self._received, self._sent, self._sizes, sizes, group=group, async_op=True
            )

    def wait(self, incoming: Sequence[Sequence[Tensor]]) -> None:
        """Wait for what comes, and copy it to where it belongs.

        Args:
            incoming: for each rank of the group, the tensors that take what comes from it, in the order of its sender.
        """
        sizes = [[tensor.shape for tensor in tensors] for tensors in incoming]
        for theirs, tensors in zip(self.arrived(sizes), incoming, strict=True):
            copied(theirs, tensors)
        self.end()

    def arrived(self, shapes: Sequence[Sequence[Sequence[int]]]) -> list[list[Tensor]]:
        """Wait for what comes, and return it where it lies: of this rank its own tensors, of others views of a buffer.

        The views are good until `end`.

        Args:
            shapes: for each rank of the group, those of the tensors that come from it, in the order of its sender.
        """
        with collective(self.what):
            self._work.wait()
        self._buffers.give_back(self._sent)
        del self._sent
        others = [[] if rank == self._me else of_rank for rank, of_rank in enumerate(shapes)]
        places = iter(_places(self._received, [shape for of_rank in others for shape in of_rank]))
        found = [[next(places) for _ in of_rank] for of_rank in others]
        found[self._me] = self._own
        del self._own
        return found

    def end(self) -> None:
        """Give back the memory of what has come."""
        self._buffers.give_back(self._received)
        del self._received


def cut_places(nbytes: Mapping[int, int], limit: int) -> list[list[int]]:
    """Cut places, in order, into lists of at most so many bytes; a single larger one stands alone.

    >>> cut_places({0: 3, 1: 3, 5: 9, 6: 1}, 6)
    [[0, 1], [5], [6]]
    """
    found: list[list[int]] = []
    room = 0
    for place, size in nbytes.items():
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(place)
        room -= size
    return found


def copied(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors to others, in few calls; one that is its own target is left alone.

    >>> target = torch.zeros(2)
    >>> copied([torch.ones(2)], [target])
    >>> target
    tensor([1., 1.])
    """
    pairs = [(a, b) for a, b in zip(sources, targets, strict=True) if a is not b and a.numel()]
    if pairs:
        torch._foreach_copy_([b for _, b in pairs], [a for a, _ in pairs])


def octets(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements in order: a view if its memory allows one, else a copy.

    >>> octets(torch.ones(8, dtype=torch.int16)[::7][:1])
    tensor([1, 0], dtype=torch.uint8)
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # `is_contiguous` ignores the stride of a single element, and a view of another dtype does not.
    if flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _places(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of a buffer as tensors of some shapes, one behind the other."""
    places = buffer.split([prod(shape) for shape in shapes])
    return [place.view(shape) for place, shape in zip(places, shapes, strict=True)]


class collective:
    """A context in which a failure of torch.distributed becomes a `ShardingError` that says what was going on.

    >>> with collective("the exchange"):
    ...     raise RuntimeError("Connection closed by peer")
    Traceback (most recent call last):
    muonfx.sharding.messages.ShardingError: the exchange failed: another rank has ended, ... Connection closed by peer
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Say it in our words."""
        if isinstance(error, RuntimeError) and not isinstance(error, ShardingError):
            raise ShardingError(
                f"{self.what} failed: another rank has ended, or did not come within the group's timeout: {error}"
            ) from error
