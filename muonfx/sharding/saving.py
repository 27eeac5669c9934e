"""States of sharded transforms for checkpoints: what a rank holds, said in terms of the whole."""

from __future__ import annotations

from typing import Any

import torch

from muonfx.core import Transform
from muonfx.sharding.binding import Binding
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.layout import Layout
from muonfx.sharding.offload.transform import inner_of, store_of
from muonfx.sharding.state import local_state, logical_state
from muonfx.sharding.transform import Sharded, bind, settings_of
from muonfx.tree import PyTree

__all__ = ["local", "logical"]


def logical(tx: Transform, state: PyTree, params: PyTree = None) -> PyTree:
    """Say of every leaf of a sharded transform's state which part of which whole it is.

    ``muonfx.checkpoint.save(path, logical(tx, state), tx=tx, group=group)`` stores whole tensors, under the names that
    one process would give them; they load under any layout, on any number of ranks, or in one process.

    Args:
        tx: what `sharded` made.
        state: this rank's state.
        params: the local parameters, where ``tx`` has not met any yet.

    Returns:
        A tree like the state's, of `torch.distributed.tensor.DTensor`, `muonfx.checkpoint.FlatPiece`, and tensors that
        are the same on all ranks.

    Raises:
        TypeError: ``tx`` is not sharded.

    >>> import muonfx as mfx
    >>> params = {"w": torch.ones(2, 2)}
    >>> layout = mfx.sharding.zero(params, 1, partition="flat")
    >>> tx = mfx.sharding.sharded(mfx.momentum(), layout)
    >>> logical(tx, tx.init(layout.shard(params))).trace["w"]
    FlatPiece(elements 0 to 4 of (2, 2), torch.float32)
    """
    binding, inner, like = _met(tx, params)
    return logical_state(binding, inner, like, state)


def local(tx: Transform, state: PyTree, params: PyTree = None) -> PyTree:
    """This rank's state that a logical one describes: the inverse of `logical`.

    ``state = local(tx, muonfx.checkpoint.load(path, like=logical(tx, tx.init(mine)), tx=tx, group=group))``.

    Args:
        tx: what `sharded` made.
        state: what `logical` returned, or what was loaded like it.
        params: the local parameters, where ``tx`` has not met any yet.

    Raises:
        TypeError: ``tx`` is not sharded.

    >>> import muonfx as mfx
    >>> params = {"w": torch.ones(2, 2)}
    >>> layout = mfx.sharding.zero(params, 1, partition="flat")
    >>> tx = mfx.sharding.sharded(mfx.momentum(), layout)
    >>> local(tx, logical(tx, tx.init(layout.shard(params)))).trace["w"]
    tensor([0., 0., 0., 0.])
    """
    binding, inner, like = _met(tx, params)
    binding.note_load()
    return local_state(binding, inner, like, state)


def _met(tx: Transform, params: PyTree) -> tuple[Binding, Transform, Any]:
    if not isinstance(tx, Sharded):
        raise TypeError(f"tx must be what muonfx.sharding.sharded made, found {tx!r}")
    layout: Layout = tx.arguments["layout"]
    if params is not None:
        layout = layout.of(params)
    elif layout.specs is None:
        known = [bound for _, bound in layout.derived.get("of", [])]
        if len(known) != 1:
            raise ShardingError("params: a replicated layout has to be told which parameters are meant")
        layout = known[0]
    binding = bind(layout, settings_of(tx), store_of(tx.arguments["tx"]))
    like = params if params is not None else binding.likes.get(inner_of(tx.arguments["tx"]).treedef)
    if like is None:
        specs = layout._specs
        like = {n: torch.empty(layout.piece(n).shape, dtype=specs[n].dtype, device="meta") for n in specs}
    return binding, inner_of(tx.arguments["tx"]), like
