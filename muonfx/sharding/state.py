"""What the leaves of a sharded state are: pieces like the parameters', matrices' states at owners, or counters.

That is found by running `init` on meta tensors, with a marker in the place of each inner transform, never by the names
of fields.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.checkpoint import FlatPiece
from muonfx.core import Locality, Transform, chain_entries, transform
from muonfx.sharding.belonging import owners_of
from muonfx.sharding.kinds import Kind, kind_of, with_parts
from muonfx.sharding.layout import is_dtensor, local_of
from muonfx.sharding.owned import at_owner, like_parameter
from muonfx.sharding.plan.plan import RunPlan
from muonfx.sharding.plan.shares import Share
from muonfx.sharding.walk import Walk
from muonfx.tree import PyTree

__all__ = [
    "Held",
    "about",
    "bare",
    "bare_leaf",
    "dressed",
    "dressed_leaf",
    "held",
    "interval_of",
    "local_state",
    "logical_leaf",
    "logical_state",
]


@dataclass(frozen=True)
class Held:
    """What one leaf of a state is; a leaf itself."""

    name: str | None
    """The parameter that it belongs to; None: the same on all ranks, as a counter is."""
    owned: bool
    """Whether it lies at an owner."""
    share: Share | None
    """For a leaf at an owner, this rank's share of the parameter; None: it has none."""
    shares: tuple[Share, ...]
    """Those of all owners."""
    shape: tuple[int, ...]
    """Of the whole leaf, as one process would hold it."""
    dtype: torch.dtype
    local: tuple[int, ...] | None = None
    """The shape of what this rank has of it; None: it has nothing."""


def held(walk: Walk, tx: Transform, params: PyTree) -> PyTree:
    """Describe the state of a transform, leaf by leaf; the structure is the state's own.

    Args:
        walk: the layout and its plans.
        tx: the transform.
        params: a tree of meta tensors of the global shapes.
    """
    tx = tx.resolve(params)
    kind = kind_of(tx)
    if (entries := chain_entries(tx)) is not None:
        state: dict[str, Any] = {}
        for group in walk.groups(tx, params):
            if kind_of(group[0][1]) is Kind.RUN:
                state |= {
                    name: _described(walk, part.functions.init(params), params, walk.plan(group, params))
                    for name, part in group
                }
            else:
                state[group[0][0]] = held(walk, entries[group[0][0]], params)
        return state
    if kind is Kind.RUN:
        return _described(walk, tx.functions.init(params), params, walk.plan(((tx.name, tx),), params))
    if kind is Kind.INSIDE:
        return _around(walk, tx, params)
    return _described(walk, tx.functions.init(params), {} if kind is Kind.EVERYTHING else params)


class _Here:
    """A place in a state where that of an inner transform belongs."""

    def __init__(self, number: int) -> None:
        self.number = number


@transform(locality=Locality.TREE, transparent=True)
def _marker(tx: Transform, found: Any):
    """Stands for an inner transform, and notes what `init` gives it."""

    def init(params: PyTree) -> _Here:
        found.append((tx, params))
        return _Here(len(found) - 1)

    def update(updates: PyTree, state: PyTree, params: PyTree = None):
        raise AssertionError("a marker is never run")

    return init, update


class _Found(list[tuple[Transform, PyTree]]):
    """What markers have noted; itself and not its elements is an argument."""


def _around(walk: Walk, tx: Transform, params: PyTree) -> PyTree:
    found = _Found()
    state = with_parts(tx, lambda part: _marker(part, found)).functions.init(params)
    return tree.map(
        lambda leaf: held(walk, *found[leaf.number]) if isinstance(leaf, _Here) else leaf,
        _described(walk, state, params),
    )


def _by_name(plan: RunPlan) -> dict[str, tuple[Share, ...]]:
    found: dict[str, list[Share]] = {}
    for share in plan.shares:
        found.setdefault(share.name, []).append(share)
    return {name: tuple(shares) for name, shares in found.items()}


def _described(walk: Walk, state: PyTree, params: PyTree, plan: RunPlan | None = None) -> PyTree:
    """Say of each leaf which parameter it belongs to; a piece of one has its shape too.

    Args:
        walk: the layout and its plans.
        state: made of meta tensors of the global shapes.
        params: those tensors.
        plan: who owns what, where the state lies at owners.
    """
    shares = None if plan is None else _by_name(plan)
    by_name = dict(zip(tree.names(params), tree.leaves(params), strict=True))
    leaves, treedef = tree.flatten(state)
    described: list[Any] = []
    for owner, leaf in zip(owners_of(state, params) if by_name else [None] * len(leaves), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            described.append(leaf)
            continue
        name, param = owner, None if owner is None else by_name[owner]
        owned = shares is not None and name is not None
        if not owned and param is not None and leaf.shape != param.shape:
            name = None
        of_all = shares.get(name, ()) if shares is not None and name is not None else ()
        share = next((share for share in of_all if share.owner in (None, walk.layout.rank)), None)
        described.append(Held(name, owned, share, of_all, tuple(leaf.shape), leaf.dtype))
    return tree.unflatten(treedef, described)


def about(walk: Walk, tx: Transform, params: PyTree) -> list[Any]:
    """What the leaves of a state are, in order: `Held` for a tensor."""
    key = ("held", id(tx.structure), tuple(tree.names(params)))
    if key not in walk.derived:
        here = tree.leaves(walk.init(tx, walk.local_like(params)))
        found = tree.leaves(held(walk, tx, walk.global_like(params)))
        described = [
            replace(what, local=None if leaf is None else tuple(leaf.shape)) if isinstance(what, Held) else what
            for what, leaf in zip(found, here, strict=True)
        ]
        walk.derived[key] = described, tx.structure  # kept, so that no other can have its id
    return walk.derived[key][0]


def dressed(walk: Walk, tx: Transform, params: PyTree, state: PyTree) -> PyTree:
    """A state with DTensors in the place of local tensors that belong to parameters that are DTensors.

    What lies at an owner is a DTensor too, on every rank; but for ranges of a stack that DTensors cannot say: those
    stay local tensors at their owners and None elsewhere.
    """
    leaves, treedef = tree.flatten(state)
    pairs = zip(about(walk, tx, params), leaves, strict=True)
    return tree.unflatten(treedef, [dressed_leaf(walk, what, leaf) for what, leaf in pairs])


def dressed_leaf(walk: Walk, what: Any, leaf: Any) -> Any:
    """One leaf of `dressed`."""
    if not isinstance(what, Held) or what.name is None or is_dtensor(leaf):
        return leaf
    if what.name not in walk.layout.dtensors:
        return leaf
    if not what.owned:
        return None if leaf is None else walk.layout._as_dtensor(what.name, leaf)
    if leaf is None and what.local is not None:
        return None  # a transform that keeps nothing there
    like = torch.empty(what.shape, dtype=what.dtype, device="meta")
    if len(what.shares) == 1 and what.shares[0].owner is not None:
        return at_owner(walk.layout, what.shares[0].owner, leaf, like)
    found = like_parameter(walk.layout, what.name, what.shares, leaf, like)
    return leaf if found is None else found


def bare(walk: Walk, tx: Transform, params: PyTree, state: PyTree) -> PyTree:
    """The local tensors of a state of DTensors: the inverse of `dressed`."""
    if not walk.layout.dtensors:
        return state
    leaves, treedef = tree.flatten(state)
    if not any(is_dtensor(leaf) for leaf in leaves):
        return state
    described = about(walk, tx, params)
    if len(described) != len(leaves):
        return tree.map(local_of, state)  # of another transform: whoever checks the state says so
    return tree.unflatten(treedef, [bare_leaf(what, leaf) for what, leaf in zip(described, leaves, strict=True)])


def bare_leaf(what: Any, leaf: Any) -> Any:
    """One leaf of `bare`."""
    if not is_dtensor(leaf) or not isinstance(what, Held) or not what.owned:
        return local_of(leaf)
    return None if what.local is None else leaf._local_tensor.view(what.local)


def logical_state(walk: Walk, tx: Transform, params: PyTree, state: PyTree) -> PyTree:
    """A state in which every leaf says which part of which whole it is."""
    leaves, treedef = tree.flatten(state)
    pairs = zip(about(walk, tx, params), leaves, strict=True)
    device = tree.device_of(state)
    return tree.unflatten(treedef, [logical_leaf(walk, device, what, bare_leaf(what, leaf)) for what, leaf in pairs])


def logical_leaf(walk: Walk, device: torch.device, what: Any, leaf: Any) -> Any:
    """One leaf of `logical_state`."""
    if not isinstance(what, Held) or what.name is None:
        return leaf
    if not what.owned:
        return None if leaf is None else walk.layout.described(what.name, leaf)
    if what.share is None:
        return FlatPiece(what.shape, 0, torch.empty(0, dtype=what.dtype, device=device))
    if what.share.owner is None or leaf is None:
        return leaf
    return FlatPiece(what.shape, interval_of(what, what.share)[0], leaf.reshape(-1))


def interval_of(what: Held, share: Share) -> tuple[int, int]:
    """What of a flattened state leaf the owner of a share has: a range of a stack has that range of the state."""
    each = max(prod(share.whole), 1)
    return share.start * prod(what.shape) // each, share.stop * prod(what.shape) // each


def local_state(walk: Walk, tx: Transform, params: PyTree, logical: PyTree) -> PyTree:
    """The state that a logical one describes."""
    meta = walk.init(tx, tree.map(lambda leaf: torch.empty_like(local_of(leaf), device="meta"), params))
    leaves, treedef = tree.flatten(logical)

    def at(wanted: Any, leaf: Any) -> Any:
        if wanted is None:
            return None
        return leaf.data.view(wanted.shape) if isinstance(leaf, FlatPiece) else local_of(leaf)

    local = [at(wanted, leaf) for wanted, leaf in zip(tree.leaves(meta), leaves, strict=True)]
    state = tree.unflatten(treedef, local)
    return dressed(walk, tx, params, state) if walk.layout.dtensors else state
