"""Write one checkpoint, in one process or together with all ranks of a group: plan, write the data, write the index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from muonfx.checkpoint.data import Entry
from muonfx.checkpoint.draft import Draft
from muonfx.checkpoint.errors import LostRanksError, WriteError
from muonfx.checkpoint.files import no_collection
from muonfx.checkpoint.index import Chunk, DataFile, Index, Leaf
from muonfx.checkpoint.plan import Proposal, SavePlanner, ShardKey
from muonfx.checkpoint.shards import slices_of
from muonfx.checkpoint.together import Alone, Together, require_same
from muonfx.core.argument_texts import without_addresses
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.boxes import Box
from muonfx.tree import Spec


@dataclass(frozen=True)
class SaveRequest:
    """The checked arguments of one `save`."""

    path: Path
    head: Index = field(default_factory=Index)
    """The known part of the index: all fields except the save id, the files and the leaves."""
    leaves: dict[str, Any] = field(default_factory=dict)
    """A dict from leaf name to tensor or shard; copies on the CPU for a save in the background."""
    keep: int | None = None
    group: Any = None
    problem: Exception | None = None
    """The error of an invalid argument. With a group it is raised in the first step, so that all ranks raise it."""

    def arguments(self) -> dict[str, str]:
        """Return the ``repr`` of each argument that must be equal on all ranks."""
        head = self.head
        values = {"path": str(self.path), "step": head.step, "extra": head.extra, "keep": self.keep}
        texts = {name: repr(value) for name, value in values.items()}
        # The chain's text has the numbers. The fingerprint has the code of functions, of which the text has the names.
        texts["tx"] = f"{without_addresses(head.chain or 'None')} (fingerprint {head.fingerprint})"
        return texts


class Assignment(NamedTuple):
    """The answer of rank 0 to a rank's proposal: the data file to write, and the shards in it."""

    save_id: str
    file: Path
    number: int
    """The number of the file in the index."""
    keys: list[ShardKey]
    """The shards to write; if there are none, a rank of several writes no file."""


class WrittenShards(NamedTuple):
    """The data file that a rank has written, and where the shards are in it; no file if it had none to write."""

    file: DataFile | None
    chunks: list[tuple[str, Chunk]]
    """The names of leaves, and the position of a shard of each in the file."""


class Writer:
    """The part of one rank in a save: `propose` and `write` on every rank, `assign` and `commit` on rank 0."""

    def __init__(self, request: SaveRequest, rank: int, ranks: int) -> None:
        self.request = request
        self.rank = rank
        self.ranks = ranks
        self.planner = SavePlanner(request.leaves, ranks)
        """Divides the shards among the ranks that hold them."""
        self.draft: Draft | None = None
        """The files of this save; None until this rank begins to write."""
        self.specs: dict[str, Spec] = {}
        """The shape and dtype of each leaf of all ranks; on rank 0 only."""

    @no_collection()
    def propose(self) -> Proposal:
        """Return this rank's shards and arguments."""
        if self.request.problem is not None:
            raise self.request.problem
        arguments: dict[str, str] = {}
        if self.ranks > 1:  # a single rank has nothing to compare them with
            arguments = self.request.arguments()
        return self.planner.propose(arguments)

    @no_collection()
    def assign(self, proposals: list[Proposal]) -> list[Assignment]:
        """Assign each shard to one rank that holds it, create the folder of the checkpoint, and lock the save."""
        require_same([proposal.arguments for proposal in proposals], "save", "nothing was written")
        keys_of_rank = self.planner.assign(proposals)
        for proposal in proposals:
            for name, leaf in proposal.leaves.items():
                self.specs[name] = leaf.spec
        draft = Draft(self.request.path)
        self.draft = draft
        with draft.write_errors():
            draft.begin()
        assignments: list[Assignment] = []
        number = 0
        for rank, keys in enumerate(keys_of_rank):
            assignments.append(Assignment(draft.save_id, draft.data_file(rank, self.ranks), number, keys))
            if keys:
                number += 1
        return assignments

    def write(self, assignment: Assignment) -> WrittenShards:
        """Write the shards that were assigned to this rank to its data file."""
        draft = self.draft or Draft(self.request.path, assignment.save_id)
        self.draft = draft
        if not assignment.keys and self.ranks > 1:
            return WrittenShards(None, [])
        entries: list[Entry] = []
        with no_collection():
            for name, box in assignment.keys:
                key_in_file = _key_in_file(name, box, self.request.leaves[name].shape)
                entries.append(Entry(key_in_file, name, box, self.planner.values[name][box]))
        with draft.write_errors():
            return WrittenShards(*draft.write(assignment.file, assignment.number, entries))

    @no_collection()
    def commit(self, written: list[WrittenShards]) -> Sequence[None]:
        """Write the index, which completes the checkpoint, and remove obsolete files."""
        files: list[DataFile] = []
        chunks_of_leaf: dict[str, list[Chunk]] = {name: [] for name in self.specs}
        for file, chunks in written:
            if file is not None:
                files.append(file)
            for name, chunk in chunks:
                chunks_of_leaf[name].append(chunk)
        leaves: dict[str, Leaf] = {}
        for name, chunks in chunks_of_leaf.items():
            if len(chunks) > 1:
                chunks.sort(key=lambda chunk: chunk.box)
            leaves[name] = Leaf(self.specs[name], tuple(chunks))
        draft = self.draft
        assert draft is not None
        with draft.write_errors():
            draft.commit(replace(self.request.head, save_id=draft.save_id, files=tuple(files), leaves=leaves))
        try:
            draft.tidy(self.request.keep)
        except Exception as error:  # such as a warning that is an error
            if self.ranks == 1:
                raise
            raise WriteError(f"{draft.path} was written, but a later operation failed: {error!r}", True) from error
        return [None] * self.ranks

    def clean_up(self) -> None:
        """Remove this rank's files after an error that all ranks have raised, unless the checkpoint may be complete."""
        if self.draft is None:
            return
        if self.rank == 0:
            self.draft.abandon()
        elif self.draft.is_at_path() is False:
            self.draft.discard()

    def give_up(self) -> bool | None:
        """End the save on this rank alone; return whether the checkpoint is complete, None if that cannot be known."""
        if self.rank == 0:
            return self.draft is not None and self.draft.abandon()
        # The files of this rank stay: rank 0 may still commit an index that names them.
        if self.draft is not None and self.draft.is_at_path():
            return True
        return None


def _key_in_file(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Return the key of a shard in a data file: "trace/w" for a whole leaf, "trace/w~[0:4,0:8]" for a part."""
    if box.sizes == shape:
        return name
    return f"{name}~[{','.join(slices_of(box))}]"


def write_checkpoint(request: SaveRequest) -> None:
    """Write a checkpoint. With a group, every rank calls this, and an error on one rank is raised on all."""
    path = request.path
    ranks: Alone | Together = Alone()
    if request.group is not None:
        ranks = Together(request.group, path, f"the save to {path}")
        try:
            ranks.meet("checkpoint.save")
        except ShardingError as error:
            raise WriteError(f"{path} was not written: {error}") from error
    writer = Writer(request, ranks.rank, ranks.size)
    try:
        assignment = ranks.step(writer.propose, writer.assign)
        ranks.step(lambda: writer.write(assignment), writer.commit)
    except LostRanksError as error:
        is_committed = writer.give_up()
        state = _STATES[is_committed]
        raise WriteError(f"{path} {state} {error}", is_committed is True) from error
    except Exception:
        writer.clean_up()
        raise
    except BaseException:  # an interrupt, perhaps of this rank alone
        writer.give_up()
        raise


_STATES = {
    True: "was written completely, but",
    False: "was not written:",
    None: "may have been written or not:",
}
"""The begin of an error, by whether the checkpoint is complete; None if that cannot be known."""
