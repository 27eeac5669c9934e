"""Files and their bytes: write atomically, read regular files only, lock, and compute checksums.

A new file is written, flushed to the disk (fsync), and renamed to its final name, which is atomic. The folder is
flushed too, because the rename is an entry in it.

Files to be read may be untrusted. Only regular files of a limited size are opened: opening a pipe would block until
another process writes to it, and reading a device may never end.

Advisory locks (flock) protect files in use. A reader reads ``index.json`` and then opens the data files that it names.
In between, a save may replace the index and remove these files. The reader therefore locks the index until it has
opened the files, and the save waits for the lock on the index that it has replaced, for a short time at most. Open
files stay readable after they were removed. Some file systems have no locks. There the reader finds that a file is
missing, and reads the new index.

While a save runs, its process holds a lock on a file ``.save-<id>.lock`` in the folder of the checkpoint. The file is
created before any other file of the save, and removed after all of them are in place or gone. The operating system
releases the lock when the process ends. So if the file can be locked, its save was killed. On network file systems a
lock may be valid on one machine only. The file therefore contains the boot id of the machine, and the files of another
machine are left alone.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import stat
import sys
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from muonfx.checkpoint.errors import CheckpointError

_BUFFER = 1 << 20
"""Bytes of small tensors that are written in one call; a system call for each takes longer than the copy."""


@contextmanager
def fresh_file(path: Path) -> Generator[BinaryIO]:
    """Create a file for the ``with`` block to write; flush it to the disk at the end, or remove it after an error.

    So there is either a complete file at the path, or none. It is an error if there is a file already.
    """
    file = FileIO(path, "xb")  # "x" creates the file, and raises if it exists
    try:
        with file:  # not `buffered`: to close that after an error would write the rest of its bytes
            buffered: Any = BufferedWriter(file, _BUFFER)
            yield buffered
            buffered.flush()  # from this process to the system
            os.fsync(file.fileno())  # from the system to the disk
    except BaseException:  # also an interrupt such as Ctrl-C
        with suppress(OSError):
            path.unlink()
        raise


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and flush the new directory entries to the disk.

    An entry belongs to the parent: after a power failure, a folder without a flushed entry may be gone.
    """
    new_folders = [path]
    new_folders += [parent for parent in path.parents if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new_folders:
        with suppress(PermissionError):  # an entry cannot be flushed if its folder is not readable
            sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to the disk (fsync), if the system supports it.

    An entry is the name of a file. Without this, a file that was just renamed may have its old name after a power
    failure.
    """
    if os.name == "nt":  # Windows cannot open a folder as a file
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Raised by file systems that cannot flush a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading; raise OSError, without blocking, for a pipe, a device or a folder.

    A checkpoint may be of an unknown origin: to open a pipe in it would wait forever for a writer.
    """
    # O_NONBLOCK keeps the call from blocking on a pipe without a writer and has no effect on regular files.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = FileIO(path, "rb", opener=lambda name, _: os.open(name, flags))
    try:
        # Checked on the open file: one that is checked by its path could be exchanged before it is opened.
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        close_read(file)
        raise
    return file


def close_read(file: FileIO) -> None:
    """Close a file that was only read. An error is ignored: the values that were read have been verified."""
    with suppress(OSError):
        file.close()


def read_regular(path: Path, most: int) -> bytes:
    """Return the contents of a regular file; raise OSError if it has more than ``most`` bytes.

    The size is checked before the read, because a file of an unknown origin could fill the memory.
    """
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


# ---------------------------------------------------------------------------------------------------------------- locks

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock can be taken
    fcntl = None

_LONGEST_WAIT = 5.0
"""Seconds that a save waits for readers. Opening files takes milliseconds, unless a reader was stopped."""
_PAUSE = 0.001
"""Seconds between two attempts to lock a file."""


def lock(file: FileIO, *, shared: bool = False) -> bool | None:
    """Lock an open file without waiting, so that other processes see that it is in use.

    Return True if this process now holds the lock, and False if another process has locked the file. Return None if it
    cannot be locked, because the system or the file system has no locks. Several processes can hold a ``shared`` lock
    at once. The lock ends when the file is closed.
    """
    if fcntl is None:  # not a POSIX system
        return None
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file.fileno(), operation | fcntl.LOCK_NB)  # NB: raise instead of waiting
    except BlockingIOError:  # another process holds the lock
        return False
    except OSError:  # the file system has no locks
        return None
    return True


def open_to_wait(index_path: Path) -> FileIO | None:
    """Open the index that a save is about to replace, for `wait_for_readers`; None if there is none.

    After the rename, the replaced file has no name, and can be locked only if it is already open.
    """
    try:
        # Some file systems lock only files that are open for writing.
        return FileIO(index_path, "r+b")
    except OSError:
        return None


def wait_for_readers(replaced_index: FileIO | None) -> None:
    """Wait until no reader locks an index that was replaced, for a short time at most, and close the file.

    A reader locks the index until it has opened the data files. After that, the save may remove them.
    """
    if replaced_index is None:  # the save has replaced nothing
        return
    with replaced_index:
        end = time.monotonic() + _LONGEST_WAIT
        # False: a reader has locked it, and is opening the data files. None: there are no locks to wait for.
        while lock(replaced_index) is False and time.monotonic() < end:
            time.sleep(_PAUSE)


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LONGEST_LOCK = 4096


def this_boot() -> bytes:
    """Return the id of this boot of this machine; b"" if the system has none."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b""


class SaveLock:
    """The lock of one running save, from `acquire` to `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None

    def acquire(self) -> None:
        """Create the lock file and lock it, which shows other processes that this save is running.

        The folder is created again if another process has just removed it, as it may do with an empty one.
        """
        try:
            self._file = _locked_file(self.path)
        except FileNotFoundError:
            make_folder(self.path.parent)
            self._file = _locked_file(self.path)

    def release(self) -> None:
        """Remove the lock file, and release the lock. A lock that was released may be released again."""
        if self._file is None:
            return
        # The file first: a lock file that is not locked is the mark of a save that was killed.
        with suppress(OSError):
            self.path.unlink()
        with suppress(OSError):
            self._file.close()  # this ends the lock
        self._file = None


def _locked_file(path: Path) -> FileIO:
    """Create the lock file of a save: a file at ``path`` that is locked and contains the boot id of this machine.

    The boot id is the id that the machine got when it was started. A process of another machine does not rely on the
    lock. A file that cannot be locked has no boot id, so that no process relies on it.
    """
    # If the system can, the file gets its name last. If the process is killed before, the system removes the file, so
    # that no empty one is left.
    unnamed_file = _unnamed_file(path.parent)
    if unnamed_file is not None:
        # Closes the file at the end of the block, unless it got its name.
        with ExitStack() as stack:
            stack.enter_context(unnamed_file)
            _lock_and_sign(unnamed_file)
            if _give_name(unnamed_file, path):
                stack.pop_all()  # the file stays open, and so locked
                return unnamed_file
    # The system has no unnamed files, or cannot name them.
    file = FileIO(path, "xb")
    _lock_and_sign(file)
    return file


def _lock_and_sign(file: FileIO) -> None:
    """Lock a new file, and write the boot id to it; leave it empty if it cannot be locked."""
    if lock(file):
        file.write(this_boot())


def _give_name(unnamed_file: FileIO, path: Path) -> bool:
    """Give an open file that has no name a path; return False if that is impossible, since some systems forbid it.

    The file is complete before it gets its name, so no other process ever sees a part of it.
    """
    descriptor = unnamed_file.fileno()
    try:
        # This path in /proc is a symbolic link to the file. os.link follows it only with a src_dir_fd, of any value.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)
    except OSError:
        return False
    return True


def _unnamed_file(folder: Path) -> FileIO | None:
    """Create a file without a name in the file system of a folder; None if the system or file system has no such.

    The system removes such a file when its process ends, unless `_give_name` has given it a name.
    """
    if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").is_dir():
        return None
    try:
        return FileIO(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "r+b")
    except FileNotFoundError:  # there is no such folder, which the caller creates
        raise
    except OSError:
        return None


# ----------------------------------------------------------------------------------------------------- bytes of tensors

crc32_of: Callable[[Any], int] = zlib.crc32
with suppress(ImportError):  # isal has the same values, in about a tenth of the time
    crc32_of = import_module("isal.isal_zlib").crc32


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a dense CPU tensor as bytes, not copied; the caller must keep the tensor alive.

    >>> import torch
    >>> tensor = torch.tensor([1, 258], dtype=torch.int16)
    >>> list(bytes(bytes_of(tensor)))
    [1, 0, 2, 1]
    """
    if not tensor.nbytes:  # its address may be 0
        return memoryview(b"")
    # An array of C bytes at the address of the tensor.
    array_type = ctypes.c_ubyte * tensor.nbytes
    return memoryview(array_type.from_address(tensor.data_ptr()))


def with_plain_bits(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has its values. A view of a complex tensor may be conjugated when it is read."""
    return tensor.resolve_conj().resolve_neg()


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """Return the CRC-32 checksum of some bytes as text: eight hex digits."""
    return f"{crc32_of(data):08x}"


def check_byte_order() -> None:
    """Raise on a big-endian machine, because the files of checkpoints are little-endian."""
    if sys.byteorder != "little":
        raise CheckpointError(
            "checkpoints store little-endian numbers, and this machine is big-endian"
        )
