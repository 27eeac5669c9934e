"""Laws of values: a transform is defined by its factory and arguments, for printing, equality, pickling and pytrees."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from collections.abc import Callable
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
    """Return the names that ``eval(repr(tx))`` needs: a dict from each name to its factory, function or class.

    >>> import muonfx as mfx
    >>> list(names_within(mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1))))
    ['chain', 'momentum', 'scale']
    """
    value_of_name: dict[str, Any] = {}
    for value in values_within(tx):
        if isinstance(value, Recorded):
            value_of_name[value.factory.__name__] = value.factory
        elif inspect.isfunction(value) or inspect.isclass(value):
            value_of_name[value.__qualname__] = value
        elif type(value).__module__ not in ("builtins", "torch"):
            # Whose values print without a name, as numbers do.
            value_of_name[type(value).__name__] = type(value)
    return value_of_name


def _has_a_nameless_function(tx: Transform) -> str | None:
    for name in names_within(tx):
        if not name.isidentifier():  # such as "<lambda>"
            return f"an argument is {name}, which is not a name that eval can look up"
    return None


@law(share=0.05, unless=_has_a_nameless_function)
def repr_evaluates_to_an_equal_transform(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that ``eval(repr(tx)) == tx``, with the names of `muonfx`, `muonfx.contrib` and the user's factories.

    >>> import muonfx as mfx
    >>> repr_evaluates_to_an_equal_transform(mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1)), {}, [])
    """
    # All names that the printed text may use. A factory of the user may have the name of one of muonfx, and is meant.
    names = {**vars(contrib), **vars(sys.modules["muonfx"]), **names_within(tx)}
    printed = eval(repr(tx), names)
    if printed != tx:
        raise Breach(None, f"its repr evaluates to {printed!r}, which is not equal to it")
    if hash(printed) != hash(tx):
        raise Breach(None, "its repr evaluates to an equal value with another hash")


def is_in_no_module(tx: Transform) -> str | None:
    """Return why a transform cannot be pickled or compiled, if no module contains a part of it; else return None."""
    for value in names_within(tx).values():
        if value.__module__ not in sys.modules:
            return f"{value.__qualname__} is not in a module that can be imported"
    return None


@law(share=0.1, unless=is_in_no_module)
def pickle_gives_an_equal_transform(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that `pickle` and `copy.deepcopy` return an equal transform with the same updates and states.

    >>> import muonfx as mfx
    >>> pickle_gives_an_equal_transform(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    expected = history(tx, params, steps)
    copies = {"pickle": pickle.loads(_pickled(tx)), "copy.deepcopy": copy.deepcopy(tx)}
    for how, tx_copy in copies.items():
        if tx_copy != tx or repr(tx_copy) != repr(tx):
            raise Breach(None, f"{how} gives {tx_copy!r}, which is not equal to it")
        if tx_copy.fingerprint != tx.fingerprint or tx_copy.locality != tx.locality:
            raise Breach(None, f"{how} gives a transform with another fingerprint or locality")
        require_same(
            f"(updates, state) after {how}",
            history(tx_copy, params, steps),
            expected,
            "of the original",
        )


def _pickled(tx: Transform) -> bytes:
    """Return a pickled transform. Raise `Breach` (a failed law) with advice if a part of it cannot be pickled."""
    try:
        return pickle.dumps(tx)
    except (pickle.PicklingError, AttributeError) as error:
        # AttributeError before Python 3.14, for local functions.
        advice = (
            "define its functions at the top level of a module, or leave this law out with skip="
        )
        raise Breach(None, f"cannot be pickled ({error}): {advice}") from error


@law(share=0.05)
def fingerprint_ignores_numbers(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that transforms that differ only in numbers have one fingerprint (their identity in checkpoints).

    So a run may resume with another learning rate.

    >>> import muonfx as mfx
    >>> fingerprint_ignores_numbers(mfx.momentum(), {}, [])
    """
    # The leaves of a transform are its numbers: momentum(0.9) becomes momentum(0.55).
    changed_tx = tree.map(lambda number: number * 0.5 + 0.1, tx)
    if changed_tx.fingerprint != tx.fingerprint:
        text = f"the fingerprint {tx.fingerprint} becomes {changed_tx.fingerprint} with other numbers, {changed_tx!r}"
        raise Breach(None, text)


@law(share=0.05)
def pytree_views_round_trip(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that optree and torch flatten a transform to the same leaves, and unflatten these to an equal transform.

    The leaves are its numbers: [0.9] for ``momentum(0.9)``. Unflattening must also accept other objects as leaves,
    because functions such as ``torch.func.vmap`` use placeholders.

    >>> import muonfx as mfx
    >>> pytree_views_round_trip(mfx.momentum(), {}, [])
    """
    leaves = tree.leaves(tx)
    torch_leaves = torch_pytree.tree_leaves(tx)
    if not _are_same_objects(leaves, torch_leaves):
        raise Breach(None, f"optree sees the leaves {leaves}, torch {torch_leaves}")
    if len(hyperparams(tx)) != len(leaves):
        raise Breach(
            None,
            f"has {len(leaves)} leaves but the hyperparameters {list(hyperparams(tx))}: names repeat",
        )
    _check_round_trip(tx, tree.flatten, lambda leaves, treedef: tree.unflatten(treedef, leaves))
    _check_round_trip(tx, torch_pytree.tree_flatten, torch_pytree.tree_unflatten)


def _check_round_trip(
    tx: Transform, flatten: Callable[[Any], Any], unflatten: Callable[[Any, Any], Any]
) -> None:
    """Raise `Breach` (a failed law) unless a transform, flattened and unflattened by one library, is as before.

    Arbitrary objects as its leaves must be returned as they are.
    """
    leaves, treedef = flatten(tx)
    if unflatten(leaves, treedef) != tx:
        raise Breach(None, "flattened and unflattened, it is not equal to the original")
    objects = [object() for _ in leaves]
    returned_objects, returned_treedef = flatten(unflatten(objects, treedef))
    if not _are_same_objects(returned_objects, objects):
        raise Breach(
            None, f"with arbitrary objects as leaves, {flatten.__module__} returns other leaves"
        )
    if returned_treedef != treedef:
        raise Breach(
            None,
            f"with arbitrary objects as leaves, {flatten.__module__} returns another structure",
        )


def _are_same_objects(leaves: list[Any], expected: list[Any]) -> bool:
    return list(map(id, leaves)) == list(map(id, expected))
