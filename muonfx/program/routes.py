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
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, Transform
from muonfx.core.combine import is_new
from muonfx.polar import Workspace
from muonfx.program.buckets import cut_into_buckets, nbytes_of, parameters_of
from muonfx.program.nodes import Around, ChainNode, Node
from muonfx.program.placement import Arguments
from muonfx.tracing import functorch_is_active, is_traced
from muonfx.tree import PyTree, Structure

__all__ = ["PIECE_BYTES", "Routes", "at_path", "can_be_routed", "put_at_path", "routes_of"]

PIECE_BYTES = 1 << 22
"""The bytes of a leaf that elementwise transforms take at a time: with state and parameter, about a CPU's cache."""

SMALLEST_PIECE = 1 << 16
"""The bytes from which a pass costs more than its call."""

_PLAIN = frozenset({Tensor, torch.nn.Parameter})

LARGE = 1 << 16
"""Elements from which a pass over a leaf costs more than a call."""

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
    return _through([Route(node.names, ())], node, tx, (), ())


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
    some = [Route(tuple(name for name in route.names if name in names), route.steps) for route in routes]
    return [route for route in some if route.names]


class _Share(NamedTuple):
    """Of a transform's state, as much as belongs to some leaves."""

    treedef: Structure
    places: list[int]
    """Among the leaves of the whole state."""
    parameters: list[str | None]
    """The leaf that each belongs to; None for one that belongs to all, such as a count."""


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
        params: local tensors by name.
        bucket_bytes: of parameters, for what looks at whole leaves; a larger leaf goes alone.
    """

    def __init__(self, node: Node, tx: Transform, params: Mapping[str, Tensor | None], bucket_bytes: int) -> None:
        self.like = {name: torch.empty_like(leaf, device="meta") for name, leaf in params.items() if leaf is not None}
        self.piece_bytes = min(PIECE_BYTES, max(bucket_bytes, SMALLEST_PIECE))
        self._routes = [(route, self._buckets_of(route, bucket_bytes)) for route in routes_of(node, tx)]
        self._met: dict[Step, tuple[str, ...]] = {}
        for route, _ in self._routes:
            for step in route.steps:
                self._met[step] = self._met.get(step, ()) + route.names
        self._shares: dict[tuple[Step, tuple[str, ...]], _Share] = {}
        self._paths: dict[Step, dict[tuple[object, ...], int]] = {}
        self.between, self.widened = Workspace(), Workspace()

    def _buckets_of(self, route: Route, bucket_bytes: int) -> list[_Bucket]:
        sizes = {name: nbytes_of(self.like[name]) for name in route.names}
        limit = self.piece_bytes
        if not all(step.is_elementwise for step in route.steps):
            # Matrices of one shape make one batch; where a bucket ends, so does a batch.
            sizes = dict(sorted(sizes.items(), key=lambda one: tuple(self.like[one[0]].shape)))
            limit = bucket_bytes
        buckets = cut_into_buckets(sizes, limit)
        return [
            _Bucket(tuple(names), list(map(tuple, cut_into_buckets({n: sizes[n] for n in names}, self.piece_bytes))))
            for names in buckets
        ]

    def step(self, tx: Transform, call: Arguments) -> PyTree:
        """Update, apply bucket by bucket, and return the next state: the old one, written over.

        Args:
            tx: the transform, with the numbers of now.
            call: its updates are a flat dict, its state is donated, and something applies the updates.
        """
        states = {step: _State(at_path(call.state, step.state)) for step in self._met}
        parts = {step: _part_at(tx, step.place) for step in self._met}
        for route, buckets in self._routes:
            for bucket in buckets:
                _Passage(self, bucket, call, parts, states).go(route.stretches)
        after = call.state
        for step, state in states.items():
            after = put_at_path(after, step.state, state.tree())
        return after

    def lends(self, tensor: Tensor) -> bool:
        """True if a tensor lies in memory that is used again."""
        return self.between.holds(tensor) or self.widened.holds(tensor)

    def share(self, step: Step, tx: Transform, names: tuple[str, ...]) -> _Share:
        """The share of some leaves in the state of a transform, found out once."""
        if (step, names) not in self._shares:
            with warnings.catch_warnings():  # what there is to warn of has been said
                warnings.simplefilter("ignore")
                if step not in self._paths:
                    whole = tx.functions.init({name: self.like[name] for name in self._met[step]})
                    self._paths[step] = {path: place for place, path in enumerate(tree.paths(whole))}
                own = {name: self.like[name] for name in names}
                made = tx.functions.init(own)
            places = [self._paths[step][path] for path in tree.paths(made)]
            self._shares[step, names] = _Share(tree.flatten(made)[1], places, parameters_of(made, own))
        return self._shares[step, names]


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
        routes.between.clear()

    def go(self, stretches: Sequence[tuple[Step, ...]]) -> None:
        """Run all transforms, and apply what comes out."""
        values: Leaves = {name: self._call.updates[name] for name in self._bucket.names}
        is_ours = self._call.donate.updates
        for stretch, following in itertools.zip_longest(stretches, stretches[1:]):
            if stretch[0].is_elementwise:
                values, is_ours = self._by_parts(stretch, values, is_ours, following)
            else:
                if self._parts[stretch[0]].declaration.rounds_to is None:
                    values = self._wide(values)
                values, is_ours = self._run(stretch[0], _Part(self._bucket.names), values, is_ours)
        if not stretches or not stretches[-1][0].is_elementwise:
            self._apply(_Part(self._bucket.names), self._wide(values))

    def _by_parts(
        self, stretch: Sequence[Step], values: Leaves, is_ours: bool, following: tuple[Step, ...] | None
    ) -> tuple[Leaves, bool]:
        """Elementwise transforms, part by part; what comes out is applied at once where nothing follows."""
        results: Leaves = {}
        rooms = {} if following is None else self._rooms(values, self._parts[following[0]])
        all_ours = True
        for part in self._parts_of(stretch, values):
            self._routes.widened.clear()
            given: Leaves = {name: None if (x := values[name]) is None else part.of(x) for name in part.names}
            out = self._wide(given, self._routes.widened)
            ours = is_ours or out is not given
            for step in stretch:
                out, ours = self._run(step, part, out, ours)
            if following is None:
                self._apply(part, out)
                continue
            moved = [name for name, x in out.items() if x is not None and (part.piece is not None or name in rooms)]
            for name in moved:
                if name not in rooms:
                    whole = self._routes.like[name]
                    rooms[name] = self._routes.between.empty(whole.shape, out[name].dtype, out[name].device)
            if moved:
                torch._foreach_copy_([part.of(rooms[name]) for name in moved], [out[name] for name in moved])
            results |= out | {name: rooms[name] for name in moved}
            all_ours = all_ours and (ours or len(moved) == len(out))
        return results, all_ours

    def _rooms(self, values: Leaves, following: Transform) -> Leaves:
        """Memory for those leaves that the next transform rounds: those of one shape lie side by side, as one batch."""
        rounds_to = following.declaration.rounds_to
        if rounds_to is None:
            return {}
        found: Leaves = {}
        kinds: dict[tuple[torch.Size, torch.dtype, torch.device], list[str]] = {}
        for name, x in values.items():
            if x is not None and x.numel() >= LARGE:
                kinds.setdefault((x.shape, x.dtype, x.device), []).append(name)
        for (shape, dtype, device), names in kinds.items():
            rounded = rounds_to(following, dtype, device)
            if rounded.itemsize < dtype.itemsize:
                room = self._routes.between.empty((len(names), *shape), rounded, device)
                found |= dict(zip(names, room.unbind(), strict=True))
        return found

    def _parts_of(self, stretch: Sequence[Step], values: Leaves) -> Iterator[_Part]:
        """The bucket's leaves, a few at a time; large ones by pieces."""
        for names in self._bucket.lists:
            first, *others = names
            x: Tensor | None = values[first]
            most = self._routes.piece_bytes // self._routes.like[first].itemsize
            if others or x is None or x.numel() <= most or not self._can_be_cut(stretch, first, x):
                yield _Part(names)
            else:
                for start in range(0, x.numel(), most):
                    yield _Part(names, slice(start, min(start + most, x.numel())))

    def _can_be_cut(self, stretch: Sequence[Step], name: str, update: Tensor) -> bool:
        """True if all that transforms see of a leaf lies in one order of memory, so that pieces are views."""
        seen: list[Any] = [update, self._call.params[name]]
        for step in stretch:
            share, old = self._share(step, (name,)), self._states[step].old
            seen += [old[place] for place, own in zip(share.places, share.parameters, strict=True) if own]
        return all(type(x) in _PLAIN and x.shape == update.shape and x.is_contiguous() for x in seen)

    def _share(self, step: Step, names: tuple[str, ...]) -> _Share:
        return self._routes.share(step, self._parts[step], names)

    def _wide(self, values: Leaves, room: Workspace | None = None) -> Leaves:
        """Values in the dtypes of the updates: those themselves, where none was rounded."""
        narrow = {n: x for n, x in values.items() if x is not None and x.dtype != self._call.updates[n].dtype}
        if not narrow:
            return values
        wide = {
            name: torch.empty_like(x, dtype=dtype) if room is None else room.empty(x.shape, dtype, x.device)
            for name, x in narrow.items()
            for dtype in (self._call.updates[name].dtype,)
        }
        torch._foreach_copy_(list(wide.values()), list(narrow.values()))
        return values | wide

    def _run(self, step: Step, part: _Part, values: Leaves, is_ours: bool) -> tuple[Leaves, bool]:
        """One transform on a part; whether what comes out may be written to."""
        tx, share, state = self._parts[step], self._share(step, part.names), self._states[step]
        given: list[Any] = []
        for place, own in zip(share.places, share.parameters, strict=True):
            leaf = state.old[place]
            if isinstance(leaf, Tensor):  # every part starts from the same count
                leaf = leaf.clone() if own is None else part.of(leaf)
            given.append(leaf)
        params = {name: part.of(self._call.params[name]) for name in part.names} if tx.reads_params else None
        out, after = tx.run(
            values, tree.unflatten(share.treedef, given), params, donate=Donation(is_ours, True), **self._call.extras
        )
        changed: list[tuple[Tensor, Tensor]] = []
        for place, own, old, new in zip(share.places, share.parameters, given, tree.leaves(after), strict=True):
            if own is None or part.piece is None:
                # A transform may keep what it was given to write to.
                state.new[place] = new.clone() if isinstance(new, Tensor) and self._routes.lends(new) else new
            elif new is not old:
                changed.append((old, new.clone()))  # lest it be another's old one, which is written to first
        for old, new in changed:
            old.copy_(new)
        return out, tx.keeps_donation_promise and (is_ours or is_new(out, values))

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
