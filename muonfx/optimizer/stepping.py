"""Steps of an optimizer in one process: read the groups, check the gradients, run the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.checks import check_params, check_updates_fit, warn_of_unmatched
from muonfx.core.donation import Donation, unshared
from muonfx.core.hyperparams import hyperparams
from muonfx.optimizer.state import Load, Taken, on_this_rank
from muonfx.optimizer.values import Group, GroupNumbers, Number, fitted, unchanged
from muonfx.optimizer.versions import for_groups
from muonfx.program.execute import Executor
from muonfx.program.nodes import Node, Program
from muonfx.program.offload.transform import inner_of, store_of
from muonfx.program.placement import ALONE, Arguments
from muonfx.tree import PyTree

__all__ = ["Stepping", "add_in_place"]

SMALL_BUCKET = 1 << 22
"""The least bytes of a default bucket, also if every parameter is smaller: calls then cost more than memory."""


class Stepping:
    """Creates an optimizer's state and runs its steps."""

    def __init__(
        self, tx: Transform, program: Program, numbers: Sequence[GroupNumbers], bucket_bytes: int | None
    ) -> None:
        self.tx, self._program, self._numbers, self._bucket_bytes = tx, program, numbers, bucket_bytes
        self._inner = inner_of(tx)
        self._now = self._inner
        self._values: list[dict[str, Number]] | None = None
        self.executor = Executor(ALONE, store_of(tx))
        self._node: Node | None = None
        self._lowered: object = None  # the structure of the node; it changes when groups begin to disagree

    def __getstate__(self) -> dict[str, Any]:
        """Drop the caches: a copy reads its own groups."""
        return {**self.__dict__, "_values": None, "_node": None, "_lowered": None, "executor": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore with empty caches, which the next step fills."""
        self.__dict__.update(state)
        self.executor = Executor(ALONE, store_of(self.tx), self._limit)

    @property
    def transform(self) -> Transform:
        """The transform over the parameters that the optimizer holds."""
        return self.tx

    def init(self, params: Mapping[str, Tensor], groups: Sequence[Group]) -> PyTree:
        """Create the state, and build the transforms for the groups."""
        check_params(params)
        warn_of_unmatched(self.tx.name_patterns, params)
        self._limit = self._bucket_bytes or max([SMALL_BUCKET, *[param.nbytes for param in params.values()]])
        self.executor.bucket_bytes = self._limit
        self._node, self._lowered = self._program.root, self._inner.structure
        state = self.executor.init_node(self._node, self._inner, params)
        self.refresh(groups, params)
        return state

    def taken_from(self, other: Stepping, state: PyTree, old: PyTree) -> PyTree:
        """Return a new state with the values of another stepping's state, for the paths that both have."""
        before = {path: at for at, path in enumerate(tree.paths(old))}
        old_leaves = tree.leaves(old)
        leaves, treedef = tree.flatten(state)
        kept: list[Any] = []
        for place, (path, leaf) in enumerate(zip(tree.paths(state), leaves, strict=True)):
            at = before.get(path)
            kept.append(leaf if at is None else self._kept(other, at, old_leaves[at], place, leaf))
        return tree.unflatten(treedef, kept)

    def _kept(self, other: Stepping, at: int, had: Any, place: int, leaf: Any) -> Any:
        """Return a leaf of a new state with another stepping's values, if they have its shape."""
        whole = other.whole(at, had)
        return whole.to(leaf.device) if whole is not None and whole.shape == leaf.shape else leaf

    def whole(self, place: int, leaf: Any) -> Any:
        """Return a leaf of the state as one process holds it; over ranks, all ranks call this together."""
        return leaf

    def show(self, place: int, leaf: Any) -> Any:
        """Return a leaf of the state as ``optimizer.state`` presents it."""
        return leaf

    def shown(self, state: PyTree) -> PyTree:
        """Return the state as the functional API presents it."""
        return state

    def share(self, state: PyTree) -> None:
        """Start to copy a new state to all ranks that must be able to save it."""

    def exported(self, state: PyTree) -> dict[int, Any]:
        """Return the leaves, by index, that a state dict has in another form than `show` returns."""
        return {}

    def take(self, place: int, leaf: Any, value: Any) -> Taken | str:
        """Return the copy that loads a value into a leaf, or an error message; see `state.Take`."""
        return on_this_rank(leaf, value)

    def load(self, loads: Sequence[Load], state: PyTree, problem: Exception | None) -> None:
        """Copy loaded values into the state, or raise `problem`."""
        if problem is not None:
            raise problem
        for load in loads:
            if load.target is not None:
                load.target.copy_(load.source)

    def regrouped(self) -> None:
        """Read all groups at the next step, because parameters have moved between them."""
        self._values = None

    def refresh(self, groups: Sequence[Group], params: Mapping[str, Tensor]) -> None:
        """Build the transforms for the current hyperparameters of the groups, if these have changed."""
        values = [own.read(group) for group, own in zip(groups, self._numbers, strict=True)]
        if self._values is not None and unchanged(values, self._values):
            return
        fit = fitted(hyperparams(self.tx), values)
        filled = [(group, sorted(held["param_names"])) for group, held in zip(fit, groups, strict=True)]
        # Sort by name: the order of groups may differ between ranks, but the order of versions must not.
        own = sorted([(group, names) for group, names in filled if names], key=lambda pair: pair[1])
        made = for_groups(self._inner, self._program, [v for v, _ in own], [names for _, names in own])
        self._prepare(made.prepare_all(), params)
        self._values = values

    def _prepare(self, tx: Transform, params: Mapping[str, Tensor]) -> None:
        """Take the next steps by a transform with the current hyperparameters."""
        if self._node is None or tx.structure is not self._lowered:
            self._node, self._lowered = self.executor.program(tx, params), tx.structure
        self.executor.prepare(self._node, tx)
        self._now = tx

    def step(
        self,
        groups: Sequence[Group],
        params: dict[str, Tensor],
        updates: dict[str, Tensor | None],
        state: PyTree,
        *,
        donate: bool,
        extras: dict[str, Any],
        problem: Exception | None,
    ) -> PyTree:
        """Run a step and return the next state; `problem` and errors are raised before anything is changed."""
        if problem is not None:
            raise problem
        self.tx.check_extras(extras)
        self.refresh(groups, params)
        assert self._node is not None
        self.executor.check_extras(self._node, extras)
        if torch.compiler.is_compiling():  # a trace cannot compare memory; only the optimizer holds the state
            donated = Donation(updates=False, state=True)
        else:
            donated, updates, state = unshared(Donation(donate, True), updates, state, params)
        self.executor.require_room(state, params, donated)
        _, after = self.executor.update_node(
            self._node, self._now, Arguments(updates, state, params, donated, extras, add_in_place)
        )
        return after


def add_in_place(params: Mapping[str, Tensor], updates: Mapping[str, Tensor | None]) -> None:
    """Add updates to parameters; an update of another shape raises ValueError."""
    present = [(params[name], update) for name, update in updates.items() if update is not None]
    if present:
        if any(param.shape != update.shape for param, update in present):  # would be broadcast
            check_updates_fit(params, updates)
        torch._foreach_add_([param for param, _ in present], [update for _, update in present])
