"""Files: written whole or not at all, and read only where they are ordinary.

What is written goes to a new file, is flushed to the disk (fsync), and only then gets its name, by a rename, which a
file system does at once or not at all. The folder is flushed too: a rename is an entry in it.

What is read may have been made by a stranger: only ordinary files are opened, of a size that was looked at first.
Opening a pipe waits for somebody to write into it, and reading a device need not ever end.
"""

from __future__ import annotations

import errno
import os
import stat
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

__all__ = ["fresh_file", "make_folder", "open_regular", "read_regular", "sync_folder", "write_all"]


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


def open_regular(path: Path) -> FileIO:
    """Open an ordinary file for reading; links to one are followed.

    Raises:
        OSError: there is none, it cannot be read, or it is a folder, a pipe, a socket or a device. Never waits.
    """
    _check_regular(path, os.stat(path).st_mode)  # to open a device may do something
    # What is there may be another by now. Without O_NONBLOCK the call would wait where a pipe has no writer; for
    # ordinary files it means nothing.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | _CLOEXEC)
    try:
        _check_regular(path, os.fstat(handle).st_mode)
        return FileIO(handle, "rb")
    except BaseException:
        with suppress(OSError):
            os.close(handle)
        raise


_CLOEXEC = getattr(os, "O_CLOEXEC", 0)


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, expected an ordinary file", str(path))


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for test, name in kinds if test(mode)), "no file")


def read_regular(path: Path, most: int, begins: bytes = b"") -> bytearray:
    """Read an ordinary file that is not larger than it may be, and only its beginning if that is another.

    Args:
        path: of the file.
        most: bytes that it may have.
        begins: what it must begin with to be read on.

    Raises:
        OSError: as `open_regular`, or the file is larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = _read(file, min(size, len(begins)))
        if bytes(head) != begins:
            return head
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, expected at most {most}", str(path))
        file.seek(0)
        return _read(file, size)


def _read(file: FileIO, nbytes: int) -> bytearray:
    """So many bytes, or fewer where the file ends."""
    found = bytearray(nbytes)
    view, done = memoryview(found), 0
    while done < nbytes and (got := file.readinto(view[done : done + (1 << 30)])):
        done += got
    view.release()
    del found[done:]
    return found
