"""Write files atomically, and read regular files only.

A new file is written, flushed to the disk (fsync), and renamed to its final name, which is atomic. The folder is
flushed too, because the rename is an entry in it.

Files to be read may be untrusted. Only regular files of a limited size are opened: opening a pipe would block until
another process writes to it, and reading a device may never end.
"""

from __future__ import annotations

import errno
import gc
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, BinaryIO

_BUFFER = 1 << 20
"""Bytes of small tensors that are written in one call; a system call for each takes longer than the copy."""


@contextmanager
def fresh_file(path: Path) -> Generator[BinaryIO]:
    """Create a file for the ``with`` block to write; flush it to the disk at the end, or remove it after an error."""
    try:
        file = FileIO(path, "xb")
    except FileNotFoundError:  # another process has removed the folder, which was still empty
        make_folder(path.parent)
        file = FileIO(path, "xb")
    try:
        with file:  # not the buffer, which would write the rest after a failure
            buffered: Any = BufferedWriter(file, _BUFFER)
            yield buffered
            buffered.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and flush the new directory entries to the disk."""
    missing = [path, *(parent for parent in path.parents if not parent.exists())]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        with suppress(PermissionError):  # an entry cannot be flushed if its folder is not readable
            sync_folder(made.parent)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to the disk (fsync), if the system supports it."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # raised by file systems that cannot flush a folder
            raise
    finally:
        os.close(handle)


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading; raise OSError, without blocking, for a pipe, a device or a folder."""
    # O_NONBLOCK keeps the call from blocking on a pipe without a writer and has no effect on regular files.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = FileIO(path, "rb", opener=lambda name, _: os.open(name, flags))
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        with suppress(OSError):
            file.close()
        raise
    return file


def read_regular(path: Path, most: int) -> bytes:
    """Return the contents of a regular file; raise OSError if it has more than ``most`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, expected at most {most}", str(path))
        return file.readall()


@contextmanager
def no_collection() -> Generator[None]:
    """Pause Python's cyclic garbage collector in a ``with`` block or a decorated function.

    A save or load creates many small objects for thousands of leaves. They would start a full collection, which takes
    longer (100 ms) than the save itself (50 ms). Tensors are written outside of the pause.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
