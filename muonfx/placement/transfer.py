"""Copy offloaded state between store and device, with two buffers that each fit the state of one bucket of parameters.

While a transform computes in one buffer, a worker thread writes the other buffer back to the store (host memory or
disk), and then loads the next bucket into it. The worker runs its jobs in order, on CUDA in one stream. So a buffer is
always written back before it is filled again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from muonfx.placement.store import read_ahead, release, rounded_up

T = TypeVar("T")
ALIGNED = 256


def buffer(nbytes: int, device: torch.device, *, pin: bool = False) -> Tensor:
    """Allocate a buffer of `nbytes` bytes. Offloading allocates device memory only here, so tests can count it."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)


def nbytes_in_buffer(leaves: Sequence[Tensor]) -> int:
    """Return how many bytes of a buffer some tensors need, including the padding between them."""
    return sum(rounded_up(leaf.nbytes, ALIGNED) for leaf in leaves)


class _Loaded(NamedTuple):
    """The state of one bucket in its buffer on the device."""

    views: list[Tensor]
    """The tensors of the state, which are views of the buffer."""
    ready: torch.cuda.Event | None
    """On a GPU, the event after which the views have the values. None on a CPU, where they have them already."""


class BucketTransfer:
    """Loads state from the store and writes it back, bucket by bucket, in a worker thread during one step.

    There are two buffers on the device: one for the bucket that is computed, and one for the next, which is loaded
    meanwhile. On a GPU, copies run on a stream of their own, and CUDA events order them with the computation. State on
    disk then passes through two further buffers in pinned host memory (the staging buffers).

    Args:
        device: the device on which the state is updated.
        buckets: for each bucket, the tensors in the store.
        on_disk: True if the store is on disk.
    """

    def __init__(
        self, device: torch.device, buckets: Sequence[Sequence[Tensor]], *, on_disk: bool
    ) -> None:
        """Allocate the buffers, and start to load the first bucket. The arguments are described in the class.

        A bucket is the state of some parameters, a list of tensors in the store (host memory or a disk). While one
        bucket is updated in one buffer on the device, a thread loads the next one into the other.
        """
        self._buckets = buckets
        self._device = device
        # 1. The jobs in the worker thread: all of them, and by the index of the bucket, those that load a bucket.
        self._jobs: list[Future[Any]] = []
        self._loads: dict[int, Future[_Loaded]] = {}
        # 2. The two buffers on the device, each for the largest bucket. Bucket number `i` uses the buffer `i % 2`.
        size = max(map(nbytes_in_buffer, buckets), default=0)
        count = min(2, len(buckets))
        self._buffers = [buffer(size, device) for _ in range(count)]
        # 3. On a GPU only: the stream of the copies, and for state on disk, two staging buffers in pinned host memory.
        self._stream: torch.cuda.Stream | None = None
        self._staging: list[Tensor] = []
        if device.type == "cuda":
            self._stream = _stream_of(device)
            # For earlier users of the memory.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            if on_disk:
                self._staging = [buffer(size, torch.device("cpu"), pin=True) for _ in range(count)]
        self._start_to_load(0)

    def fetch(self, bucket_index: int) -> list[Tensor]:
        """Return the state of one bucket on the device, and start to load the next. It may be overwritten."""
        leaves, ready = self._loads.pop(bucket_index).result()  # waits for the worker thread
        # On a GPU, the computation waits for the copies; this thread does not.
        if ready is not None:
            torch.cuda.current_stream(self._device).wait_event(ready)
        # The next bucket uses the other buffer. Its previous bucket is written back first, as jobs run in order.
        self._start_to_load(bucket_index + 1)
        return leaves

    def put(self, bucket_index: int, leaves: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Start to copy the new state of one bucket, in `leaves`, into the stored tensors `targets`."""
        # On a GPU, the update may still be running. The copies wait for this event, which is recorded after it.
        computed: torch.cuda.Event | None = None
        if self._stream is not None:
            computed = torch.cuda.Event()
            computed.record(torch.cuda.current_stream(self._device))
        self._do(lambda: self._write(bucket_index, leaves, targets, computed))

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor uses the memory of one of the two buffers, which the next bucket overwrites."""
        # A view has the storage of the buffer, wherever it begins.
        storage = tensor.untyped_storage().data_ptr()
        return any(memory.untyped_storage().data_ptr() == storage for memory in self._buffers)

    def finish(self) -> None:
        """Wait until the new state of all buckets is written to host memory or disk."""
        for future in self._jobs:
            future.result()
        if self._stream is not None:
            self._stream.synchronize()

    def abandon(self) -> None:
        """After an error, wait until pending copies end, so that no memory is freed while they use it."""
        for future in self._jobs:
            future.exception()
        if self._stream is not None:
            self._stream.synchronize()

    # ---------------------------------------------------------------------------------------------- in the worker

    def _do(self, job: Callable[[], T]) -> Future[T]:
        """Start a job in the worker thread, which runs jobs in order. Return its future result.

        Gradients are switched off in the job, since this setting belongs to a thread.
        """

        def safely() -> T:
            with torch.no_grad():
                return job()

        future = _worker_of(os.getpid()).submit(safely)
        self._jobs.append(future)  # `finish` waits for all jobs
        return future

    def _start_to_load(self, bucket_index: int) -> None:
        """Start to load a bucket, unless the index is past the last one."""
        if bucket_index < len(self._buckets):
            self._loads[bucket_index] = self._do(lambda: self._read(bucket_index))

    def _read(self, bucket_index: int) -> _Loaded:
        """Copy the state of a bucket from host memory or a disk into a buffer on the device. Return it there.

        There are two buffers, which buckets use in turn.
        """
        stored = self._buckets[bucket_index]
        # The tensors of the bucket in the buffer.
        views = _split(self._buffers[bucket_index % 2], stored)
        for tensor in stored:  # on a disk, the next tensors are read while one is copied
            read_ahead(tensor)
        # 1. From host memory or a disk to a CPU. There is no event, since the copies are complete.
        if self._stream is None:
            _copy_on_cpu(stored, views)
            return _Loaded(views, ready=None)
        # 2. From host memory to a GPU.
        if not self._staging:
            return _Loaded(views, ready=_copy_to_gpu(self._stream, stored, views))
        # 3. From a disk to a GPU, through pinned host memory (a staging buffer), from which a GPU can read.
        staged = _split(self._staging[bucket_index % 2], stored)
        # The copies from this staging buffer, two buckets ago, are complete.
        self._stream.synchronize()
        _copy_on_cpu(stored, staged)
        return _Loaded(views, ready=_copy_to_gpu(self._stream, staged, views))

    def _write(
        self,
        bucket_index: int,
        leaves: Sequence[Tensor],
        targets: Sequence[Tensor],
        computed: torch.cuda.Event | None,
    ) -> None:
        """Copy the new state of a bucket, in `leaves`, to the stored tensors `targets` in host memory or on a disk.

        On a GPU, the event `computed` is recorded after the computation of the state. It is None on a CPU.
        """
        # 1. From a CPU to host memory or a disk.
        if self._stream is None or computed is None:
            _copy_on_cpu(leaves, targets)
            return
        # 2. From a GPU to host memory.
        if not self._staging:
            _copy_from_gpu(self._stream, leaves, targets, computed)
            return
        # 3. From a GPU to a disk, through pinned host memory (a staging buffer), to which a GPU can write.
        staged = _split(self._staging[bucket_index % 2], targets)
        _copy_from_gpu(self._stream, leaves, staged, computed)
        self._stream.synchronize()  # the staging buffer now has the values
        _copy_on_cpu(staged, targets)


def _copy_to_gpu(
    stream: torch.cuda.Stream, sources: Sequence[Tensor], views: Sequence[Tensor]
) -> torch.cuda.Event:
    """Start to copy host memory to a GPU on a stream. Return the event after the last copy."""
    with torch.cuda.stream(stream):
        for view, source in zip(views, sources, strict=True):
            view.copy_(source, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(stream)
    return ready


def _copy_from_gpu(
    stream: torch.cuda.Stream,
    leaves: Sequence[Tensor],
    pinned: Sequence[Tensor],
    computed: torch.cuda.Event,
) -> None:
    """Start to copy `leaves` into `pinned` host memory on a stream, after the event `computed`.

    The computation has a stream of its own, so it continues at the same time.
    """
    with torch.cuda.stream(stream):
        stream.wait_event(computed)
        for leaf, target in zip(leaves, pinned, strict=True):
            target.copy_(leaf, non_blocking=True)
            if leaf.is_cuda:  # its memory must not be reused before this copy ends
                leaf.record_stream(stream)


def _copy_on_cpu(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors in host memory, and free the memory of those that are in files."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
        release(source)
        release(target)


def _split(memory: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Split a buffer into consecutive tensors, which are views with the shapes and dtypes of `leaves`."""
    # Each begins at a multiple of 256 bytes (`ALIGNED`): tensors of 100 and 8 bytes have the bytes 0:100 and 256:264.
    views: list[Tensor] = []
    start = 0
    for leaf in leaves:
        views.append(memory[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape))
        start += rounded_up(leaf.nbytes, ALIGNED)
    return views


@functools.cache
def _worker_of(process: int) -> ThreadPoolExecutor:
    """Return the worker thread of a process. The process id is the key, because a fork needs a new thread."""
    return ThreadPoolExecutor(1, thread_name_prefix="muonfx-offload")


_stream_of = functools.cache(torch.cuda.Stream)
