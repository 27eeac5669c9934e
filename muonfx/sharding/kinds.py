"""How each transform of a chain is done on pieces: the one place where that is decided.

*pieces*: as it is, on the local tensors; where it sums over leaves, the sum goes over all ranks. *run*: matrices are
made whole at an owner. *inside*: it calls others, which are replaced by sharded ones, and its own work is of the first
sort. *everything*: nothing is known about it, so every rank makes the whole tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from muonfx import tree
from muonfx.core import Locality, Transform, chain_entries
from muonfx.partition import masked, partition
from muonfx.recorded import Recorded
from muonfx.tree import PyTree

__all__ = ["Kind", "groups_of", "kind_of", "planned_as", "resolved_within", "with_compute_dtype", "with_parts"]


class Kind(Enum):
    """How a transform is done on pieces."""

    CHAIN = "chain"
    PIECES = "pieces"
    INSIDE = "inside"
    RUN = "run"
    EVERYTHING = "everything"


def kind_of(tx: Transform) -> Kind:
    """How a transform, resolved for its parameters, is done.

    >>> import muonfx as mfx
    >>> [kind_of(tx).value for tx in (mfx.momentum(), mfx.orthogonalize(), mfx.skip_nonfinite(mfx.scale(2.0)))]
    ['pieces', 'run', 'inside']
    """
    if chain_entries(tx) is not None:
        return Kind.CHAIN
    sums = "sum_over_leaves" in tx.extras.named
    calls = any(isinstance(part, Transform) for part in tx.parts)
    own = tx.declaration.own_locality
    if calls and (own is Locality.ELEMENT or (own is Locality.TREE and sums)):
        return Kind.INSIDE
    if tx.locality is Locality.ELEMENT or (tx.locality is Locality.TREE and sums and not calls):
        return Kind.PIECES
    return Kind.RUN if tx.locality in (Locality.MATRIX, Locality.LEAF) else Kind.EVERYTHING


def planned_as(tx: Transform) -> Transform:
    """What a transform is planned as: one that is the same for all leaves but for numbers, as any one of it.

    Its factory says so by an attribute ``many_of_one``; the first of its parts is one.
    """
    return tx.children[0] if tx.declaration.many_of_one else tx


def groups_of(
    entries: dict[str, Transform], kind: Callable[[Transform], Kind] = kind_of
) -> list[list[tuple[str, Transform]]]:
    """Cut the transforms of a chain, resolved, into runs that go to an owner together, and single others.

    >>> import muonfx as mfx
    >>> entries = {"m": mfx.momentum(), "o": mfx.orthogonalize(), "n": mfx.normalize_neurons(), "s": mfx.scale(2.0)}
    >>> [[name for name, _ in group] for group in groups_of(entries)]
    [['m'], ['o', 'n'], ['s']]
    """
    groups: list[list[tuple[str, Transform]]] = []
    for name, tx in entries.items():
        if groups and kind(tx) is Kind.RUN and kind(groups[-1][-1][1]) is Kind.RUN:
            groups[-1].append((name, tx))
        else:
            groups.append([(name, tx)])
    return groups


def resolved_within(tx: Transform, params: PyTree) -> Transform:
    """A transform with all decided that names and shapes decide, also by those that it calls.

    For one that is done as a whole on some of the leaves, where those within would see the others as None.
    """
    tx = tx.resolve(params)
    if not any(isinstance(part, Transform) for part in tx.parts):
        return tx
    named = dict(zip(tree.names(params), tree.leaves(params), strict=True))
    if tx.factory is partition:
        labels, parts = tx.arguments["labels"], tx.arguments["transforms"]
        return tx.replace(
            transforms={
                label: resolved_within(part, {name: leaf for name, leaf in named.items() if labels[name] == label})
                for label, part in parts.items()
            }
        )
    if tx.factory is masked:
        mask = tx.arguments["mask"]
        inner = {name: leaf for name, leaf in named.items() if mask[name]}
        return tx.replace(inner=resolved_within(tx.arguments["inner"], inner))
    return with_parts(tx, lambda part: resolved_within(part, params))


def with_compute_dtype(tx: Transform, dtype: torch.dtype) -> Transform:
    """A transform in which "auto" is decided, and in all that it calls: float64 stays, all else is computed in a dtype.

    >>> import muonfx as mfx
    >>> decided = with_compute_dtype(mfx.chain(mfx.momentum(), mfx.orthogonalize()), torch.float32)
    >>> decided.arguments["transforms"][1].arguments["dtype"]
    Decided(dtype=torch.float32)
    """
    parts = [with_compute_dtype(part, dtype) if isinstance(part, Transform) else part for part in tx.parts]
    if any(new is not old for new, old in zip(parts, tx.parts, strict=True)):
        tx = Transform._from(dataclasses.replace(tx.structure, derived={}), parts)
    declared = tx.declaration.with_compute_dtype
    if declared is None:
        return tx
    # By structure, since a new learning rate at every step makes a new value of the same structure.
    known = tx.structure.derived
    key = f"with_compute_dtype {dtype}"
    if key not in known:
        known[key] = declared(tx, dtype).structure
    return tx if known[key] is tx.structure else Transform._from(known[key], tx.parts)


def with_parts(tx: Transform, function: Callable[[Transform], Transform]) -> Any:
    """A transform like another, with the transforms that it calls replaced."""
    parts = [function(part) if isinstance(part, Transform) else part for part in tx.parts]
    return Recorded._from(dataclasses.replace(tx.structure, derived={}), parts)
