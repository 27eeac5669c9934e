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
        donation = donate
        if not isinstance(donation, Donation):
            donation = cls(updates=donation, state=donation)
        if type(donation.updates) is not bool or type(donation.state) is not bool:
            raise TypeError(
                f"donate must be True, False or a muonfx.Donation of two bools, found {donate!r}"
            )
        return donation


NOTHING = Donation()


def unshared(
    donate: Donation, updates: PyTree, state: PyTree, params: PyTree
) -> tuple[Donation, PyTree, PyTree]:
    """Copy donated tensors that share memory, so that overwriting one does not change another.

    The caller of a step donates updates or a state: it promises not to use them again. Two tied weights, for example,
    may have one gradient tensor. Return ``(donate, updates, state)``, in which nothing is donated while tracing.

    >>> gradient = torch.ones(2)
    >>> _, updates, _ = unshared(Donation(updates=True), {"a": gradient, "b": gradient}, {}, {})
    >>> updates["a"] is updates["b"]
    False
    """
    if not (donate.updates or donate.state):  # nothing will be overwritten
        return donate, updates, state
    # Traced tensors have no memory to compare, so nothing is overwritten.
    if functorch_is_active() or is_traced():
        return NOTHING, updates, state
    # Parameters are compared too, since a gradient may share their memory.
    shared = _sharing([*tree.leaves(updates), *tree.leaves(state), *tree.leaves(params)])
    if shared and donate.updates:
        updates = _with_clones(updates, shared)
    if shared and donate.state:
        state = _with_clones(state, shared)
    return donate, updates, state


def copied_where_shared(params: list[Any], updates: list[Any]) -> list[Any]:
    """Return the list ``params`` with clones of the tensors that share memory with a tensor of either list.

    The result can then be overwritten one by one. If an update is a view of a parameter, the parameter is cloned.
    """
    leaves = [*params, *updates]
    if functorch_is_active() or is_traced():  # memory cannot be compared then
        return _with_clones(params, _repeated(leaves))
    return _with_clones(params, _sharing(leaves))


def _with_clones(values: PyTree, shared: set[Tensor]) -> PyTree:
    """Return a tree with a clone in place of each of its tensors that are in ``shared``."""
    leaves, treedef = tree.flatten(values)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf in shared:
            leaves[index] = leaf.clone()
    return tree.unflatten(treedef, leaves)


def _repeated(leaves: Sequence[Any]) -> set[Tensor]:
    """Return the tensors that occur more than once. They are compared as objects, not by their elements.

    >>> w, b = torch.zeros(1), torch.ones(1)
    >>> _repeated([w, b, w])
    {tensor([0.])}
    """
    seen: set[Tensor] = set()
    repeated: set[Tensor] = set()
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if leaf in seen:
            repeated.add(leaf)
        seen.add(leaf)
    return repeated


def _sharing(leaves: Sequence[Any]) -> set[Tensor]:
    """Return the tensors that share memory with another tensor, or whose own elements overlap.

    >>> buffer = torch.tensor([1.0, 2.0, 3.0])
    >>> first, last = buffer[:2], buffer[1:]  # both contain 2.0
    >>> _sharing([first, torch.zeros(2), last]) == {first, last}
    True
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    layouts = {tensor.layout for tensor in tensors}
    if layouts != {torch.strided}:  # sparse tensors have no single memory to compare
        tensors = [tensor for tensor in tensors if tensor.layout is torch.strided]
    plain_tensors = tensors
    # A DTensor, for example, has its memory in its local tensor.
    if not PLAIN.issuperset(map(type, tensors)):
        plain_tensors = list(map(_plain_tensor, tensors))
    shared: set[Tensor] = set()
    for index in sharing(plain_tensors):
        shared.add(tensors[index])
    return shared


def _plain_tensor(leaf: Tensor) -> Tensor:
    """Return the plain tensor that stores the elements of a leaf, such as the local tensor of a DTensor.

    The method ``__tensor_flatten__`` of such a class returns the names of the attributes that hold its tensors.
    """
    # The tensor of the first attribute may be a wrapper again.
    while type(leaf) not in PLAIN and hasattr(leaf, "__tensor_flatten__"):
        inner: Any = leaf
        leaf = getattr(inner, inner.__tensor_flatten__()[0][0])
    return leaf


def check_writable(tree_name: str, params: PyTree) -> None:
    """Raise ValueError if a parameter's elements share memory, as after ``expand()``, so in-place updates fail.

    >>> check_writable("params", {"w": torch.zeros(1).expand(3)})
    Traceback (most recent call last):
    ValueError: params: 'w' has shape (3,) and strides (0,), so several elements share memory (as after expand()), ...
    """
    leaves = tree.leaves(params)
    # The usual case, in few calls.
    if PLAIN.issuperset(map(type, leaves)) and all(map(Tensor.is_contiguous, leaves)):
        return
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and overlaps_itself(_plain_tensor(leaf)):
            name = tree.names(params)[index]
            raise ValueError(
                f"{tree_name}: {name!r} has shape {tuple(leaf.shape)} and strides {leaf.stride()}, so several elements "
                "share memory (as after expand()), expected a tensor that can be modified in place: pass a .clone() of "
                "it"
            )
