"""Checks of the leaves that a rank passes to a call: their local shapes, and that no `torch.func` transform runs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from muonfx import tree
from muonfx.internal.tracing import functorch_is_active, is_wrapped, without_transforms
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.dtensors import PLAIN, is_dtensor, is_placed_like, local_of
from muonfx.sharding.shards.table import ShardTable
from muonfx.tree import PyTree


class LocalLeaves(NamedTuple):
    """The leaves of a tree on this rank, in order."""

    tensors: list[Tensor | None]
    """The local tensor of each leaf."""
    unplaced: list[str]
    """The names of the gradients whose DTensor placements differ from their parameter's, such as Partial."""


def local_leaves(
    layout: ShardTable, names: Sequence[str], leaves: Sequence[Any], *, as_placed: bool = True
) -> LocalLeaves:
    """Raise unless each leaf is None or has the shape of this rank's shard. Return the local tensors.

    With `as_placed`, a DTensor must also have the placements of its parameter.
    """
    shards = layout.expected_shards
    tensors: list[Tensor | None] = []
    unplaced: list[str] = []
    for name, leaf in zip(names, leaves, strict=True):
        # Nearly all leaves pass these quick tests; the others are examined one by one.
        if leaf is None:
            tensors.append(None)
            continue
        shard = shards.get(name)
        if shard is not None:
            if type(leaf) in PLAIN:
                if leaf.shape == shard.shape:
                    tensors.append(leaf)
                    continue
            else:
                local = getattr(leaf, "_local_tensor", None)
                if local is not None and local.shape == shard.shape and shard.is_placed(leaf._spec):
                    tensors.append(local)
                    continue
        tensors.append(_checked_leaf(layout, name, leaf, as_placed=as_placed))
        if not is_placed_like(leaf, layout.dtensors.get(name)):
            unplaced.append(name)
    return LocalLeaves(tensors, unplaced)


def _checked_leaf(layout: ShardTable, name: str, leaf: object, *, as_placed: bool) -> Tensor:
    """Return the local tensor of a leaf. Raise if it is no tensor, or has another placement or shape than expected."""
    local = local_of(leaf)
    position = layout.position(name)
    if not isinstance(local, Tensor):
        raise TypeError(f"{name!r} must be a tensor or None, found {type(leaf).__name__}")
    if not is_dtensor(leaf):
        if not position.fits(local):
            raise _wrong_shape(name, local.shape, position.shape)
        return local
    if as_placed:
        _require_placements(layout, name, leaf)
        if not position.fits(local):
            raise _wrong_shape(name, local.shape, position.shape)
    elif tuple(leaf.shape) != layout.specs[name].shape:
        # A gradient may be a partial DTensor, which has the parameter's whole shape.
        raise _wrong_shape(name, leaf.shape, layout.specs[name].shape)
    return local


def _require_placements(layout: ShardTable, name: str, leaf: Any) -> None:
    """Raise unless a DTensor has the mesh and the placements of its parameter."""
    spec = layout.dtensors.get(name)
    expected = "a plain tensor"
    if spec is not None:
        if (leaf.placements, leaf.device_mesh) == (spec.placements, spec.mesh):
            return
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


@contextmanager
def outside_transforms(verb: str, *values: PyTree) -> Generator[Exception | None]:
    """Run a with block outside of torch.func transforms. Yield an error if `values` are inside one, else None."""
    if not functorch_is_active():
        yield None
        return
    problem: Exception | None = None
    for leaf in tree.leaves(values):
        local = local_of(leaf)
        if isinstance(local, Tensor) and is_wrapped(local):
            problem = ShardingError(
                f"{verb}: found a tensor of a torch.func transform (grad, vjp, jvp, vmap), expected a plain tensor, "
                f"because {verb} has no derivative and no batching rule: call it outside the transform; only "
                "layout.all_gather can be called inside"
            )
    with without_transforms():
        yield problem
