"""Steps route by route on a CPU: what is elementwise by pieces that fit its cache, in front of a matrix and behind it.

A *route* is some leaves with the transforms that they meet, one after another, none of which looks at other leaves. Its
leaves go through it bucket by bucket. Transforms of locality ELEMENT give the same for a piece of a leaf as for the
whole, so neighbouring ones are run together on one piece after another: a piece of the gradient, of the momentum and of
the parameter is read from memory once and not by each of them. What comes before a matrix transform that rounds its
input is rounded as it leaves the cache, and what follows it is widened there. Values are those of the transforms on
whole leaves, bit for bit.

This is for steps that apply their updates and own their state. Elsewhere a pass is one launch for all leaves, and
`Executor` runs transforms on whole leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, Transform
from muonfx.core.combine import is_new
from muonfx.polar import Workspace
from muonfx.program.buckets import can_be_shared_out, cut_into_buckets, nbytes_of, parameters_of
from muonfx.program.nodes import Around, ChainNode, Node
from muonfx.program.placement import Arguments
from muonfx.tracing import functorch_is_active, is_traced
from muonfx.tree import PyTree, Structure

__all__ = ["PIECE_BYTES", "Routes", "at_path", "can_be_routed", "put_at_path", "routes_of"]

PIECE_BYTES = 1 << 22
"""The bytes of a leaf that elementwise transforms take at a time: with state and parameter, about a CPU's cache."""

SMALLEST_PIECE = 1 << 16
"""The bytes of a piece where buckets are smaller than that: below, calls cost more than passes."""

_PLAIN = frozenset({Tensor, torch.nn.Parameter})

LARGE = 1 << 16
"""Elements from which a leaf is rounded in kept memory: smaller ones are copied into a batch anyway."""

Leaves = dict[str, Any]
"""Tensors by name; None is absent."""


class Step(NamedTuple):
    """One transform of a route."""

    place: tuple[int, ...]
    """The numbers of the children that lead to it."""
    state: tuple[Any, ...]
    """The path of its state in that of the whole."""
    is_elementwise: bool


class Route(NamedTuple):
    """Leaves, and the transforms that they meet."""

    names: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def stretches(self) -> list[tuple[Step, ...]]:
        """The transforms, neighbouring elementwise ones together."""
        found: list[tuple[Step, ...]] = []
        for step in self.steps:
            if found and step.is_elementwise and found[-1][-1].is_elementwise:
                found[-1] = (*found[-1], step)
            else:
                found.append((step,))
        return found


def routes_of(node: Node, tx: Transform) -> list[Route]:
    """The routes through a transform that looks at one leaf at a time.

    Args:
        node: that it is carried out as.
        tx: the transform, resolved.

    >>> import muonfx as mfx
    >>> params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    >>> tx = mfx.partition({"a": mfx.muon(), "b": mfx.adamw()}, {"w": "a", "b": "b"})
    >>> [(route.names, len(route.steps)) for route in routes_of(mfx.program.lower(tx, params).root, tx)]
    [(('w',), 5), (('b',), 3)]
    """
    found = _through([Route(node.names, ())], node, tx, (), ())
    met = {step for route in found if route.names for step in route.steps}
    # A transform without leaves counts its steps all the same.
    return [route for route in found if route.names or not met.issuperset(route.steps)]


def _through(
    routes: list[Route], node: Node, tx: Transform, place: tuple[int, ...], state: tuple[Any, ...]
) -> list[Route]:
    """Routes, and what a transform does behind them."""
    if isinstance(node, ChainNode):
        parts = iter(enumerate(tx.children))
        for names, child in node.entries:
            for name in names:
                number, part = next(parts)
                routes = _through(routes, child, part, (*place, number), (*state, name))
        return routes
    if isinstance(node, Around) and tx.declaration.rest is not None:
        found: list[Route] = []
        for number, (child, part) in enumerate(zip(node.inner, tx.children, strict=True)):
            path = (*state, *child.state[len(node.state) :])
            found += _through(_only(routes, set(child.names)), child, part, (*place, number), path)
        taken = {name for child in node.inner for name in child.names}
        rest = set(node.names) - taken if tx.declaration.rest == "unchanged" else set[str]()
        return found + _only(routes, rest)
    step = Step(place, state, tx.locality is Locality.ELEMENT)
    return [Route(route.names, (*route.steps, step)) for route in routes]


def _only(routes: Sequence[Route], names: Set[str]) -> list[Route]:
    """The routes of some of their leaves."""
    return [Route(tuple(name for name in route.names if name in names), route.steps) for route in routes]


class _Share(NamedTuple):
    """Of a transform's state, as much as belongs to some leaves."""

    treedef: Structure
    places: list[int]
    """Among the leaves of the whole state."""
    parameters: list[str | None]
    """The leaf that each belongs to; None for one that belongs to all, such as a count."""

    @property
    def has_leaves(self) -> bool:
        """True if anything in it belongs to a leaf, and not only counts."""
        return any(own is not None for own in self.parameters)


class _Part(NamedTuple):
    """Some leaves, or a piece of one."""

    names: tuple[str, ...]
    piece: slice | None = None

    def of(self, leaf: Tensor) -> Tensor:
        """The same part of a tensor, which is one of the leaf's own shape where this is a piece."""
        return leaf if self.piece is None else leaf.detach().view(-1)[self.piece]


class _Bucket(NamedTuple):
    """Leaves that go through their route together."""

    names: tuple[str, ...]
    lists: list[tuple[str, ...]]
    """The same, as many at a time as elementwise transforms take."""


class _State:
    """A transform's state during a step."""

    def __init__(self, state: PyTree) -> None:
        self.old, self._treedef = tree.flatten(state)
        self.new = list(self.old)

    def tree(self) -> PyTree:
        """The next state."""
        return tree.unflatten(self._treedef, self.new)


class Routes:
    """Carries out one transform by routes.

    Args:
        node: that the transform is carried out as.
        tx: the transform, resolved; `step` takes the same with other numbers.
        call: with parameters and state of the same structure as those of all steps.
        bucket_bytes: of parameters, for what looks at whole leaves; a larger leaf goes alone.
    """

    def __init__(self, node: Node, tx: Transform, call: Arguments, bucket_bytes: int) -> None:
        self.sizes: dict[str, int] = {name: nbytes_of(leaf) for name, leaf in call.params.items()}
        self.piece_bytes = min(PIECE_BYTES, max(bucket_bytes, SMALLEST_PIECE))
        self._routes = [(route, self._buckets_of(route, call, bucket_bytes)) for route in routes_of(node, tx)]
        self._steps: dict[Step, tuple[str, ...]] = {}
        for route, _ in self._routes:
            for step in route.steps:
                self._steps[step] = self._steps.get(step, ()) + route.names
        self.shares: dict[tuple[Step, tuple[str, ...]], _Share] = {}
        self.is_possible = all(self._share_out(route, buckets, call) for route, buckets in self._routes)
        """False where it cannot be told which part of a state belongs to which leaf."""
        self.rounded, self.widened = Workspace(), Workspace()

    def _buckets_of(self, route: Route, call: Arguments, bucket_bytes: int) -> list[_Bucket]:
        names, limit = list(route.names), self.piece_bytes
        if not all(step.is_elementwise for step in route.steps):
            # Matrices of one shape make one batch; where a bucket ends, so does a batch.
            names.sort(key=lambda name: tuple(call.params[name].shape))
            limit = bucket_bytes
        buckets = cut_into_buckets({name: self.sizes[name] for name in names}, limit)
        wide = {name: call.params[name].numel() * max(4, call.params[name].element_size()) for name in names}
        return [
            _Bucket(tuple(some), list(map(tuple, cut_into_buckets({n: wide[n] for n in some}, self.piece_bytes))))
            for some in buckets
        ]

    def _share_out(self, route: Route, buckets: list[_Bucket], call: Arguments) -> bool:
        """Find the shares of all transforms of a route; False where one has a state that cannot be shared out."""
        for step in route.steps:
            state = at_path(call.state, step.state)
            leaves, treedef = tree.flatten(state)
            parameters = parameters_of(state, dict.fromkeys(self._steps[step]))
            if not can_be_shared_out(leaves, parameters):
                return False
            numbered = tree.unflatten(treedef, range(len(leaves)))
            for bucket in buckets:
                for names in bucket.lists if step.is_elementwise else [bucket.names]:
                    try:
                        places, shared = tree.flatten(_of_leaves(numbered, set(names), set(self._steps[step])))
                    except ValueError:
                        return False
                    own = [parameters[place] for place in places]
                    wanted = [name is None or name in names for name in parameters]
                    if sorted(places) != [place for place, is_wanted in enumerate(wanted) if is_wanted]:
                        return False
                    self.shares[step, names] = _Share(shared, places, own)
        return True

    def step(self, tx: Transform, call: Arguments) -> PyTree:
        """Update, apply bucket by bucket, and return the next state: the old one, written over.

        Args:
            tx: the transform, with the numbers of now.
            call: its updates are a flat dict, its state is donated, and something applies the updates.
        """
        states = {step: _State(at_path(call.state, step.state)) for step in self._steps}
        parts = {step: _part_at(tx, step.place) for step in self._steps}
        for route, buckets in self._routes:
            for bucket in buckets:
                self.rounded.clear()
                _Passage(self, bucket, call, parts, states).go(route.stretches)
        after = call.state
        for step, state in states.items():
            after = put_at_path(after, step.state, state.tree())
        return after


def _of_leaves(state: PyTree, names: Set[str], everyone: Set[str]) -> PyTree:
    """A state as it is for some of its leaves: with fewer entries in its dicts of leaves.

    Raises:
        ValueError: a list or a tuple may have one entry for each leaf.

    >>> _of_leaves({"count": 0, "trace": {"w": 1, "b": 2}}, {"w"}, {"w", "b"})
    {'count': 0, 'trace': {'w': 1}}
    """
    if isinstance(state, dict):
        if state and set(state) <= everyone:
            return {name: own for name, own in state.items() if name in names}
        return {key: _of_leaves(own, names, everyone) for key, own in state.items()}
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_of_leaves(own, names, everyone) for own in state))
    if state is None or isinstance(state, int):
        return state
    raise ValueError(f"found a {type(state).__name__}")


class _Passage:
    """One bucket on its way."""

    def __init__(
        self,
        routes: Routes,
        bucket: _Bucket,
        call: Arguments,
        parts: Mapping[Step, Transform],
        states: Mapping[Step, _State],
    ) -> None:
        self._routes, self._bucket, self._call, self._parts, self._states = routes, bucket, call, parts, states
        self._rounded: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """The dtype to which a leaf was rounded for a transform, and its own. Such values lie in kept memory."""

    def go(self, stretches: Sequence[tuple[Step, ...]]) -> None:
        """Run all transforms, and apply what comes out."""
        values: Leaves = {name: self._call.updates[name] for name in self._bucket.names}
        may_write = self._call.donate.updates
        for stretch, following in itertools.zip_longest(stretches, stretches[1:]):
            if stretch[0].is_elementwise:
                values, may_write = self._by_parts(stretch, values, may_write, following)
            else:
                if not self._takes_rounded(stretch[0]):
                    values, all_new = self._widened(values)
                    may_write = may_write or all_new
                values, may_write = self._run(stretch[0], _Part(self._bucket.names), values, may_write)
        if not stretches or not stretches[-1][0].is_elementwise:
            self._apply(_Part(self._bucket.names), self._widened(values)[0])

    def _takes_rounded(self, step: Step) -> bool:
        """True if a transform would itself round to what values have been rounded to, and keeps none of them."""
        rounds_to = self._parts[step].declaration.rounds_to
        if rounds_to is None or self._routes.shares[step, self._bucket.names].has_leaves:
            return False
        device = torch.device("cpu")
        return all(rounds_to(self._parts[step], own, device) == narrow for narrow, own in self._rounded.values())

    def _by_parts(
        self, stretch: Sequence[Step], values: Leaves, may_write: bool, following: tuple[Step, ...] | None
    ) -> tuple[Leaves, bool]:
        """Elementwise transforms, part by part; what comes out is applied at once where nothing follows."""
        rooms, rounded = ({}, {}) if following is None else self._rooms(values, following[0])
        results: Leaves = {}
        may_write_all = True
        # Kept memory is for transforms that have no state to keep it in, and for updates that are applied at once.
        is_let_go = following is None and not any(
            self._routes.shares[step, names].has_leaves for step in stretch for names in self._bucket.lists
        )
        room = self._routes.widened if is_let_go else None
        for part in self._parts_of(stretch, values):
            given: Leaves = {name: None if (x := values[name]) is None else part.of(x) for name in part.names}
            out, all_new = self._widened(given, room)
            may_write_out = may_write or all_new
            for step in stretch:
                out, may_write_out = self._run(step, part, out, may_write_out)
            if following is None:
                self._apply(part, out)
                continue
            copied: list[str] = []
            for name, x in out.items():
                if name in rounded and x.dtype != rounded[name][1]:  # a transform has changed the dtype
                    del rooms[name], rounded[name]
                if x is not None and part.piece is not None and name not in rooms:
                    rooms[name] = torch.empty(self._call.params[name].shape, dtype=x.dtype)
                if x is not None and name in rooms:
                    copied.append(name)
            if copied:
                torch._foreach_copy_([part.of(rooms[name]) for name in copied], [out[name] for name in copied])
            results |= out | {name: rooms[name] for name in copied}
            may_write_all = may_write_all and (may_write_out or len(copied) == len(out))
        self._rounded = rounded
        return results, may_write_all

    def _rooms(self, values: Leaves, following: Step) -> tuple[Leaves, dict[str, tuple[torch.dtype, torch.dtype]]]:
        """Kept memory for large leaves that the next transform rounds, and to what; one shape as one batch."""
        rooms: Leaves = {}
        rounded: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        rounds_to = self._parts[following].declaration.rounds_to
        if rounds_to is None or self._routes.shares[following, self._bucket.names].has_leaves:
            return rooms, rounded
        kinds: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
        for name, x in values.items():
            if x is not None and x.numel() >= LARGE:
                own = self._rounded[name][1] if name in self._rounded else x.dtype
                kinds.setdefault((x.shape, own), []).append(name)
        device = torch.device("cpu")
        for (shape, own), names in kinds.items():
            narrow = rounds_to(self._parts[following], own, device)
            if narrow.itemsize <= own.itemsize:  # in their own dtype too, for the batch
                room = self._routes.rounded.empty((len(names), *shape), narrow, device)
                rooms |= dict(zip(names, room.unbind(), strict=True))
                rounded |= dict.fromkeys(names, (narrow, own))
        return rooms, rounded

    def _parts_of(self, stretch: Sequence[Step], values: Leaves) -> Iterator[_Part]:
        """The bucket's leaves, a few at a time; large ones by pieces."""
        for names in self._bucket.lists:
            x: Tensor | None = values[names[0]] if len(names) == 1 else None
            most = 0 if x is None else self._routes.piece_bytes // max(4, x.element_size())
            if x is None or x.numel() <= most or not self._can_be_cut(stretch, names[0], x):
                yield _Part(names)
            else:
                for start in range(0, x.numel(), most):
                    yield _Part(names, slice(start, min(start + most, x.numel())))

    def _can_be_cut(self, stretch: Sequence[Step], name: str, update: Tensor) -> bool:
        """True if all that transforms see of a leaf lies in one order of memory, so that pieces are views."""
        seen: list[Any] = [update, self._call.params[name]]
        for step in stretch:
            share, old = self._routes.shares[step, (name,)], self._states[step].old
            seen += [old[place] for place, own in zip(share.places, share.parameters, strict=True) if own is not None]
        return all(type(x) in _PLAIN and x.shape == update.shape and x.is_contiguous() for x in seen)

    def _widened(self, values: Leaves, room: Workspace | None = None) -> tuple[Leaves, bool]:
        """Values with those that were rounded in their own dtype again, out of kept memory; whether these are all."""
        narrow = {
            name: x
            for name, x in values.items()
            if x is not None and name in self._rounded and x.dtype == self._rounded[name][0]
            if room is None or x.dtype != self._rounded[name][1]  # already in kept memory, and of its own dtype
        }
        if not narrow:
            return values, False
        room = room or Workspace()
        room.clear()
        wide = {name: room.empty(x.shape, self._rounded[name][1], x.device) for name, x in narrow.items()}
        torch._foreach_copy_(list(wide.values()), list(narrow.values()))
        return values | wide, len(wide) == sum(x is not None for x in values.values())

    def _run(self, step: Step, part: _Part, values: Leaves, may_write: bool) -> tuple[Leaves, bool]:
        """One transform on a part; whether what comes out may be written to."""
        tx, share, state = self._parts[step], self._routes.shares[step, part.names], self._states[step]
        given: list[Any] = []
        for place, own in zip(share.places, share.parameters, strict=True):
            leaf = state.old[place]
            if isinstance(leaf, Tensor):  # every part starts from the same count
                leaf = leaf.clone() if own is None else part.of(leaf)
            given.append(leaf)
        params = {name: part.of(self._call.params[name]) for name in part.names}
        donate = Donation(may_write, True)
        out, after = tx.run(values, tree.unflatten(share.treedef, given), params, donate=donate, **self._call.extras)
        changed: list[tuple[Tensor, Tensor]] = []
        for place, own, old, new in zip(share.places, share.parameters, given, tree.leaves(after), strict=True):
            if own is None or part.piece is None:
                state.new[place] = new
            elif new is not old:
                changed.append((old, new.clone()))  # lest it be another's old one, which is written to first
        for old, new in changed:
            old.copy_(new)
        return out, tx.keeps_donation_promise and (may_write or is_new(out, values))

    def _apply(self, part: _Part, updates: Leaves) -> None:
        assert self._call.apply is not None
        self._call.apply({name: part.of(self._call.params[name]) for name in part.names}, updates)


def can_be_routed(call: Arguments) -> bool:
    """True if a call is for plain tensors on the CPU that nothing traces, owns its state and applies its updates."""
    if call.apply is None or not call.donate.state or not (tree.is_flat(call.updates) and tree.is_flat(call.params)):
        return False
    if is_traced() or functorch_is_active() or torch.is_grad_enabled():
        return False
    given = [x for values in (call.updates, call.params) for x in values.values() if x is not None]
    return {type(x) for x in given} <= _PLAIN and {x.device.type for x in given} == {"cpu"}


def _part_at(tx: Transform, place: tuple[int, ...]) -> Transform:
    for number in place:
        tx = tx.children[number]
    return tx


def at_path(state: PyTree, path: Sequence[Any]) -> PyTree:
    """The part of a state at a path of keys."""
    for key in path:
        state = state[key]
    return state


def put_at_path(state: PyTree, path: Sequence[Any], value: PyTree) -> PyTree:
    """A state with another part at a path of keys.

    >>> put_at_path({"a": {"b": 1}, "c": 2}, ("a", "b"), 3)
    {'a': {'b': 3}, 'c': 2}
    """
    return {**state, path[0]: put_at_path(state[path[0]], path[1:], value)} if path else value
