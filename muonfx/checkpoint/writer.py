"""Write one checkpoint, in one process or together with all ranks of a group: plan, write the data, write the index.

Each rank proposes its shards (`Proposal`), and `shards_to_write` merges the proposals. A shard that several ranks hold
is written by one of them. Which one depends on the sizes of all leaves, so if the ranks held different values, the file
would be a mixture that belongs to no rank. Each rank therefore proposes a checksum of every shard that others may hold,
and `plan_of` compares them before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from muonfx.checkpoint.draft import Draft, Entry, WrittenShards
from muonfx.checkpoint.errors import CheckpointError, LostRanksError, WriteError
from muonfx.checkpoint.files import bytes_of, crc32_of, no_collection, with_plain_bits
from muonfx.checkpoint.index import Chunk, DataFile, Index, Leaf, data_name
from muonfx.checkpoint.leaves import LocalLeaf, described, problem_of_boxes, slices_of
from muonfx.checkpoint.together import Together, require_no_other_group, require_same
from muonfx.core.argument_texts import without_addresses
from muonfx.internal.progress import reporting_bytes
from muonfx.sharding.communication.differences import listed
from muonfx.sharding.digests import checksum
from muonfx.sharding.shards.boxes import Box
from muonfx.tree import Spec


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
    problem: Exception | None = None
    """The error of an invalid argument. With a group it is raised in the first step, so that all ranks raise it."""
    shows_progress: bool = False
    """True if a long save shows how many bytes this process has written, on a terminal."""

    def arguments(self) -> dict[str, str]:
        """Return the ``repr`` of each argument that must be equal on all ranks, such as ``{"step": "100", ...}``."""
        head = self.head
        values = {"path": str(self.path), "step": head.step, "extra": head.extra, "keep": self.keep, **head.objects}
        texts = {name: repr(value) for name, value in values.items()}
        # The chain's text has the numbers. The fingerprint has the code of functions, of which the text has the names.
        texts["tx"] = f"{without_addresses(head.chain or 'None')} (fingerprint {head.fingerprint})"
        return texts


class Assignment(NamedTuple):
    """The answer of rank 0 to a rank's proposal: the data file to write, and the shards in it."""

    save_id: str
    file: Path
    keys: list[ShardKey]
    """The shards to write; if there are none, a rank of several writes no file."""


_MANY_BYTES = 2**26
"""A save of fewer bytes shows no progress, since it seldom takes long."""


class Saver:
    """The part of one rank in a save: `propose` and `write` on every rank, `assign` and `commit` on rank 0."""

    def __init__(self, request: SaveRequest, rank: int, ranks: int) -> None:
        self.request = request
        self.rank = rank
        self.ranks = ranks
        self.draft: Draft | None = None
        """The files of this save; None until this rank begins to write."""
        self.plan: dict[str, PlannedLeaf] = {}
        """The leaves of all ranks by name; on rank 0 only."""

    @no_collection()
    def propose(self) -> Proposal:
        """Return the shards that this rank could write, without their values, and its arguments to compare.

        A shard is a part of a tensor, or the whole. If other ranks may hold it as well, as a *replica*, it has a
        checksum, by which rank 0 checks that all hold equal values. For example
        ``{"trace/w": ProposedLeaf(spec, True, {box: "cpu 305419896"})}``.
        """
        # An invalid argument of this rank. `Together.step`, which calls this, raises the error on all ranks.
        if self.request.problem is not None:
            raise self.request.problem
        leaves: dict[str, ProposedLeaf] = {}
        for name, leaf in self.request.leaves.items():
            # A leaf that is divided among all ranks has no replicas. One of a mesh of fewer ranks may have some: other
            # ranks may hold the same leaf on a mesh of their own.
            has_no_replicas = self.ranks == 1 or leaf.divided_among == self.ranks
            checksum_of_box: dict[Box, str | None] = {}  # a box is the position of a shard in its tensor
            for box, values in leaf.shards.items():
                checksum_of_box[box] = None if has_no_replicas else checksum_of_shard(values)
            leaves[name] = ProposedLeaf(leaf.spec, leaf.is_plain, checksum_of_box)
        arguments: dict[str, str] = {}
        if self.ranks > 1:  # a single rank has nothing to compare them with
            arguments = self.request.arguments()
        return Proposal(arguments, leaves)

    @no_collection()
    def assign(self, proposals: list[Proposal]) -> list[Assignment]:
        """Decide on rank 0 which rank writes which shards, create the folder of the checkpoint, and lock the save.

        ``proposals`` and the result have an item for each rank. An `Assignment` names a data file and its shards, such
        as "data-0123456789abcdef-00001-of-00002.safetensors" and the rows 4 to 7 of "trace/w".
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
            assignments.append(Assignment(draft.save_id, file, keys))
        return assignments

    def write(self, assignment: Assignment) -> WrittenShards:
        """Write the shards that were assigned to this rank to its data file.

        A rank without shards writes no file. A single rank always writes one, also for a state without tensors.
        """
        if self.draft is None:  # on ranks other than 0, which has created it in `assign`
            self.draft = Draft(self.request.path, assignment.save_id)
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
        with draft.write_errors(), ExitStack() as stack:
            report = None
            if self.request.shows_progress and nbytes >= _MANY_BYTES:
                report = stack.enter_context(reporting_bytes(f"saving {draft.path.name}", nbytes))
            return draft.write(assignment.file, entries, report)

    @no_collection()
    def commit(self, written: list[WrittenShards]) -> Sequence[None]:
        """Write the index on rank 0, which completes the checkpoint, and remove obsolete files.

        ``written`` has the data file of each rank, or no file. The result is an empty answer for each rank.
        """
        draft = self.draft
        assert draft is not None  # `assign` has created it
        files, leaves = merged(written, self.plan)
        with draft.write_errors():  # before this, readers find the previous checkpoint; after it, the new one
            draft.commit(replace(self.request.head, save_id=draft.save_id, files=files, leaves=leaves))
        try:
            draft.tidy(self.request.keep)
        except Exception as error:  # such as a warning that is an error
            if self.ranks == 1:
                raise
            # The other ranks raise it too, and must learn that the checkpoint is complete.
            message = f"{draft.path} was written, but a later operation failed: {error!r}"
            raise WriteError(message, written=True) from error
        return [None] * self.ranks

    def end(self, *, is_error_of_all: bool) -> bool | None:
        """End the save after an error; return whether the checkpoint is complete, None if that cannot be known.

        This rank's files are removed, unless the checkpoint may be complete. Ranks other than 0 remove theirs only
        after an error of all ranks: else rank 0 may still commit an index that names them.
        """
        if self.rank == 0:  # only rank 0 writes the index, so only it can be certain
            if self.draft is None:  # it has not begun, so nothing was written
                return False
            return self.draft.abandon()
        if self.draft is None:  # this rank has no files, and rank 0 may have written the index or not
            return None
        # Another rank can only look at the checkpoint that is at the path now.
        is_at_path = self.draft.is_at_path()
        if is_error_of_all and is_at_path is False:
            self.draft.discard()
        return is_at_path or None  # None: rank 0 may still complete it


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
            if file_number > 0:  # 0 is set already; a save in one process makes no copies
                chunk = chunk._replace(file=file_number)
            chunks_of_leaf[name].append(chunk)
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


def write_checkpoint(request: SaveRequest) -> None:
    """Write a checkpoint. With a group, every rank calls this, and an error on one rank is raised on all.

    The ranks first agree on who writes which part. Each rank then writes a data file, and rank 0 the index, the
    description of the checkpoint, which completes it.
    """
    path = request.path
    ranks = Together(request.group, path, f"the save to {path}")
    try:
        ranks.meet("checkpoint.save")  # until all ranks have called `save`
    except LostRanksError as error:
        raise WriteError(f"{path} was not written: {error}") from error
    saver = Saver(request, ranks.rank, ranks.size)
    try:
        # In a step, all ranks call the first function, and rank 0 calls the second with their results.
        assignment = ranks.step(saver.propose, saver.assign)
        ranks.step(lambda: saver.write(assignment), saver.commit)
    except LostRanksError as error:  # this rank cannot reach the others, which may have no error and go on
        is_committed = saver.end(is_error_of_all=False)
        message = f"{path} {_STATES[is_committed]} {error}"
        raise WriteError(message, written=is_committed is True) from error
    except BaseException as error:
        saver.end(is_error_of_all=isinstance(error, Exception))  # an interrupt may be of this rank alone
        raise


_STATES = {
    True: "was written completely, but",
    False: "was not written:",
    None: "may have been written or not:",
}
"""The begin of an error, by whether the checkpoint is complete; None if that cannot be known."""


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
        writer = min(holders[shard], key=lambda rank: bytes_of_rank[rank])  # the one with the fewest bytes so far
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
    """Merge the leaves that all ranks propose to write: return for each shard the ranks that hold it.

    Raise unless the shards fill each leaf, and all ranks that hold one shard have equal bits of it. If rank 0 has the
    rows 0 to 3 of "w", and rank 1 the rows 4 to 7, the result has two boxes with one rank each.
    """
    # The ranks that have each leaf in their tree.
    holders_by_leaf: dict[str, dict[int, ProposedLeaf]] = {}  # by leaf name, and rank
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
        plan[name] = PlannedLeaf(spec, {box: list(ranks) for box, ranks in checksums_of_box.items()})
    if differences:
        raise _unequal_replicas(differences)
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
    """Raise if some ranks hold a leaf as a plain tensor, and the trees of other ranks do not have it at all.

    A plain tensor must be equal on all ``ranks``, a number. A leaf with shards (parts that have their positions) may be
    on some of them, as in a pipeline. ``holders`` is a dict from rank to the leaf on this rank.
    """
    if len(holders) == ranks:  # all ranks have it
        return
    is_plain = any(leaf.is_plain for leaf in holders.values())
    if not is_plain:  # shards on some ranks are enough if they fill the leaf, which the caller checks
        return
    holding = [rank for rank, leaf in holders.items() if leaf.checksums]  # a checksum for each shard on the rank
    missing = [rank for rank in range(ranks) if rank not in holders]
    raise CheckpointError(
        f"nothing was written: the leaf {name!r} is a plain tensor on {listed(holding)} and missing on "
        f"{listed(missing)}, expected equal values on all ranks: save it on all ranks or on none. If each rank has "
        "its own parameters, as in a pipeline, mark those that it holds by FlatShard.cut(tensor, 0, tensor.numel())"
    )


def _difference_of_replicas(spec: Spec, checksums_of_box: Mapping[Box, Mapping[int, str | None]]) -> str | None:
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
        different_ranks = [rank for rank, rank_checksum in checksum_of_rank.items() if rank_checksum != expected]
        if not different_ranks:
            continue
        text = f"has other values on {listed(different_ranks)} than on rank {first_rank}"
        if box.sizes != spec.shape:  # the box is a part of the leaf, so the error names it
            text += f" in [{', '.join(slices_of(box))}]"
        return text
    return None


def _unequal_replicas(differences: Sequence[str]) -> CheckpointError:
    """Return the error of a save in which ranks hold different bits of one tensor, which must be equal on all of them.

    It has the first of the ``differences``, texts such as "the leaf 'w' has other values on rank 1 than on rank 0", and
    counts the others.
    """
    more = ""
    if len(differences) > 1:
        more = f" (and {len(differences) - 1} other leaves differ)"
    return CheckpointError(
        f"nothing was written: {differences[0]}{more}, expected equal bits, because all of these ranks hold it. If "
        "they are replicas, make them equal with muonfx.sharding.broadcast(params, layout), or load one checkpoint on "
        "all ranks. If each rank has values of its own, give them different names, or save them without group= to "
        "different paths"
    )
