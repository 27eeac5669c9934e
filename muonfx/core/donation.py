"""Donation: the promise of a caller not to use inputs again, and the search for tensors that share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core.checks import PLAIN
from muonfx.internal.tracing import functorch_is_active, is_traced
from muonfx.polar.checks import overlaps_itself, sharing
from muonfx.tree import PyTree


class Donation(NamedTuple):
    """The inputs of ``update`` that the caller promises not to use again, so that their storage may be overwritten.

    ``update(..., donate=True)`` donates the updates and the state, as does ``Donation(updates=True, state=True)``. The
    results are the same as without a donation.

    A transform receives this value if its ``update`` has the argument ``donate``. Its author promises in turn that the
    returned updates share storage neither with each other nor with the new state. They may share it with the incoming
    updates only if these were donated, or if the same tensor is returned.

    >>> Donation.of(True)
    Donation(updates=True, state=True)
    """

    updates: bool = False
    """True if the incoming updates may be overwritten."""
    state: bool = False
    """True if the incoming state may be overwritten."""

    @classmethod
    def of(cls, donate: bool | Donation) -> Donation:
        """Convert the argument ``donate`` of ``update`` to a `Donation`. A bool applies to both updates and state.

        Raises:
            TypeError: ``donate`` is neither a bool nor a `Donation` of bools.
        """
        given = donate if isinstance(donate, Donation) else cls(donate, donate)
        if type(given.updates) is not bool or type(given.state) is not bool:
            raise TypeError(f"donate must be True, False or a muonfx.Donation of two bools, found {donate!r}")
        return given


NOTHING = Donation()


def unshared(donate: Donation, updates: PyTree, state: PyTree, params: PyTree) -> tuple[Donation, PyTree, PyTree]:
    """Copy donated tensors that share memory; return ``(donate, updates, state)``. Donate nothing while tracing."""
    if not (donate.updates or donate.state):
        return donate, updates, state
    if functorch_is_active() or is_traced():
        return NOTHING, updates, state  # memory cannot be compared here
    given, own = tree.leaves(updates), tree.leaves(state)
    shared = _sharing([*given, *own, *tree.leaves(params)])
    if shared and donate.updates:
        updates = _copied(updates, {place for place in shared if place < len(given)})
    if shared and donate.state:
        state = _copied(state, {place - len(given) for place in shared if 0 <= place - len(given) < len(own)})
    return donate, updates, state


def copied_where_shared(given: list[Any], others: list[Any]) -> list[Any]:
    """Return the list ``given`` with clones of the tensors that share memory with a tensor of either list."""
    leaves = [*given, *others]
    if not (functorch_is_active() or is_traced()):
        shared = _sharing(leaves)
    else:  # memory cannot be compared here: only find tensors that occur twice
        first: dict[Tensor, int] = {}
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        pairs = [(first.setdefault(leaves[place], place), place) for place in places]
        shared = {place for pair in pairs if pair[0] != pair[1] for place in pair}
    return [leaf.clone() if place in shared else leaf for place, leaf in enumerate(given)] if shared else given


def _copied(given: PyTree, places: set[int]) -> PyTree:
    if not places:
        return given
    leaves, treedef = tree.flatten(given)
    return tree.unflatten(treedef, [leaf.clone() if at in places else leaf for at, leaf in enumerate(leaves)])


def _sharing(leaves: Sequence[Any]) -> set[int]:
    """Return the indices of tensors that share memory with another tensor, or whose own elements overlap."""
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    held = [leaves[place] for place in places]
    if not PLAIN.issuperset(map(type, held)):
        held = list(map(_in_memory, held))
    return set(map(places.__getitem__, sharing(held)))


def _in_memory(leaf: Tensor) -> Tensor:
    """Return the plain tensor that stores the elements of a leaf, such as the local tensor of a DTensor."""
    while type(leaf) not in PLAIN and hasattr(leaf, "__tensor_flatten__"):
        inner: Any = leaf
        leaf = getattr(inner, inner.__tensor_flatten__()[0][0])
    return leaf


def check_writable(what: str, params: PyTree) -> None:
    """Raise ValueError if a parameter's elements share memory, as after ``expand()``, so in-place updates fail."""
    for place, leaf in enumerate(tree.leaves(params)):
        if type(leaf) in PLAIN and leaf.is_contiguous():
            continue
        if isinstance(leaf, Tensor) and overlaps_itself(_in_memory(leaf)):
            raise ValueError(
                f"{what}: {tree.names(params)[place]!r} has shape {tuple(leaf.shape)} and strides {leaf.stride()}, so "
                "several elements share memory (as after expand()), expected a tensor that can be modified in place: "
                "pass a .clone() of it"
            )
