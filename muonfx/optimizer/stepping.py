"""Steps of an optimizer in one process: read the groups, check the gradients, run the placed transform, show the state.

If groups have different numbers for a transform, the transform runs once for each set of numbers (`by_groups`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from operator import is_
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Locality, MatrixWork, Transform, transform
from muonfx.core.chain import chain_entries, widest
from muonfx.core.checks import all_usable, check_params, check_updates_fit, is_usable
from muonfx.core.donation import NOTHING, Donation, unshared
from muonfx.core.hyperparams import as_tensors, hyperparams, with_hyperparams
from muonfx.core.patterns import warn_of_unmatched
from muonfx.core.transform import check_extras, patterns_in, stacked
from muonfx.core.value import prepared, with_numbers
from muonfx.core.visit import Visit, as_chain, check_resolved_extras
from muonfx.optimizer.groups import BoundGroup, Group, Number, equal, fitted, routes_of, separate_tensors
from muonfx.optimizer.state import Load, on_this_rank
from muonfx.placement.arguments import Arguments
from muonfx.placement.bucketed import require_room
from muonfx.placement.offload import inner_of, store_of
from muonfx.placement.placed import PlacedTransforms, Where
from muonfx.transforms.accumulate import accumulate
from muonfx.tree import PyTree
from muonfx.tree.members import ownership_of, parameters_of


class Stepping:
    """Creates the optimizer state and runs steps in one process. ``place`` is the index of a tensor in the state."""

    is_over_ranks = False

    def __init__(self, tx: Transform, visits: Sequence[Visit], bucket_bytes: int | None) -> None:
        # visits: of the transform without `offload`, for the global parameters
        self.tx = tx
        self.visits = visits
        self.routes = routes_of(visits)
        self.left_out = {name for name, route in self.routes.items() if route.is_left_out}
        self._inner = inner_of(tx)
        self._read: tuple[Sequence[BoundGroup], list[dict[str, Number]]] | None = None
        self._common = _CommonTensors(visits, ())
        self._has_branches = any(visited.tx.factory is accumulate for visited in visits)
        self._store = store_of(tx)
        self._placed_transforms = PlacedTransforms(Where(None, self._store, bucket_bytes))
        self._placed = self._inner
        self._placed_structure: object = None
        """The structure of the transform from which `_placed` was made; it changes when groups begin to disagree."""

    def transform_with(self, tx: Transform) -> Transform:
        """Return the transform that updates the parameters: ``tx``, or a sharded transform over several ranks."""
        return tx

    def init(self, params: Mapping[str, Tensor], groups: Sequence[BoundGroup]) -> PyTree:
        """Return the initial state for named parameters, and read the hyperparameters in the param groups."""
        check_params(params)
        warn_of_unmatched(patterns_in(self.tx), params)
        state = self._placed_transforms(self._inner, params).functions.init(params)
        self.refresh(params, groups)
        return state

    def taken_from(self, other: Stepping, state: PyTree, old: PyTree) -> PyTree:
        """Return ``state`` with the values of ``old``, the state of ``other``, for all paths that both have."""
        before = dict(zip(tree.paths(old), enumerate(tree.leaves(old)), strict=True))
        leaves, treedef = tree.flatten(state)
        for place, path in enumerate(tree.paths(state)):
            if path in before:
                leaves[place] = self._kept(other, *before[path], place, leaves[place])
        return tree.unflatten(treedef, leaves)

    def _kept(self, other: Stepping, at: int, had: Any, place: int, leaf: Any) -> Any:
        """Return the tensor ``had`` of the old state if it has the shape of the new tensor ``leaf``, else ``leaf``."""
        whole = other.whole(at, had)
        return whole.to(leaf.device) if whole is not None and whole.shape == leaf.shape else leaf

    def whole(self, place: int, leaf: Any) -> Any:
        """Return the full state tensor with index ``place``. Over several ranks, all of them gather it together."""
        return leaf

    def show(self, place: int, leaf: Any) -> Any:
        """Convert the state tensor with index ``place`` to its form in ``optimizer.state``, such as a DTensor."""
        return leaf

    def shown(self, state: PyTree) -> PyTree:
        """Return the state in the form that ``update`` of `transform` takes: DTensors if the parameters are."""
        return state

    def share(self, state: PyTree) -> None:
        """After a step under DDP, start to copy the state of single ranks to all ranks, for ``state_dict``."""

    def exported(self, state: PyTree) -> Mapping[int, Any]:
        """Return the state tensors, by index, that ``state_dict`` needs in another form than ``optimizer.state``."""
        return {}

    def take(self, place: int, leaf: Any, value: Any) -> Tensor | str:
        """Return the values to load into the state tensor with index ``place``, or an error message."""
        return on_this_rank(leaf, value)

    def load(
        self, loads: Sequence[Load], state: PyTree, problem: Exception | None, without_state: Sequence[str]
    ) -> None:
        """Copy saved values into the state, or raise ``problem``, an error from reading the state dict.

        ``without_state`` are the parameters that keep the state that they have. All ranks must have the same.
        """
        if problem is not None:
            raise problem
        self.assign(loads, state)

    def assign(self, loads: Sequence[Load], state: PyTree) -> None:
        """Copy values into the state on this rank alone."""
        leaves = tree.leaves(state)
        for _, place, value in loads:
            leaves[place].copy_(value)

    def initial(self, params: Mapping[str, Tensor]) -> PyTree:
        """Return the initial state for named parameters with the current hyperparameters."""
        return self._placed.functions.init(params)

    def check_gradients(self, updates: Mapping[str, Tensor | None]) -> None:
        """Raise if a gradient is sparse or complex."""
        if not all_usable(updates.values()):
            name, grad = next(
                (name, grad) for name, grad in updates.items() if grad is not None and not is_usable(grad)
            )
            advice = ""
            if grad.layout is not torch.strided:
                advice = (
                    ": use Embedding(sparse=False), or give the parameter the label None and torch.optim.SparseAdam"
                )
            raise TypeError(
                f"the gradient of {name!r} must be dense and real, found {grad.layout}, {grad.dtype}{advice}"
            )

    def refresh(self, params: Mapping[str, Tensor], groups: Sequence[BoundGroup]) -> None:
        """Read the hyperparameters in the param groups. If they have changed, rebuild the transform with them."""
        values = [one.numbers.read(one.group) for one in groups]
        if self._read is not None and self._read[0] is groups and all(map(is_, values, self._read[1])):
            self._common.check()
            return
        if not torch.compiler.is_compiling():
            separate_tensors(groups)
            values = [one.numbers.read(one.group) for one in groups]
        self._common = _CommonTensors(self.visits, values)
        self._common.check()
        self._prepare(self._with_numbers(groups, values), params)
        self._read = groups, values

    def _with_numbers(self, groups: Sequence[BoundGroup], values: Sequence[Mapping[str, Number]]) -> Transform:
        """Return the transform with the hyperparameters ``values`` of the param groups."""
        fit = fitted(hyperparams(self.tx), values)
        # Sort by name: the order of groups may differ between ranks, but the order of versions must not.
        filled = sorted(
            [(sorted(one.names), own) for one, own in zip(groups, fit, strict=True) if one.names],
            key=lambda pair: pair[0],
        )
        made = for_groups(self._inner, self.visits, [own for _, own in filled], [names for names, _ in filled])
        if torch.compiler.is_compiling() and self._has_branches:
            made = as_tensors(made)  # torch.cond accepts no float that changes between calls
        return prepared(made)

    def snapshot(
        self, state: PyTree, params: dict[str, Tensor], grads: dict[str, Tensor | None], groups: Sequence[BoundGroup]
    ) -> tuple[Transform, PyTree, dict[str, Tensor], dict[str, Tensor | None]]:
        """Return the transform with the current hyperparameters, and the whole state, parameters and gradients."""
        tx = self._with_numbers(groups, [one.numbers.read(one.group) for one in groups])
        leaves, treedef = tree.flatten(state)
        whole = tree.unflatten(treedef, [self.whole(place, leaf) for place, leaf in enumerate(leaves)])
        return (tx if self._inner is self.tx else self.tx.replace(tx=tx)), whole, params, grads

    def _prepare(self, tx: Transform, params: Mapping[str, Tensor]) -> None:
        """Use a transform, rebuilt with the current hyperparameters, in the following steps."""
        if tx.structure is self._placed_structure:
            placed = with_numbers(self._placed, iter(tree.leaves(tx)))
        else:
            placed = self._placed_transforms(tx, params)
            self._placed_structure = tx.structure
        self._placed = prepared(placed)

    def step(self, call: Arguments, problem: Exception | None) -> PyTree:
        """Run one step and return the next state. A ``problem``, an error of this rank, is raised before any change."""
        if problem is not None:
            raise problem
        check_extras(self.tx, call.extras)
        check_resolved_extras(self.visits, call.extras)
        if torch.compiler.is_compiling():  # a trace cannot compare memory; only the optimizer holds the state
            call = call._replace(donate=Donation(updates=False, state=True))
        else:
            donate, updates, state = unshared(call.donate, call.updates, call.state, call.params)
            call = call._replace(donate=donate, updates=updates, state=state)
        require_room(self._store, call.state, call.params, call.donate)
        extras = {**call.extras, "apply_to_params": add_in_place}
        return self._placed.run(call.updates, call.state, call.params, donate=call.donate, **extras)[1]


def add_in_place(params: Mapping[str, Tensor], updates: Mapping[str, Tensor | None]) -> None:
    """Add updates to parameters in place; raise ValueError if the shapes differ."""
    into: list[Tensor] = []
    added: list[Tensor] = []
    for name, update in updates.items():
        if update is not None:
            if update.shape != params[name].shape:  # would be broadcast
                check_updates_fit(params, updates)
            into.append(params[name])
            added.append(update)
    if into:
        torch._foreach_add_(into, added)


def path_of(entries: tuple[object, ...]) -> str:
    """Join the path of a tensor in the state to a key for ``optimizer.state``, such as "momentum.trace"."""
    # Dots, because tools that write a state dict to flat files separate its levels by slashes.
    return ".".join(map(str, entries))


class StateEntries:
    """Keeps ``optimizer.state`` up to date: a tensor is an entry of its parameter, a step count of every parameter."""

    def __init__(self, state: PyTree, named: Mapping[str, Tensor]) -> None:
        self.slots: list[tuple[Tensor | None, str]] = []
        """For each leaf, its parameter, or None if it is shown under each, and its key in ``optimizer.state``."""
        for ownership in ownership_of(state, named):
            param = None if ownership.parameter is None else named[ownership.parameter]
            self.slots.append((param, path_of(ownership.path)))
        self._leaves: list[Any] = [...] * len(self.slots)  # the leaves as last shown: none so far
        self.shown: list[Any] = list(self._leaves)
        """For each leaf, its form in ``optimizer.state``."""

    def update(self, entries: Mapping[Tensor, Group], state: PyTree, show: Callable[[int, Any], Any]) -> None:
        """Put the changed tensors, converted by ``show(index, tensor)``, into ``entries`` (``optimizer.state``)."""
        leaves = tree.leaves(state)
        for place, (new, shown) in enumerate(zip(leaves, self._leaves, strict=True)):
            if new is not shown:
                owner, key = self.slots[place]
                leaf = show(place, new)
                self.shown[place] = leaf
                for param in _holders(owner, entries):
                    entries[param][key] = leaf
        self._leaves = leaves

    def is_edited(self, entries: Mapping[Tensor, Group], named: Mapping[str, Tensor]) -> bool:
        """Return True if a caller has assigned or removed an entry of ``entries`` (``optimizer.state``)."""
        if len(entries) != len(named):
            return True
        number = 0
        for (owner, key), leaf in zip(self.slots, self.shown, strict=True):
            for param in _holders(owner, named.values()):
                entry = entries.get(param)
                if entry is None or entry.get(key, ...) is not leaf:
                    return True
                number += 1
        return number != sum(map(len, entries.values()))

    def places(self, entries: Mapping[Tensor, Group]) -> dict[tuple[int, str], int]:
        """Map (id of a parameter, key in ``optimizer.state``) to the index of a tensor in the state."""
        return {
            (id(param), key): place
            for place, (owner, key) in enumerate(self.slots)
            for param in _holders(owner, entries)
        }


def _holders(owner: Tensor | None, params: Iterable[Tensor]) -> Iterable[Tensor]:
    """Return the parameters under which a tensor of the state is shown: its owner, or all if it has none."""
    return params if owner is None else (owner,)


# ----------------------------------------------------------------------------------- numbers that differ between groups


def _resolve(tx: Transform, params: PyTree) -> Transform:
    return tx.replace(versions=tuple(version.resolve(params) for version in tx.arguments["versions"]))


def _on_stacks(tx: Transform, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Transform, dict[str, tuple[int, int]]]:
    done = [stacked(version, shapes) for version in tx.arguments["versions"]]
    return tx.replace(versions=tuple(version for version, _ in done)), done[0][1]


@transform(
    locality=lambda versions, members: widest(versions),
    reads_params=lambda versions, members: any(version.reads_params for version in versions),
    resolve=_resolve,
    matrices=MatrixWork(on_stacks=_on_stacks),
    combinator=Combinator(varies_numbers=True),
)
def by_groups(versions: tuple[Transform, ...], members: tuple[tuple[str, ...], ...]):
    """Run a transform with different numbers per param group: ``versions[i]`` updates the parameters ``members[i]``."""
    chosen = [frozenset(names) for names in members]

    def init(params: PyTree) -> PyTree:
        return versions[0].functions.init(params)

    def update(
        updates: dict[str, Tensor | None],
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        results: dict[str, Tensor | None] = dict.fromkeys(updates)
        old_leaves, treedef = tree.flatten(state)
        leaves = list(old_leaves)
        for version, names in zip(versions, chosen, strict=True):
            group_updates = {name: update if name in names else None for name, update in updates.items()}
            out, new_state = version.run(group_updates, state, params, donate=donate, **extras)
            for index, (new_leaf, old_leaf) in enumerate(zip(tree.leaves(new_state), old_leaves, strict=True)):
                # Each version changes the state of its parameters only. State of no parameter is equal in all versions.
                if new_leaf is not old_leaf:
                    leaves[index] = new_leaf
            for name in names:
                if name in updates:
                    results[name] = out[name]
        return results, tree.unflatten(treedef, leaves)

    return init, update


def for_groups(
    tx: Transform, visits: Sequence[Visit], values: Sequence[Mapping[str, Number]], members: Sequence[Sequence[str]]
) -> Transform:
    """Return a transform with the hyperparameters of all param groups; ``members`` are each group's parameters.

    If groups have different numbers for a transform within ``tx``, that transform is replaced by `by_groups`.
    """
    agreed: dict[str, Number] = {}
    for group in values:
        agreed = {**group, **agreed}
    conflicts = {name for group in values for name, value in group.items() if not equal(agreed[name], value)}
    tx = with_hyperparams(tx, agreed)
    return _in_versions(tx, visits[0], values, members, conflicts) if conflicts else tx


def _keeps_a_number(visited: Visit) -> bool:
    """Return True if the state of a transform has a float tensor that belongs to no single parameter."""
    state = visited.tx.functions.init(visited.params)
    pairs = zip(tree.leaves(state), parameters_of(state, visited.params), strict=True)
    return any(isinstance(leaf, Tensor) and leaf.is_floating_point() and name is None for leaf, name in pairs)


def _has_common_numbers(visited: Visit) -> bool:
    """Return True if a transform runs once for all parameters, so that all groups have the same numbers."""
    return bool(visited.calls) or visited.tx.locality is Locality.TREE or _keeps_a_number(visited)


def _different_values(visited: Visit, name: str) -> ValueError:
    reason = "wraps other transforms" if visited.calls else "combines all parameters"
    return ValueError(
        f"param_groups: found different values of {name!r}, expected one value, because the transform that reads it "
        f"{reason}: set the same value in all groups"
    )


class _CommonTensors:
    """Tensors of several groups that must have the same value, because one transform reads them for all parameters."""

    def __init__(self, visits: Sequence[Visit], values: Sequence[Mapping[str, Number]]) -> None:
        self._tensors: list[tuple[Visit, str, list[Tensor]]] = []
        self._versions: list[int] = []  # of all tensors when they were compared
        tensors_of: dict[str, list[Tensor]] = {}
        for numbers in values:
            for name, number in numbers.items():
                if isinstance(number, Tensor):
                    tensors_of.setdefault(name, []).append(number)
        repeated = {name for name, tensors in tensors_of.items() if len(tensors) > 1}
        if not repeated:
            return
        for visited in visits:
            names = [name for name in visited.numbers.names if name in repeated]
            if names and _has_common_numbers(visited):
                self._tensors += [(visited, name, tensors_of[name]) for name in names]

    def check(self) -> None:
        """Raise ValueError if two groups have tensors of different values. Compare only if a tensor was written to."""
        if not self._tensors or torch.compiler.is_compiling():
            return
        versions = [tensor._version for _, _, tensors in self._tensors for tensor in tensors]
        if versions == self._versions:
            return
        for visited, name, (first, *others) in self._tensors:
            if not all(torch.equal(first, other) for other in others):
                raise _different_values(visited, name)
        self._versions = versions


def _in_versions(
    tx: Transform,
    visited: Visit,
    values: Sequence[Mapping[str, Number]],
    members: Sequence[Sequence[str]],
    conflicts: Set[str],
) -> Transform:
    own_conflicts = [name for name in visited.numbers.names if name in conflicts]
    if own_conflicts and _has_common_numbers(visited):
        for name in own_conflicts:
            numbers = [group[name] for group in values if name in group]
            if not all(isinstance(number, Tensor) for number in numbers):
                raise _different_values(visited, name)
        own_conflicts = []  # `_CommonTensors` compares the values of tensors, so the first group's are used
    if own_conflicts:
        agreed = dict(zip(visited.numbers.names, tree.leaves(tx), strict=True))
        runs: dict[tuple[object, ...], tuple[list[Number], list[str]]] = {}
        for group, names in zip(values, members, strict=True):
            own_numbers = [group.get(name, number) for name, number in agreed.items()]
            key = tuple((id(number), None) if isinstance(number, Tensor) else number for number in own_numbers)
            runs.setdefault(key, (own_numbers, []))[1].extend(names)
        made = tuple(with_numbers(tx, iter(numbers)) for numbers, _ in runs.values())
        return by_groups(made, tuple(tuple(names) for _, names in runs.values()))
    calls = iter(visited.calls)
    parts = [
        _in_versions(part, next(calls), values, members, conflicts) if isinstance(part, Transform) else part
        for part in tx.parts
    ]
    if all(new is old for new, old in zip(parts, tx.parts, strict=True)):
        return tx
    if (entries := chain_entries(tx)) is not None:
        return as_chain(dict(zip(entries, parts, strict=True)))
    return Transform._from(dataclasses.replace(tx.structure, derived={}), parts)
