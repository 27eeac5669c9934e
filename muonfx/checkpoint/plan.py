"""Check, before a save writes anything, that ranks that hold the same part of a leaf hold the same bits.

A save writes a part that several ranks hold from one of them. Which one depends on the sizes of all leaves, so if the
ranks had different values, the file would be a mixture that belongs to no rank. Each rank therefore sends a checksum of
every part that others may hold with its plan of the save, and the rank that merges the plans compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from muonfx.checkpoint.data import bytes_of, crc32_of
from muonfx.checkpoint.errors import CheckpointError
from muonfx.checkpoint.spec import described
from muonfx.sharding.boxes import Box, cover
from muonfx.sharding.consensus import listed
from muonfx.sharding.dtensors import is_dtensor
from muonfx.sharding.replicas import checksum
from muonfx.tree import Spec

__all__ = ["RankSummary", "box_of", "checksum_of_part", "is_held_once", "require_consistent"]


class RankSummary(NamedTuple):
    """The facts that a rank adds to its plan of a save, for the comparison with the other ranks."""

    checksums: list[str | None]
    """For each item of the plan, the checksum of the part that it writes; None if no other rank can hold the part."""
    names: list[str]
    """The names of the leaves of this rank's tree, with those of which it holds no element."""


class RankPart(NamedTuple):
    """A part of a leaf on one rank."""

    rank: int
    box: Box
    spec: Spec
    """The shape and dtype of the whole leaf."""
    is_plain: bool
    """True for a plain tensor, which must be equal on all ranks; False for a shard, which has its position."""
    checksum: str | None
    """The checksum of the part's bits; None if no other rank can hold the part."""


def box_of(item: WriteItem) -> Box:
    """Return the rectangular part of a leaf that an item of DCP's plan writes."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def is_held_once(leaf: Any, ranks: int) -> bool:
    """Return whether no other rank can hold a part of ``leaf``: it is sharded over every dim of a mesh of all ranks.

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


def checksum_of_part(part: Tensor) -> str:
    """Return a checksum of the bits of a tensor: the CRC-32 on the CPU, and `checksum` elsewhere, to copy nothing."""
    part = part.detach().resolve_conj().resolve_neg()
    if part.device.type != "cpu":
        return f"{part.device.type} {checksum(part).item()}"
    part = part.contiguous()
    return f"cpu {crc32_of(bytes_of(part))}"


def require_consistent(plans: Sequence[SavePlan]) -> None:
    """Raise unless every leaf has one shape and dtype, and its parts on all ranks fill it without a contradiction.

    ``plans[rank].planner_data`` is the `RankSummary` of the rank.
    """
    parts_by_leaf: dict[str, list[RankPart]] = {}
    for rank, plan in enumerate(plans):
        for item, part_checksum in zip(plan.items, plan.planner_data.checksums, strict=True):
            assert item.tensor_data is not None
            spec = Spec(tuple(item.tensor_data.size), item.tensor_data.properties.dtype)
            is_plain = item.type == WriteItemType.TENSOR
            part = RankPart(rank, box_of(item), spec, is_plain, part_checksum)
            parts_by_leaf.setdefault(item.index.fqn, []).append(part)
    names_by_rank = [set(plan.planner_data.names) for plan in plans]
    for name, parts in parts_by_leaf.items():
        _require_one_spec(name, parts)
        _require_on_all_ranks(name, parts, names_by_rank)
        _require_filled(name, parts)
    _require_equal_replicas(parts_by_leaf)


def _require_one_spec(name: str, parts: Sequence[RankPart]) -> None:
    first = parts[0]
    for part in parts:
        if part.spec != first.spec:
            raise CheckpointError(
                f"nothing was written: the leaf {name!r} is {described(first.spec)} on rank {first.rank} and "
                f"{described(part.spec)} on rank {part.rank}: its global shape and dtype must be the same on all"
            )


def _require_on_all_ranks(name: str, parts: Sequence[RankPart], names_by_rank: Sequence[set[str]]) -> None:
    """Raise if some ranks hold a leaf as a plain tensor, and the trees of other ranks do not have it at all."""
    if not any(part.is_plain for part in parts):
        return
    holders = sorted({part.rank for part in parts})
    missing = [rank for rank, names in enumerate(names_by_rank) if name not in names]
    if missing:
        raise CheckpointError(
            f"nothing was written: the leaf {name!r} is a plain tensor on {listed(holders)} and missing on "
            f"{listed(missing)}, expected equal values on all ranks: save it on all ranks or on none. If each rank has "
            "its own parameters, as in a pipeline, mark those that it holds by FlatPiece.cut(tensor, 0, tensor.numel())"
        )


def _require_filled(name: str, parts: Sequence[RankPart]) -> None:
    """Raise unless the different parts of a leaf fill it and do not overlap. Ranks may hold equal parts."""
    spec = parts[0].spec
    boxes = dict.fromkeys(part.box for part in parts if part.box.numel)
    problem = cover(spec.shape, [*boxes])
    if problem is not None:
        raise CheckpointError(
            f"nothing was written: the shards of {name!r} on all ranks {problem}, expected {described(spec)}"
        )


def _require_equal_replicas(parts_by_leaf: dict[str, list[RankPart]]) -> None:
    """Raise if ranks hold other bits of one part. Name the first leaf, and count the others."""
    differences: list[str] = []
    for name, parts in parts_by_leaf.items():
        difference = _difference(parts)
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


def _difference(parts: Sequence[RankPart]) -> str | None:
    """Return a text with the ranks that hold other bits than the first holder of a part; None if all are equal."""
    first_of_box: dict[Box, RankPart] = {}
    different: list[RankPart] = []
    for part in parts:
        first = first_of_box.setdefault(part.box, part)
        if part.box.numel and part.checksum != first.checksum:
            different.append(part)
    if not different:
        return None
    box = different[0].box
    first = first_of_box[box]
    ranks = [part.rank for part in different if part.box == box]
    text = f"has other values on {listed(ranks)} than on rank {first.rank}"
    if box.sizes != first.spec.shape:
        ends = zip(box.offsets, box.ends, strict=True)
        text += f" in [{', '.join(f'{start}:{end}' for start, end in ends)}]"
    return f"{text} (checksums: {different[0].checksum} and {first.checksum})"
