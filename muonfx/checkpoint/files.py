"""Write files atomically, and read regular files only.

A new file is written, flushed to the disk (fsync), and renamed to its final name, which is atomic. The folder is
flushed too, because the rename is an entry in it.

Files to be read may be untrusted. Only regular files of a limited size are opened: opening a pipe would block until
another process writes to it, and reading a device may never end.
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

__all__ = ["fresh_file", "identity_of", "make_folder", "open_regular", "read_regular", "sync_folder", "write_all"]


@contextmanager
def fresh_file(path: Path) -> Generator[FileIO]:
    """Open a new file for writing, flush it to the disk at the end, and remove it on failure."""
    try:
        file = FileIO(path, "xb")
    except FileNotFoundError:  # another process has removed the folder, which was still empty
        make_folder(path.parent)
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
    """Write all bytes in as many system calls as necessary."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents and flush their entries; warn if an entry cannot be flushed."""
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


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when a file is replaced, None if there is no file."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_mtime_ns


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, if the system supports it."""
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
    """Open a regular file for reading without blocking; follow links; raise OSError for anything else."""
    _check_regular(path, os.stat(path).st_mode)  # checked before opening, since opening a device can have effects
    # The file may have been replaced since the check. O_NONBLOCK keeps the call from blocking on a pipe without a
    # writer and has no effect on regular files.
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
    """Read a regular file of at most ``most`` bytes, or only its first bytes if they are not ``begins``."""
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
    """Read the given number of bytes, fewer at the end of the file."""
    found = bytearray(nbytes)
    view, done = memoryview(found), 0
    while done < nbytes and (got := file.readinto(view[done : done + (1 << 30)])):
        done += got
    view.release()
    del found[done:]
    return found
