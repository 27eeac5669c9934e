"""Find which ranks hold each leaf of a sharded optimizer state, and convert the state for checkpoints and back.

A leaf is sharded like its parameter, or each owner (the rank that computes a matrix) has it for its matrices, or it is
equal on all ranks, such as a counter. This placement is found by running the `init` of each transform on meta tensors,
never by the names of fields.

A state has one of three forms. The momentum of a parameter of shape (4, 8), of which rank 1 of two has the last rows:

- *local*, for updates: the tensor of shape (2, 8) on rank 1. `local_state` converts the other forms to it.
- with *DTensors*, if the parameters are DTensors: a DTensor of shape (4, 8). `state_to_dtensors` builds it.
- *global*, for checkpoints: a DTensor too or, for a layout without DTensors, a `FlatShard`, which has the values with
  their position, "elements 16 to 32 of (4, 8)". `global_state` converts the local form to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.visit import Path, Visit, fixed, visit
from muonfx.placement.placed import execution_of, matrix_stages
from muonfx.sharding.binding import Binding, by_structure
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import RunPlan
from muonfx.sharding.plan.cost import run_of
from muonfx.sharding.plan.matrix_shards import MatrixShard
from muonfx.sharding.shards.dtensors import (
    are_plain,
    dtensor_of,
    global_shard,
    is_dtensor,
    local_of,
    parameter_like,
)
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.shards.remembered import remembered
from muonfx.tree import PyTree
from muonfx.tree.members import parameters_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


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
    path: str = ""
    """The name of the leaf in the state, such as "2.scale_by_adam.count"."""


@by_structure
def describe_state(binding: Binding, tx: Transform, params: PyTree) -> list[LeafPlacement | None]:
    """Return a placement for each leaf of a state: which ranks hold it, its whole shape, and its shape on this rank.

    For example, a momentum of shape (4, 8) is sharded like the parameter "w", and a step count is equal on all ranks.
    Where no rank has a tensor, the placement is None. `init` runs twice on meta tensors, which have shapes without
    values: on shards, for the shapes on this rank, and on whole parameters, for the whole shapes.
    """
    # 1. The leaves of this rank. Not within the block below: this may be the first `init` that warns.
    state_on_rank = binding.init(tx, binding.local_like(params))
    # 2. The whole leaves.
    with warnings.catch_warnings():  # step 1 has already warned
        warnings.simplefilter("ignore")
        placement_at = _placements_of_all(binding, tx, params)
    # 3. Both for each leaf, which has the same path in both states.
    described: list[LeafPlacement | None] = []
    for path, (name, leaf) in zip(
        tree.paths(state_on_rank), tree.named_leaves(state_on_rank), strict=True
    ):
        placement = placement_at.get(path)
        if placement is not None:
            local_shape = None if leaf is None else tuple(leaf.shape)
            placement = replace(placement, local=local_shape, path=name)
        described.append(placement)
    return described


def _placements_of_all(
    binding: Binding, tx: Transform, params: PyTree
) -> dict[Path, LeafPlacement]:
    """Return which ranks hold each tensor in the state of a transform, by its path in the state.

    A path is such as ``("muon", "momentum", "trace", "w")``. Each transform is treated by itself: `tx`, and those that
    it calls. `visit` lists them, each with the parameters that it receives and the path of its own state.
    """
    # The paths in `binding.visits` may be of another tree with the same names, such as a flat dict for a nested one.
    visits = visit(tx, binding.global_like(params))
    plan_of = _plans_of(binding, visits[0])
    placement_at: dict[Path, LeafPlacement] = {}
    # Outer transforms come first. Their state contains the state of inner ones, whose own placements replace theirs.
    for visited in visits:
        placement_at |= _placements(binding, visited, plan_of.get(visited))
    return placement_at


def _plans_of(binding: Binding, root: Visit) -> dict[Visit, RunPlan]:
    """Return, for each transform that needs whole matrices, the plan with the rank that computes each of its matrices.

    `root` is the visit of the outermost transform, from which the others are found.
    """
    plan_of: dict[Visit, RunPlan] = {}
    if binding.holds_all:  # a single rank, which needs no plan
        return plan_of
    # A stage has the visits of neighbours in a chain, such as `orthogonalize` and `normalize_neurons`, with one plan.
    for stage in matrix_stages(root):
        params = stage[0].params
        plan = binding.plan(run_of(stage), tree.names(params), tree.device_of(params))
        for visited in stage:
            plan_of[visited] = plan
    return plan_of


def _placements(
    binding: Binding, visited: Visit, plan: RunPlan | None
) -> dict[Path, LeafPlacement]:
    """Return which ranks hold each tensor in the state of one transform, by its path in the outermost state.

    `visited` is the transform, with its parameters (whole, on the meta device) and the path of its state. `plan` says
    which rank computes each matrix, if the transform needs whole matrices.
    """
    path_of_state = visited.state
    if (
        path_of_state is None
    ):  # a transform that calls this one stores its state in another form, and describes it
        return {}
    # The state of this transform alone, with whole leaves.
    state = fixed(visited).functions.init(visited.params)
    leaves = tree.leaves(state)
    # For each leaf, the parameter to which it belongs.
    param_names: Sequence[str | None] = [None] * len(leaves)
    if not _is_equal_on_all_ranks(binding, visited, state):
        param_names = parameters_of(state, visited.params)
    named_params = tree.named_leaves(visited.params)
    shape_of = {name: param.shape for name, param in named_params if param is not None}
    placements: dict[Path, LeafPlacement] = {}
    for path_in_state, name, leaf in zip(tree.paths(state), param_names, leaves, strict=True):
        if isinstance(leaf, Tensor):
            path = (*path_of_state, *path_in_state)
            placements[path] = _placement_of_leaf(leaf, name, shape_of, plan)
    return placements


def _placement_of_leaf(
    leaf: Tensor, name: str | None, shape_of: Mapping[str, torch.Size], plan: RunPlan | None
) -> LeafPlacement:
    """Return the placement of a leaf of the state, which is whole here: on the owners of matrices, sharded, or equal.

    Args:
        leaf: the whole leaf.
        name: the parameter to which it belongs; None for a leaf such as a counter.
        shape_of: the shapes of the parameters by name.
        plan: has the owners of matrices (the ranks that compute them), if the transform needs whole matrices.
    """
    shape = tuple(leaf.shape)
    # 1. Each owner holds it for its matrices.
    if name is not None and plan is not None:
        shards = plan.shards_of.get(name, ())
        shard_of_rank: MatrixShard | None = None
        for shard in shards:  # at most one is computed by this rank
            if shard.owner in (None, plan.rank):
                shard_of_rank = shard
        return LeafPlacement(
            name, shape, leaf.dtype, owned=True, shards=shards, shard=shard_of_rank
        )
    # 2. It is sharded like its parameter, such as a momentum.
    if name is not None and leaf.shape == shape_of.get(name, leaf.shape):
        return LeafPlacement(name, shape, leaf.dtype)
    # 3. Every rank has it, such as a count, or a norm of a parameter, which has another shape.
    return LeafPlacement(None, shape, leaf.dtype)


def _is_equal_on_all_ranks(binding: Binding, visited: Visit, state: PyTree) -> bool:
    """Return True if the whole state of a transform is equal on all ranks."""
    if execution_of(visited) == "whole tree" and not binding.holds_all:
        return True  # each rank runs it on the gathered tree
    # The class of the state may declare it, for example `LeafMonitorState`. Shapes do not suffice: the value of a 0-d
    # parameter has the shape of a state that is sharded like the parameter.
    return bool(getattr(state, "is_equal_on_all_ranks", False))


def state_to_dtensors(
    binding: Binding, tx: Transform, params: PyTree, state: PyTree, old: PyTree = None
) -> PyTree:
    """Turn each leaf of an optimizer state into a DTensor if its parameter is a DTensor.

    The momentum of a DTensor becomes a DTensor with the same mesh and placements; a step count stays a tensor. `old` is
    the state before the step. If the step updated a tensor in place, `old` already has a DTensor of it, which is
    returned, because to build one takes time.
    """
    leaves, treedef = tree.flatten(state)
    old_leaves: Sequence[Any] = [None] * len(leaves)
    if old is not None:
        old_leaves = tree.leaves(old)
    # For each leaf: the parameter to which it belongs, and which ranks hold it.
    placements = describe_state(binding, tx, params)
    for index, (placement, old_leaf) in enumerate(zip(placements, old_leaves, strict=True)):
        leaves[index] = leaf_to_dtensor(binding, placement, leaves[index], old_leaf)
    return tree.unflatten(treedef, leaves)


def leaf_to_dtensor(
    binding: Binding, placement: LeafPlacement | None, leaf: Tensor | None, old_leaf: object = None
) -> Tensor | None:
    """Turn one leaf of an optimizer state into a DTensor if its parameter is one. Return any other leaf unchanged.

    `placement` says which ranks hold the leaf. A leaf that is None on this rank becomes a DTensor without elements if
    other ranks have it, because all ranks must have the same structure.
    """
    layout = binding.layout
    if placement is None or placement.name is None:  # a leaf without a parameter, such as a counter
        return leaf
    if placement.name not in layout.dtensors or is_dtensor(leaf):
        return leaf
    # 1. The leaf is None here because other ranks compute all matrices of the parameter, and hold it.
    is_on_other_ranks = placement.owned and placement.local is None
    if leaf is None and not is_on_other_ranks:  # no rank has it
        return None
    if placement.owned:
        return _owned_to_dtensor(layout, placement, placement.name, leaf)
    # 2. The leaf is sharded like its parameter.
    assert leaf is not None
    return parameter_like(layout, placement.name, leaf, old_leaf)


def local_state(binding: Binding, tx: Transform, params: PyTree, state: PyTree) -> PyTree:
    """Replace each DTensor and `FlatShard` in a state by the local tensor that `update` uses on this rank.

    For example, a DTensor of shape (4, 8) becomes a tensor of shape (2, 8) on one of two ranks. A `FlatShard` is a
    shard with its position, as checkpoints have it. If another rank computes a matrix, its leaf has no elements on this
    rank, and becomes None.
    """
    leaves, treedef = tree.flatten(state)
    # There is nothing to replace: the parameters are no DTensors, and nothing was loaded.
    if are_plain(leaves):
        return state
    placements = describe_state(binding, tx, params)
    is_of_another_transform = len(placements) != len(leaves)
    if is_of_another_transform:
        # A wrong state, perhaps on this rank only. If this rank raised alone, the others would wait for it. The step
        # checks the state again, and raises on all ranks.
        return tree.map(local_of, state)
    local_leaves = map(_local_leaf, placements, leaves)
    return tree.unflatten(treedef, local_leaves)


def _local_leaf(placement: LeafPlacement | None, leaf: Any) -> Any:
    """Return a leaf of a state as `update` uses it on this rank: a local tensor, or None if other ranks compute it."""
    if isinstance(leaf, FlatShard):  # its values have one dim
        return _in_local_shape(leaf.data, placement)
    # Its values have the dims of the whole leaf.
    if is_dtensor(leaf) and placement is not None and placement.owned:
        return _in_local_shape(local_of(leaf), placement)
    # A local tensor, or a DTensor whose local tensor has the shape of this rank's shard.
    return local_of(leaf)


def _in_local_shape(values: Tensor, placement: LeafPlacement | None) -> Tensor | None:
    """Return values in the shape in which this rank computes them, or None if other ranks compute them."""
    if placement is None:
        return values
    if placement.local is None:
        return None
    return values.view(placement.local)


def global_state(binding: Binding, tx: Transform, params: PyTree, state: PyTree) -> PyTree:
    """Convert a state to its form for checkpoints, in which each leaf stores its position in the whole tensor."""
    leaves, treedef = tree.flatten(state)
    device = tree.device_of(state)
    placements = describe_state(binding, tx, params)
    for index, placement in enumerate(placements):
        leaves[index] = global_leaf(binding, device, placement, leaves[index])
    return tree.unflatten(treedef, leaves)


def global_leaf(
    binding: Binding, device: torch.device, placement: LeafPlacement | None, leaf: Tensor | None
) -> Tensor | FlatShard | None:
    """Convert one leaf of a state for a checkpoint: return a DTensor, a `FlatShard` or a whole tensor.

    `placement` says which ranks hold the leaf, and for which matrices. For a stack of four matrices of 16 elements, of
    which this rank computes the last two, the momentum becomes a `FlatShard` of 32 elements, which begin at element 32
    of the whole momentum.
    """
    # A leaf without a parameter is whole on all ranks.
    if placement is None or placement.name is None:
        return leaf
    # This rank computes no matrices: an interval without elements.
    if placement.owned and placement.shard is None:
        return FlatShard(placement.shape, 0, torch.empty(0, dtype=placement.dtype, device=device))
    if leaf is None:  # the transform has no state for this parameter
        return None
    if placement.shard is None:  # the leaf is sharded like its parameter
        return global_shard(binding.layout, placement.name, leaf)
    if placement.shard.owner is None:  # every rank computes all matrices, and has the whole leaf
        return leaf
    start, _ = interval_of(placement, placement.shard)  # the matrices that this rank computes
    return FlatShard(placement.shape, start, leaf.reshape(-1))


def interval_of(placement: LeafPlacement, shard: MatrixShard) -> tuple[int, int]:
    """Return which elements of a leaf of the state belong to some matrices of a parameter, as (start, end).

    The leaf may have another number of elements for each matrix than the parameter. If the parameter is a stack of four
    matrices of 16 elements, and the leaf has one number for each matrix, then elements 32 to 64 of the parameter (the
    `shard`: matrices 2 and 3) have the elements ``(2, 4)`` of the leaf.
    """
    leaf_numel = prod(placement.shape)
    param_numel = max(prod(shard.whole), 1)
    start = shard.start * leaf_numel // param_numel
    stop = shard.stop * leaf_numel // param_numel
    return start, stop


# ------------------------------------------------------------------------------------------------------ state of owners
# torch supports DTensors on a subset of ranks: on the other ranks such a DTensor has no elements, and
# torch.distributed.checkpoint neither reads nor writes it there.


def _owned_to_dtensor(
    layout: Layout, placement: LeafPlacement, name: str, local: Tensor | None
) -> Tensor | None:
    """Turn a leaf of the state into a DTensor, if each rank has it for the matrices that it computes (it owns them).

    `local` is the leaf for the matrices that this rank computes of the parameter called `name`; None if it computes
    none. If no DTensor can express which rank computes which matrices, `local` is returned unchanged.
    """
    from torch.distributed.tensor import Replicate

    parameter = layout.dtensors[name]
    mesh = parameter.mesh
    # In the examples, "w" is a stack of four matrices on a mesh of two ranks, and the leaf has one number for each.
    # 1. Every rank computes all matrices and has the whole leaf, of shape (4,): it is replicated on the mesh.
    if all(shard.owner is None for shard in placement.shards):
        everywhere = [Replicate()] * mesh.ndim
        return _global_dtensor(placement, local, mesh, everywhere)
    # 2. One rank computes all matrices and has the whole leaf, of shape (4,): it is on a mesh of this rank alone.
    if len(placement.shards) == 1:
        mesh_of_owner = _mesh_of_owner(layout, mesh.device_type, placement.shards[0].the_owner)
        if local is not None:
            local = local.view(placement.shape)
        return _global_dtensor(placement, local, mesh_of_owner, [Replicate()])
    # 3. Each rank computes the two matrices that it holds, of a parameter with ``[Shard(0)]``. Its part of the leaf has
    # the shape (2,), and the leaf has the placements of the parameter.
    if own_what_they_hold(layout, name, placement.shards, placement.shape):
        if local is None:
            local = _empty_on(mesh, placement.dtype)
        local = local.reshape(-1, *placement.shape[1:])
        return _global_dtensor(placement, local, mesh, parameter.placements)
    # 4. The ranks compute other ranges of matrices, such as one and three: no placements express them.
    return local


def _global_dtensor(
    placement: LeafPlacement,
    local: Tensor | None,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
) -> Tensor:
    """Build a DTensor with the whole shape of a leaf. `local` is None on a rank that is not on the mesh."""
    if local is None:
        local = _empty_on(mesh, placement.dtype)
    # The stride is that of a contiguous tensor of the whole shape.
    stride = torch.empty(placement.shape, device="meta").stride()
    return dtensor_of(local, mesh, placements, placement.shape, stride)


@remembered
def _mesh_of_owner(layout: Layout, device_type: str, owner: int) -> DeviceMesh:
    """Return a mesh of one rank. It needs no process group."""
    from torch.distributed.device_mesh import DeviceMesh

    assert layout.group is not None
    global_rank = dist.get_global_rank(layout.group, owner)
    return DeviceMesh(device_type, [global_rank], _init_backend=False)


def own_what_they_hold(
    layout: Layout, name: str, shards: Sequence[MatrixShard], shape: Sequence[int]
) -> bool:
    """Return True if every rank computes exactly the matrices that it holds, of a parameter that stacks matrices.

    For a stack of shape (4, 8, 8) with the placement ``Shard(0)`` over two ranks, each rank then computes two matrices.
    A leaf of the state with this `shape`, such as (4,), can have the same placement.
    """
    spec = layout.dtensors[name]
    # 1. No matrix is split: the stack is sharded along dim 0 only, which counts the matrices.
    for placement in cast("Sequence[Any]", spec.placements):
        is_along_dim_0 = placement.is_replicate() or placement.dim == 0
        if not is_along_dim_0:
            return False
    # 2. The leaf has an entry for each matrix.
    if tuple(shape[:1]) != tuple(spec.shape[:1]):
        return False
    # 3. Nothing is sent: the rank that computes a range of matrices is the only one that holds them. A plan gives a
    # rank one range at most, so it computes all that it holds.
    return all(shard.route == "local" for shard in shards)


def _empty_on(mesh: DeviceMesh, dtype: torch.dtype) -> Tensor:
    """Return a tensor without elements on this rank's device of a mesh."""
    device = mesh.device_type
    if device != "cpu":
        device = f"{device}:{torch.get_device_module(device).current_device()}"
    return torch.empty(0, dtype=dtype, device=device)
