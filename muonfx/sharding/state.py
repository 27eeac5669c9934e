"""The placement of the leaves of a sharded state: shards like a parameter's, states of matrices at owners, or counters.

The placement is found by running `init` on meta tensors, with a placeholder for each inner transform, never by the
names of fields.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.program.buckets import parameters_of
from muonfx.program.lower import Placeholder, state_around
from muonfx.program.nodes import Around, ChainNode, Node, Stage, WholeTree
from muonfx.program.placement import meta_like
from muonfx.sharding.binding import Binding
from muonfx.sharding.dtensors import dtensor_of, global_piece, is_dtensor, local_of, local_tree, parameter_like
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import RunPlan
from muonfx.sharding.plan.shares import Share
from muonfx.sharding.shards import FlatPiece
from muonfx.tree import PyTree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "LeafPlacement",
    "describe_state",
    "interval_of",
    "leaf_to_dtensor",
    "local_state",
    "global_leaf",
    "global_state",
    "own_what_they_hold",
    "state_to_dtensors",
    "without_dtensors",
]


@dataclass(frozen=True)
class LeafPlacement:
    """The placement of one state leaf; itself a leaf of a tree."""

    name: str | None
    """The parameter to which the leaf belongs; None for a leaf that is equal on all ranks, such as a counter."""
    owned: bool
    """True if only the owners of matrices hold the leaf."""
    share: Share | None
    """For an owned leaf, this rank's share of the parameter; None if it has none."""
    shares: tuple[Share, ...]
    """The shares of all owners."""
    shape: tuple[int, ...]
    """The shape of the whole leaf."""
    dtype: torch.dtype
    local: tuple[int, ...] | None = None
    """The shape of this rank's local tensor; None if it has none."""


def _held(binding: Binding, node: Node) -> PyTree:
    """Describe the state of a program node, leaf by leaf, in the structure of the state."""
    if isinstance(node, Stage):
        return _held_by_stage(binding, node)[node.members[0].name]
    if isinstance(node, ChainNode):
        state: dict[str, PyTree] = {}
        for names, child in node.entries:
            state |= _held_by_stage(binding, child) if isinstance(child, Stage) else {names[0]: _held(binding, child)}
        return state
    if isinstance(node, Around):
        state, _ = state_around(node.tx, node.like)
        described = _described(binding, state, node.like)
        held = [_held(binding, child) for child in node.children]
        return tree.map(lambda leaf: held[leaf.place] if isinstance(leaf, Placeholder) else leaf, described)
    gathers = isinstance(node, WholeTree) and not binding.holds_all
    return _described(binding, node.tx.functions.init(node.like), {} if gathers else node.like)


def _held_by_stage(binding: Binding, stage: Stage) -> dict[str, PyTree]:
    """Describe the states of a matrix stage's transforms, which the owners hold unless this rank holds all."""
    run = tuple((member.name, member.node.tx) for member in stage.members)
    plan = None if binding.holds_all else binding.plan(run, stage.like)
    return {name: _described(binding, tx.functions.init(stage.like), stage.like, plan) for name, tx in run}


def _described(binding: Binding, state: PyTree, params: PyTree, plan: RunPlan | None = None) -> PyTree:
    """Describe each leaf of a state by its parameter, if it has the parameter's shape or an owner."""
    by_name = dict(zip(tree.names(params), tree.leaves(params), strict=True))
    leaves, treedef = tree.flatten(state)
    described: list[Any] = []
    for owner, leaf in zip(parameters_of(state, params) if by_name else [None] * len(leaves), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            described.append(leaf)
            continue
        name, param = owner, None if owner is None else by_name[owner]
        owned = plan is not None and name is not None
        if not owned and param is not None and leaf.shape != param.shape:
            name = None
        of_all = plan.shares_of.get(name, ()) if plan is not None and name is not None else ()
        share = next((share for share in of_all if share.owner in (None, binding.layout.rank)), None)
        described.append(LeafPlacement(name, owned, share, of_all, tuple(leaf.shape), leaf.dtype))
    return tree.unflatten(treedef, described)


def describe_state(binding: Binding, tx: Transform, params: PyTree) -> list[LeafPlacement | None]:
    """Describe the leaves of a state, in order; None for a leaf that is None."""

    def describe() -> list[LeafPlacement | None]:
        local = binding.local_like(params)
        here = tree.leaves(binding.executor.init(tx, local))
        with warnings.catch_warnings():  # the first `init` has already warned
            warnings.simplefilter("ignore")
            found = tree.leaves(_held(binding, binding.executor.program(tx, local)))
        return [
            replace(what, local=None if leaf is None else tuple(leaf.shape))
            if isinstance(what, LeafPlacement)
            else None
            for what, leaf in zip(found, here, strict=True)
        ]

    return binding.once(("held", tx.treedef, tuple(tree.names(params))), describe)


def state_to_dtensors(binding: Binding, tx: Transform, params: PyTree, state: PyTree, old: PyTree = None) -> PyTree:
    """Wrap the leaves of a state that belong to DTensor parameters as DTensors.

    A DTensor of the old state whose local tensor was updated in place is used again, because wrapping takes time.
    """
    leaves, treedef = tree.flatten(state)
    before = [None] * len(leaves) if old is None else tree.leaves(old)
    rows = zip(describe_state(binding, tx, params), leaves, before, strict=True)
    wrapped = [
        was if is_dtensor(was) and local_of(was) is leaf else leaf_to_dtensor(binding, what, leaf)
        for what, leaf, was in rows
    ]
    return tree.unflatten(treedef, wrapped)


def leaf_to_dtensor(binding: Binding, what: LeafPlacement | None, leaf: Tensor | None) -> Tensor | None:
    """Wrap one leaf for `state_to_dtensors`."""
    if what is None or what.name is None or is_dtensor(leaf) or what.name not in binding.layout.dtensors:
        return leaf
    if not what.owned:
        return None if leaf is None else parameter_like(binding.layout, what.name, leaf)
    if leaf is None and what.local is not None:
        return None  # the transform keeps no state for this parameter
    like = torch.empty(what.shape, dtype=what.dtype, device="meta")
    if len(what.shares) == 1 and what.shares[0].owner is not None:
        return _at_owner(binding.layout, what.shares[0].owner, leaf, like)
    found = _like_parameter(binding.layout, what.name, what.shares, leaf, like)
    # Ranges of a stack that no placements express stay local tensors on their owners and None elsewhere.
    return leaf if found is None else found


def without_dtensors(binding: Binding, tx: Transform, params: PyTree, state: PyTree) -> PyTree:
    """Unwrap the DTensors of a state: the inverse of `state_to_dtensors`."""
    if not binding.layout.dtensors:
        return state
    leaves, treedef = tree.flatten(state)
    if not any(is_dtensor(leaf) for leaf in leaves):
        return state
    described = describe_state(binding, tx, params)
    if len(described) != len(leaves):
        return tree.map(local_of, state)  # the state of another transform: the check of the state reports it
    return tree.unflatten(treedef, [_from_dtensor(what, leaf) for what, leaf in zip(described, leaves, strict=True)])


def _from_dtensor(what: LeafPlacement | None, leaf: Tensor | FlatPiece | None) -> Tensor | FlatPiece | None:
    """Unwrap one leaf for `without_dtensors`."""
    if not is_dtensor(leaf) or what is None or not what.owned:
        return local_of(leaf)
    return None if what.local is None else leaf._local_tensor.view(what.local)


def global_state(binding: Binding, tx: Transform, params: PyTree, state: PyTree) -> PyTree:
    """Return a state in which every leaf records its position in the whole."""
    leaves, treedef = tree.flatten(state)
    pairs = zip(describe_state(binding, tx, params), leaves, strict=True)
    device = tree.device_of(state)
    return tree.unflatten(treedef, [global_leaf(binding, device, what, leaf) for what, leaf in pairs])


def global_leaf(
    binding: Binding, device: torch.device, what: LeafPlacement | None, leaf: Tensor | None
) -> Tensor | FlatPiece | None:
    """Convert one leaf for `global_state`."""
    if what is None or what.name is None:
        return leaf
    if not what.owned:
        return None if leaf is None else global_piece(binding.layout, what.name, leaf)
    if what.share is None:
        return FlatPiece(what.shape, 0, torch.empty(0, dtype=what.dtype, device=device))
    if what.share.owner is None or leaf is None:
        return leaf
    return FlatPiece(what.shape, interval_of(what, what.share)[0], leaf.reshape(-1))


def interval_of(what: LeafPlacement, share: Share) -> tuple[int, int]:
    """Return the interval of a flattened state leaf that the owner of a share holds."""
    each = max(prod(share.whole), 1)
    return share.start * prod(what.shape) // each, share.stop * prod(what.shape) // each


def local_state(binding: Binding, tx: Transform, params: PyTree, values: PyTree) -> PyTree:
    """Return the local state that a global state describes."""
    meta = binding.executor.init(tx, meta_like(local_tree(params)))
    leaves, treedef = tree.flatten(values)

    def at(wanted: Tensor | None, leaf: Tensor | FlatPiece | None) -> Tensor | None:
        if wanted is None:
            return None
        return leaf.data.view(wanted.shape) if isinstance(leaf, FlatPiece) else local_of(leaf)

    local = [at(wanted, leaf) for wanted, leaf in zip(tree.leaves(meta), leaves, strict=True)]
    state = tree.unflatten(treedef, local)
    return state_to_dtensors(binding, tx, params, state) if binding.layout.dtensors else state


# ------------------------------------------------------------------------------------------------------ state of owners
# torch supports DTensors on a subset of ranks: on the other ranks such a DTensor has no elements, and
# torch.distributed.checkpoint neither reads nor writes it there.


def _at_owner(layout: Layout, owner: int, local: Tensor | None, like: Tensor) -> DTensor:
    """Wrap a tensor that one rank holds as a DTensor on a mesh of this rank alone."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate

    def make() -> DeviceMesh:
        assert layout.group is not None
        kind = next(iter(layout.dtensors.values())).mesh.device_type
        # A mesh of one rank needs no process group.
        return DeviceMesh(kind, [dist.get_global_rank(layout.group, owner)], _init_backend=False)

    mesh = layout.once(("mesh of an owner", owner), make)
    local = _nothing(mesh, like) if local is None else local.view(like.shape)
    return dtensor_of(local, mesh, [Replicate()], like.shape, like.stride())


def _like_parameter(
    layout: Layout, name: str, shares: Sequence[Share], local: Tensor | None, like: Tensor
) -> DTensor | None:
    """Wrap state of several owners as a DTensor on the parameter's mesh, or return None if no placements fit."""
    from torch.distributed.tensor import Replicate

    spec = layout.dtensors[name]
    if all(share.owner is None for share in shares):
        assert local is not None
        return dtensor_of(local, spec.mesh, [Replicate()] * spec.mesh.ndim, like.shape, like.stride())
    if not own_what_they_hold(layout, name, shares, like.shape):
        return None
    local = (_nothing(spec.mesh, like) if local is None else local).reshape(-1, *like.shape[1:])
    return dtensor_of(local, spec.mesh, spec.placements, like.shape, like.stride())


def own_what_they_hold(layout: Layout, name: str, shares: Sequence[Share], shape: Sequence[int]) -> bool:
    """True if every rank owns exactly the range of a stack's first dim that it holds, and the state has this dim."""
    spec = layout.dtensors[name]
    if tuple(shape[:1]) != tuple(spec.shape[:1]) or any(getattr(placement, "dim", 0) for placement in spec.placements):
        return False
    by_owner = {share.owner: share for share in shares}
    for rank in range(layout.size):
        piece, share = layout.piece(name, rank), by_owner.get(rank)
        if piece.boxes != (() if share is None else share.piece.boxes):
            return False
    return len(by_owner) == len(shares)


def _nothing(mesh: DeviceMesh, like: Tensor) -> Tensor:
    kind = mesh.device_type
    device = torch.device("cpu" if kind == "cpu" else f"{kind}:{torch.get_device_module(kind).current_device()}")
    return torch.empty(0, dtype=like.dtype, device=device)
