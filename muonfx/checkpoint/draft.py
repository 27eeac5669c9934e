"""The files of one save: write them in an order that makes the save atomic, and remove them after an error."""

from __future__ import annotations

import errno
import os
import secrets
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from muonfx.checkpoint.data import Entry, write_data
from muonfx.checkpoint.errors import CheckpointError, NotFoundError, WriteError
from muonfx.checkpoint.files import fresh_file, make_folder, open_regular, sync_folder
from muonfx.checkpoint.folder import inspect, prune, remove_files, remove_files_of_killed_saves, warn_of_later_steps
from muonfx.checkpoint.index import FORMAT, INDEX, Chunk, DataFile, Index, data_name, text_of, unfinished_index_name
from muonfx.checkpoint.leftovers import SaveLock
from muonfx.checkpoint.locks import open_to_wait, wait_for_readers


class Draft:
    """The files of one save on one rank: `commit` makes them the checkpoint, and `discard` removes them after an error.

    Rank 0 calls `begin`, `commit` and `tidy`; each rank calls `write`. Every file name contains the id of its save, so
    two writers never write to the same file. The rename of the index decides which save is at the path. After it, the
    files that the replaced index names are removed, and no others: an index that was replaced is never put back, so no
    checkpoint needs these files.

    Args:
        path: the folder of the checkpoint.
        save_id: the id of the save that rank 0 has drawn; None on rank 0.
    """

    def __init__(self, path: Path, save_id: str | None = None) -> None:
        self.path = path
        self.save_id = save_id or secrets.token_hex(8)
        self._unfinished_index = path / unfinished_index_name(self.save_id)
        self._files: list[Path] = [self._unfinished_index]
        """The files that this rank has written, to be removed after an error."""
        self._lock = SaveLock(path, self.save_id)
        self._replaced_index: FileIO | None = None
        """The index of the checkpoint that this save replaces, kept open to wait for its readers."""
        self._replaced_files: tuple[DataFile, ...] = ()
        """The data files of the checkpoint that this save replaces."""
        self._index_at_begin: tuple[int, int] | None = None
        """The inode and time of the index when the save began."""
        self._has_other_writer = False
        """True if the index was replaced by another save since then."""
        self._has_made_folder = False
        # Between the two, an error does not show whether the new index is in place.
        self._rename_began = False
        self._rename_ended = False

    def data_file(self, rank: int, ranks: int) -> Path:
        """Return the path of a rank's data file, whose name contains the rank and the id of the save."""
        return self.path / data_name(self.save_id, rank, ranks)

    def begin(self) -> None:
        """Create the checkpoint folder, and lock this save. Other ranks write after this."""
        first_bytes = b""
        with suppress(FileNotFoundError, NotADirectoryError), open_regular(self.path / INDEX) as file:
            first_bytes = file.read(4096)
        # A damaged file system can leave a file of zeros, so such a file may be an index of muonfx.
        if FORMAT.encode() not in first_bytes and first_bytes.strip(b"\0"):
            raise FileExistsError(
                errno.EEXIST, f"the folder has an {INDEX} that muonfx has not written: choose another, or move it away"
            )
        self._has_made_folder = not self.path.exists()
        make_folder(self.path)
        self._lock.acquire()
        self._index_at_begin = self._identity_of_index()

    def write(self, file: Path, number: int, entries: Sequence[Entry]) -> tuple[DataFile, list[tuple[str, Chunk]]]:
        """Write a data file of this save; see `write_data`."""
        self._files.append(file)
        return write_data(file, number, entries)

    def commit(self, index: Index) -> None:
        """Write the index under a temporary name and rename it, which replaces the previous checkpoint.

        After an error, `is_committed` returns whether the new checkpoint replaced the previous one.
        """
        for file in index.files:
            if not (self.path / file.name).exists():
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"{file.name} is not visible to the writer of the index: do all ranks use one file system?",
                )
        sync_folder(self.path)
        with fresh_file(self._unfinished_index) as file:
            file.write(text_of(index))
        self._has_other_writer = self._identity_of_index() != self._index_at_begin
        with suppress(OSError, CheckpointError):  # the files of a damaged index are not known, so they stay
            self._replaced_files = inspect(self.path).files
        self._replaced_index = open_to_wait(self.path / INDEX)
        self._rename_began = True  # from here on readers may see the files, so they are kept even if a later step fails
        os.replace(self._unfinished_index, self.path / INDEX)
        self._rename_ended = True
        sync_folder(self.path)  # the files of the replaced index are needed until the rename is on the disk

    def _identity_of_index(self) -> tuple[int, int] | None:
        """Return inode and time of ``index.json``, which change if it is replaced; None if there is no such file."""
        try:
            status = os.stat(self.path / INDEX)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_ino, status.st_mtime_ns

    def tidy(self, keep: int | None) -> None:
        """Remove the replaced checkpoint, old checkpoints except ``keep``, and the files of killed saves.

        Files of killed saves are removed from the folder of the checkpoint and, if `step_path` named it, from the other
        checkpoints of its series. Warn if something cannot be removed.
        """
        try:
            try:
                wait_for_readers(self._replaced_index)  # of the replaced checkpoint, which open its files
                remove_files(self.path, self._replaced_files)
            finally:
                self._lock.release()
            if keep is not None:
                prune(self.path.parent, keep, written=self.path)
            remove_files_of_killed_saves(self.path)
            warn_of_later_steps(self.path)
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"{self.path} was written and is good, but obsolete files could not be removed: {_reason(error)}",
                stacklevel=2,
            )
        if self._has_other_writer:
            warnings.warn(
                f"{self.path}: another process saved to this path at the same time; the path now has the checkpoint of "
                "this save. If the processes are the ranks of one job, pass group= on all of them, or save on one only",
                stacklevel=2,
            )

    def is_committed(self) -> bool | None:
        """Return whether rank 0 has completed the checkpoint (renamed the index); None if that cannot be known."""
        # A network file system may report an error for a rename that it has performed.
        if self._rename_began and not self._rename_ended:
            return self.is_at_path()
        return self._rename_ended

    def is_at_path(self) -> bool | None:
        """Return whether the checkpoint at the path is the one of this save; None if its index cannot be read."""
        try:
            return inspect(self.path).save_id == self.save_id
        except NotFoundError:
            return False
        except CheckpointError:
            return None

    def discard(self) -> None:
        """Remove the files that this rank has written in a failed save."""
        for file in self._files:
            with suppress(OSError):
                file.unlink()
        self._lock.release()
        if self._has_made_folder:
            with suppress(OSError):
                self.path.rmdir()

    def abandon(self) -> bool | None:
        """End the save of rank 0 after an error: remove its files unless the checkpoint is, or may be, complete.

        Return whether it is complete; None if that cannot be known.
        """
        if self._rename_began and not self._rename_ended:
            with suppress(OSError):  # so that a rename still in progress after an error fails
                self._unfinished_index.unlink()
        is_committed = self.is_committed()
        if is_committed is False:
            self.discard()
        self._lock.release()
        if self._replaced_index is not None:
            with suppress(OSError):
                self._replaced_index.close()
        return is_committed

    @contextmanager
    def write_errors(self) -> Generator[None]:
        """Convert an `OSError` of the ``with`` block to a `WriteError`, which names the checkpoint at the path."""
        try:
            yield
        except OSError as error:
            is_committed = self.is_committed()
            raise WriteError(_refusal(self.path, error, is_committed), is_committed is True) from error


def _reason(error: Exception) -> str:
    """Return the text of an error; of an OSError only the text of the system, without number and path."""
    reason = ""
    if isinstance(error, OSError):
        reason = error.strerror
    return reason or str(error)


def _refusal(path: Path, error: OSError, is_committed: bool | None) -> str:
    """Return the text of a `WriteError`; ``is_committed`` is None if that cannot be known."""
    reason = _reason(error)
    if is_committed:
        return f"{path} was written, but a later operation failed, so it may not survive a power failure: {reason}"
    if is_committed is None:
        return (
            f"{path} may have been written or not, and nothing was removed: its {INDEX} cannot be read after a failed "
            f"rename: {reason}"
        )
    with suppress(OSError):
        if path.is_file():
            reason += "; a checkpoint is a folder, and there is a file of this name"
        if (path / INDEX).exists():
            reason += "; the previous checkpoint is unchanged"
    return f"{path} was not written: {reason}"
