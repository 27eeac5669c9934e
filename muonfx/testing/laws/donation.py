"""Laws of donation (a caller's promise not to use some inputs of `update` again, so that their storage may be reused).

Donation changes no value, and only donated tensors are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.testing.examples import copied_tree, history
from muonfx.testing.law import law, rough_chain
from muonfx.testing.laws.purity import Witness, require_apart
from muonfx.testing.violation import require_close, require_same, tolerance_of
from muonfx.transforms import scale
from muonfx.tree import PyTree

Compare = Callable[[str, PyTree, PyTree, str], None]


def _comparison(tx: Transform, params: PyTree, steps: list[PyTree]) -> Compare:
    """Return a function that compares trees: bitwise if all leaves are contiguous, else with a tolerance."""
    if all(leaf.is_contiguous() for leaf in tree.tensors((params, steps))):
        return require_same

    def same(what: str, found: PyTree, expected: PyTree, expected_is: str) -> None:
        require_close(what, found, expected, expected_is, tolerance_of(tx, found))  # strides may reorder sums

    return same


@law(share=0.3)
def donation_changes_no_value(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``donate=True`` changes no update and no state, and that later steps keep earlier updates intact.

    With ``donate=True`` the caller promises not to use the gradients and the state again. The comparison is bitwise if
    all leaves are contiguous.

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
        require_apart(f"step {step}, donated updates", updates, "the new state", state)
        given_out.append((updates, copied_tree(updates)))
    for step, (updates, when_given) in enumerate(given_out):
        require_same(f"after the last step, updates of step {step}", updates, when_given, "when they were returned")


def _check_kept(what: str, tx: Transform, params: PyTree, steps: list[PyTree], donations: list[Donation]) -> None:
    """Raise `Breach` (a failed law) if a donation changes a result or `update` overwrites a tensor not donated."""
    same = _comparison(tx, params, steps)
    expected = copied_tree(history(tx, params, steps))
    for donate in donations:
        state = copied_tree(tx.init(params))
        for step, grads in enumerate(steps):
            grads_copy = copied_tree(grads)
            trees_to_keep = {"params": params}
            if not donate.updates:
                trees_to_keep["gradients"] = grads_copy
            if not donate.state:
                trees_to_keep["state"] = state
            witness = Witness(**trees_to_keep)
            updates, state = tx.update(grads_copy, state, params, donate=donate)
            witness.require_unchanged(f"{what} with {donate}, at step {step},")
            same(f"step {step}, {donate}: (updates, state)", (updates, state), expected[step], "without donation")


@law(share=0.3)
def donation_keeps_to_what_is_donated(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that `update` overwrites only donated gradients or state, and never the parameters.

    Donated inputs are those that the caller promises not to use again: ``donate=Donation(updates=True)``.

    >>> import muonfx as mfx
    >>> donation_keeps_to_what_is_donated(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    donations = [Donation(updates=True), Donation(state=True), Donation(True, True)]
    _check_kept("update", tx, params, steps, donations)


@law(share=0.3)
def next_in_chain_may_write_to_updates(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that the next transform of a chain may overwrite the updates without changing the state or gradients.

    Only gradients that the caller donated (promised not to use again) may change.

    >>> import muonfx as mfx
    >>> next_in_chain_may_write_to_updates(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    pair = rough_chain(tx, ("writes", scale(3.0)))
    _check_kept("chain(this, scale)", pair, params, steps, [Donation(state=True), Donation(True, True)])
