"""Saving: what is checked before anything is written, and the order in which it is."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from muonfx.boxes import Box
from muonfx.checkpoint.atomic import fresh_file, make_folder, sync_folder, write_all
from muonfx.checkpoint.catalog import (
    before,
    clean,
    folder_named,
    is_foreign,
    prune,
    read_index,
    step_of,
    warn_of_later_steps,
)
from muonfx.checkpoint.coordination import (
    Turn,
    claim,
    id_of,
    keys_of,
    note_rank,
    part_name,
    release,
    warn_of_failed_saves,
    warn_of_other_writers,
)
from muonfx.checkpoint.data import Part, Progress, write_data
from muonfx.checkpoint.dtypes import name_of_dtype
from muonfx.checkpoint.errors import CheckpointError, NotFoundError, WriteError
from muonfx.checkpoint.index import INDEX, Index, Leaf, text_of
from muonfx.checkpoint.names import PARAMS, named_tensors
from muonfx.core import Transform
from muonfx.recorded import bare
from muonfx.tree import PyTree, Spec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Draft", "Request", "data_name", "new_save_id", "save", "write"]


class About(NamedTuple):
    """What a checkpoint is to say beside its leaves; checked before anything is written."""

    tx: Transform | None
    step: int | None
    extra: dict[str, Any]

    @classmethod
    def of(cls, tx: Transform | None, step: int | None, extra: Mapping[str, Any] | None) -> About:
        """Check what the caller gave.

        Raises:
            TypeError: ``tx`` is no transform, or ``extra`` holds what JSON cannot.
            ValueError: ``step`` is negative, or ``extra`` would not come back as it is.
        """
        if tx is not None and not isinstance(tx, Transform):
            raise TypeError(f"tx must be a muonfx.Transform or None, found {tx!r}")
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63):
            raise ValueError(f"step must be an int of 0 or more, or None, found {step!r}")
        return cls(tx, step, _as_json(dict(extra or {})))

    def to_index(self, save_id: str, files: Any, leaves: dict[str, Leaf]) -> Index:
        """The index of a checkpoint with these files and leaves."""
        # The package's own version: at the roof, which nothing inside may import.
        roof = sys.modules[__name__.partition(".")[0]]
        versions = {"muonfx": str(getattr(roof, "__version__", "unknown")), "torch": str(torch.__version__)}
        chain = (None, None) if self.tx is None else (self.tx.fingerprint, repr(bare(self.tx)))
        return Index(save_id, self.step, self.extra, *chain, versions, tuple(files), leaves)


def _as_json(extra: dict[str, Any]) -> dict[str, Any]:
    try:
        back: dict[str, Any] = json.loads(json.dumps(extra, allow_nan=False))
    except TypeError as error:
        raise TypeError(f"extra must be JSON (dicts, lists, strings, numbers, bools, None): {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"extra must be JSON, which has no NaN, infinity or circle: {error}") from error
    if back != extra:
        changed = sorted(str(key) for key in extra if key not in back or back[key] != extra[key])
        raise ValueError(
            f"extra would not come back as it is: {', '.join(changed)}; JSON has lists and no tuples, and all keys are "
            "strings"
        )
    return back


def checked_leaves(state: PyTree, params: PyTree, *, whole: bool) -> dict[str, Any]:
    """The leaves of a state and of parameters by name, all of them fit to be written.

    Args:
        state: a tree, or None.
        params: a tree, or None.
        whole: only whole tensors in this process, and no pieces of them.

    Raises:
        TypeError: a leaf is no tensor, or of a kind that cannot be written; the message names it.
    """
    found: dict[str, Any] = {}
    for tree, section in ((state, ""), (params, PARAMS)):
        if tree is None:
            continue
        found |= {name: leaf for name, leaf in named_tensors(tree, section) if leaf is not None}
    for name, leaf in found.items():
        if name_of_dtype(leaf.dtype) is None:
            raise TypeError(f"the leaf {name!r} has the dtype {leaf.dtype}, which a checkpoint cannot hold")
        if whole and hasattr(leaf, "__create_chunk_list__"):
            raise TypeError(
                f"the leaf {name!r} is a {type(leaf).__name__}, of which each rank holds a part: say group=, on all "
                "ranks"
            )
        if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.device.type == "meta"):
            raise TypeError(f"the leaf {name!r} must be a dense tensor with values, found {leaf.layout}, {leaf.device}")
    return found


class Request(NamedTuple):
    """What the caller of ``save`` wants to be written; looked at only when asked for the leaves."""

    path: Path
    state: PyTree
    params: PyTree
    tx: Transform | None
    step: int | None
    extra: Mapping[str, Any] | None
    keep: int | None
    problem: Exception | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], *rest: Any) -> Request:
        """A request with a path that stays what it is when the process goes to another folder.

        What is wrong with the path is kept, to be raised with what else is wrong: on all ranks alike, if there are any.
        """
        try:
            return cls(folder_named(path), *rest)
        except (TypeError, ValueError) as error:
            return cls(Path(), *rest)._replace(problem=error)

    def turn(self, group: Any) -> Turn:
        """The next turn to write there."""
        return Turn(keys_of(self.path, group, in_series=step_of(self.path) is not None))

    def about(self) -> About:
        """What the checkpoint is to say; see `About.of`."""
        return About.of(self.tx, self.step, self.extra)

    def leaves(self, *, whole: bool) -> dict[str, Any]:
        """The leaves; raises whatever is wrong with what the caller gave."""
        if self.problem is not None:
            raise self.problem
        self.about()
        if self.keep is not None:
            if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
                raise ValueError(f"keep must be an int of 1 or more, or None, found {self.keep!r}")
            if step_of(self.path) is None:
                raise ValueError(
                    f"keep= goes by the steps in the names: save to step_path({str(self.path.parent)!r}, step)"
                )
        return checked_leaves(self.state, self.params, whole=whole)


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    tx: Transform | None = None,
    params: PyTree = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint: a state, and parameters beside it; whole or not at all.

    The path becomes a folder with ``index.json`` and safetensors files. Everything is flushed to the disk before the
    index gets its name, by a rename: a writer that is stopped at any point leaves what was at the path before. Of
    several writers at a path the last one to be done stands.

    Args:
        path: where; `step_path` names one for each step. A checkpoint that is there is replaced at the end.
        state: a tree of tensors of any dtype and device, such as ``tx.init`` and ``tx.update`` return; None for none.
            Leaves that share storage are written one by one. At most one leaf is copied at a time.
        tx: the transform: its fingerprint and code are noted, and the fingerprint is compared on load.
        params: parameters, to go into the same checkpoint.
        step: how many steps are done.
        extra: anything that JSON can hold: a seed, the place in the data, losses.
        keep: afterwards, remove all checkpoints beside this one but those of the highest steps, so many in all (see
            `prune`); the path must be one that `step_path` names.
        progress: called with the bytes that are written and those of all, about every 4 MiB.
        group: a process group, all of whose ranks call this together: each writes its part. Leaves may then be
            `torch.distributed.tensor.DTensor` or `FlatPiece`; plain tensors must be the same on all ranks. The ranks
            must see one file system. None: this process alone writes.

    Returns:
        The path.

    Raises:
        TypeError: a leaf is no dense tensor, or ``extra`` is no JSON. Nothing has been written.
        WriteError: the disk is full, say. What was at the path before is still there, or, where ``written`` is True,
            the new checkpoint is.

    Warns:
        UserWarning: the checkpoint is good, but another process is writing to the path, or another rank has, each for
            itself; older ones cannot be removed; there are later steps beside it, which `latest` finds; or an earlier
            save in the background has failed and was not waited for.

    Example:
        >>> import tempfile
        >>> import muonfx as mfx
        >>> params = {"w": torch.ones(2, 3)}
        >>> tx = mfx.momentum()
        >>> path = mfx.checkpoint.step_path(tempfile.mkdtemp(), 10)
        >>> path = mfx.checkpoint.save(path, tx.init(params), tx=tx, params=params, step=10)
        >>> sorted(mfx.checkpoint.read(path))
        ['params/w', 'trace/w']
        >>> mfx.checkpoint.load(path, like=mfx.spec(tx, params)).trace["w"].dtype
        torch.float32
    """
    request = Request.of(path, state, params, tx, step, extra, keep)
    warn_of_failed_saves()
    if group is not None:
        from muonfx.checkpoint.distributed import Job, save_together

        with request.turn(group):
            save_together(Job(request, progress), group)
    else:
        leaves = request.leaves(whole=True)
        with request.turn(None):
            write(request.path, leaves, request, progress)
    return request.path


def write(path: Path, leaves: Mapping[str, Tensor], request: Request, progress: Progress | None = None) -> None:
    """Write leaves, in this process alone."""

    def part(name: str, leaf: Tensor) -> Part:
        shape = tuple(leaf.shape)
        return Part(name, leaf.dtype, Box((0,) * len(shape), shape), True, lambda: leaf)

    draft = Draft(path, new_save_id())
    with draft.whole_or_not():
        note_rank(draft.save_id)
        draft.begin()
        warn_of_other_writers(path, draft.save_id)
        data = data_name(draft.save_id, 0, 1)
        file, chunks = write_data(path / data, [part(name, leaf) for name, leaf in leaves.items()], progress)
        found = {
            name: Leaf(Spec(tuple(leaf.shape), leaf.dtype), (chunk,))
            for (name, leaf), chunk in zip(leaves.items(), chunks, strict=True)
        }
        draft.commit(request.about().to_index(draft.save_id, [file], found))
    draft.tidy(request.keep)


def new_save_id() -> str:
    """Draw the id of a save: no other save has it, so none writes to a file that an index refers to."""
    return secrets.token_hex(8)


def data_name(save_id: str, rank: int, ranks: int) -> str:
    """Name a data file: no two saves share a name."""
    return f"data-{save_id}-{rank:05}-of-{ranks:05}.safetensors"


class Draft:
    """A save that is being written, on one rank.

    Its files carry its id. Until the rename of its index is tried they are nobody's and may be taken back; from then on
    a reader may see them, and they stay, whatever fails.
    """

    def __init__(self, path: Path, save_id: str) -> None:
        self.path, self.save_id = path, save_id
        self._made = self._tried = self._done = False

    def begin(self, *, claiming: bool = True) -> None:
        """Make the folder, and claim it for this save: one rank of a group does that, before any other begins."""
        if _has_foreign_index(self.path):
            raise FileExistsError(
                errno.EEXIST, f"the folder has an {INDEX} that muonfx has not written: choose another, or move it away"
            )
        self._made = not self.path.exists()
        for attempt in range(10):
            make_folder(self.path)
            if not claiming:
                return
            try:
                claim(self.path, self.save_id)
            except FileNotFoundError:  # whoever else has made the folder takes it away, since his save has failed
                if attempt == 9:
                    raise
            else:
                break

    def commit(self, index: Index) -> None:
        """Write the index, which makes this save what is at the path.

        Raises:
            OSError: something was refused; `stands` knows whether before or after that.
        """
        for file in index.files:
            if not (self.path / file.name).exists():
                raise FileNotFoundError(
                    errno.ENOENT, f"{file.name} cannot be seen where the index is written: do all see one file system?"
                )
        sync_folder(self.path)
        part = self.path / part_name(self.save_id)
        with fresh_file(part) as file:
            write_all(file, text_of(index))
        self._tried = True
        os.replace(part, self.path / INDEX)
        self._done = True
        sync_folder(self.path)

    def tidy(self, keep: int | None) -> None:
        """Remove what nobody needs any more, when the new checkpoint is safe on the disk.

        Warns:
            UserWarning: the system refused that. The checkpoint is good.
        """
        try:
            release(self.path, self.save_id)
            clean(self.path)
            if keep is not None:
                prune(self.path.parent, keep, written=self.path)
            warn_of_later_steps(self.path)
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"{self.path} was written and is good, but what it makes superfluous could not be removed: "
                f"{_said_by(error)}",
                stacklevel=2,
            )

    def stands(self) -> bool | None:
        """True if this save is at the path; None if that cannot be known."""
        # A network file system may have done a rename that it reports as refused.
        return self.is_there() if self._tried and not self._done else self._done

    def is_there(self) -> bool | None:
        """Tell whether the index at the path is this save's; None if it cannot be read."""
        try:
            return read_index(self.path).save_id == self.save_id
        except NotFoundError:
            return False
        except CheckpointError:
            return None

    def discard(self) -> None:
        """Take back what was written, which no index will name."""
        with suppress(OSError):
            for file in list(self.path.iterdir()):
                if id_of(file.name) == self.save_id:
                    with suppress(OSError):
                        file.unlink()
        with suppress(OSError):
            release(self.path, self.save_id)
        if self._made:
            with suppress(OSError):
                self.path.rmdir()

    @contextmanager
    def whole_or_not(self) -> Generator[None]:
        """Take back what no index can name if anything fails, and say which checkpoint stands.

        Raises:
            WriteError: the system refused something.
        """
        try:
            yield
        except BaseException as error:
            if self._tried and not self._done:
                with suppress(OSError):  # a rename that is reported as refused, and still on its way, finds nothing
                    (self.path / part_name(self.save_id)).unlink()
            stands = self.stands()
            if stands is False:
                self.discard()
            else:
                with suppress(OSError):
                    release(self.path, self.save_id)
            if isinstance(error, OSError):
                raise WriteError(_refused(self.path, error, stands), written=stands) from error
            raise


def _has_foreign_index(path: Path) -> bool:
    try:
        return is_foreign(path / INDEX)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _said_by(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _refused(path: Path, error: OSError, written: bool | None) -> str:
    why = _said_by(error)
    if written:
        return f"{path} was written, but what follows failed, so that it may not survive a loss of power: {why}"
    if written is None:
        return (
            f"it is not known whether {path} was written, and nothing was removed: its {INDEX} cannot be read after a "
            f"rename that failed: {why}"
        )
    free = ""
    with suppress(OSError):
        there = next(folder for folder in (path, *path.parents) if folder.is_dir())
        free = f" ({shutil.disk_usage(there).free / 2**30:.2f} GiB are free)"
    what = f"{path} was not written: {why}{free}"
    with suppress(OSError):
        if path.is_symlink() and not path.exists():
            return f"{what}; there is a link of this name, to nowhere"
        if path.is_file():
            return f"{what}; a checkpoint is a folder, and there is a file of this name"
        if (file := next((folder for folder in path.parents if folder.is_file()), None)) is not None:
            return f"{what}: {file} is a file"
        if (path / INDEX).exists():
            return f"{what}; the checkpoint that was there is as it was"
        previous = before(path)
        return f"{what}; the newest good one is {previous}" if previous is not None else what
    return what
