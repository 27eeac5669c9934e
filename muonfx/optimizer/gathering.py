"""State held by owner ranks, gathered whole on all ranks so that torch can save it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from muonfx.program.buckets import cut_into_buckets
from muonfx.sharding.layout import Layout
from muonfx.sharding.messages import Exchange, octets
from muonfx.sharding.state import LeafPlacement, interval_of

__all__ = ["Gathering", "gathered_whole"]

BUCKET = 1 << 26
"""About how many bytes of whole leaves are gathered at a time."""


class Gathering:
    """A started gather of owner-held state to all ranks: all ranks create it together, and `wait` completes it."""

    def __init__(
        self, layout: Layout, device: torch.device, leaves: Mapping[int, tuple[LeafPlacement, Tensor | None]]
    ) -> None:
        # leaves: by index in the state, the placement of a leaf and this rank's part of it
        self._wholes = {
            place: torch.empty(what.shape, dtype=what.dtype, device=device) for place, (what, _) in leaves.items()
        }
        own: list[Tensor] = []
        self._incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
        for place, (what, leaf) in leaves.items():
            whole = self._wholes[place].view(-1)
            for share in what.shares:
                start, stop = interval_of(what, share)
                target = whole[start:stop].view(torch.uint8)
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
        return self._wholes


def gathered_whole(
    layout: Layout, device: torch.device, leaves: Mapping[int, tuple[LeafPlacement, Tensor | None]]
) -> Iterator[tuple[int, Tensor]]:
    """Gather owner-held leaves on all ranks, about `BUCKET` bytes at a time."""
    sizes = {place: prod(what.shape) * what.dtype.itemsize for place, (what, _) in leaves.items()}
    for places in cut_into_buckets(sizes, BUCKET):
        yield from Gathering(layout, device, {place: leaves[place] for place in places}).wait().items()
