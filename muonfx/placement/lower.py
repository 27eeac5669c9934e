"""Lower a transform to a program: decide, once for a set of parameters, how each of its transforms is executed."""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from muonfx import tree
from muonfx.core import Locality, Transform, chain
from muonfx.core.combine import chain_entries
from muonfx.core.contract import Declaration, EmptyState
from muonfx.core.definition import make_factory
from muonfx.core.recorded import Recorded, dotted, part_names, parts_of
from muonfx.placement.nodes import Around, ChainNode, Member, Node, OwnNumbers, Program, Stage, WholeTree
from muonfx.placement.placement import Run, meta_like
from muonfx.tree import PyTree, Structure

__all__ = [
    "OwnState",
    "Span",
    "as_one",
    "lower",
    "lower_node",
    "resolve_within",
    "resolved",
    "spans_of",
    "state_around",
]


def lower(tx: Transform, params: PyTree) -> Program:
    """Plan the execution of a transform: how each transform in it runs, and which parameters it updates.

    Args:
        tx: a transform.
        params: the parameters in full, not sharded. Values are not read, so meta tensors suffice.

    Returns:
        A `Program`, which prints as a table. Its column "numbers" has the prefix of the names in `muonfx.hyperparams`,
        and its column "state" the path of the state.

    >>> import muonfx as mfx
    >>> tx = mfx.chain(mfx.clip_by_global_norm(1.0), mfx.momentum(), mfx.orthogonalize(), mfx.normalize_neurons())
    >>> print(lower(tx, {"w": torch.zeros(4, 4), "v": torch.zeros(4, 2)}))
    node                                              locality  leaves  state                numbers
    chain: chain                                      TREE      2       -                    -
      sum over leaves: clip_by_global_norm            TREE      2       clip_by_global_norm  clip_by_global_norm
      elementwise: momentum                           ELEMENT   2       momentum             momentum
      matrix stage: orthogonalize, normalize_neurons  LEAF      2       orthogonalize        orthogonalize
    """
    return Program(lower_node(tx, meta_like(params)))


@dataclass(frozen=True)
class _Where:
    """The position of a transform in an outer one: the path of its state, and the prefix of its hyperparameters."""

    state: tuple[object, ...] = ()  # path of its state
    numbers: str = ""  # dotted name, such as "muon.momentum"
    key: str = ""  # `numbers` without labels, such as "momentum"
    label: str | None = None  # label by which `partition` selects it

    def own_numbers(self, tx: Transform) -> OwnNumbers:
        """Return the names of the transform's own hyperparameters, such as "muon.momentum"."""
        arguments = _own_numbers(tx)
        names = {one: dotted(self.numbers) + one for one in arguments}
        short: dict[str, str | tuple[str, ...]] = {}
        for key, own in tx.declaration.short_names.items():
            if isinstance(own, str) and own in names:
                short[key] = names[own]
            elif isinstance(own, tuple) and names.keys() >= set(own):
                short[key] = tuple([names[one] for one in own])
        above = dotted(self.key)
        return OwnNumbers(tuple(names.values()), tuple([above + one for one in arguments]), short)

    def of_part(self, tx: Transform, part: str, state: tuple[object, ...], label: str | None = None) -> _Where:
        """Return the position of an inner transform. `part` is the argument, and `state` the path of its state."""
        return _Where(
            (*self.state, *state),
            dotted(self.numbers) + part,
            dotted(self.key) + part if label is None else self.key,
            label,
        )


def lower_node(tx: Transform, like: PyTree) -> Node:
    """Return the program of a transform, as its root node. `like` has a meta tensor for each parameter."""
    return _lower_at(tx, like, _Where())


def _lower_at(tx: Transform, like: PyTree, where: _Where) -> Node:
    made = tx.resolve(like)
    entries = chain_entries(made)
    around = entries is None and _is_around(made)
    # Only the init of an Around node can store placeholders; other transforms may compute with their children's states.
    inner = _lower_children(made, like, where, replaced=around) if entries is None and made.children else ()
    is_stage = entries is None and not around and made.locality in (Locality.MATRIX, Locality.LEAF)
    if is_stage:
        made = _with_resolved(made, inner)
    place = made, tuple(tree.names(like)), where.state, where.numbers, like, _same_numbers(tx, made)
    place = *place, where.label, where.own_numbers(tx)
    if entries is not None:
        lowered = [
            (name, _lower_at(part, like, where.of_part(tx, part_name, (name,))))
            for (name, part), part_name in zip(entries.items(), part_names(made), strict=True)
        ]
        merged = tuple(_merged(lowered))
        return ChainNode(*place, merged, kind="chain", children=tuple(node for _, node in merged))
    if around:
        is_route = any(child.names != place[1] for child in inner)
        return Around(*place, kind="route" if is_route else "around", children=inner)
    if is_stage:
        return _stage([Member(made.name, Node(*place, within=inner))])
    if made.locality is Locality.ELEMENT:
        return Node(*place, within=inner)
    if made.works_on_pieces and not made.children:
        return Node(*place, kind="sum over leaves" if _sums(made) else "on pieces")
    return WholeTree(*place, kind="whole tree", within=inner)


def _own_numbers(tx: Transform) -> tuple[str, ...]:
    found: list[str] = []
    for name, part in zip(part_names(tx), tx.parts, strict=True):
        if isinstance(part, Recorded):
            found += [] if isinstance(part, Transform) else [inner for inner, _ in parts_of(part, dotted(name))]
        else:
            found.append(name)
    return tuple(found)


def _lower_children(tx: Transform, like: PyTree, where: _Where, *, replaced: bool) -> tuple[Node, ...]:
    """Return one node for each transform that `tx` calls, for the parameters that `tx` passes to it."""
    state, noted = state_around(tx, like, replaced=replaced)
    # Without placeholders (replaced=False) the paths of the children's states are unknown.
    named = zip(tree.leaves(state), tree.paths(state), strict=True)
    paths = {leaf.place: path for leaf, path in named if isinstance(leaf, Placeholder)}
    names = [name for name, part in zip(part_names(tx), tx.parts, strict=True) if isinstance(part, Transform)]
    given = [dict(noted).get(place, like) for place in range(len(names))]
    labels = _labels(tx, names, given)
    return tuple(
        _lower_at(child, given[place], where.of_part(tx, names[place], paths.get(place, ()), labels[place]))
        for place, child in enumerate(tx.children)
    )


def _labels(tx: Transform, names: list[str], given: list[PyTree]) -> list[str | None]:
    """Return a list with one label, such as "muon", for each transform that `tx` calls; None: it has no label."""
    dicts = [argument for argument in tx.arguments.values() if type(argument) is dict]
    labels = {str(key) for one in dicts for key, value in one.items() if isinstance(value, Transform)}
    leaves = [tree.names(params) for params in given]
    if sum(map(len, leaves)) > len(set[str]().union(*leaves)):  # some leaf is passed to several: not a partition
        labels = set()
    return [name if name in labels else None for name in names]


def _is_around(tx: Transform) -> bool:
    """Return True if a transform calls other transforms, and its own work is elementwise or sums over leaves."""
    own = tx.declaration.combinator.own_locality
    return bool(tx.children) and (own is Locality.ELEMENT or (own is Locality.TREE and _sums(tx)))


def _sums(tx: Transform) -> bool:
    return "sum_over_leaves" in tx.extras.named


def _same_numbers(tx: Transform, made: Transform) -> bool:
    return made is tx or list(map(id, tree.leaves(tx))) == list(map(id, tree.leaves(made)))


def _merged(lowered: list[tuple[str, Node]]) -> list[tuple[tuple[str, ...], Node]]:
    """Join neighbouring nodes of a chain that need whole matrices, so that each matrix is sent to a rank only once."""
    found: list[tuple[tuple[str, ...], Node]] = []
    for is_stage, group in itertools.groupby(lowered, lambda pair: isinstance(pair[1], Stage)):
        pairs = list(group)
        if is_stage:
            members = [Member(name, node.members[0].node) for name, node in pairs if isinstance(node, Stage)]
            found.append((tuple(own.name for own in members), _stage(members)))
        else:
            found += [((name,), node) for name, node in pairs]
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
        first.label,
        members=tuple(members),
        kind="matrix stage",
    )


@dataclass(frozen=True)
class Placeholder:
    """A leaf in a wrapper's state in place of the state of its inner transform number `place`."""

    place: int


stand_in = functools.partial(make_factory, Transform, declaration=Declaration(), transparent=True)
"""A decorator for transforms that replace a transform within a wrapper, and keep its name and its numbers."""


@stand_in
def _recorder(tx: Transform, place: int, record: Callable[[tuple[int, PyTree]], None], replaced: bool):
    def init(params: PyTree) -> PyTree:
        record((place, params))
        return Placeholder(place) if replaced else tx.functions.init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None):
        raise AssertionError("a recorder is never run")

    return init, update


def state_around(tx: Transform, like: PyTree, *, replaced: bool = True) -> tuple[PyTree, list[tuple[int, PyTree]]]:
    """Call the ``init`` of a wrapper (a transform that calls others). Return its state and the calls that it made.

    A call is a tuple of the inner transform's number and the parameters that it received. By default, the state has a
    `Placeholder` where the state of an inner transform would be.
    """
    noted: list[tuple[int, PyTree]] = []
    numbered = iter(range(len(tx.children)))
    recording = tx.with_children(lambda child: _recorder(child, next(numbered), noted.append, replaced))
    with warnings.catch_warnings():  # init on the real parameters gives the warnings
        warnings.simplefilter("ignore")
        return recording.functions.init(like), noted


class OwnState(NamedTuple):
    """Separates the state of a wrapper (a transform that calls others) from the states of its inner transforms."""

    structure: Structure
    is_called: list[bool]
    """For each leaf of the structure, True if it represents the state of a called transform."""

    @classmethod
    def of(cls, tx: Transform, like: PyTree) -> OwnState:
        """Find out which parts of a wrapper's state belong to inner transforms. `like` has a meta tensor per leaf."""
        leaves, treedef = tree.flatten(state_around(tx, like)[0])
        return cls(treedef, [isinstance(leaf, Placeholder) for leaf in leaves])

    def split(self, state: PyTree) -> tuple[PyTree, list[PyTree]]:
        """Split a wrapper's state. Return its own part, and a list with the state of each inner transform."""
        parts = list(zip(tree.subtrees(self.structure, state), self.is_called, strict=True))
        own = tree.unflatten(self.structure, [EmptyState() if called else part for part, called in parts])
        return own, [part for part, called in parts if called]

    def merge(self, own: PyTree, called: Iterable[PyTree]) -> PyTree:
        """Build a wrapper's state from its own part and the states of its inner transforms; it undoes `split`."""
        inner = iter(called)
        parts = zip(tree.subtrees(self.structure, own), self.is_called, strict=True)
        return tree.unflatten(self.structure, [next(inner) if called else part for part, called in parts])


def resolved(node: Node) -> Transform:
    """Return the transform of a node in a form that can update some leaves at a time, with None for all others.

    All choices that depend on the names or shapes of the whole tree are already made in it.
    """
    return _with_resolved(node.tx, node.called)


def resolve_within(tx: Transform, like: PyTree) -> Transform:
    """Make each choice of a transform that depends on parameter names and shapes. Return the fixed transform."""
    return resolved(lower_node(tx, like))


def _with_resolved(tx: Transform, called: Iterable[Node]) -> Transform:
    found = [resolved(node) for node in called]
    if all(map(operator.is_, found, tx.children)):
        return tx
    if (entries := chain_entries(tx)) is not None:
        return _named_chain(zip(entries, found, strict=True))
    inner = iter(found)
    return tx.with_children(lambda _: next(inner))


def as_one(run: Run) -> Transform:
    """Join neighbouring transforms of a chain. Return a chain of them; a single transform is returned as it is."""
    return run[0][1] if len(run) == 1 else _named_chain(run)


def _named_chain(entries: Iterable[tuple[str, Transform]]) -> Transform:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return chain(*entries)


# ---------------------------------------------------------------------------------------------------- spans of a chain


class Span(NamedTuple):
    """Neighbouring transforms of a chain that run together, so that each bucket of state is loaded only once."""

    names: tuple[str, ...]
    at: int | slice
    """The index of the only member in the chain, or the slice of several members."""
    node: Node


def spans_of(node: ChainNode, is_unit: Callable[[Node], bool]) -> list[Span]:
    """Group the members of a chain, in order: neighbours that can run bucket by bucket form one `Span`.

    ``is_unit(node)`` returns True if a node can run on some of the leaves at a time.
    """
    spans: list[Span] = []
    first = 0
    for names, child in _entries(node, is_unit):
        before = spans[-1] if spans else None
        end = first + len(names)
        joins = is_unit(child) and child.keeps_numbers
        if before is not None and joins and is_unit(before.node) and before.node.keeps_numbers:
            begin = first - len(before.names)
            spans[-1] = Span((*before.names, *names), slice(begin, end), _joined(before, names, child))
        else:
            spans.append(Span(names, first if len(names) == 1 else slice(first, end), child))
        first = end
    return spans


def _entries(node: ChainNode, is_unit: Callable[[Node], bool]) -> Iterator[tuple[tuple[str, ...], Node]]:
    for names, child in node.entries:
        if isinstance(child, Stage) and is_unit(child):
            yield from (((member.name,), member.node) for member in child.members)
        else:
            yield names, child


def _joined(before: Span, names: tuple[str, ...], child: Node) -> ChainNode:
    first = before.node
    known = first.entries if isinstance(before.at, slice) and isinstance(first, ChainNode) else ((before.names, first),)
    entries = (*known, (names, child))
    children = tuple(node for _, node in entries)
    tx = _named_chain((own[0], node.tx) for own, node in entries)
    place = tx, first.names, first.state, first.numbers, first.like, first.keeps_numbers
    return ChainNode(*place, entries=entries, children=children)
