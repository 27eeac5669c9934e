"""Leafwise steps on a CPU: elementwise transforms run route by route, in chunks that fit the cache.

A *route* is a set of leaves and the leafwise transforms that act on them, in order. Its leaves pass through the
transforms bucket by bucket. Transforms of locality ELEMENT give the same result for a chunk of a leaf as for the
whole leaf, so neighbouring ones run together on one chunk after another, and each chunk of gradient, momentum and
parameter is read from memory once. If a matrix transform rounds its input, chunks are rounded before it, and its
output is converted back, while they are in the cache. All values are bitwise the values of transforms on whole
leaves.

Routes are for steps that apply their updates and own their state. On other devices `Executor` runs transforms on
whole leaves, with one launch for all leaves.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch

from muonfx import tree
from muonfx.core import Locality, Transform
from muonfx.polar import Workspace
from muonfx.program.buckets import can_be_shared_out, cut_into_buckets, parameters_of
from muonfx.program.nodes import Around, ChainNode, Node
from muonfx.program.passage import PLAIN, Bucket, Passage, Share, State, Step, Surroundings
from muonfx.program.placement import Arguments
from muonfx.tree import PyTree
from muonfx.tree.tracing import functorch_is_active, is_traced

__all__ = ["PIECE_BYTES", "Routes", "at_path", "can_be_routed", "put_at_path", "routes_of"]

PIECE_BYTES = 1 << 22
"""Bytes of a leaf per chunk: with state and parameter about the size of a CPU's cache."""

SMALLEST_PIECE = 1 << 16
"""The least bytes of a chunk if buckets are small: below it, calls cost more than memory traffic."""


class Route(NamedTuple):
    """Leaves and the transforms that act on them."""

    names: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def stretches(self) -> list[tuple[Step, ...]]:
        """The transforms, with neighbouring elementwise transforms grouped."""
        found: list[tuple[Step, ...]] = []
        for step in self.steps:
            if found and step.is_elementwise and found[-1][-1].is_elementwise:
                found[-1] = (*found[-1], step)
            else:
                found.append((step,))
        return found


def routes_of(node: Node, tx: Transform) -> list[Route]:
    """Return the routes through a resolved leafwise transform that is executed as `node`."""
    found = _through([Route(node.names, ())], node, tx, (), ())
    met = {step for route in found if route.names for step in route.steps}
    # Keep a route without leaves if its transforms are on no other route: they still count steps.
    return [route for route in found if route.names or not met.issuperset(route.steps)]


def _through(
    routes: list[Route], node: Node, tx: Transform, place: tuple[int, ...], state: tuple[Any, ...]
) -> list[Route]:
    """Append the steps of one transform to routes."""
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
    """Restrict routes to some of their leaves."""
    return [Route(tuple(name for name in route.names if name in names), route.steps) for route in routes]


class Routes:
    """Runs one resolved transform by routes; a step may have other numbers, but the same structure."""

    def __init__(self, node: Node, tx: Transform, call: Arguments, bucket_bytes: int) -> None:
        self._sizes: dict[str, int] = {name: leaf.nbytes for name, leaf in call.params.items()}
        self._piece_bytes = min(PIECE_BYTES, max(bucket_bytes, SMALLEST_PIECE))
        self._routes = [(route, self._buckets_of(route, call, bucket_bytes)) for route in routes_of(node, tx)]
        self._steps: dict[Step, tuple[str, ...]] = {}
        for route, _ in self._routes:
            for step in route.steps:
                self._steps[step] = self._steps.get(step, ()) + route.names
        self._shares: dict[tuple[Step, tuple[str, ...]], Share] = {}
        self.is_possible = all(self._share_out(route, buckets, call) for route, buckets in self._routes)
        """False if some state leaf cannot be assigned to a parameter."""
        self._rounded, self._widened = Workspace(), Workspace()

    def _buckets_of(self, route: Route, call: Arguments, bucket_bytes: int) -> list[Bucket]:
        names, limit = list(route.names), self._piece_bytes
        if not all(step.is_elementwise for step in route.steps):
            # Sort by shape: matrices of one shape in one bucket form a batch.
            names.sort(key=lambda name: tuple(call.params[name].shape))
            limit = bucket_bytes
        buckets = cut_into_buckets({name: self._sizes[name] for name in names}, limit) or [[]]
        wide = {name: call.params[name].numel() * max(4, call.params[name].element_size()) for name in names}
        return [
            Bucket(
                tuple(some), list(map(tuple, cut_into_buckets({n: wide[n] for n in some}, self._piece_bytes) or [[]]))
            )
            for some in buckets
        ]

    def _share_out(self, route: Route, buckets: list[Bucket], call: Arguments) -> bool:
        """Find the shares of all transforms of a route, or return False if some state cannot be split by leaves."""
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
                    self._shares[step, names] = Share(shared, places, own)
        return True

    def step(self, tx: Transform, call: Arguments) -> PyTree:
        """Run a step, apply the updates, and return the next state in the storage of the old one."""
        states = {step: State(at_path(call.state, step.state)) for step in self._steps}
        parts = {step: _part_at(tx, step.place) for step in self._steps}
        surroundings = Surroundings(call, parts, states, self._shares, self._piece_bytes, self._rounded, self._widened)
        for route, buckets in self._routes:
            for bucket in buckets:
                self._rounded.clear()
                Passage(bucket, surroundings).go(route.stretches)
        after = call.state
        for step, state in states.items():
            after = put_at_path(after, step.state, state.tree())
        return after


def _of_leaves(state: PyTree, names: Set[str], everyone: Set[str]) -> PyTree:
    """Restrict the dicts of leaves in a state to `names`; a list or a plain tuple raises ValueError."""
    if isinstance(state, dict):
        if state and set(state) <= everyone:
            return {name: own for name, own in state.items() if name in names}
        return {key: _of_leaves(own, names, everyone) for key, own in state.items()}
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_of_leaves(own, names, everyone) for own in state))
    if state is None or isinstance(state, int):
        return state
    raise ValueError(f"found a {type(state).__name__}")


def can_be_routed(call: Arguments) -> bool:
    """Return True for an untraced call on plain CPU tensors that owns its state and applies its updates."""
    if call.apply is None or not call.donate.state or not (tree.is_flat(call.updates) and tree.is_flat(call.params)):
        return False
    if is_traced() or functorch_is_active() or torch.is_grad_enabled():
        return False
    given = [x for values in (call.updates, call.params) for x in values.values() if x is not None]
    return {type(x) for x in given} <= PLAIN and {x.device.type for x in given} == {"cpu"}


def _part_at(tx: Transform, place: tuple[int, ...]) -> Transform:
    for number in place:
        tx = tx.children[number]
    return tx


def at_path(state: PyTree, path: Sequence[Any]) -> PyTree:
    """Return the part of a state at a path of keys."""
    for key in path:
        state = state[key]
    return state


def put_at_path(state: PyTree, path: Sequence[Any], value: PyTree) -> PyTree:
    """Return a state with the part at a path of keys replaced."""
    return {**state, path[0]: put_at_path(state[path[0]], path[1:], value)} if path else value
