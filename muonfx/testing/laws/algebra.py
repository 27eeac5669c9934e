"""Laws of chains: a chain of one is its member, identity is neutral, nesting does not matter."""

from __future__ import annotations

from muonfx.core import Transform, chain, identity
from muonfx.testing.examples import history
from muonfx.testing.law import law, rough_chain
from muonfx.testing.violation import require_same
from muonfx.transforms import scale
from muonfx.tree import PyTree

__all__ = ["chain_of_one_is_its_member", "identity_is_neutral", "nested_chains_equal_flat_ones"]


def _updates(tx: Transform, params: PyTree, steps: list[PyTree]) -> list[PyTree]:
    return [updates for updates, _ in history(tx, params, steps)]


@law(share=0.4)
def chain_of_one_is_its_member(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """``chain(tx)`` gives the updates of ``tx``, and its state under its name.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> chain_of_one_is_its_member(mfx.momentum(), *Example.of({"w": (2, 3)}))
    """
    alone = history(tx, params, steps)
    chained = history(chain(tx), params, steps)
    found = [(updates, state[tx.name]) for updates, state in chained]
    require_same("(updates, state) of chain(tx)", found, alone, "of tx")


@law(share=0.4)
def identity_is_neutral(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """``identity()`` before and behind changes nothing.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> identity_is_neutral(mfx.momentum(), *Example.of({"w": (2, 3)}))
    """
    expected = _updates(tx, params, steps)
    require_same("updates of chain(identity(), tx)", _updates(chain(identity(), tx), params, steps), expected, "of tx")
    require_same("updates of chain(tx, identity())", _updates(chain(tx, identity()), params, steps), expected, "of tx")


@law(share=0.4)
def nested_chains_equal_flat_ones(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """``chain(chain(a, tx), b)``, ``chain(a, chain(tx, b))`` and ``chain(a, tx, b)`` give the same updates.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> nested_chains_equal_flat_ones(mfx.momentum(), *Example.of({"w": (2, 3)}))
    """
    # A negative scale is refused after some transforms.
    first, last = scale(0.5), scale(3.0)
    flat = _updates(rough_chain(first, tx, last), params, steps)
    for nested in (rough_chain(rough_chain(first, tx), last), rough_chain(first, rough_chain(tx, last))):
        require_same(f"updates of {nested!r}", _updates(nested, params, steps), flat, "of the flat chain")
