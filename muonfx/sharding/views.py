"""Conversion between the local state of a sharded transform and its global state for checkpoints."""

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
    """Convert this rank's state to one whose leaves record their position in the whole tensors.

    `muonfx.checkpoint.save` calls this if it is given ``tx``, and stores whole tensors under the names of one process;
    they load under any layout, on any number of ranks. A state that is global already is returned unchanged.

    Args:
        tx: a transform that `sharded` built.
        state: this rank's state.
        params: the local parameters; required if ``tx`` has not been used yet.

    Returns:
        A tree like the state, of `torch.distributed.tensor.DTensor`, `muonfx.checkpoint.FlatPiece`, and tensors that
        are the same on all ranks.

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
    """Convert a global state to this rank's state: the inverse of `to_global`.

    `muonfx.checkpoint.load` calls this if it is given ``tx``. A local state is returned unchanged. All ranks must load,
    or none: the next update compares replicas of the state.

    Args:
        tx: a transform that `sharded` built.
        state: a result of `to_global`, or a state that was loaded like one.
        params: the local parameters; required if ``tx`` has not been used yet.

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
    """True if any leaf of a tree records its position in the whole, as the leaves of `to_global` do."""
    # A global tree without a FlatPiece has DTensors and whole tensors only, which `to_global` leaves unchanged.
    return any(isinstance(leaf, FlatPiece) for leaf in tree.leaves(values))


def check_local(layout: Layout, described: Sequence[LeafPlacement | None], state: PyTree) -> None:
    """Require the number and the shapes of leaves that a state has under a layout."""
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
    """Return the binding of a sharded transform, its inner transform, and meta tensors of the local parameters."""
    if not isinstance(tx, Sharded):
        raise TypeError(f"tx must be what muonfx.sharding.sharded made, found {tx!r}")
    layout = tx.layout
    binding = bind(layout, settings_of(tx), store_of(tx.arguments["tx"]))
    like = params if params is not None else binding.likes.get(inner_of(tx.arguments["tx"]).treedef)
    if like is None:
        specs = layout.specs
        like = {n: torch.empty(layout.piece(n).shape, dtype=specs[n].dtype, device="meta") for n in specs}
    return binding, inner_of(tx.arguments["tx"]), like
