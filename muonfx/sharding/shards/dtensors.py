"""The local tensors of a rank: taken out of DTensors, compared with the layout, and turned into DTensors again.

A leaf of a tree is a plain tensor, a DTensor or None. Its *local tensor* is the tensor itself or the part of the
DTensor that this rank holds. Updates run on local tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from muonfx import tree
from muonfx.internal.tracing import functorch_is_active, is_wrapped
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.shards.remembered import remembered
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


def are_plain(leaves: Iterable[object]) -> bool:
    """Return True if each leaf is a plain tensor, a `Parameter` or None, so that no leaf is a DTensor."""
    return PLAIN.issuperset(map(type, leaves))


def local_tree(values: PyTree) -> PyTree:
    """Replace each DTensor in a tree by its local tensor. Return the same tree if it has no DTensor."""
    leaves, treedef = tree.flatten(values)
    if are_plain(leaves):
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


def require_shards(layout: ShardTable, values: PyTree) -> None:
    """Raise unless each leaf is None or this rank's shard, and each DTensor has the placements of its parameter."""
    unplaced = unplaced_shards(layout, values)
    if unplaced:
        name = unplaced[0]
        leaf_of = dict(tree.named_leaves(values))
        raise _wrong_placements(layout, name, leaf_of[name])


def unplaced_shards(layout: ShardTable, values: PyTree) -> list[str]:
    """Check the leaves of a tree. Return the names of DTensors that must be redistributed like their parameters.

    An example is a gradient with the placement Partial, whose parameter has ``Shard(0)``, or whose parameter is plain
    and whole on this rank. Raise unless any other leaf is None or this rank's shard.
    """
    unplaced: list[str] = []
    for name, leaf in tree.named_leaves(values):
        # Nearly all leaves of a step fit at first sight.
        if leaf is None or _fits_at_first_sight(layout, name, leaf):
            continue
        layout.require([name])
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name!r} must be a tensor or None, found {type(leaf).__name__}")
        if is_dtensor(leaf) and not _are_equal(leaf._spec, layout.dtensors.get(name)):
            _require_convertible(layout, name, leaf)
            unplaced.append(name)
            continue
        local = local_of(leaf)
        position = layout.position(name)
        if not position.fits(local):
            raise _wrong_shape(name, local.shape, position.shape)
    return unplaced


def _require_convertible(layout: ShardTable, name: str, leaf: DTensor) -> None:
    """Raise unless a DTensor can be redistributed to the placements of its parameter.

    For a parameter of shape (4, 8) with ``[Shard(0)]``, a gradient of shape (4, 8) with ``[Partial()]`` can.
    """
    # The local shapes depend on the placements, so the whole shapes are compared.
    whole_shape = layout.specs[name].shape
    if tuple(leaf.shape) != whole_shape:
        raise _wrong_shape(name, leaf.shape, whole_shape)
    is_plain_parameter = name not in layout.dtensors
    if is_plain_parameter and layout.position(name).shape != whole_shape:
        # It cannot be converted to the part that this rank holds.
        raise _wrong_placements(layout, name, leaf)


def _fits_at_first_sight(layout: ShardTable, name: str, leaf: Any) -> bool:
    """Return True for a leaf that is this rank's shard, by a fast test that nearly all leaves pass."""
    if type(leaf) not in PLAIN:
        if not is_dtensor(leaf) or not _are_equal(leaf._spec, layout.dtensors.get(name)):
            return False
        leaf = leaf._local_tensor
    return leaf.shape == layout.expected_shapes.get(name)


def _are_equal(spec: DTensorSpec, expected: DTensorSpec | None) -> bool:
    """Return True if two specs have the same mesh, placements and global shape. The dtype may differ."""
    if spec is expected:
        return True
    if expected is None:
        return False
    return (
        spec.placements == expected.placements
        and spec.mesh == expected.mesh
        and spec.shape == expected.shape
    )


def _wrong_placements(layout: ShardTable, name: str, leaf: Any) -> ShardingError:
    """Return an error for a DTensor that has other placements than its parameter, or whose parameter is no DTensor."""
    expected = "a plain tensor"
    advice = "pass this rank's shard, or create a layout with from_dtensors"
    if name in layout.dtensors:
        spec = layout.dtensors[name]
        expected = f"{spec.placements} on {spec.mesh}"
        advice = "create a new layout after changing placements"
    return ShardingError(
        f"{name!r} has the placements {leaf.placements} on {leaf.device_mesh}, expected {expected} as in the layout: "
        f"{advice}"
    )


def _wrong_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> ShardingError:
    return ShardingError(
        f"{name!r} has shape {tuple(shape)}, expected {tuple(expected)} under the layout: shard the tree with "
        "layout.shard(...) of this layout"
    )


def require_no_transform(operation: str, *values: PyTree) -> None:
    """Raise ShardingError if a tensor in some trees is inside a transform of torch.func, such as `grad`.

    `operation` is the name of the call in the error, such as "layout.gather".
    """
    if not functorch_is_active():  # as in most calls
        return
    for leaf in tree.leaves(values):
        local = local_of(leaf)
        if isinstance(local, Tensor) and is_wrapped(local):
            raise ShardingError(
                f"{operation}: found a tensor of a torch.func transform (grad, vjp, jvp, vmap), expected a plain "
                f"tensor, because {operation} has no derivative and no batching rule: call it outside the transform; "
                "only layout.all_gather can be called inside"
            )


# ------------------------------------------------------------------------------------------------------ build DTensors


def dtensor_of(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: tuple[int, ...],
) -> DTensor:
    """Build a DTensor from a local tensor, with the given global shape and stride. The data stays on its device.

    A local tensor of shape (2, 8) with ``[Shard(0)]`` on a mesh of two ranks has the global shape (4, 8).
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # `DTensor.from_local` would copy an offloaded tensor to the mesh's devices.
    tensor_meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=tensor_meta)
    return _with_spec(local, spec)


def _with_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Build a DTensor from a local tensor and a spec (mesh, placements and global shape), without checks."""
    from torch.distributed.tensor import DTensor

    # The constructor does the same, but takes three times as long: its `__init__` only serves torch.export.
    kind: Any = DTensor
    if local.requires_grad:
        local = local.detach()
    return kind.__new__(kind, local, spec, requires_grad=False)


def parameter_like(layout: ShardTable, name: str, leaf: Tensor, old: object = None) -> DTensor:
    """Build a DTensor from a local tensor, with the mesh and placements of the parameter with this name.

    If `old` is a DTensor of the same tensor, which was then updated in place, return it: a new one takes time.
    """
    if is_dtensor(leaf):  # nothing to build
        return leaf
    if is_dtensor(old) and old._local_tensor is leaf:
        return old
    spec = _spec_of(layout, name, leaf.dtype)
    return _with_spec(leaf, spec)


@remembered
def _spec_of(layout: ShardTable, name: str, dtype: torch.dtype) -> DTensorSpec:
    """Return the spec of a DTensor of a dtype that is placed like a parameter."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    parameter = layout.dtensors[name]
    tensor_meta = TensorMeta(parameter.shape, parameter.stride, dtype)
    return DTensorSpec(parameter.mesh, parameter.placements, tensor_meta)


def to_dtensors(layout: ShardTable, local: PyTree, old: PyTree = None) -> PyTree:
    """Turn each shard of a DTensor parameter into a DTensor. If `old` has one of the same tensor, return that.

    With the layout of FSDP2, the local update of shape (2, 8) becomes a DTensor of shape (4, 8) with the mesh and the
    placements of its parameter. An update of a plain parameter stays as it is.
    """
    # DTensors to use again if a step updated them in place.
    old_leaf_of = dict(tree.named_leaves(old))

    def to_dtensor(name: str, leaf: Tensor) -> Tensor:
        if name not in layout.dtensors:
            return leaf
        return parameter_like(layout, name, leaf, old_leaf_of.get(name))

    return map_named(to_dtensor, local)


def global_shard(layout: ShardTable, name: str, leaf: Tensor) -> Tensor | FlatShard:
    """Return a shard in a form for checkpoints, which stores its position in the parameter.

    This is a DTensor for a parameter that is one. For a layout of flat shards it is a `FlatShard`, such as "elements 3
    to 6 of (2, 3)". Otherwise the shard is the whole parameter, and is returned unchanged.
    """
    if name in layout.dtensors:
        return parameter_like(layout, name, leaf)
    if layout.is_flat:
        shape = layout.specs[name].shape
        start = layout.position(name).start or 0
        return FlatShard(shape, start, leaf.reshape(-1))
    return leaf
