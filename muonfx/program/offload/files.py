"""Tensors in files that have no name: the state on disk.

All leaves that are made together lie in one file, each from a page of its own. The file is allocated in full, mapped,
and unlinked at once: nobody can shorten it under us, two ranks that share a folder cannot meet in it, and its room is
given back with the last tensor that lies in it, also when the process is killed. What is to outlive the process is what
a checkpoint is for.
"""

from __future__ import annotations

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

from muonfx.tree import Spec

__all__ = ["in_file", "nbytes_of", "release", "require_room"]

PAGE = mmap.PAGESIZE


class _Where(NamedTuple):
    folder: str
    start: int
    length: int


_MAPPED: WeakKeyDictionary[Any, _Where] = WeakKeyDictionary()
"""The files that some tensor still lies in, by their mapping."""


def nbytes_of(spec: Spec) -> int:
    """The bytes of a tensor's elements."""
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def in_file(specs: Sequence[Spec], folder: str) -> list[Tensor]:
    """Make zeros in one new file, each with a storage of its own.

    Args:
        specs: shapes and dtypes; none may be empty.
        folder: made where there is none.

    Raises:
        OSError: the folder cannot be made or written to, or the disk is full; nothing is left behind.
    """
    starts: list[int] = []
    length = 0
    for spec in specs:
        starts.append(length)
        length += -(-nbytes_of(spec) // PAGE) * PAGE
    if not length:
        return []
    mapped = _mapped(folder, length)
    made = [
        torch.frombuffer(mapped, dtype=spec.dtype, count=torch.Size(spec.shape).numel(), offset=start).view(spec.shape)
        for spec, start in zip(specs, starts, strict=True)
    ]
    _MAPPED[mapped] = _Where(folder, made[0].data_ptr(), length)
    return made


def _mapped(folder: str, length: int) -> mmap.mmap:
    require_room(folder, length)
    try:
        descriptor, path = tempfile.mkstemp(prefix="muonfx-state-", dir=folder)
        try:
            os.unlink(path)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, length)
            else:
                os.ftruncate(descriptor, length)
            return mmap.mmap(descriptor, length)
        finally:
            os.close(descriptor)  # the mapping has one of its own
    except OSError as error:
        raise _explained(error, folder, length) from error


def require_room(folder: str, nbytes: int) -> None:
    """Require a folder that can be written to, on a disk with so many free bytes.

    Raises:
        OSError: it cannot be made or written to, or there are fewer; the message says which folder and how many.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "it may not be written to")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _explained(error, folder, nbytes) from error
    if nbytes > free:
        raise OSError(
            28,
            f"offload: to={folder!r} has {free / 2**20:.0f} MiB free, the state needs {nbytes / 2**20:.0f} MiB there",
        )


def _explained(error: OSError, folder: str, nbytes: int) -> OSError:
    why = error.strerror or str(error)
    if why.startswith("offload: "):
        return error
    return type(error)(error.errno, f"offload: to={folder!r} cannot take {nbytes / 2**20:.1f} MiB of state: {why}")


def _place_of(tensor: Tensor) -> tuple[Any, _Where] | None:
    address = tensor.data_ptr()
    for mapped, where in _MAPPED.items():
        if where.start <= address < where.start + where.length:
            return mapped, where
    return None


def folder_of(tensor: Tensor) -> str | None:
    """The folder whose disk a tensor lies on; None: it lies in no file of ours."""
    found = _place_of(tensor)
    return None if found is None else found[1].folder


def release(tensor: Tensor) -> None:
    """Let go of the memory that a tensor's pages take in this process; what they hold stays, in the file.

    The kernel writes it to the disk when it sees fit, and keeps a copy as long as it has memory to spare.
    """
    _advise(tensor, "MADV_DONTNEED")


def read_ahead(tensor: Tensor) -> None:
    """Ask the kernel to read a tensor's pages soon."""
    _advise(tensor, "MADV_WILLNEED")


def _advise(tensor: Tensor, advice: str) -> None:
    """Advise the kernel about a tensor's pages; not for one in no file of ours, nor where there is no such advice."""
    found = _place_of(tensor)
    if found is None or not hasattr(mmap, advice):
        return
    mapped, where = found
    begin = tensor.untyped_storage().data_ptr() - where.start
    mapped.madvise(getattr(mmap, advice), begin, -(-tensor.untyped_storage().nbytes() // PAGE) * PAGE)
