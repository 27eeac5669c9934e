"""`by_groups`: run a transform with numbers that differ between param groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Locality, MatrixWork, Transform, transform
from muonfx.core.chain import widest
from muonfx.core.donation import NOTHING, Donation
from muonfx.core.hyperparams import with_hyperparams
from muonfx.core.transform import stacked
from muonfx.core.value import numbers_of, with_numbers
from muonfx.core.visit import Visit, with_inner
from muonfx.optimizer.group_numbers import Number, Numbers, equal
from muonfx.optimizer.named_parameters import Gradients
from muonfx.tree import PyTree
from muonfx.tree.members import parameters_of


def _resolve(tx: Transform, params: PyTree) -> Transform:
    """Return `by_groups` with each version resolved for the parameters."""
    return tx.replace(
        versions=tuple(version.resolve(params) for version in tx.arguments["versions"])
    )


def _on_stacks(
    tx: Transform, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Transform, dict[str, tuple[int, int]]]:
    """Return a `by_groups` for stacks of matrices, and the (rows, columns) of the matrices in each stack by name.

    For example, 12 matrices of shape (64, 64) are updated as one tensor of shape (12, 64, 64).

    Args:
        tx: a `by_groups`. Its argument "versions" has one transform several times, with different numbers.
        shapes: the shape of each tensor by name, such as ``{"qkv": (12, 64, 64)}``.
    """
    stacked_versions: list[Transform] = []
    shapes_of_matrices: dict[str, tuple[int, int]] = {}
    for version in tx.arguments["versions"]:
        # The shapes are the same for each version, because versions differ only in numbers.
        stacked_version, shapes_of_matrices = stacked(version, shapes)
        stacked_versions.append(stacked_version)
    return tx.replace(versions=tuple(stacked_versions)), shapes_of_matrices


@transform(
    locality=lambda versions, members: widest(versions),
    reads_params=lambda versions, members: any(version.reads_params for version in versions),
    resolve=_resolve,
    matrices=MatrixWork(on_stacks=_on_stacks),
    combinator=Combinator(varies_numbers=True),
)
def by_groups(versions: tuple[Transform, ...], members: tuple[tuple[str, ...], ...]):
    """Run a transform with different numbers per param group: ``versions[i]`` updates the parameters ``members[i]``.

    The versions are one transform with other numbers, and share one state. For example, ``versions`` are
    ``(momentum(0.9), momentum(0.5))``, and ``members`` are ``(("a", "b"), ("c",))``.
    """

    def init(params: PyTree) -> PyTree:
        # Numbers have no effect on the initial state, so any version creates it.
        return versions[0].functions.init(params)

    def update(
        updates: Gradients,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Run each version on the updates of its members, and merge the results and the states.

        For example, with ``members = (("a",), ("b",))``, the first version receives ``{"a": update, "b": None}``. So it
        changes the state of "a", and returns the state tensors of "b" unchanged, as the same objects.
        """
        merged_updates: Gradients = dict.fromkeys(updates)
        old_leaves, treedef = tree.flatten(state)
        merged_leaves = list(old_leaves)
        for version, members_of_version in zip(versions, members, strict=True):
            names = [name for name in members_of_version if name in updates]
            group_updates: Gradients = dict.fromkeys(updates)  # None for each parameter
            for name in names:
                group_updates[name] = updates[name]
            new_updates, new_state = version.run(
                group_updates, state, params, donate=donate, **extras
            )
            # Keep the updates of the members.
            for name in names:
                merged_updates[name] = new_updates[name]
            # Keep the state tensors that this version has changed.
            for index, (new_leaf, old_leaf) in enumerate(
                zip(tree.leaves(new_state), old_leaves, strict=True)
            ):
                # The same object: a tensor of other parameters, which another version updates.
                # Another object: a tensor of a member, or a leaf such as a step count, which all versions make equal.
                if new_leaf is not old_leaf:
                    merged_leaves[index] = new_leaf
        return merged_updates, tree.unflatten(treedef, merged_leaves)

    return init, update


class GroupMembers(NamedTuple):
    """A param group: the names of its parameters, and the values of the hyperparameters in it."""

    names: list[str]
    numbers: Numbers
    """The values by dotted name, such as ``{"muon.momentum.decay": 0.95}``."""


def common_numbers(groups: Iterable[GroupMembers]) -> tuple[dict[str, Number], set[str]]:
    """Return the numbers in param groups by dotted name, and the names of those that differ between groups.

    A number that differs has the value of the first group.

    >>> common_numbers(
    ...     [
    ...         GroupMembers(["a"], {"momentum.decay": 0.9}),
    ...         GroupMembers(["b"], {"momentum.decay": 0.5}),
    ...     ]
    ... )
    ({'momentum.decay': 0.9}, {'momentum.decay'})
    """
    common: dict[str, Number] = {}
    names_that_differ: set[str] = set()
    for group in groups:
        for name, number in group.numbers.items():
            # `setdefault` returns the number of an earlier group, or stores the number of this one.
            if not equal(common.setdefault(name, number), number):
                names_that_differ.add(name)
    return common, names_that_differ


def for_groups(tx: Transform, root: Visit, groups: Sequence[GroupMembers]) -> Transform:
    """Return a transform with the hyperparameters of all param groups, which users and schedulers may have changed.

    For example, if all groups have the rate 0.2 now, ``scale_by_learning_rate(0.1)`` becomes
    ``scale_by_learning_rate(0.2)``. If one has 0.1 and the other 0.2, it becomes a `by_groups` of both.

    Args:
        tx: the transform of the optimizer, with the numbers from construction.
        root: a record of ``tx`` and of each transform that it calls: the names of their parameters and numbers.
        groups: the parameter names and the current numbers of each group.
    """
    numbers, names_that_differ = common_numbers(groups)
    # The same object if no number has changed, as at construction.
    tx = with_hyperparams(tx, numbers)
    if not names_that_differ:  # usually: all groups have the same numbers
        return tx
    return _split_by_groups(tx, root, groups, names_that_differ)


def _split_by_groups(
    tx: Transform, visited: Visit, groups: Sequence[GroupMembers], names_that_differ: Set[str]
) -> Transform:
    """Return ``tx`` with a `by_groups` in place of each transform whose numbers differ between param groups.

    For example, in ``chain(momentum(0.9), scale(-0.1))``, `by_groups` replaces ``momentum(0.9)`` if one group has
    another decay.

    Args:
        tx: a transform with the numbers of the first group.
        visited: a record of ``tx``: its parameters and the names of its numbers. ``visited.calls`` has a record of each
            transform that it calls.
        groups: the parameters and the numbers of each group.
        names_that_differ: the dotted names of the numbers that differ between groups, such as "momentum.decay".
    """
    # The numbers of `tx` itself. Numbers of a transform that it calls are in the record of that transform.
    names_of_tx = [name for name in visited.numbers.names if name in names_that_differ]
    # A transform such as a norm of all parameters reads one value for all groups.
    if names_of_tx and runs_once(visited):
        _require_tensors(visited, names_of_tx, groups)
    elif names_of_tx:  # such as momentum, which can run for the parameters of each group separately
        return _with_versions(tx, visited, groups)
    # Do the same within each transform that `tx` calls.
    new_children: list[Transform] = []
    for child, child_visit in zip(tx.children, visited.calls, strict=True):
        new_children.append(_split_by_groups(child, child_visit, groups, names_that_differ))
    return with_inner(tx, new_children)


def _require_tensors(visited: Visit, names: Iterable[str], groups: Sequence[GroupMembers]) -> None:
    """Raise if a transform runs once for all parameters, but groups have different numbers for it, such as two floats.

    Different tensors are accepted here: each group has a tensor of its own, and `CommonTensors` compares their values.

    Args:
        visited: the visit of the transform.
        names: the dotted names of the numbers that differ between groups, such as "clip_by_global_norm.max_norm".
        groups: the numbers of each group.
    """
    for name in names:
        for group in groups:
            if name in group.numbers and not isinstance(group.numbers[name], Tensor):
                raise different_values(visited, name)


def _with_versions(tx: Transform, visited: Visit, groups: Sequence[GroupMembers]) -> Transform:
    """Return `by_groups` with one version of ``tx`` for each set of numbers that param groups have.

    For example, ``by_groups((scale(-0.1), scale(-0.2)), (("a", "b"), ("c",)))``, if the groups of "a" and "b" have
    the same numbers.
    """
    default_of = dict(zip(visited.numbers.names, numbers_of(tx), strict=True))  # by dotted name
    # 1. Merge groups with equal numbers.
    merged_group_of: dict[tuple[object, ...], GroupMembers] = {}  # by the numbers
    for group in groups:
        # A group of parameters that `tx` does not update may lack the numbers: its defaults have no effect.
        numbers = {name: group.numbers.get(name, default) for name, default in default_of.items()}
        key = tuple([_identity(number) for number in numbers.values()])
        if key not in merged_group_of:
            merged_group_of[key] = GroupMembers([], numbers)
        merged_group_of[key].names.extend(group.names)
    # 2. A version of `tx` for each of them.
    versions: list[Transform] = []
    members: list[tuple[str, ...]] = []
    for merged_group in merged_group_of.values():
        versions.append(with_numbers(tx, iter(merged_group.numbers.values())))
        members.append(tuple(merged_group.names))
    return by_groups(tuple(versions), tuple(members))


def _identity(number: Number) -> object:
    """Return a value that is equal for two numbers if they are equal, or are one tensor object.

    Values of tensors are not compared: the caller may write another value into one of them.
    """
    if isinstance(number, Tensor):
        return (id(number), None)  # a tuple, so that no float equals it
    return number


# ------------------------------------------ numbers that one transform reads for the parameters of all groups


def runs_once(visited: Visit) -> bool:
    """Return True if a transform runs once for all parameters, so that all groups must have the same numbers."""
    return bool(visited.calls) or visited.tx.locality is Locality.TREE or _keeps_a_number(visited)


def _keeps_a_number(visited: Visit) -> bool:
    """Return True if the state of a transform has a float of no single parameter, such as an average of the loss.

    If the transform ran once for each param group, each run would compute another value for it. A count of steps is
    an integer, and the same in all runs.
    """
    state = visited.tx.functions.init(visited.params)  # on meta tensors, so that it takes no memory
    # The names are those of the parameter to which each leaf of the state belongs, or None.
    names = parameters_of(state, visited.params)
    for leaf, name in zip(tree.leaves(state), names, strict=True):
        if name is None and isinstance(leaf, Tensor) and leaf.is_floating_point():
            return True
    return False


def different_values(visited: Visit, name: str) -> ValueError:
    """Return an error for a number that must be equal in all groups, because its transform runs once for all."""
    reason = "wraps other transforms" if visited.calls else "combines all parameters"
    return ValueError(
        f"param_groups: found different values of {name!r}, expected one value, because the transform that reads it "
        f"{reason}: set the same value in all groups"
    )
