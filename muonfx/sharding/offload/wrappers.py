"""Transforms that call others and have a state of their own, or change that of the others: how each is streamed.

Each is run with `identity` in the place of what it calls, to do its own work by buckets; the transform that it calls is
run on what comes of that, as the wrapper itself would do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from muonfx import tree
from muonfx.core import NOTHING, Donation, EmptyState, Locality, Transform, identity, transform
from muonfx.sharding.kinds import with_parts
from muonfx.sharding.offload.stream import streamed
from muonfx.transforms._pinned import state_dtype
from muonfx.transforms.accumulate import accumulate, count_seen
from muonfx.transforms.average import master_params
from muonfx.transforms.nonfinite import skip_nonfinite
from muonfx.tree import PyTree

__all__ = ["Wrapper", "wrapper_of"]

Extras = Mapping[str, Any]


class _Init(Protocol):
    def __call__(self, walk: Any, tx: Transform, params: PyTree) -> PyTree: ...


class _Update(Protocol):
    def __call__(
        self, walk: Any, tx: Transform, updates: PyTree, state: Any, params: PyTree, donate: Donation, extras: Extras
    ) -> tuple[PyTree, PyTree]: ...


class Wrapper(NamedTuple):
    """How one kind of wrapper is done; its inner transform is one that streams itself."""

    init: _Init
    update: _Update


def wrapper_of(tx: Transform) -> Wrapper | None:
    """How a transform is done that needs care of its own; None for all others."""
    return _WRAPPERS.get(tx.factory)


def _inner(tx: Transform) -> Transform:
    return tx.arguments["inner"]


def _bare(tx: Transform) -> Transform:
    """A wrapper around nothing."""
    return with_parts(tx, lambda part: identity())


# ------------------------------------------------------------------------------------------------------ accumulate


def _init_around(walk: Any, tx: Transform, params: PyTree) -> PyTree:
    own = walk.init_pieces(_bare(tx), params)
    return own._replace(inner=_inner(tx).functions.init(params))


def _accumulate(
    walk: Any, tx: Transform, updates: PyTree, state: Any, params: PyTree, donate: Donation, extras: Extras
) -> tuple[PyTree, PyTree]:
    """Add to the sums by buckets; what comes out when it is time is the gradient for the inner transform."""
    bare = _bare(tx)
    combined, after = streamed(
        walk.home, bare, bare.run, updates, state._replace(inner=EmptyState()), params, donate, extras, absent=True
    )
    extras = {name: value for name, value in extras.items() if name != "boundary"}
    if int(after.count):  # host memory; not yet time
        seen = count_seen(state.seen, updates)
        return combined, after._replace(seen=seen, inner=walk.kept(state.inner, updates, donate))
    out, inner = _inner(tx).run(combined, state.inner, params, donate=Donation(True, donate.state), **extras)
    return out, after._replace(seen=torch.zeros_like(state.seen), inner=inner)


# -------------------------------------------------------------------------------------------------- skip_nonfinite


def _init_skip(walk: Any, tx: Transform, params: PyTree) -> PyTree:
    own = _bare(tx).functions.init(params)
    return own._replace(inner=_inner(tx).functions.init(params))


def _skip(
    walk: Any, tx: Transform, updates: PyTree, state: Any, params: PyTree, donate: Donation, extras: Extras
) -> tuple[PyTree, PyTree]:
    """Ask whether the step is good, and do it or not: to select between two states would bring in both."""
    clean, after = _bare(tx).run(updates, state._replace(inner=EmptyState()), params, donate=donate, **extras)
    if int(after.in_a_row):
        return clean, after._replace(inner=walk.kept(state.inner, updates, donate))
    out, inner = _inner(tx).run(clean, state.inner, params, donate=Donation(True, donate.state), **extras)
    return out, after._replace(inner=inner)


# --------------------------------------------------------------------------------------------------- master_params


@transform(locality=Locality.ELEMENT)
def _already(done: Any):
    """Stands for a transform that has been run on all leaves."""

    def init(params: PyTree) -> EmptyState:
        return EmptyState()

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        return tree.map(lambda _, out: out, updates, done.values), state

    return init, update


class _Done:
    """What a transform has returned; itself and not its leaves is an argument."""

    def __init__(self, values: PyTree) -> None:
        self.values = values


def _init_master(walk: Any, tx: Transform, params: PyTree) -> PyTree:
    own = walk.init_pieces(_bare(tx), params)
    dtype = tx.arguments["dtype"]
    master = tree.map(lambda p: p.detach().to(state_dtype(dtype, p.dtype)), params)
    return own._replace(inner=_inner(tx).functions.init(master))


def _master(
    walk: Any, tx: Transform, updates: PyTree, state: Any, params: PyTree, donate: Donation, extras: Extras
) -> tuple[PyTree, PyTree]:
    """Run the inner transform on the master where it lies, then add to it by buckets."""
    if params is None:
        raise ValueError("master_params needs the parameters: call update(updates, state, params)")
    wide = tree.map(lambda leaf, master: leaf.to(master.dtype), updates, state.master)
    fresh = all(new is not old for new, old in zip(tree.tensors(wide), tree.tensors(updates), strict=True))
    out, inner = _inner(tx).run(
        wide, state.inner, state.master, donate=Donation(donate.updates or fresh, donate.state), **extras
    )
    around = with_parts(tx, lambda part: _already(_Done(out)))
    differences, after = streamed(
        walk.home, around, around.run, updates, state._replace(inner=EmptyState()), params, donate, extras
    )
    return differences, after._replace(inner=inner)


_WRAPPERS: dict[Any, Wrapper] = {
    accumulate: Wrapper(_init_around, _accumulate),
    skip_nonfinite: Wrapper(_init_skip, _skip),
    master_params: Wrapper(_init_master, _master),
}
