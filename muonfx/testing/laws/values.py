"""Laws of values: a transform is defined by its factory and arguments, for printing, equality, pickling and pytrees."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from typing import Any

import torch.utils._pytree as torch_pytree

from muonfx import contrib, tree
from muonfx.core import Transform
from muonfx.core.hyperparams import hyperparams
from muonfx.core.value import Recorded
from muonfx.testing.examples import history
from muonfx.testing.law import law
from muonfx.testing.violation import Breach, require_same, values_within
from muonfx.tree import PyTree


def names_within(tx: Transform) -> dict[str, Any]:
    """Return the names that ``eval(repr(tx))`` needs: a dict from each name to its factory, function or class."""
    found: dict[str, Any] = {}
    for value in values_within(tx):
        if isinstance(value, Recorded):
            found[value.factory.__name__] = value.factory
        elif inspect.isfunction(value) or inspect.isclass(value):
            found[value.__qualname__] = value
        elif type(value).__module__ not in ("builtins", "torch"):
            found[type(value).__name__] = type(value)
    return found


def _has_a_nameless_function(tx: Transform) -> str | None:
    nameless = [name for name in names_within(tx) if not name.isidentifier()]
    return f"an argument is {nameless[0]}, which is not a name that eval can look up" if nameless else None


@law(share=0.05, unless=_has_a_nameless_function)
def repr_evaluates_to_an_equal_transform(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``eval(repr(tx)) == tx``, with the names of `muonfx`, `muonfx.contrib` and the user's factories.

    >>> import muonfx as mfx
    >>> repr_evaluates_to_an_equal_transform(mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1)), {}, [])
    """
    printed = eval(repr(tx), {**names_within(tx), **vars(contrib), **vars(sys.modules["muonfx"])})
    if printed != tx:
        raise Breach(None, f"its repr evaluates to {printed!r}, which is not equal to it")
    if hash(printed) != hash(tx):
        raise Breach(None, "its repr evaluates to an equal value with another hash")


def is_in_no_module(tx: Transform) -> str | None:
    """Return why a transform cannot be pickled or compiled, if no module contains a part of it; else return None."""
    missing = [value for value in names_within(tx).values() if value.__module__ not in sys.modules]
    return f"{missing[0].__qualname__} is not in a module that can be imported" if missing else None


@law(share=0.1, unless=is_in_no_module)
def pickle_gives_an_equal_transform(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that `pickle` and `copy.deepcopy` return an equal transform with the same updates and states.

    >>> import muonfx as mfx
    >>> pickle_gives_an_equal_transform(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    expected = history(tx, params, steps)
    for how, other in (("pickle", pickle.loads(pickle.dumps(tx))), ("copy.deepcopy", copy.deepcopy(tx))):
        if other != tx or repr(other) != repr(tx):
            raise Breach(None, f"{how} gives {other!r}, which is not equal to it")
        if other.fingerprint != tx.fingerprint or other.locality != tx.locality:
            raise Breach(None, f"{how} gives a transform with another fingerprint or locality")
        require_same(f"(updates, state) after {how}", history(other, params, steps), expected, "of the original")


@law(share=0.05)
def replacing_nothing_changes_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``tx.replace(**tx.arguments) == tx``, and that an unknown argument of `replace` raises a TypeError.

    >>> import muonfx as mfx
    >>> replacing_nothing_changes_nothing(mfx.momentum(), {}, [])
    """
    other = tx.replace(**tx.arguments)
    if other != tx:
        raise Breach(None, f"replace with its own arguments gives {other!r}")
    try:
        tx.replace(an_argument_that_it_does_not_have=1)
    except TypeError:
        return
    raise Breach(None, "replace takes an argument that the factory does not have")


@law(share=0.05)
def fingerprint_ignores_numbers(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that transforms that differ only in numbers have one fingerprint (their identity in checkpoints).

    >>> import muonfx as mfx
    >>> fingerprint_ignores_numbers(mfx.momentum(), {}, [])
    """
    leaves, treedef = tree.flatten(tx)
    other = tree.unflatten(treedef, [leaf * 0.5 + 0.1 for leaf in leaves])
    if other.fingerprint != tx.fingerprint:
        found = f"the fingerprint {tx.fingerprint} becomes {other.fingerprint} with other numbers, {other!r}"
        raise Breach(None, found)


@law(share=0.05)
def pytree_views_round_trip(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that optree and torch flatten a transform to the same leaves, and unflatten these to an equal transform.

    Unflattening must also accept other objects as leaves, because functions on pytrees use placeholders.

    >>> import muonfx as mfx
    >>> pytree_views_round_trip(mfx.momentum(), {}, [])
    """
    leaves, treedef = tree.flatten(tx)
    torch_leaves, torch_def = torch_pytree.tree_flatten(tx)
    if len(leaves) != len(torch_leaves) or any(a is not b for a, b in zip(leaves, torch_leaves, strict=True)):
        raise Breach(None, f"optree sees the leaves {leaves}, torch {torch_leaves}")
    if len(hyperparams(tx)) != len(leaves):
        raise Breach(None, f"has {len(leaves)} leaves but the hyperparameters {list(hyperparams(tx))}: names repeat")
    if tree.unflatten(treedef, leaves) != tx or torch_pytree.tree_unflatten(torch_leaves, torch_def) != tx:
        raise Breach(None, "flattened and unflattened, it is not equal to the original")
    anything = [object() for _ in leaves]
    for how, back, back_def, expected in (
        ("optree", *tree.flatten(tree.unflatten(treedef, anything)), treedef),
        ("torch", *torch_pytree.tree_flatten(torch_pytree.tree_unflatten(anything, torch_def)), torch_def),
    ):
        if len(back) != len(anything) or any(a is not b for a, b in zip(back, anything, strict=True)):
            raise Breach(None, f"with arbitrary objects as leaves, {how} returns other leaves")
        if back_def != expected:
            raise Breach(None, f"with arbitrary objects as leaves, {how} returns another structure")
