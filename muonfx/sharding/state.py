"""What the leaves of a sharded state are: pieces like the parameters', matrices' states at owners, or counters.

That is found by running `init` on meta tensors, with a marker in the place of each inner transform, never by the names
of fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.checkpoint import FlatPiece
from muonfx.core import Locality, Transform, chain_entries, transform
from muonfx.sharding.kinds import Kind, kind_of, with_parts
from muonfx.sharding.layout import as_dtensor, local_of
from muonfx.sharding.plan.plan import RunPlan
from muonfx.sharding.plan.shares import Share
from muonfx.sharding.walk import Walk
from muonfx.tree import PyTree

__all__ = ["Held", "dressed", "held", "local_state", "logical_state"]


@dataclass(frozen=True)
class Held:
    """What one leaf of a state is; a leaf itself."""

    name: str | None
    """The parameter that it belongs to; None: the same on all ranks, as a counter is."""
    owned: bool
    """Whether it lies at an owner."""
    share: Share | None
    """For a leaf at an owner, this rank's share of the parameter; None: it has none."""
    shape: tuple[int, ...]
    """Of the whole leaf, as one process would hold it."""
    dtype: torch.dtype


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
                mine = _mine(walk, walk.plan(group, params))
                state |= {name: _described(part._functions[0](params), params, mine) for name, part in group}
            else:
                state[group[0][0]] = held(walk, entries[group[0][0]], params)
        return state
    if kind is Kind.RUN:
        mine = _mine(walk, walk.plan(((tx.name, tx),), params))
        return _described(tx._functions[0](params), params, mine)
    if kind is Kind.INSIDE:
        return _around(walk, tx, params)
    return _described(tx._functions[0](params), {} if kind is Kind.EVERYTHING else params, None)


class _Here:
    """A place in a state where that of an inner transform belongs."""

    def __init__(self, number: int) -> None:
        self.number = number


@transform(locality=Locality.TREE)
def _marker(tx: Transform, found: Any):
    """Stands for an inner transform, and notes what `init` gives it."""

    def init(params: PyTree) -> _Here:
        found.append((tx, params))
        return _Here(len(found) - 1)

    def update(updates: PyTree, state: PyTree, params: PyTree = None):
        raise AssertionError("a marker is never run")

    return init, update


_marker.transparent = True


class _Found(list[tuple[Transform, PyTree]]):
    """What markers have noted; itself and not its elements is an argument."""


def _around(walk: Walk, tx: Transform, params: PyTree) -> PyTree:
    found = _Found()
    state = with_parts(tx, lambda part: _marker(part, found))._functions[0](params)
    return tree.map(
        lambda leaf: held(walk, *found[leaf.number]) if isinstance(leaf, _Here) else leaf,
        _described(state, params, None),
    )


def _mine(walk: Walk, plan: RunPlan) -> dict[str, Share]:
    return {share.name: share for share in plan.shares if share.owner in (None, walk.layout.rank)}


def _described(state: PyTree, params: PyTree, shares: dict[str, Share] | None) -> PyTree:
    """A leaf belongs to the parameter whose path ends its own; a piece of one has its shape too.

    Args:
        state: made of meta tensors of the global shapes.
        params: those tensors.
        shares: of this rank, where the state lies at owners.
    """
    ends = dict(zip(tree.paths(params), zip(tree.names(params), tree.leaves(params), strict=True), strict=True))
    depths = sorted({len(end) for end in ends}, reverse=True)
    leaves, treedef = tree.flatten(state)
    described: list[Any] = []
    for path, leaf in zip(tree.paths(state), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            described.append(leaf)
            continue
        name, param = next((ends[path[-n:]] for n in depths if path[-n:] in ends), (None, None))
        owned = shares is not None and name is not None
        if not owned and param is not None and leaf.shape != param.shape:
            name = None
        share = shares.get(name) if shares is not None and name is not None else None
        described.append(Held(name, owned, share, tuple(leaf.shape), leaf.dtype))
    return tree.unflatten(treedef, described)


def _about(walk: Walk, tx: Transform, params: PyTree) -> list[Any]:
    key = ("held", id(tx._context), tuple(tree.names(params)))
    if key not in walk.derived:
        walk.met.setdefault(id(tx._context), tx._context)  # so that no other can have its id
        walk.derived[key] = tree.leaves(held(walk, tx, walk.global_like(params)))
    return walk.derived[key]


def dressed(walk: Walk, tx: Transform, params: PyTree, state: PyTree) -> PyTree:
    """A state with DTensors in the place of local tensors that are like parameters that are DTensors."""
    specs = walk.layout.dtensors

    def at(about: Any, leaf: Any) -> Any:
        if leaf is None or not isinstance(about, Held) or about.owned or about.name is None or about.name not in specs:
            return leaf
        return as_dtensor(leaf, specs[about.name])

    leaves, treedef = tree.flatten(state)
    pairs = zip(_about(walk, tx, params), leaves, strict=True)
    return tree.unflatten(treedef, [at(about, leaf) for about, leaf in pairs])


def logical_state(walk: Walk, tx: Transform, params: PyTree, state: PyTree) -> PyTree:
    """A state in which every leaf says which part of which whole it is."""
    leaves, treedef = tree.flatten(state)
    pairs = zip(_about(walk, tx, params), leaves, strict=True)
    device = tree.device_of(state)
    return tree.unflatten(treedef, [_logical(walk, device, about, local_of(leaf)) for about, leaf in pairs])


def _logical(walk: Walk, device: torch.device, about: Any, leaf: Any) -> Any:
    if not isinstance(about, Held) or about.name is None:
        return leaf
    if not about.owned:
        return None if leaf is None else walk.layout.described(about.name, leaf)
    if about.share is None:
        return FlatPiece(about.shape, 0, torch.empty(0, dtype=about.dtype, device=device))
    if about.share.owner is None:
        return leaf
    # A range of a stack has that range of the state, whose matrices are as many.
    start = about.share.start * prod(about.shape) // max(prod(about.share.whole), 1)
    return FlatPiece(about.shape, start, leaf.reshape(-1))


def local_state(walk: Walk, tx: Transform, params: PyTree, logical: PyTree) -> PyTree:
    """The state that a logical one describes."""
    meta = walk.init(tx, tree.map(lambda leaf: torch.empty_like(local_of(leaf), device="meta"), params))
    leaves, treedef = tree.flatten(logical)

    def at(wanted: Any, leaf: Any) -> Any:
        if isinstance(leaf, FlatPiece):
            return None if wanted is None else leaf.data.view(wanted.shape)
        return local_of(leaf)

    local = [at(wanted, leaf) for wanted, leaf in zip(tree.leaves(meta), leaves, strict=True)]
    state = tree.unflatten(treedef, local)
    return dressed(walk, tx, params, state) if walk.layout.dtensors else state
