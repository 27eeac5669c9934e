"""Complete the gradients of a step, after `agree` has found which are missing on some ranks or are partial sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.sharding.communication.agree import MissingLeaf
from muonfx.sharding.communication.replicas import Send, send_copies
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards.dtensors import is_dtensor, local_of
from muonfx.tree import PyTree

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def complete_gradients(
    layout: Layout, updates: PyTree, missing: Mapping[str, MissingLeaf], device: torch.device
) -> PyTree:
    """Return this rank's gradients. Fill in those that are None here, and that other ranks have.

    Some losses do not use all parameters, so a gradient may be None on some ranks. It becomes a copy of the gradient on
    another rank that holds the same shard or, if there is none, zero. `missing` has these gradients by name, equal on
    all ranks.
    """
    # Checked before anything is sent: under tensor parallelism a gradient may be a partial sum on some ranks, and None
    # on others because their losses do not use the parameter.
    for name, leaf in missing.items():
        if leaf.is_unplaced:  # a partial sum: its terms are on several ranks
            raise _partial_or_none(name)
    # A partial sum that all ranks have is summed over them here.
    gradient_of: dict[str, Tensor | None] = {}
    for name, gradient in tree.named_leaves(updates):
        gradient_of[name] = _local_gradient(layout, name, gradient)
    # Every rank visits the same leaves in the same order, also those that it has: it may have to send them.
    for name, leaf in missing.items():
        local_gradient = gradient_of[name]
        if local_gradient is None:  # zeros, which a copy of a replica's gradient overwrites
            local_gradient = torch.zeros(
                layout.position(name).shape, dtype=leaf.dtype, device=device
            )
            gradient_of[name] = local_gradient
        _copy_to_replicas(layout, name, local_gradient, leaf.ranks)
    _, treedef = tree.flatten(updates)
    return tree.unflatten(treedef, gradient_of.values())


def _partial_or_none(name: str) -> ShardingError:
    """Return an error for a gradient that is a partial sum on some ranks, and None on others."""
    return ShardingError(
        f"nothing was changed on any rank: the gradient of {name!r} is a partial DTensor on some ranks "
        "and None on others, expected a gradient on all of them: use the parameter in the loss of every rank, "
        "or redistribute its gradient before step()"
    )


def _local_gradient(layout: Layout, name: str, leaf: Any) -> Tensor | None:
    """Return the local tensor of a gradient, with the placements of its parameter.

    For example, a gradient with the placement Partial, whose true value is the sum over ranks, is first summed.
    """
    if not is_dtensor(leaf):
        return leaf
    from torch.distributed.tensor import Replicate

    # A plain parameter may have a DTensor as its gradient, for example under `implicit_replication`.
    placements: Sequence[Placement] = [Replicate()] * leaf.device_mesh.ndim
    if name in layout.dtensors:
        placements = layout.dtensors[name].placements
    if tuple(leaf.placements) != tuple(placements):
        leaf = leaf.redistribute(placements=placements)
    return local_of(leaf)


def _copy_to_replicas(
    layout: Layout, name: str, gradient: Tensor, ranks_with_gradient: frozenset[int]
) -> None:
    """Send a gradient to the ranks that had none, from a rank that holds the same shard and had one.

    If ranks 0 to 2 hold the same shard, and only ranks 1 and 2 have a gradient, rank 1 sends it to rank 0.
    """
    # A shard that has no sender, because none of its holders has a gradient, keeps the zeros of `complete_gradients`.
    sends: list[Send] = []
    for holders in layout.holders(name).values():
        senders = [rank for rank in holders if rank in ranks_with_gradient]
        receivers = [rank for rank in holders if rank not in ranks_with_gradient]
        if senders and receivers:
            sends.append(Send(gradient, min(senders), receivers))
    if sends:
        send_copies(sends, layout, "sharing a gradient")
