"""Checks of the order of a chain's transforms relative to its learning rate.

Each transform may declare a `Position`, such as "before_learning_rate". `check_order` compares the positions when a
chain is constructed. `signs` returns whether the updates of a transform have the sign of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

import torch

from muonfx import tree
from muonfx.core.checks import warn_caller
from muonfx.core.transform import Position, Transform, within

_AFTER = {"after_learning_rate", "last", "last_observer"}
_LAST = {"last", "last_observer"}
_OBSERVERS = {"observer", "last_observer"}


def check_order(chain: str, members: Mapping[str, Transform]) -> None:
    """Raise ValueError if a chain's transforms are in a wrong order; warn if the order is probably a mistake.

    For example, two learning rates are wrong. ``chain`` names the chain in messages; ``members`` are its transforms.
    """
    placed = [list(_positioned(name, member)) for name, member in members.items()]
    # A transform without a position may be followed by any other.
    before = [[own for own in member if own.position is not None] for member in placed]
    pairs = [pair for at, first in enumerate(before) for later in placed[at + 1 :] for pair in product(first, later)]
    for pair in pairs:
        if error := _error(*pair):
            raise ValueError(f"{chain}: {error}")
    for pair in pairs:
        if doubt := _doubt(*pair):
            warn_caller(f"{chain}: {doubt}")
            return
    warn_of_skipped_steps(chain, members)


def warn_of_skipped_steps(chain: str, members: Mapping[str, Transform]) -> None:
    """Warn of transforms that act at every micro-batch, because they are outside an `accumulate`."""
    wrappers = {name: wrapper for name, tx in members.items() if (wrapper := _skipping_in(tx)) is not None}
    if not wrappers:
        return
    name, wrapper = next(iter(wrappers.items()))
    is_after = False
    for member, tx in members.items():
        if member in wrappers:
            is_after = True
            continue
        for part in within(tx):
            effect = _effect_of_every_call(part, after_zeros=is_after)
            if effect:
                example = f"{wrapper.name}(chain(..., {part.name}(...)), ...)"
                warn_caller(
                    f"{chain}: {part.name} in {member!r} {effect} at every micro-batch, because it is outside of "
                    f"{wrapper.name} in {name!r}: move it inside, as in {example}"
                )
                return


def _skipping_in(tx: Transform) -> Transform | None:
    """Return the first transform in ``tx``, itself included, that runs its transforms at some updates only, or None."""
    for part in within(tx):
        if part.declaration.combinator.skips_steps:
            return part
    return None


def _effect_of_every_call(tx: Transform, *, after_zeros: bool) -> str:
    """Return what a transform without inner transforms does even if an update is zero: a verb phrase, or ""."""
    if tx._schedules:
        return "advances its schedule"
    if tx.children or tx.position == "observer":
        return ""
    # Names, shapes and masks of the parameters are not known here, so a transform that depends on them may raise.
    params = {"w": torch.ones(2, 2)}
    try:
        state = tx.functions.init(params)
        updates, _ = tx.run(tree.map(torch.zeros_like, params), state, params)
    except Exception:
        return ""
    if list(tree.tensors(state)):
        return "changes its state"
    if after_zeros and any(bool(leaf.any()) for leaf in tree.tensors(updates)):
        return "changes the parameters"
    return ""


class _Placed(NamedTuple):
    """A transform within a chain, with the name of the chain member that contains it and its declared position."""

    member: str
    tx: Transform
    position: Position | None


def _positioned(member: str, tx: Transform) -> Iterator[_Placed]:
    """Yield the transforms of one chain member with their declared positions, inner transforms first."""
    for part in tx.children:
        yield from _positioned(member, part)
    position = tx.position
    if position is not None or not (tx.children or tx.declaration.combinator.in_sequence):
        yield _Placed(member, tx, position)


def _error(earlier: _Placed, later: _Placed) -> str:
    """Return an error message if the order of two transforms in a chain is wrong, else an empty string."""
    (first_place, first_tx, first), (place, tx, position) = earlier, later
    if first == position == "learning_rate":
        return (
            f"found learning rates in {first_place!r} and {place!r}, expected one: each reverses the sign of the "
            "updates, so both together increase the loss. Remove one of them, or replace it by scale(...)"
        )
    if first == "learning_rate" and position == "before_learning_rate":
        return (
            f"{tx.name} comes after the learning rate in {first_place!r}, but it requires updates in the direction of "
            f"the gradient; put it before {first_place!r}"
        )
    if first in _AFTER and position in ("learning_rate", "turns"):
        turn = "the learning rate" if position == "learning_rate" else "the negative scale"
        inside = f", or move that into {first_tx.name}(...)" if first_tx.children else ""
        return (
            f"{first_tx.name} comes before {turn} in {place!r}, but it requires the updates that are added to the "
            f"parameters; put it after {place!r}{inside}"
        )
    return ""


def _doubt(earlier: _Placed, later: _Placed) -> str:
    """Return a warning if the order of two transforms in a chain is probably a mistake, else an empty string."""
    (first_place, first_tx, first), (place, tx, position) = earlier, later
    if first == "learning_rate" and position == "sets_size":
        return (
            f"the learning rate in {first_place!r} comes before {tx.name}, whose updates do not depend on the size of "
            f"its input, so the rate has no effect; put {first_place!r} after {place!r}"
        )
    if first in _LAST and position not in _OBSERVERS:
        return (
            f"{first_tx.name} in {first_place!r} comes before {tx.name}, which may change the updates after "
            f"{first_tx.name} has used them as final; put {place!r} before {first_place!r}, or declare "
            f'position="observer" for {tx.name} if it returns its updates unchanged'
        )
    return ""


def signs(tx: Transform) -> frozenset[int]:
    """Return the possible signs of updates relative to the gradient: a set of 1 (same), -1 (reversed), 0 (unknown)."""
    return combine_signs(tx, map(signs, tx.children))


def combine_signs(tx: Transform, inner: Iterable[frozenset[int]]) -> frozenset[int]:
    """Return the possible `signs` of a transform's updates, given the signs of each transform that it calls."""
    found = frozenset({_own_sign(tx)})
    if tx.declaration.combinator.in_sequence:
        steps = list(inner)
    else:
        either: frozenset[int] = frozenset().union(*inner)  # dynamo cannot call `frozenset[int]`
        steps = [either] if either else []
    for each in steps:
        found = frozenset(before * after for before in found for after in each)
    return found


def _own_sign(tx: Transform) -> int:
    """Return -1 if a transform itself reverses the sign of updates, 1 if it keeps the sign, and 0 if unknown."""
    position = tx.position
    if position in ("learning_rate", "turns"):
        return -1
    if position == "either_sign":
        return 0
    # A third-party transform without a position may reverse updates.
    module = tx.factory.__module__ or ""  # None for a factory in a bare exec()
    is_ours = module.partition(".")[0] == __name__.partition(".")[0]
    return 1 if is_ours or position is not None else 0
