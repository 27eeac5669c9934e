"""Steps of an optimizer in one process: read the groups, check the gradients, run the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.checks import check_params, check_updates_fit, is_usable
from muonfx.core.donation import Donation, unshared
from muonfx.core.hyperparams import hyperparams
from muonfx.core.patterns import warn_of_unmatched
from muonfx.optimizer.groups import routes_of
from muonfx.optimizer.state import Load, on_this_rank
from muonfx.optimizer.values import BoundGroup, Number, fitted
from muonfx.optimizer.versions import for_groups
from muonfx.program.execute import Executor
from muonfx.program.nodes import Program
from muonfx.program.offload.transform import inner_of, store_of
from muonfx.program.placement import Arguments
from muonfx.tree import PyTree

__all__ = ["Stepping", "add_in_place"]


class Stepping:
    """A transform with its execution plan for an optimizer's parameters. It creates the state and runs the steps."""

    is_over_ranks = False

    def __init__(self, tx: Transform, program: Program, bucket_bytes: int | None) -> None:
        self.tx, self.program = tx, program
        self.routes = routes_of(program)
        self.left_out = {name for name, route in self.routes.items() if route.is_left_out}
        self._inner = inner_of(tx)
        self._now = self._inner
        self._read: tuple[Sequence[BoundGroup], list[dict[str, Number]]] | None = None
        self.executor = Executor(store=store_of(tx), bucket_bytes=bucket_bytes)
        self._node = program.root
        self._lowered: object = self._inner.structure  # of the node; it changes when groups begin to disagree

    @property
    def transform(self) -> Transform:
        """The transform that runs on the optimizer's tensors."""
        return self.tx

    def init(self, params: Mapping[str, Tensor], groups: Sequence[BoundGroup]) -> PyTree:
        """Create the state, and build the transforms for the groups."""
        check_params(params)
        warn_of_unmatched(self.tx.name_patterns, params)
        state = self.executor.init_node(self.program.root, self._inner, params)
        self.refresh(params, groups)
        return state

    def taken_from(self, other: Stepping, state: PyTree, old: PyTree) -> PyTree:
        """Return a new state with the values of another stepping's state, for the paths that both have."""
        before = dict(zip(tree.paths(old), enumerate(tree.leaves(old)), strict=True))
        leaves, treedef = tree.flatten(state)
        for place, path in enumerate(tree.paths(state)):
            if path in before:
                leaves[place] = self._kept(other, *before[path], place, leaves[place])
        return tree.unflatten(treedef, leaves)

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

    def exported(self, state: PyTree) -> Mapping[int, Any]:
        """Return, by leaf index, the leaves whose form in a state dict differs from the form that `show` returns."""
        return {}

    def take(self, place: int, leaf: Any, value: Any) -> Tensor | str:
        """Return the value that a load copies into a leaf, or an error message; see `state.Take`."""
        return on_this_rank(leaf, value)

    def load(self, loads: Sequence[Load], state: PyTree, problem: Exception | None) -> None:
        """Copy loaded values into the state, or raise `problem`."""
        if problem is not None:
            raise problem
        leaves = tree.leaves(state)
        for _, place, value in loads:
            leaves[place].copy_(value)

    def check_gradients(self, updates: Mapping[str, Tensor | None]) -> None:
        """Raise if a gradient is sparse or complex, or if the labels leave its parameter out."""
        for name, grad in updates.items():
            if grad is not None and not is_usable(grad):
                raise TypeError(f"the gradient of {name!r} must be dense and real, found {grad.layout}, {grad.dtype}")
        if late := [name for name in self.left_out if updates[name] is not None]:
            raise ValueError(
                f"{min(late)!r} has a gradient, but the labels leave it out (label None): if it was frozen before, "
                "call optimizer.add_param_group({'params': [...]}) with it; else change the labels"
            )

    def refresh(self, params: Mapping[str, Tensor], groups: Sequence[BoundGroup]) -> None:
        """Build the transforms for the current hyperparameters of the groups, if these have changed."""
        values = [one.numbers.read(one.group) for one in groups]
        if self._read is not None and self._read[0] is groups and all(map(is_, values, self._read[1])):
            return
        fit = fitted(hyperparams(self.tx), values)
        # Sort by name: the order of groups may differ between ranks, but the order of versions must not.
        filled = sorted(
            [(sorted(one.names), own) for one, own in zip(groups, fit, strict=True) if one.names],
            key=lambda pair: pair[0],
        )
        made = for_groups(self._inner, self.program, [own for _, own in filled], [names for names, _ in filled])
        self._prepare(made.prepare_all(), params)
        self._read = groups, values

    def _prepare(self, tx: Transform, params: Mapping[str, Tensor]) -> None:
        """Use a transform, with the current hyperparameters, for the following steps."""
        if tx.structure is not self._lowered:
            self._node, self._lowered = self.executor.program(tx, params), tx.structure
        self.executor.prepare(self._node, tx)
        self._now = tx

    def step(self, call: Arguments, problem: Exception | None) -> PyTree:
        """Run a step and return the next state; `problem` and errors are raised before anything is changed."""
        if problem is not None:
            raise problem
        self.tx.check_extras(call.extras)
        if call.extras:
            Program(self._node).check_extras(call.extras)
        if torch.compiler.is_compiling():  # a trace cannot compare memory; only the optimizer holds the state
            call = call._replace(donate=Donation(updates=False, state=True))
        else:
            donate, updates, state = unshared(call.donate, call.updates, call.state, call.params)
            call = call._replace(donate=donate, updates=updates, state=state)
        self.executor.require_room(call.state, call.params, call.donate)
        return self.executor.update_node(self._node, self._now, call)[1]


def add_in_place(params: Mapping[str, Tensor], updates: Mapping[str, Tensor | None]) -> None:
    """Add updates to parameters; an update of another shape raises ValueError."""
    present = [(params[name], update) for name, update in updates.items() if update is not None]
    if present:
        into, added = map(list, zip(*present, strict=True))
        if [x.shape for x in into] != [x.shape for x in added]:  # would be broadcast
            check_updates_fit(params, updates)
        torch._foreach_add_(into, added)
