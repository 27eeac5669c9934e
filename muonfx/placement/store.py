"""`Store`: where the state is between steps: with the parameters, in host memory, or in files on a disk.

Tensors that are allocated together share one file, and each begins at a page boundary. The file is mapped into memory
and has no name in the folder. So nothing can truncate it, ranks can share a folder, and its disk space is freed with
the last tensor, even if the process is killed. To keep a state after the process, save a checkpoint.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from muonfx import tree
from muonfx.tree import Spec

PAGE = mmap.PAGESIZE


SMALLEST = PAGE
"""The size in bytes from which a tensor is stored in a file; a smaller tensor would take a whole page there."""


class _MappedRange(NamedTuple):
    """The addresses ``start`` to ``start + length`` of memory that is mapped to a file in a folder."""

    folder: str
    start: int
    length: int


_MAPPED: WeakKeyDictionary[Any, _MappedRange] = WeakKeyDictionary()
"""The folder and the address range of each mapped file that some tensor still uses."""


def in_file(specs: Sequence[Spec], folder: str) -> list[Tensor]:
    """Return zero tensors of the given shapes and dtypes in one new file of a folder. An OSError leaves no file.

    The file is mapped to memory: a change of a tensor changes the file. With pages of 4,096 bytes, a tensor of 6,000
    bytes takes two pages, and the next tensor begins at byte 8,192, because the kernel frees and reads whole pages.
    """
    sizes = [rounded_up(spec.nbytes, PAGE) for spec in specs]
    *starts, length = itertools.accumulate(sizes, initial=0)
    if not length:
        return []
    mapped = _mapped(folder, length)
    tensors: list[Tensor] = []
    for spec, start in zip(specs, starts, strict=True):
        numel = torch.Size(spec.shape).numel()
        tensors.append(
            torch.frombuffer(mapped, dtype=spec.dtype, count=numel, offset=start).view(spec.shape)
        )
    # A tensor does not store its file. `folder_of` finds the file by the address of the tensor, which is recorded here.
    _MAPPED[mapped] = _MappedRange(folder, tensors[0].data_ptr(), length)
    return tensors


def rounded_up(nbytes: int, multiple: int) -> int:
    """Return a number of bytes, rounded up to a multiple of another number: 257 to 512 for multiples of 256."""
    return (nbytes + multiple - 1) // multiple * multiple


def _mapped(folder: str, length: int) -> mmap.mmap:
    """Return `length` bytes of memory that are backed by a new file in a folder. Raise OSError if there is no room.

    The file has no name, so its space is freed when the process ends, even by a crash.
    """
    _require_space(folder, length)
    try:
        # The mapping keeps it open.
        with tempfile.TemporaryFile(prefix="muonfx-state-", dir=folder) as file:
            # Reserve the space: a file that is only extended could run out of it during a step.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, length)
            else:
                os.ftruncate(file.fileno(), length)
            return mmap.mmap(file.fileno(), length)
    except OSError as error:
        raise _explained(error, folder, length) from error


def _require_space(folder: str, nbytes: int) -> None:
    """Create a folder if necessary. Raise OSError unless it is writable and its disk has `nbytes` bytes free.

    This is checked before a state is written, because memory that is mapped to a full disk kills the process.
    """
    # 1. The folder. An error of any of these calls is raised with the folder and the size of the state in its text.
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "the folder is not writable")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _explained(error, folder, nbytes) from error
    # 2. The space on its disk.
    if nbytes > free:
        raise OSError(
            errno.ENOSPC,
            f"offload: to={folder!r} has {free / 2**20:.0f} MiB free, the state needs {nbytes / 2**20:.0f} MiB there",
        )


def _explained(error: OSError, folder: str, nbytes: int) -> OSError:
    why = error.strerror or str(error)
    return type(error)(
        error.errno, f"offload: to={folder!r} cannot take {nbytes / 2**20:.1f} MiB of state: {why}"
    )


def _mapping_of(tensor: Tensor) -> tuple[Any, _MappedRange] | None:
    """Return the mapped file in which a tensor is stored, and its address range; None for tensors in memory."""
    # A tensor does not store its file, but its address is within the memory to which the file is mapped.
    address = tensor.data_ptr()
    for mapped, mapped_range in _MAPPED.items():
        if mapped_range.start <= address < mapped_range.start + mapped_range.length:
            return mapped, mapped_range
    return None


def folder_of(tensor: Tensor) -> str | None:
    """Return the folder of the file in which an offloaded tensor is stored; None for tensors in memory."""
    mapping = _mapping_of(tensor)
    if mapping is None:
        return None
    _, mapped_range = mapping
    return mapped_range.folder


def release(tensor: Tensor) -> None:
    """Free the host memory of a tensor that is stored in a file; the file keeps its values. Ignore other tensors."""
    _advise(tensor, "MADV_DONTNEED")


def read_ahead(tensor: Tensor) -> None:
    """Let the kernel start to read a tensor that is stored in a file, so that a later access is fast."""
    _advise(tensor, "MADV_WILLNEED")


def _advise(tensor: Tensor, advice: str) -> None:
    """Give the kernel advice, such as "MADV_DONTNEED", about the memory of a tensor in a file. Ignore other tensors."""
    mapping = _mapping_of(tensor)
    if mapping is None or not hasattr(mmap, advice):
        return
    mapped, mapped_range = mapping
    storage = tensor.untyped_storage()
    mapped.madvise(
        getattr(mmap, advice),
        storage.data_ptr() - mapped_range.start,
        rounded_up(storage.nbytes(), PAGE),
    )


class Store(NamedTuple):
    """Where the state of an optimizer is kept between steps, and how many bytes of it are loaded at a time."""

    to: str | None = None
    """ "cpu" for host memory, or a folder for files on its disk. None: the device of the parameters."""
    bucket_bytes: int = 0
    """The approximate bytes of state that are loaded at a time. A larger tensor is loaded alone."""

    @property
    def on_disk(self) -> bool:
        """True if the state is kept in files on a disk."""
        return self.to not in (None, "cpu")

    def is_direct(self, device: torch.device) -> bool:
        """Return True if a step on this device can update the stored state in place, without loading a copy."""
        return self.to == "cpu" and device.type == "cpu"

    def has(self, leaf: Tensor, device: torch.device) -> bool:
        """Return True if a tensor is already where this store keeps state, for a transform that runs on `device`."""
        if leaf.device.type != "cpu":
            return False
        # On a disk, a tensor that is large enough for a file must be in a file of this folder.
        if self._in_file(tree.spec(leaf)):
            return folder_of(leaf) == self.to
        # In host memory, it must be pinned for a GPU, because only then can copies run in the background.
        return device.type != "cuda" or leaf.is_pinned()

    def allocate(self, specs: Sequence[Spec], device: torch.device) -> list[Tensor]:
        """Return new tensors of these shapes and dtypes where this store keeps state: in memory, or in one new file.

        Host memory is pinned if `device` is a CUDA device, which can then copy from it while it computes.
        """
        pin_memory = device.type == "cuda"
        # On a disk, all but the small tensors are in a file.
        specs_in_file = [spec for spec in specs if self._in_file(spec)]
        tensors_in_file = in_file(specs_in_file, str(self.to))
        tensors: list[Tensor] = []
        for spec in specs:
            if self._in_file(spec):
                tensors.append(tensors_in_file.pop(0))  # they are in the order of `specs`
            else:
                tensors.append(
                    torch.empty(spec.shape, dtype=spec.dtype, device="cpu", pin_memory=pin_memory)
                )
        return tensors

    def require(self, specs: Sequence[Spec]) -> None:
        """Raise OSError if the store is on a disk without room for tensors of the given shapes and dtypes."""
        if self.to is not None and self.on_disk and specs:
            _require_space(self.to, sum(spec.nbytes for spec in specs if self._in_file(spec)))

    def _in_file(self, spec: Spec) -> bool:
        return self.on_disk and spec.nbytes >= SMALLEST


IN_MEMORY = Store()
