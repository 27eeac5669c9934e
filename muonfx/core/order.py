"""Checks of the order of a chain's transforms relative to its learning rate.

Each transform may declare a `Position`, such as "before_learning_rate". `check_order` compares the positions when
`chain` is called, not when a chain is rebuilt with other numbers. `signs` returns whether the updates of a transform
have the sign of the gradient.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from muonfx import tree
from muonfx.core.checks import warn_caller
from muonfx.core.transform import Position, Transform, within
from muonfx.tree import PyTree

# Positions that require the final updates.
_AFTER = {"after_learning_rate", "last", "last_observer"}
_LAST = {"last", "last_observer"}
_OBSERVERS = {"observer", "last_observer"}


def check_order(chain: str, members: Mapping[str, Transform]) -> None:
    """Raise ValueError if a chain's transforms are in a wrong order; warn if the order is probably a mistake.

    For example, two learning rates are wrong. ``chain`` names the chain in messages; ``members`` are its transforms.
    """
    pairs = _ordered_pairs(members)
    # All errors before the first warning.
    for earlier, later in pairs:
        error = _error(earlier, later)
        if error:
            raise ValueError(f"{chain}: {error}")
    # Warn once at most, since other pairs often have the same cause.
    for earlier, later in pairs:
        warning = _warning(earlier, later)
        if warning:
            warn_caller(f"{chain}: {warning}")
            return
    warn_of_skipped_steps(chain, members)


def _ordered_pairs(members: Mapping[str, Transform]) -> list[tuple[_Placed, _Placed]]:
    """Return all pairs (earlier, later) of transforms in two different members of a chain, to check their order.

    A transform without a declared position may be followed by any other, so it is only the later one of a pair.

    >>> members = {
    ...     "rate": mfx.scale_by_learning_rate(0.1),
    ...     "scale": mfx.scale(-1.0),
    ...     "momentum": mfx.momentum(),
    ... }
    >>> [(earlier.tx.name, later.tx.name) for earlier, later in _ordered_pairs(members)]
    [('scale_by_learning_rate', 'scale'), ('scale_by_learning_rate', 'momentum'), ('scale', 'momentum')]
    """
    positioned = [_positioned(name, member) for name, member in members.items()]
    pairs: list[tuple[_Placed, _Placed]] = []
    # Transforms within one member are not paired: if it is a chain itself, it has checked them.
    for earlier_member, later_member in itertools.combinations(positioned, 2):
        for earlier in earlier_member:
            if earlier.position is not None:
                pairs += [(earlier, later) for later in later_member]
    return pairs


def warn_of_skipped_steps(chain: str, members: Mapping[str, Transform]) -> None:
    """Warn of a transform in a chain that acts at every micro-batch, because it is outside of an `accumulate`.

    In ``chain(momentum(), accumulate(adam(), 4))``, for example, the momentum changes its state four times a step. A
    member after the `accumulate` receives zeros at three of four calls. Only the first such transform is reported.
    """
    # A member such as `accumulate` skips steps.
    skipping = [name for name, member in members.items() if _skips_steps(member)]
    if not skipping:
        return
    receives_zeros = False  # members before the first `accumulate` receive gradients
    for name, member in members.items():
        if name in skipping:  # it returns zeros at three of four calls to all members after it
            receives_zeros = True
            continue
        # The member and all transforms in it run at every micro-batch.
        for tx in within(member):
            effect = _effect_of_every_call(tx, after_zeros=receives_zeros)
            if effect:
                warn_caller(
                    f"{chain}: {tx.name} in {name!r} {effect} at every micro-batch, because it is outside of "
                    f"{skipping[0]!r}, which skips steps: move it inside"
                )
                return


def _skips_steps(tx: Transform) -> bool:
    """Return True if a transform, or one within it, runs its transforms at some updates only, as `accumulate` does."""
    return any(inner.declaration.combinator.skips_steps for inner in within(tx))


def _effect_of_every_call(tx: Transform, *, after_zeros: bool) -> str:
    """Return what each call of a transform changes, also if its updates are zero, for a warning; "" for nothing.

    A momentum changes its state, and a weight decay the parameters. ``after_zeros`` is True if the transform receives
    updates of zero at most calls, since it follows an `accumulate`.

    >>> _effect_of_every_call(mfx.momentum(), after_zeros=True)
    'changes its state'
    >>> _effect_of_every_call(mfx.scale(2.0), after_zeros=True)
    ''
    """
    # 1. By its declaration. The transforms that it calls are examined on their own.
    if tx._schedules:  # such as a decaying rate: it counts the calls
        return "advances its schedule"
    calls_others = bool(tx.children)
    # It may run at every call, as one that records metrics does.
    is_observer = tx.position == "observer"
    if calls_others or is_observer:
        return ""
    # 2. By one step on an example of a parameter.
    example = _run_on_zeros(tx)
    if example is None:
        return ""
    updates, state = example
    has_state = list(tree.tensors(state)) != []
    if has_state:
        return "changes its state"
    adds_to_zeros = any(bool(leaf.any()) for leaf in tree.tensors(updates))
    if after_zeros and adds_to_zeros:
        return "changes the parameters"
    return ""


def _run_on_zeros(tx: Transform) -> tuple[PyTree, PyTree] | None:
    """Return the updates of a transform for gradients of zero, and its initial state, for an example of a parameter.

    None if it cannot run on the example, because it depends on the names, shapes or masks of the real parameters.
    """
    params = {"w": torch.ones(2, 2)}
    zeros = {"w": torch.zeros(2, 2)}
    try:
        state = tx.functions.init(params)
        updates, _ = tx.run(zeros, state, params)
    except Exception:
        return None
    return updates, state


class _Placed(NamedTuple):
    """A transform within a chain, with the name of the chain member that contains it and its declared position."""

    member: str
    tx: Transform
    position: Position | None


def _positioned(member: str, tx: Transform) -> list[_Placed]:
    """Return the transforms of one chain member with the position that the author of each declared, inner ones first.

    ``member`` is the name of the chain member. A transform that only calls others, such as a chain or a wrapper without
    a position, is left out. The position of a negative scale is "turns": it reverses the sign of updates.

    >>> _positioned("muon", mfx.chain(mfx.scale(-1.0)))
    [_Placed(member='muon', tx=scale(factor=-1.0), position='turns')]
    """
    positioned: list[_Placed] = []
    # The transforms within this one belong to the same member of the chain.
    for child in tx.children:
        positioned += _positioned(member, child)
    # A chain without members has no children.
    is_chain = tx.declaration.combinator.in_sequence
    only_calls_others = tx.position is None and (bool(tx.children) or is_chain)
    if not only_calls_others:
        positioned.append(_Placed(member, tx, tx.position))
    return positioned


def _error(earlier: _Placed, later: _Placed) -> str:
    """Return an error message if the order of two transforms in a chain is wrong, else an empty string.

    A wrong order is, for example, weight decay of the gradient after the learning rate. Each has a declared position
    relative to the learning rate, such as "before_learning_rate" for weight decay that is added to the gradient.
    """
    if earlier.position == later.position == "learning_rate":
        return (
            f"found learning rates in {earlier.member!r} and {later.member!r}, expected one: each reverses the sign of "
            "the updates, so both together increase the loss. Remove one of them, or replace it by scale(...)"
        )
    if earlier.position == "learning_rate" and later.position == "before_learning_rate":
        return (
            f"{later.tx.name} comes after the learning rate in {earlier.member!r}, but it requires updates in the "
            f"direction of the gradient; put it before {earlier.member!r}"
        )
    if earlier.position in _AFTER and later.position in ("learning_rate", "turns"):
        message = (
            f"{earlier.tx.name} comes before {later.tx.name} in {later.member!r}, which reverses the sign of the "
            f"updates, but {earlier.tx.name} requires the updates that are added to the parameters; put it after "
            f"{later.member!r}"
        )
        if earlier.tx.children:  # a wrapper, such as master_params
            message += f", or move {later.tx.name} into {earlier.tx.name}(...)"
        return message
    return ""


def _warning(earlier: _Placed, later: _Placed) -> str:
    """Return a warning if the order of two transforms in a chain is probably a mistake, else an empty string.

    >>> rate = _Placed("rate", mfx.scale_by_learning_rate(0.1), "learning_rate")
    >>> _warning(rate, _Placed("muon", mfx.orthogonalize(), "sets_size"))
    "the learning rate in 'rate' comes before orthogonalize, whose updates do not depend on the size of its input, ..."
    """
    if earlier.position == "learning_rate" and later.position == "sets_size":
        return (
            f"the learning rate in {earlier.member!r} comes before {later.tx.name}, whose updates do not depend on the "
            f"size of its input, so the rate has no effect; put {earlier.member!r} after {later.member!r}"
        )
    # A transform of _LAST uses the final updates, as an average of parameters does; an observer does not change them.
    if earlier.position in _LAST and later.position not in _OBSERVERS:
        return (
            f"{earlier.tx.name} in {earlier.member!r} comes before {later.tx.name}, which may change the updates after "
            f"{earlier.tx.name} has used them as final; put {later.member!r} before {earlier.member!r}, or declare "
            f'position="observer" for {later.tx.name} if it returns its updates unchanged'
        )
    return ""


def signs(tx: Transform) -> frozenset[int]:
    """Return the possible signs of updates relative to the gradient: a set of 1 (same), -1 (reversed), 0 (unknown).

    A learning rate reverses the sign, since its updates are added to the parameters. Updates that still have the sign
    of the gradient would increase the loss, which an optimizer warns of.
    """
    return combine_signs(tx, map(signs, tx.children))


def combine_signs(tx: Transform, inner: Iterable[frozenset[int]]) -> frozenset[int]:
    """Return the possible `signs` of a transform's updates, given the signs of each transform that it calls.

    A sign is -1 if updates have the direction opposite to the gradient, as after a learning rate, and 1 if they have
    its direction. The signs of a chain multiply. An update of any other wrapper, such as `partition`, has the sign of
    one of the transforms that it calls.

    >>> same, opposite = mfx.scale(2.0), mfx.scale(-1.0)
    >>> combine_signs(mfx.chain(same, opposite), [frozenset({1}), frozenset({-1})])
    frozenset({-1})
    >>> sorted(
    ...     combine_signs(
    ...         mfx.partition({"a": same, "b": opposite}, {}), [frozenset({1}), frozenset({-1})]
    ...     )
    ... )
    [-1, 1]
    """
    signs_of_tx = frozenset({_sign_without_inner(tx)})  # {-1} for a learning rate
    inner_signs = list(inner)
    if tx.declaration.combinator.in_sequence:  # a chain: every member acts on the updates
        return functools.reduce(_products, inner_signs, signs_of_tx)
    if not inner_signs:
        return signs_of_tx
    return _products(signs_of_tx, frozenset().union(*inner_signs))


def _products(signs: frozenset[int], factors: frozenset[int]) -> frozenset[int]:
    """Return the products of each sign with each factor: {-1} and {1, -1} give {-1, 1}."""
    products: set[int] = set()
    for sign in signs:
        for factor in factors:
            products.add(sign * factor)
    return frozenset(products)


def _sign_without_inner(tx: Transform) -> int:
    """Return -1 if a transform itself reverses the sign of updates, 1 if it keeps the sign, and 0 if unknown.

    The position that its author has declared implies the sign. The transforms that it calls are not considered.

    >>> _sign_without_inner(mfx.scale_by_learning_rate(0.1)), _sign_without_inner(mfx.momentum())
    (-1, 1)
    """
    position = tx.position
    # "turns" is declared by a negative scale, for example
    if position in ("learning_rate", "turns"):
        return -1
    if position == "either_sign":
        return 0
    if position is None and not tx.factory.definition.is_ours:  # nothing is known of other packages
        return 0
    return 1
