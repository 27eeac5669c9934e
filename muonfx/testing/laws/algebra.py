"""Laws of chains: a chain of one transform equals it, and `identity` changes nothing."""

from __future__ import annotations

from muonfx.core import Transform, chain, identity
from muonfx.testing.examples import history, updates_of
from muonfx.testing.law import law
from muonfx.testing.violation import require_same
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
        require_same(
            f"updates of {chained!r}", updates_of(chained, params, steps), expected, f"of {tx!r}"
        )
