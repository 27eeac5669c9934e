"""Write one checkpoint, in one process or together with all ranks of a group: plan, write the data, write the index.

Each rank proposes its shards (`Proposal`), and `shards_to_write` merges the proposals. A shard that several ranks hold
is written by one of them. Which one depends on the sizes of all leaves, so if the ranks held different values, the file
would be a mixture that belongs to no rank. Each rank therefore proposes a checksum of every shard that others may hold,
and `plan_of` compares them before anything is written.

A `Draft` has the files of the save. It writes them in an order that makes the save atomic, and removes them after an
error.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from muonfx.checkpoint.errors import CheckpointError, LostRanksError, NotFoundError, WriteError
from muonfx.checkpoint.files import (
    SaveLock,
    bytes_of,
    check_byte_order,
    checksum_of,
    crc32_of,
    fresh_file,
    make_folder,
    no_collection,
    open_regular,
    open_to_wait,
    sync_folder,
    wait_for_readers,
    with_plain_bits,
)
from muonfx.checkpoint.folder import (
    inspect,
    prune,
    remove_files_of_killed_saves,
    warn_of_later_steps,
)
from muonfx.checkpoint.index import (
    FORMAT,
    INDEX,
    LONGEST_HEADER,
    Chunk,
    DataFile,
    Index,
    Leaf,
    blocks_of,
    data_name,
    lock_name,
    read_index,
    save_id_of,
    text_of,
    unfinished_index_name,
)
from muonfx.checkpoint.leaves import LocalLeaf, described, problem_of_boxes, slices_of
from muonfx.checkpoint.together import Together, require_no_other_group, require_same
from muonfx.core.argument_texts import without_addresses
from muonfx.internal.progress import reporting_bytes
from muonfx.sharding.communication.differences import listed
from muonfx.sharding.digests import checksum
from muonfx.sharding.shards.boxes import Box
from muonfx.tree import Spec
from muonfx.tree.dtypes import SAFETENSORS_NAMES


@dataclass(frozen=True)
class SaveRequest:
    """The checked arguments of one `save`."""

    path: Path
    head: Index = field(default_factory=Index)
    """The known part of the index: all fields except the save id, the files and the leaves."""
    leaves: dict[str, LocalLeaf] = field(default_factory=dict[str, LocalLeaf])
    """A dict from leaf name to its shards on this rank; copies on the CPU for a save in the background."""
    keep: int | None = None
    group: Any = None

    def arguments(self) -> dict[str, str]:
        """Return the ``repr`` of each argument that must be equal on all ranks, such as ``{"step": "100", ...}``."""
        head = self.head
        values = {
            "path": str(self.path),
            "step": head.step,
            "extra": head.extra,
            "keep": self.keep,
            **head.objects,
        }
        texts = {name: repr(value) for name, value in values.items()}
        # The chain's text has the numbers. The fingerprint has the code of functions, of which the text has the names.
        texts["tx"] = f"{without_addresses(head.chain or 'None')} (fingerprint {head.fingerprint})"
        return texts


class Assignment(NamedTuple):
    """The answer of rank 0 to a rank's proposal: the data file to write, and the shards in it."""

    file: Path
    """The data file of this rank. Its name contains the id of the save."""
    keys: list[ShardKey]
    """The shards to write; if there are none, a rank of several writes no file."""


class Completion(Enum):
    """Whether a save has completed the checkpoint, as far as this rank can know; the value begins an error message."""

    COMPLETE = "was written completely, but"
    INCOMPLETE = "was not written:"
    UNKNOWN = "may have been written or not:"


_MANY_BYTES = 2**26
"""A save of fewer bytes shows no progress, since it seldom takes long."""


class Saver:
    """The part of one rank in a save: `propose` and `write` on every rank, `assign` and `commit` on rank 0.

    With ``shows_progress``, a long save shows how many bytes this process has written, on a terminal.
    """

    def __init__(
        self, request: SaveRequest, rank: int, ranks: int, *, shows_progress: bool
    ) -> None:
        """Prepare the part of rank number ``rank`` of several ``ranks``. Nothing is written yet."""
        self.request = request
        self.shows_progress = shows_progress
        self.rank = rank
        self.ranks = ranks
        self.draft: Draft | None = None
        """The files of this save; None until this rank begins to write."""
        self.plan: dict[str, PlannedLeaf] = {}
        """The leaves of all ranks by name; on rank 0 only."""

    @no_collection()
    def propose(self) -> Proposal:
        """Return the leaves that this rank could write, without their values, and its arguments of `save` to compare.

        The leaves are such as ``{"trace/w": ProposedLeaf(spec, True, {box: "cpu 305419896"})}``, with the checksum of
        each part. From the proposals of all ranks, `assign` decides on rank 0 which rank writes which part.
        """
        leaves = {name: self._proposed(leaf) for name, leaf in self.request.leaves.items()}
        arguments: dict[str, str] = {}
        # A single rank compares nothing, and the texts of its arguments may be long.
        if self.ranks > 1:
            arguments = self.request.arguments()
        return Proposal(arguments, leaves)

    def _proposed(self, leaf: LocalLeaf) -> ProposedLeaf:
        """Return a leaf of this rank without its values, and with a checksum of each shard that has replicas.

        A shard is a part of a tensor, or the whole. Its replicas are copies on other ranks. By the checksums, rank 0
        checks that all of them have equal values.
        """
        # A leaf that is divided among all ranks has no replicas. One of a mesh of fewer ranks may have some: other
        # ranks may hold the same leaf on a mesh of their own.
        is_divided_among_all = leaf.divided_among == self.ranks
        may_have_replicas = self.ranks > 1 and not is_divided_among_all
        # A box is the position of a shard in its tensor.
        checksum_of_box: dict[Box, str | None] = {}
        for box, values in leaf.shards.items():
            checksum_of_box[box] = checksum_of_shard(values) if may_have_replicas else None
        return ProposedLeaf(leaf.spec, leaf.is_plain, checksum_of_box)

    @no_collection()
    def assign(self, proposals: list[Proposal]) -> list[Assignment]:
        """Decide on rank 0 which rank writes which shards (parts of tensors), and create the folder of the checkpoint.

        ``proposals`` has the result of `propose` on each rank. The result has an `Assignment` for each rank: the name
        of its data file, "data-0123456789abcdef-00001-of-00002.safetensors", and its shards, such as the rows 4 to 7 of
        "trace/w".
        """
        # Nothing is created before all ranks have equal arguments, and their shards fit together.
        require_same([proposal.arguments for proposal in proposals], "save", "nothing was written")
        self.plan = plan_of([proposal.leaves for proposal in proposals])
        draft = Draft(self.request.path)
        self.draft = draft  # before `begin`, so that `end` removes what it has created if it fails
        with draft.write_errors():
            draft.begin()
            require_no_other_group(self.request.group, draft.path)  # the folder must exist
        # Each shard has one writer, also if several ranks hold it.
        assignments: list[Assignment] = []
        for rank, keys in enumerate(shards_to_write(self.plan, self.ranks)):
            file = draft.path / data_name(draft.save_id, rank, self.ranks)
            assignments.append(Assignment(file, keys))
        return assignments

    def write(self, assignment: Assignment) -> WrittenShards:
        """Write the shards that were assigned to this rank to its data file.

        A rank without shards writes no file. A single rank always writes one, also for a state without tensors.
        """
        if self.draft is None:  # on ranks other than 0, which has created it in `assign`
            self.draft = Draft(self.request.path, save_id_of(assignment.file.name))
        draft = self.draft
        if not assignment.keys and self.ranks > 1:
            return WrittenShards(None, [])
        # An entry of the file is a shard with its key, "trace/w~[0:4,0:8]" for a part of "trace/w".
        entries: list[Entry] = []
        with no_collection():
            for name, box in assignment.keys:
                leaf = self.request.leaves[name]
                entries.append(entry_of(name, box, leaf.spec.shape, leaf.shards[box]))
        nbytes = sum(entry.values.nbytes for entry in entries)
        shows_progress = self.shows_progress and nbytes >= _MANY_BYTES
        with draft.write_errors():
            if not shows_progress:
                return draft.write(assignment.file, entries)
            with reporting_bytes(f"saving {draft.path.name}", nbytes) as report:
                return draft.write(assignment.file, entries, report)

    @no_collection()
    def commit(self, written: list[WrittenShards]) -> Sequence[None]:
        """On rank 0, write ``index.json``, which completes the checkpoint, and remove obsolete files.

        ``written`` has the data file of each rank, or no file. `Together.step`, which calls this, sends an item of the
        returned list to each rank, which needs none here.
        """
        draft = self.draft
        assert draft is not None  # `assign` has created it
        files, leaves = merged(written, self.plan)
        # Before this, readers find the previous checkpoint; after it, the new one.
        with draft.write_errors():
            draft.commit(
                replace(self.request.head, save_id=draft.save_id, files=files, leaves=leaves)
            )
        self._tidy(draft)
        return [None] * self.ranks

    def _tidy(self, draft: Draft) -> None:
        """Remove obsolete files after a save. An error, such as a warning that is one, is raised on all ranks."""
        try:
            draft.tidy(self.request.keep)
        except Exception as error:
            if self.ranks == 1:
                raise
            # The other ranks must learn that the checkpoint is complete.
            message = f"{draft.path} was written, but a later operation failed: {error!r}"
            raise WriteError(message, written=True) from error

    def end(self, *, is_error_of_all: bool) -> Completion:
        """End the save after an error: remove this rank's files if no checkpoint can need them.

        Return whether the checkpoint is complete. Rank 0 completes it by the index, which names the files of all ranks.
        """
        if self.draft is None:  # this rank has no files
            return Completion.INCOMPLETE if self.rank == 0 else Completion.UNKNOWN
        if self.rank == 0:
            return self.draft.abandon()
        # Another rank does not know what rank 0 has done. It can only look at the checkpoint that is at the path.
        completion = self.draft.completion_at_path()
        if completion is Completion.COMPLETE:
            return completion
        # Without an error of its own, rank 0 may still write an index that names the files of this rank.
        if completion is Completion.INCOMPLETE and is_error_of_all:
            self.draft.discard()
        return Completion.UNKNOWN


def merged(
    written: Sequence[WrittenShards], plan: Mapping[str, PlannedLeaf]
) -> tuple[tuple[DataFile, ...], dict[str, Leaf]]:
    """Merge the results of all ranks to the data files and the leaves of an index.

    A *chunk* is a shard with its position in a file. A rank cannot number its file, which depends on how many ranks
    have written one, so the number is set here: 0 for the first file, 1 for the second. The leaves have the order of
    ``plan``, a dict from the name of each leaf to its shards and their ranks.
    """
    files: list[DataFile] = []
    chunks_of_leaf: dict[str, list[Chunk]] = {name: [] for name in plan}
    # 1. Collect the chunks of each leaf from the files of all ranks.
    for file, chunks in written:
        file_number = len(files)  # the number of files so far
        for name, chunk in chunks:
            chunks_of_leaf[name].append(chunk._replace(file=file_number))
        if file is not None:  # a rank without shards writes no file
            files.append(file)
    # 2. Sort the chunks of each leaf by their place in the tensor.
    leaves: dict[str, Leaf] = {}
    for name, chunks in chunks_of_leaf.items():
        chunks.sort(key=attrgetter("box"))  # in an order that does not depend on the ranks
        leaves[name] = Leaf(plan[name].spec, tuple(chunks))
    return tuple(files), leaves


def entry_of(name: str, box: Box, shape: tuple[int, ...], values: Tensor) -> Entry:
    """Return the entry of a data file for a shard: the box of a leaf that has a shape, with the values in it.

    Its key is "trace/w" for a whole leaf, and "trace/w~[0:4,0:8]" for a part.
    """
    key = name
    if box.sizes != shape:
        key += f"~[{','.join(slices_of(box))}]"
    return Entry(key, name, box, values)


def write_checkpoint(request: SaveRequest, *, shows_progress: bool = False) -> None:
    """Write a checkpoint. With a group, every rank calls this, and an error on one rank is raised on all.

    The ranks first agree on who writes which part. Each rank then writes a data file, and rank 0 the index, the
    description of the checkpoint, which completes it.
    """
    path = request.path
    ranks = _meet(path, request.group)
    saver = Saver(request, ranks.rank, ranks.size, shows_progress=shows_progress)
    try:
        # In a step, all ranks call the first function, and rank 0 calls the second with their results.
        assignment = ranks.step(saver.propose, saver.assign)
        ranks.step(lambda: saver.write(assignment), saver.commit)
    # `end` removes the files of this rank, unless the other ranks may complete the checkpoint with them.
    except LostRanksError as error:
        # This rank cannot reach the others, which may have no error and go on.
        completion = saver.end(is_error_of_all=False)
        # The message begins with "runs/a may have been written or not: ...", for example.
        message = f"{path} {completion.value} {error}"
        raise WriteError(message, written=completion is Completion.COMPLETE) from error
    except BaseException as error:
        # An error of `step` is one of all ranks, an interrupt may be of this rank alone.
        saver.end(is_error_of_all=isinstance(error, Exception))
        raise


def raise_on_all_ranks(error: Exception, path: object, group: Any) -> NoReturn:
    """Raise an error of this rank before a save on all ranks of the group. The others call `write_checkpoint`."""
    ranks = _meet(path, group)
    with ranks.errors_on_all_ranks():  # on the other ranks, this is the first step of the save
        raise error


def _meet(path: object, group: Any) -> Together:
    """Wait until all ranks of a group have called `save`, and return them; without a group, return one process."""
    ranks = Together(group, path, f"the save to {path}")
    try:
        ranks.meet("checkpoint.save")
    except LostRanksError as error:
        raise WriteError(f"{path} was not written: {error}") from error
    return ranks


# ------------------------------------------------------------------------------ the plan: which rank writes which shard


class ProposedLeaf(NamedTuple):
    """A leaf of one rank's tree, without its values."""

    spec: Spec
    """The global shape and dtype."""
    is_plain: bool
    """True for a plain tensor, which must be equal on all ranks; False for shards with positions of their own."""
    checksums: dict[Box, str | None]
    """The box of each shard on this rank, and the checksum of its bits, or None if no other rank can hold the shard."""


class Proposal(NamedTuple):
    """The leaves of a rank, and the arguments with which it has called `save`."""

    arguments: dict[str, str]
    """The ``repr`` of each argument that must be equal on all ranks."""
    leaves: dict[str, ProposedLeaf]


class ShardKey(NamedTuple):
    """The name of a leaf, and the box of the leaf that is one of its shards."""

    name: str
    box: Box


class PlannedLeaf(NamedTuple):
    """A leaf of the checkpoint, and the ranks that hold its shards."""

    spec: Spec
    ranks_of_box: dict[Box, list[int]]


def shards_to_write(plan: Mapping[str, PlannedLeaf], ranks: int) -> list[list[ShardKey]]:
    """Choose one writer for each shard, such that all ranks write about the same number of bytes.

    Return a list with an item for each rank: the shards that it writes. If both of two ranks hold the tensors "a" and
    "b" of one size, rank 0 writes "a", and rank 1 writes "b".
    """
    holders: dict[ShardKey, list[int]] = {}  # the ranks that hold each shard
    for name, leaf in plan.items():
        for box, ranks_of_box in leaf.ranks_of_box.items():
            holders[ShardKey(name, box)] = ranks_of_box
    shards_of_rank: list[list[ShardKey]] = [[] for _ in range(ranks)]
    bytes_of_rank = [0] * ranks
    # Shards of one holder first: they leave no choice, and count for the choices that follow.
    for shard in sorted(holders, key=lambda shard: len(holders[shard])):
        # The one with the fewest bytes so far.
        writer = min(holders[shard], key=lambda rank: bytes_of_rank[rank])
        shards_of_rank[writer].append(shard)
        bytes_of_rank[writer] += shard.box.numel * plan[shard.name].spec.dtype.itemsize
    return shards_of_rank


def checksum_of_shard(values: Tensor) -> str:
    """Return a checksum of the bits of a shard, such as "cpu 305419896", to compare with other ranks.

    It is the CRC-32 on the CPU. On another device, `checksum` computes it there, so that no values are copied.
    """
    values = with_plain_bits(values)
    if values.device.type != "cpu":
        return f"{values.device.type} {checksum(values).item()}"
    values = values.contiguous()
    return f"cpu {crc32_of(bytes_of(values))}"


def plan_of(leaves_of_rank: Sequence[Mapping[str, ProposedLeaf]]) -> dict[str, PlannedLeaf]:
    """Merge the leaves of all ranks: return the ranks that hold each shard, a part of a leaf, or the whole.

    If rank 0 has the rows 0 to 3 of "w", and rank 1 the rows 4 to 7, the result has for "w" the positions of both
    parts, with the ranks ``[0]`` and ``[1]``. Raise unless the shards fill each leaf, and all ranks that hold one shard
    have equal bits of it.
    """
    # {"w": {0: leaf, 1: leaf}} for the ranks 0 and 1
    holders_by_leaf: dict[str, dict[int, ProposedLeaf]] = {}
    for rank, leaves in enumerate(leaves_of_rank):
        for name, leaf in leaves.items():
            holders_by_leaf.setdefault(name, {})[rank] = leaf
    plan: dict[str, PlannedLeaf] = {}
    differences: list[str] = []  # one of each leaf of which ranks hold other bits
    for name, holders in holders_by_leaf.items():
        spec = _common_spec(name, holders)
        _require_on_all_ranks(name, holders, len(leaves_of_rank))
        checksums_of_box = _checksums_of_box(holders)
        _require_filled(name, spec, checksums_of_box)
        difference = _difference_of_replicas(spec, checksums_of_box)
        if difference is not None:
            differences.append(f"the leaf {name!r} {difference}")
        plan[name] = PlannedLeaf(
            spec, {box: list(ranks) for box, ranks in checksums_of_box.items()}
        )
    _require_equal_replicas(differences)
    return plan


def _checksums_of_box(holders: Mapping[int, ProposedLeaf]) -> dict[Box, dict[int, str | None]]:
    """Return for each shard of a leaf the checksum of its bits on each rank that holds it.

    ``holders`` is a dict from rank to the leaf on this rank.
    """
    checksums_of_box: dict[Box, dict[int, str | None]] = {}
    for rank, leaf in holders.items():
        for box, checksum_of_box in leaf.checksums.items():
            checksums_of_box.setdefault(box, {})[rank] = checksum_of_box
    return checksums_of_box


def _require_filled(name: str, spec: Spec, boxes: Iterable[Box]) -> None:
    """Raise unless the shards of all ranks contain each element of a leaf once; ``boxes`` are their positions."""
    problem = problem_of_boxes(spec.shape, list(boxes))
    if problem is not None:
        raise CheckpointError(
            f"nothing was written: the shards of {name!r} on all ranks {problem}, expected {described(spec)}"
        )


def _common_spec(name: str, holders: Mapping[int, ProposedLeaf]) -> Spec:
    """Return the global shape and dtype of a leaf; raise if they differ between ranks.

    ``holders`` is a dict from rank to the leaf on this rank. If rank 0 has "w" in float32 and rank 1 in bfloat16, the
    error names both.
    """
    first_rank = min(holders)
    first_spec = holders[first_rank].spec
    for rank, leaf in holders.items():
        if leaf.spec != first_spec:
            raise CheckpointError(
                f"nothing was written: the leaf {name!r} is {described(first_spec)} on rank {first_rank} and "
                f"{described(leaf.spec)} on rank {rank}: its global shape and dtype must be the same on all"
            )
    return first_spec


def _require_on_all_ranks(name: str, holders: Mapping[int, ProposedLeaf], ranks: int) -> None:
    """Raise if a plain tensor is in the trees of some ranks only: it must be equal on all of them.

    ``holders`` is a dict from rank to the leaf ``name`` on this rank, and ``ranks`` the number of all ranks. A leaf of
    shards (parts with positions) may be on some ranks only, as in a pipeline.
    """
    if len(holders) == ranks:  # all ranks have it
        return
    is_plain = any(leaf.is_plain for leaf in holders.values())
    # Shards on some ranks are enough if they fill the leaf, which the caller checks.
    if not is_plain:
        return
    # A rank without checksums has no shard of the leaf.
    holding_ranks = [rank for rank, leaf in holders.items() if leaf.checksums]
    missing_ranks = [rank for rank in range(ranks) if rank not in holders]
    raise CheckpointError(
        f"nothing was written: the leaf {name!r} is a plain tensor on {listed(holding_ranks)} and missing on "
        f"{listed(missing_ranks)}, expected equal values on all ranks: save it on all ranks or on none. If each rank "
        "has its own parameters, as in a pipeline, mark those that it holds by FlatShard.cut(tensor, 0, "
        "tensor.numel())"
    )


def _difference_of_replicas(
    spec: Spec, checksums_of_box: Mapping[Box, Mapping[int, str | None]]
) -> str | None:
    """Return a text about the first shard of a leaf that ranks hold with other bits; None if there is none.

    For example "has other values on ranks 2, 3 than on rank 0 in [0:4, 0:8]". ``checksums_of_box`` has for each box a
    dict from rank to checksum.
    """
    for box, checksum_of_rank in checksums_of_box.items():
        if not box.numel:  # no values that could differ
            continue
        # All ranks are compared with the first that holds this part; one rank alone cannot differ.
        first_rank = min(checksum_of_rank)
        expected = checksum_of_rank[first_rank]
        different_ranks = [
            rank for rank, rank_checksum in checksum_of_rank.items() if rank_checksum != expected
        ]
        if not different_ranks:
            continue
        text = f"has other values on {listed(different_ranks)} than on rank {first_rank}"
        if box.sizes != spec.shape:  # the box is a part of the leaf, so the error names it
            text += f" in [{', '.join(slices_of(box))}]"
        return text
    return None


def _require_equal_replicas(differences: Sequence[str]) -> None:
    """Raise if ranks hold different bits of one leaf, which must be equal on all of them.

    ``differences`` has a text for each such leaf: "the leaf 'w' has other values on rank 1 than on rank 0". The error
    has the first of them, and counts the others.
    """
    if not differences:
        return
    difference = differences[0]
    if len(differences) > 1:
        difference += f" (and {len(differences) - 1} other leaves differ)"
    raise CheckpointError(
        f"nothing was written: {difference}, expected equal bits, because all of these ranks hold it. If they are "
        "replicas, make them equal with muonfx.sharding.broadcast(params, layout), or load one checkpoint on all "
        "ranks. If each rank has values of its own, give them different names, or save them without group= to "
        "different paths"
    )


# -------------------------------------------------------------------------------------------------- the files of a save


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
        """Choose the names of the files of a save. Nothing is written yet."""
        self.path = path
        self.save_id = save_id or secrets.token_hex(8)
        self._unfinished_index = path / unfinished_index_name(self.save_id)
        """The new index, until `commit` renames it to ``index.json``."""
        self.files: list[Path] = [self._unfinished_index]
        """The files to remove after an error: files of this rank, and of ranks that may not learn of it."""
        self._lock = SaveLock(path / lock_name(self.save_id))
        """Shows other processes that this save runs: from `begin` to `tidy`, or to `abandon` after an error."""
        # `begin` sets these two.
        self._index_at_begin = b""
        """The start of the ``index.json`` that this save will replace; b"" if there is none."""
        self._has_made_folder = False
        """True if `begin` has created the folder, which is then removed after an error."""
        # `commit` sets these four.
        self._has_other_writer = False
        """True if another save has replaced the index since `begin`. `tidy` warns of it."""
        self._replaced_index: FileIO | None = None
        """The index of the checkpoint that this save replaces, kept open to wait for readers; None without one."""
        self._replaced_files: tuple[DataFile, ...] = ()
        """Its data files, which `tidy` removes; none if its index is damaged, so that they stay."""
        self._completion = Completion.INCOMPLETE
        """Complete after the rename of the new index, unknown during the rename."""

    def begin(self) -> None:
        """Create the checkpoint folder, and lock this save, so that other processes see that it is running.

        Rank 0 calls this, and the ranks write after it. Raise if the folder has an ``index.json`` of another program,
        which the save would replace. ``index.json`` is the index, the description of a checkpoint.
        """
        self._index_at_begin = self._start_of_index()  # b"" if there is no checkpoint yet
        # After a power failure, all bytes may be 0.
        is_empty = self._index_at_begin.strip(b"\0") == b""
        is_ours = FORMAT.encode() in self._index_at_begin
        if not is_ours and not is_empty:
            raise FileExistsError(
                errno.EEXIST,
                f"the folder has an {INDEX} that muonfx has not written: choose another, or move it away",
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

    def write(
        self, path: Path, entries: Sequence[Entry], report: Callable[[int], None] | None = None
    ) -> WrittenShards:
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
                for block in blocks_of(bytes_of(tensor)):
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
        """Complete the checkpoint on rank 0, after all ranks have written their data files.

        The index is written under a temporary name, and its rename replaces the previous checkpoint in one operation.
        For `tidy`, which is called next, this records the replaced checkpoint. After an error, `completion` returns
        whether the new checkpoint is at the path.
        """
        # 1. Everything that the new index names is on the disk, and the index too, under another name.
        self._require_visible(index.files)
        sync_folder(self.path)
        with fresh_file(self._unfinished_index) as file:
            file.write(text_of(index))
        # 2. For `tidy`: whether another process has saved here since `begin`, of which it warns, and the replaced
        # checkpoint, whose files it removes. After the rename, the replaced index cannot be found by its name.
        self._has_other_writer = self._start_of_index() != self._index_at_begin
        with suppress(OSError, CheckpointError):
            self._replaced_files = read_index(self.path / INDEX, with_leaves=False).files
        self._replaced_index = open_to_wait(self.path / INDEX)
        # 3. The atomic rename: readers find either the previous checkpoint or the new one. From here on they may find
        # the new one, whose files therefore stay after an error.
        self._completion = Completion.UNKNOWN
        os.replace(self._unfinished_index, self.path / INDEX)
        self._completion = Completion.COMPLETE
        # The files of the replaced index are needed until the rename is on the disk.
        sync_folder(self.path)

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
            # Keep the last checkpoints in the parent folder, such as "step-000000100".
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

    def _remove_replaced_files(self) -> None:
        """Remove the data files of the replaced checkpoint after its readers have opened them, and unlock this save.

        A reader locks the index until it has opened all data files. It can read an open file that was removed.
        """
        try:
            wait_for_readers(self._replaced_index)
            for file in self._replaced_files:
                (self.path / file.name).unlink(missing_ok=True)
        finally:
            self._lock.release()  # also after an error: this save is complete

    def completion(self) -> Completion:
        """Return whether the checkpoint is complete: whether rank 0, on which this is called, has renamed the index."""
        # A network file system may report an error for a rename that it has performed.
        if self._completion is Completion.UNKNOWN:
            return self.completion_at_path()
        return self._completion

    def completion_at_path(self) -> Completion:
        """Return whether the checkpoint at the path is the one of this save; unknown if its index cannot be read."""
        try:
            save_id = inspect(self.path).save_id
        except NotFoundError:
            return Completion.INCOMPLETE
        except CheckpointError:
            return Completion.UNKNOWN
        if save_id == self.save_id:
            return Completion.COMPLETE
        return Completion.INCOMPLETE

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

    def abandon(self) -> Completion:
        """End the save on rank 0 after an error: remove its files unless the checkpoint is, or may be, complete.

        Return whether it is complete: whether the new index has got the name ``index.json``.
        """
        # 1. A network file system may still perform a rename for which it has reported an error. It cannot do so
        # without the file to rename.
        if self._completion is Completion.UNKNOWN:
            with suppress(OSError):
                self._unfinished_index.unlink()
        # 2. The index at the path names the data files of this save if it is the new one.
        completion = self.completion()
        if completion is Completion.INCOMPLETE:
            self.discard()
        # 3. The lock and the open index of the replaced checkpoint, also if the files stay.
        self._lock.release()
        if self._replaced_index is not None:
            with suppress(OSError):
                self._replaced_index.close()
        return completion

    @contextmanager
    def write_errors(self) -> Generator[None]:
        """Convert an `OSError` of the ``with`` block to a `WriteError`, which says which checkpoint is at the path.

        The message is such as "runs/a was not written: No space left on device; the previous checkpoint is unchanged".
        """
        try:
            yield
        except OSError as error:
            completion = self.completion()
            message = _refusal(self.path, error, completion)
            raise WriteError(message, written=completion is Completion.COMPLETE) from error


def _reason(error: Exception) -> str:
    """Return the text of an error; of an OSError only the text of the system, without number and path."""
    return getattr(error, "strerror", None) or str(error)


def _refusal(path: Path, error: OSError, completion: Completion) -> str:
    """Return the text of a `WriteError`, by whether the checkpoint is complete.

    For example "runs/a was not written: No space left on device; the previous checkpoint is unchanged".
    """
    reason = _reason(error)
    # A rename that is not flushed to the disk may be undone by a power failure.
    if completion is Completion.COMPLETE:
        return f"{path} was written, but a later operation failed, so it may not survive a power failure: {reason}"
    if completion is Completion.UNKNOWN:
        return (
            f"{path} may have been written or not, and nothing was removed: its {INDEX} cannot be read after a failed "
            f"rename: {reason}"
        )
    with suppress(OSError):  # without these looks at the disk, the message has the reason alone
        if path.is_file():
            reason += "; a checkpoint is a folder, and there is a file of this name"
        for folder in (path, *path.parents):
            if folder.is_symlink() and not folder.exists():
                reason += f"; {folder} is a symbolic link to nowhere"
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


def block_checksums(values: Tensor) -> tuple[str, ...]:
    """Return the checksum of each 4 MiB of a tensor, as `Draft.write` computes it for an entry with these values.

    >>> import torch
    >>> block_checksums(torch.zeros(4))
    ('ecbb4b55',)
    """
    tensor = with_plain_bits(values).cpu().contiguous()
    return tuple(map(checksum_of, blocks_of(bytes_of(tensor))))


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
