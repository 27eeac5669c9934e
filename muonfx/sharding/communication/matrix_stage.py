"""Run neighbouring transforms that need whole matrices (a *run*) on sharded parameters.

Each matrix is gathered on one rank, its owner, updated there once, and scattered back. A *share* is a set of whole
matrices of one parameter that one owner computes. A *bucket* is a list of shares that are sent together. While one
bucket is computed, the matrices of the next bucket are being sent.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.placement.arguments import Arguments, device_of
from muonfx.placement.buckets import BucketedState, init_in_buckets
from muonfx.placement.store import IN_MEMORY, Store
from muonfx.sharding.communication.collectives import start_exchange
from muonfx.sharding.communication.messages import copied
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import RunPlan
from muonfx.sharding.plan.cost import Run
from muonfx.sharding.plan.shares import Moves
from muonfx.sharding.shards.dtensors import map_named
from muonfx.sharding.shards.position import Window
from muonfx.tree import PyTree


class _Bucket(NamedTuple):
    """The messages of this rank for a bucket, without the matrices whose gradient is None. No step changes them."""

    moves: list[Moves]
    kept: list[Moves]
    """The matrices that this rank computes and already holds."""
    gathered: list[str]
    """The parameters whose matrices are gathered on their owners."""
    outgoing: list[list[tuple[str, Window]]]
    """For each rank, the parts of this rank's shards to send to it, by parameter name."""
    expected: list[int]
    """For each rank, the number of elements that it sends to this rank."""
    received: list[Moves]
    """The matrices that this rank gathers and computes."""
    alike: list[list[Moves]]
    """The same matrices, in groups of one shape whose parts come from shards at the same positions."""
    stored: list[Moves]
    """The matrices that this rank computes and no other rank needs."""
    returned: list[Moves]
    """The matrices whose results are sent to other ranks."""
    taken: list[int]
    """For each rank, the number of elements of results that it sends to this rank."""

    @classmethod
    def of(cls, moves: list[Moves], size: int) -> _Bucket:
        """Build the messages for some matrices between `size` ranks."""
        gathered = [one for one in moves if one.share.needs_gather]
        returned = [one for one in moves if one.share.needs_send]
        outgoing: list[list[tuple[str, Window]]] = [[] for _ in range(size)]
        expected, taken = [0] * size, [0] * size
        for one in gathered:
            assert one.share.owner is not None
            if one.sends:
                outgoing[one.share.owner] += [(one.share.name, window) for window in one.held]
            for transfer, _ in one.transfers:
                expected[transfer.sender] += transfer.numel
        for one in returned:
            assert one.share.owner is not None
            taken[one.share.owner] += one.numel
        received = [one for one in gathered if one.computes]
        return cls(
            moves,
            [one for one in moves if one.computes and not one.share.needs_gather],
            [one.share.name for one in gathered],
            outgoing,
            expected,
            received,
            _grouped_by_windows(received),
            [one for one in moves if one.computes and not one.share.needs_send],
            returned,
            taken,
        )


def _grouped_by_windows(received: list[Moves]) -> list[list[Moves]]:
    groups: dict[Hashable, list[Moves]] = {}
    for moves in received:
        windows = tuple([windows for _, windows in moves.transfers])
        is_whole = moves.share.shape == moves.share.whole
        groups.setdefault((moves.share.shape, is_whole, windows), []).append(moves)
    return list(groups.values())


def _buckets_of(plan: RunPlan, local: Mapping[str, Any]) -> list[_Bucket]:
    """Return the messages for each bucket that has matrices to compute, and at least one bucket."""
    absent = frozenset([name for name, leaf in local.items() if leaf is None])
    known: dict[frozenset[str], list[_Bucket]] = plan.messages
    if absent not in known:
        known.clear()  # only the messages of the last step are kept: most steps have the same gradients
        present = [[moves for moves in bucket if moves.share.name not in absent] for bucket in plan.moves]
        known[absent] = [_Bucket.of(moves, plan.size) for moves in list(filter(None, present)) or [[]]]
    return known[absent]


def init_run(plan: RunPlan, run: Run, tx: Transform, layout: Layout, params: PyTree, store: Store) -> PyTree:
    """Return this rank's initial state for neighbouring transforms that need whole matrices (a run)."""
    if store == IN_MEMORY:
        return _init(plan, run, tx, layout, params)
    seen: set[str] = set()
    buckets: list[list[str]] = []
    for bucket in plan.buckets:
        names = dict.fromkeys(plan.shares[i].name for i in bucket)
        buckets.append([name for name in names if name not in seen])
        seen |= set(names)
    buckets.append(list(dict.fromkeys(share.name for share in plan.shares if share.name not in seen)))
    return init_in_buckets(store, buckets, params, lambda some: _init(plan, run, tx, layout, some), outside=None)


def _init(plan: RunPlan, run: Run, tx: Transform, layout: Layout, params: PyTree) -> PyTree:
    """Return the initial state for the matrices that this rank computes; it is None for all other matrices."""
    leaves, treedef = tree.flatten(params)
    mine = [share for share in plan.shares if share.owner in (None, layout.rank)]
    by_name = dict(tree.named_leaves(params))
    reads = any(part.reads_params for _, part in run)
    on_meta = any(leaf.is_meta for leaf in leaves if leaf is not None)
    given: dict[str, Tensor] = {}
    if reads and not on_meta:
        for bucket in _buckets_of(plan, by_name):
            given.update(_send_to_owners(plan, layout, bucket, by_name, as_given=True)[1]())
    else:
        for share in mine:
            if (like := by_name[share.name]) is not None:
                # `init` has declared that it does not read these values; if it does, the state becomes NaN.
                nowhere = torch.full((), math.nan, dtype=like.dtype, device=like.device)
                given[share.name] = nowhere.expand(share.shape)
    state = tx.functions.init(tree.unflatten(treedef, [given.get(name) for name in by_name]))
    return _with_missing_leaves(state, tx, plan, params)


def _with_missing_leaves(state: PyTree, tx: Transform, plan: RunPlan, params: PyTree) -> PyTree:
    """Add a leaf None to a state for each parameter whose matrices this rank does not hold."""
    shapes = {name: spec.shape for name, spec in plan.specs.items()} | {
        share.name: share.shape for share in plan.shares
    }
    meta = map_named(lambda name, leaf: torch.empty(shapes[name], dtype=leaf.dtype, device="meta"), params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = tx.functions.init(meta)
    if tree.flatten(whole)[1] == tree.flatten(state)[1]:
        return state
    found = dict(zip(tree.paths(state), tree.leaves(state), strict=True))
    return tree.unflatten(tree.flatten(whole)[1], [found.get(path) for path in tree.paths(whole)])


def update_run(
    plan: RunPlan,
    run: Run,
    tx: Transform,
    layout: Layout,
    call: Arguments,
    store: Store,
    parameters: Callable[[], list[str | None]],
) -> tuple[PyTree, PyTree]:
    """Run one step of transforms that need whole matrices. Return this rank's updates and the next state.

    All ranks call this together. `parameters` returns, for each leaf of the state, the name of its parameter or None.
    """
    updates, state, params, donate, extras = call
    leaves, treedef = tree.flatten(updates)
    names = tree.names(updates)
    local = dict(zip(names, leaves, strict=True))
    reads = params is not None and any(part.reads_params for _, part in run)
    weights = dict(zip(names, tree.leaves(params), strict=True)) if reads else {}
    buckets = _buckets_of(plan, local)
    bucketed: BucketedState | None = None
    if len(buckets) > 1 or store != IN_MEMORY:
        device = device_of(updates, params)
        mine = [[moves.share.name for moves in bucket.moves if moves.computes] for bucket in buckets]
        bucketed = BucketedState(store, device, state, parameters(), mine, donate)

    def begin(bucket: _Bucket) -> tuple[bool, _Wait, _Wait]:
        fresh, wait = _send_to_owners(plan, layout, bucket, local)
        return fresh, wait, _send_to_owners(plan, layout, bucket, weights, as_given=True)[1] if weights else dict

    def tree_of(values: Mapping[str, Tensor]) -> PyTree:
        return tree.unflatten(treedef, [values.get(name) for name in names])

    results = {name: leaf for name, leaf in local.items() if leaf is not None and not leaf.numel()}
    begun = [begin(buckets[0])]
    receive: Callable[[], None] | None = None
    with bucketed or nullcontext():
        for turn, bucket in enumerate(buckets):
            fresh, wait, wait_for_weights = begun.pop()
            given, values = tree_of(wait()), wait_for_weights()
            begun += [begin(following) for following in buckets[turn + 1 : turn + 2]]
            params = tree_of(values) if reads else None
            may_write = donate.updates or fresh
            if bucketed is None:
                out, state = tx.run(given, state, params, donate=Donation(may_write, donate.state), **extras)
            else:
                out = bucketed.run(turn, tx.run, given, params, extras, may_write=may_write)
            done = dict(zip(names, tree.leaves(out), strict=True))
            del given, values, params, out, wait, wait_for_weights
            if receive is not None:
                receive()  # first, so that this bucket's results reuse its memory
            receive = _return_results(plan, layout, bucket, done, local, results)
            del done
    if receive is not None:
        receive()
    out = tree.unflatten(treedef, [None if leaf is None else results[name] for name, leaf in local.items()])
    return out, state if bucketed is None else bucketed.end()


_Wait = Callable[[], dict[str, Tensor]]
"""A function that waits until this rank has received its matrices, and returns them by parameter name."""


def _send_to_owners(
    plan: RunPlan, layout: Layout, bucket: _Bucket, local: Mapping[str, Any], *, as_given: bool = False
) -> tuple[bool, _Wait]:
    """Start to send a bucket of matrices to the ranks that compute them, their owners.

    Return a bool and a function that waits for this rank's matrices. The bool is True if these are in new memory, which
    may be overwritten. With `as_given`, messages keep the dtype of the local tensors.
    """
    here = {moves.share.name: _held_matrices(moves, local[moves.share.name]) for moves in bucket.kept}
    if not bucket.gathered:  # all ranks decide identically
        return not here, lambda: here
    dtypes = {local[name].dtype for name in bucket.gathered}
    wire = functools.reduce(torch.promote_types, dtypes if as_given else [plan.wire_dtypes(d)[0] for d in dtypes])
    outgoing = [[window.of(local[name]) for name, window in windows] for windows in bucket.outgoing]
    device = local[bucket.gathered[0]].device
    exchange = start_exchange(layout, outgoing, bucket.expected, wire, device, "gathering matrices")

    def wait() -> dict[str, Tensor]:
        incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
        views_of: dict[str, list[Tensor]] = {}
        for alike in bucket.alike:
            for dtype in dict.fromkeys([local[moves.share.name].dtype for moves in alike]):
                same_dtype = [moves for moves in alike if local[moves.share.name].dtype == dtype]
                # A single transform that rounds first can compute in the wire dtype; a longer run needs its own dtype.
                room_dtype = dtype if as_given or len(plan.run) > 1 else plan.wire_dtypes(dtype)[0]
                _allocate(same_dtype, room_dtype, device, here, views_of)
        for moves in bucket.received:
            senders = [transfer.sender for transfer, windows in moves.transfers for _ in windows]
            for sender, view in zip(senders, views_of[moves.share.name], strict=True):
                incoming[sender].append(view)
        exchange.wait(incoming)
        return here

    return not here, wait


def _allocate(
    alike: list[Moves],
    dtype: torch.dtype,
    device: torch.device,
    rooms: dict[str, Tensor],
    views_of: dict[str, list[Tensor]],
) -> None:
    """Allocate memory in which to receive matrices of one shape, whose parts are at the same positions in each.

    Write the memory of each matrix to `rooms`, and the views of its parts to `views_of`, by parameter name.
    """
    share = alike[0].share
    stack = torch.empty((len(alike), *share.shape), dtype=dtype, device=device)
    names = [moves.share.name for moves in alike]
    rooms.update(zip(names, stack.unbind(), strict=True))
    flat = stack if share.shape == share.whole else stack.reshape(len(alike), -1)
    windows = [window for _, windows in alike[0].transfers for window in windows]
    views_of.update({name: [] for name in names})
    for window in windows:
        for name, view in zip(names, window.of_each(flat), strict=True):
            views_of[name].append(view)


def _held_matrices(moves: Moves, tensor: Tensor) -> Tensor:
    """Return the matrices that this rank computes and has in its own shard, as a view of it if possible."""
    share = moves.share
    if moves.is_all:
        return tensor.reshape(share.shape)
    if len(moves.held) == 1:
        return moves.held[0].of(tensor).reshape(share.shape)
    room = tensor.new_empty(share.shape)
    for window, place in zip(moves.held, moves.within, strict=True):
        place.of(share.local(room)).copy_(window.of(tensor))
    return room


def _return_results(
    plan: RunPlan,
    layout: Layout,
    bucket: _Bucket,
    done: Mapping[str, Tensor | None],
    local: Mapping[str, Any],
    results: dict[str, Tensor],
) -> Callable[[], None]:
    """Start to send computed matrices back. Return a function that waits until this rank has its shards of them.

    `done` has the matrices that this rank computed, by parameter name. Shards are written to the dict `results`.
    """
    for moves in bucket.stored:
        if (result := done[moves.share.name]) is not None:
            _store_result(moves, result, local[moves.share.name], results)
    if not bucket.returned:
        return lambda: None
    outgoing: list[list[Tensor]] = [[] for _ in range(layout.size)]
    incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
    for moves in bucket.returned:
        share = moves.share
        if moves.computes and (result := done[share.name]) is not None:
            own = share.local(result)
            for transfer, windows in moves.transfers:
                parts = [window.of(own) for window in windows]
                for rank in transfer.ranks:
                    outgoing[rank] += parts
        assert share.owner is not None
        incoming[share.owner] += _result_views(moves, local[share.name], results)
    first = local[bucket.returned[0].share.name]
    wires = [plan.wire_dtypes(dtype)[1] for dtype in {local[moves.share.name].dtype for moves in bucket.returned}]
    wire = functools.reduce(torch.promote_types, wires)
    exchange = start_exchange(layout, outgoing, bucket.taken, wire, first.device, "returning matrices")
    return lambda: exchange.wait(incoming)


def _store_result(moves: Moves, result: Tensor, like: Tensor, results: dict[str, Tensor]) -> None:
    if moves.is_all:
        straight = result.reshape(like.shape).to(like.dtype)
        # An unchanged update stays the same tensor object, so that callers do not treat it as new and writable.
        same = straight.data_ptr() == like.data_ptr() and straight.stride() == like.stride()
        results[moves.share.name] = like if same and like.numel() else straight
    else:
        own = moves.share.local(result)
        copied([place.of(own) for place in moves.within], _result_views(moves, like, results))


def _result_views(moves: Moves, like: Tensor, results: dict[str, Tensor]) -> list[Tensor]:
    if not moves.held:
        return []
    name = moves.share.name
    if name not in results:
        results[name] = torch.empty_like(like, memory_format=torch.contiguous_format)
    return [window.of(results[name]) for window in moves.held]
