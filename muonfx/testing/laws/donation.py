"""Laws of donation (a caller's promise not to use some inputs of `update` again, so that their storage may be reused).

Donation changes no value, and only donated tensors are overwritten.
"""

from __future__ import annotations

import functools
import warnings

from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform, chain
from muonfx.testing.examples import History, copied_tree, history
from muonfx.testing.law import law
from muonfx.testing.laws.purity import Witness, require_apart
from muonfx.testing.violation import require_close, require_same, tolerance_of
from muonfx.transforms import scale
from muonfx.tree import PyTree


@law(share=0.3)
def donation_changes_no_value(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that donation changes no update and no state, and that `update` overwrites only what is donated.

    With ``donate=True`` the caller promises not to use the gradients and the state again, and with
    ``donate=Donation(updates=True)`` only the gradients. The parameters and earlier updates are never overwritten. The
    comparison is bitwise if all leaves are contiguous.

    >>> import muonfx as mfx
    >>> donation_changes_no_value(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    # A copy of the usual results, because the steps below may overwrite tensors.
    expected = copied_tree(history(tx, params, steps))
    for donate in (
        Donation(updates=True),
        Donation(state=True),
        Donation(updates=True, state=True),
    ):
        _check_donation(tx, params, steps, donate, expected)


@law(share=0.3)
def next_in_chain_may_write_to_updates(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that the next transform of a chain may overwrite the updates without changing the state or gradients.

    Only gradients that the caller donated (promised not to use again) may change.

    >>> import muonfx as mfx
    >>> next_in_chain_may_write_to_updates(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    with warnings.catch_warnings():
        # Some transforms should be the last of a chain. Here, each is followed by one that overwrites its updates.
        warnings.filterwarnings("ignore", "chain: .* comes before .*", UserWarning)
        pair = chain(tx, ("writes", scale(3.0)))
    # In this chain, `scale` owns the updates that it receives, and may multiply them in place. If `tx` returned a
    # tensor of its state as an update, the state would be multiplied too.
    expected = copied_tree(history(pair, params, steps))
    for donate in (Donation(state=True), Donation(updates=True, state=True)):
        _check_donation(pair, params, steps, donate, expected)


def _check_donation(
    tx: Transform, params: PyTree, steps: list[PyTree], donate: Donation, expected: History
) -> None:
    """Raise `Breach` (a failed law) if a donation changes a result, or a tensor that is not donated is overwritten.

    ``donate`` is what the caller gives away, as in ``Donation(updates=True)``. ``expected`` are the updates and the
    state of each step without donation. Results must have the same bits, or be close if a parameter or gradient is not
    contiguous: sums may then be taken in another order.
    """
    require_equal = require_same
    if not all(map(Tensor.is_contiguous, tree.tensors((params, steps)))):
        require_equal = functools.partial(_require_close, tx)
    state = copied_tree(tx.init(params))
    updates_of_steps: list[PyTree] = []
    for step, grads in enumerate(steps):
        donated_grads = copied_tree(grads)  # the next donation is checked with the same gradients
        # It has copies of all inputs that the step must not overwrite.
        witness = _witness_of_not_donated(donate, donated_grads, state, params)
        updates, state = tx.update(donated_grads, state, params, donate=donate)
        witness.require_unchanged(f"{tx.name}: update with {donate}, at step {step},")
        what = f"step {step}, {donate}: (updates, state)"
        require_equal(what, (updates, state), expected[step], "without donation")
        # The next step may overwrite the state, but not these updates.
        require_apart(f"step {step}, {donate}: updates", updates, {"new state": state})
        updates_of_steps.append(updates)
    # Compare the updates again, since a later step may have written to those of an earlier one.
    expected_updates = [updates for updates, _ in expected]
    require_equal(
        f"{donate}: updates, after the last step,",
        updates_of_steps,
        expected_updates,
        "without donation",
    )


def _witness_of_not_donated(
    donate: Donation, grads: PyTree, state: PyTree, params: PyTree
) -> Witness:
    """Return a witness of all inputs that are not donated, which a step must not overwrite."""
    not_donated: dict[str, PyTree] = {"params": params}
    if not donate.updates:
        not_donated["gradients"] = grads
    if not donate.state:
        not_donated["state"] = state
    return Witness(**not_donated)


def _require_close(
    tx: Transform, what: str, results: PyTree, expected: PyTree, expected_is: str
) -> None:
    require_close(what, results, expected, expected_is, tolerance_of(tx, results))
