"""A run of matrix transforms on shards.

Each matrix is gathered on one rank, its owner, updated there once, and scattered back. While one bucket is computed,
the matrices of the next bucket are being sent.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform, chain
from muonfx.program.buckets import BucketedState, init_in_buckets, with_numbers_on
from muonfx.program.offload.store import Store
from muonfx.program.placement import Arguments, device_of
from muonfx.sharding.collectives import start_exchange
from muonfx.sharding.layout import Layout
from muonfx.sharding.messages import Exchange, copied
from muonfx.sharding.plan.assignment import RunPlan
from muonfx.sharding.plan.shares import Share
from muonfx.tree import PyTree

__all__ = ["init_run", "update_run"]


def init_run(
    plan: RunPlan, run: Sequence[tuple[str, Transform]], layout: Layout, params: PyTree, store: Store
) -> PyTree:
    """Return the state of a run, built bucket by bucket if the store does not keep state with the parameters."""
    if store.is_resident:
        return _init(plan, run, layout, params)
    seen: set[str] = set()
    buckets: list[list[str]] = []
    for bucket in plan.buckets:
        names = dict.fromkeys(plan.shares[i].name for i in bucket)
        buckets.append([name for name in names if name not in seen])
        seen |= set(names)
    buckets.append(list(dict.fromkeys(share.name for share in plan.shares if share.name not in seen)))
    return init_in_buckets(store, buckets, params, lambda some: _init(plan, run, layout, some), outside=None)


def _init(plan: RunPlan, run: Sequence[tuple[str, Transform]], layout: Layout, params: PyTree) -> PyTree:
    """Return the state of a run: on the owner of a share the state of its matrices, None elsewhere."""
    leaves, treedef = tree.flatten(params)
    names = tree.names(params)
    mine = [share for share in plan.shares if share.owner in (None, layout.rank)]
    by_name = dict(zip(names, leaves, strict=True))
    reads = any(tx.reads_params for _, tx in run)
    on_meta = any(leaf.is_meta for leaf in leaves if leaf is not None)
    given: dict[str, Tensor] = {}
    if reads and not on_meta:
        for bucket in plan.buckets:
            shares = [share for i in bucket if by_name[(share := plan.shares[i]).name] is not None]
            given.update(_send_to_owners(plan, layout, shares, by_name, as_given=True)[1]())
    else:
        for share in mine:
            if (like := by_name[share.name]) is not None:
                # `init` must not read these values: if it does, the state becomes NaN.
                nowhere = torch.full((), math.nan, dtype=like.dtype, device=like.device)
                given[share.name] = nowhere.expand(share.shape)
    tx = chain(*run)
    state = tx.functions.init(tree.unflatten(treedef, [given.get(name) for name in names]))
    return _completed(state, tx, plan, params)


def _completed(state: PyTree, tx: Transform, plan: RunPlan, params: PyTree) -> PyTree:
    """Fill a state with None up to the structure that it has if all leaves are present."""
    shapes = {name: spec.shape for name, spec in plan.specs.items()} | {
        share.name: share.shape for share in plan.shares
    }
    leaves, treedef = tree.flatten(params)
    meta = [
        None if leaf is None else torch.empty(shapes[name], dtype=leaf.dtype, device="meta")
        for name, leaf in zip(tree.names(params), leaves, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = tx.functions.init(tree.unflatten(treedef, meta))
    if tree.flatten(whole)[1] == tree.flatten(state)[1]:
        return state
    found = dict(zip(tree.paths(state), tree.leaves(state), strict=True))
    return tree.unflatten(tree.flatten(whole)[1], [found.get(path) for path in tree.paths(whole)])


def update_run(
    plan: RunPlan,
    run: Sequence[tuple[str, Transform]],
    tx: Transform,
    layout: Layout,
    call: Arguments,
    store: Store,
    parameters: Callable[[], list[str | None]],
) -> tuple[PyTree, PyTree]:
    """Update by a run; all ranks of the layout must call it together, with the same leaves present."""
    updates, state, params, donate, extras, _ = call
    treedef = tree.flatten(updates)[1]
    names = tree.names(updates)
    local = dict(zip(names, tree.leaves(updates), strict=True))
    reads = params is not None and any(part.reads_params for _, part in run)
    weights = dict(zip(names, tree.leaves(params), strict=True)) if reads else {}
    buckets = [
        shares
        for bucket in plan.buckets
        if (shares := [plan.shares[i] for i in bucket if local[plan.shares[i].name] is not None])
    ]
    results = _Results(layout, local)
    device = device_of(updates, params)
    if not store.is_resident:
        weights = {name: None if leaf is None else leaf.to(device) for name, leaf in weights.items()}
        tx = with_numbers_on(store.device(device), tx)
    mine = [[share.name for share in shares if share.owner in (None, layout.rank)] for shares in buckets]
    at_once = store.is_resident and len(buckets) <= 1
    of_leaves = [None] * len(tree.leaves(state)) if at_once else parameters()
    bucketed = BucketedState(store, device, state, of_leaves, mine, donate)

    def begin(shares: list[Share]) -> tuple[bool, Callable[[], dict[str, Tensor]], Callable[[], dict[str, Tensor]]]:
        fresh, wait = _send_to_owners(plan, layout, shares, local)
        return fresh, wait, _send_to_owners(plan, layout, shares, weights, as_given=True)[1] if weights else dict

    def tree_of(values: Mapping[str, Tensor]) -> PyTree:
        return tree.unflatten(treedef, [values.get(name) for name in names])

    buckets = buckets or [[]]
    begun = [begin(buckets[0])]
    receive: Callable[[], None] | None = None
    try:
        for turn, shares in enumerate(buckets):
            fresh, wait, wait_for_weights = begun.pop()
            given, values = wait(), wait_for_weights()
            begun += [begin(following) for following in buckets[turn + 1 : turn + 2]]
            out = bucketed.run(
                turn,
                tx.run,
                tree_of(given),
                bucketed.to_compute_device(tree_of(values)) if reads else None,
                extras,
                may_write=donate.updates or fresh,
            )
            done = dict(zip(names, tree.leaves(out), strict=True))
            del given, values, out, wait, wait_for_weights
            if receive is not None:
                receive()  # first, so that this bucket's results reuse its memory
            receive = _return_results(plan, layout, shares, done, results)
            del done
    except BaseException:
        bucketed.abandon()
        raise
    if receive is not None:
        receive()
    out = tree.unflatten(treedef, [None if local[name] is None else results.of[name] for name in names])
    return out, bucketed.end()


def _send_to_owners(
    plan: RunPlan,
    layout: Layout,
    shares: Sequence[Share],
    local: Mapping[str, Tensor | None],
    *,
    as_given: bool = False,
) -> tuple[bool, Callable[[], dict[str, Tensor]]]:
    """Start to send a bucket's matrices to their owners.

    Returns whether all matrices of this rank are new memory, and a function that waits for them and returns them by
    parameter name.
    """
    me = layout.rank
    message = _Message(layout)
    here: dict[str, Tensor] = {}
    mine: list[tuple[Share, torch.dtype, torch.device]] = []
    for share in shares:
        tensor = local[share.name]
        assert tensor is not None
        if not share.needs_gather:
            if share.owner in (None, me):
                here[share.name] = _held(share, layout, tensor)
            continue
        wire = tensor.dtype if as_given else plan.wire_dtypes(tensor.dtype)[0]
        message.includes(tensor, wire)
        if share.owner == me:
            # A single transform that rounds first can compute in the wire dtype; a longer run needs its own dtype.
            mine.append((share, wire if len(plan.run) == 1 else tensor.dtype, tensor.device))
        moves = share.moves(me)
        assert share.owner is not None
        if moves.sends:
            message.outgoing[share.owner] += [window.of(tensor) for window in moves.held]
        for transfer, _ in moves.transfers:
            message.expected[transfer.sender] += transfer.numel
    exchange = message.start("gathering matrices")

    def wait() -> dict[str, Tensor]:
        if exchange is not None:
            incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
            for share, dtype, device in mine:
                here[share.name] = room = torch.empty(share.shape, dtype=dtype, device=device)
                own = share.local(room)
                for transfer, windows in share.moves(me).transfers:
                    incoming[transfer.sender] += [window.of(own) for window in windows]
            exchange.wait(incoming)
        return here

    return not here, wait


def _return_results(
    plan: RunPlan, layout: Layout, shares: Sequence[Share], done: Mapping[str, Tensor | None], results: _Results
) -> Callable[[], None]:
    """Start to return a bucket's results from their owners; return a function that receives this rank's results."""
    me = layout.rank
    message = _Message(layout)
    incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
    for share in shares:
        result = done[share.name] if share.owner in (None, me) else None
        if not share.needs_send:
            if result is not None:
                results.put(share, result)
            continue
        like = results.like(share.name)
        message.includes(like, plan.wire_dtypes(like.dtype)[1])
        moves = share.moves(me)
        assert share.owner is not None
        if result is not None:
            own = share.local(result)
            for transfer, windows in moves.transfers:
                parts = [window.of(own) for window in windows]
                for rank in transfer.ranks:
                    message.outgoing[rank] += parts
        incoming[share.owner] += results.windows(share)
        message.expected[share.owner] += moves.numel
    exchange = message.start("returning matrices")
    return lambda: None if exchange is None else exchange.wait(incoming)


class _Message:
    """The tensors of an exchange and the numbers of elements to expect."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.outgoing: list[list[Tensor]] = [[] for _ in range(layout.size)]
        self.expected = [0] * layout.size
        self._wire: torch.dtype | None = None
        self._device: torch.device | None = None

    def includes(self, tensor: Tensor, wire: torch.dtype) -> None:
        """Record a tensor that some rank sends; all ranks record the same tensors."""
        self._wire = wire if self._wire is None else torch.promote_types(wire, self._wire)
        self._device = tensor.device

    def start(self, what: str) -> Exchange | None:
        """Start the exchange, or return None if there is nothing to send, which all ranks decide identically."""
        if self._wire is None or self._device is None:
            return None
        return start_exchange(self._layout, self.outgoing, self.expected, self._wire, self._device, what)


def _held(share: Share, layout: Layout, tensor: Tensor) -> Tensor:
    """Return a share that is whole in a local tensor, in the shape to compute in, as a view if possible."""
    moves = share.moves(layout.rank)
    if layout.piece(share.name).numel == share.numel:
        return tensor.reshape(share.shape)
    if len(moves.held) == 1:
        return moves.held[0].of(tensor).reshape(share.shape)
    room = tensor.new_empty(share.shape)
    for window, place in zip(moves.held, moves.within, strict=True):
        place.of(share.local(room)).copy_(window.of(tensor))
    return room


class _Results:
    """The new local tensors of a run."""

    def __init__(self, layout: Layout, local: Mapping[str, Tensor | None]) -> None:
        self._layout, self._local = layout, local
        self.of: dict[str, Tensor] = {
            name: leaf for name, leaf in local.items() if leaf is not None and leaf.numel() == 0
        }

    def like(self, name: str) -> Tensor:
        """Return the update that a result replaces."""
        found = self._local[name]
        assert found is not None
        return found

    def put(self, share: Share, result: Tensor) -> None:
        """Store this rank's part of a result that was computed on this rank."""
        like = self.like(share.name)
        if share.numel == like.numel():
            straight = result.reshape(like.shape).to(like.dtype)
            # An unchanged update stays the same tensor object, so that callers do not treat it as new and writable.
            same = straight.data_ptr() == like.data_ptr() and straight.stride() == like.stride()
            self.of[share.name] = like if same and like.numel() else straight
        else:
            own = share.local(result)
            copied([place.of(own) for place in share.moves(self._layout.rank).within], self.windows(share))

    def windows(self, share: Share) -> list[Tensor]:
        """Return views of this rank's part of a result."""
        moves = share.moves(self._layout.rank)
        room = self._room(share.name) if moves.held else None
        return [] if room is None else [window.of(room) for window in moves.held]

    def _room(self, name: str) -> Tensor:
        if name not in self.of:
            self.of[name] = torch.empty_like(self.like(name), memory_format=torch.contiguous_format)
        return self.of[name]
