"""Run neighbouring transforms that need whole matrices (a *run*) on sharded parameters.

Each matrix is gathered on one rank, its owner, updated there once, and scattered back. A *matrix shard* is a set of
whole matrices of one parameter that one owner computes. A *bucket* is a list of matrix shards that are sent together.
While one bucket is computed, the matrices of the next bucket are being sent.

Note: the tensors of the exchange
---------------------------------
A bucket passes through these tensors on P ranks, in this order. If the transforms read parameters, the parameters are
gathered in the same way as the updates, with messages of their own.

local shard
    This rank's shard of the update of a parameter, with the shape ``layout.position(name).shape``. It belongs to the
    caller and is only read.
send buffer
    One dim, in the wire dtype: the boxes of the local shards that other ranks need, one after another; first those for
    rank 0, then those for rank 1, and so on. ``bucket.outgoing`` lists the boxes as views of the local shards. The
    wire dtype is the dtype of the updates, or a narrower one to which the first transform rounds them anyway.
receive buffer
    One dim, in the wire dtype: ``bucket.expected[r]`` elements from each rank r, in the order of the ranks.
gathered stack
    On the owner, ``(n, *shard.shape)`` for the n matrix shards of one shape whose boxes are at the same positions: new
    memory, into which the boxes are copied from the receive buffer, and from this rank's own local shards.
gathered matrices
    On the owner, one entry of a gathered stack, with the shape ``shard.shape``: that of the parameter, or
    ``(count, rows, columns)`` for a range of a stack of matrices. If this rank already holds all of the matrices, they
    are a view of its local shard instead (or a copy, if its elements are in another order).
results
    On the owner, what the transforms return for the gathered matrices, with the same shape.
result send buffer, result receive buffer
    Like the buffers above, with boxes of the results, and ``bucket.expected_results[r]`` elements from each rank r. The
    wire dtype is the dtype of the updates, or a narrower one to which the last transform rounds them.
updated shard
    On every rank, the returned update, with the shape and dtype of the local shard. It is the result itself if the
    owner holds exactly these matrices and no other rank needs them.

The buffers belong to `Exchange`, which takes their memory from the layout.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.placement.arguments import Arguments, device_of
from muonfx.placement.buckets import BucketedState, init_in_buckets
from muonfx.placement.store import IN_MEMORY, Store
from muonfx.sharding.communication.messages import Exchange, copied
from muonfx.sharding.plan.assignment import RunPlan
from muonfx.sharding.plan.bucket import Bucket, buckets_of
from muonfx.sharding.plan.cost import Run
from muonfx.sharding.plan.matrix_shards import LocalTransfers
from muonfx.sharding.shards.dtensors import map_named
from muonfx.sharding.shards.table import ShardTable
from muonfx.tree import PyTree


def init_run(plan: RunPlan, run: Run, tx: Transform, layout: ShardTable, params: PyTree, store: Store) -> PyTree:
    """Return this rank's initial state for neighbouring transforms that need whole matrices (a run)."""
    if store == IN_MEMORY:
        return _init(plan, run, tx, layout, params)
    # A parameter whose matrices are in several buckets has one state: it belongs to the first of these buckets.
    seen: set[str] = set()
    names_of_bucket: list[list[str]] = []
    for bucket in plan.buckets:
        names = dict.fromkeys([plan.shards[index].name for index in bucket])
        names_of_bucket.append([name for name in names if name not in seen])
        seen.update(names)
    not_in_buckets = dict.fromkeys([shard.name for shard in plan.shards if shard.name not in seen])
    names_of_bucket.append(list(not_in_buckets))
    init = functools.partial(_init, plan, run, tx, layout)
    return init_in_buckets(store, names_of_bucket, params, init, outside=None)


def _init(plan: RunPlan, run: Run, tx: Transform, layout: ShardTable, params: PyTree) -> PyTree:
    """Return the initial state for the matrices that this rank computes; it is None for all other matrices."""
    leaves, treedef = tree.flatten(params)
    local_params = dict(tree.named_leaves(params))
    on_meta = any(leaf.is_meta for leaf in leaves if leaf is not None)
    matrices: dict[str, Tensor] = {}
    if _reads_params(run) and not on_meta:
        for bucket in buckets_of(plan, local_params):
            matrices.update(_Gather(plan, layout, bucket, local_params, as_params=True).wait())
    else:
        for shard in plan.shards:
            like = local_params[shard.name]
            if shard.owner in (None, layout.rank) and like is not None:
                # `init` has declared that it does not read these values; if it does, the state becomes NaN.
                nan = torch.full((), math.nan, dtype=like.dtype, device=like.device)
                matrices[shard.name] = nan.expand(shard.shape)
    state = tx.functions.init(tree.unflatten(treedef, [matrices.get(name) for name in local_params]))
    return _with_missing_leaves(state, tx, plan, params)


def _reads_params(run: Run) -> bool:
    """Return True if any transform of a run reads the values of parameters, which are then gathered too."""
    return any(tx.reads_params for _, tx in run)


def _with_missing_leaves(state: PyTree, tx: Transform, plan: RunPlan, params: PyTree) -> PyTree:
    """Add a leaf None to a state for each parameter whose matrices this rank does not hold."""
    shapes = {name: spec.shape for name, spec in plan.specs.items()}
    shapes.update({shard.name: shard.shape for shard in plan.shards})
    meta = map_named(lambda name, leaf: torch.empty(shapes[name], dtype=leaf.dtype, device="meta"), params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        full_state = tx.functions.init(meta)
    full_treedef = tree.flatten(full_state)[1]
    if full_treedef == tree.flatten(state)[1]:
        return state
    leaf_at = dict(zip(tree.paths(state), tree.leaves(state), strict=True))
    return tree.unflatten(full_treedef, [leaf_at.get(path) for path in tree.paths(full_state)])


def update_run(
    plan: RunPlan,
    run: Run,
    tx: Transform,
    layout: ShardTable,
    call: Arguments,
    store: Store,
    find_parameters: Callable[[], list[str | None]],
) -> tuple[PyTree, PyTree]:
    """Run one step of transforms that need whole matrices. Return this rank's updates and the next state.

    All ranks call this together. Buckets are computed one after another: while one is computed, the matrices of the
    next are gathered, and the results of the previous one are scattered.

    Args:
        plan: the owners of the matrices, and the buckets in which they are sent.
        run: the transforms as pairs (name, transform).
        tx: the same transforms as one transform.
        layout: the shards of each rank.
        call: this rank's arguments of `update`, with local tensors.
        store: keeps the state between steps.
        find_parameters: returns, for each leaf of the state, the name of its parameter or None. It is called only if
            the state is divided into buckets.
    """
    updates, state, params, donate, extras = call
    leaves, treedef = tree.flatten(updates)
    names = tree.names(updates)
    local_updates = dict(zip(names, leaves, strict=True))
    local_params: dict[str, Any] | None = None
    if params is not None and _reads_params(run):
        local_params = dict(zip(names, tree.leaves(params), strict=True))
    buckets = buckets_of(plan, local_updates)
    bucketed_state: BucketedState | None = None  # None: the only bucket takes the whole state
    if len(buckets) > 1 or store != IN_MEMORY:
        device = device_of(updates, params)
        names_of_bucket = [[local.shard.name for local in bucket.transfers if local.computes] for bucket in buckets]
        bucketed_state = BucketedState(store, device, state, find_parameters(), names_of_bucket, donate)

    def start_gathers(bucket: Bucket) -> list[_Gather]:
        """Start to gather the updates and, if the transforms read them, the parameters."""
        gathers = [_Gather(plan, layout, bucket, local_updates)]
        if local_params is not None:
            gathers.append(_Gather(plan, layout, bucket, local_params, as_params=True))
        return gathers

    def as_tree(values: Mapping[str, Tensor]) -> PyTree:
        """Return a tree like the updates, with None for each name that is not in `values`."""
        return tree.unflatten(treedef, [values.get(name) for name in names])

    def compute(index: int, inputs: list[PyTree], *, may_write: bool) -> dict[str, Tensor | None]:
        """Run the transforms on the gathered matrices of a bucket. Return the results by parameter name.

        `inputs` has the trees of the gathered updates and, if they are read, of the gathered parameters. The list is
        emptied. With `may_write`, the transforms may overwrite the updates.
        """
        nonlocal state
        gathered_updates = inputs[0]
        gathered_params = inputs[1] if len(inputs) > 1 else None
        inputs.clear()  # so that the transforms may free them
        if bucketed_state is None:
            donation = Donation(may_write, donate.state)
            out, state = tx.run(gathered_updates, state, gathered_params, donate=donation, **extras)
        else:
            out = bucketed_state.run(index, tx.run, gathered_updates, gathered_params, extras, may_write=may_write)
        return dict(zip(names, tree.leaves(out), strict=True))

    updated_shards: dict[str, Tensor] = {}
    for name, leaf in local_updates.items():
        if leaf is not None and not leaf.numel():  # this rank has no elements of it, so nothing is written to it
            updated_shards[name] = leaf
    gathers = start_gathers(buckets[0])
    finish_scatter: Callable[[], None] = _do_nothing
    with bucketed_state or nullcontext():
        for index, bucket in enumerate(buckets):
            may_write = donate.updates or gathers[0].is_in_new_memory
            inputs = [as_tree(gather.wait()) for gather in gathers]
            gathers.clear()
            if index + 1 < len(buckets):
                gathers = start_gathers(buckets[index + 1])
            results = compute(index, inputs, may_write=may_write)
            finish_scatter()  # of the last bucket: first, so that this bucket's results reuse its memory
            finish_scatter = _scatter(plan, layout, bucket, results, local_updates, updated_shards)
            del results
    finish_scatter()
    if bucketed_state is not None:
        state = bucketed_state.end()
    return as_tree({name: updated_shards[name] for name, leaf in local_updates.items() if leaf is not None}), state


def _do_nothing() -> None: ...


class _Gather:
    """Gathers the matrices of a bucket on their owners. Creating it starts the messages, and `wait` completes them.

    `local_shards` has this rank's shards by parameter name. They are updates, which may be sent and received in the
    narrower dtype to which the transforms round them; or, with `as_params`, parameters, which are not rounded.
    """

    def __init__(
        self,
        plan: RunPlan,
        layout: ShardTable,
        bucket: Bucket,
        local_shards: Mapping[str, Any],
        *,
        as_params: bool = False,
    ) -> None:
        """Start to send this rank's boxes to the owners. Without gathered matrices, there are no messages."""
        self._plan = plan
        self._bucket = bucket
        self._local_shards = local_shards
        self._as_params = as_params
        self._size = layout.size
        self._matrices: dict[str, Tensor] = {}
        for local in bucket.already_local:
            self._matrices[local.shard.name] = _local_matrices(local, local_shards[local.shard.name])
        self.is_in_new_memory = not self._matrices
        """True if no gathered matrix is a view of a local shard, so that all of them may be overwritten."""
        self._exchange: Exchange | None = None
        if bucket.gathered:  # equal on all ranks, so all or none of them start the exchange
            device = local_shards[bucket.gathered[0]].device
            outgoing: list[list[Tensor]] = []
            for views in bucket.outgoing:
                outgoing.append([view.of(local_shards[name]) for name, view in views])
            dtypes = {local_shards[name].dtype for name in bucket.gathered}
            wire = _common_dtype(map(self._wire_dtype, dtypes))
            what = "gathering matrices"
            self._exchange = Exchange(layout, outgoing, bucket.expected, dtype=wire, device=device, what=what)

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which shards of a dtype are sent: parameters in their own, updates perhaps rounded."""
        if self._as_params:
            return dtype
        return self._plan.wire_dtypes(dtype)[0]

    def wait(self) -> dict[str, Tensor]:
        """Wait for the messages. Return the matrices that this rank computes, by parameter name."""
        if self._exchange is None:
            return self._matrices
        # By parameter name, the boxes of the gathered matrices, in the order of the transfers: the targets of messages.
        views_of: dict[str, list[Tensor]] = {}
        for group in self._bucket.received_groups:
            by_dtype: dict[torch.dtype, list[LocalTransfers]] = {}
            for local in group:
                by_dtype.setdefault(self._local_shards[local.shard.name].dtype, []).append(local)
            for dtype, members in by_dtype.items():
                self._allocate(members, dtype, views_of)
        incoming: list[list[Tensor]] = [[] for _ in range(self._size)]
        for local in self._bucket.received:
            views = iter(views_of[local.shard.name])
            for transfer, views_of_transfer in local.transfers:
                incoming[transfer.sender] += itertools.islice(views, len(views_of_transfer))
        self._exchange.wait(incoming)
        return self._matrices

    def _allocate(self, members: list[LocalTransfers], dtype: torch.dtype, views_of: dict[str, list[Tensor]]) -> None:
        """Allocate the gathered stack of matrix shards of one shape, whose boxes are at the same positions.

        Write the views of the boxes to `views_of`, by parameter name.
        """
        # A single transform that rounds first can compute in the wire dtype; a longer run needs its own dtype.
        if len(self._plan.run) == 1:
            dtype = self._wire_dtype(dtype)
        shard = members[0].shard
        names = [local.shard.name for local in members]
        device = self._local_shards[names[0]].device
        stack = torch.empty((len(members), *shard.shape), dtype=dtype, device=device)
        self._matrices.update(zip(names, stack.unbind(), strict=True))
        for name in names:
            views_of[name] = []
        shards = stack if shard.shape == shard.whole else stack.flatten(1)
        for _, views in members[0].transfers:
            for view in views:
                for name, box in zip(names, view.of_each(shards), strict=True):
                    views_of[name].append(box)


def _common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the narrowest dtype to which all of the dtypes can be promoted."""
    return functools.reduce(torch.promote_types, dtypes)


def _local_matrices(local: LocalTransfers, local_shard: Tensor) -> Tensor:
    """Return the matrices that this rank computes and has in its own shard, as a view of it if possible.

    They have the shape ``local.shard.shape``: that of the parameter, or ``(count, rows, columns)`` for some matrices of
    a stack. `local_shard` is this rank's shard of the whole parameter, and may have further elements.
    """
    shard = local.shard
    if local.is_same_shard:  # the local shard has these matrices and no others
        return local_shard.reshape(shard.shape)
    if len(local.local_views) == 1:  # the matrices are one box of the local shard
        return local.local_views[0].of(local_shard).reshape(shard.shape)
    # The matrices are several boxes, which are not adjacent in the local shard: copy each to its position.
    matrices = local_shard.new_empty(shard.shape)
    for local_view, matrix_view in zip(local.local_views, local.matrix_views, strict=True):
        matrix_view.of(shard.as_shard(matrices)).copy_(local_view.of(local_shard))
    return matrices


def _scatter(
    plan: RunPlan,
    layout: ShardTable,
    bucket: Bucket,
    results: Mapping[str, Tensor | None],
    local_updates: Mapping[str, Any],
    updated_shards: dict[str, Tensor],
) -> Callable[[], None]:
    """Start to send results back. Return a function that waits until this rank has its shards of them.

    `results` has the matrices that this rank computed, by parameter name. Shards are written to `updated_shards`.
    """
    for local in bucket.stored:
        result = results[local.shard.name]
        if result is not None:
            _store_result(local, result, local_updates[local.shard.name], updated_shards)
    if not bucket.returned:
        return _do_nothing
    outgoing: list[list[Tensor]] = [[] for _ in range(layout.size)]
    incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
    for local in bucket.returned:
        shard = local.shard
        assert shard.owner is not None
        result = results[shard.name]
        if local.computes and result is not None:
            shard_of_result = shard.as_shard(result)
            for transfer, views in local.transfers:
                boxes = [view.of(shard_of_result) for view in views]
                for rank in transfer.ranks:
                    outgoing[rank] += boxes
        incoming[shard.owner] += _result_views(local, local_updates[shard.name], updated_shards)
    first = local_updates[bucket.returned[0].shard.name]
    dtypes = {local_updates[local.shard.name].dtype for local in bucket.returned}
    wire = _common_dtype(plan.wire_dtypes(dtype)[1] for dtype in dtypes)
    what = "returning matrices"
    exchange = Exchange(layout, outgoing, bucket.expected_results, dtype=wire, device=first.device, what=what)
    return lambda: exchange.wait(incoming)


def _store_result(
    local: LocalTransfers, result: Tensor, local_update: Tensor, updated_shards: dict[str, Tensor]
) -> None:
    """Write a result that no other rank needs to `updated_shards`."""
    if not local.is_same_shard:
        shard_of_result = local.shard.as_shard(result)
        boxes = [view.of(shard_of_result) for view in local.matrix_views]
        copied(boxes, _result_views(local, local_update, updated_shards))
        return
    update = result.reshape(local_update.shape).to(local_update.dtype)
    # An unchanged update stays the same tensor object, so that callers do not treat it as new and writable.
    is_unchanged = update.data_ptr() == local_update.data_ptr() and update.stride() == local_update.stride()
    if is_unchanged and local_update.numel():
        update = local_update
    updated_shards[local.shard.name] = update


def _result_views(local: LocalTransfers, local_update: Tensor, updated_shards: dict[str, Tensor]) -> list[Tensor]:
    """Return the boxes of an updated shard that come from one matrix shard. Allocate the updated shard if needed."""
    if not local.local_views:
        return []
    name = local.shard.name
    if name not in updated_shards:
        updated_shards[name] = torch.empty_like(local_update, memory_format=torch.contiguous_format)
    return [view.of(updated_shards[name]) for view in local.local_views]
