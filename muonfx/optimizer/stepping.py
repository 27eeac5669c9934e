"""Steps in one process: segments of a chain, each on pieces of the leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, Transform
from muonfx.hyperparams import hyperparams, with_hyperparams
from muonfx.optimizer.pieces import SMALL_BUCKET, Piece, Segment, buckets, bytes_of, segments
from muonfx.optimizer.state import Load, on_this_rank
from muonfx.optimizer.values import agreement, check_shapes, distinct, standing, unchanged, valid
from muonfx.tree import PyTree

__all__ = ["Check", "Stepping", "add_in_place"]

Check = Callable[[Mapping[str, Tensor | None]], None]
"""Raises what is wrong with gradients."""


class Stepping:
    """How an optimizer makes its state and takes its steps.

    Args:
        tx: the transform.
        keys: for each group, the dotted name of each hyperparameter by its key there.
        bucket_bytes: as in `TransformOptimizer`.
    """

    def __init__(self, tx: Transform, keys: Sequence[Mapping[str, str]], bucket_bytes: int | None) -> None:
        self.tx, self._keys, self._bucket_bytes = tx, keys, bucket_bytes
        self._segments = segments(tx)
        self.plans: list[list[Piece]] = []
        self._values: list[dict[str, Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the values that stood last: a copy looks at its own groups."""
        return {**self.__dict__, "_values": None}

    @property
    def transform(self) -> Transform:
        """The transform over what the optimizer holds."""
        return self.tx

    def init(self, params: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]]) -> PyTree:
        """Make the state, and find out what follows from the groups."""
        state = self.tx.init(params)
        self.refresh(groups, params)
        return state

    def taken_from(self, other: Stepping, state: PyTree, old: PyTree) -> PyTree:
        """A new state with the leaves of one that another stepping has kept, where they are in it."""
        before = dict(zip(tree.paths(old), tree.leaves(old), strict=True))
        leaves, treedef = tree.flatten(state)
        kept = [
            before[path] if path in before and before[path].shape == leaf.shape else leaf
            for path, leaf in zip(tree.paths(state), leaves, strict=True)
        ]
        return tree.unflatten(treedef, kept)

    def show(self, place: int, leaf: Any) -> Any:
        """A leaf of the state, by its place, as ``optimizer.state`` has it."""
        return leaf

    def shown(self, state: PyTree) -> PyTree:
        """The state as the functional API has it."""
        return state

    def share(self, state: PyTree) -> None:
        """Begin to make a new state known to those who must be able to save it."""

    def exported(self, state: PyTree) -> dict[int, Any]:
        """The leaves, by their places, that a state dict has in another form than `show` gives them."""
        return {}

    def take(self, place: int, leaf: Any, value: Any) -> tuple[Tensor | None, Tensor, tuple[int, int] | None] | str:
        """Find the copy that loads a value into a leaf, or say what is wrong with it; see `state.Take`."""
        return on_this_rank(leaf, value)

    def load(self, loads: Sequence[Load], numbers: Any, state: PyTree, problem: Exception | None) -> None:
        """Copy loaded values into the state.

        Args:
            loads: what to copy where.
            numbers: the hyperparameters that are loaded beside them.
            state: of the transform.
            problem: what is wrong, if anything; then nothing is copied.
        """
        if problem is not None:
            raise problem
        for load in loads:
            if load.target is not None:
                load.target.copy_(load.source)

    def refresh(self, groups: Sequence[Mapping[str, Any]], params: Mapping[str, Tensor]) -> None:
        """Build the transforms for the hyperparameters that stand in the groups now, and the pieces they run on."""
        values = standing(groups, self._keys)
        if self._values is not None and unchanged(values, self._values):
            return
        for group in values:
            check_shapes(self.tx, group)
        members = [list(group["param_names"]) for group in groups]
        self.plans = [self._plan(segment, values, members, params) for segment in self._segments]
        self._values = [dict(group) for group in values]

    def _plan(
        self,
        segment: Segment,
        values: Sequence[Mapping[str, Any]],
        members: Sequence[list[str]],
        params: Mapping[str, Tensor],
    ) -> list[Piece]:
        names = hyperparams(segment.tx).keys()
        chosen = [{name: group[name] for name in names & group.keys()} for group in values]
        agreed, conflicts = agreement(chosen)
        if conflicts and segment.tx.locality is Locality.TREE:
            raise ValueError(
                f"the groups disagree about {conflicts[0]!r}, which belongs to a transform that looks at all "
                "parameters together; give it one value in all groups"
            )
        runs = distinct([{**agreed, **mine} if conflicts else agreed for mine in chosen], members)
        made = [(valid(with_hyperparams(segment.tx, run)), names) for run, names in runs]
        if segment.tx.locality is Locality.TREE:
            return [Piece(made[0][0], None)]
        limit = self._bucket_bytes or max([SMALL_BUCKET, *map(bytes_of, params.values())])
        pieces = [Piece(tx, part) for tx, names in made for part in buckets(names, params, limit)]
        return [Piece(pieces[0].tx, None)] if len(pieces) == 1 else pieces

    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        params: dict[str, Tensor],
        updates: dict[str, Tensor | None],
        state: PyTree,
        *,
        donate: bool,
        extras: dict[str, Any],
        check: Check,
    ) -> PyTree:
        """Take a step on parameters and return the next state; what is wrong is raised before anything is changed."""
        check(updates)
        self.tx.check_extras(extras)
        self.refresh(groups, params)
        given = Donation(donate, True)
        for place, (segment, plan) in enumerate(zip(self._segments, self.plans, strict=True)):
            last = place == len(self._segments) - 1
            updates, state = _run(segment, plan, updates, state, params, given, extras, apply=last)
            given = Donation(given.updates or (segment.tx.keeps_donation_promise and _fresh(updates, params)), True)
        return state


def _run(
    segment: Segment,
    plan: list[Piece],
    updates: dict[str, Tensor | None],
    whole_state: PyTree,
    params: dict[str, Tensor],
    donate: Donation,
    extras: dict[str, Any],
    *,
    apply: bool,
) -> tuple[dict[str, Tensor | None], PyTree]:
    state = segment.state_of(whole_state)
    if len(plan) == 1:
        results, after = plan[0].tx.run(updates, state, params, donate=donate, **extras)
        if apply:
            add_in_place(params, results)
    else:
        results = {}
        before, treedef = tree.flatten(state)
        leaves = list(before)
        for piece in plan:
            mine = {**dict.fromkeys(updates), **{name: updates[name] for name in piece.members(updates)}}
            out, new = piece.tx.run(mine, state, params, donate=donate, **extras)
            leaves = [
                now if now is not was else kept for now, was, kept in zip(tree.leaves(new), before, leaves, strict=True)
            ]
            if apply:
                add_in_place(params, out)
            else:
                results.update({name: out[name] for name in piece.members(updates)})
            del mine, out  # not beside those of the next piece
        after = tree.unflatten(treedef, leaves)
    return results, segment.with_state(whole_state, after)


def add_in_place(params: Mapping[str, Tensor], updates: Mapping[str, Tensor | None]) -> None:
    """Add updates to parameters."""
    present = [(params[name], update) for name, update in updates.items() if update is not None]
    if present:
        torch._foreach_add_([param for param, _ in present], [update for _, update in present])


def _fresh(updates: Mapping[str, Tensor | None], params: Mapping[str, Tensor]) -> bool:
    return not any(update is not None and update is params[name].grad for name, update in updates.items())
