"""State held by owner ranks in torch's own formats: gathered whole, or as evenly sharded DTensors.

A *record* describes which part of the whole leaf a DTensor's local tensor is, and which rank holds it. It is stored
in an attribute of the tensor: pickling keeps it, and operations that compute other values drop it.
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
    """A started gather of owner-held state to all ranks: all ranks create it together, and `wait` completes it."""

    def __init__(
        self, layout: Layout, device: torch.device, leaves: Mapping[int, tuple[LeafPlacement, Tensor | None]]
    ) -> None:
        # leaves: by index in the state, the placement of a leaf and this rank's part of it
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
        """Return the whole leaves by their index in the state."""
        if self._incoming:
            self._exchange.wait(self._incoming)
            self._incoming = []
        return {place: whole.view(self._shapes[place]) for place, whole in self._wholes.items()}


def gathered_whole(
    layout: Layout, device: torch.device, leaves: Mapping[int, tuple[LeafPlacement, Tensor | None]]
) -> Iterator[tuple[int, Tensor]]:
    """Gather owner-held leaves on all ranks, about `BUCKET` bytes at a time."""
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
    """Return this rank's part of a whole leaf as an evenly sharded DTensor, which torch can gather and reshard."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = layout.dtensors[name].mesh
    box = evenly_box(layout, name, whole.shape)
    local = whole.narrow(0, box.offsets[0], box.sizes[0]).clone() if whole.ndim else whole
    last: list[Placement] = [Shard(0) if whole.ndim else Replicate()]
    found = dtensor_of(local, mesh, [Replicate()] * (mesh.ndim - 1) + last, whole.shape, whole.stride())
    return recorded(found, record(layout, whole.shape, [box]))


def evenly_box(layout: Layout, name: str, shape: Sequence[int]) -> Box:
    """Return the box of a leaf that this rank holds after `evenly`."""
    mesh = layout.dtensors[name].mesh
    shape = tuple(shape)
    if not shape:
        return Box((), ())
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    each = -(-shape[0] // mesh.shape[-1])  # DTensors are sharded like torch.chunk
    start = min(coordinate[-1] * each, shape[0])
    return Box((start, *(0 for _ in shape[1:])), (min(each, shape[0] - start), *shape[1:]))


# ------------------------------------------------------------------------------------------------------------- records

_RECORD = "_muonfx_piece"


class Record(TypedDict):
    """The entries of a record, of types that ``torch.load(weights_only=True)`` accepts."""

    rank: int
    size: int
    shape: list[int]
    boxes: list[list[list[int]]]


def record(layout: Layout, shape: Sequence[int], boxes: Sequence[Box]) -> Record:
    """Return the record of a leaf of which this rank holds some boxes."""
    return {
        "rank": layout.rank,
        "size": layout.size,
        "shape": list(shape),
        "boxes": [[list(box.offsets), list(box.sizes)] for box in boxes],
    }


def recorded(leaf: Tensor, what: Record) -> Tensor:
    """Attach a record to a tensor."""
    setattr(leaf, _RECORD, what)
    return leaf


def other_piece(value: Tensor, mine: Record) -> str | None:
    """Describe how a tensor's recorded shard differs from `mine`; None if it does not differ or has no record."""
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
    """Return a checksum of a tensor, or of a DTensor's local tensor."""
    return int(octets(local_of(value)).sum(dtype=torch.int64)) & 0xFFFFFFFF
