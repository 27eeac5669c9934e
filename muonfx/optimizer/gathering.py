"""`Gathering`: a broadcast of state that only one rank has."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx.sharding.communication.messages import collective
from muonfx.sharding.layout import Layout
from muonfx.sharding.state import LeafPlacement, interval_of

ALIGNED = 16
"""The leaves of a gather are padded to a multiple of this many bytes, so that each can be viewed in its dtype."""

GATHERING = "gathering the optimizer's state from its owners"


class Gathering:
    """An asynchronous broadcast of state that only one rank has, because it alone orthogonalizes the matrix.

    Args:
        layout: the layout of the parameters, with the process group.
        device: the device of the state.
        leaves: a dict from the index of a leaf in the state to its placement and this rank's part of it, or None.
    """

    def __init__(
        self, layout: Layout, device: torch.device, leaves: Mapping[int, tuple[LeafPlacement, Tensor | None]]
    ) -> None:
        padded_sizes = [_padded(_bytes_of(placement)) for placement, _ in leaves.values()]
        # One buffer of bytes for all leaves, so that a single collective copies them. Each byte is written by one rank
        # and is zero on the others, so the sum over ranks has the exact bits of the owners.
        buffer = torch.zeros(sum(padded_sizes), dtype=torch.uint8, device=device)
        self._full_leaves: dict[int, Tensor] = {}
        for index, leaf_bytes in zip(leaves, buffer.split(padded_sizes), strict=True):
            placement, leaf = leaves[index]
            flat = leaf_bytes[: _bytes_of(placement)].view(placement.dtype)
            _write_local(flat, placement, leaf, layout.rank)
            self._full_leaves[index] = flat.view(placement.shape)
        with collective(GATHERING):
            self._work: Any = dist.all_reduce(buffer, group=layout.group, async_op=True)

    def wait(self) -> dict[int, Tensor]:
        """Wait for the copy. Return a dict from the index of a tensor in the state to the full tensor."""
        with collective(GATHERING):
            self._work.wait()
        return self._full_leaves


def _write_local(flat: Tensor, placement: LeafPlacement, leaf: Tensor | None, rank: int) -> None:
    """Write this rank's part of a leaf into ``flat``, the flattened full leaf, unless another rank writes it."""
    shard = placement.shard
    if leaf is None or shard is None:
        return
    if shard.owner is None and rank != 0:  # all ranks have these elements, so only rank 0 writes them
        return
    start, stop = interval_of(placement, shard)
    flat[start:stop] = leaf.reshape(-1)


def _bytes_of(placement: LeafPlacement) -> int:
    return prod(placement.shape) * placement.dtype.itemsize


def _padded(size: int) -> int:
    """Return a number of bytes, rounded up to a multiple of ``ALIGNED``: 32 for 17."""
    return -(-size // ALIGNED) * ALIGNED
