"""Files that are there whole or not at all.

What is written goes to a new file, is flushed to the disk (fsync), and only then gets its name, by a rename, which a
file system does at once or not at all. The folder is flushed too: a rename is an entry in it.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

__all__ = ["fresh_file", "make_folder", "sync_folder", "write_all"]


@contextmanager
def fresh_file(path: Path) -> Generator[FileIO]:
    """Open a new file to write to, flush it to the disk at the end, and remove it if anything fails."""
    file = FileIO(path, "xb")
    try:
        with file:
            yield file
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all bytes: the system may take fewer at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def make_folder(path: Path) -> None:
    """Make a folder and those above it where they are missing, and flush their entries to the disk.

    Warns:
        UserWarning: a folder was made in one that may not be read, and so not be flushed.
    """
    there = path.exists()
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        try:
            sync_folder(made.parent)
        except PermissionError as error:
            if not there:
                warnings.warn(
                    f"{made} may not survive a loss of power: its entry in {made.parent} cannot be flushed to the "
                    f"disk: {error.strerror}",
                    stacklevel=2,
                )


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, where the system has folders that can be opened and flushed."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot flush a folder say this
            raise
    finally:
        os.close(handle)
