"""`by_groups`: run a transform with numbers that differ between param groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from operator import is_
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Locality, MatrixWork, Transform, transform
from muonfx.core.chain import chain_entries, widest
from muonfx.core.donation import NOTHING, Donation
from muonfx.core.hyperparams import with_hyperparams
from muonfx.core.transform import stacked
from muonfx.core.value import with_numbers
from muonfx.core.visit import Visit, as_chain
from muonfx.optimizer.group_numbers import Number, equal
from muonfx.tree import PyTree
from muonfx.tree.members import parameters_of


def _resolve(tx: Transform, params: PyTree) -> Transform:
    """Return `by_groups` with each version resolved for the parameters."""
    return tx.replace(versions=tuple(version.resolve(params) for version in tx.arguments["versions"]))


def _on_stacks(tx: Transform, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Transform, dict[str, tuple[int, int]]]:
    """Return `by_groups` whose versions update stacks of matrices, and a dict from stack name to (rows, columns).

    The versions differ only in numbers, so the dict is equal for all of them.
    """
    versions_and_shapes = [stacked(version, shapes) for version in tx.arguments["versions"]]
    versions = tuple([version for version, _ in versions_and_shapes])
    _, shapes_of_matrices = versions_and_shapes[0]
    return tx.replace(versions=versions), shapes_of_matrices


@transform(
    locality=lambda versions, members: widest(versions),
    reads_params=lambda versions, members: any(version.reads_params for version in versions),
    resolve=_resolve,
    matrices=MatrixWork(on_stacks=_on_stacks),
    combinator=Combinator(varies_numbers=True),
)
def by_groups(versions: tuple[Transform, ...], members: tuple[tuple[str, ...], ...]):
    """Run a transform with different numbers per param group: ``versions[i]`` updates the parameters ``members[i]``.

    The versions are one transform with other numbers, and share one state.
    """
    members_of_version = [frozenset(names) for names in members]

    def init(params: PyTree) -> PyTree:
        # Numbers have no effect on the initial state, so any version creates it.
        return versions[0].functions.init(params)

    def update(
        updates: dict[str, Tensor | None],
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Run each version on the updates of its members, and merge the results and the states."""
        results: dict[str, Tensor | None] = dict.fromkeys(updates)
        old_leaves, treedef = tree.flatten(state)
        leaves = list(old_leaves)
        for version, names in zip(versions, members_of_version, strict=True):
            # An update of None leaves the state of its parameter unchanged.
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
    common: dict[str, Number] = {}
    conflicts: set[str] = set()
    for group_values in values:
        for name, number in group_values.items():
            if not equal(common.setdefault(name, number), number):
                conflicts.add(name)
    tx = with_hyperparams(tx, common)
    if not conflicts:
        return tx
    return _in_versions(tx, visits[0], values, members, conflicts)


def _keeps_a_number(visited: Visit) -> bool:
    """Return True if the state of a transform has a float tensor that belongs to no single parameter."""
    state = visited.tx.functions.init(visited.params)
    for leaf, name in zip(tree.leaves(state), parameters_of(state, visited.params), strict=True):
        if name is None and isinstance(leaf, Tensor) and leaf.is_floating_point():
            return True
    return False


def _has_common_numbers(visited: Visit) -> bool:
    """Return True if a transform runs once for all parameters, so that all groups have the same numbers."""
    return bool(visited.calls) or visited.tx.locality is Locality.TREE or _keeps_a_number(visited)


def _different_values(visited: Visit, name: str) -> ValueError:
    """Return an error for a number that must be equal in all groups, because its transform runs once for all."""
    reason = "wraps other transforms" if visited.calls else "combines all parameters"
    return ValueError(
        f"param_groups: found different values of {name!r}, expected one value, because the transform that reads it "
        f"{reason}: set the same value in all groups"
    )


class CommonTensors:
    """Tensors of several groups that must have the same value, because one transform reads them for all parameters.

    Args:
        visits: the visits of all transforms in the optimizer's transform.
        values: the numbers of each group by dotted name.
    """

    def __init__(self, visits: Sequence[Visit], values: Sequence[Mapping[str, Number]]) -> None:
        self.tensors: list[tuple[Visit, str, list[Tensor]]] = []
        """The transform that reads a number, the name of the number, and its tensor in each group."""
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
                self.tensors += [(visited, name, tensors_of[name]) for name in names]

    def check(self) -> None:
        """Raise ValueError if two groups have tensors of different values. Compare only if a tensor was written to."""
        if not self.tensors or torch.compiler.is_compiling():
            return
        versions = [tensor._version for _, _, tensors in self.tensors for tensor in tensors]
        if versions == self._versions:
            return
        for visited, name, tensors in self.tensors:
            if not all(torch.equal(tensors[0], tensor) for tensor in tensors[1:]):
                raise _different_values(visited, name)
        self._versions = versions


def _in_versions(
    tx: Transform,
    visited: Visit,
    values: Sequence[Mapping[str, Number]],
    members: Sequence[Sequence[str]],
    conflicts: Set[str],
) -> Transform:
    """Return ``tx`` in which each transform that has a number in ``conflicts`` is replaced by a `by_groups`.

    Args:
        tx: a transform with the numbers of one group.
        visited: the visit of ``tx``, whose ``calls`` are the visits of the transforms that it calls.
        values: the numbers of each group by dotted name.
        members: the parameter names of each group.
        conflicts: the dotted names of the numbers that differ between groups.
    """
    own_conflicts = [name for name in visited.numbers.names if name in conflicts]
    if own_conflicts and _has_common_numbers(visited):  # it runs once, so the numbers must be equal
        _require_tensors(visited, own_conflicts, values)
    elif own_conflicts:  # it updates each parameter separately: run it once for each set of numbers
        return _versions(tx, visited, values, members)
    # The numbers of ``tx`` itself agree. Replace transforms within it.
    calls = iter(visited.calls)
    parts: list[Any] = []
    for part in tx.parts:
        if isinstance(part, Transform):
            part = _in_versions(part, next(calls), values, members, conflicts)
        parts.append(part)
    if all(map(is_, parts, tx.parts)):
        return tx
    entries = chain_entries(tx)
    if entries is not None:  # rebuilt with its names, under which the state has its entries
        return as_chain(dict(zip(entries, parts, strict=True)))
    return Transform._from(dataclasses.replace(tx.structure, derived={}), parts)


def _require_tensors(visited: Visit, names: Sequence[str], values: Sequence[Mapping[str, Number]]) -> None:
    """Raise if groups differ in numbers of a transform that runs once, unless the numbers are tensors.

    `CommonTensors` compares the values of tensors, so the tensor of the first group is used.
    """
    for name in names:
        for group_values in values:
            if name in group_values and not isinstance(group_values[name], Tensor):
                raise _different_values(visited, name)


def _versions(
    tx: Transform, visited: Visit, values: Sequence[Mapping[str, Number]], members: Sequence[Sequence[str]]
) -> Transform:
    """Return `by_groups` with one version of a transform for all groups that have the same numbers."""
    number_of = dict(zip(visited.numbers.names, tree.leaves(tx), strict=True))
    versions: dict[tuple[object, ...], Transform] = {}
    members_of: dict[tuple[object, ...], list[str]] = {}
    for group_values, names in zip(values, members, strict=True):
        numbers = [group_values.get(name, number) for name, number in number_of.items()]
        key = tuple([_identity(number) for number in numbers])
        if key not in versions:
            versions[key] = with_numbers(tx, iter(numbers))
            members_of[key] = []
        members_of[key].extend(names)
    return by_groups(tuple(versions.values()), tuple([tuple(names) for names in members_of.values()]))


def _identity(number: Number) -> object:
    """Return a value that is equal for two numbers if they are equal, or are one tensor."""
    if isinstance(number, Tensor):
        return (id(number), None)  # a tuple, so that no float equals it
    return number
