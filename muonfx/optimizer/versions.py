"""One chain in which groups have numbers of their own: the transforms that they disagree about, in several versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, Transform, chain, transform
from muonfx.core.combine import chain_entries, widest
from muonfx.core.contract import NOTHING
from muonfx.hyperparams import with_hyperparams
from muonfx.optimizer.values import agreement, distinct
from muonfx.recorded import dotted, part_names
from muonfx.tree import PyTree

__all__ = ["by_groups", "for_groups"]


def _resolve(tx: Any, params: PyTree) -> Transform:
    return tx.replace(versions=tuple(version.resolve(params) for version in tx.arguments["versions"]))


def _on_stacks(tx: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Transform, dict[str, tuple[int, int]]]:
    done = [version.on_stacks(shapes) for version in tx.arguments["versions"]]
    return tx.replace(versions=tuple(version for version, _ in done)), done[0][1]


@transform(
    locality=lambda versions, members: widest(versions),
    reads_params=lambda versions, members: any(version.reads_params for version in versions),
    resolve=_resolve,
    on_stacks=_on_stacks,
    many_of_one=True,
)
def by_groups(versions: tuple[Transform, ...], members: tuple[tuple[str, ...], ...]):
    """A transform that is another for each of some groups but for its numbers; the state is that of one.

    Args:
        versions: the same transform with different numbers.
        members: the names of the leaves of each.
    """
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
            # What belongs to no leaf, such as a count, all versions make the same of the same.
            leaves = [
                now if now is not was else kept for now, was, kept in zip(tree.leaves(new), before, leaves, strict=True)
            ]
            results.update({name: out[name] for name in mine if name in names})
        return results, tree.unflatten(treedef, leaves)

    return init, update


def for_groups(
    tx: Transform, values: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]], prefix: str = ""
) -> Transform:
    """The transform with the numbers of all groups: in versions there, and only there, where groups disagree.

    Args:
        tx: the transform.
        values: of each group, by dotted name.
        members: the names of the parameters of each group.
        prefix: of the transform's own name, for an error.

    Raises:
        ValueError: groups disagree about a number of a transform that looks at the whole tree, or that calls others.
    """
    agreed, conflicts = agreement(values)
    if not conflicts:
        return with_hyperparams(tx, agreed)
    names = part_names(tx)
    inner = {dotted(name) for name, part in zip(names, tx.parts, strict=True) if isinstance(part, Transform)}
    own = [name for name in conflicts if not any(name.startswith(begin) for begin in inner)]
    if own and (inner or tx.locality is Locality.TREE):
        kind = "around others" if inner else "that looks at all parameters together"
        raise ValueError(
            f"the groups disagree about {prefix + own[0]!r}, which belongs to a transform {kind}; give it one value in "
            "all groups"
        )
    if own:
        runs = distinct([{**agreed, **mine} for mine in values], members)
        made = tuple(with_hyperparams(tx, run) for run, _ in runs)
        return by_groups(made, tuple(tuple(names) for _, names in runs))

    def part_of(name: str, part: Transform) -> Transform:
        begin = dotted(name)
        under = [
            {key.removeprefix(begin): value for key, value in group.items() if key.startswith(begin)}
            for group in values
        ]
        return for_groups(part, under, members, prefix + begin)

    if (entries := chain_entries(tx)) is not None:
        return chain(*[(name, part_of(name, part)) for name, part in entries.items()])
    rest = with_hyperparams(tx, agreed)
    parts = [
        part_of(name, part) if isinstance(part, Transform) else number
        for name, part, number in zip(names, tx.parts, rest.parts, strict=True)
    ]
    return Transform._from(dataclasses.replace(tx.structure, derived={}), parts)
