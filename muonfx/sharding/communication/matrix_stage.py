"""`MatrixStage`: neighbouring transforms that need whole matrices (a *run*), on sharded parameters.

Each matrix is gathered on one rank, its owner, updated there once, and scattered back. A *matrix shard* is a set of
whole matrices of one parameter that one owner computes. A *bucket* is a list of matrix shards that are sent together.
While one bucket is computed, the matrices of the next bucket are being sent.

Note: the tensors of the exchange
---------------------------------
A bucket passes through these tensors on P ranks, in this order. If the transforms read parameters, the parameters are
gathered in the same way as the updates, with messages of their own.

local shard
    This rank's shard of the update of a parameter, with the shape ``layout.position(name).shape``. It is only read,
    unless the caller has donated it.
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
    owner holds exactly these matrices and no other rank needs them. Else it takes the memory of the local shard if that
    is donated, and new memory if not.

The buffers belong to `Exchange`, which takes their memory from the layout.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.transform import Arguments
from muonfx.placement.bucketed import StateParameters
from muonfx.placement.buckets import BucketedState, init_in_buckets
from muonfx.placement.devices import device_of
from muonfx.placement.store import IN_MEMORY, Store
from muonfx.sharding.communication.messages import Exchange, copied, lists_by_rank
from muonfx.sharding.plan.assignment import RunPlan
from muonfx.sharding.plan.bucket import Bucket
from muonfx.sharding.plan.matrix_shards import LocalTransfers
from muonfx.sharding.shards.dtensors import map_named
from muonfx.sharding.shards.position import boxes_in
from muonfx.sharding.shards.table import ShardTable
from muonfx.tree import PyTree


@dataclass(frozen=True, eq=False)
class MatrixStage:
    """Neighbouring transforms that need whole matrices, on the owners of the matrices."""

    plan: RunPlan
    """The owners of the matrices, and the buckets in which they are sent."""
    tx: Transform
    """The transforms as one, for matrices in the shapes in which their owners compute them."""
    reads_params: bool
    """True if any of the transforms reads the values of parameters, which are then gathered too."""
    layout: ShardTable
    store: Store
    """Where the state is between steps."""

    def init(self, params: PyTree) -> PyTree:
        """Return this rank's initial state, for the matrices that it computes. All ranks call this together."""
        if self.store == IN_MEMORY or tree.device_of(params).type == "meta":
            return self._init(params)

        def init_bucket(bucket: Sequence[str]) -> PyTree:
            return self._init(
                map_named(lambda name, param: param if name in bucket else None, params)
            )

        # With the state in host memory or on disk, it is built bucket by bucket.
        return init_in_buckets(self.store, self._names_of_buckets(), params, init_bucket)

    def update(self, call: Arguments, state_parameters: StateParameters) -> tuple[PyTree, PyTree]:
        """Return this rank's updates and its next state. All ranks call this together.

        Args:
            call: this rank's arguments of `update`, with local tensors.
            state_parameters: finds the parameter of each leaf of the state, if it is divided into buckets.
        """
        return Step(self, call, state_parameters).run()

    def _names_of_buckets(self) -> list[list[str]]:
        """Return the parameters whose state is built with each bucket. There is at least one bucket, perhaps empty.

        A parameter whose matrices are in several buckets has one state: it belongs to the first of these buckets.
        """
        earlier_names: set[str] = set()
        names_of_buckets: list[list[str]] = []
        for indices in self.plan.buckets:
            names = {self.plan.shards[index].name for index in indices}
            new_names = names - earlier_names
            names_of_buckets.append(sorted(new_names))
            earlier_names |= names
        # The transforms are initialized once, also without a matrix.
        return names_of_buckets or [[]]

    def _init(self, params: PyTree) -> PyTree:
        """Return the initial state for the matrices that this rank computes; it is None for all other matrices."""
        local_params = dict(tree.named_leaves(params))
        matrices = self._params_to_init(local_params, tree.device_of(params))
        # The matrices replace the parameters in the tree, as the transforms expect.
        _, treedef = tree.flatten(params)
        leaves = map(matrices.get, local_params)
        state = self.tx.functions.init(tree.unflatten(treedef, leaves))
        return self._with_missing_leaves(state, params)

    def _params_to_init(
        self, local_params: Mapping[str, Any], device: torch.device
    ) -> dict[str, Tensor]:
        """Return the parameters that are passed to `init`, by name: the whole matrices that this rank computes.

        Their values are gathered from all ranks if `init` reads values. Else they are NaN, and nothing is sent. A
        parameter without matrices on this rank is left out.
        """
        if not self.reads_params or device.type == "meta":
            return self._params_of_nan(local_params)
        matrices: dict[str, Tensor] = {}
        # A bucket is some matrices that are sent together.
        for bucket in self.plan.local_buckets(local_params):
            gather = _Gather(self, bucket, local_params, as_params=True)  # starts the messages
            matrices |= gather.wait()
        return matrices

    def _with_missing_leaves(self, state: PyTree, params: PyTree) -> PyTree:
        """Add a leaf None to the state of this rank for each parameter whose matrices other ranks compute.

        All ranks must have the same structure, but `init` may leave out a parameter that is None. On a rank that
        computes "w", it may return ``{"w": ...}``, and on one that computes "v", ``{"v": ...}``. They then get
        ``{"v": None, "w": ...}`` and ``{"v": ..., "w": None}``.
        """
        leaf_at = dict(zip(tree.paths(state), tree.leaves(state), strict=True))
        full_state = self._init_on_meta(params)  # the state of a rank that computes all matrices
        all_leaves = map(leaf_at.get, tree.paths(full_state))  # None at a path that this rank lacks
        _, full_treedef = tree.flatten(full_state)
        return tree.unflatten(full_treedef, all_leaves)

    def _init_on_meta(self, params: PyTree) -> PyTree:
        """Return the state that `init` would return on a rank that computes all matrices, as meta tensors.

        It has the structure of the state on every rank. Meta tensors have shapes without values.
        """
        shapes = {name: spec.shape for name, spec in self.plan.specs.items()}
        # A rank may compute some matrices of a stack: ``(count, rows, columns)``
        for shard in self.plan.shards:
            shapes[shard.name] = shard.shape

        def meta_tensor(name: str, leaf: Tensor) -> Tensor:
            return torch.empty(shapes[name], dtype=leaf.dtype, device="meta")

        meta_params = map_named(meta_tensor, params)
        with warnings.catch_warnings():  # the `init` of this rank's matrices has already warned
            warnings.simplefilter("ignore")
            return self.tx.functions.init(meta_params)

    def _params_of_nan(self, local_params: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return NaN in the shapes of the matrices that this rank computes, by parameter name. Nothing is sent.

        They are passed to an `init` that has declared that it reads no values. Meta tensors would not do, because
        `init` creates the state on the device of the parameters. If it reads a value, the state becomes NaN, which is
        noticed.
        """
        matrices: dict[str, Tensor] = {}
        for shard in self.plan.shards:
            param = local_params[shard.name]
            computes = shard.owner in (None, self.layout.rank)  # None: every rank computes it
            if param is None or not computes:
                continue
            nan = torch.full((), math.nan, dtype=param.dtype, device=param.device)
            matrices[shard.name] = nan.expand(shard.shape)  # without memory for each element
        return matrices


class Step:
    """One step of a matrix stage. All ranks create and run it together.

    Buckets are computed one after another: while one is computed, the matrices of the next are gathered, and the
    results of the previous one are scattered.
    """

    def __init__(
        self, stage: MatrixStage, call: Arguments, state_parameters: StateParameters
    ) -> None:
        """Find this rank's shards and the buckets of the step.

        Args:
            stage: the transforms, and the plan of their matrices.
            call: this rank's arguments of `update`, with local tensors.
            state_parameters: finds the parameter of each leaf of the state, if it is divided into buckets.
        """
        self.stage = stage
        self._call = call
        # This rank's shards of the updates, by parameter name, and of the parameters, if the transforms read them.
        leaves, self._treedef = tree.flatten(call.updates)
        self.local_updates: dict[str, Any] = dict(
            zip(tree.names(call.updates), leaves, strict=True)
        )
        self._local_params: dict[str, Any] | None = None
        if call.params is not None and stage.reads_params:
            self._local_params = dict(tree.named_leaves(call.params))
        self._buckets = stage.plan.local_buckets(self.local_updates)
        self.names_to_overwrite = self._find_names_to_overwrite()
        # This rank's shards of the results, by parameter name; each scatter adds those of its bucket.
        self.updated_shards: dict[str, Tensor] = {}
        # The state. It is divided if there are several buckets, or if it is in a file, from which it is loaded bucket
        # by bucket.
        self._state = call.state
        self._bucketed: BucketedState | None = None
        is_divided = len(self._buckets) > 1 or stage.store != IN_MEMORY
        if is_divided:
            self._bucketed = BucketedState(
                stage.store,
                device_of(call.updates, call.params),
                call.state,
                parameters=state_parameters.of(call.state, call.updates),
                buckets=[bucket.computed_names for bucket in self._buckets],
                donate=call.donate,
            )

    def _find_names_to_overwrite(self) -> set[str]:
        """Return the parameters whose local updates (the arguments of this step) are overwritten by its results.

        This saves memory if the caller has donated its updates. Matrices that this rank computes and already holds are
        left out, because their results may be views of the local update, such as its transpose.
        """
        if not self._call.donate.updates:
            return set()
        already_local: set[str] = set()
        for bucket in self._buckets:
            already_local.update([local.shard.name for local in bucket.already_local])
        return self.local_updates.keys() - already_local

    def run(self) -> tuple[PyTree, PyTree]:
        """Gather, compute and scatter all buckets. Return this rank's updates and the next state.

        Messages overlap with the computation: while a bucket is computed, the next one is gathered, and the results of
        the previous one are sent back.
        """
        for name, leaf in self.local_updates.items():
            # Nothing is written to a shard without elements on this rank.
            if leaf is not None and not leaf.numel():
                self.updated_shards[name] = leaf
        gathers = self._start_gathers(self._buckets[0])
        scatter: _Scatter | None = None
        with self._bucketed or nullcontext():
            for index, bucket in enumerate(self._buckets):
                # 1. The matrices of this bucket arrive, and the next bucket is sent while they are computed.
                may_write = self._call.donate.updates or not bucket.already_local
                gathered = [self._as_tree(gather.wait()) for gather in gathers]
                if index + 1 < len(self._buckets):
                    gathers = self._start_gathers(self._buckets[index + 1])
                # 2. The owners run the transforms.
                results = self._compute(index, *gathered, may_write=may_write)
                del gathered  # free the gathered matrices
                # 3. The results are sent back. Wait for those of the previous bucket, to use their buffers again.
                if scatter is not None:
                    scatter.wait()
                scatter = _Scatter(self, bucket, results)
                del results
        if scatter is not None:
            scatter.wait()
        if self._bucketed is not None:
            self._state = self._bucketed.end()
        return self._as_tree(self.updated_shards), self._state

    def _start_gathers(self, bucket: Bucket) -> list[_Gather]:
        """Start to gather the updates of a bucket and, if the transforms read them, the parameters."""
        gathers = [_Gather(self.stage, bucket, self.local_updates)]
        if self._local_params is not None:
            gathers.append(_Gather(self.stage, bucket, self._local_params, as_params=True))
        return gathers

    def _as_tree(self, values: Mapping[str, Tensor]) -> PyTree:
        """Return a tree like the updates, with None for each name that is not in `values`."""
        leaves = map(values.get, self.local_updates)
        return tree.unflatten(self._treedef, leaves)

    def _compute(
        self, index: int, updates: PyTree, params: PyTree = None, *, may_write: bool
    ) -> dict[str, Tensor | None]:
        """Run the transforms on the gathered matrices of the bucket `index`. Return the results by parameter name.

        The trees have whole matrices for the parameters of this bucket, and None for all others. With `may_write`, the
        transforms may overwrite the updates.
        """
        update = self.stage.tx.run
        extras = self._call.extras
        if self._bucketed is not None:
            out = self._bucketed.run(index, update, updates, params, extras, may_write=may_write)
        else:
            donate = self._call.donate._replace(updates=may_write)
            out, self._state = update(updates, self._state, params, donate=donate, **extras)
        results = tree.leaves(out)
        return dict(zip(self.local_updates, results, strict=True))


class _Gather:
    """Gathers the matrices of a bucket on their owners. Creating it starts the messages, and `wait` completes them.

    `local_shards` has this rank's shards by parameter name. They are updates, which may be sent and received in the
    narrower dtype to which the transforms round them; or, with `as_params`, parameters, which are not rounded.
    """

    def __init__(
        self,
        stage: MatrixStage,
        bucket: Bucket,
        local_shards: Mapping[str, Any],
        *,
        as_params: bool = False,
    ) -> None:
        """Start to send this rank's parts of matrices to the ranks that compute them, if other ranks do."""
        self._stage = stage
        self._bucket = bucket
        self._local_shards = local_shards
        self._as_params = as_params
        self._exchange: Exchange | None = None
        if bucket.gathered:  # this is equal on all ranks, so all or none of them start the exchange
            self._exchange = self._start_exchange()

    def _start_exchange(self) -> Exchange:
        """Start to send the parts of this rank's shards that other ranks need, such as two rows of "w" to rank 1.

        Then ``self._bucket.outgoing[1]`` is ``[("w", view)]``. The view is a position, which is the same in all steps.
        """
        # For each rank, these parts of the tensors of this step.
        outgoing = lists_by_rank(self._stage.layout)
        for rank, boxes in enumerate(self._bucket.outgoing):
            for name, view in boxes:
                outgoing[rank].append(view.of(self._local_shards[name]))
        # The message has one dtype. All shards are on one device.
        shards = [self._local_shards[local.shard.name] for local in self._bucket.gathered]
        wire_dtypes = {self._wire_dtype(shard.dtype) for shard in shards}
        return Exchange(
            self._stage.layout,
            outgoing,
            self._bucket.expected,
            dtype=_common_dtype(wire_dtypes),
            device=shards[0].device,
            operation="gathering matrices",
        )

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which shards of a dtype are sent: parameters in their own, updates perhaps rounded."""
        if self._as_params:
            return dtype
        return self._stage.plan.wire_dtypes(dtype).updates

    def wait(self) -> dict[str, Tensor]:
        """Wait for the messages. Return the whole matrices that this rank computes, by parameter name.

        If rank 0 computes "w", of which ranks 0 and 1 hold two rows each, this is ``{"w": ...}`` with four rows on rank
        0, and ``{}`` on rank 1.
        """
        # 1. Matrices that this rank holds whole: these may be views of its local shards.
        matrices: dict[str, Tensor] = {}
        for local in self._bucket.already_local:
            name = local.shard.name
            matrices[name] = _local_matrices(local, self._local_shards[name])
        # 2. Matrices of which other ranks send elements.
        if self._exchange is not None:
            matrices |= self._receive(self._exchange)
        return matrices

    def _receive(self, exchange: Exchange) -> dict[str, Tensor]:
        """Receive the matrices that this rank computes and other ranks hold. Return them by parameter name.

        Matrices of one shape are entries of one stack. If this rank receives "v" and "w" of shape (4, 2), a stack of
        shape (2, 4, 2) is allocated, and the result is ``{"v": stack[0], "w": stack[1]}``.
        """
        matrices: dict[str, Tensor] = {}
        # For each matrix, its parts (boxes) that the ranks send, such as some rows: views of the matrix.
        boxes_of: dict[str, Sequence[Tensor]] = {}
        # `transfers` say for each matrix of one stack which rank sends which part.
        for transfers in self._members_of_stacks():
            names = [transfer.shard.name for transfer in transfers]
            stack = self._allocate_stack(transfers)
            matrices.update(zip(names, stack.unbind(), strict=True))
            # All matrices of a stack have the same parts, so that those of the first suffice.
            boxes_of_entries = _boxes_of_entries(stack, transfers[0])
            boxes_of.update(zip(names, boxes_of_entries, strict=True))
        # The values arrive in the boxes, and so in the matrices.
        exchange.wait(self._incoming(boxes_of))
        return matrices

    def _members_of_stacks(self) -> list[list[LocalTransfers]]:
        """Return the transfers of the matrices to receive, in groups of which each is received into one stack.

        The plan has groups by shape. A stack has one dtype, which only the tensors of this step have: a group of "u" in
        fp32 and of "v" and "w" in bf16 becomes the groups of "u" and of "v" and "w".
        """
        members_of: dict[Hashable, list[LocalTransfers]] = {}
        for index, transfers_of_shape in enumerate(self._bucket.received_groups):
            for local in transfers_of_shape:
                dtype = self._local_shards[local.shard.name].dtype
                members_of.setdefault((index, dtype), []).append(local)
        return list(members_of.values())

    def _allocate_stack(self, members: Sequence[LocalTransfers]) -> Tensor:
        """Return new memory for matrices of one shape: for two of shape (4, 2), a tensor of shape (2, 4, 2)."""
        first = members[0].shard
        like = self._local_shards[first.name]
        dtype = like.dtype
        # The messages may have a narrower dtype, to which the first transform rounds its input anyway. A single
        # transform can have its input in this dtype. A further one needs a result in the dtype of the updates.
        is_single_transform = len(self._stage.plan.run) == 1
        if is_single_transform:
            dtype = self._wire_dtype(dtype)
        shape = (len(members), *first.shape)
        return torch.empty(shape, dtype=dtype, device=like.device)

    def _incoming(self, boxes_of: Mapping[str, Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return, for each rank, the parts of the received matrices that it sends. `boxes_of` has the parts by matrix.

        If ranks 0 and 1 hold two rows each of the matrix "w", which this rank computes, ``{"w": (w[0:2], w[2:4])}``
        becomes ``[[w[0:2]], [w[2:4]]]``.
        """
        # A rank sends the parts in the order of the matrices and, for each matrix, in the order of `owner_boxes`.
        incoming = lists_by_rank(self._stage.layout)
        for local in self._bucket.received:
            boxes = boxes_of[local.shard.name]
            for owner_box, box in zip(local.owner_boxes, boxes, strict=True):
                incoming[owner_box.sender].append(box)
        return incoming


def _common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return a dtype that can represent all values of some dtypes: fp32 for bf16 and fp16."""
    return functools.reduce(torch.promote_types, dtypes)


def _boxes_of_entries(stack: Tensor, first: LocalTransfers) -> list[tuple[Tensor, ...]]:
    """Return, for each matrix of a stack, its parts that the ranks send to this rank, as views of the stack.

    The stack is new memory, into which the parts are received. Two matrices of shape (4, 2) are in one stack of shape
    (2, 4, 2). If rank 0 sends rows 0 and 1 of each, and rank 1 sends rows 2 and 3, the result is
    ``[(stack[0, :2], stack[0, 2:]), (stack[1, :2], stack[1, 2:])]``.

    ``first.owner_boxes`` lists the parts of the first matrix. The other matrices have the same parts.
    """
    # The plan has positions in the flattened entry, if an entry is only some of the matrices of a parameter.
    if not first.shard.is_whole_parameter:
        stack = stack.flatten(1)
    # `of_each` returns one part of all matrices in one call, which is faster than a view of each.
    entries_of_box = [owner_box.view.of_each(stack) for owner_box in first.owner_boxes]
    return list(zip(*entries_of_box, strict=True))


def _local_matrices(transfers: LocalTransfers, local_shard: Tensor) -> Tensor:
    """Return the matrices that this rank computes, if its own shard has all their elements, as a view if possible.

    `local_shard` is this rank's shard of the parameter, and may have further elements. For a rank that holds matrices 0
    to 3 of a stack, with shape (4, 8, 8), and computes 0 and 1, the result is ``local_shard[:2]``.
    """
    # The result has the shape of the parameter, or (count, rows, columns) for a part of a stack.
    shape = transfers.shard.shape
    views = transfers.local_views  # where the matrices are in the local shard
    # 1. The local shard has these matrices and no others.
    if transfers.is_same_shard:
        return local_shard.reshape(shape)
    # 2. The matrices are one box (a rectangular part) of the local shard.
    if len(views) == 1:
        return views[0].of(local_shard).reshape(shape)
    # 3. The matrices are several boxes, which are not adjacent in the local shard: copy each to its position.
    matrices = local_shard.new_empty(shape)
    targets = boxes_in(transfers.shard.as_shard(matrices), transfers.matrix_views)
    for view, target in zip(views, targets, strict=True):
        target.copy_(view.of(local_shard))
    return matrices


class _Scatter:
    """Sends the results of a bucket to the ranks that hold them. Creating it starts the messages.

    `results` has the matrices that this rank computed, by parameter name. This rank's shards of all results are written
    to the `updated_shards` of the step; `wait` completes those that other ranks send.
    """

    def __init__(self, step: Step, bucket: Bucket, results: Mapping[str, Tensor | None]) -> None:
        """Store the results that no other rank needs, and start to send the others."""
        self._step = step
        self._bucket = bucket
        # 1. The results that stay on this rank.
        for local in bucket.stored:
            result = results[local.shard.name]
            assert result is not None  # this rank computed it
            self._store(local, result)
        # 2. The messages with the others. This is equal on all ranks, so all or none of them start the exchange.
        self._exchange: Exchange | None = None
        if bucket.returned:
            self._exchange = self._start_exchange(results)

    def _store(self, local: LocalTransfers, result: Tensor) -> None:
        """Write a result that no other rank needs to this rank's updated shard of the parameter.

        For a rank that holds matrices 0 to 3 of a stack and computes 0 and 1, the result is the first half of its
        shard. `local` says where the elements are in the shard (``local_views``) and the result (``matrix_views``).
        """
        name = local.shard.name
        # The result has all elements of the shard, and is used without a copy.
        if local.is_same_shard:
            self._step.updated_shards[name] = _like_input(result, self._step.local_updates[name])
            return
        result_as_shard = local.shard.as_shard(result)
        sources = boxes_in(result_as_shard, local.matrix_views)
        targets = self._boxes_to_fill(local)
        copied(sources, targets)

    def _start_exchange(self, results: Mapping[str, Tensor | None]) -> Exchange:
        """Send the parts (boxes) of this rank's results to all ranks that hold them.

        If rank 0 computes a matrix of which ranks 0 and 1 hold two rows each, it sends two rows of the result to rank
        1. Its own two rows are in ``outgoing[0]``, and are only copied.
        """
        layout = self._step.stage.layout
        transfers = self._bucket.returned  # of each matrix of which any rank sends the result
        # 1. The boxes that this rank sends to each rank.
        outgoing = lists_by_rank(layout)
        for transfer in transfers:
            result = results[transfer.shard.name]
            if not transfer.computes or result is None:  # another rank computes and sends it
                continue
            result_as_shard = transfer.shard.as_shard(
                result
            )  # in the shape of which boxes are parts
            for owner_box in transfer.owner_boxes:
                box = owner_box.view.of(result_as_shard)
                for rank in owner_box.holders:
                    outgoing[rank].append(box)
        # 2. The message, of one dtype. All updates are on one device.
        updates = [self._step.local_updates[transfer.shard.name] for transfer in transfers]
        wire_dtypes = {
            self._step.stage.plan.wire_dtypes(update.dtype).results for update in updates
        }
        return Exchange(
            layout,
            outgoing,
            self._bucket.expected_results,
            dtype=_common_dtype(wire_dtypes),
            device=updates[0].device,
            operation="returning matrices",
        )

    def wait(self) -> None:
        """Wait until this rank has its shards of all results of the bucket.

        If rank 0 computes "w" and rank 1 computes "v", this rank's part of "w" arrives from rank 0, and its part of "v"
        from rank 1.
        """
        if self._exchange is None:  # no rank needs results of another
            return
        # For each rank, the tensors into which its message is copied.
        incoming = lists_by_rank(self._step.stage.layout)
        for local in self._bucket.returned:
            owner = local.shard.the_owner  # the rank that computed this matrix
            incoming[owner] += self._boxes_to_fill(local)
        self._exchange.wait(incoming)

    def _boxes_to_fill(self, local: LocalTransfers) -> list[Tensor]:
        """Return the parts of this rank's updated shard into which the result of some matrices is copied, as views.

        If rank 0 computes matrices 0 and 1 of the stack "w", rank 1 computes 2 and 3, and this rank holds 1 and 2, then
        each of these two results fills one half of the updated shard. The first call for "w" creates the shard.
        """
        if not local.local_views:  # this rank holds no element of these matrices
            return []
        name = local.shard.name
        if name not in self._step.updated_shards:
            self._step.updated_shards[name] = self._new_shard(name)
        return boxes_in(self._step.updated_shards[name], local.local_views)

    def _new_shard(self, name: str) -> Tensor:
        """Return a tensor for an updated shard: the local update itself if it is to be overwritten, else new memory.

        Only matrices of this bucket are overwritten. They were gathered before; other buckets may still need other
        matrices of the same update.
        """
        local_update = self._step.local_updates[name]
        if name in self._step.names_to_overwrite and local_update.is_contiguous():
            return local_update
        return torch.empty_like(local_update, memory_format=torch.contiguous_format)


def _like_input(result: Tensor, local_update: Tensor) -> Tensor:
    """Return a result with the shape and dtype of this rank's update; the update itself if the result is a view of it.

    If a transform returns its input, a caller finds this by ``new is old``. So a view of the same elements is replaced
    by the tensor itself.
    """
    updated = result.reshape(local_update.shape).to(local_update.dtype)
    has_same_address = updated.data_ptr() == local_update.data_ptr()
    has_same_memory = has_same_address and updated.stride() == local_update.stride()
    if has_same_memory and local_update.numel():
        return local_update
    return updated
