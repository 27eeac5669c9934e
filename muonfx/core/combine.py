"""Transforms that combine other transforms, and the simplest transforms, such as `identity`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core.checks import PLAIN, check_floating, check_structure, check_updates_fit, warn_of_growing_graphs
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
    """Return an empty state: the ``init`` of a stateless transform."""
    return EmptyState()


@transform(locality=Locality.ELEMENT, position="observer")
def identity():
    """Return the updates unchanged.

    >>> identity().update({"w": torch.ones(2)}, EmptyState())
    ({'w': tensor([1., 1.])}, EmptyState())
    """

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        return updates, state

    return no_state, update


@transform(locality=Locality.ELEMENT, position="either_sign")
def set_to_zero():
    """Replace all updates by zeros, for example to freeze the parameters of a label in `partition`.

    >>> set_to_zero().update({"w": torch.ones(2)}, EmptyState())[0]
    {'w': tensor([0., 0.])}
    """

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        return tree.map(torch.zeros_like, updates), state

    return no_state, update


@transform(locality=lambda function, locality=Locality.TREE: locality, position="either_sign")
def stateless(function: Callable[[PyTree, PyTree], PyTree], locality: Locality = Locality.TREE):
    """Make a transform from a function ``(updates, params) -> updates``.

    Args:
        function: pure; a named function of a module if the transform is to be pickled.
        locality: how much of the tree the function reads for one output element; the default TREE is always correct.

    >>> halve = stateless(lambda updates, params: tree.map(lambda u: u / 2, updates))
    >>> halve.update({"w": torch.ones(2)}, EmptyState())[0]
    {'w': tensor([0.5000, 0.5000])}
    """
    if not callable(function):
        raise TypeError(f"stateless: function must be a function (updates, params) -> updates, found {function!r}")

    def update(updates: PyTree, state: EmptyState, params: PyTree = None):
        out = function(updates, params)
        check_structure("stateless: the updates that the function returns", out, "those that it is given", updates)
        return out, state

    return no_state, update


def chain_entries(tx: Transform) -> dict[str, Transform] | None:
    """Return a chain's transforms by name, or None if a transform does not call its parts in sequence."""
    return dict(zip(part_names(tx), tx.children, strict=True)) if tx.declaration.combinator.in_sequence else None


def widest(transforms: Any) -> Locality:
    """Return the largest locality of transforms that run in sequence or in parallel."""
    return max((tx.locality for tx in transforms), default=Locality.ELEMENT)


def is_new(new: PyTree, old: PyTree) -> bool:
    """Return True if no leaf of the new tree is a leaf of the old tree."""
    given = tree.ids(old)
    return not [leaf for leaf in tree.ids(new) if leaf in given]  # torch.compile cannot trace `isdisjoint` of ids


@transform(
    locality=lambda *transforms: widest(entries_of(transforms).values()),
    combinator=Combinator(in_sequence=True),
)
@with_memory
def chain(_memory: Memory, *transforms: Transform | tuple[str, Transform]):
    """Apply transforms one after another.

    The state is a dict with the state of each transform under its name; a name that repeats gets a suffix (``scale``,
    ``scale_2``). A pair ``(name, transform)`` sets the name. Follows Optax's ``chain`` and ``named_chain``.

    Raises:
        TypeError: an argument is not a transform.
        ValueError: two explicit names are equal, or the order gives wrong numbers: two learning rates, weight decay
            after the learning rate, or a transform that needs the final updates, as `ema_params` does, before it.

    Warns:
        UserWarning: a learning rate has no effect because the next transform sets the size of updates, or updates
            change after a transform that comes last.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.momentum(), ("rate", mfx.scale(-0.1)))
        >>> list(tx.init({"w": torch.zeros(2)}))
        ['momentum', 'rate']
    """
    entries = entries_of(transforms)
    if not (_memory or torch.compiler.is_compiling()):
        check_order("chain", entries)
        _memory["checked"] = True  # once, not again when numbers change

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
            # New tensors from a transform that keeps the donation promise belong to this chain alone.
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

    A leaf for which some transforms return None gets the sum of the others, and None if all do. The state is a dict
    with the state of each transform under its name, as in `chain`.

    Args:
        transforms: one or more transforms, or pairs ``(name, transform)``.

    Raises:
        TypeError: an argument is not a transform.
        ValueError: there is none, or two explicit names are equal.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.add_updates(mfx.scale(0.5), ("sign", mfx.chain(mfx.scale_by_lion(), mfx.scale(0.1))))
        >>> tx.update({"w": torch.tensor([2.0, -4.0])}, tx.init({"w": torch.zeros(2)}))[0]
        {'w': tensor([ 1.1000, -2.1000])}
    """
    entries = entries_of(transforms, "add_updates")
    if not entries:
        raise ValueError("add_updates: give at least one transform; for none of the updates there is set_to_zero()")

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
    """Add two updates in at least fp32 and round once, to the dtype of the first."""
    if a is None or b is None:
        return b if a is None else a
    wide = wide_dtype(a.dtype, b.dtype)
    return (a.to(wide) + b.to(wide)).to(a.dtype)


def apply_updates(params: T, updates: PyTree, *, donate: bool = False) -> T:
    """Add updates to parameters: ``params + updates``, rounded once to the parameter's dtype.

    Args:
        params: a tree of tensors.
        updates: a tree of the same structure; a parameter whose update is ``None`` is returned as it is.
        donate: the caller's promise not to use ``params`` again; they are then overwritten and returned. A parameter
            that shares memory with another, or with an update, is not overwritten, since the other would change too.

    Raises:
        TypeError: ``donate`` is no bool.
        ValueError: an update has not the shape of its parameter, or the trees differ in structure, or ``donate=True``
            with an expanded parameter, which cannot be overwritten; the leaf is named.

    Warns:
        UserWarning: the parameters carry the graph of earlier steps and the updates none, as in `Transform.update`.

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
    return tree.unflatten(treedef, added)
