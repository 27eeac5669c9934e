"""Transforms that combine other transforms, and the simplest transforms, such as `identity`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core.checks import (
    PLAIN,
    check_floating,
    check_structure,
    check_updates_fit,
    count_update_in_graph,
    warn_of_growing_graphs,
)
from muonfx.core.contract import EmptyState, Transform, entries_of
from muonfx.core.definition import Combinator, Locality, Memory
from muonfx.core.donation import NOTHING, Donation, check_writable, copied_where_shared
from muonfx.core.factory import transform, with_memory
from muonfx.core.order import check_order
from muonfx.core.recorded import part_names
from muonfx.tree import PyTree
from muonfx.tree.elementwise import apply, cast_like, wide_dtype

T = TypeVar("T")


def no_state(params: PyTree) -> EmptyState:
    """Return an `EmptyState`. This is the ``init`` function of transforms without state."""
    return EmptyState()


@transform(locality=Locality.ELEMENT, position="observer")
def identity():
    """Make a transform that returns its updates unchanged.

    >>> identity().update({"w": torch.ones(2)}, EmptyState())
    ({'w': tensor([1., 1.])}, EmptyState())
    """

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        return updates, state

    return no_state, update


@transform(locality=Locality.ELEMENT, position="either_sign")
def set_to_zero():
    """Replace all updates by zeros, for example to freeze the parameters that have one label in `partition`.

    >>> set_to_zero().update({"w": torch.ones(2)}, EmptyState())[0]
    {'w': tensor([0., 0.])}
    """

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        return tree.map(torch.zeros_like, updates), state

    return no_state, update


@transform(locality=lambda function, locality=Locality.TREE: locality, position="either_sign")
def stateless(function: Callable[[PyTree, PyTree], PyTree], locality: Locality = Locality.TREE):
    """Make a transform without state from a function ``(updates, params) -> updates``.

    Args:
        function: a function that does not modify its inputs. To pickle the transform, define the function in a module.
        locality: the part of the tree that the function reads to compute one element of its output, as a `Locality`.
            The default TREE is always correct; a smaller locality saves communication if parameters are sharded.

    Raises:
        TypeError: ``function`` cannot be called.

    >>> halve = stateless(lambda updates, params: tree.map(lambda u: u / 2, updates))
    >>> halve.update({"w": torch.ones(2)}, EmptyState())[0]
    {'w': tensor([0.5000, 0.5000])}
    """
    if not callable(function):
        raise TypeError(f"stateless: function must be a function (updates, params) -> updates, found {function!r}")

    def update(updates: PyTree, state: EmptyState, params: PyTree = None):
        out = function(updates, params)
        check_structure("stateless: the updates that the function returns", out, "the updates given to it", updates)
        return out, state

    return no_state, update


def chain_entries(tx: Transform) -> dict[str, Transform] | None:
    """Return a dict from name to member if a transform is a `chain`; otherwise return None."""
    return dict(zip(part_names(tx), tx.children, strict=True)) if tx.declaration.combinator.in_sequence else None


def widest(transforms: Any) -> Locality:
    """Return the largest `Locality` among several transforms, which is the locality of a chain of them."""
    return max((tx.locality for tx in transforms), default=Locality.ELEMENT)


def is_new(new: PyTree, old: PyTree) -> bool:
    """Return True if the trees ``new`` and ``old`` have no tensor object in common."""
    if torch.compiler.is_compiling():
        # The identities of gradients would be guards, which fail at each step. A compiler reuses memory by itself.
        return False
    return tree.ids(old).isdisjoint(tree.ids(new))


@transform(
    locality=lambda *transforms: widest(entries_of(transforms).values()),
    combinator=Combinator(in_sequence=True),
)
@with_memory
def chain(_memory: Memory, *transforms: Transform | tuple[str, Transform]):
    """Apply transforms in sequence: each transform receives the updates that the previous transform returned.

    The state is a dict from the name of each transform to its state. If a name repeats, it gets a suffix (``scale``,
    ``scale_2``). Corresponds to ``chain`` and ``named_chain`` of Optax.

    Args:
        *transforms: transforms, or pairs ``(name, transform)`` to choose the name. An empty chain returns its updates
            unchanged.

    Raises:
        TypeError: an argument is not a transform.
        ValueError: two explicit names are equal, or the order is wrong. Wrong orders are two learning rates, weight
            decay after the learning rate, and a transform that needs the final updates (`ema_params`) before it.

    Warns:
        UserWarning: a learning rate has no effect, because a later transform sets the size of the updates; or a
            transform that needs the final updates is followed by a transform that may change them.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.momentum(), ("rate", mfx.scale(-0.1)))
        >>> list(tx.init({"w": torch.zeros(2)}))
        ['momentum', 'rate']
    """
    entries = entries_of(transforms)
    if not (_memory or torch.compiler.is_compiling()):
        check_order("chain", entries)
        _memory["checked"] = True  # the order does not depend on numbers, so it is not checked again when they change

    def init(params: PyTree) -> dict[str, PyTree]:
        return {name: tx.functions.init(params) for name, tx in entries.items()}

    def update(
        updates: PyTree, state: dict[str, PyTree], params: PyTree = None, *, donate: Donation = NOTHING, **extras: Any
    ):
        new_state: dict[str, PyTree] = {}
        may_write = donate.updates
        for name, tx in entries.items():
            out, new_state[name] = tx.run(
                updates, state[name], params, donate=Donation(may_write, donate.state), **extras
            )
            # Nothing else holds new tensors of a transform that follows `Donation`, so the next one may overwrite them.
            may_write = donate.state and tx.keeps_donation_promise and (may_write or is_new(out, updates))
            updates = out
        return updates, new_state

    return init, update


@transform(
    locality=lambda *transforms: widest(entries_of(transforms, "add_updates").values()),
    reads_params=lambda *transforms: any(tx.reads_params for tx in entries_of(transforms, "add_updates").values()),
)
def add_updates(*transforms: Transform | tuple[str, Transform]):
    """Apply several transforms to the same updates, and return the sum of their outputs.

    If a transform returns None for a leaf, the leaf gets the sum of the other outputs, or None if there is no other.
    The state is a dict from the name of each transform to its state, as in `chain`.

    Args:
        *transforms: one or more transforms, or pairs ``(name, transform)`` to choose the name.

    Raises:
        TypeError: an argument is not a transform.
        ValueError: no transform was given, or two explicit names are equal.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.add_updates(mfx.scale(0.5), ("sign", mfx.chain(mfx.scale_by_lion(), mfx.scale(0.1))))
        >>> tx.update({"w": torch.tensor([2.0, -4.0])}, tx.init({"w": torch.zeros(2)}))[0]
        {'w': tensor([ 1.1000, -2.1000])}
    """
    entries = entries_of(transforms, "add_updates")
    if not entries:
        raise ValueError(
            "add_updates: found no transform, expected at least one; for updates of zero, use set_to_zero()"
        )

    def init(params: PyTree) -> dict[str, PyTree]:
        return {name: tx.functions.init(params) for name, tx in entries.items()}

    def update(
        updates: PyTree, state: dict[str, PyTree], params: PyTree = None, *, donate: Donation = NOTHING, **extras: Any
    ):
        new_state: dict[str, PyTree] = {}
        outputs: list[PyTree] = []
        for name, tx in entries.items():
            # Every transform gets the same updates, so none may overwrite them.
            out, new_state[name] = tx.run(updates, state[name], params, donate=Donation(False, donate.state), **extras)
            outputs.append(out)
        treedef = tree.flatten(updates)[1]
        columns = zip(*[tree.subtrees(treedef, out) for out in outputs], strict=True)
        return tree.unflatten(treedef, [functools.reduce(_sum, column) for column in columns]), new_state

    return init, update


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Add two updates in float32 or wider, and round the sum to the dtype of the first. None counts as zero."""
    if a is None or b is None:
        return b if a is None else a
    wide = wide_dtype(a.dtype, b.dtype)
    return (a.to(wide) + b.to(wide)).to(a.dtype)


def apply_updates(params: T, updates: PyTree, *, donate: bool = False) -> T:
    """Add updates to parameters: ``params + updates``, rounded once to the parameter's dtype.

    Args:
        params: a tree of tensors.
        updates: a tree of the same structure. A parameter whose update is ``None`` is returned unchanged.
        donate: ``True`` is the promise not to use ``params`` again, so they are overwritten and returned. A parameter
            that shares memory with another parameter or with an update is copied first.

    Returns:
        The new parameters, in a tree like ``params``.

    Raises:
        TypeError: ``donate`` is not a bool, or a leaf is not a floating-point tensor.
        ValueError: the trees differ in structure or shapes, or ``donate=True`` with a parameter whose elements share
            memory, as after ``expand()``. The message names the leaf.

    Warns:
        UserWarning: the parameters, but not the updates, have an autograd graph of earlier steps, as in
            `Transform.update`.

    >>> apply_updates({"w": torch.ones(2), "b": torch.ones(1)}, {"w": torch.ones(2), "b": None})
    {'w': tensor([2., 2.]), 'b': tensor([1.])}
    """
    if type(donate) is not bool:
        raise TypeError(f"apply_updates: donate must be True or False, found {donate!r}")

    leaves, treedef = tree.flatten(params)
    if not torch.compiler.is_compiling():
        warn_of_growing_graphs("apply_updates", params, leaves, updates)
    try:
        changes = tree.subtrees(treedef, updates)
        # Shapes are compared before anything is overwritten; tensors of other shapes would be broadcast.
        present = [(own, new) for own, new in zip(leaves, changes, strict=True) if not (own is None or new is None)]
        if [new for own, new in present if new.shape != own.shape]:
            check_updates_fit(params, updates)
        if donate:
            check_writable("apply_updates: params", params)
            leaves = copied_where_shared(leaves, changes)
        if not donate and PLAIN.issuperset(map(type, leaves)) and PLAIN.issuperset(map(type, changes)):
            added = cast_like(apply("add", leaves, changes), leaves)
        else:
            added = [
                own if own is None or new is None else own.add_(new) if donate else (own + new).to(own.dtype)
                for own, new in zip(leaves, changes, strict=True)
            ]
    except (AttributeError, TypeError, ValueError):
        check_floating("params", params)
        check_floating("updates", updates)
        check_updates_fit(params, updates)
        raise
    if not torch.compiler.is_compiling():
        count_update_in_graph(leaves, added)
    return tree.unflatten(treedef, added)
