"""The shards of a leaf that this rank holds: boxes of the leaf, with their values."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from muonfx.sharding.boxes import Box, cover
from muonfx.sharding.dtensors import is_dtensor
from muonfx.sharding.shards import FlatPiece


def is_sharded(leaf: Any) -> bool:
    """Return whether a leaf is of a class that describes its shards, such as `FlatPiece` or a DTensor."""
    return hasattr(
        type(leaf), "__create_chunk_list__"
    )  # fast: tensors have no such attribute, and their class is cached


def require_whole(name: str, leaf: Any, advice: str) -> None:
    """Raise if this rank holds only a shard of a leaf. The error ends with ``advice``, such as "pass group="."""
    if is_sharded(leaf) and getattr(leaf, "whole", None) is None:
        raise TypeError(f"the leaf {name!r} is a {type(leaf).__name__}, of which each rank holds a part: {advice}")


def shards_of(leaf: Any) -> dict[Box, Tensor]:
    """Return the shards of a leaf on this rank: boxes, with the values in them as views of the leaf.

    A plain tensor is one shard, the whole leaf.

    Empty shards are omitted, except that a leaf without elements is one empty shard.
    """
    shape = tuple(leaf.shape)
    if not is_sharded(leaf):
        return {whole_box(shape): leaf.detach()}
    if isinstance(leaf, FlatPiece):
        shards = {box: leaf.part(box) for box in leaf.boxes}
    elif is_dtensor(leaf) and leaf.device_mesh.get_coordinate() is None:
        return {}  # this rank is not in the leaf's mesh
    else:
        shards = _shards_by_protocol(leaf)
    if not prod(shape):
        first_values = next(iter(shards.values()))
        return {whole_box(shape): first_values.reshape(-1)[:0].view(shape)}
    return {box: values for box, values in shards.items() if box.numel}


def _shards_by_protocol(leaf: Any) -> dict[Box, Tensor]:
    """Return the shards of an object that follows the protocol of ``torch.distributed._checkpointable``."""
    # Imported here, since torch.distributed.checkpoint takes longer to import than muonfx.
    from torch.distributed.checkpoint.metadata import MetadataIndex

    shards: dict[Box, Tensor] = {}
    for chunk in leaf.__create_chunk_list__():
        values: Tensor = leaf.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
        shards[Box(tuple(chunk.offsets), tuple(chunk.sizes))] = values.detach()
    return shards


def problem_of_boxes(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Return None if boxes contain each element of a leaf once, else the reason why they do not."""
    if len(boxes) == 1 and boxes[0] == whole_box(shape):  # most leaves are in one piece, and this takes less time
        return None
    return cover(shape, boxes)


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box with all elements of a leaf of this shape."""
    return Box((0,) * len(shape), shape)


def slices_of(box: Box) -> list[str]:
    """Return a box as one slice for each dim: ["0:4", "2:8"]."""
    return [f"{start}:{end}" for start, end in zip(box.offsets, box.ends, strict=True)]
