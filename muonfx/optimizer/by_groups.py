"""`by_groups`: run a transform with numbers that differ between param groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Locality, Transform, transform
from muonfx.core.chain import chain_entries, widest
from muonfx.core.donation import NOTHING, Donation
from muonfx.core.hyperparams import with_hyperparams
from muonfx.core.value import with_numbers
from muonfx.core.visit import Visit, as_chain
from muonfx.optimizer.group_numbers import Number, equal
from muonfx.tree import PyTree
from muonfx.tree.members import parameters_of


def _resolve(tx: Transform, params: PyTree) -> Transform:
    return tx.replace(versions=tuple(version.resolve(params) for version in tx.arguments["versions"]))


def _on_stacks(tx: Transform, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Transform, dict[str, tuple[int, int]]]:
    done = [version.on_stacks(shapes) for version in tx.arguments["versions"]]
    return tx.replace(versions=tuple(version for version, _ in done)), done[0][1]


@transform(
    locality=lambda versions, members: widest(versions),
    reads_params=lambda versions, members: any(version.reads_params for version in versions),
    resolve=_resolve,
    on_stacks=_on_stacks,
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


class CommonTensors:
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
        own_conflicts = []  # `CommonTensors` compares the values of tensors, so the first group's are used
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
