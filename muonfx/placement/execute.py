"""The executor, which runs programs in one process, over ranks, in a torch optimizer, and with offloaded state.

A program is the tree of nodes to which a transform was lowered. A `Placement` says which shard of each parameter this
rank holds, and communicates with other ranks. A `Store` keeps the state between steps: on the device of the
parameters, in host memory, or on disk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, Transform
from muonfx.core.combine import is_new
from muonfx.core.contract import NOTHING, sum_over_leaves
from muonfx.core.recorded import with_numbers
from muonfx.placement.buckets import (
    BucketedState,
    can_be_shared_out,
    cut_into_buckets,
    init_in_store,
    moves,
    parameters_of,
    sizes_of,
    store_away,
    stored_again,
)
from muonfx.placement.lower import OwnState, Span, lower_node, resolved, spans_of, stand_in
from muonfx.placement.nodes import Around, ChainNode, Node, Stage, WholeTree
from muonfx.placement.placement import SINGLE_PROCESS, Arguments, Once, Placement, Run, device_of
from muonfx.placement.store import IN_MEMORY, Store
from muonfx.polar import Workspace
from muonfx.tree import PyTree

__all__ = ["Executor"]

Now = Transform | tuple[Transform, ...]
"""The transform from which a node was lowered, with its current numbers; a tuple for several members of a chain."""

MOST_PROGRAMS = 64
"""The size at which the cache of programs is cleared: a chain that is recreated in each step may be new each time."""


class Executor:
    """Runs transforms on trees of parameters. It caches the program of each transform, to lower it only once."""

    def __init__(
        self, placement: Placement = SINGLE_PROCESS, store: Store = IN_MEMORY, bucket_bytes: int | None = None
    ) -> None:
        # bucket_bytes: parameter bytes per bucket, if the state is not offloaded; None: one bucket
        self.placement, self.store, self.bucket_bytes = placement, store, bucket_bytes
        self._is_resident = store == IN_MEMORY
        self._programs: dict[Any, list[Node]] = {}
        self._current: dict[int, tuple[tuple[Transform, ...], Transform]] = {}
        self._once = Once()
        self._extras: Mapping[str, Any] = {
            "workspace": Workspace(),
            "shard": placement.shard,
            "max_over_ranks": placement.max_over_ranks,
            "sum_over_leaves": placement.sum_over_leaves,
        }

    def program(self, tx: Transform, params: PyTree) -> Node:
        """Return the program of a transform, as its root node. The first call for a set of parameters builds it."""
        key = (tx.treedef, tuple(tree.names(params)))
        for known in self._programs.get(key, ()):
            if self.placement.fits(known.like, params):
                return known
        if len(self._programs) >= MOST_PROGRAMS:
            for cache in (self._programs, self._current, self._once.found):
                cache.clear()
        made = lower_node(tx, self.placement.global_like(params))
        self._programs.setdefault(key, []).append(made)
        return made

    def require_room(self, state: PyTree, params: PyTree, donate: Donation) -> None:
        """Raise OSError if the state is on a disk without enough space for a second copy, the next state."""
        if not self._is_resident and self.store.on_disk:
            device = device_of(params)
            pairs = zip(tree.leaves(state), parameters_of(state, params), strict=True)
            moving = [leaf for leaf, name in pairs if moves(leaf, name)]
            self.store.require([tree.spec(x) for x in moving if not (donate.state and self.store.has(x, device))])

    # ------------------------------------------------------------------------------------------------------- init

    def init(self, tx: Transform, params: PyTree) -> PyTree:
        """Return the initial state of a transform. `params` has the local tensors of this rank."""
        return self.init_node(self.program(tx, params), tx, params)

    def init_node(self, node: Node, now: Now, params: PyTree) -> PyTree:
        """Return the initial state for one node of a program. If the local tensors are on meta, ranks send nothing."""
        device = device_of(params)
        store = IN_MEMORY if device.type == "meta" else self.store
        if isinstance(node, ChainNode) and not self._is_unit(node):
            state: dict[str, PyTree] = {}
            for span in self._spans_of(node):
                found = self.init_node(span.node, _members(now)[span.at], params)
                state |= {span.names[0]: found} if len(span.names) == 1 else found
            return state
        if isinstance(node, Stage) and not self._is_unit(node):
            return self.placement.init_stage(node, self._run_of(node, now), params, store)
        tx = self._transform(node, now)
        if isinstance(node, WholeTree) and not self.placement.holds_all:
            self.placement.warn_of_gathering(node.tx, params)
            on_meta = device.type == "meta"
            return tx.functions.init(self.placement.global_like(params) if on_meta else self.placement.gather(params))
        if store == IN_MEMORY:
            return tx.functions.init(params)
        if self._is_unit(node):
            return init_in_store(store, tx.functions.init, params)
        if isinstance(node, Around):
            own_state = self._own_state(node)
            own, called = own_state.split(tx.functions.init(params))
            return own_state.merge(store_away(store, device, own, parameters_of(own, params)), called)
        state = tx.functions.init(params)
        parameters = parameters_of(state, params)
        nbytes = sum(sizes_of(tree.names(params), state, parameters).values())
        if not nbytes:
            return state
        if not store.is_direct(device):
            warnings.warn(
                f"offload: {tx.name} has the locality TREE and a state of the size of the parameters, so its whole "
                f"state ({nbytes / 2**20:.1f} MiB) is loaded in each step instead of bucket by bucket: declare a "
                f"smaller locality, or do not offload {tx.name}",
                stacklevel=2,
            )
        return store_away(store, device, state, parameters)

    # ----------------------------------------------------------------------------------------------------- update

    def update(self, tx: Transform, call: Arguments) -> tuple[PyTree, PyTree]:
        """Run one step of a transform. Return the updates and the next state. All ranks call this together.

        If the call has a function `apply`, it adds the updates to the parameters. Then ignore the returned updates.
        """
        return self.update_node(self.program(tx, call.like), tx, call)

    def update_node(self, node: Node, now: Now, call: Arguments) -> tuple[PyTree, PyTree]:
        """Run one step of one node of a program. Return its updates and its next state, as `update` does."""
        return self._update(node, now, call._replace(extras={**self._extras, **call.extras}))

    def _update(self, node: Node, now: Now, call: Arguments) -> tuple[PyTree, PyTree]:
        is_unit = self._is_unit(node)
        if isinstance(node, ChainNode) and not is_unit:
            return self._update_chain(node, now, call)
        if isinstance(node, Stage) and not is_unit:
            out, after = self.placement.update_stage(node, self._run_of(node, now), call)
        elif isinstance(node, WholeTree) and not self.placement.holds_all:
            gather = self.placement.gather
            whole = call._replace(updates=gather(call.updates), params=gather(call.params), donate=NOTHING)
            here = {"sum_over_leaves": sum_over_leaves, "shard": SINGLE_PROCESS.shard}
            out, after = whole.run(self._transform(node, now), **here)
            out = self.placement.shard(out)
        else:
            tx = self._transform(node, now)
            if not (is_unit or self._is_resident):
                return self._update_at_once(node, tx, call)
            if is_unit and (buckets := self._buckets(node, call)) is not None:
                return self._in_buckets(node, tx.run, buckets, call, self.store)
            out, after = call.run(tx)
        call.finish(out)
        return out, after

    def _update_chain(self, node: ChainNode, now: Now, call: Arguments) -> tuple[PyTree, PyTree]:
        """Run the transforms of a chain one after another. Return the last updates, and the state of each by name."""
        after: dict[str, PyTree] = {}
        updates, may_write = call.updates, call.donate.updates
        spans, members = self._spans_of(node), _members(now)
        for span in spans:
            is_last, is_one = span is spans[-1], len(span.names) == 1
            given = call._replace(
                updates=updates,
                state=call.state[span.names[0]] if is_one else {name: call.state[name] for name in span.names},
                donate=Donation(may_write, call.donate.state),
                apply=call.apply if is_last else None,
            )
            out, new = self._update(span.node, members[span.at], given)
            after |= {span.names[0]: new} if is_one else new
            if not is_last:
                # Nothing else holds new tensors of a transform that follows `Donation`, so the next may overwrite them.
                promised = call.donate.state and span.node.tx.keeps_donation_promise
                may_write = promised and (may_write or is_new(out, updates))
            updates = out
        return updates, {name: after[name] for name in call.state}

    # ---------------------------------------------------------------------------------------------------- buckets

    def _buckets(self, node: Node, call: Arguments) -> list[list[str]] | None:
        """Split the names of the leaves into buckets to update in turn. Return None to update all leaves at once."""
        if not self._is_resident:
            present = [name for name, leaf in tree.named_leaves(call.updates) if leaf is not None]
            sizes = sizes_of(present, call.state, self._parameters_of(node, call))
            buckets = cut_into_buckets(sizes, self.store.bucket_bytes)
        elif self.bucket_bytes is not None and call.params is not None:
            buckets = self._buckets_of(node, self.bucket_bytes)
        else:
            return None
        if len(buckets) > 1 and can_be_shared_out(tree.leaves(call.state), self._parameters_of(node, call)):
            return buckets
        return None if self._is_resident else [tree.names(call.updates)]

    def _buckets_of(self, node: Node, limit: int) -> list[list[str]]:
        return self._once(("buckets", node.number), lambda: _buckets_by_shape(node.like, limit))

    def _in_buckets(
        self,
        node: Node,
        run: Callable[..., tuple[PyTree, PyTree]],
        buckets: list[list[str]],
        call: Arguments,
        store: Store,
    ) -> tuple[PyTree, PyTree]:
        """Call `run` (a transform's update) for each bucket of parameters in turn. Return all updates and the state."""
        leaves, treedef = tree.flatten(call.updates)
        names = tree.names(call.updates)
        parameters = self._parameters_of(node, call)
        results: dict[str, Any] = {}
        with BucketedState(store, call.device, call.state, parameters, buckets, call.donate) as bucketed:
            for turn, bucket in enumerate(buckets):
                mine = set(bucket)
                some = [leaf if name in mine else None for name, leaf in zip(names, leaves, strict=True)]
                updates = tree.unflatten(treedef, some)
                out = bucketed.run(turn, run, updates, call.params, call.extras, may_write=call.donate.updates)
                if call.apply is None:
                    results |= {n: leaf for n, leaf in zip(names, tree.leaves(out), strict=True) if n in mine}
                call.finish(out)
                del some, updates, out  # free them before the next bucket
        return tree.unflatten(treedef, [results.get(name) for name in names]), bucketed.end()

    def _update_at_once(self, node: Node, tx: Transform, call: Arguments) -> tuple[PyTree, PyTree]:
        """Call a transform once with all leaves. Load its offloaded state before, and write the new state back."""
        store = self.store
        everything = [tree.names(call.updates)]
        if not isinstance(node, Around):
            keeps_state = any(map(moves, tree.leaves(call.state), self._parameters_of(node, call)))
            return self._in_buckets(node, tx.run, everything, call, store if keeps_state else IN_MEMORY)
        own_state = self._own_state(node)
        own, called = own_state.split(call.state)
        device = call.device

        def run(updates: PyTree, state: PyTree, params: PyTree, *, donate: Donation, **extras: Any) -> Any:
            # The loaded copies may be overwritten, but the states of called transforms belong to the caller.
            donate = Donation(donate.updates, call.donate.state)
            out, after = tx.run(updates, own_state.merge(state, called), params, donate=donate, **extras)
            after, new = own_state.split(after)
            pairs = zip(called, new, strict=True)
            called[:] = [stored_again(store, device, old, part, call.donate) for old, part in pairs]
            return out, after

        out, own = self._in_buckets(node, run, everything, call._replace(state=own), store)
        return out, own_state.merge(own, called)

    # ----------------------------------------------------------------------------------------- cached by structure

    def prepare(self, node: Node, now: Now) -> None:
        """Do all Python work of a node ahead: build and cache its transforms, so that a traced step only runs them."""
        node.tx.prepare_all()
        is_unit = self._is_unit(node)
        if isinstance(node, ChainNode) and not is_unit:
            for span in self._spans_of(node):
                self.prepare(span.node, _members(now)[span.at])
        elif isinstance(node, Stage) and not is_unit:
            self._run_of(node, now)
        else:
            made = self._transform(node, now).prepare_all()
            if is_unit and self._is_resident and self.bucket_bytes is not None:
                self._buckets_of(node, self.bucket_bytes)
            if isinstance(node, Around) and not is_unit:
                # With the transforms that `made` will call, because the cache compares them by identity.
                for child, inner in zip(node.children, made.children, strict=True):
                    self.prepare(child, inner.arguments["tx"])

    def _is_unit(self, node: Node) -> bool:
        """Return True if a node can run on one bucket of parameters at a time, without the others."""
        return node.tx.locality <= (Locality.LEAF if self.placement.holds_all else Locality.ELEMENT)

    def _spans_of(self, node: ChainNode) -> list[Span]:
        return self._once(("spans", node.number), lambda: spans_of(node, self._is_unit))

    def _own_state(self, node: Around) -> OwnState:
        return self._once(("own state", node.number), lambda: OwnState.of(node.tx, node.like))

    def _run_of(self, stage: Stage, now: Now) -> Run:
        parts = now if isinstance(now, tuple) else (now,)
        pairs = zip(stage.members, parts, strict=True)
        return tuple((member.name, self._transform(member.node, part)) for member, part in pairs)

    def _transform(self, node: Node, now: Now) -> Transform:
        """Return the transform to run for a node. Rebuild it only if a hyperparameter changed since the last call."""
        parts = now if isinstance(now, tuple) else (now,)
        known = self._current.get(node.number)
        if known is not None and all(map(is_, known[0], parts)):
            return known[1]
        if node.keeps_numbers:
            base = self._base(node) if known is None else known[1]
            made = with_numbers(base, iter([number for part in parts for number in tree.leaves(part)]))
        else:
            (part,) = parts
            made = self._base(lower_node(part, node.like))
        self._current[node.number] = parts, made
        return made

    def _base(self, node: Node) -> Transform:
        if self._is_unit(node):
            return resolved(node)
        if isinstance(node, Around):
            inner = iter(node.children)
            executed = _executed if self._is_resident else _executed_in_store
            return node.tx.with_children(lambda child: executed(child, _Bound(self, next(inner))))
        return node.tx

    def _parameters_of(self, node: Node, call: Arguments) -> list[str | None]:
        """Return a list with the parameter name, or None, to which each tensor of a node's state belongs."""
        key = ("parameters", node.number, tuple(tree.names(call.updates)), len(tree.leaves(call.state)))
        return self._once(key, lambda: parameters_of(call.state, call.updates))


def _buckets_by_shape(params: PyTree, limit: int) -> list[list[str]]:
    """Split parameter names into lists of at most `limit` bytes. Equal shapes are neighbours, to form batches."""
    present = [(name, leaf) for name, leaf in tree.named_leaves(params) if leaf is not None]
    named = sorted(present, key=lambda pair: tuple(pair[1].shape))
    return cut_into_buckets({name: leaf.nbytes for name, leaf in named}, limit)


def _members(now: Now) -> tuple[Transform, ...]:
    return now if isinstance(now, tuple) else now.children


class _Bound(NamedTuple):
    """The executor, and the node of a program that it runs when a wrapper calls the node's transform."""

    executor: Executor
    node: Node

    def fitting(self, tx: Transform, params: PyTree) -> Node:
        """Return the stored node if it is for the parameters in `params`. Otherwise return a new node for them."""
        return self.node if tuple(tree.names(params)) == self.node.names else self.executor.program(tx, params)


@stand_in
def _executed(tx: Transform, bound: Any):
    executor: Executor = bound.executor

    def init(params: PyTree) -> PyTree:
        return executor.init_node(bound.fitting(tx, params), tx, params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING, **extras: Any):
        call = Arguments(updates, state, params, donate, extras)
        return executor.update_node(bound.fitting(tx, call.like), tx, call)

    return init, update


@stand_in
def _executed_in_store(tx: Transform, bound: Any):
    init, run = _executed.definition.constructor(tx, bound)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, only_if: Tensor | None = None, **extras: Any
    ) -> tuple[PyTree, PyTree]:
        if only_if is not None and not bool(only_if):
            return updates, state
        return run(updates, state, params, **extras)

    return init, update
