"""A transform that looks at one leaf at a time, run by buckets of leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.sharding.offload.home import Home
from muonfx.sharding.offload.near import device_of
from muonfx.sharding.offload.turns import Turns, cut, owners_of, sizes_of
from muonfx.tree import PyTree

__all__ = ["streamed"]


def streamed(
    home: Home,
    tx: Transform,
    run: Callable[..., Any],
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    donate: Donation,
    extras: Mapping[str, Any],
    *,
    absent: bool = False,
) -> tuple[PyTree, PyTree]:
    """Update by buckets of leaves.

    Args:
        home: where the state lies.
        tx: the transform.
        run: a function like its `run`.
        updates: the whole tree of them.
        state: the whole state.
        params: the whole tree of them, or None.
        donate: what is given.
        extras: named values.
        absent: run it also on leaves that have no update.
    """
    leaves, treedef = tree.flatten(updates)
    names = tree.names(updates)
    weights = leaves if params is None else tree.leaves(params)
    given = device_of(updates, params)
    device = home.device(given)
    owners = owners_of(state, updates)
    pairs = zip(names, leaves, strict=True)
    sizes = sizes_of([name for name, leaf in pairs if absent or leaf is not None], state, owners)
    far = params is not None and tx.reads_params and any(w is not None and w.device != device for w in weights)
    at_once = not any(sizes.values()) and device == given and not far
    buckets = [list(sizes)] if at_once else cut(sizes, home.bucket_bytes)
    turns = Turns(home, given, state, owners, buckets, donate)

    def values(mine: set[str]) -> PyTree:
        if not far:
            return params
        near = [w.to(device) if n in mine and w is not None else w for n, w in zip(names, weights, strict=True)]
        return tree.unflatten(treedef, near)

    results: dict[str, Any] = {}
    try:
        for turn, bucket in enumerate(buckets):
            mine = set(bucket)
            some = [leaf if name in mine else None for name, leaf in zip(names, leaves, strict=True)]
            out = turns.run(turn, run, tree.unflatten(treedef, some), values(mine), extras, may_write=donate.updates)
            results |= {n: leaf for n, leaf in zip(names, tree.leaves(out), strict=True) if n in mine}
    except BaseException:
        turns.abandon()
        raise
    return tree.unflatten(treedef, [results.get(name) for name in names]), turns.end()
