"""Collectives over trees of tensors for a ZeRO training loop: gather shards, and reduce gradients to shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.internal.tracing import without_transforms
from muonfx.placement.buckets import split_into_buckets
from muonfx.sharding.communication.agree import (
    DTYPES,
    LeafAgreement,
    agree_on_leaves,
    errors_on_all_ranks,
)
from muonfx.sharding.communication.messages import (
    Exchange,
    collective,
    copied,
    exchange,
    lists_by_rank,
)
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.cut import equal_intervals
from muonfx.sharding.shards.dtensors import is_dtensor, require_no_transform, require_shards
from muonfx.sharding.shards.position import ShardPosition, boxes_in
from muonfx.sharding.shards.remembered import remembered
from muonfx.sharding.shards.table import ShardTable, are_on_all_ranks
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew

BUCKET = 1 << 25
"""The approximate bytes of whole tensors that one collective gathers or reduces."""


def gathered(layout: ShardTable, local: PyTree) -> PyTree:
    """Gather the shards of all ranks to whole tensors on every rank, without derivatives. None stays None.

    If rank 0 holds ``{"w": tensor([1., 2.])}`` and rank 1 ``{"w": tensor([3., 4.])}`` of a parameter with 4 elements,
    both get ``{"w": tensor([1., 2., 3., 4.])}``.
    """
    leaf_of = dict(tree.named_leaves(local))
    with errors_on_all_ranks(layout.group):
        require_no_transform("layout.gather", local)
    with without_transforms(), torch.no_grad():
        _require_same_leaves(layout, leaf_of)
        shard_of = _local_shards(leaf_of)
        wholes = _gather(layout, list(shard_of), list(shard_of.values()))
    leaf_of.update(zip(shard_of, wholes, strict=True))
    _, treedef = tree.flatten(local)
    return tree.unflatten(treedef, leaf_of.values())


def gathered_with_derivatives(
    layout: ShardTable, local: PyTree, chosen: Sequence[str] | None
) -> PyTree:
    """Gather the shards of all ranks to whole tensors on every rank. Gradients flow from whole tensors to the shards.

    `chosen` has the names of the leaves to gather, such as ``["w"]`` for one layer; others are returned unchanged.
    None: gather all leaves.
    """
    leaf_of = dict(tree.named_leaves(local))
    names = sorted(leaf_of if chosen is None else chosen)
    _require_same_leaves(layout, leaf_of, names)
    for name in names:  # they are now the same on all ranks, so all of them raise
        if name not in leaf_of:
            raise ShardingError(f"names: {name!r} is not a leaf of the tree")
    chosen_leaves = {name: leaf_of[name] for name in names}
    shard_of = _local_shards(chosen_leaves)
    # An autograd function that calls `_gather`, and calls `_reduce` in its backward pass.
    wholes = _Linear.apply(_gather, _reduce, layout, list(shard_of), *shard_of.values())
    leaf_of.update(zip(shard_of, wholes, strict=True))
    _, treedef = tree.flatten(local)
    return tree.unflatten(treedef, leaf_of.values())


def _require_same_leaves(
    layout: ShardTable, leaf_of: dict[str, Any], names: Sequence[str] = ()
) -> None:
    """Raise on all ranks unless each leaf is a shard on all ranks or None on all, and all pass the same `names`.

    `leaf_of` has the leaves by name, and `names` are those that the caller chose to gather.
    """
    # `leaf_of` counts as a tree, a flat one: to find the names in a tree of many levels takes as long as a collective.
    with without_transforms():
        agreement = agree_on_shards(
            "gathering leaves", leaf_of, layout, same={"arguments": str(names)}
        )
    if agreement.missing:  # the same on all ranks, so all of them raise
        name = min(agreement.missing)
        raise ShardingError(
            f"{name!r} is None on some ranks, expected a shard on all ranks or None on all: pass the shard of every "
            "rank"
        )


def _local_shards(leaf_of: dict[str, Any]) -> dict[str, Tensor]:
    """Return the leaves by name as local tensors, without those that are None."""
    shards: dict[str, Tensor] = {}
    for name, leaf in leaf_of.items():
        if is_dtensor(leaf):
            shards[name] = leaf.to_local()  # differentiable, so a gradient reaches the DTensor
        elif leaf is not None:
            shards[name] = leaf
    return shards


def agree_on_shards(
    operation: str, values: PyTree, layout: ShardTable, **options: Any
) -> LeafAgreement:
    """Raise on all ranks unless each leaf is None or the shard of its rank. Return which leaves are None on some ranks.

    The arguments are those of `agree_on_leaves`.
    """
    with errors_on_all_ranks(layout.group):
        require_shards(layout, values)
    return agree_on_leaves(operation, values, layout, **options)


def all_reduce(
    layout: ShardTable, values: Tensor, operation: str, op: Any = dist.ReduceOp.SUM
) -> None:
    """Reduce a tensor elementwise over all ranks, in place. Errors name the `operation`."""
    if layout.group is None or layout.size == 1:
        return
    with collective(operation):
        dist.all_reduce(values, op=op, group=layout.group)


_Collective = Callable[[ShardTable, Sequence[str], Sequence[Tensor]], list[Tensor]]
"""The type of `_gather` and `_reduce`: from the tensors of the named parameters to a list of tensors."""


@torch.no_grad()
def _gather(layout: ShardTable, names: Sequence[str], shards: Sequence[Tensor]) -> list[Tensor]:
    """Gather the named parameters. Return whole tensors on every rank, from the `shards` of this rank.

    With ``names = ["w"]``, rank 0 passes ``[tensor([1., 2.])]``, rank 1 passes ``[tensor([3., 4.])]``, and both get
    ``[tensor([1., 2., 3., 4.])]``.
    """
    wholes = [
        shard.new_empty(layout.specs[name].shape) for name, shard in zip(names, shards, strict=True)
    ]
    # Some of the parameters at a time, so that the messages need little memory.
    for indices in in_buckets(wholes, BUCKET):
        # For each rank, the parts of this rank's shards to send to it, and the parts of whole tensors that it sends.
        outgoing = lists_by_rank(layout)
        incoming = lists_by_rank(layout)
        for index in indices:
            for receiver, boxes in _sent_boxes(layout, names[index], shards[index]):
                outgoing[receiver] += boxes
            for sender, boxes in _received_boxes(layout, names[index], wholes[index]):
                incoming[sender] += boxes
        # If every rank has every element, or there is one rank, this rank only copies its own. This follows from the
        # layout, so it is the same on all ranks: one rank alone must not skip an exchange for which others wait.
        names_in_bucket = [names[index] for index in indices]
        needs_no_message = are_on_all_ranks(layout, names_in_bucket)
        if layout.group is None or needs_no_message:
            copied(outgoing[layout.rank], incoming[layout.rank])
        else:
            exchange(layout, outgoing, incoming, wholes[indices[0]], "gathering")
    return wholes


def _sent_boxes(layout: ShardTable, name: str, shard: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield each rank to which this rank sends its shard of a parameter, itself included, with the tensors to send.

    If ranks 1 and 3 of six hold the same shard, they share the work: rank 1 sends it to ranks 0, 2 and 4, and rank 3
    sends it to rank 5. The tensors are views of the shard, one for each rectangular part (box).
    """
    boxes = boxes_in(shard, layout.views(name))
    for holders in layout.holders(name).values():
        if layout.rank not in holders:
            continue
        yield layout.rank, boxes
        # Holder number i sends it to the ranks i, i + n, i + 2n, ..., for n holders.
        number = holders.index(layout.rank)
        for receiver in range(number, layout.size, len(holders)):
            if receiver not in holders:
                yield receiver, boxes


def _received_boxes(
    layout: ShardTable, name: str, whole: Tensor
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the rank that sends each shard of a parameter to this rank, with the boxes of the whole tensor to fill.

    For two holders of a shard, even ranks receive it from the first, and odd ranks from the second.
    """
    for position, holders in layout.holders(name).items():
        sender = holders[layout.rank % len(holders)]
        if layout.rank in holders:  # it copies its own shard
            sender = layout.rank
        boxes = [box.of(whole) for box in position.boxes]
        yield sender, boxes


class _Linear(torch.autograd.Function):
    """A gather and a mean over ranks as an autograd function. Each is the backward pass, or transpose, of the other."""

    # Gathering is the transpose of the mean over ranks if whole gradients are gradients of each rank's own loss, and
    # gradients of shards are gradients of the mean loss.

    @staticmethod
    def forward(
        function: _Collective,
        transpose: _Collective,
        layout: ShardTable,
        names: Sequence[str],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        return tuple(function(layout, names, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.function, ctx.transpose, ctx.layout, ctx.names = inputs[:4]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (
            None,
            None,
            None,
            None,
            *_Linear.apply(ctx.transpose, ctx.function, ctx.layout, ctx.names, *grads),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Linear.apply(ctx.function, ctx.transpose, ctx.layout, ctx.names, *tangents[4:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        """Run the collective once for a whole batch, under `torch.vmap`. Return the results and their batch dims.

        Two tensors ``a, b`` with a batch of three entries are sent as ``a0, a1, a2, b0, b1, b2``. The results are
        stacked to two tensors with the batch dim 0.
        """
        function, transpose, layout, names, *tensors = inputs
        _, _, _, _, *batch_dims = in_dims
        # 1. The entries of the batch, as further tensors of the same parameters.
        entry_names: list[str] = []
        entries: list[Tensor] = []
        for name, tensor, batch_dim in zip(names, tensors, batch_dims, strict=True):
            entry_names += [name] * info.batch_size
            if batch_dim is None:  # the same tensor for each entry of the batch
                entries += [tensor] * info.batch_size
            else:
                entries += tensor.unbind(batch_dim)
        # 2. One collective for all of them.
        results = _Linear.apply(function, transpose, layout, entry_names, *entries)
        # 3. The results of each tensor in one stack.
        stacks: list[Tensor] = []
        for start in range(0, len(results), info.batch_size):
            results_of_tensor = results[start : start + info.batch_size]
            stacks.append(torch.stack(results_of_tensor))
        return tuple(stacks), (0,) * len(stacks)


def reduce_scattered(layout: ShardTable, grads: PyTree) -> PyTree:
    """Average the whole gradients of all ranks. Return a tree with this rank's shards of the mean.

    If the gradient of "w" is ``[1., 3.]`` on rank 0 and ``[3., 5.]`` on rank 1, the mean is ``[2., 4.]``. Where each
    rank holds one element of "w", rank 0 gets ``[2.]`` and rank 1 gets ``[4.]``.

    A gradient that is None on some ranks counts as zero there. It stays None if it is None on all ranks.
    """
    names = tree.names(grads)
    with errors_on_all_ranks(layout.group):
        require_no_transform("layout.reduce_scatter", grads)
        _require_gradients(layout, grads)
    with without_transforms():
        # The ranks find out which gradients only some of them have. The others have zeros in the mean.
        agreement = agree_on_leaves("reducing gradients", grads, layout)
        gradient_of = _with_missing_gradients(layout, grads, agreement)
        gradients = list(gradient_of.values())
        shards = _reduce(layout, list(gradient_of), gradients)
    # The shards in a tree like the gradients. A gradient that no rank has is still None.
    shard_of = dict(zip(gradient_of, shards, strict=True))
    leaves = map(shard_of.get, names)
    _, treedef = tree.flatten(grads)
    return tree.unflatten(treedef, leaves)


def _with_missing_gradients(
    layout: ShardTable, grads: PyTree, agreement: LeafAgreement
) -> dict[str, Tensor]:
    """Return this rank's gradients by name, with zeros for those that only other ranks have.

    If the tree is ``{"w": None, "b": grad}`` here, and another rank has a gradient of "w", "w" is zero here. If no rank
    has one, "w" is left out. `agreement` has the leaves that only some ranks have.
    """
    device = tree.device_of(grads)
    gradient_of: dict[str, Tensor] = {}
    for name, leaf in tree.named_leaves(grads):
        if leaf is not None:
            gradient_of[name] = leaf.detach()
        elif name in agreement.missing:
            # Another rank has this gradient, and the mean is over all ranks.
            shape = layout.specs[name].shape
            gradient_of[name] = torch.zeros(
                shape, dtype=agreement.missing[name].dtype, device=device
            )
    return gradient_of


def _require_gradients(layout: ShardTable, grads: PyTree) -> None:
    """Raise unless each gradient is None, or a floating tensor of the whole shape of its parameter.

    The mean of integers could not be expressed in their dtype.
    """
    layout.require(tree.names(grads))
    for name, gradient in tree.named_leaves(grads):
        if gradient is None:  # this rank may lack it: it counts as zero
            continue
        if gradient.dtype not in DTYPES:
            raise ShardingError(
                f"the gradient of {name!r} has dtype {gradient.dtype}, expected a floating dtype"
            )
        layout.require_whole(name, gradient)


@torch.no_grad()
def _reduce(layout: ShardTable, names: Sequence[str], wholes: Sequence[Tensor]) -> list[Tensor]:
    """Average whole tensors over all ranks. Return a list with this rank's shards of the means.

    ``[tensor([1., 3.])]`` on rank 0 and ``[tensor([3., 5.])]`` on rank 1 have the mean ``[2., 4.]``. If each rank holds
    one element, rank 0 gets ``[tensor([2.])]`` and rank 1 gets ``[tensor([4.])]``.
    """
    has_elements = any(whole.numel() for whole in wholes)
    is_replicated = layout.size > 1 and has_elements and are_on_all_ranks(layout, names)
    if not is_replicated:
        return _reduce_to_shards(layout, names, wholes)
    # Each rank holds each parameter whole. If each sent its whole tensors to all others, these would be P - 1 tensors
    # on P ranks. So each rank averages an equal part, and the parts are gathered: it sends two whole tensors in all.
    equal_parts = _in_equal_parts(layout, tuple(names))
    means = _reduce_to_shards(equal_parts, names, wholes)
    return _gather(equal_parts, names, means)


def _reduce_to_shards(
    layout: ShardTable, names: Sequence[str], wholes: Sequence[Tensor]
) -> list[Tensor]:
    """Average whole tensors over all ranks, each rank its own shards. Return this rank's shards of the means.

    Rank 0 may hold the first half of a parameter, and rank 1 the second. Rank 0 then sends the second half of its
    tensor to rank 1, and averages the first halves of both tensors.
    """
    # A position says which elements of a parameter this rank holds.
    positions = [layout.position(name) for name in names]
    if layout.size == 1:  # the mean of one rank
        return list(map(ShardPosition.cut, positions, wholes))
    means = list(map(ShardPosition.blank, positions, wholes))  # to be filled
    for indices in in_buckets(wholes, BUCKET):  # some of the parameters at a time, to save memory
        # For each rank, the tensors to send: parts (boxes) of this rank's tensors.
        outgoing = lists_by_rank(layout)
        targets: list[Tensor] = []  # the parts of `means` that this rank computes, as views
        for index in indices:
            name = names[index]
            targets += boxes_in(means[index], layout.views(name))
            for rank in range(layout.size):  # itself included
                boxes = layout.position(name, rank).boxes
                outgoing[rank] += [box.of(wholes[index]) for box in boxes]
        _exchange_and_average(layout, outgoing, targets, wholes[indices[0]])
    return means


def _exchange_and_average(
    layout: ShardTable,
    outgoing: Sequence[Sequence[Tensor]],
    targets: Sequence[Tensor],
    wire: Tensor,
) -> None:
    """Send ``outgoing[r]`` to each rank r. Write the means over all ranks of the received tensors to `targets`.

    Each rank sends one tensor for each target, in the order of the targets. The messages have the dtype and the device
    of `wire`.
    """
    numel = sum(target.numel() for target in targets)
    shapes = [target.shape for target in targets]
    expected = [numel] * layout.size  # from each rank, itself included
    messages = Exchange(
        layout,
        outgoing,
        expected,
        dtype=wire.dtype,
        device=wire.device,
        operation="reducing gradients",
    )
    tensors_of_rank = messages.arrived([shapes] * layout.size)
    for target, *tensors in zip(targets, *tensors_of_rank, strict=True):
        _average(tensors, target)
    messages.end()


@remembered
def _in_equal_parts(layout: ShardTable, names: tuple[str, ...]) -> ShardTable:
    """Return a layout in which the named parameters are split equally over the same ranks."""
    specs = {name: layout.specs[name] for name in names}
    cuts = equal_intervals(specs, layout.size)
    return replace(layout, kind="flat", specs=specs, cuts=cuts, dtensors={})


def _average(tensors: Sequence[Tensor], target: Tensor) -> None:
    """Write the mean of two or more tensors to `target`.

    They are added in order, in fp32 or higher, and the mean is rounded once. So all ranks get the same bits. The mean
    of ``[1., 3.]`` and ``[3., 5.]`` is ``[2., 4.]``.
    """
    first, second, *others = tensors
    wide_dtype = ew.wide_dtype(target.dtype)
    total = target
    if target.dtype != wide_dtype:
        total = torch.empty_like(target, dtype=wide_dtype)
    torch.add(first.to(wide_dtype), second, out=total)
    for tensor in others:
        total.add_(tensor)
    torch.div(total, len(tensors), out=target)


def in_buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[int]]:
    """Group tensors of one dtype into lists of at most `limit` bytes. Yield each list, as indices of tensors.

    A tensor above the limit has a list of its own.

    >>> tensors = [
    ...     torch.zeros(2),
    ...     torch.zeros(2),
    ...     torch.zeros(9),
    ...     torch.zeros(2, dtype=torch.float64),
    ... ]
    >>> list(in_buckets(tensors, limit=16))  # in fp32 two elements have 8 bytes
    [[0, 1], [2], [3]]
    """
    nbytes_of_dtype: dict[torch.dtype, dict[int, int]] = {}
    for index, tensor in enumerate(tensors):
        nbytes_of_dtype.setdefault(tensor.dtype, {})[index] = tensor.nbytes
    for nbytes in nbytes_of_dtype.values():
        yield from split_into_buckets(nbytes, limit)
