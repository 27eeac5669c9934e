"""The local tensors of a rank: taken out of DTensors, compared with the layout, and turned into DTensors again.

A leaf of a tree is a plain tensor, a DTensor or None. Its *local tensor* is the tensor itself or the part of the
DTensor that this rank holds. Updates run on local tensors only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from muonfx import tree
from muonfx.internal.tracing import functorch_is_active, is_wrapped
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.shards.table import ShardTable
from muonfx.tree import PyTree

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


PLAIN = frozenset({Tensor, Parameter, type(None)})
"""The usual types of leaves that are not DTensors; a test by type is the fastest way to exclude them."""


def is_dtensor(leaf: object) -> TypeGuard[DTensor]:
    """Return True if a leaf is a DTensor, without importing torch.distributed.tensor."""
    return type(leaf) not in PLAIN and isinstance(leaf, Tensor) and hasattr(leaf, "_local_tensor")


def local_of(leaf: Any) -> Any:
    """Return the local tensor of a DTensor. Return any other value unchanged."""
    if type(leaf) in PLAIN:
        return leaf
    return getattr(leaf, "_local_tensor", leaf)


def local_tree(values: PyTree) -> PyTree:
    """Replace each DTensor in a tree by its local tensor. Return the same tree if it has no DTensor."""
    leaves, treedef = tree.flatten(values)
    if PLAIN.issuperset(map(type, leaves)):
        return values
    return tree.unflatten(treedef, map(local_of, leaves))


def map_named(function: Callable[[str, Any], Any], values: PyTree) -> PyTree:
    """Call ``function(name, leaf)`` for each leaf of a tree. Return the tree of results; None stays None."""
    leaves, treedef = tree.flatten(values)
    for index, name in enumerate(tree.names(values)):
        if leaves[index] is not None:
            leaves[index] = function(name, leaves[index])
    return tree.unflatten(treedef, leaves)


# -------------------------------------------------------------------------------------------------------------- checks


def require_shards(layout: ShardTable, names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise unless each leaf is None or this rank's shard, and each DTensor has the placements of its parameter."""
    for name, leaf in zip(names, leaves, strict=True):
        if leaf is None or _fitting_tensor(layout, name, leaf) is not None:
            continue
        position = layout.position(name)
        local = _require_tensor(name, leaf)
        if is_dtensor(leaf):
            _require_placements(layout, name, leaf)
        if not position.fits(local):
            raise _wrong_shape(name, local.shape, position.shape)


class LocalGradients(NamedTuple):
    """The gradients of a tree on this rank, in order."""

    tensors: list[Tensor | None]
    """The local tensor of each gradient."""
    unplaced: list[str]
    """The names of the gradients whose DTensor placements differ from their parameter's, such as Partial."""


def local_gradients(layout: ShardTable, names: Sequence[str], gradients: Sequence[Any]) -> LocalGradients:
    """Return the local tensors of gradients. Raise unless each is None or has the shape of this rank's shard.

    A gradient may also be a DTensor with other placements than its parameter. Its name is then listed as `unplaced`.
    """
    tensors: list[Tensor | None] = []
    unplaced: list[str] = []
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None:
            tensors.append(None)
            continue
        local = _fitting_tensor(layout, name, gradient)  # a fast test; a gradient that passes it is placed as expected
        if local is None:
            local = _checked_gradient(layout, name, gradient)
            if not is_placed_like(gradient, layout.dtensors.get(name)):
                unplaced.append(name)
        tensors.append(local)
    return LocalGradients(tensors, unplaced)


def _fitting_tensor(layout: ShardTable, name: str, leaf: Any) -> Tensor | None:
    """Return the local tensor of a leaf that fits at first sight, as nearly all do. Return None for others."""
    local = leaf
    if type(leaf) not in PLAIN:
        local = getattr(leaf, "_local_tensor", None)
        if local is None or not _are_equal(leaf._spec, layout.dtensors.get(name)):
            return None
    if local.shape == layout.expected_shapes.get(name):
        return local
    return None


def _are_equal(spec: DTensorSpec, expected: DTensorSpec | None) -> bool:
    """Return True if two specs have the same mesh, placements and global shape. The dtype may differ."""
    if spec is expected:
        return True
    if expected is None:
        return False
    return spec.placements == expected.placements and spec.mesh == expected.mesh and spec.shape == expected.shape


def _checked_gradient(layout: ShardTable, name: str, gradient: object) -> Tensor:
    """Return the local tensor of a gradient. Raise if it is no tensor, or has another shape than expected."""
    position = layout.position(name)
    local = _require_tensor(name, gradient)
    if is_dtensor(gradient):
        # Its local shape depends on its placements. Under Partial, for example, it is the shape of the parameter.
        whole_shape = layout.specs[name].shape
        if tuple(gradient.shape) != whole_shape:
            raise _wrong_shape(name, gradient.shape, whole_shape)
    elif not position.fits(local):
        raise _wrong_shape(name, local.shape, position.shape)
    return local


def _require_tensor(name: str, leaf: object) -> Tensor:
    local = local_of(leaf)
    if not isinstance(local, Tensor):
        raise TypeError(f"{name!r} must be a tensor or None, found {type(leaf).__name__}")
    return local


def _require_placements(layout: ShardTable, name: str, leaf: Any) -> None:
    """Raise unless a DTensor has the mesh and the placements of its parameter."""
    spec = layout.dtensors.get(name)
    if spec is None:
        expected = "a plain tensor"
    elif leaf.placements == spec.placements and leaf.device_mesh == spec.mesh:
        return
    else:
        expected = f"{spec.placements} on {spec.mesh}"
    raise ShardingError(
        f"{name!r} has the placements {leaf.placements} on {leaf.device_mesh}, expected {expected} as in the layout: "
        "create a new layout after changing placements"
    )


def _wrong_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> ShardingError:
    return ShardingError(
        f"{name!r} has a local shape {tuple(shape)}, expected {tuple(expected)} under the layout: shard the tree with "
        "layout.shard(...) of this layout"
    )


def is_placed_like(leaf: object, spec: DTensorSpec | None) -> bool:
    """Return False if a gradient is a DTensor with other placements than its parameter (`spec`), such as Partial."""
    leaf_spec = getattr(leaf, "_spec", None)
    if spec is None or leaf_spec is None or leaf_spec is spec:
        return True
    return leaf_spec.placements == spec.placements


def transform_problem(operation: str, *values: PyTree) -> ShardingError | None:
    """Return an error if a leaf of some trees is inside a torch.func transform such as `grad`; else None.

    Ranks raise it together, after the first collective. `operation` is its name in the error, such as "layout.gather".
    """
    if not functorch_is_active():
        return None
    for leaf in tree.leaves(values):
        local = local_of(leaf)
        if isinstance(local, Tensor) and is_wrapped(local):
            return ShardingError(
                f"{operation}: found a tensor of a torch.func transform (grad, vjp, jvp, vmap), expected a plain "
                f"tensor, because {operation} has no derivative and no batching rule: call it outside the transform; "
                "only layout.all_gather can be called inside"
            )
    return None


# ------------------------------------------------------------------------------------------------------ build DTensors


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: tuple[int, ...]
) -> DTensor:
    """Build a DTensor from a local tensor, with the given global shape and stride. The data stays on its device."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # `DTensor.from_local` would copy an offloaded tensor to the mesh's devices.
    tensor_meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    return _with_spec(local, DTensorSpec(mesh, tuple(placements), tensor_meta=tensor_meta))


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
    key = name, leaf.dtype
    if key in layout.dtensor_specs:
        return _with_spec(leaf, layout.dtensor_specs[key])
    parameter = layout.dtensors[name]
    dtensor = dtensor_of(leaf, parameter.mesh, parameter.placements, parameter.shape, parameter.stride)
    layout.dtensor_specs[key] = dtensor._spec
    return dtensor


def to_dtensors(layout: ShardTable, local: PyTree, existing: PyTree = None) -> PyTree:
    """Turn each shard of a DTensor parameter into a DTensor. If `existing` has one of the same tensor, return that."""
    existing_leaves: dict[str, Any] = dict(tree.named_leaves(existing))

    def to_dtensor(name: str, leaf: Tensor) -> Tensor | None:
        if name not in layout.dtensors:
            return leaf
        dtensor = existing_leaves.get(name)
        if getattr(dtensor, "_local_tensor", None) is leaf:  # it was updated in place
            return dtensor
        return parameter_like(layout, name, leaf)

    return map_named(to_dtensor, local)


def global_shard(layout: ShardTable, name: str, leaf: Tensor) -> Tensor | FlatShard:
    """Return a shard in a form that stores its position in the parameter, such as a DTensor or a `FlatShard`."""
    if name in layout.dtensors:
        return parameter_like(layout, name, leaf)
    if layout.is_flat:
        return FlatShard(layout.specs[name].shape, layout.position(name).start or 0, leaf.reshape(-1))
    return leaf
