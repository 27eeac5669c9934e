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
from muonfx.placement.buckets import cut_into_buckets
from muonfx.sharding.communication.agree import DTYPES, agree_on_leaves, dtype_of
from muonfx.sharding.communication.messages import Exchange, collective, copied, exchange, lists_by_rank
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.cut import equal_intervals
from muonfx.sharding.shards.dtensors import is_dtensor, local_leaves, local_of, transform_problem
from muonfx.sharding.shards.position import boxes_in
from muonfx.sharding.shards.table import ShardTable
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew

BUCKET = 1 << 25
"""The approximate bytes of whole tensors that one collective gathers or reduces."""


def gathered(
    layout: ShardTable,
    local: PyTree,
    *,
    names: Sequence[str] | None = None,
    differentiable: bool = False,
) -> PyTree:
    """Gather this rank's shards to whole tensors on every rank. With `names`, gather only these parameters."""
    leaves, treedef = tree.flatten(local)
    leaf_names = tree.names(local)
    problem: Exception | None = None
    if not differentiable:
        problem = transform_problem("layout.gather", local)
    with without_transforms():
        _agree_to_gather(layout, leaf_names, leaves, names, problem)
    shards: dict[str, Tensor] = {}
    for name, leaf in zip(leaf_names, leaves, strict=True):
        if leaf is None or (names is not None and name not in names):
            continue
        if differentiable and is_dtensor(leaf):
            shards[name] = leaf.to_local()  # it is differentiable, so a gradient reaches the DTensor
        else:
            shards[name] = local_of(leaf)
    if differentiable:
        wholes: Sequence[Tensor] = _Linear.apply(_gather, _reduce, layout, [*shards], *shards.values())
    else:
        with without_transforms():
            wholes = _gather(layout, [*shards], [*shards.values()])
    whole_of = dict(zip(shards, wholes, strict=True))
    return tree.unflatten(treedef, map(whole_of.get, leaf_names, leaves))  # a leaf that is not gathered is unchanged


def _agree_to_gather(
    layout: ShardTable,
    leaf_names: Sequence[str],
    leaves: Sequence[Any],
    names: Sequence[str] | None,
    problem: Exception | None,
) -> None:
    """Raise on all ranks unless all of them gather the same leaves, and have this rank's shard of each.

    `problem` is an error that this rank already has. Errors of this rank are raised on all ranks together.
    """
    arguments = sorted(names or ())
    try:
        local_leaves(layout, leaf_names, leaves)
        unknown = sorted(set(arguments) - set(leaf_names))
        if unknown:
            raise ShardingError(f"names: {unknown[0]!r} is not a leaf of the tree")
    except Exception as error:
        problem = problem or error
    agreement = agree_on_leaves(
        "gathering leaves",
        leaf_names,
        leaves,
        layout,
        problem,
        same=arguments,
        explain=lambda: {"arguments": str(arguments)},
    )
    if agreement.missing:  # equal on all ranks, so all of them raise
        raise ShardingError(
            f"{leaf_names[agreement.missing[0]]!r} is None on some ranks, expected a shard on all ranks or None on "
            "all: pass the shard of every rank"
        )


def all_reduce(layout: ShardTable, values: Tensor, what: str, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce a tensor elementwise over all ranks, in place. `what` names the operation in errors."""
    if layout.group is None or layout.size == 1:
        return
    with collective(what):
        dist.all_reduce(values, op=op, group=layout.group)


_Collective = Callable[[ShardTable, Sequence[str], Sequence[Tensor]], list[Tensor]]
"""The type of `_gather` and `_reduce`: from the tensors of the named parameters to a list of tensors."""


@torch.no_grad()
def _gather(layout: ShardTable, names: Sequence[str], shards: Sequence[Tensor]) -> list[Tensor]:
    """Gather the named parameters. Return whole tensors on every rank, from the `shards` of this rank."""
    wholes: list[Tensor] = []
    for name, shard in zip(names, shards, strict=True):
        wholes.append(shard.new_empty(layout.specs[name].shape))
    for indices in in_buckets(wholes, BUCKET):
        outgoing = lists_by_rank(layout)
        incoming = lists_by_rank(layout)
        for index in indices:
            _list_messages(layout, names[index], shards[index], wholes[index], outgoing, incoming)
        if layout.group is None or _are_on_all_ranks(layout, [names[index] for index in indices]):
            copied(outgoing[layout.rank], incoming[layout.rank])
        else:
            exchange(layout, outgoing, incoming, wholes[indices[0]], "gathering")
    return wholes


def _list_messages(
    layout: ShardTable,
    name: str,
    shard: Tensor,
    whole: Tensor,
    outgoing: list[list[Tensor]],
    incoming: list[list[Tensor]],
) -> None:
    """Add the boxes of a parameter that this rank sends to `outgoing`, and those that it receives to `incoming`.

    Boxes of this rank's `shard` are sent to ranks that do not hold it. Boxes of `whole` are received.
    """
    for position, holders in layout.holders(name).items():
        boxes = [box.of(whole) for box in position.boxes]
        # Rank r receives a shard from holder number r modulo the number of holders.
        if layout.rank not in holders:
            incoming[holders[layout.rank % len(holders)]] += boxes
            continue
        shard_boxes = boxes_in(shard, layout.views(name))
        outgoing[layout.rank] += shard_boxes
        incoming[layout.rank] += boxes
        for receiver in range(holders.index(layout.rank), layout.size, len(holders)):
            if receiver not in holders:
                outgoing[receiver] += shard_boxes


class _Linear(torch.autograd.Function):
    """A gather and a mean over ranks as an autograd function. Each is the backward pass, or transpose, of the other."""

    # Gathering is the transpose of the mean over ranks if whole gradients are gradients of each rank's own loss, and
    # gradients of shards are gradients of the mean loss.

    @staticmethod
    def forward(
        function: _Collective, transpose: _Collective, layout: ShardTable, names: Sequence[str], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(function(layout, names, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.function, ctx.transpose, ctx.layout, ctx.names = inputs[:4]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, *_Linear.apply(ctx.transpose, ctx.function, ctx.layout, ctx.names, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Linear.apply(ctx.function, ctx.transpose, ctx.layout, ctx.names, *tangents[4:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        """Run the collective once for all entries of a batch. Return one stack for each tensor, and its dims, all 0.

        Two tensors ``a, b`` in a batch of three are sent as ``a0, b0, a1, b1, a2, b2``.
        """
        function, transpose, layout, names, *tensors = inputs
        batches: list[Tensor] = []
        for tensor, dim in zip(tensors, in_dims[4:], strict=True):  # the first four arguments are not tensors
            if dim is None:  # the same tensor for each entry of the batch
                batches.append(tensor.expand(info.batch_size, *tensor.shape))
            else:
                batches.append(tensor.movedim(dim, 0))
        entries: list[Tensor] = []
        for index in range(info.batch_size):
            entries += [batch[index] for batch in batches]
        results = _Linear.apply(function, transpose, layout, [*names] * info.batch_size, *entries)
        # Tensor number `index` of each entry: every `len(tensors)`-th result.
        stacks = [torch.stack(results[index :: len(tensors)]) for index in range(len(tensors))]
        return tuple(stacks), (0,) * len(stacks)


def reduce_scattered(layout: ShardTable, grads: PyTree) -> PyTree:
    """Average the whole gradients of all ranks. Return a tree with this rank's shards of the mean.

    A gradient that is None on some ranks counts as zero there. It stays None if it is None on all ranks.
    """
    leaves, treedef = tree.flatten(grads)
    names = tree.names(grads)
    device = tree.device_of(grads)
    problem: Exception | None = transform_problem("layout.reduce_scatter", grads)
    with without_transforms():
        for name, leaf in zip(names, leaves, strict=True):
            problem = _problem_of_gradient(layout, name, leaf) or problem
        agreement = agree_on_leaves("reducing gradients", names, leaves, layout, problem)
        gradients: dict[str, Tensor] = {}
        for name, leaf, code in zip(names, leaves, agreement.codes, strict=True):
            if leaf is not None:
                gradients[name] = leaf.detach()
            elif code:  # another rank has this gradient, and the mean is over all ranks
                gradients[name] = torch.zeros(layout.specs[name].shape, dtype=dtype_of(code), device=device)
        shards = _reduce(layout, [*gradients], [*gradients.values()])
    shard_of = dict(zip(gradients, shards, strict=True))
    return tree.unflatten(treedef, map(shard_of.get, names))


def _problem_of_gradient(layout: ShardTable, name: str, gradient: Any) -> Exception | None:
    """Return the error of a gradient that does not fit the layout, to be raised on all ranks together; else None."""
    if name not in layout.specs:
        return ShardingError(f"{name!r} is not a parameter of {layout!r}")
    if gradient is None:
        return None
    if gradient.dtype not in DTYPES:
        return ShardingError(f"the gradient of {name!r} has dtype {gradient.dtype}, expected a floating dtype")
    if tuple(gradient.shape) != layout.specs[name].shape:
        return ShardingError(
            f"the gradient of {name!r} has shape {tuple(gradient.shape)}, expected {layout.specs[name].shape}, the "
            "global shape of the parameter: pass unsharded gradients"
        )
    return None


@torch.no_grad()
def _reduce(layout: ShardTable, names: Sequence[str], wholes: Sequence[Tensor]) -> list[Tensor]:
    """Average whole tensors over all ranks. Return a list with this rank's shards of the means."""
    has_elements = any(whole.numel() for whole in wholes)
    if layout.size > 1 and has_elements and _are_on_all_ranks(layout, names):
        # Every rank needs whole means: each averages an equal part, and the parts are gathered. This sends less than
        # every rank sending its whole tensors to every other.
        equal = _in_equal_parts(layout, tuple(names))
        return _gather(equal, names, _reduce(equal, names, wholes))
    means: list[Tensor] = []
    for name, whole in zip(names, wholes, strict=True):
        means.append(layout.position(name).blank(whole))
    for indices in in_buckets(wholes, BUCKET):
        outgoing = lists_by_rank(layout)
        targets: list[Tensor] = []
        for index in indices:
            targets += boxes_in(means[index], layout.views(names[index]))
            for rank in range(layout.size):
                outgoing[rank] += [box.of(wholes[index]) for box in layout.position(names[index], rank).boxes]
        _exchange_and_average(layout, outgoing, targets, wholes[indices[0]])
    return means


def _exchange_and_average(
    layout: ShardTable, outgoing: Sequence[Sequence[Tensor]], targets: Sequence[Tensor], wire: Tensor
) -> None:
    """Send ``outgoing[r]`` to each rank r. Write the means over all ranks of the received tensors to `targets`."""
    if layout.group is None:
        _average_each(outgoing, targets)
        return
    shapes = [target.shape for target in targets]
    expected = [sum(map(Tensor.numel, targets))] * layout.size
    messages = Exchange(layout, outgoing, expected, dtype=wire.dtype, device=wire.device, what="reducing gradients")
    received = messages.arrived([shapes] * layout.size)
    _average_each(received, targets)
    messages.end()


def _are_on_all_ranks(layout: ShardTable, names: Sequence[str]) -> bool:
    """Return True if every rank holds every element of these parameters."""
    groups: list[Sequence[int]] = []
    for name in names:
        groups += layout.holders(name).values()
    return all(len(ranks) == layout.size for ranks in groups)


def _in_equal_parts(layout: ShardTable, names: tuple[str, ...]) -> ShardTable:
    """Return a layout in which the named parameters are split equally over the same ranks. Cached."""
    if names not in layout.equal_parts:
        specs = {name: layout.specs[name] for name in names}
        cuts = equal_intervals(specs, layout.size)
        layout.equal_parts[names] = replace(layout, kind="flat", specs=specs, cuts=cuts, dtensors={})
    return layout.equal_parts[names]


def _average_each(tensors_of_rank: Sequence[Sequence[Tensor]], targets: Sequence[Tensor]) -> None:
    """Write the mean of the tensors of all ranks to each target."""
    for target, *tensors in zip(targets, *tensors_of_rank, strict=True):
        _average(tensors, target)


def _average(tensors: Sequence[Tensor], target: Tensor) -> None:
    """Write the mean of some tensors to `target`. Add them in order in fp32 or higher, and round once."""
    wide = ew.wide_dtype(target.dtype)
    first, *others = tensors
    if target.dtype == wide and others:
        total = torch.add(first, others.pop(0), out=target)
    else:
        total = first.to(wide, copy=True)
    for tensor in others:
        total += tensor
    target.copy_(total.div_(len(tensors)))


def in_buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[int]]:
    """Group tensors of one dtype into lists of at most `limit` bytes. Yield each list, as indices of tensors."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        nbytes_of = {index: tensor.nbytes for index, tensor in enumerate(tensors) if tensor.dtype == dtype}
        yield from cut_into_buckets(nbytes_of, limit)
