"""Messages between ranks: `Exchange`, an asynchronous all-to-all of tensors, and `all_objects`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx.sharding.errors import ShardingError


class Buffers:
    """Reusable CPU memory for messages between ranks. Fresh memory would cost as much time as sending the data."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """The total size in bytes of the buffers that are free to be reused."""
        return sum(map(len, self._free))

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized 1-d tensor. On the CPU it reuses memory; return it with `give_back` after use."""
        # Other devices have torch's caching allocator.
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        nbytes = numel * dtype.itemsize
        place = next((place for place, one in enumerate(self._free) if len(one) >= nbytes), None)
        if place is not None:
            memory = self._free.pop(place)
        else:
            if self._free:
                self._free.pop()  # even the longest is too short: replace it by a longer buffer
            memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory[:nbytes].view(dtype)

    def give_back(self, tensor: Tensor) -> None:
        """Make the memory of a tensor from `take` free again, so that a later message can reuse it."""
        if tensor.device.type == "cpu" and tensor.numel():
            whole = tensor.untyped_storage()
            self._free.append(torch.empty(0, dtype=torch.uint8).set_(whole))
            self._free.sort(key=len)


class Exchange:
    """An asynchronous all-to-all of lists of tensors. Creating it starts the messages, and `wait` completes them.

    ``outgoing[r]`` lists the tensors to send to rank r. ``expected[r]`` is the number of elements that rank r sends to
    this rank. ``what`` names the operation in errors.
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
        # Sender and receiver list the tensors in the same order; a rank's own tensors are not packed.
        sent = [tensors if rank != me else [] for rank, tensors in enumerate(outgoing)]
        self.what = what
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        self._sizes = [number if rank != me else 0 for rank, number in enumerate(expected)]
        self._sent = buffers.take(sum(sizes), dtype, device)
        _pack([tensor for tensors in sent for tensor in tensors], self._sent)
        self._received = buffers.take(sum(self._sizes), dtype, device)
        # Every rank of the group must start the same exchanges in the same order.
        with collective(what):
            self._work: Any = dist.all_to_all_single(
                self._received, self._sent, self._sizes, sizes, group=group, async_op=True
            )

    def wait(self, incoming: Sequence[Sequence[Tensor]]) -> None:
        """Wait for all messages. Copy the tensors from rank r into the tensors ``incoming[r]``, in order."""
        sizes = [[tensor.shape for tensor in tensors] for tensors in incoming]
        for theirs, tensors in zip(self.arrived(sizes), incoming, strict=True):
            copied(theirs, tensors)
        self.end()

    def arrived(self, shapes: Sequence[Sequence[Sequence[int]]]) -> list[list[Tensor]]:
        """Wait for all messages. Return a list with, for each rank, the tensors that it sent, in the given shapes.

        The tensors are views of the receive buffer. Call `end` when they are no longer needed.
        """
        with collective(self.what):
            self._work.wait()
        self._buffers.give_back(self._sent)
        del self._sent
        others = [[] if rank == self._me else of_rank for rank, of_rank in enumerate(shapes)]
        places = iter(_split_buffer(self._received, [shape for of_rank in others for shape in of_rank]))
        found = [list(islice(places, len(of_rank))) for of_rank in others]
        found[self._me] = self._own
        del self._own
        return found

    def end(self) -> None:
        """Free the receive buffer. Tensors that `arrived` returned must not be used after this."""
        self._buffers.give_back(self._received)
        del self._received


def copied(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each tensor in `sources` into the tensor in `targets` at the same index, in one fused call."""
    pairs = [(a, b) for a, b in zip(sources, targets, strict=True) if a is not b and a.numel()]
    if pairs:
        torch._foreach_copy_([b for _, b in pairs], [a for a, _ in pairs])


def _pack(tensors: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy tensors into a 1-d buffer, one after another, in the dtype of the buffer."""
    if not all(tensor.dtype == buffer.dtype for tensor in tensors):
        copied(tensors, _split_buffer(buffer, [tensor.shape for tensor in tensors]))
        return
    start = 0
    for shape, neighbours in groupby(tensors, lambda tensor: tensor.shape):
        # One call for neighbours of one shape is faster than a copy for each.
        same = list(neighbours)
        end = start + len(same) * shape.numel()
        torch.stack(same, out=buffer[start:end].view(len(same), *shape))
        start = end


def _split_buffer(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split a 1-d buffer into consecutive tensors of the given shapes, as views."""
    # Neighbours of one shape are unbound from a stack in one call, which is faster than a view for each.
    stacks = [(len([*same]), *shape) for shape, same in groupby(shapes)]
    blocks = buffer.split([prod(stack) for stack in stacks])
    return [place for block, stack in zip(blocks, stacks, strict=True) for place in block.view(stack).unbind()]


class collective:
    """A context manager around a torch.distributed call. It turns an error into a `ShardingError` that names `what`."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, ShardingError):
            raise ShardingError(
                f"{self.what} failed: another rank has ended, or did not start the same call within the timeout of the "
                f"process group: {error}. See the error of that rank, or raise the timeout of the group"
            ) from error


def host_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for small messages in a group. It is the CPU if possible, which avoids syncs with a GPU."""
    cpu = torch.device("cpu")
    device_types = getattr(group, "_device_types", [cpu])
    if cpu in device_types:
        return cpu
    return torch.device(device_types[0])


def all_objects(value: Any, group: dist.ProcessGroup, what: str) -> list[Any]:
    """Gather one Python object per rank, in a list on every rank. `what` names the operation in errors."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with collective(what):
        dist.all_gather_object(gathered, value, group=group)
    return gathered
