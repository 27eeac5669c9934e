"""`chain`, which applies transforms in sequence, and `add_updates`, which adds their updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core.donation import NOTHING, Donation
from muonfx.core.order import check_order
from muonfx.core.transform import Combinator, Locality, Transform, entries_of, transform
from muonfx.core.value import checked_by, part_names
from muonfx.tree import PyTree
from muonfx.tree.elementwise import wide_dtype


def chain_entries(tx: Transform) -> dict[str, Transform] | None:
    """Return a dict from name to member if a transform is a `chain`; otherwise return None.

    For ``chain(momentum(), scale(-0.1))``, it is ``{"momentum": momentum(...), "scale": scale(factor=-0.1)}``.
    """
    if not tx.declaration.combinator.in_sequence:
        return None
    return dict(zip(part_names(tx), tx.children, strict=True))


def widest(transforms: Any) -> Locality:
    """Return the largest `Locality` among several transforms, which is the locality of a chain of them."""
    return max([tx.locality for tx in transforms], default=Locality.ELEMENT)


def is_new(outputs: PyTree, updates: PyTree) -> bool:
    """Return True if the outputs of a transform and its incoming updates have no tensor object in common."""
    if torch.compiler.is_compiling():
        # The identities of gradients would be guards, which fail at each step. A compiler reuses memory by itself.
        return False
    return tree.ids(updates).isdisjoint(tree.ids(outputs))


def donation_of_outputs(
    tx: Transform, outputs: PyTree, updates: PyTree, donation: Donation
) -> Donation:
    """Return which inputs the next transform of a chain may overwrite: the outputs of ``tx``, and its own state.

    ``tx`` returned the outputs for ``updates``, and ``donation`` has which of its own inputs it was allowed to
    overwrite. The outputs may be overwritten if nothing else uses their memory: neither the new state of ``tx``, nor
    the caller of the chain.

    >>> updates, outputs = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    >>> donation_of_outputs(mfx.scale(2.0), outputs, updates, Donation(updates=False, state=True))
    Donation(updates=True, state=True)
    """
    # A transform that has the argument `donate` promises that its new state does not share memory with its outputs.
    state_may_share_outputs = not (donation.state and tx._keeps_donation_promise)
    if state_may_share_outputs:
        return Donation(updates=False, state=donation.state)
    # The outputs may be the incoming updates, which the caller still uses, unless it has donated them.
    may_overwrite = donation.updates or is_new(outputs, updates)
    return Donation(updates=may_overwrite, state=donation.state)


@checked_by(lambda tx: check_order("chain", entries_of(tx.arguments["transforms"])))
@transform(
    locality=lambda *transforms: widest(entries_of(transforms).values()),
    combinator=Combinator(in_sequence=True),
)
def chain(*transforms: Transform | tuple[str, Transform]):
    """Apply transforms in sequence: each transform receives the updates that the previous transform returned.

    The state is a dict from the name of each transform to its state. If a name repeats, it gets a suffix (``scale``,
    ``scale_2``). Corresponds to ``chain`` and ``named_chain`` of Optax.

    Args:
        *transforms: transforms, or pairs ``(name, transform)`` to choose the name. An empty chain returns its updates
            unchanged.

    Raises:
        TypeError: an argument is not a transform.
        ValueError: two explicit names are equal, or the order is wrong. Wrong orders are two learning rates, weight
            decay after the learning rate, and a transform that needs the final updates (`ema_params`) before it.

    Warns:
        UserWarning: a learning rate has no effect, because a later transform sets the size of the updates; or a
            transform that needs the final updates is followed by a transform that may change them.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.momentum(), ("rate", mfx.scale(-0.1)))
        >>> list(tx.init({"w": torch.zeros(2)}))
        ['momentum', 'rate']
    """
    entries = entries_of(transforms)

    def init(params: PyTree) -> dict[str, PyTree]:
        return {name: tx.functions.init(params) for name, tx in entries.items()}

    def update(
        updates: PyTree,
        state: dict[str, PyTree],
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Pass the updates through the transforms in order. Return the last updates, and the states by name.

        For ``chain(scale(0.5), scale(2.0))``, an update of 1.0 becomes 0.5, and then 1.0 again.

        ``donate`` says whether the caller promises not to use the updates or the state again. Their memory may then be
        overwritten, and so may the output of one transform by the next.
        """
        new_state: dict[str, PyTree] = {}
        donation = donate
        for name, tx in entries.items():
            outputs, new_state[name] = tx.run(
                updates, state[name], params, donate=donation, **extras
            )
            donation = donation_of_outputs(tx, outputs, updates, donation)
            updates = outputs
        return updates, new_state

    return init, update


@transform(
    locality=lambda *transforms: widest(entries_of(transforms).values()),
    reads_params=lambda *transforms: any(tx.reads_params for tx in entries_of(transforms).values()),
)
def add_updates(*transforms: Transform | tuple[str, Transform]):
    """Apply several transforms to the same updates, and return the sum of their outputs.

    If a transform returns None for a leaf, the leaf gets the sum of the other outputs, or None if there is no other.
    The state is a dict from the name of each transform to its state, as in `chain`.

    Args:
        *transforms: one or more transforms, or pairs ``(name, transform)`` to choose the name.

    Raises:
        TypeError: an argument is not a transform.
        ValueError: no transform was given, or two explicit names are equal.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.add_updates(
        ...     mfx.scale(0.5), ("sign", mfx.chain(mfx.scale_by_lion(), mfx.scale(0.1)))
        ... )
        >>> tx.update({"w": torch.tensor([2.0, -4.0])}, tx.init({"w": torch.zeros(2)}))[0]
        {'w': tensor([ 1.1000, -2.1000])}
    """
    entries = entries_of(transforms, "add_updates")
    if not entries:
        raise ValueError(
            "add_updates: found no transform, expected at least one; for updates of zero, use set_to_zero()"
        )

    def init(params: PyTree) -> dict[str, PyTree]:
        return {name: tx.functions.init(params) for name, tx in entries.items()}

    def update(
        updates: PyTree,
        state: dict[str, PyTree],
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Return the sum of the outputs of all transforms for the same updates, and the states by name."""
        # The sums are in a list, in the order of the leaves, and not in a tree: `tree.map` would keep a None, but an
        # output of None counts as zero.
        _, treedef = tree.flatten(updates)
        sums: list[PyTree] = [None] * treedef.num_leaves
        new_state: dict[str, PyTree] = {}
        # No transform may overwrite the updates, since the next one receives them too.
        donation = Donation(updates=False, state=donate.state)
        for name, tx in entries.items():
            outputs, new_state[name] = tx.run(
                updates, state[name], params, donate=donation, **extras
            )
            sums = list(map(_sum, sums, tree.subtrees(treedef, outputs)))
        return tree.unflatten(treedef, sums), new_state

    return init, update


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Add two updates in float32 or wider, and round the sum to the dtype of the first. None counts as zero."""
    if a is None:
        return b
    if b is None:
        return a
    # fp32 for two bf16 updates, so that their sum is rounded once
    wide = wide_dtype(a.dtype, b.dtype)
    return (a.to(wide) + b.to(wide)).to(a.dtype)
