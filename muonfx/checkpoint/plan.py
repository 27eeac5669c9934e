"""Plan a save: which rank writes which shard of which leaf, after a check that the shards of all ranks fit together.

Each rank proposes its shards (`Proposal`), and `assign` merges the proposals. A shard that several ranks hold is
written by one of them. Which one depends on the sizes of all leaves, so if the ranks held different values, the file
would be a mixture that belongs to no rank. Each rank therefore proposes a checksum of every shard that others may hold,
and `require_consistent` compares them before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from muonfx.checkpoint.data import bytes_of, crc32_of, with_plain_bits
from muonfx.checkpoint.errors import CheckpointError
from muonfx.checkpoint.shards import Shard, is_sharded, problem_of_boxes, shards_of, slices_of
from muonfx.checkpoint.spec import described
from muonfx.sharding.boxes import Box
from muonfx.sharding.differences import listed
from muonfx.sharding.dtensors import is_dtensor
from muonfx.sharding.replicas import checksum
from muonfx.tree import Spec


class ProposedShard(NamedTuple):
    """A shard of a leaf on one rank, without its values."""

    box: Box
    checksum: str | None
    """The checksum of the shard's bits; None if no other rank can hold the shard."""


class ProposedLeaf(NamedTuple):
    """A leaf of one rank's tree, without its values."""

    spec: Spec
    """The global shape and dtype."""
    is_plain: bool
    """True for a plain tensor, which must be equal on all ranks; False for shards with positions of their own."""
    shards: list[ProposedShard]
    """The shards on this rank; empty if it holds no element of the leaf."""


class Proposal(NamedTuple):
    """The leaves of a rank, and the arguments with which it has called `save`."""

    arguments: dict[str, str]
    """The ``repr`` of each argument that must be equal on all ranks."""
    leaves: dict[str, ProposedLeaf]


class ShardKey(NamedTuple):
    """A shard that a rank has proposed: the name of the leaf, and the number of the shard in `ProposedLeaf.shards`."""

    name: str
    number: int


class SavePlanner:
    """One rank's plan of a save: the shards that it holds, and on rank 0 the assignment of shards to ranks.

    Args:
        leaves: a dict from name to tensor or shard.
        ranks: the number of ranks.
    """

    def __init__(self, leaves: dict[str, Any], ranks: int) -> None:
        self.leaves = leaves
        self.ranks = ranks
        self.shards: dict[str, list[Shard]] = {}
        """The shards of each leaf on this rank, with their values."""

    def propose(self, arguments: dict[str, str]) -> Proposal:
        """Return the shards of this rank, with a checksum of each that other ranks may hold."""
        proposed: dict[str, ProposedLeaf] = {}
        for name, leaf in self.leaves.items():
            is_compared = not is_held_once(leaf, self.ranks)
            shards = shards_of(leaf)
            self.shards[name] = shards
            proposed_shards: list[ProposedShard] = []
            for shard in shards:
                shard_checksum = None
                if is_compared:
                    shard_checksum = checksum_of_shard(shard)
                proposed_shards.append(ProposedShard(shard.box, shard_checksum))
            spec = Spec(tuple(leaf.shape), leaf.dtype)
            proposed[name] = ProposedLeaf(spec, not is_sharded(leaf), proposed_shards)
        return Proposal(arguments, proposed)

    def assign(self, proposals: Sequence[Proposal]) -> list[list[ShardKey]]:
        """Return the shards that each rank writes, after a check that the ranks' shards fit together."""
        require_consistent(proposals)
        return assignment(proposals)


def assignment(proposals: Sequence[Proposal]) -> list[list[ShardKey]]:
    """Return the shards that each rank writes: each shard once, and about as many bytes on each rank as possible."""
    if len(proposals) == 1:
        return [_keys_of(proposals[0])]
    keys_of_box: dict[tuple[str, Box], dict[int, ShardKey]] = {}
    for rank, proposal in enumerate(proposals):
        for key in _keys_of(proposal):
            box = proposal.leaves[key.name].shards[key.number].box
            keys_of_box.setdefault((key.name, box), {})[rank] = key
    keys_of_rank: list[list[ShardKey]] = [[] for _ in proposals]
    bytes_of_rank = [0] * len(proposals)
    # Shards of one holder first: they leave no choice, and count for the choices that follow.
    for (name, box), keys_by_rank in sorted(keys_of_box.items(), key=lambda item: len(item[1])):
        writer = min(keys_by_rank, key=lambda rank: bytes_of_rank[rank])
        keys_of_rank[writer].append(keys_by_rank[writer])
        dtype = proposals[writer].leaves[name].spec.dtype
        bytes_of_rank[writer] += box.numel * dtype.itemsize
    return keys_of_rank


def _keys_of(proposal: Proposal) -> list[ShardKey]:
    """Return the keys of all shards that a rank has proposed."""
    keys: list[ShardKey] = []
    for name, leaf in proposal.leaves.items():
        keys += [ShardKey(name, number) for number in range(len(leaf.shards))]
    return keys


def is_held_once(leaf: Any, ranks: int) -> bool:
    """Return whether no other rank can hold a shard of ``leaf``: it is sharded over every dim of a mesh of all ranks.

    A mesh of fewer ranks does not count: other ranks may hold the same leaf on a mesh of their own.
    """
    if ranks == 1:
        return True
    if not is_dtensor(leaf) or leaf.device_mesh.size() != ranks:
        return False
    for dim, placement in enumerate(leaf.placements):
        if leaf.device_mesh.size(dim) > 1 and not placement.is_shard():
            return False
    return True


def checksum_of_shard(shard: Shard) -> str:
    """Return a checksum of the bits of a shard: the CRC-32 on the CPU, and `checksum` elsewhere, to copy nothing."""
    values = with_plain_bits(shard.values)
    if values.device.type != "cpu":
        return f"{values.device.type} {checksum(values).item()}"
    values = values.contiguous()
    return f"cpu {crc32_of(bytes_of(values))}"


Holders = Mapping[int, ProposedLeaf]
"""The ranks whose trees have a leaf, in ascending order, each with its proposal for the leaf."""


def require_consistent(proposals: Sequence[Proposal]) -> None:
    """Raise unless every leaf has one shape and dtype, and its shards on all ranks fill it without a contradiction."""
    holders_by_leaf: dict[str, dict[int, ProposedLeaf]] = {}
    for rank, proposal in enumerate(proposals):
        for name, leaf in proposal.leaves.items():
            holders_by_leaf.setdefault(name, {})[rank] = leaf
    for name, holders in holders_by_leaf.items():
        _require_one_spec(name, holders)
        _require_on_all_ranks(name, holders, len(proposals))
        _require_filled(name, holders)
    if len(proposals) > 1:
        _require_equal_replicas(holders_by_leaf)


def _require_one_spec(name: str, holders: Holders) -> None:
    """Raise if a leaf has another shape or dtype on another rank."""
    first_rank = min(holders)
    first_spec = holders[first_rank].spec
    for rank, leaf in holders.items():
        if leaf.spec != first_spec:
            raise CheckpointError(
                f"nothing was written: the leaf {name!r} is {described(first_spec)} on rank {first_rank} and "
                f"{described(leaf.spec)} on rank {rank}: its global shape and dtype must be the same on all"
            )


def _require_on_all_ranks(name: str, holders: Holders, ranks: int) -> None:
    """Raise if some ranks hold a leaf as a plain tensor, and the trees of other ranks do not have it at all."""
    if len(holders) == ranks or not any(leaf.is_plain for leaf in holders.values()):
        return
    with_shards = [rank for rank, leaf in holders.items() if leaf.shards]
    missing = [rank for rank in range(ranks) if rank not in holders]
    raise CheckpointError(
        f"nothing was written: the leaf {name!r} is a plain tensor on {listed(with_shards)} and missing on "
        f"{listed(missing)}, expected equal values on all ranks: save it on all ranks or on none. If each rank has "
        "its own parameters, as in a pipeline, mark those that it holds by FlatPiece.cut(tensor, 0, tensor.numel())"
    )


def _require_filled(name: str, holders: Holders) -> None:
    """Raise unless the different shards of a leaf fill it and do not overlap. Ranks may hold equal shards."""
    boxes: dict[Box, None] = {}
    for leaf in holders.values():
        boxes |= dict.fromkeys([shard.box for shard in leaf.shards])
    spec = holders[min(holders)].spec
    problem = problem_of_boxes(spec.shape, [*boxes])
    if problem is not None:
        raise CheckpointError(
            f"nothing was written: the shards of {name!r} on all ranks {problem}, expected {described(spec)}"
        )


def _require_equal_replicas(holders_by_leaf: Mapping[str, Holders]) -> None:
    """Raise if ranks hold other bits of one shard. Name the first leaf, and count the others."""
    differences: list[str] = []
    for name, holders in holders_by_leaf.items():
        difference = _difference(holders)
        if difference is not None:
            differences.append(f"the leaf {name!r} {difference}")
    if not differences:
        return
    more = ""
    if len(differences) > 1:
        more = f" (and {len(differences) - 1} other leaves differ)"
    raise CheckpointError(
        f"nothing was written: {differences[0]}{more}, expected equal bits, because all of these ranks hold it. If "
        "they are replicas, make them equal with muonfx.sharding.broadcast(params, layout), or load one checkpoint on "
        "all ranks. If each rank has values of its own, give them different names, or save them without group= to "
        "different paths"
    )


def _difference(holders: Holders) -> str | None:
    """Return a text with the ranks that hold other bits than the first holder of a shard; None if all are equal."""
    checksums_of_box: dict[Box, dict[int, str | None]] = {}
    for rank, leaf in holders.items():
        for shard in leaf.shards:
            checksums_of_box.setdefault(shard.box, {})[rank] = shard.checksum
    for box, checksum_of_rank in checksums_of_box.items():
        first_rank = min(checksum_of_rank)
        expected = checksum_of_rank[first_rank]
        different = [rank for rank, found in checksum_of_rank.items() if found != expected]
        if not different or not box.numel:
            continue
        text = f"has other values on {listed(different)} than on rank {first_rank}"
        if box.sizes != holders[first_rank].spec.shape:
            text += f" in [{', '.join(slices_of(box))}]"
        return f"{text} (checksums: {checksum_of_rank[different[0]]} and {expected})"
    return None
