"""Recognize, build and unwrap DTensors, one by one or for whole trees under a layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from muonfx import tree
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.shards.table import ShardTable
from muonfx.tree import PyTree

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: tuple[int, ...]
) -> DTensor:
    """Build a DTensor from a local tensor, with the given global shape and stride. The data stays on its device."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # `DTensor.from_local` would copy an offloaded tensor to the mesh's devices.
    tensor_meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    return _with_spec(local, DTensorSpec(mesh, tuple(placements), tensor_meta=tensor_meta))


def local_of(leaf: Any) -> Any:
    """Return the local tensor of a DTensor. Return any other value unchanged."""
    return leaf if type(leaf) in PLAIN else getattr(leaf, "_local_tensor", leaf)


def local_tree(values: PyTree) -> PyTree:
    """Replace each DTensor in a tree by its local tensor. Return the same tree if it has no DTensor."""
    leaves, treedef = tree.flatten(values)
    return values if PLAIN.issuperset(map(type, leaves)) else tree.unflatten(treedef, map(local_of, leaves))


PLAIN = frozenset({Tensor, Parameter, type(None)})
"""The usual types of leaves that are not DTensors; a test by type is the fastest way to exclude them."""


def is_dtensor(leaf: object) -> TypeGuard[DTensor]:
    """Return True if a leaf is a DTensor, without importing torch.distributed.tensor."""
    return type(leaf) not in PLAIN and isinstance(leaf, Tensor) and hasattr(leaf, "_local_tensor")


def is_placed_like(leaf: object, spec: DTensorSpec | None) -> bool:
    """Return False if a gradient is a DTensor with other placements than its parameter (`spec`), such as Partial."""
    leaf_spec = getattr(leaf, "_spec", None)
    if spec is None or leaf_spec is None or leaf_spec is spec:
        return True
    return leaf_spec.placements == spec.placements


@functools.cache
def _dtensor_type() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor


def _with_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Build a DTensor from a local tensor and a spec (mesh, placements and global shape), without checks."""
    # The constructor does the same, but takes three times as long: its `__init__` only serves torch.export.
    kind = _dtensor_type()
    return kind.__new__(kind, local.detach() if local.requires_grad else local, spec, requires_grad=False)


def parameter_like(layout: ShardTable, name: str, leaf: Tensor) -> DTensor:
    """Build a DTensor from a local tensor, with the mesh and placements of the parameter with this name."""
    if is_dtensor(leaf):
        return leaf
    known: dict[tuple[str, torch.dtype], DTensorSpec] = layout.once("specs of DTensors", dict)
    spec = known.get((name, leaf.dtype))
    if spec is None:
        parameter = layout.dtensors[name]
        dtensor = dtensor_of(leaf, parameter.mesh, parameter.placements, parameter.shape, parameter.stride)
        spec = known[name, leaf.dtype] = dtensor._spec
    return _with_spec(leaf, spec)


def to_dtensors(layout: ShardTable, local: PyTree, existing: PyTree = None) -> PyTree:
    """Turn each shard of a DTensor parameter into a DTensor. If `existing` has one of the same tensor, return that."""
    existing_leaves: dict[str, Any] = {}
    if existing is not None:
        existing_leaves = dict(tree.named_leaves(existing))
    leaves, treedef = tree.flatten(local)
    for index, name in enumerate(tree.names(local)):
        leaf = leaves[index]
        if leaf is None or name not in layout.dtensors:
            continue
        dtensor = existing_leaves.get(name)
        if getattr(dtensor, "_local_tensor", None) is not leaf:
            dtensor = parameter_like(layout, name, leaf)
        leaves[index] = dtensor
    return tree.unflatten(treedef, leaves)


def global_shard(layout: ShardTable, name: str, leaf: Tensor) -> Tensor | FlatShard:
    """Return a shard in a form that stores its position in the parameter, such as a DTensor or a `FlatShard`."""
    if name in layout.dtensors:
        return parameter_like(layout, name, leaf)
    if layout.is_flat:
        return FlatShard(layout.specs[name].shape, layout.position(name).start or 0, leaf.reshape(-1))
    return leaf


def map_named(function: Callable[[str, Any], Any], values: PyTree) -> PyTree:
    """Call ``function(name, leaf)`` for each leaf of a tree. Return the tree of results; None stays None."""
    leaves, treedef = tree.flatten(values)
    named = zip(tree.names(values), leaves, strict=True)
    return tree.unflatten(treedef, [None if leaf is None else function(name, leaf) for name, leaf in named])
