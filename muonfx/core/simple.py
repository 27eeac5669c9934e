"""The simplest transforms: `identity`, `set_to_zero` and `stateless`, which have no state."""

from __future__ import annotations

from collections.abc import Callable

import torch

from muonfx import tree
from muonfx.core.checks import check_structure
from muonfx.core.donation import NOTHING, Donation
from muonfx.core.extras import require_arguments
from muonfx.core.transform import EmptyState, Locality, transform
from muonfx.tree import PyTree


def no_state(params: PyTree) -> EmptyState:
    """Return an `EmptyState`. This is the ``init`` function of transforms without state."""
    return EmptyState()


@transform(locality=Locality.ELEMENT, position="observer")
def identity():
    """Make a transform that returns its updates unchanged.

    >>> identity().update({"w": torch.ones(2)}, EmptyState())
    ({'w': tensor([1., 1.])}, EmptyState())
    """

    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING
    ):
        return updates, state

    return no_state, update


@transform(locality=Locality.ELEMENT, position="either_sign")
def set_to_zero():
    """Replace all updates by zeros, for example to freeze the parameters that have one label in `partition`.

    >>> set_to_zero().update({"w": torch.ones(2)}, EmptyState())[0]
    {'w': tensor([0., 0.])}
    """

    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING
    ):
        return tree.map(torch.zeros_like, updates), state

    return no_state, update


@transform(locality=lambda function, locality=Locality.TREE: locality, position="either_sign")
def stateless(function: Callable[[PyTree, PyTree], PyTree], locality: Locality = Locality.TREE):
    """Make a transform without state from a function ``(updates, params) -> updates``, called with whole trees.

    Args:
        function: a function that does not modify its inputs. To pickle the transform, define the function in a module.
        locality: the part of the tree that the function reads to compute one element of its output, as a `Locality`.
            The default TREE is always correct; a smaller locality saves communication if parameters are sharded.

    Raises:
        TypeError: ``function`` cannot be called with two arguments.

    >>> halve = stateless(lambda updates, params: tree.map(lambda u: u / 2, updates))
    >>> halve.update({"w": torch.ones(2)}, EmptyState())[0]
    {'w': tensor([0.5000, 0.5000])}
    """
    if not callable(function):
        raise TypeError(
            f"stateless: function must be a function (updates, params) -> updates, found {function!r}"
        )
    if not torch.compiler.is_compiling():  # it was checked when the transform was created
        require_arguments("stateless: function", function, ("updates", "params"))

    def update(updates: PyTree, state: EmptyState, params: PyTree = None):
        """Call the user's function, and check that it returns updates of the same structure."""
        out = function(updates, params)
        # The function of a user may have left out a leaf, or returned another container.
        check_structure(
            "stateless: the updates that the function returns",
            out,
            "the updates given to it",
            updates,
        )
        return out, state

    return no_state, update
