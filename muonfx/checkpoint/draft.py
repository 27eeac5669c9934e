"""Check the arguments of a save, and write its files in an order that makes the save atomic."""

from __future__ import annotations

import errno
import json
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muonfx.checkpoint.background import warn_of_failed_saves
from muonfx.checkpoint.data import Part, write_data
from muonfx.checkpoint.errors import CheckpointError, NotFoundError, WriteError
from muonfx.checkpoint.files import fresh_file, make_folder, no_collection, open_regular, sync_folder
from muonfx.checkpoint.folder import (
    check_step,
    folder_named,
    inspect,
    prune,
    remove_files,
    remove_files_of_killed_saves,
    step_of,
    warn_of_later_steps,
)
from muonfx.checkpoint.index import FORMAT, INDEX, Chunk, DataFile, Index, data_name, text_of, unfinished_index_name
from muonfx.checkpoint.leftovers import SaveLock
from muonfx.checkpoint.names import PARAMS, in_section, named_tensors
from muonfx.core import Transform
from muonfx.core.checks import positive_int
from muonfx.core.precision import product_dtypes
from muonfx.core.recorded import strip_transparent
from muonfx.sharding.dtensors import is_dtensor
from muonfx.sharding.shards import FlatPiece
from muonfx.sharding.transform import Sharded, is_global, to_global
from muonfx.tree import PyTree
from muonfx.tree.dtypes import NAMES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Draft", "Job"]


@dataclass(frozen=True)
class Job:
    """The checked arguments of one `save`; if an argument is not valid, ``problem`` is the error to raise."""

    path: Path
    head: Index = field(default_factory=Index)
    """The known part of the index: all fields except the save id, the files and the leaves."""
    leaves: dict[str, Any] = field(default_factory=dict)
    """A dict from leaf name to tensor or shard; copies on the CPU for a save in the background."""
    keep: int | None = None
    group: ProcessGroup | None = None
    problem: Exception | None = None

    @classmethod
    @no_collection()
    def of(
        cls,
        path: str | os.PathLike[str],
        state: PyTree,
        params: PyTree,
        *,
        tx: Transform | None,
        step: int | None,
        extra: Mapping[str, Any] | None,
        keep: int | None,
        group: ProcessGroup | None,
        copy: bool = False,
    ) -> Job:
        """Check the arguments of `save`; ``copy`` copies tensors to the CPU. With a group, an error is raised later."""
        where, layout = Path(), tx.layout if isinstance(tx, Sharded) else None
        if layout is not None and group is None and layout.group is not None:
            if copy:  # training continues and communicates on the same group
                raise ValueError(
                    "save_async of a sharded state requires a process group that nothing else uses: pass "
                    'group=dist.new_group(backend="gloo")'
                )
            group = layout.group
        try:
            warn_of_failed_saves()  # inside try: under `python -W error` it raises, which must reach all ranks
            where = folder_named(path)  # absolute, so that a later chdir() does not change it
            if tx is not None and not isinstance(tx, Transform):
                raise TypeError(f"tx must be a muonfx.Transform or None, found {tx!r}")
            if step is not None:
                check_step(step)
            if keep is not None:
                positive_int("keep", keep)
                if step_of(where) is None:
                    raise ValueError(
                        f"keep= compares the steps in names: save to step_path({str(where.parent)!r}, step)"
                    )
            if layout is not None and tx is not None:
                if state is not None and not is_global(state):
                    state = to_global(tx, state)
                params = None if params is None else layout.to_global(params)
            leaves = _leaves_of(state, params, whole=group is None)
            # Modules inside the package must not import it, so the version is looked up in sys.modules.
            package = sys.modules[__name__.partition(".")[0]]
            versions = {"muonfx": str(getattr(package, "__version__", "unknown")), "torch": str(torch.__version__)}
            head = Index(step=step, extra=_as_json(dict(extra or {})), versions=versions)
            if tx is not None:
                head = replace(head, **_record_of(tx, leaves))
            if copy:  # training may change the originals
                leaves = {name: _copy(leaf) for name, leaf in leaves.items()}
        except Exception as error:
            if group is None:
                raise
            return cls(where, group=group, problem=error)
        return cls(where, head, leaves, keep, group)


def _as_json(extra: dict[str, object]) -> dict[str, object]:
    try:
        back: dict[str, object] = json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        kinds = "dicts, lists, strings, finite numbers, bools, None"
        raise TypeError(f"extra must be JSON ({kinds}, without circles): {error}") from error
    if back != extra:
        changed = sorted(str(key) for key in extra if key not in back or back[key] != extra[key])
        raise ValueError(
            f"extra: found values that JSON changes: {', '.join(changed)}; expected lists instead of tuples, and "
            "strings as keys"
        )
    return back


def _leaves_of(state: PyTree, params: PyTree, *, whole: bool) -> dict[str, Any]:
    """Return a dict from name to tensor; raise if one cannot be written, or, with ``whole``, if one is a shard."""
    found: dict[str, Any] = {}
    for tree, section in ((state, ""), (params, PARAMS)):
        if tree is not None:
            found |= {name: leaf for name, leaf in named_tensors(tree, section) if leaf is not None}
    for name, leaf in found.items():
        if leaf.dtype not in NAMES:
            raise TypeError(f"the leaf {name!r} has the dtype {leaf.dtype}, which a checkpoint cannot hold")
        if whole and isinstance(leaf, FlatPiece) and leaf.whole is not None:
            found[name] = leaf.whole
        elif whole and hasattr(leaf, "__create_chunk_list__"):
            raise TypeError(
                f"the leaf {name!r} is a {type(leaf).__name__}, of which each rank holds a part: pass group= on all "
                "ranks"
            )
        if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.device.type == "meta"):
            raise TypeError(f"the leaf {name!r} must be a dense tensor with values, found {leaf.layout}, {leaf.device}")
        if is_dtensor(leaf) and any(placement.is_partial() for placement in leaf.placements):
            raise TypeError(
                f"the leaf {name!r} has the placements {leaf.placements}, of which each rank holds a summand, expected "
                "Shard or Replicate: redistribute it before the save"
            )
    return found


def _record_of(tx: Transform, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the index about a transform: its fingerprint, ``repr``, and dtypes of matrix products."""
    dtypes = {name: leaf.dtype for name, leaf in leaves.items() if leaf.dtype.is_floating_point}
    # The state's dtypes stand in for the dtypes of parameters that are not saved.
    held = frozenset([dtypes[name] for name in dtypes if in_section(name, PARAMS)] or dtypes.values())
    device = next((torch.device(leaf.device) for leaf in leaves.values()), None)
    key = "checkpoint", held, device
    if key not in tx.derived or tx.tensors:  # a number in a tensor may have changed in place
        own = strip_transparent(tx)
        products = product_dtypes(own, held, device) if device is not None and held else {}
        tx.derived[key] = {"fingerprint": tx.fingerprint, "chain": repr(own), "products": products}
    return tx.derived[key]


def _copy(leaf: Any) -> Any:
    """Return a copy of a tensor or shard in CPU memory."""
    if isinstance(leaf, FlatPiece):
        return leaf.empty_like("cpu").copy_(leaf)
    if is_dtensor(leaf):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        stager = DefaultStager(StagingOptions(False, False, False, False))
        staged: Any = stager.stage({"leaf": leaf.detach()})
        stager.close()
        return staged["leaf"]
    return leaf.detach().to("cpu", copy=True)


class Draft:
    """The files of one save on one rank: `commit` makes them the checkpoint, and `discard` removes them after an error.

    Every file name contains the id of its save, so two writers never write to the same file. The rename of the index
    decides which save is at the path. After it, the files that the replaced index names are removed, and no others:
    an index that was replaced is never put back, so no checkpoint needs these files.
    """

    def __init__(self, path: Path, save_id: str | None = None) -> None:
        self.path, self.save_id = path, save_id or secrets.token_hex(8)
        self._unfinished_index = path / unfinished_index_name(self.save_id)
        self._own: list[Path] = [self._unfinished_index]
        self._lock = SaveLock(path, self.save_id)
        self._replaced: tuple[DataFile, ...] = ()
        self._at_begin: object = None
        self._other_writer = self._made = self._tried = self._done = False

    def data_file(self, rank: int, ranks: int) -> Path:
        """Return the path of a rank's data file, whose name contains the rank and the id of the save."""
        return self.path / data_name(self.save_id, rank, ranks)

    def begin(self) -> None:
        """Create the checkpoint folder. In a group, one rank calls this before the other ranks write."""
        begin = b""
        with suppress(FileNotFoundError, NotADirectoryError), open_regular(self.path / INDEX) as file:
            begin = file.read(4096)
        # A damaged file system can leave a file of zeros, so such a file may be an index of muonfx.
        if FORMAT.encode() not in begin and begin.strip(b"\0"):
            raise FileExistsError(
                errno.EEXIST, f"the folder has an {INDEX} that muonfx has not written: choose another, or move it away"
            )
        self._made = not self.path.exists()
        make_folder(self.path)
        self._lock.acquire()
        self._at_begin = self._identity()

    def write(
        self, file: Path, parts: Sequence[Part], values: Callable[[str], Tensor]
    ) -> tuple[DataFile, dict[str, Chunk]]:
        """Write a data file of this save; see `write_data`."""
        self._own.append(file)
        return write_data(file, parts, values)

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
        self._other_writer = self._identity() != self._at_begin
        with suppress(OSError, CheckpointError):  # the files of a damaged index are not known, so they stay
            self._replaced = inspect(self.path).files
        self._tried = True  # from here on readers may see the files, so they are kept even if a later step fails
        os.replace(self._unfinished_index, self.path / INDEX)
        self._done = True
        sync_folder(self.path)  # the files of the replaced index are needed until the rename is on the disk

    def _identity(self) -> tuple[int, int] | None:
        """Return inode and time of ``index.json``, which change if it is replaced; None if there is no such file."""
        try:
            found = os.stat(self.path / INDEX)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_ino, found.st_mtime_ns

    def tidy(self, keep: int | None) -> None:
        """Remove the replaced checkpoint, old checkpoints except ``keep``, and the files of killed saves.

        Files of killed saves are removed from the folder of the checkpoint and, if `step_path` named it, from the other
        checkpoints of its series. Warn if something cannot be removed.
        """
        try:
            try:
                remove_files(self.path, self._replaced)
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
        if self._other_writer:
            warnings.warn(
                f"{self.path}: another process saved to this path at the same time; the path now has the checkpoint of "
                "this save. If the processes are the ranks of one job, pass group= on all of them, or save on one only",
                stacklevel=2,
            )

    def is_committed(self) -> bool | None:
        """Return whether this save has completed its checkpoint (renamed the index); None if that cannot be known."""
        # A network file system may report an error for a rename that it has performed.
        return self.is_at_path() if self._tried and not self._done else self._done

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
        for file in self._own:
            with suppress(OSError):
                file.unlink()
        self._lock.release()
        if self._made:
            with suppress(OSError):
                self.path.rmdir()

    def release_lock(self) -> None:
        """Mark this save as ended. Its files stay."""
        self._lock.release()

    @contextmanager
    def discard_on_error(self) -> Generator[None]:
        """Remove this save's files if the ``with`` block fails, and convert an `OSError` to a `WriteError`."""
        try:
            yield
        except BaseException as error:
            if self._tried and not self._done:
                with suppress(OSError):  # so that a rename still in progress after an error fails
                    self._unfinished_index.unlink()
            written = self.is_committed()
            if written is False:
                self.discard()
            self._lock.release()
            if isinstance(error, OSError):
                raise WriteError(_refused(self.path, error, written), written) from error
            raise


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _refused(path: Path, error: OSError, written: bool | None) -> str:
    why = _reason(error)
    if written:
        return f"{path} was written, but a later operation failed, so it may not survive a power failure: {why}"
    if written is None:
        return (
            f"{path} may have been written or not, and nothing was removed: its {INDEX} cannot be read after a failed "
            f"rename: {why}"
        )
    with suppress(OSError):
        if path.is_file():
            why += "; a checkpoint is a folder, and there is a file of this name"
        if (path / INDEX).exists():
            why += "; the previous checkpoint is unchanged"
    return f"{path} was not written: {why}"
