"""Laws of chains: a chain of one transform equals it, `identity` changes nothing, and nesting does not matter."""

from __future__ import annotations

from muonfx.core import Transform, chain, identity
from muonfx.testing.examples import history, updates_of
from muonfx.testing.law import law, rough_chain
from muonfx.testing.violation import require_same
from muonfx.transforms import scale
from muonfx.tree import PyTree


@law(share=0.2)
def chain_of_one_is_its_member(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``chain(tx)`` returns the updates of ``tx``, and a dict with the state of ``tx`` under its name.

    >>> import muonfx as mfx
    >>> chain_of_one_is_its_member(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    alone = history(tx, params, steps)
    chained = history(chain(tx), params, steps)
    without_names = [(updates, state[tx.name]) for updates, state in chained]
    require_same("(updates, state) of chain(tx)", without_names, alone, "of tx")


@law(share=0.2)
def identity_is_neutral(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``identity()`` before or after a transform in a chain does not change the updates.

    >>> import muonfx as mfx
    >>> identity_is_neutral(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    expected = updates_of(tx, params, steps)
    for chained in (chain(identity(), tx), chain(tx, identity())):
        require_same(f"updates of {chained!r}", updates_of(chained, params, steps), expected, f"of {tx!r}")


@law(share=0.2)
def nested_chains_equal_flat_ones(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``chain(chain(a, tx), b)``, ``chain(a, chain(tx, b))`` and ``chain(a, tx, b)`` have equal updates.

    >>> import muonfx as mfx
    >>> nested_chains_equal_flat_ones(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    # Positive scales, because some transforms must not be followed by a negative one.
    before = scale(0.5)
    after = scale(3.0)
    expected = updates_of(rough_chain(before, tx, after), params, steps)
    left = rough_chain(rough_chain(before, tx), after)
    right = rough_chain(before, rough_chain(tx, after))
    for nested in (left, right):
        require_same(f"updates of {nested!r}", updates_of(nested, params, steps), expected, "of the flat chain")
