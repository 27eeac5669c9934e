"""Plan a save: which rank writes which shard of which leaf, after a check that the shards of all ranks fit together.

Each rank proposes its shards (`Proposal`), and `assign` merges the proposals. A shard that several ranks hold is
written by one of them. Which one depends on the sizes of all leaves, so if the ranks held different values, the file
would be a mixture that belongs to no rank. Each rank therefore proposes a checksum of every shard that others may hold,
and `require_consistent` compares them before anything is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from muonfx.checkpoint.data import bytes_of, crc32_of
from muonfx.checkpoint.errors import CheckpointError
from muonfx.checkpoint.shards import Shard, is_sharded, shards_of, slices_of
from muonfx.checkpoint.spec import described
from muonfx.sharding.communication.differences import listed
from muonfx.sharding.digests import checksum
from muonfx.sharding.shards.boxes import Box, cover
from muonfx.sharding.shards.dtensors import is_dtensor
from muonfx.tree import Spec


class ShardKey(NamedTuple):
    """The name of a leaf, and the box of the leaf that is one of its shards."""

    name: str
    box: Box


class ProposedShard(NamedTuple):
    """A shard of a leaf on one rank, without its values."""

    rank: int
    key: ShardKey
    is_plain: bool
    """True for a plain tensor, which must be equal on all ranks; False for a shard with a position of its own."""
    checksum: str | None
    """The checksum of the shard's bits; None if no other rank can hold the shard."""


class Proposal(NamedTuple):
    """The shards and leaves of a rank, and the arguments with which it has called `save`."""

    arguments: dict[str, str]
    """The ``repr`` of each argument that must be equal on all ranks."""
    specs: dict[str, Spec]
    """The global shape and dtype of each leaf of this rank's tree, also if this rank holds no element of the leaf."""
    shards: list[ProposedShard]


class SavePlanner:
    """One rank's plan of a save: the shards that it holds, and on rank 0 the assignment of shards to ranks.

    Args:
        leaves: a dict from name to tensor or shard.
        rank: this rank.
        ranks: the number of ranks.
    """

    def __init__(self, leaves: dict[str, Any], rank: int, ranks: int) -> None:
        self.leaves = leaves
        self.rank = rank
        self.ranks = ranks
        self.values: dict[ShardKey, Tensor] = {}
        """The values of the shards on this rank."""

    def propose(self, arguments: dict[str, str]) -> Proposal:
        """Return the shards of this rank, with a checksum of each that other ranks may hold."""
        specs: dict[str, Spec] = {}
        proposed: list[ProposedShard] = []
        for name, leaf in self.leaves.items():
            specs[name] = Spec(tuple(leaf.shape), leaf.dtype)
            is_compared = not is_held_once(leaf, self.ranks)
            for shard in shards_of(leaf):
                key = ShardKey(name, shard.box)
                self.values[key] = shard.values
                shard_checksum = None
                if is_compared:
                    shard_checksum = checksum_of_shard(shard)
                proposed.append(ProposedShard(self.rank, key, not is_sharded(leaf), shard_checksum))
        return Proposal(arguments, specs, proposed)

    def assign(self, proposals: Sequence[Proposal]) -> list[list[ShardKey]]:
        """Return the shards that each rank writes, after a check that the ranks' shards fit together."""
        require_consistent(proposals)
        return assignment(proposals)


def assignment(proposals: Sequence[Proposal]) -> list[list[ShardKey]]:
    """Return the shards that each rank writes: each shard once, and about as many bytes on each rank as possible."""
    if len(proposals) == 1:
        return [[shard.key for shard in proposals[0].shards]]
    holders: dict[ShardKey, list[int]] = {}
    for rank, proposal in enumerate(proposals):
        for shard in proposal.shards:
            holders.setdefault(shard.key, []).append(rank)
    keys_of_rank: list[list[ShardKey]] = [[] for _ in proposals]
    bytes_of_rank = [0] * len(proposals)
    # Shards of one holder first: they leave no choice, and count for the choices that follow.
    for key, ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        writer = min(ranks, key=lambda rank: bytes_of_rank[rank])
        keys_of_rank[writer].append(key)
        dtype = proposals[writer].specs[key.name].dtype
        bytes_of_rank[writer] += key.box.numel * dtype.itemsize
    return keys_of_rank


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
    values = shard.values.resolve_conj().resolve_neg()
    if values.device.type != "cpu":
        return f"{values.device.type} {checksum(values).item()}"
    values = values.contiguous()
    return f"cpu {crc32_of(bytes_of(values))}"


def require_consistent(proposals: Sequence[Proposal]) -> None:
    """Raise unless every leaf has one shape and dtype, and its shards on all ranks fill it without a contradiction."""
    shards_by_leaf: dict[str, list[ProposedShard]] = {}
    for proposal in proposals:
        for shard in proposal.shards:
            shards_by_leaf.setdefault(shard.key.name, []).append(shard)
    specs = _common_specs(proposals)
    names_by_rank = [proposal.specs.keys() for proposal in proposals]
    for name, spec in specs.items():
        shards = shards_by_leaf.get(name, [])
        _require_on_all_ranks(name, shards, names_by_rank)
        _require_filled(name, spec, shards)
    _require_equal_replicas(shards_by_leaf, specs)


def _common_specs(proposals: Sequence[Proposal]) -> dict[str, Spec]:
    """Return the shape and dtype of each leaf; raise if a leaf has others on another rank."""
    specs: dict[str, Spec] = {}
    first_rank_of: dict[str, int] = {}
    for rank, proposal in enumerate(proposals):
        for name, spec in proposal.specs.items():
            first_spec = specs.setdefault(name, spec)
            first_rank = first_rank_of.setdefault(name, rank)
            if spec != first_spec:
                raise CheckpointError(
                    f"nothing was written: the leaf {name!r} is {described(first_spec)} on rank {first_rank} and "
                    f"{described(spec)} on rank {rank}: its global shape and dtype must be the same on all"
                )
    return specs


def _require_on_all_ranks(name: str, shards: Sequence[ProposedShard], names_by_rank: Sequence[Collection[str]]) -> None:
    """Raise if some ranks hold a leaf as a plain tensor, and the trees of other ranks do not have it at all."""
    if not any(shard.is_plain for shard in shards):
        return
    holders = sorted({shard.rank for shard in shards})
    missing = [rank for rank, names in enumerate(names_by_rank) if name not in names]
    if missing:
        raise CheckpointError(
            f"nothing was written: the leaf {name!r} is a plain tensor on {listed(holders)} and missing on "
            f"{listed(missing)}, expected equal values on all ranks: save it on all ranks or on none. If each rank has "
            "its own parameters, as in a pipeline, mark those that it holds by FlatShard.cut(tensor, 0, tensor.numel())"
        )


def _require_filled(name: str, spec: Spec, shards: Sequence[ProposedShard]) -> None:
    """Raise unless the different shards of a leaf fill it and do not overlap. Ranks may hold equal shards."""
    boxes = dict.fromkeys(shard.key.box for shard in shards if shard.key.box.numel)
    problem = cover(spec.shape, [*boxes])
    if problem is not None:
        raise CheckpointError(
            f"nothing was written: the shards of {name!r} on all ranks {problem}, expected {described(spec)}"
        )


def _require_equal_replicas(shards_by_leaf: Mapping[str, Sequence[ProposedShard]], specs: Mapping[str, Spec]) -> None:
    """Raise if ranks hold other bits of one shard. Name the first leaf, and count the others."""
    differences: list[str] = []
    for name, shards in shards_by_leaf.items():
        difference = _difference(shards, specs[name].shape)
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


def _difference(shards: Sequence[ProposedShard], shape: tuple[int, ...]) -> str | None:
    """Return a text with the ranks that hold other bits than the first holder of a shard; None if all are equal."""
    first_of_box: dict[Box, ProposedShard] = {}
    different: list[ProposedShard] = []
    for shard in shards:
        box = shard.key.box
        first = first_of_box.setdefault(box, shard)
        if box.numel and shard.checksum != first.checksum:
            different.append(shard)
    if not different:
        return None
    box = different[0].key.box
    first = first_of_box[box]
    ranks = [shard.rank for shard in different if shard.key.box == box]
    text = f"has other values on {listed(ranks)} than on rank {first.rank}"
    if box.sizes != shape:
        text += f" in [{', '.join(slices_of(box))}]"
    return f"{text} (checksums: {different[0].checksum} and {first.checksum})"
