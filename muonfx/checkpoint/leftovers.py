"""Find the files that killed saves have left, and distinguish them from those of a running save.

While a save runs, its process holds an advisory lock (flock) on a file ``.save-<id>.lock`` in the folder of the
checkpoint. The file is created before any other file of the save, and removed after all of them are in place or gone.
The operating system releases the lock when the process ends. So if the file can be locked, its save was killed.

On network file systems a lock may be valid on one machine only. The file therefore contains the boot id of the machine,
and the files of another machine are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Literal

from muonfx.checkpoint.errors import CheckpointError
from muonfx.checkpoint.files import make_folder, read_regular
from muonfx.checkpoint.index import INDEX, is_own_name, lock_name, read_index, save_id_of, unfinished_index_name
from muonfx.checkpoint.locks import lock

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LONGEST_LOCK = 4096


def _this_boot() -> bytes:
    """Return the id of this boot of this machine; b"" if the system has none."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b""


class SaveLock:
    """The lock of one running save, from `acquire` to `release`."""

    def __init__(self, folder: Path, save_id: str) -> None:
        self.path = folder / lock_name(save_id)
        self._file: FileIO | None = None

    def acquire(self) -> None:
        """Create the lock file and lock it. The folder is created again if another process has just removed it."""
        try:
            self._file = _locked_file(self.path)
        except FileNotFoundError:
            make_folder(self.path.parent)
            self._file = _locked_file(self.path)

    def release(self) -> None:
        """Remove the lock file, and release the lock."""
        if self._file is None:
            return
        with suppress(OSError):
            self.path.unlink()
        with suppress(OSError):
            self._file.close()
        self._file = None


def _locked_file(path: Path) -> FileIO:
    """Create a file at ``path`` that is locked and contains the boot id; without a boot id if it cannot be locked."""
    # The file gets its name last. If the process is killed before, the system removes it. Otherwise an empty file could
    # be left, which does not record its machine.
    unnamed_file = _unnamed_file(path.parent)
    if unnamed_file is not None:
        with ExitStack() as closing:
            closing.enter_context(unnamed_file)
            if lock(unnamed_file):
                unnamed_file.write(_this_boot())
            with suppress(OSError):  # some systems forbid it
                link = f"/proc/self/fd/{unnamed_file.fileno()}"
                os.link(link, path, src_dir_fd=unnamed_file.fileno())  # with src_dir_fd, the link is followed
                closing.pop_all()  # the file stays open, and so locked
                return unnamed_file
    file = FileIO(path, "xb")
    if lock(file):
        file.write(_this_boot())
    return file


def _unnamed_file(folder: Path) -> FileIO | None:
    """Create a file without a name in the file system of a folder; None if the system or file system has no such."""
    if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").is_dir():
        return None
    try:
        return FileIO(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "r+b")
    except FileNotFoundError:
        raise
    except OSError:
        return None


Verdict = Literal["dead", "alive", "unknown"]
"""Whether a save was killed, or still runs. It is unknown for a save of another machine, or if its lock is unreadable.
"""


@contextmanager
def _judged(folder: Path, save_id: str) -> Generator[Verdict]:
    """Yield "alive" if a save is still running, "dead" if it was killed, else "unknown".

    In the ``with`` block, this process holds the lock of a dead save, so that no other process can judge it.
    """
    path = folder / lock_name(save_id)
    with ExitStack() as stack:
        try:
            boot = read_regular(path, _LONGEST_LOCK)
            file = stack.enter_context(FileIO(path, "r+b"))
        except FileNotFoundError:
            # Files without a lock belong to a save that has ended, or to a checkpoint that was removed by half. An
            # unfinished index without a lock is of another program or version. It is searched for after the lock: a
            # save that ends in these moments has renamed its index before it removes its lock.
            yield "unknown" if _may_exist(folder / unfinished_index_name(save_id)) else "dead"
            return
        except OSError:
            yield "unknown"
            return
        if not boot or boot != _this_boot():
            yield "unknown"
            return
        yield "dead" if lock(file) else "alive"


def _may_exist(path: Path) -> bool:
    """Return True if a file exists, or if an error of the disk hides it."""
    try:
        return path.exists()
    except OSError:
        return True


def _unnamed_files(folder: Path, verdicts: tuple[Verdict, ...], *, remove: bool = False) -> list[Path]:
    """Return the files that saves have left in a checkpoint's folder, and that its index does not name.

    Only files of saves with one of the ``verdicts`` are returned: ``("dead",)`` for killed saves. With ``remove=True``
    they are also removed. The name of each file has the id of its save: ``data-0123456789abcdef-00000-of-00001...``.
    """
    try:
        names = {name for name in os.listdir(folder) if is_own_name(name)}
    except OSError:
        return []
    if not names:
        return []
    # An ordinary checkpoint has an index and no lock. Its index is read only if a caller searches thoroughly.
    has_lock = any(name.startswith(".save-") for name in names)
    is_thorough = "unknown" in verdicts
    if not is_thorough and not has_lock and _may_exist(folder / INDEX):
        return []
    unnamed: list[Path] = []
    for save_id in sorted({save_id_of(name) for name in names}):
        with _judged(folder, save_id) as verdict:
            if verdict not in verdicts:
                continue
            try:
                # Read after the verdict: a save that has just ended has been named, and its lock is gone.
                named = _names_in_index(folder)
            except (OSError, CheckpointError):
                return unnamed  # any file may belong to an index that cannot be read
            files = [folder / name for name in sorted(names - named) if save_id_of(name) == save_id]
            # The lock file is the last, so that a removal that is interrupted is completed later.
            files.sort(key=lambda file: file.name == lock_name(save_id))
            if remove:
                for file in files:
                    file.unlink(missing_ok=True)
            unnamed += files
    return unnamed


def _names_in_index(folder: Path) -> set[str]:
    """Return the names of the data files of the checkpoint in a folder; none if it has no index."""
    try:
        return {file.name for file in read_index(folder / INDEX).files}
    except FileNotFoundError:
        return set()


def unknown_files(folder: Path) -> list[Path]:
    """Return the files in a checkpoint's folder of saves of which this machine cannot find out if they still run."""
    return _unnamed_files(folder, ("unknown",))


def remove_dead_files(folder: Path) -> list[Path]:
    """Remove the files that killed saves have left in a checkpoint's folder; return them."""
    return _unnamed_files(folder, ("dead",), remove=True)


def remove_ended_files(folder: Path) -> list[Path]:
    """Remove the files of all saves that are not known to be running, also of other machines; return them."""
    return _unnamed_files(folder, ("dead", "unknown"), remove=True)
