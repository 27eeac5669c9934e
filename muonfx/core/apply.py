"""`apply_updates`, which adds updates to parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core.checks import (
    PLAIN,
    check_floating,
    check_updates_fit,
    count_update_in_graph,
    warn_of_growing_graphs,
)
from muonfx.core.donation import check_writable, copied_where_shared
from muonfx.tree import PyTree
from muonfx.tree.elementwise import apply, cast_like

T = TypeVar("T")


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
        update_leaves = tree.subtrees(treedef, updates)
        # Tensors of other shapes would be broadcast.
        if not _have_equal_shapes(leaves, update_leaves):
            check_updates_fit(params, updates)
        if donate:
            check_writable("apply_updates: params", params)
            leaves = copied_where_shared(leaves, update_leaves)
        new_leaves = _sums(leaves, update_leaves, in_place=donate)
    except (AttributeError, TypeError, ValueError):
        # A step must be fast, so inputs are examined leaf by leaf only after a failure, for an error that names a leaf.
        _check_inputs(params, updates)
        raise
    if not torch.compiler.is_compiling():
        count_update_in_graph(leaves, new_leaves)
    return tree.unflatten(treedef, new_leaves)


def _check_inputs(params: PyTree, updates: PyTree) -> None:
    """Raise if parameters and updates are not trees of floating-point tensors with equal structures and shapes."""
    if type(updates) is tuple and type(params) is not tuple:
        raise TypeError(
            "apply_updates: found a tuple in place of updates: Transform.update returns a pair (updates, state), "
            "pass the first"
        ) from None
    check_floating("params", params)
    check_floating("updates", updates)
    check_updates_fit(params, updates)


def _have_equal_shapes(leaves: Sequence[Any], update_leaves: Sequence[Any]) -> bool:
    """Return True if each update has the shape of its parameter. None fits any shape."""
    for leaf, update in zip(leaves, update_leaves, strict=True):
        if leaf is not None and update is not None and leaf.shape != update.shape:
            return False
    return True


def _sums(leaves: list[Any], update_leaves: list[Any], *, in_place: bool) -> list[Any]:
    """Return ``parameter + update`` for two lists, rounded to the parameter's dtype. Without update: the parameter."""
    all_are_plain_tensors = PLAIN.issuperset(map(type, [*leaves, *update_leaves]))
    # Other leaves are added one by one: a leaf may be None, and a tensor that is overwritten rounds the sum by itself.
    if all_are_plain_tensors and not in_place:
        return cast_like(apply("add", leaves, update_leaves), leaves)  # one call for all tensors
    pairs = zip(leaves, update_leaves, strict=True)
    return [_add(leaf, update, in_place=in_place) for leaf, update in pairs]


def _add(leaf: Tensor | None, update: Tensor | None, *, in_place: bool) -> Tensor | None:
    if leaf is None or update is None:
        return leaf
    if in_place:
        return leaf.add_(update)
    return (leaf + update).to(leaf.dtype)
