"""Laws of donation: reused storage changes no value, and only donated tensors are overwritten."""

from __future__ import annotations

from collections.abc import Callable

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.testing.examples import copied_tree, history
from muonfx.testing.law import law, rough_chain
from muonfx.testing.laws.purity import Witness, _require_apart
from muonfx.testing.violation import require_close, require_same, tolerance_of
from muonfx.transforms import scale
from muonfx.tree import PyTree

__all__ = ["donation_changes_no_value", "donation_keeps_to_what_is_donated", "next_in_chain_may_write_to_updates"]

Compare = Callable[[str, PyTree, PyTree, str], None]


def _comparison(tx: Transform, params: PyTree, steps: list[PyTree]) -> Compare:
    """Return a bitwise comparison if all is contiguous; else reused strides may change the order of sums."""
    if all(leaf.is_contiguous() for leaf in tree.tensors((params, steps))):
        return require_same

    def same(what: str, found: PyTree, expected: PyTree, expected_is: str) -> None:
        require_close(what, found, expected, expected_is, tolerance_of(tx, found))

    return same


@law()
def donation_changes_no_value(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """With ``donate=True`` updates and states are those without, and updates given out earlier stay as they are.

    Bit for bit, where all leaves of the example are contiguous.

    >>> import muonfx as mfx
    >>> donation_changes_no_value(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    same = _comparison(tx, params, steps)
    expected = copied_tree(history(tx, params, steps))
    state = copied_tree(tx.init(params))
    given_out = []
    for step, grads in enumerate(steps):
        updates, state = tx.update(copied_tree(grads), state, params, donate=True)
        same(f"step {step}, donated (updates, state)", (updates, state), expected[step], "without donation")
        _require_apart(f"step {step}, donated updates", updates, "the new state", state, unless_same=False)
        given_out.append((updates, copied_tree(updates)))
    for step, (updates, when_given) in enumerate(given_out):
        require_same(f"after the last step, updates of step {step}", updates, when_given, "when they were given out")


@law()
def donation_keeps_to_what_is_donated(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Where only updates, or only the state, are donated, the rest is left alone; so are the parameters, always.

    >>> import muonfx as mfx
    >>> donation_keeps_to_what_is_donated(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    same = _comparison(tx, params, steps)
    expected = copied_tree(history(tx, params, steps))
    for donate in (Donation(updates=True), Donation(state=True), Donation(True, True)):
        state = copied_tree(tx.init(params))
        for step, grads in enumerate(steps):
            given = copied_tree(grads)
            kept = {"params": params}
            kept |= {} if donate.updates else {"gradients": given}
            kept |= {} if donate.state else {"state": state}
            witness = Witness(**kept)
            updates, new_state = tx.update(given, state, params, donate=donate)
            witness.require_unchanged(f"update with {donate}, at step {step},")
            same(f"step {step}, {donate}: (updates, state)", (updates, new_state), expected[step], "without")
            state = new_state


@law()
def next_in_chain_may_write_to_updates(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """A next transform that writes into donated updates spoils neither the state nor gradients that were kept.

    >>> import muonfx as mfx
    >>> next_in_chain_may_write_to_updates(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    pair = rough_chain(tx, ("writes", scale(3.0)))
    same = _comparison(tx, params, steps)
    expected = copied_tree(history(pair, params, steps))
    for donate in (Donation(state=True), Donation(True, True)):
        state = copied_tree(pair.init(params))
        for step, grads in enumerate(steps):
            given = copied_tree(grads)
            witness = Witness(params=params) if donate.updates else Witness(params=params, gradients=given)
            updates, state = pair.update(given, state, params, donate=donate)
            witness.require_unchanged(f"chain(this, scale) with {donate}, at step {step},")
            same(f"step {step}, {donate}: (updates, state)", (updates, state), expected[step], "without donation")
