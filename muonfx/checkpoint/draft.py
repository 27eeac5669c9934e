"""The files of one save: write them in an order that makes the save atomic, and remove them after an error."""

from __future__ import annotations

import errno
import json
import os
import secrets
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from muonfx.checkpoint.errors import CheckpointError, NotFoundError, WriteError
from muonfx.checkpoint.files import (
    SaveLock,
    bytes_of,
    check_byte_order,
    checksum_of,
    fresh_file,
    make_folder,
    no_collection,
    open_regular,
    open_to_wait,
    sync_folder,
    wait_for_readers,
    with_plain_bits,
)
from muonfx.checkpoint.folder import inspect, prune, remove_files_of_killed_saves, warn_of_later_steps
from muonfx.checkpoint.index import (
    BLOCK,
    FORMAT,
    INDEX,
    LONGEST_HEADER,
    Chunk,
    DataFile,
    Index,
    lock_name,
    read_index,
    text_of,
    unfinished_index_name,
)
from muonfx.sharding.shards.boxes import Box
from muonfx.tree.dtypes import SAFETENSORS_NAMES


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
        self.files: list[Path] = [self._unfinished_index]
        """The files to remove after an error: those that this rank writes, and those of ranks that may not learn of it.
        """
        self._lock = SaveLock(path / lock_name(self.save_id))
        self._replaced_index: FileIO | None = None
        """The index of the checkpoint that this save replaces, kept open to wait for its readers."""
        self._replaced_files: tuple[DataFile, ...] = ()
        """The data files of the checkpoint that this save replaces."""
        self._index_at_begin = b""
        """The start of the index when `begin` was called."""
        self._has_other_writer = False
        """True if another save has replaced the index between `begin` and `commit`."""
        self._has_made_folder = False
        """True if `begin` has created the folder of the checkpoint."""
        self._is_renamed: bool | None = False
        """True if the new index is in place, None from the begin of its rename to the end: it may be in place then."""

    def begin(self) -> None:
        """Create the checkpoint folder, and lock this save, so that other processes see that it is running.

        Rank 0 calls this, and the ranks write after it. Raise if the folder has an ``index.json`` of another program,
        which the save would replace. ``index.json`` is the index, the description of a checkpoint.
        """
        self._index_at_begin = self._start_of_index()  # b"" if there is no checkpoint yet
        is_empty = self._index_at_begin.strip(b"\0") == b""  # also if all bytes are 0, as after a power failure
        is_ours = FORMAT.encode() in self._index_at_begin
        if not is_ours and not is_empty:
            raise FileExistsError(
                errno.EEXIST, f"the folder has an {INDEX} that muonfx has not written: choose another, or move it away"
            )
        self._has_made_folder = not self.path.exists()  # then `discard` removes it after an error
        make_folder(self.path)
        self._lock.acquire()

    def _start_of_index(self) -> bytes:
        """Return the first bytes of ``index.json``, which have its checksum; b"" if there is no such file."""
        try:
            with open_regular(self.path / INDEX) as file:
                return file.read(4096)
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def write(self, path: Path, entries: Sequence[Entry], report: Callable[[int], None] | None = None) -> WrittenShards:
        """Write the entries, parts of tensors, to a new safetensors file, and flush the file to the disk.

        Each tensor is copied to the CPU immediately before it is written. ``report`` is called with the number of bytes
        of tensors that are written so far. Return the position and the checksums of each entry in the file.
        """
        check_byte_order()
        self.files.append(path)  # first, so that the file is removed if the write fails
        # Largest element size first, so that each leaf begins at a multiple of its element size.
        ordered = sorted(entries, key=lambda entry: (-entry.values.itemsize, entry.key))
        header = _header_of(ordered)
        _require_length(header, path, len(entries))
        chunks: list[tuple[str, Chunk]] = []
        end = len(header)  # the number of bytes that are written so far
        with fresh_file(path) as file:
            file.write(header)
            for entry in ordered:
                begin = end
                # The values as they are in a file: without a pending conjugation, in CPU memory, row by row.
                tensor = with_plain_bits(entry.values).cpu().contiguous()
                checksums: list[str] = []
                for block in _blocks_of(tensor):
                    file.write(block)
                    checksums.append(checksum_of(block))
                    end += len(block)
                    if report is not None:
                        report(end - len(header))
                # File number 0, until it is known how many ranks have written a file.
                chunks.append((entry.name, Chunk(0, begin, entry.box, tuple(checksums))))
                del tensor  # free it before the next tensor is made
        return WrittenShards(DataFile(path.name, end, len(header), checksum_of(header)), chunks)

    def commit(self, index: Index) -> None:
        """Write the index under a temporary name and rename it, which replaces the previous checkpoint.

        All data files are on the disk before that. The files of the previous checkpoint are recorded for `tidy`. After
        an error, `is_committed` returns whether the new checkpoint replaced the previous one.
        """
        # 1. Everything that the new index names is on the disk, and the index too, under another name.
        self._require_visible(index.files)
        sync_folder(self.path)
        with fresh_file(self._unfinished_index) as file:
            file.write(text_of(index))
        # 2. Note the replaced files, for `tidy`. After the rename, the old index cannot be found by its name. If it is
        # not the index that `begin` found, another process has saved here meanwhile.
        self._has_other_writer = self._start_of_index() != self._index_at_begin
        with suppress(OSError, CheckpointError):  # the files of a damaged index are not known, so they stay
            self._replaced_files = read_index(self.path / INDEX, with_leaves=False).files
        self._replaced_index = open_to_wait(self.path / INDEX)
        # 3. The atomic rename: readers find either the previous checkpoint or the new one.
        self._is_renamed = None  # from here on readers may see the files, so they are kept even if a later step fails
        os.replace(self._unfinished_index, self.path / INDEX)
        self._is_renamed = True
        sync_folder(self.path)  # the files of the replaced index are needed until the rename is on the disk

    def _require_visible(self, files: Sequence[DataFile]) -> None:
        """Raise unless this rank can see the data files that all ranks have written.

        If the ranks are on machines without a common file system, each has only its own files.
        """
        for file in files:
            if not (self.path / file.name).exists():
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"{file.name} is not visible to the writer of the index: do all ranks use one file system?",
                )

    def tidy(self, keep: int | None) -> None:
        """Clean up after a save: remove the replaced checkpoint, old ones except ``keep``, and files of killed saves.

        Files of killed saves are removed from the folder of the checkpoint and, if `step_path` named it, from the other
        checkpoints of its series. Warn if something cannot be removed: the new checkpoint is complete already, so this
        is no error.
        """
        try:
            self._remove_replaced_files()
            if keep is not None:  # of the checkpoints in the parent folder, such as "step-000000100"
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

    def _remove_replaced_files(self) -> None:
        """Remove the data files of the replaced checkpoint after its readers have opened them; end this save's lock.

        A reader that has opened a file can read it to the end after it was removed.
        """
        try:
            # A reader locks the index until it has opened all data files.
            wait_for_readers(self._replaced_index)
            for file in self._replaced_files:
                (self.path / file.name).unlink(missing_ok=True)
        finally:
            self._lock.release()  # also after an error: this save is complete

    def is_committed(self) -> bool | None:
        """Return whether rank 0 has completed the checkpoint (renamed the index); None if that cannot be known."""
        if self._is_renamed is None:  # a network file system may report an error for a rename that it has performed
            return self.is_at_path()
        return self._is_renamed

    def is_at_path(self) -> bool | None:
        """Return whether the checkpoint at the path is the one of this save; None if its index cannot be read."""
        try:
            return inspect(self.path).save_id == self.save_id
        except NotFoundError:
            return False
        except CheckpointError:
            return None

    def discard(self) -> None:
        """Remove the files that this rank has written in a failed save, and the folder if this save has created it.

        A file that cannot be removed stays, because the caller already raises the error of the save.
        """
        for file in self.files:
            with suppress(OSError):
                file.unlink()
        self._lock.release()  # after the files: a later save may remove files without a lock
        if self._has_made_folder:
            with suppress(OSError):  # another save may have files in it
                self.path.rmdir()

    def abandon(self) -> bool | None:
        """End the save of rank 0 after an error: remove its files unless the checkpoint is, or may be, complete.

        Return whether it is complete; None if that cannot be known. The rename of the index completes it, and a network
        file system may report an error for a rename that it has performed.
        """
        is_rename_unknown = self._is_renamed is None
        if is_rename_unknown:  # a network file system may still perform it: without its file, it fails
            with suppress(OSError):
                self._unfinished_index.unlink()
        is_committed = self.is_committed()
        if is_committed is False:  # not None: the index at the path may name these files
            self.discard()
        self._lock.release()  # also if the files stay
        if self._replaced_index is not None:
            with suppress(OSError):
                self._replaced_index.close()
        return is_committed

    @contextmanager
    def write_errors(self) -> Generator[None]:
        """Convert an `OSError` of the ``with`` block to a `WriteError`, which says which checkpoint is at the path.

        The message is such as "runs/a was not written: No space left on device; the previous checkpoint is unchanged".
        """
        try:
            yield
        except OSError as error:
            is_committed = self.is_committed()
            message = _refusal(self.path, error, is_committed)
            raise WriteError(message, written=is_committed is True) from error


def _reason(error: Exception) -> str:
    """Return the text of an error; of an OSError only the text of the system, without number and path."""
    return getattr(error, "strerror", None) or str(error)


def _refusal(path: Path, error: OSError, is_committed: bool | None) -> str:
    """Return the text of a `WriteError`; ``is_committed`` is None if that cannot be known.

    For example "runs/a was not written: No space left on device; the previous checkpoint is unchanged".
    """
    reason = _reason(error)
    # A rename that is not flushed to the disk may be undone by a power failure.
    if is_committed:
        return f"{path} was written, but a later operation failed, so it may not survive a power failure: {reason}"
    if is_committed is None:
        return (
            f"{path} may have been written or not, and nothing was removed: its {INDEX} cannot be read after a failed "
            f"rename: {reason}"
        )
    with suppress(OSError):  # without these looks at the disk, the message has the reason alone
        if path.is_file():
            reason += "; a checkpoint is a folder, and there is a file of this name"
        if (path / INDEX).exists():
            reason += "; the previous checkpoint is unchanged"
    return f"{path} was not written: {reason}"


# ----------------------------------------------------------------------------------------------------------- data files


def _require_length(header: bytes, path: Path, leaves: int) -> None:
    """Raise if a header is longer than safetensors allows; ``leaves`` is the number of names in it."""
    if len(header) > LONGEST_HEADER:
        raise CheckpointError(
            f"{path}: the names of {leaves} leaves take {len(header)} bytes, more than the header of a safetensors "
            f"file may have ({LONGEST_HEADER}): save with group=, so that each rank writes its own"
        )


class Entry(NamedTuple):
    """One entry of a data file: a box (rectangular part) of a leaf, and its values."""

    key: str
    """Unique name of the entry in the data file: "trace/w" for a whole leaf, "trace/w~[0:4,0:8]" for a part."""
    name: str
    """The name of the leaf."""
    box: Box
    values: Tensor
    """A tensor with the sizes of the box, on any device."""


class WrittenShards(NamedTuple):
    """The data file that a rank has written, and where the shards are in it; no file if it had none to write."""

    file: DataFile | None
    chunks: list[tuple[str, Chunk]]
    """The names of leaves, and the position of a shard of each in the file. The number of the file is still 0."""


def _blocks_of(tensor: Tensor) -> list[memoryview]:
    """Divide the bytes of a dense CPU tensor into blocks of 4 MiB, which get one checksum each.

    A tensor of 10 MiB has three blocks, of which the last has 2 MiB. The blocks are views of the tensor's memory, so
    the caller keeps the tensor alive.
    """
    data = bytes_of(tensor)
    return [data[offset : offset + BLOCK] for offset in range(0, len(data), BLOCK)]


def block_checksums(values: Tensor) -> tuple[str, ...]:
    """Return the checksum of each 4 MiB of a tensor, as `Draft.write` computes it for an entry with these values.

    >>> import torch
    >>> block_checksums(torch.zeros(4))
    ('ecbb4b55',)
    """
    tensor = with_plain_bits(values).cpu().contiguous()
    return tuple(map(checksum_of, _blocks_of(tensor)))


@no_collection()
def _header_of(entries: Sequence[Entry]) -> bytes:
    """Return the first bytes of a safetensors file with these entries, before the values.

    They are the length of the header as 8 bytes, and the header, a JSON object that describes each tensor:
    ``{"trace/w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}``.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0  # offsets count from the first byte after the header
    for entry in entries:
        nbytes = entry.values.nbytes
        begin = end
        end += nbytes
        dtype_name = SAFETENSORS_NAMES.get(entry.values.dtype)
        shape = entry.box.sizes
        if dtype_name is None:  # safetensors has no name for it, so its bytes are stored
            dtype_name = "U8"
            shape = (nbytes,)
        header[entry.key] = {"dtype": dtype_name, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    padding = -len(text) % 8  # 3 for 13 bytes, so that the data begins at a multiple of 8 bytes
    text += b" " * padding
    return len(text).to_bytes(8, "little") + text
