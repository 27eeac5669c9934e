"""The executor runs a program under any layout and with any store.

A placement knows which shard of each leaf this rank holds, and how matrices are gathered on one rank and scattered
back. A store keeps the state between steps. In one process, over ranks, with offloaded state and in a torch
optimizer, the same executor runs with other arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, InitAndUpdate, Locality, Transform
from muonfx.core.combine import is_new
from muonfx.core.contract import NOTHING, EmptyState, sum_over_leaves
from muonfx.core.recorded import with_numbers
from muonfx.polar import Workspace
from muonfx.program.buckets import (
    BucketedState,
    can_be_shared_out,
    cut_into_buckets,
    device_of,
    init_in_buckets,
    moves,
    parameters_of,
    sizes_of,
    store_away,
    stored_again,
)
from muonfx.program.lower import Placeholder, lower_node, named_chain, resolve_within, stand_in, state_around
from muonfx.program.nodes import Around, ChainNode, Node, Program, Stage, WholeTree
from muonfx.program.placement import ALONE, RESIDENT, Arguments, Placement, Run, Store
from muonfx.tree import PyTree, Structure

__all__ = ["Executor", "with_numbers_on"]

MOST_PROGRAMS = 64
"""The number of structures cached at once: a chain that is recreated at each step may have a new one each time."""

Now = Transform | tuple[Transform, ...]
"""The transform that a node was lowered from, with its current numbers; for joined units a tuple of transforms."""


class _Span(NamedTuple):
    """Neighbouring nodes of a chain that run together."""

    names: tuple[str, ...]
    """The names of the chain's transforms that `node` executes."""
    first: int
    """The index of the first of these transforms in the chain."""
    node: Node


class Executor:
    """Runs transforms on trees of one set of parameters, and caches everything that depends on structure alone."""

    def __init__(self, placement: Placement, store: Store = RESIDENT, bucket_bytes: int | None = None) -> None:
        # bucket_bytes: parameter bytes per bucket of leafwise transforms with a resident state; None: one bucket
        self.placement, self.store, self.bucket_bytes = placement, store, bucket_bytes
        self._programs: dict[Any, list[Node]] = {}
        self._current: dict[int, tuple[tuple[Transform, ...], Transform]] = {}
        self._spans: dict[int, tuple[_Span, ...]] = {}
        self._parameters: dict[Any, list[str | None]] = {}
        self._keeps_leaves: dict[int, bool] = {}
        self._own_states: dict[int, tuple[Structure, list[bool]]] = {}
        self._checking: dict[int, list[Transform]] = {}
        self._warned: set[str] = set()
        self._at_hand: Executor | None = None
        self._extras: Mapping[str, Any] = {
            "workspace": Workspace(),
            "shard": placement.shard,
            "max_over_ranks": placement.max_over_ranks,
        }

    def program(self, tx: Transform, params: PyTree) -> Node:
        """Return the program of a transform for a tree, lowered once for each structure and set of names."""
        key = (tx.treedef, tuple(tree.names(params)))
        for known in self._programs.get(key, ()):
            if self.placement.fits(known.like, params):
                return known
        if len(self._programs) >= MOST_PROGRAMS:
            self._forget()
        made = lower_node(tx, self.placement.global_like(params))
        self._programs.setdefault(key, []).append(made)
        return made

    def _forget(self) -> None:
        """Clear all caches."""
        everything = self._programs, self._current, self._spans, self._parameters, self._keeps_leaves
        for found in (*everything, self._checking, self._own_states):
            found.clear()

    # ------------------------------------------------------------------------------------------------------- init

    def init(self, tx: Transform, params: PyTree) -> PyTree:
        """Return the state of a transform for local tensors."""
        return self.init_node(self.program(tx, params), tx, params)

    def init_node(self, node: Node, now: Now, params: PyTree) -> PyTree:
        """Return the state of a node for local tensors; for meta tensors it is a meta state, without communication."""
        on_meta = device_of(params).type == "meta"
        if self._is_unit(node):
            tx = self._transform(node, now)
            return tx.functions.init(params) if self.store.is_resident or on_meta else self._init_in_store(tx, params)
        if isinstance(node, ChainNode):
            state: dict[str, PyTree] = {}
            for span in self._spans_of(node):
                part = self._part(span, now)
                if isinstance(span.node, Stage) and not self._is_unit(span.node):
                    run = self._run_of(span.node, part)
                    state |= self.placement.init_stage(span.node, run, params, self._store_for(on_meta=on_meta))
                elif isinstance(span.node, _Joined):
                    state |= self.init_node(span.node, part, params)
                else:
                    state[span.names[0]] = self.init_node(span.node, part[0], params)
            return state
        if isinstance(node, Stage):
            run = self._run_of(node, now if isinstance(now, tuple) else (now,))
            return self.placement.init_stage(node, run, params, self._store_for(on_meta=on_meta))[run[0][0]]
        if isinstance(node, WholeTree) and not self.placement.holds_all:
            self.placement.warn_of_gathering(node.tx, params)
            whole = self.placement.global_like(params) if on_meta else self.placement.gather(params)
            return self._transform(node, now).functions.init(whole)
        if self.store.is_resident or on_meta or not (isinstance(node, Around) or self._keeps_leaf_state(node)):
            return self._transform(node, now).functions.init(params)
        store = self._store_at_once
        device = store.device(device_of(params))
        params = tree.map(lambda leaf: leaf.to(device), params)
        if isinstance(node, Around):
            state = self._transform(node, now).functions.init(params)
            own, called = self._split(node, state)
            return self._merged(node, store_away(store, device, own, parameters_of(own, params)), called)
        state = self._plain.init_node(node, now, params)
        return store_away(store, device, state, parameters_of(state, params))

    # ----------------------------------------------------------------------------------------------------- update

    def update(self, tx: Transform, call: Arguments) -> tuple[PyTree, PyTree]:
        """Return the updates, unless the call applies them, and the next state; all ranks call this together."""
        return self.update_node(self.program(tx, call.like), tx, call)

    def check_extras(self, node: Node, extras: Mapping[str, Any]) -> None:
        """Run the checks of named extras that the transforms of a program declare."""
        if not extras or torch.compiler.is_compiling():  # a traced graph cannot use the cache
            return
        if node.number not in self._checking:
            self._checking[node.number] = [
                own.tx for own in Program(node).transforms() if own.tx.declaration.check_extras
            ]
        for tx in self._checking[node.number]:
            assert tx.declaration.check_extras is not None
            tx.declaration.check_extras(tx, extras)

    def update_node(self, node: Node, now: Now, call: Arguments) -> tuple[PyTree, PyTree]:
        """Run one node of a program; see `update`."""
        call = call._replace(extras={**self._extras, **call.extras})
        if self._is_unit(node):
            return self._update_unit(node, now, call)
        if isinstance(node, ChainNode):
            return self._update_sequence(node, now, call)
        if isinstance(node, Stage):
            run = self._run_of(node, now if isinstance(now, tuple) else (now,))
            name = run[0][0]
            out, states = self.placement.update_stage(node, run, call._replace(state={name: call.state}), self.store)
            after = states[name]
        elif isinstance(node, WholeTree) and not self.placement.holds_all:
            whole = call._replace(
                updates=self.placement.gather(call.updates), params=self.placement.gather(call.params)
            )
            out, after = whole.run(
                self._transform(node, now), donate=NOTHING, sum_over_leaves=sum_over_leaves, shard=ALONE.shard
            )
            out = self.placement.shard(out)
        else:
            out, after = self._update_at_once(node, now, call)
        call.finish(out)
        return out, after

    def _update_sequence(self, node: ChainNode, now: Now, call: Arguments) -> tuple[PyTree, PyTree]:
        after: dict[str, PyTree] = {}
        updates, may_write = call.updates, call.donate.updates
        spans = self._spans_of(node)
        for place, span in enumerate(spans):
            last = place == len(spans) - 1
            own = {name: call.state[name] for name in span.names}
            donate = Donation(may_write, call.donate.state)
            given = call._replace(updates=updates, state=own, donate=donate, apply=call.apply if last else None)
            part = self._part(span, now)
            if isinstance(span.node, Stage) and not self._is_unit(span.node):
                out, new = self.placement.update_stage(span.node, self._run_of(span.node, part), given, self.store)
                given.finish(out)
            elif isinstance(span.node, _Joined):
                out, new = self.update_node(span.node, part, given)
            else:
                name = span.names[0]
                out, state = self.update_node(span.node, part[0], given._replace(state=own[name]))
                new = {name: state}
            after |= new
            if not last:
                # Only this chain holds new updates of a transform that keeps the donation promise.
                promised = call.donate.state and span.node.tx.keeps_donation_promise
                may_write = promised and (may_write or is_new(out, updates))
            updates = out
        return updates, {name: after[name] for name in call.state}

    def _update_unit(self, node: Node, now: Now, call: Arguments) -> tuple[PyTree, PyTree]:
        """Run a unit bucket by bucket."""
        tx = self._transform(node, now)
        if not self.store.is_resident:
            here = with_numbers_on(self.store.device(device_of(call.updates, call.params)), tx)
            return self._update_in_store(here, call)
        buckets = self._resident_buckets(call.params)
        if buckets is not None and len(buckets) > 1:
            parameters = self._parameters_of(node.number, call.state, call.updates)
            if can_be_shared_out(tree.leaves(call.state), parameters):
                return self._in_buckets(tx, buckets, parameters, call)
        out, after = call.run(tx, sum_over_leaves=self.placement.sum_over_leaves)
        call.finish(out)
        return out, after

    def _update_in_store(self, tx: Transform, call: Arguments) -> tuple[PyTree, PyTree]:
        given = device_of(call.updates, call.params)
        device = self.store.device(given)
        parameters = self._parameters_of(tx.treedef, call.state, call.updates)
        named = zip(tree.names(call.updates), tree.leaves(call.updates), strict=True)
        sizes = sizes_of([n for n, leaf in named if leaf is not None], call.state, parameters)
        weights = tree.leaves(call.params) if call.params is not None and tx.reads_params else []
        far = any(weight is not None and weight.device != device for weight in weights)
        at_once = not any(sizes.values()) and device == given and not far
        buckets = [list(sizes)] if at_once else cut_into_buckets(sizes, self.store.bucket_bytes) or [[]]
        return self._in_buckets(tx, buckets, parameters, call, far=far)

    def _in_buckets(
        self,
        tx: Transform,
        buckets: list[list[str]],
        parameters: list[str | None],
        call: Arguments,
        *,
        far: bool = False,
    ) -> tuple[PyTree, PyTree]:
        """Run a transform bucket by bucket; `far` copies the parameters of each bucket to the compute device."""
        leaves, treedef = tree.flatten(call.updates)
        names = tree.names(call.updates)
        weights = tree.leaves(call.params) if far else []
        given = device_of(call.updates, call.params)
        device = self.store.device(given)
        extras = {**call.extras, "sum_over_leaves": self.placement.sum_over_leaves}
        bucketed = BucketedState(self.store, given, call.state, parameters, buckets, call.donate)
        results: dict[str, Any] = {}
        try:
            for turn, bucket in enumerate(buckets):
                mine = set(bucket)
                some = [leaf if name in mine else None for name, leaf in zip(names, leaves, strict=True)]
                there = call.params
                if far:
                    pairs = zip(names, weights, strict=True)
                    moved = [w.to(device) if n in mine and w is not None else w for n, w in pairs]
                    there = tree.unflatten(treedef, moved)
                updates = tree.unflatten(treedef, some)
                out = bucketed.run(turn, tx.run, updates, there, extras, may_write=call.donate.updates)
                if call.apply is None:
                    results |= {n: leaf for n, leaf in zip(names, tree.leaves(out), strict=True) if n in mine}
                call.finish(out)
                del some, updates, out  # free them before the next bucket
        except BaseException:
            bucketed.abandon()
            raise
        return tree.unflatten(treedef, [results.get(name) for name in names]), bucketed.end()

    def _resident_buckets(self, params: PyTree) -> list[list[str]] | None:
        """Split the names into buckets by the bytes of their parameters; None means all at once."""
        if self.bucket_bytes is None or params is None:
            return None
        named = [pair for pair in zip(tree.names(params), tree.leaves(params), strict=True) if pair[1] is not None]
        named.sort(key=lambda pair: tuple(pair[1].shape))  # matrices of one shape in one bucket form a batch
        return cut_into_buckets({name: x.nbytes for name, x in named}, self.bucket_bytes)

    # ---------------------------------------------------------------------------------- nodes that need every leaf

    def _update_at_once(self, node: Node, now: Now, call: Arguments) -> tuple[PyTree, PyTree]:
        """Run a node that needs every leaf: load its offloaded state, run once, write the state back."""
        tx = self._transform(node, now)
        if self.store.is_resident:
            return call.run(tx, sum_over_leaves=self.placement.sum_over_leaves)
        if isinstance(node, Around):
            return self._update_around(node, tx, call)
        given = device_of(call.updates, call.params)
        if node.tx.reads_params and call.params is not None:
            call = call._replace(params=tree.map(lambda leaf: leaf.to(given), call.params))
        if not self._keeps_leaf_state(node):
            return call.run(tx, sum_over_leaves=self.placement.sum_over_leaves)
        if not self._store_at_once.is_direct(self._store_at_once.device(given)):
            self._warn_of_bringing(node, call)

        def run(updates: PyTree, state: PyTree, params: PyTree, *, donate: Donation, **extras: Any) -> Any:
            return self._plain.update_node(node, now, Arguments(updates, state, params, donate, extras))

        return self._with_state_loaded(node, call, run)

    def _update_around(self, node: Around, tx: Transform, call: Arguments) -> tuple[PyTree, PyTree]:
        """Run a wrapper with its own state loaded; the transforms that it calls load theirs bucket by bucket."""
        own, called = self._split(node, call.state)
        store = self._store_at_once
        device = store.device(device_of(call.updates, call.params))

        def run(updates: PyTree, state: PyTree, params: PyTree, *, donate: Donation, **extras: Any) -> Any:
            # The loaded copies are ours to overwrite, but the states of called transforms are still the caller's.
            donate = Donation(donate.updates, call.donate.state)
            out, after = tx.run(updates, self._merged(node, state, called), params, donate=donate, **extras)
            after, new = self._split(node, after)
            pairs = zip(called, new, strict=True)
            called[:] = [stored_again(store, device, old, part, call.donate) for old, part in pairs]
            return out, after

        out, own = self._with_state_loaded(node, call._replace(state=own), run)
        return out, self._merged(node, own, called)

    def _with_state_loaded(self, node: Node, call: Arguments, run: Callable[..., Any]) -> tuple[PyTree, PyTree]:
        """Call a function like `Transform.run` with all of an offloaded state, and store the next state."""
        store, given = self._store_at_once, device_of(call.updates, call.params)
        parameters = self._parameters_of(node.number, call.state, call.updates)
        bucketed = BucketedState(store, given, call.state, parameters, [tree.names(call.updates)], call.donate)
        extras = {**call.extras, "sum_over_leaves": self.placement.sum_over_leaves}
        try:
            params = bucketed.to_compute_device(call.params)
            out = bucketed.run(0, run, call.updates, params, extras, may_write=call.donate.updates)
        except BaseException:
            bucketed.abandon()
            raise
        return out, bucketed.end()

    def _split(self, node: Around, state: PyTree) -> tuple[PyTree, list[PyTree]]:
        """Return a wrapper's own state, and the states of the transforms that it calls, in the order of its state."""
        treedef, is_called = self._own_state(node)
        parts = tree.subtrees(treedef, state)
        own = [EmptyState() if inner else part for part, inner in zip(parts, is_called, strict=True)]
        return tree.unflatten(treedef, own), [p for p, inner in zip(parts, is_called, strict=True) if inner]

    def _merged(self, node: Around, own: PyTree, called: list[PyTree]) -> PyTree:
        """Put the states of called transforms back into a wrapper's own state: the inverse of `_split`."""
        treedef, is_called = self._own_state(node)
        inner = iter(called)
        parts = tree.subtrees(treedef, own)
        merged = [next(inner) if called else part for part, called in zip(parts, is_called, strict=True)]
        return tree.unflatten(treedef, merged)

    def _init_in_store(self, tx: Transform, params: PyTree) -> PyTree:
        """Return the state of a leafwise transform, built bucket by bucket in the store."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shown = tx.functions.init(tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params))
        sizes = sizes_of(tree.names(params), shown, parameters_of(shown, params))
        buckets = cut_into_buckets(sizes, self.store.bucket_bytes) or [[]]
        # Leaves of other buckets are meta tensors, so that decisions by names and shapes see the whole tree.
        return init_in_buckets(self.store, buckets, params, tx.functions.init, outside="meta")

    def require_room(self, state: PyTree, params: PyTree, donate: Donation) -> None:
        """Raise OSError unless the store has room for the next state in addition to this one."""
        if self.store.is_resident:
            return
        device = self.store.device(device_of(params))
        pairs = zip(tree.leaves(state), parameters_of(state, params), strict=True)
        moving = [leaf for leaf, name in pairs if moves(leaf, name)]
        self.store.require([tree.spec(x) for x in moving if not (donate.state and self.store.has(x, device))])

    # ----------------------------------------------------------------------------------------- cached by structure

    def prepare(self, node: Node, now: Now) -> None:
        """Build the transforms of a node for the current numbers, so that a step only runs them."""
        node.tx.prepare_all()
        if not self._is_unit(node) and isinstance(node, ChainNode) and isinstance(now, Transform):
            for span in self._spans_of(node):
                part = self._part(span, now)
                if isinstance(span.node, Stage) and not self._is_unit(span.node):
                    self._run_of(span.node, part)
                else:
                    self.prepare(span.node, part if isinstance(span.node, _Joined) else part[0])
        elif isinstance(node, Stage) and not self._is_unit(node):
            self._run_of(node, now if isinstance(now, tuple) else (now,))
        else:
            self._transform(node, now).prepare_all()
            if isinstance(node, Around) and isinstance(now, Transform) and not self._is_unit(node):
                for child, inner in zip(node.inner, now.children, strict=True):
                    self.prepare(child, inner)

    def _is_unit(self, node: Node) -> bool:
        """Return True if a node, with all nodes within it, can run on any subset of the leaves."""
        return node.tx.locality <= (Locality.LEAF if self.placement.holds_all else Locality.ELEMENT)

    def _spans_of(self, node: ChainNode) -> tuple[_Span, ...]:
        """Return the nodes of a chain with neighbouring units joined: a bucket passes through a span at once."""
        if node.number not in self._spans:
            spans: list[_Span] = []
            first = 0
            for names, child in self._entries(node):
                before = spans[-1] if spans else None
                if before is not None and self._is_unit(before.node) and self._is_unit(child):
                    spans[-1] = _Span((*before.names, *names), before.first, _joined(before, names, child))
                else:
                    spans.append(_Span(names, first, child))
                first += len(names)
            self._spans[node.number] = tuple(spans)
        return self._spans[node.number]

    def _entries(self, node: ChainNode) -> Iterator[tuple[tuple[str, ...], Node]]:
        """Yield the nodes of a chain; if leaves are whole already, yield the members of a matrix stage one by one."""
        for names, child in node.entries:
            if isinstance(child, Stage) and self._is_unit(child):
                yield from (((member.name,), member.node) for member in child.members)
            else:
                yield names, child

    def _part(self, span: _Span, now: Now) -> tuple[Transform, ...]:
        """Return the chain's transforms that a span executes, with the current numbers."""
        children = now if isinstance(now, tuple) else now.children
        return children[span.first : span.first + len(span.names)]

    def _run_of(self, stage: Stage, now: tuple[Transform, ...]) -> Run:
        return tuple(
            (member.name, self._transform(member.node, part)) for member, part in zip(stage.members, now, strict=True)
        )

    def _transform(self, node: Node, now: Now) -> Transform:
        """Return the transform that executes a node, with the current numbers; unchanged transforms are reused."""
        parts = now if isinstance(now, tuple) else (now,)
        known = self._current.get(node.number)
        if known is not None and all(a is b for a, b in zip(known[0], parts, strict=True)):
            return known[1]
        if node.keeps_numbers:
            base = self._base(node) if known is None else known[1]
            made = with_numbers(base, iter([number for part in parts for number in tree.leaves(part)]))
        else:
            assert not isinstance(now, tuple)
            made = self._base(lower_node(now, node.like, numbers=node.numbers))
        self._current[node.number] = parts, made
        return made

    def _base(self, node: Node) -> Transform:
        if self._is_unit(node):
            return self._resolved(node)
        if isinstance(node, Around):
            inner = iter(node.inner)
            executed = _executed if self.store.is_resident else _executed_in_store
            return node.tx.with_children(lambda child: executed(child, _Bound(self, next(inner))))
        return node.tx

    def _resolved(self, node: Node) -> Transform:
        """Return the transform of a unit, with the transforms within it as its nodes have resolved them."""
        if isinstance(node, ChainNode):
            return named_chain((names[0], self._resolved(child)) for names, child in self._entries(node))
        if isinstance(node, Around):
            inner = iter(node.inner)
            return node.tx.with_children(lambda _: self._resolved(next(inner)))
        return resolve_within(node.tx, node.like) if node.tx.children else node.tx

    def _child_for(self, node: Node, tx: Transform, params: PyTree) -> Node:
        """Return the node of a called transform, lowered again if its leaves differ from the leaves of its `init`."""
        return node if tuple(tree.names(params)) == node.names else self.program(tx, params)

    def _parameters_of(self, key: object, state: PyTree, params: PyTree) -> list[str | None]:
        """Return the parameter that each leaf of a state belongs to, cached by structure."""
        at = (key, tuple(tree.names(params)), len(tree.leaves(state)))
        if at not in self._parameters:
            self._parameters[at] = parameters_of(state, params)
        return self._parameters[at]

    def _own_state(self, node: Around) -> tuple[Structure, list[bool]]:
        """Return the structure of a wrapper's state, and which of its leaves stand for states of called transforms."""
        if node.number not in self._own_states:
            leaves, treedef = tree.flatten(state_around(node.tx, node.like)[0])
            self._own_states[node.number] = treedef, [isinstance(leaf, Placeholder) for leaf in leaves]
        return self._own_states[node.number]

    def _keeps_leaf_state(self, node: Node) -> bool:
        """Return True if a transform's state has moving leaves (see `buckets`)."""
        if node.number not in self._keeps_leaves:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                own = node.tx.functions.init(node.like)
            pairs = zip(tree.leaves(own), parameters_of(own, node.like), strict=True)
            self._keeps_leaves[node.number] = any(moves(leaf, name) for leaf, name in pairs)
        return self._keeps_leaves[node.number]

    @property
    def _plain(self) -> Executor:
        """An executor with a resident state, for nodes whose state is loaded at once."""
        if self._at_hand is None:
            self._at_hand = Executor(self.placement)
        return self._at_hand

    @property
    def _store_at_once(self) -> Store:
        """The store for states loaded at once: over ranks it computes on the updates' device, which can communicate."""
        return self.store if self.placement.size == 1 else self.store.computing_with_updates()

    def _store_for(self, *, on_meta: bool) -> Store:
        return RESIDENT if on_meta else self.store

    def _warn_of_bringing(self, node: Node, call: Arguments) -> None:
        tx = node.tx
        if tx.name in self._warned:
            return
        self._warned.add(tx.name)
        parameters = self._parameters_of(node.number, call.state, call.updates)
        nbytes = sum(sizes_of([name for name in parameters if name is not None], call.state, parameters).values())
        warnings.warn(
            f"{tx.name} looks at the whole tree and keeps a state of its own like the parameters, so all of that, "
            f"{nbytes / 2**20:.1f} MiB, is brought in at once at every step: offload the transforms around it instead, "
            "or declare its locality",
            stacklevel=2,
        )


class _Bound(NamedTuple):
    """A node and the executor that runs it."""

    executor: Executor
    node: Node


def _functions(tx: Transform, bound: _Bound) -> InitAndUpdate:
    """Return functions that run the bound node in its executor."""

    def init(params: PyTree) -> PyTree:
        return bound.executor.init_node(bound.executor._child_for(bound.node, tx, params), tx, params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING, **extras: Any):
        node = bound.executor._child_for(bound.node, tx, updates if params is None else params)
        return bound.executor.update_node(node, tx, Arguments(updates, state, params, donate, extras))

    return init, update


@stand_in
def _executed(tx: Transform, bound: Any):
    """Replace a called transform: each call runs the bound node in the executor."""
    return _functions(tx, bound)


@stand_in
def _executed_in_store(tx: Transform, bound: Any):
    """Replace a called transform whose state is offloaded; it names the extra with which `run_if` does not select."""
    init, run = _functions(tx, bound)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, only_if: Tensor | None = None, **extras: Any
    ) -> tuple[PyTree, PyTree]:
        if only_if is not None and not bool(only_if):
            return updates, state
        return run(updates, state, params, **extras)

    return init, update


def _joined(before: _Span, names: tuple[str, ...], child: Node) -> Node:
    """Join two neighbouring units to one node."""
    first = before.node
    known = first.entries if isinstance(first, _Joined) else ((before.names, first),)
    entries = (*known, (names, child))
    tx = named_chain([(own[0], node.tx) for own, node in entries])
    keeps = all(node.keeps_numbers for _, node in entries)
    return _Joined(tx, first.names, first.state, first.numbers, first.like, keeps, entries)


class _Joined(ChainNode):
    """Neighbouring units of a chain that run as one node."""


def with_numbers_on(device: torch.device, tx: Transform) -> Transform:
    """Copy tensor numbers to the compute device if that device is the CPU."""
    strange = [leaf for leaf in tree.tensors(tx) if leaf.device != device]
    if not strange or device.type != "cpu":
        return tx
    return tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tx)
