"""Read one checkpoint, in one process or together with all ranks of a group: open its files, and read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, NamedTuple

from muonfx.checkpoint.background import wait_for_save
from muonfx.checkpoint.data import Reader
from muonfx.checkpoint.errors import CheckpointError, LostRanksError, ReplacedError
from muonfx.checkpoint.files import no_collection
from muonfx.checkpoint.folder import folder_named, inspect_and_keep, replacement, retried
from muonfx.checkpoint.index import Index
from muonfx.checkpoint.target import Target
from muonfx.checkpoint.together import Alone, Together, require_same
from muonfx.sharding.messages import ShardingError
from muonfx.tree import PyTree


class OpenedCheckpoint(NamedTuple):
    """The checkpoint that a rank has opened, and the arguments of `load` that must be equal on all ranks."""

    save_id: str
    arguments: dict[str, str]


class Loader:
    """The part of one rank in a load: `open`, `read` and `result` on every rank, `require_same` on rank 0.

    Open files stay readable when the checkpoint is replaced, so `read` gets the values of the checkpoint that was
    opened.
    """

    def __init__(self, path: Any, make_target: Callable[[], Target]) -> None:
        self.path = path
        self.make_target = make_target
        self._stack = ExitStack()
        self._kept = self._stack.enter_context(ExitStack())

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After an error, which is equal on all ranks, an error of closing a file on this rank does not replace it.
        with suppress(CheckpointError) if kind is not None else nullcontext():
            self._stack.close()

    def keep(self) -> Index:
        """Return the index, and keep saves from removing its data files until `open` has ended on all ranks."""
        return self._kept.enter_context(inspect_and_keep(folder_named(self.path)))

    @no_collection()
    def open(self, shared_index: Index | None) -> OpenedCheckpoint:
        """Allocate the tensors to fill, and open the data files that this rank needs.

        ``shared_index`` is the index that rank 0 keeps; None if each rank reads the index itself.
        """
        folder = folder_named(self.path)
        self.target = self.make_target()
        index = shared_index or self.keep()
        self.leaves, destinations = self.target.allocate(index, str(folder))
        with replacement(folder, index):
            self.reader = self._stack.enter_context(Reader(folder, index))
            self.transfers = self.reader.transfers_to(destinations)
            self.reader.check_files({transfer.chunk.file for transfer in self.transfers})
        return OpenedCheckpoint(index.save_id, {"path": str(folder), **self.target.rules.arguments()})

    def require_same(self, opened: Sequence[OpenedCheckpoint]) -> Sequence[None]:
        """Check that all ranks call `load` with equal arguments, and have opened one checkpoint."""
        require_same([each.arguments for each in opened], "load", "nothing was loaded")
        if len({each.save_id for each in opened}) > 1:
            raise ReplacedError(f"{self.path} was replaced while the ranks began to read it")
        return [None] * len(opened)

    def read(self) -> None:
        """Read the values that this rank needs."""
        self._kept.close()  # all ranks have opened their files
        with replacement(self.reader.folder, self.reader.index):
            self.reader.read(self.transfers)
            self.reader.close()  # inside the step, so that an error is raised on all ranks

    def result(self) -> PyTree:
        """Return the tree with the values that were read."""
        return self.target.filled(self.leaves)


def load_checkpoint(path: Any, make_target: Callable[[], Target], group: Any) -> PyTree:
    """Load a checkpoint. With a group, every rank calls this, and an error on one rank is raised on all.

    ``make_target`` returns the tree to fill; an error that it raises is raised on all ranks.
    """
    ranks: Alone | Together = Alone()
    if group is not None:
        ranks = Together(group, path, f"the load of {path}")
        wait_for_save()  # a save in the background may use the same group
        try:
            ranks.meet("checkpoint.load")
        except ShardingError as error:
            raise CheckpointError(f"{path} was not loaded: {error}") from error

    def attempt(number: int) -> PyTree:
        with Loader(path, make_target) as loader:
            shared_index: Index | None = None
            if number > 0 and ranks.size > 1:
                keep = loader.keep if ranks.rank == 0 else _no_index
                shared_index = ranks.step(keep, _first_for_all)
            ranks.step(lambda: loader.open(shared_index), loader.require_same)
            ranks.step(loader.read, _no_merge)
            return loader.result()

    try:
        return retried(path, attempt)
    except LostRanksError as error:
        raise CheckpointError(f"{path} was not loaded: {error}") from error


def _no_index() -> None:
    return None


def _first_for_all(indexes: list[Index | None]) -> Sequence[Index | None]:
    """Answer all ranks with the index of rank 0."""
    return [indexes[0]] * len(indexes)


def _no_merge(nothing: list[None]) -> Sequence[None]:
    return nothing
