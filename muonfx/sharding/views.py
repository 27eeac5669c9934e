"""Convert the state of a sharded transform between its local form, for updates, and its global form, for checkpoints.

A leaf of the global form records its position in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from muonfx import tree
from muonfx.core import Transform
from muonfx.program.offload.transform import inner_of, store_of
from muonfx.sharding.binding import Binding
from muonfx.sharding.layout import Layout
from muonfx.sharding.messages import ShardingError
from muonfx.sharding.shards import FlatPiece
from muonfx.sharding.state import LeafPlacement, describe_state, global_state, local_state, without_dtensors
from muonfx.sharding.transform import Sharded, bind, settings_of
from muonfx.tree import PyTree

__all__ = ["binding_of", "check_local", "is_global", "from_global", "to_global"]


def to_global(tx: Transform, state: PyTree, params: PyTree = None) -> PyTree:
    """Convert this rank's state to leaves that record their position in the whole tensors, without communication.

    `muonfx.checkpoint.save` calls this if it is given ``tx``. The checkpoint then has the names and whole tensors of a
    single process, and loads under any layout and number of ranks.

    Args:
        tx: a transform that `sharded` built.
        state: this rank's state. A state that was converted already is returned unchanged.
        params: this rank's parameters; needed if ``tx`` has not been used yet.

    Returns:
        A tree like the state. Its leaves are `torch.distributed.tensor.DTensor`, `muonfx.checkpoint.FlatPiece`, or
        tensors that are equal on all ranks.

    Raises:
        TypeError: ``tx`` is not sharded.
        ShardingError: the state does not fit ``tx`` and its layout; the message names a leaf.

    >>> import muonfx as mfx
    >>> params = {"w": torch.ones(2, 2)}
    >>> layout = mfx.sharding.zero(params, 1, partition="flat")
    >>> tx = mfx.sharding.sharded(mfx.momentum(), layout)
    >>> to_global(tx, tx.init(layout.shard(params))).trace["w"]
    FlatPiece(elements 0 to 4 of (2, 2), torch.float32)
    """
    binding, inner, like = binding_of(tx, params)
    if is_global(state):
        return state
    own = without_dtensors(binding, inner, like, state)
    check_local(binding.layout, describe_state(binding, inner, like), own)
    return global_state(binding, inner, like, own)


def from_global(tx: Transform, state: PyTree, params: PyTree = None) -> PyTree:
    """Convert a state from `to_global` to this rank's local state, which ``tx.update`` accepts.

    `muonfx.checkpoint.load` calls this if it is given ``tx``. If one rank calls it, all ranks must, because the next
    update then compares the replicas of the state between ranks.

    Args:
        tx: a transform that `sharded` built.
        state: a result of `to_global`, or a loaded state of this form. A local state is returned unchanged.
        params: as in `to_global`.

    Raises:
        TypeError: ``tx`` is not sharded.

    >>> import muonfx as mfx
    >>> params = {"w": torch.ones(2, 2)}
    >>> layout = mfx.sharding.zero(params, 1, partition="flat")
    >>> tx = mfx.sharding.sharded(mfx.momentum(), layout)
    >>> from_global(tx, to_global(tx, tx.init(layout.shard(params)))).trace["w"]
    tensor([0., 0., 0., 0.])
    """
    binding, inner, like = binding_of(tx, params)
    binding.has_loaded = True
    return local_state(binding, inner, like, without_dtensors(binding, inner, like, state))


def is_global(values: PyTree) -> bool:
    """Return True if any leaf of a tree is a `FlatPiece`, as in the results of `to_global`."""
    # A global tree without a FlatPiece has DTensors and whole tensors only, which `to_global` leaves unchanged.
    return any(isinstance(leaf, FlatPiece) for leaf in tree.leaves(values))


def check_local(layout: Layout, described: Sequence[LeafPlacement | None], state: PyTree) -> None:
    """Raise unless a local state has the described number of leaves, with this rank's shapes."""
    advice = "was it made by this chain, under this layout?"
    leaves = tree.leaves(state)
    if len(leaves) != len(described):
        raise ShardingError(f"the state has {len(leaves)} leaves, expected {len(described)}: {advice}")
    for name, leaf, what in zip(tree.names(state), leaves, described, strict=True):
        want = None if what is None else what.local
        if leaf is not None and want is not None and tuple(leaf.shape) != want and (leaf.numel() or prod(want)):
            raise ShardingError(
                f"the state's {name!r} has shape {tuple(leaf.shape)}, expected {want} on this rank under {layout!r}: "
                f"{advice}"
            )


def binding_of(tx: Transform, params: PyTree) -> tuple[Binding, Transform, PyTree]:
    """Return the `Binding` of a sharded transform, its inner transform, and `params` or, if None, meta tensors."""
    if not isinstance(tx, Sharded):
        raise TypeError(f"tx must be what muonfx.sharding.sharded made, found {tx!r}")
    layout = tx.layout
    binding = bind(layout, settings_of(tx), store_of(tx.arguments["tx"]))
    like = params if params is not None else binding.likes.get(inner_of(tx.arguments["tx"]).treedef)
    if like is None:
        specs = layout.specs
        like = {n: torch.empty(layout.piece(n).shape, dtype=specs[n].dtype, device="meta") for n in specs}
    return binding, inner_of(tx.arguments["tx"]), like
