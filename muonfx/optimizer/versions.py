"""Hyperparameters by group: a transform whose numbers differ between groups runs once for each set of numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Donation, Locality, Transform, chain, transform
from muonfx.core.combine import chain_entries, widest
from muonfx.core.contract import NOTHING
from muonfx.core.hyperparams import with_hyperparams
from muonfx.core.recorded import with_numbers
from muonfx.optimizer.values import Number, equal
from muonfx.program.buckets import parameters_of
from muonfx.program.nodes import Node, Program
from muonfx.tree import PyTree

__all__ = ["by_groups", "for_groups"]


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
    """Run one version of a transform, with its own numbers, on the leaves of each group; they share one state."""
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
        before, treedef = tree.flatten(state)
        leaves = list(before)
        for version, names in zip(versions, chosen, strict=True):
            mine = {name: update if name in names else None for name, update in updates.items()}
            out, new = version.run(mine, state, params, donate=donate, **extras)
            # State of no parameter, such as a count, is equal in all versions.
            leaves = [
                now if now is not was else kept for now, was, kept in zip(tree.leaves(new), before, leaves, strict=True)
            ]
            results.update({name: out[name] for name in mine if name in names})
        return results, tree.unflatten(treedef, leaves)

    return init, update


def for_groups(
    tx: Transform, program: Program, values: Sequence[Mapping[str, Number]], members: Sequence[Sequence[str]]
) -> Transform:
    """Return the transform with the numbers of all groups, in versions only where groups disagree."""
    agreed: dict[str, Number] = {}
    for group in values:
        agreed = {**group, **agreed}
    conflicts = {name for group in values for name, value in group.items() if not equal(agreed[name], value)}
    tx = with_hyperparams(tx, agreed)
    return _in_versions(tx, next(program.transforms()), values, members, conflicts) if conflicts else tx


def _keeps_a_number(node: Node) -> bool:
    """Return True if a state has a float that belongs to no parameter: versions would compute different values."""
    state = node.tx.functions.init(node.like)
    pairs = zip(tree.leaves(state), parameters_of(state, node.like), strict=True)
    return any(isinstance(leaf, Tensor) and leaf.is_floating_point() and name is None for leaf, name in pairs)


def _in_versions(
    tx: Transform,
    node: Node,
    values: Sequence[Mapping[str, Number]],
    members: Sequence[Sequence[str]],
    conflicts: Set[str],
) -> Transform:
    own = next((name for name in node.own.names if name in conflicts), None)
    if own is not None:
        if node.called or tx.locality is Locality.TREE or _keeps_a_number(node):
            kind = "around others" if node.called else "that reads all parameters together"
            raise ValueError(
                f"the groups disagree about {own!r} of a transform {kind}: give it one value in all groups"
            )
        agreed = dict(zip(node.own.names, tree.leaves(tx), strict=True))
        runs: dict[tuple[object, ...], tuple[list[Number], list[str]]] = {}
        for group, names in zip(values, members, strict=True):
            own_numbers = [group.get(name, number) for name, number in agreed.items()]
            key = tuple((id(number), None) if isinstance(number, Tensor) else number for number in own_numbers)
            runs.setdefault(key, (own_numbers, []))[1].extend(names)
        made = tuple(with_numbers(tx, iter(numbers)) for numbers, _ in runs.values())
        return by_groups(made, tuple(tuple(names) for _, names in runs.values()))
    called = iter(node.called)
    parts = [
        _in_versions(part, next(called), values, members, conflicts) if isinstance(part, Transform) else part
        for part in tx.parts
    ]
    if all(new is old for new, old in zip(parts, tx.parts, strict=True)):
        return tx
    if (entries := chain_entries(tx)) is not None:
        return chain(*zip(entries, parts, strict=True))
    return Transform._from(dataclasses.replace(tx.structure, derived={}), parts)
