"""Files that are there whole or not at all.

What is written goes to a new file, is flushed to the disk (fsync), and only then gets its name, by a rename, which a
file system does at once or not at all. The folder is flushed too: a rename is an entry in it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

__all__ = ["PART", "fresh_file", "replace_file", "sync_folder"]

PART = ".part"
"""What the name of an unfinished file ends in."""


@contextmanager
def fresh_file(path: Path) -> Generator[FileIO]:
    """Open a new file to write to, flush it to the disk at the end, and remove it if anything fails."""
    with suppress(FileNotFoundError):
        path.unlink()  # left by a writer that was killed
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


def replace_file(path: Path, data: bytes) -> None:
    """Give a file new contents, at once or not at all."""
    part = path.with_name(f".{path.name}{PART}")
    with fresh_file(part) as file:
        write_all(file, data)
    try:
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, where the system has folders that can be opened."""
    if os.name != "nt":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
