"""`by_groups`: run a transform with numbers that differ between param groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from operator import is_
from typing import Any, NamedTuple

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


class GroupMembers(NamedTuple):
    """A param group: the names of its parameters, and the values of the hyperparameters in it."""

    names: list[str]
    numbers: Mapping[str, Number]
    """The values by dotted name, such as ``{"muon.momentum.decay": 0.95}``."""


def common_numbers(groups: Iterable[GroupMembers]) -> tuple[dict[str, Number], set[str]]:
    """Return the numbers in groups by dotted name, and the names of those that differ between groups.

    A number that differs has the value of the first group.
    """
    common: dict[str, Number] = {}
    conflicts: set[str] = set()
    for group in groups:
        for name, number in group.numbers.items():
            if not equal(common.setdefault(name, number), number):
                conflicts.add(name)
    return common, conflicts


def for_groups(tx: Transform, root: Visit, groups: Sequence[GroupMembers]) -> Transform:
    """Return a transform with the hyperparameters of all param groups. ``root`` is the visit of ``tx``.

    If groups have different numbers for a transform within ``tx``, that transform is replaced by `by_groups`.
    """
    common, conflicts = common_numbers(groups)
    tx = with_hyperparams(tx, common)
    if not conflicts:
        return tx
    return _in_versions(tx, root, groups, conflicts)


def _in_versions(tx: Transform, visited: Visit, groups: Sequence[GroupMembers], conflicts: Set[str]) -> Transform:
    """Return ``tx`` in which each transform that has a number in ``conflicts`` is replaced by a `by_groups`.

    Args:
        tx: a transform with the numbers of one group.
        visited: the visit of ``tx``, whose ``calls`` are the visits of the transforms that it calls.
        groups: the parameters and the numbers of each group.
        conflicts: the dotted names of the numbers that differ between groups.
    """
    differing = [name for name in visited.numbers.names if name in conflicts]
    if differing and not _has_common_numbers(visited):  # run it once for each set of numbers
        return _versions(tx, visited, groups)
    _require_tensors(visited, differing, groups)
    # The numbers of ``tx`` itself agree. Replace transforms within it.
    children: list[Transform] = []
    for child, call in zip(tx.children, visited.calls, strict=True):
        children.append(_in_versions(child, call, groups, conflicts))
    if all(map(is_, children, tx.children)):
        return tx
    entries = chain_entries(tx)
    if entries is not None:  # rebuilt with its names, under which the state has its entries
        return as_chain(dict(zip(entries, children, strict=True)))
    remaining = iter(children)
    return tx.with_children(lambda _: next(remaining))


def _versions(tx: Transform, visited: Visit, groups: Sequence[GroupMembers]) -> Transform:
    """Return `by_groups` with one version of a transform for all groups that have the same numbers."""
    number_of = dict(zip(visited.numbers.names, tree.leaves(tx), strict=True))
    versions: dict[tuple[object, ...], Transform] = {}
    members_of: dict[tuple[object, ...], tuple[str, ...]] = {}
    for group in groups:
        numbers = [group.numbers.get(name, number) for name, number in number_of.items()]
        key = tuple([_identity(number) for number in numbers])
        if key not in versions:
            versions[key] = with_numbers(tx, iter(numbers))
        members_of[key] = (*members_of.get(key, ()), *group.names)
    return by_groups(tuple(versions.values()), tuple(members_of.values()))


def _identity(number: Number) -> object:
    """Return a value that is equal for two numbers if they are equal, or are one tensor."""
    if isinstance(number, Tensor):
        return (id(number), None)  # a tuple, so that no float equals it
    return number


# ------------------------------------------ numbers that one transform reads for the parameters of all groups


def _has_common_numbers(visited: Visit) -> bool:
    """Return True if a transform runs once for all parameters, so that all groups must have the same numbers."""
    return bool(visited.calls) or visited.tx.locality is Locality.TREE or _keeps_a_number(visited)


def _keeps_a_number(visited: Visit) -> bool:
    """Return True if the state of a transform has a float tensor that belongs to no single parameter."""
    state = visited.tx.functions.init(visited.params)
    for leaf, name in zip(tree.leaves(state), parameters_of(state, visited.params), strict=True):
        if name is None and isinstance(leaf, Tensor) and leaf.is_floating_point():
            return True
    return False


def _require_tensors(visited: Visit, names: Sequence[str], groups: Sequence[GroupMembers]) -> None:
    """Raise if groups differ in numbers of a transform that runs once, unless the numbers are tensors.

    `CommonTensors` compares the values of tensors, so the tensor of the first group is used.
    """
    for name in names:
        for group in groups:
            if name not in group.numbers:  # no transform of this group reads the number
                continue
            if not isinstance(group.numbers[name], Tensor):
                raise _different_values(visited, name)


def _different_values(visited: Visit, name: str) -> ValueError:
    """Return an error for a number that must be equal in all groups, because its transform runs once for all."""
    reason = "wraps other transforms" if visited.calls else "combines all parameters"
    return ValueError(
        f"param_groups: found different values of {name!r}, expected one value, because the transform that reads it "
        f"{reason}: set the same value in all groups"
    )


class CommonTensor(NamedTuple):
    """A number that one transform reads for all parameters, and that is a tensor in several groups."""

    visited: Visit
    """The visit of the transform."""
    name: str
    copies: list[Tensor]
    """The tensor in each group. All must have the same value."""


class CommonTensors:
    """Compares the tensors of several groups that must have the same value, because one transform reads them.

    Args:
        visits: the visits of all transforms in the optimizer's transform.
        values: the numbers of each group by dotted name.
    """

    def __init__(self, visits: Sequence[Visit], values: Sequence[Mapping[str, Number]]) -> None:
        self.tensors: list[CommonTensor] = []
        self._versions: list[int] = []
        """The versions of all tensors when they were compared. Writing into a tensor increases its version."""
        copies_of: dict[str, list[Tensor]] = {}
        for numbers in values:
            for name, number in numbers.items():
                if isinstance(number, Tensor):
                    copies_of.setdefault(name, []).append(number)
        for visited in visits:
            names = [name for name in visited.numbers.names if len(copies_of.get(name, ())) > 1]
            if names and _has_common_numbers(visited):
                self.tensors += [CommonTensor(visited, name, copies_of[name]) for name in names]

    def check(self) -> None:
        """Raise ValueError if two groups have tensors of different values. Compare only if a tensor was written to."""
        if torch.compiler.is_compiling():
            return
        versions = [tensor._version for common in self.tensors for tensor in common.copies]
        if versions == self._versions:
            return
        for visited, name, copies in self.tensors:
            if not all(torch.equal(copies[0], tensor) for tensor in copies):
                raise _different_values(visited, name)
        self._versions = versions
