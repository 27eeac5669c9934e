"""Advisory locks (flock) on files, and the lock by which a reader keeps the data files of a checkpoint.

A reader reads ``index.json`` and then opens the data files that it names. In between, a save may replace the index and
remove these files. The reader therefore locks the index until it has opened the files, and the save waits for the lock
on the index that it has replaced, for a short time at most. Open files stay readable after they were removed.

Some file systems have no locks. There the reader finds that a file is missing, and reads the new index.
"""

from __future__ import annotations

import time
from io import FileIO
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock can be taken
    fcntl = None

_LONGEST_WAIT = 5.0
"""Seconds that a save waits for readers. Opening files takes milliseconds, unless a reader was stopped."""
_PAUSE = 0.001
"""Seconds between two attempts to lock a file."""


def lock(file: FileIO, *, shared: bool = False) -> bool:
    """Lock an open file without waiting; return False if another process has locked it, or it cannot be locked.

    Several processes can hold a ``shared`` lock. The lock ends when the file is closed.
    """
    if fcntl is None:
        return False
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file.fileno(), kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def open_to_wait(index_path: Path) -> FileIO | None:
    """Open the index that a save is about to replace, for `wait_for_readers`; None if there is none."""
    try:
        return FileIO(index_path, "r+b")  # some file systems lock only files that are open for writing
    except OSError:
        return None


def wait_for_readers(replaced_index: FileIO | None) -> None:
    """Wait until no reader locks an index that was replaced, for a short time at most, and close the file."""
    if replaced_index is None:
        return
    with replaced_index:
        end = time.monotonic() + _LONGEST_WAIT
        while _is_locked(replaced_index) and time.monotonic() < end:
            time.sleep(_PAUSE)


def _is_locked(file: FileIO) -> bool:
    """Return whether another process has locked a file; False if its file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
