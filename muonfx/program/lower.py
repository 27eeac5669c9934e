"""From a transform and the leaves of a tree to a program: the one place that decides how each transform is done."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from muonfx import tree
from muonfx.core import Locality, Transform, chain, transform
from muonfx.core.combine import chain_entries
from muonfx.core.recorded import Recorded, dotted, part_names, parts_of
from muonfx.program.nodes import (
    Around,
    ChainNode,
    Elementwise,
    Member,
    Node,
    OnPieces,
    OwnNumbers,
    Program,
    Stage,
    SumOverLeaves,
    WholeTree,
)
from muonfx.tree import PyTree

__all__ = ["ChildCall", "calls_of", "is_around", "lower", "lower_node", "resolve_within"]


def lower(tx: Transform, params: PyTree) -> Program:
    """Lower a transform for the leaves of a tree: once, from structure, names, shapes and dtypes, never from values.

    Args:
        tx: the transform.
        params: a tree of tensors; meta tensors of global shapes will do.

    >>> import muonfx as mfx
    >>> tx = mfx.chain(mfx.clip_by_global_norm(1.0), mfx.momentum(), mfx.orthogonalize(), mfx.normalize_neurons())
    >>> print(lower(tx, {"w": torch.zeros(4, 4), "v": torch.zeros(4, 2)}))
    node                                              locality  leaves  state                numbers
    chain: chain                                      TREE      2       -                    -
      sum over leaves: clip_by_global_norm            TREE      2       clip_by_global_norm  clip_by_global_norm
      elementwise: momentum                           ELEMENT   2       momentum             momentum
      matrix stage: orthogonalize, normalize_neurons  LEAF      2       orthogonalize        orthogonalize
    """
    like = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params)
    return Program(lower_node(tx, like))


@dataclass(frozen=True)
class _Where:
    """The place of a transform in the whole that is lowered.

    Attributes:
        state: the path of its state.
        numbers: its dotted name among the parts of the whole.
        key: the same without the labels of routes.
        label: by which a route has chosen it.
        counts: whether its numbers count, and not those that a state keeps in their place.
    """

    state: tuple[object, ...] = ()
    numbers: str = ""
    key: str = ""
    label: str | None = None
    counts: bool = True

    def own_numbers(self, tx: Transform) -> OwnNumbers:
        """The numbers of a transform at this place."""
        if not self.counts:
            return OwnNumbers()
        arguments = _own_numbers(tx)
        numbers, key = dotted(self.numbers), dotted(self.key)
        short = {
            short: tuple(numbers + one for one in several) if isinstance(several, tuple) else numbers + several
            for short, several in tx.declaration.short_names.items()
            if set(several if isinstance(several, tuple) else (several,)) <= set(arguments)
        }
        return OwnNumbers(tuple(numbers + one for one in arguments), tuple(key + one for one in arguments), short)

    def of_part(self, tx: Transform, part: str, state: tuple[object, ...], label: str | None = None) -> _Where:
        """The place of a transform that the one at this place calls."""
        return _Where(
            (*self.state, *state),
            dotted(self.numbers) + part,
            dotted(self.key) + part if label is None else self.key,
            label,
            self.counts and not tx.declaration.numbers_in_state,
        )


def lower_node(tx: Transform, like: PyTree, *, numbers: str = "") -> Node:
    """Lower one transform, and those that it calls.

    Args:
        tx: the transform.
        like: meta tensors of global shapes, in the tree that it gets.
        numbers: its dotted name among the parts of the whole.
    """
    return _lower_at(tx, like, _Where(numbers=numbers, key=numbers))


def _lower_at(tx: Transform, like: PyTree, where: _Where) -> Node:
    made = tx.resolve(like)
    entries = chain_entries(made)
    around = entries is None and is_around(made)
    is_stage = entries is None and not around and made.locality in (Locality.MATRIX, Locality.LEAF)
    outer, made = made, resolve_within(made, like) if is_stage else made
    place = made, tuple(tree.names(like)), where.state, where.numbers, like, _same_numbers(tx, made)
    own = where.own_numbers(tx)
    if entries is not None:
        lowered = [
            (name, _lower_at(part, like, where.of_part(tx, part_name, (name,))))
            for (name, part), part_name in zip(entries.items(), part_names(made), strict=True)
        ]
        return ChainNode(*place, tuple(_merged(lowered)), label=where.label, own=own)
    # What a transform runs as a part of itself need not stand apart in its state: it gets its own.
    calls = calls_of(outer, like, replaced=around) if outer.children else []
    inner = tuple(
        _lower_at(call.tx, call.params, where.of_part(tx, call.part, call.state, label))
        for call, label in zip(calls, _labels(outer, calls), strict=True)
    )
    if around:
        return Around(*place, inner, label=where.label, own=own)
    if is_stage:
        member = Elementwise(*place, label=where.label, own=own, within=inner)
        return _stage([Member(made.name, member)])
    if made.locality is Locality.ELEMENT:
        kind: type[Node] = Elementwise
    elif made.works_on_pieces and not made.children:
        kind = SumOverLeaves if _sums(made) else OnPieces
    else:
        kind = WholeTree
    return kind(*place, label=where.label, own=own, within=inner)


def _own_numbers(tx: Transform) -> tuple[str, ...]:
    """The names of a transform's numeric arguments, without those of others that it calls."""
    found: list[str] = []
    for name, part in zip(part_names(tx), tx.parts, strict=True):
        if isinstance(part, Recorded):
            found += [] if isinstance(part, Transform) else [dotted(name) + inner for inner, _ in parts_of(part)]
        else:
            found.append(name)
    return tuple(found)


def _labels(tx: Transform, calls: list[ChildCall]) -> list[str | None]:
    """The labels by which a transform chooses one of those that it calls for each leaf; None for one without."""
    given = [set(tree.names(call.params)) for call in calls]
    chosen = {
        str(key)
        for argument in tx.arguments.values()
        if type(argument) is dict
        for key, value in argument.items()
        if isinstance(value, Transform)
    }
    if sum(map(len, given)) > len(set[str]().union(*given)):  # all of them, and no choice
        chosen = set()
    return [call.part if call.part in chosen else None for call in calls]


def is_around(tx: Transform) -> bool:
    """True if a transform's own work, apart from that of those it calls, is elementwise or a sum over leaves."""
    own = tx.declaration.own_locality
    return bool(tx.children) and (own is Locality.ELEMENT or (own is Locality.TREE and _sums(tx)))


def _sums(tx: Transform) -> bool:
    return "sum_over_leaves" in tx.extras.named


def _same_numbers(tx: Transform, made: Transform) -> bool:
    before, after = tree.leaves(tx), tree.leaves(made)
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


def _merged(lowered: list[tuple[str, Node]]) -> list[tuple[tuple[str, ...], Node]]:
    """The nodes of a chain, neighbouring matrix stages as one: what they need whole goes to its owner once."""
    found: list[tuple[tuple[str, ...], Node]] = []
    for name, node in lowered:
        if not isinstance(node, Stage):
            found.append(((name,), node))
            continue
        own = Member(name, node.members[0].node)
        names, before = found[-1] if found else ((), None)
        if isinstance(before, Stage):
            found[-1] = (*names, name), _stage([*before.members, own])
        else:
            found.append(((name,), _stage([own])))
    return found


def _stage(members: list[Member]) -> Stage:
    first = members[0].node
    return Stage(
        first.tx,
        first.names,
        first.state,
        first.numbers,
        first.like,
        all(member.node.keeps_numbers for member in members),
        tuple(members),
        label=first.label,
    )


class ChildCall(NamedTuple):
    """A transform that another calls."""

    tx: Transform
    part: str
    """Its name among the parts."""
    params: PyTree
    """The leaves that it gets, as meta tensors."""
    state: tuple[object, ...]
    """The path of its state in that of the caller."""


class _Placeholder:
    """Stands in a state where that of a called transform belongs."""

    def __init__(self, place: int) -> None:
        self.place = place


class _Noted(list[tuple[int, PyTree]]):
    """The calls of `init` that recorders have noted; itself and not its elements is an argument."""


@transform(locality=Locality.TREE, transparent=True)
def _recorder(tx: Transform, place: int, noted: list[tuple[int, PyTree]], replaced: bool):
    """Stands for a called transform and notes what its `init` is given."""

    def init(params: PyTree) -> PyTree:
        noted.append((place, params))
        return _Placeholder(place) if replaced else tx.functions.init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None):
        raise AssertionError("a recorder is never run")

    return init, update


def calls_of(tx: Transform, like: PyTree, *, replaced: bool = True) -> list[ChildCall]:
    """Find what a transform gives to each of those that it calls, by running its `init` on placeholders.

    Args:
        tx: the transform, resolved.
        like: meta tensors.
        replaced: whether placeholders stand for the states of those it calls too, and tell where in its own these are.
    """
    state, noted = state_around(tx, like, replaced=replaced)
    given = dict(noted)
    paths = {
        leaf.place: path
        for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True)
        if isinstance(leaf, _Placeholder)
    }
    children = [name for name, part in zip(part_names(tx), tx.parts, strict=True) if isinstance(part, Transform)]
    return [
        ChildCall(child, name, given.get(place, like), paths.get(place, ()))
        for place, (child, name) in enumerate(zip(tx.children, children, strict=True))
    ]


def state_around(tx: Transform, like: PyTree, *, replaced: bool = True) -> tuple[PyTree, list[tuple[int, PyTree]]]:
    """A transform's state with placeholders for those of the transforms it calls; what each of these was given."""
    noted = _Noted()
    numbered = iter(range(len(tx.children)))
    recording = tx.with_children(lambda child: _recorder(child, next(numbered), noted, replaced))
    with warnings.catch_warnings():  # what there is to warn of is said where parameters are
        warnings.simplefilter("ignore")
        return recording.functions.init(like), noted


def fill_placeholders(state: PyTree, function: Callable[[int], PyTree]) -> PyTree:
    """Put a value, by the number of the called transform, in the place of each placeholder."""
    return tree.map(lambda leaf: function(leaf.place) if isinstance(leaf, _Placeholder) else leaf, state)


def resolve_within(tx: Transform, like: PyTree) -> Transform:
    """A transform with all decided that names and shapes decide, also by those that it calls.

    For one that is run as a whole on some of the leaves, where those within would see the others as None.
    """
    made = tx.resolve(like)
    if not made.children:
        return made
    entries = chain_entries(made)
    if entries is not None:
        return named_chain([(name, resolve_within(part, like)) for name, part in entries.items()])
    calls = iter(calls_of(made, like))
    return made.with_children(lambda child: resolve_within(child, next(calls).params))


def named_chain(entries: Iterable[tuple[str, Transform]]) -> Transform:
    """A chain of transforms that keep their names, which has been looked at where it was first made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return chain(*entries)
