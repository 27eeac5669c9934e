"""Find which ranks hold each leaf of a sharded optimizer state, and convert the state for checkpoints and back.

A leaf is sharded like its parameter, or each owner (the rank that computes a matrix) has it for its matrices, or it is
equal on all ranks, such as a counter. This placement is found by running `init` on meta tensors, with a placeholder for
each inner transform, never by the names of fields.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.chain import chain_entries
from muonfx.core.visit import Placeholder, Visit, fixed, is_wrapper, record_calls, root_visit
from muonfx.placement.arguments import meta_like
from muonfx.placement.placed import execution_of, matrix_stages
from muonfx.sharding.binding import Binding
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import RunPlan
from muonfx.sharding.plan.cost import run_of
from muonfx.sharding.plan.matrix_shards import MatrixShard
from muonfx.sharding.shards.boxes import Box
from muonfx.sharding.shards.dtensors import (
    PLAIN,
    dtensor_of,
    global_shard,
    is_dtensor,
    local_of,
    local_tree,
    parameter_like,
)
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.tree import PyTree
from muonfx.tree.members import parameters_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class LeafPlacement:
    """Where one leaf of the optimizer state is: which ranks hold it, its whole shape, and its shape on this rank."""

    name: str | None
    """The parameter to which the leaf belongs; None for a leaf that is equal on all ranks, such as a counter."""
    shape: tuple[int, ...]
    """The shape of the whole leaf."""
    dtype: torch.dtype
    owned: bool = False
    """True if each owner (the rank that computes a matrix) holds the leaf for its matrices, and other ranks None."""
    shards: tuple[MatrixShard, ...] = ()
    """For an owned leaf, the matrices that each owner computes."""
    shard: MatrixShard | None = None
    """For an owned leaf, the matrices of the parameter that this rank computes; None if it computes none."""
    local: tuple[int, ...] | None = None
    """The shape of the leaf on this rank; None if the leaf is None on this rank."""


def _placements(binding: Binding, root: Visit) -> PyTree:
    """Return a tree like the state of a transform, with a `LeafPlacement` (ranks and shapes) for each leaf."""
    plans: dict[Visit, RunPlan] = {}
    if not binding.holds_all:
        for stage in matrix_stages(root):
            plan = binding.plan(run_of(stage), stage[0].params)
            plans |= dict.fromkeys(stage, plan)
    return _of_visit(binding, root, plans)


def _of_visit(binding: Binding, visited: Visit, plans: Mapping[Visit, RunPlan]) -> PyTree:
    """Return `_placements` for one transform and those that it calls. `plans` gives the owners of each matrix stage.

    Three kinds of transforms have three kinds of state: a chain, a wrapper with its own state, and any other.
    """
    entries = chain_entries(visited.tx)
    if entries is not None:  # a chain: a dict by member
        states = [_of_visit(binding, member, plans) for member in visited.calls]
        return dict(zip(entries, states, strict=True))
    if is_wrapper(visited.tx):  # its own leaves, and a placeholder for the state of each inner transform
        described = _of_leaves(binding, record_calls(visited.tx, visited.params).state, visited.params)
        leaves, treedef = tree.flatten(described)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Placeholder):
                leaves[index] = _of_visit(binding, visited.calls[leaf.index], plans)
        return tree.unflatten(treedef, leaves)
    state = fixed(visited).functions.init(visited.params)
    # A transform that runs on the gathered tree has the same whole state on all ranks, without shards of parameters.
    is_gathered = execution_of(visited) == "whole tree" and not binding.holds_all
    return _of_leaves(binding, state, {} if is_gathered else visited.params, plans.get(visited))


def _of_leaves(binding: Binding, state: PyTree, params: PyTree, plan: RunPlan | None = None) -> PyTree:
    """Return a tree like ``state`` with a `LeafPlacement` for each leaf; ``plan`` gives the owners of matrices."""
    shape_of = {name: leaf.shape for name, leaf in tree.named_leaves(params) if leaf is not None}
    leaves, treedef = tree.flatten(state)
    names: Sequence[str | None] = [None] * len(leaves)
    if tree.leaves(params):
        names = parameters_of(state, params)
    for index, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        if not isinstance(leaf, Tensor):
            continue
        placement = LeafPlacement(name, tuple(leaf.shape), leaf.dtype)
        if name is not None and plan is not None:
            shards = plan.shards_of.get(name, ())
            computed = [shard for shard in shards if shard.owner in (None, binding.layout.rank)]
            shard = computed[0] if computed else None
            placement = replace(placement, owned=True, shards=shards, shard=shard)
        elif name in shape_of and leaf.shape != shape_of[name]:
            placement = replace(placement, name=None)  # the same on all ranks, although it belongs to a parameter
        leaves[index] = placement
    return tree.unflatten(treedef, leaves)


def describe_state(binding: Binding, tx: Transform, params: PyTree) -> list[LeafPlacement | None]:
    """Return a list with the placement (ranks and shapes) of each leaf of a state. A leaf that is None has None."""
    key = tx.treedef, tuple(tree.names(params))
    if key not in binding.placements:
        binding.placements[key] = _describe(binding, tx, params)
    return binding.placements[key]


def _describe(binding: Binding, tx: Transform, params: PyTree) -> list[LeafPlacement | None]:
    """Compute the placements on meta tensors, with the shape of each leaf on this rank."""
    local_params = binding.local_like(params)
    local_leaves = tree.leaves(binding.init(tx, local_params))
    with warnings.catch_warnings():  # the first `init` has already warned
        warnings.simplefilter("ignore")
        described = tree.leaves(_placements(binding, root_visit(tx, binding.global_like(local_params))))
    for index, (placement, leaf) in enumerate(zip(described, local_leaves, strict=True)):
        if not isinstance(placement, LeafPlacement):
            described[index] = None
        elif leaf is not None:
            described[index] = replace(placement, local=tuple(leaf.shape))
    return described


def state_to_dtensors(binding: Binding, tx: Transform, params: PyTree, state: PyTree, old: PyTree = None) -> PyTree:
    """Turn each leaf of an optimizer state into a DTensor if its parameter is a DTensor.

    `old` is the previous state. DTensors that a step updated in place are taken from it, because new ones take time.
    """
    leaves, treedef = tree.flatten(state)
    old_leaves: Sequence[Any] = [None] * len(leaves)
    if old is not None:
        old_leaves = tree.leaves(old)
    for index, (placed, leaf) in enumerate(zip(describe_state(binding, tx, params), leaves, strict=True)):
        if leaf is not None and getattr(old_leaves[index], "_local_tensor", None) is leaf:
            leaves[index] = old_leaves[index]
        else:
            leaves[index] = leaf_to_dtensor(binding, placed, leaf)
    return tree.unflatten(treedef, leaves)


def leaf_to_dtensor(binding: Binding, placed: LeafPlacement | None, leaf: Tensor | None) -> Tensor | None:
    """Turn one leaf of an optimizer state into a DTensor if its parameter is one. `placed` is its placement."""
    layout = binding.layout
    if placed is None or placed.name is None or placed.name not in layout.dtensors or is_dtensor(leaf):
        return leaf
    if not placed.owned:
        return None if leaf is None else parameter_like(layout, placed.name, leaf)
    if leaf is None and placed.local is not None:
        return None  # the transform has no state for this parameter
    return _owned_to_dtensor(layout, placed, placed.name, leaf)


def without_dtensors(binding: Binding, tx: Transform, params: PyTree, state: PyTree) -> PyTree:
    """Replace each DTensor in an optimizer state by the local tensor that `update` uses on this rank."""
    if not binding.layout.dtensors:
        return state
    leaves, treedef = tree.flatten(state)
    if PLAIN.issuperset(map(type, leaves)):
        return state
    described = describe_state(binding, tx, params)
    if len(described) != len(leaves):
        return tree.map(local_of, state)  # the state of another transform: the check of the state reports it
    for index, (placed, leaf) in enumerate(zip(described, leaves, strict=True)):
        if not is_dtensor(leaf):
            continue
        local = leaf._local_tensor
        if placed is not None and placed.owned:  # None on ranks that compute none of its matrices
            local = None if placed.local is None else local.view(placed.local)
        leaves[index] = local
    return tree.unflatten(treedef, leaves)


def global_state(binding: Binding, tx: Transform, params: PyTree, state: PyTree) -> PyTree:
    """Convert a state to its form for checkpoints, in which each leaf stores its position in the whole tensor."""
    leaves, treedef = tree.flatten(state)
    device = tree.device_of(state)
    for index, placed in enumerate(describe_state(binding, tx, params)):
        leaves[index] = global_leaf(binding, device, placed, leaves[index])
    return tree.unflatten(treedef, leaves)


def global_leaf(
    binding: Binding, device: torch.device, placed: LeafPlacement | None, leaf: Tensor | None
) -> Tensor | FlatShard | None:
    """Convert one leaf of a state for a checkpoint: return a DTensor, a `FlatShard` or a whole tensor."""
    if placed is None or placed.name is None:
        return leaf
    if not placed.owned:
        return None if leaf is None else global_shard(binding.layout, placed.name, leaf)
    if placed.shard is None:
        return FlatShard(placed.shape, 0, torch.empty(0, dtype=placed.dtype, device=device))
    if placed.shard.owner is None or leaf is None:
        return leaf
    return FlatShard(placed.shape, interval_of(placed, placed.shard)[0], leaf.reshape(-1))


def interval_of(placed: LeafPlacement, shard: MatrixShard) -> tuple[int, int]:
    """Return where the matrices of one owner start and end in a leaf of the state, if it is flattened."""
    # A leaf of the state may have another number of elements for each matrix than the parameter has.
    leaf_numel = prod(placed.shape)
    param_numel = max(prod(shard.whole), 1)
    return shard.start * leaf_numel // param_numel, shard.stop * leaf_numel // param_numel


def local_state(binding: Binding, tx: Transform, params: PyTree, values: PyTree) -> PyTree:
    """Convert a state from its form for checkpoints to the local tensors of this rank. It undoes `global_state`."""
    meta = binding.init(tx, meta_like(local_tree(params)))
    leaves, treedef = tree.flatten(values)
    for index, (meta_leaf, leaf) in enumerate(zip(tree.leaves(meta), leaves, strict=True)):
        if meta_leaf is None:
            leaves[index] = None
        elif isinstance(leaf, FlatShard):
            leaves[index] = leaf.data.view(meta_leaf.shape)
        else:
            leaves[index] = local_of(leaf)
    state = tree.unflatten(treedef, leaves)
    if binding.layout.dtensors:
        return state_to_dtensors(binding, tx, params, state)
    return state


# ------------------------------------------------------------------------------------------------------ state of owners
# torch supports DTensors on a subset of ranks: on the other ranks such a DTensor has no elements, and
# torch.distributed.checkpoint neither reads nor writes it there.


def _owned_to_dtensor(layout: Layout, placed: LeafPlacement, name: str, local: Tensor | None) -> Tensor | None:
    """Turn the leaf of a state that owners hold for their matrices into a DTensor.

    It has the mesh of the parameter called `name`, or the one rank that computes all matrices. Ranges of a stack that
    no placements express stay local tensors on their owners and None elsewhere.
    """
    from torch.distributed.tensor import Replicate

    spec = layout.dtensors[name]
    shape = placed.shape
    stride = torch.empty(shape, device="meta").stride()
    owners = {shard.owner for shard in placed.shards}
    if owners <= {None}:  # every rank computes all matrices
        assert local is not None
        return dtensor_of(local, spec.mesh, [Replicate()] * spec.mesh.ndim, shape, stride)
    if len(placed.shards) == 1:
        mesh = _mesh_of_owner(layout, placed.shards[0].the_owner)
        local = _empty_on(mesh, placed.dtype) if local is None else local.view(shape)
        return dtensor_of(local, mesh, [Replicate()], shape, stride)
    if not own_what_they_hold(layout, name, placed.shards, shape):
        return local
    if local is None:
        local = _empty_on(spec.mesh, placed.dtype)
    return dtensor_of(local.reshape(-1, *shape[1:]), spec.mesh, spec.placements, shape, stride)


def _mesh_of_owner(layout: Layout, owner: int) -> DeviceMesh:
    """Return a mesh of one rank. It needs no process group."""
    from torch.distributed.device_mesh import DeviceMesh

    if owner not in layout.mesh_of_owner:
        assert layout.group is not None
        device_type = next(iter(layout.dtensors.values())).mesh.device_type
        global_rank = dist.get_global_rank(layout.group, owner)
        layout.mesh_of_owner[owner] = DeviceMesh(device_type, [global_rank], _init_backend=False)
    return layout.mesh_of_owner[owner]


def own_what_they_hold(layout: Layout, name: str, shards: Sequence[MatrixShard], shape: Sequence[int]) -> bool:
    """Return True if every rank computes exactly the matrices that it holds, of a parameter that stacks matrices.

    If the parameter, or its leaf of the state with this `shape`, is not split along dim 0 alone, return False.
    """
    spec = layout.dtensors[name]
    is_split_elsewhere = any(getattr(placement, "dim", 0) for placement in spec.placements)
    if is_split_elsewhere or tuple(shape[:1]) != tuple(spec.shape[:1]):
        return False
    boxes_of: dict[int | None, tuple[Box, ...]] = {shard.owner: shard.position.boxes for shard in shards}
    for rank in range(layout.size):
        if layout.position(name, rank).boxes != boxes_of.get(rank, ()):
            return False
    return len(boxes_of) == len(shards)


def _empty_on(mesh: DeviceMesh, dtype: torch.dtype) -> Tensor:
    """Return a tensor without elements on this rank's device of a mesh."""
    device = mesh.device_type
    if device != "cpu":
        device = f"{device}:{torch.get_device_module(device).current_device()}"
    return torch.empty(0, dtype=dtype, device=device)
