"""Messages between ranks: `Exchange`, an asynchronous all-to-all of tensors, and `all_objects`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.table import ShardTable


class Exchange:
    """An asynchronous all-to-all of lists of tensors. Creating it starts the messages, and `wait` completes them.

    Every rank of the layout's group must start the same exchanges in the same order.

    Args:
        layout: its process group and its reusable memory are used.
        outgoing: for each rank, the tensors to send to it.
        expected: for each rank, the number of elements that it sends to this rank.
        dtype: the dtype of the messages.
        device: the device of the messages.
        operation: its name in errors, such as "gathering matrices".
    """

    # The tensors, for P ranks. Sender and receiver list the tensors of a message in the same order.
    #
    #   send buffer      1-d    the tensors outgoing[0], ..., outgoing[P - 1], flattened, one after another
    #   receive buffer   1-d    the messages of rank 0, ..., rank P - 1, of expected[r] elements each
    #   own tensors      list   outgoing[layout.rank], as they are: a rank sends itself nothing

    def __init__(
        self,
        layout: ShardTable,
        outgoing: Sequence[Sequence[Tensor]],
        expected: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        operation: str,
    ) -> None:
        """Pack the tensors for other ranks into the send buffer, and start the exchange without waiting for it."""
        self.operation = operation
        self._layout = layout
        # A rank sends itself nothing: its own tensors stay as they are, and their messages have no elements.
        self._own_tensors = list(outgoing[layout.rank])
        tensors_to_send = list(outgoing)
        tensors_to_send[layout.rank] = []
        send_sizes = list(map(_numel, tensors_to_send))
        self._receive_sizes = list(expected)
        self._receive_sizes[layout.rank] = 0
        # The send buffer has the tensors for rank 0, then those for rank 1, and so on.
        self._send_buffer = layout.buffers.take(sum(send_sizes), dtype, device)
        _pack(list(chain.from_iterable(tensors_to_send)), self._send_buffer)
        # The messages arrive here while the caller computes: `wait` or `arrived` completes them.
        self._receive_buffer = layout.buffers.take(sum(self._receive_sizes), dtype, device)
        with collective(operation):
            self._work: Any = dist.all_to_all_single(
                self._receive_buffer,
                self._send_buffer,
                self._receive_sizes,
                send_sizes,
                group=layout.group,
                async_op=True,
            )

    def wait(self, incoming: Sequence[Sequence[Tensor]]) -> None:
        """Wait for all messages. Copy the tensors from rank r into the tensors ``incoming[r]``, in order."""
        shapes: list[list[torch.Size]] = []
        for tensors in incoming:
            shapes.append([tensor.shape for tensor in tensors])
        for received, targets in zip(self.arrived(shapes), incoming, strict=True):
            copied(received, targets)
        self.end()

    def arrived(self, shapes: Sequence[Sequence[Sequence[int]]]) -> list[list[Tensor]]:
        """Wait for all messages. Return for each rank the tensors that it sent, in the shapes ``shapes[rank]``.

        The tensors are views of the buffer in which the messages arrived. Call this once, and `end` when the tensors
        are no longer needed.
        """
        with collective(self.operation):
            self._work.wait()
        # The messages of this rank are sent, so another exchange may use their memory.
        self._layout.buffers.give_back(self._send_buffer)
        del self._send_buffer
        # The receive buffer has the messages of ranks 0, 1, 2, ..., in this order. Each is divided into tensors.
        # This rank sends itself no message: its own tensors were kept as they are.
        received: list[list[Tensor]] = []
        for rank, message in enumerate(self._receive_buffer.split(self._receive_sizes)):
            if rank == self._layout.rank:
                received.append(self._own_tensors)
            else:
                received.append(split_buffer(message, shapes[rank]))
        del self._own_tensors
        return received

    def end(self) -> None:
        """Free the receive buffer. Tensors that `arrived` returned must not be used after this."""
        self._layout.buffers.give_back(self._receive_buffer)
        del self._receive_buffer


def lists_by_rank(layout: ShardTable) -> list[list[Tensor]]:
    """Return an empty list for each rank, to be filled with the tensors to send to it, or to receive from it."""
    return [[] for _ in range(layout.size)]


def exchange(
    layout: ShardTable,
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[Tensor]],
    wire: Tensor,
    operation: str,
) -> None:
    """Send the tensors ``outgoing[r]`` to rank r, and receive ``incoming[r]`` from it in place. Wait for all messages.

    The tensors that a rank sends have the sizes of those that the receiver expects, in the same order. With two ranks,
    rank 0 may send ``outgoing[1] = [a, b]``. Rank 1 then receives these values in its ``incoming[0] = [c, d]``.

    Messages are sent in the dtype of `wire`, on its device. Errors name the `operation`.
    """
    expected = list(map(_numel, incoming))
    messages = Exchange(
        layout, outgoing, expected, dtype=wire.dtype, device=wire.device, operation=operation
    )
    messages.wait(incoming)


def _numel(tensors: Sequence[Tensor]) -> int:
    """Return the number of elements of some tensors together."""
    return sum(map(Tensor.numel, tensors))


def copied(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each tensor in `sources` into the tensor in `targets` at the same index, in one fused call."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _pack(tensors: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy tensors into a 1-d buffer, one after another, in the dtype of the buffer.

    >>> buffer = torch.zeros(4)
    >>> _pack([torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 4.0])], buffer)
    >>> buffer
    tensor([1., 2., 3., 4.])
    """
    needs_cast = any(tensor.dtype != buffer.dtype for tensor in tensors)
    if needs_cast:  # `torch.stack` does not cast
        copied(tensors, split_buffer(buffer, [tensor.shape for tensor in tensors]))
        return
    # One call for neighbours of one shape is faster than a copy for each. Their part of the buffer, viewed as a stack
    # of tensors of this shape, is the output of `torch.stack`.
    start = 0
    for shape, neighbours in groupby(tensors, lambda tensor: tensor.shape):
        tensors_of_shape = list(neighbours)
        count = len(tensors_of_shape)
        part = buffer.narrow(0, start, count * shape.numel())
        torch.stack(tensors_of_shape, out=part.view(count, *shape))
        start += part.numel()


def split_buffer(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split a 1-d buffer into consecutive tensors of the given shapes, as views.

    >>> split_buffer(torch.arange(4), [(2, 1), (2,)])
    [tensor([[0], [1]]), tensor([2, 3])]
    """
    views: list[Tensor] = []
    start = 0
    # Neighbours of one shape are unbound from a stack in one call, which is faster than a view for each.
    for shape, neighbours in groupby(shapes):
        count = len(list(neighbours))
        end = start + count * prod(shape)
        views += buffer[start:end].view(count, *shape).unbind()
        start = end
    return views


@contextmanager
def collective(operation: str) -> Generator[None]:
    """Name an operation in the errors of the torch.distributed calls in a ``with`` block, and raise `ShardingError`.

    torch's error may be "Connection closed by peer". In the block ``with collective("gathering matrices"):``, it
    becomes "gathering matrices failed: another rank has ended, ...".
    """
    try:
        yield
    except ShardingError:  # its text already names the operation
        raise
    except RuntimeError as error:  # also an error of torch.distributed, which is one
        raise ShardingError(
            f"{operation} failed: another rank has ended, or did not start the same call within the timeout of the "
            f"process group: {error}. See the error of that rank, or raise the timeout of the group"
        ) from error


def host_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for small messages in a group. It is the CPU if possible, which avoids syncs with a GPU."""
    # For the backends "cpu:gloo,cuda:nccl" both devices are listed, for "nccl" only CUDA.
    cpu = torch.device("cpu")
    device_types = getattr(group, "_device_types", [cpu])
    if cpu in device_types:
        return cpu
    return torch.device(device_types[0])


def all_objects(value: Any, group: dist.ProcessGroup, operation: str) -> list[Any]:
    """Gather one Python object per rank, in a list on every rank. Errors name the `operation`."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with collective(operation):
        dist.all_gather_object(gathered, value, group=group)
    return gathered
