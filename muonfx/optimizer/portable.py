"""State that lies at owners, as torch's own formats can keep it: gathered, whole or as evenly sharded DTensors.

A *record* is what a DTensor of a state says about itself: which part of which whole its local tensor is, and of which
rank. It stands in an attribute that pickling keeps and that every operation which makes other values drops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from muonfx.sharding.boxes import Box
from muonfx.sharding.dtensors import dtensor_of, local_of
from muonfx.sharding.layout import Layout
from muonfx.sharding.messages import Exchange, octets
from muonfx.sharding.state import LeafPlacement, interval_of

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

__all__ = [
    "Gathering",
    "Record",
    "evenly",
    "evenly_box",
    "gathered_whole",
    "other_piece",
    "record",
    "recorded",
    "sum_of_bits",
]

BUCKET = 1 << 26
"""About how many bytes of whole leaves are gathered at a time."""


class Gathering:
    """State at owners on its way to all ranks: made, it has been begun; `wait` ends it. All ranks make it together.

    Args:
        layout: whose ranks are meant.
        device: where the exchange takes place.
        leaves: what the leaves are, and what of them this rank has, by their places in the state.
    """

    def __init__(
        self, layout: Layout, device: torch.device, leaves: Mapping[int, tuple[LeafPlacement, Tensor | None]]
    ) -> None:
        self._wholes = {
            place: torch.empty(prod(what.shape), dtype=what.dtype, device=device) for place, (what, _) in leaves.items()
        }
        self._shapes = {place: what.shape for place, (what, _) in leaves.items()}
        own: list[Tensor] = []
        self._incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
        for place, (what, leaf) in leaves.items():
            for share in what.shares:
                start, stop = interval_of(what, share)
                target = self._wholes[place][start:stop].view(torch.uint8)
                if share.owner is None:
                    assert leaf is not None
                    target.copy_(octets(leaf))
                    continue
                self._incoming[share.owner].append(target)
                if share.owner == layout.rank:
                    assert leaf is not None
                    own.append(octets(leaf))
        assert layout.group is not None
        self._exchange = Exchange(
            [own] * layout.size,
            [sum(target.numel() for target in targets) for targets in self._incoming],
            dtype=torch.uint8,
            device=device,
            group=layout.group,
            what="gathering the optimizer's state from its owners",
        )

    def wait(self) -> dict[int, Tensor]:
        """The whole leaves, by their places."""
        if self._incoming:
            self._exchange.wait(self._incoming)
            self._incoming = []
        return {place: whole.view(self._shapes[place]) for place, whole in self._wholes.items()}


def gathered_whole(
    layout: Layout, device: torch.device, leaves: Mapping[int, tuple[LeafPlacement, Tensor | None]]
) -> Iterator[tuple[int, Tensor]]:
    """Gather leaves that lie at owners, some at a time, on all ranks together."""
    bucket: dict[int, tuple[LeafPlacement, Tensor | None]] = {}
    size = 0
    for place, (what, leaf) in leaves.items():
        bucket[place] = what, leaf
        size += prod(what.shape) * what.dtype.itemsize
        if size >= BUCKET:
            yield from Gathering(layout, device, bucket).wait().items()
            bucket, size = {}, 0
    if bucket:
        yield from Gathering(layout, device, bucket).wait().items()


def evenly(layout: Layout, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a whole leaf, as a DTensor on its parameter's mesh, cut along the mesh's last dim.

    torch knows what to do with it: to gather it, to load it from a whole, to store and to reshard it.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh = layout.dtensors[name].mesh
    box = evenly_box(layout, name, whole.shape)
    local = whole.narrow(0, box.offsets[0], box.sizes[0]).clone() if whole.ndim else whole
    last: list[Placement] = [Shard(0) if whole.ndim else Replicate()]
    found = dtensor_of(local, mesh, [Replicate()] * (mesh.ndim - 1) + last, whole.shape, whole.stride())
    return recorded(found, record(layout, whole.shape, [box]))


def evenly_box(layout: Layout, name: str, shape: Sequence[int]) -> Box:
    """The box of a leaf that this rank has by `evenly`."""
    mesh = layout.dtensors[name].mesh
    shape = tuple(shape)
    if not shape:
        return Box((), ())
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    each = -(-shape[0] // mesh.shape[-1])  # as DTensors cut: like torch.chunk
    start = min(coordinate[-1] * each, shape[0])
    return Box((start, *(0 for _ in shape[1:])), (min(each, shape[0] - start), *shape[1:]))


# ------------------------------------------------------------------------------------------------------------- records

_RECORD = "_muonfx_piece"


class Record(TypedDict):
    """A record's entries: what ``torch.load(weights_only=True)`` takes."""

    rank: int
    size: int
    shape: list[int]
    boxes: list[list[list[int]]]


def record(layout: Layout, shape: Sequence[int], boxes: Sequence[Box]) -> Record:
    """The record of a leaf of which this rank has some boxes."""
    return {
        "rank": layout.rank,
        "size": layout.size,
        "shape": list(shape),
        "boxes": [[list(box.offsets), list(box.sizes)] for box in boxes],
    }


def recorded(leaf: Tensor, what: Record) -> Tensor:
    """Write a record onto a tensor."""
    setattr(leaf, _RECORD, what)
    return leaf


def other_piece(value: Tensor, mine: Record) -> str | None:
    """Say in words which other piece a tensor is than a record says; None where it is the same, or says nothing."""
    theirs: Record | None = getattr(value, _RECORD, None)
    if theirs is None or (theirs["shape"], theirs["boxes"]) == (mine["shape"], mine["boxes"]):
        return None
    return (
        f"is the piece {_boxes(theirs)} that rank {theirs['rank']} of {theirs['size']} had, expected {_boxes(mine)} of "
        f"rank {mine['rank']} of {mine['size']}"
    )


def _boxes(what: Record) -> str:
    parts = [
        "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(offsets, sizes, strict=True)) + "]"
        for offsets, sizes in what["boxes"]
    ]
    return " and ".join(parts) or "[nothing]"


def sum_of_bits(value: Tensor) -> int:
    """A checksum of a tensor, or of the local tensor of a DTensor."""
    return int(octets(local_of(value)).sum(dtype=torch.int64)) & 0xFFFFFFFF
