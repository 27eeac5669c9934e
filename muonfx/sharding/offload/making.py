"""A new state, made by buckets, each of which goes home before the next is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.sharding.offload.home import Home
from muonfx.sharding.offload.near import device_of
from muonfx.sharding.offload.turns import owners_of, settled
from muonfx.tree import PyTree

__all__ = ["made_by"]


def made_by(
    home: Home,
    buckets: Sequence[Sequence[str]],
    params: PyTree,
    init: Callable[[PyTree], PyTree],
    *,
    outside: str | None,
) -> PyTree:
    """Make a state of those that `init` gives for each bucket of parameters.

    Args:
        home: where it is to lie.
        buckets: names, at least one list of them.
        params: the whole tree.
        init: makes a state for a tree like it.
        outside: the device of what stands for the parameters of the other buckets: "meta", or None for nothing.
    """
    leaves, treedef = tree.flatten(params)
    names = tree.names(params)
    device = home.device(device_of(params))
    found: list[Any] = []
    structure: Any = None
    for turn, bucket in enumerate(buckets):
        some = [_only(leaf, name in bucket, device, outside) for name, leaf in zip(names, leaves, strict=True)]
        with warnings.catch_warnings():
            if turn:  # what there is to warn of has been said
                warnings.simplefilter("ignore")
            made = init(tree.unflatten(treedef, some))
        state = _mine(made, params, bucket)
        del made  # not beside that of the next bucket
        state = settled(home, device, state, owners_of(state, params), copy=False)
        new, structure = tree.flatten(state)
        found = [_better(a, b) for a, b in zip(found or [None] * len(new), new, strict=True)]
    return tree.unflatten(structure, found)


def _mine(state: PyTree, params: PyTree, bucket: Sequence[str]) -> PyTree:
    """A state without what belongs to the parameters of other buckets."""
    leaves, treedef = tree.flatten(state)
    pairs = zip(leaves, owners_of(state, params), strict=True)
    return tree.unflatten(treedef, [leaf if owner is None or owner in bucket else None for leaf, owner in pairs])


def _only(leaf: Any, inside: bool, device: torch.device, outside: str | None) -> Any:
    if leaf is None:
        return None
    if inside:
        return leaf.to(device)
    return None if outside is None else torch.empty_like(leaf, device=outside)


def _better(one: Any, other: Any) -> Any:
    """Of what two buckets have made for one place: what is real."""
    return other if one is None or (isinstance(one, Tensor) and one.is_meta) else one
