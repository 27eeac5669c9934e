"""The shards of a leaf that this rank holds: boxes of the leaf, with their values."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from muonfx.sharding.shards.boxes import Box
from muonfx.sharding.shards.dtensors import is_dtensor
from muonfx.sharding.shards.flat_shard import FlatShard


class Shard(NamedTuple):
    """A box (rectangular part) of a leaf, and the values in it as a view of the leaf."""

    box: Box
    values: Tensor


def is_sharded(leaf: Any) -> bool:
    """Return whether a leaf is of a class that describes its shards, such as `FlatShard` or a DTensor."""
    return hasattr(leaf, "__create_chunk_list__")


def require_whole(name: str, leaf: Any, advice: str) -> None:
    """Raise if this rank holds only a shard of a leaf. The error ends with ``advice``, such as "pass group="."""
    if is_sharded(leaf) and getattr(leaf, "whole", None) is None:
        raise TypeError(f"the leaf {name!r} is a {type(leaf).__name__}, of which each rank holds a part: {advice}")


def shards_of(leaf: Any) -> list[Shard]:
    """Return the shards of a leaf on this rank. A plain tensor is one shard, the whole leaf.

    Empty shards are omitted, except that a leaf without elements is one empty shard.
    """
    shape = tuple(leaf.shape)
    whole_box = Box((0,) * len(shape), shape)
    if not is_sharded(leaf):
        return [Shard(whole_box, leaf.detach())]
    if isinstance(leaf, FlatShard):
        shards = [Shard(box, leaf.values_in(box)) for box in leaf.boxes]
    elif is_dtensor(leaf) and leaf.device_mesh.get_coordinate() is None:
        return []  # this rank is not in the leaf's mesh
    else:
        shards = _shards_by_protocol(leaf)
    if not prod(shape):
        empty = shards[0].values.reshape(-1)[:0].view(shape)
        return [Shard(whole_box, empty)]
    return [shard for shard in shards if shard.box.numel]


def _shards_by_protocol(leaf: Any) -> list[Shard]:
    """Return the shards of an object that follows the protocol of ``torch.distributed._checkpointable``."""
    # Imported here, since torch.distributed.checkpoint takes longer to import than muonfx.
    from torch.distributed.checkpoint.metadata import MetadataIndex

    shards: list[Shard] = []
    for chunk in leaf.__create_chunk_list__():
        values: Tensor = leaf.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
        shards.append(Shard(Box(tuple(chunk.offsets), tuple(chunk.sizes)), values.detach()))
    return shards


def slices_of(box: Box) -> list[str]:
    """Return a box as one slice for each dim: ["0:4", "2:8"]."""
    return [f"{start}:{end}" for start, end in zip(box.offsets, box.ends, strict=True)]
