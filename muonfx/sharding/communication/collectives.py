"""Collectives over trees of tensors for a ZeRO training loop: gather shards, and reduce gradients to shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.internal.tracing import without_transforms
from muonfx.placement.buckets import cut_into_buckets
from muonfx.sharding.communication.agree import DTYPES, agree_on_leaves, dtype_of
from muonfx.sharding.communication.messages import Exchange, copied
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.cut import equal_intervals
from muonfx.sharding.shards.dtensors import is_dtensor, local_of
from muonfx.sharding.shards.local_leaves import local_leaves, outside_transforms
from muonfx.sharding.shards.once import Once
from muonfx.sharding.shards.position import Window, part
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
    every = tree.names(local)
    with outside_transforms("layout.gather", *([] if differentiable else [local])) as problem:
        try:
            local_leaves(layout, every, leaves)
            if unknown := sorted(set(names or ()) - set(every)):
                raise ShardingError(f"names: {unknown[0]!r} is not a leaf of the tree")
        except Exception as error:  # on this rank only, perhaps: raised on all ranks together
            problem = problem or error
        chosen = sorted(names or ())
        agreement = agree_on_leaves(
            "gathering leaves", every, leaves, layout, problem, same=chosen, explain=lambda: {"arguments": str(chosen)}
        )
    if agreement.missing:  # equal on all ranks, so all of them raise
        raise ShardingError(
            f"{every[agreement.missing[0]]!r} is None on some ranks, expected a shard on all ranks or None on all: "
            "pass the shard of every rank"
        )
    chosen = [
        place for place, leaf in enumerate(leaves) if leaf is not None and (names is None or every[place] in names)
    ]
    # to_local() is differentiable, so a gradient reaches the DTensor.
    mine = [leaves[i].to_local() if differentiable and is_dtensor(leaves[i]) else local_of(leaves[i]) for i in chosen]
    labels = [every[place] for place in chosen]
    if differentiable:
        wholes: Sequence[Tensor] = _Linear.apply(_gather, _reduce, layout, labels, *mine)
    else:
        with without_transforms():
            wholes = _gather(layout, labels, mine)
    for place, whole in zip(chosen, wholes, strict=True):
        leaves[place] = whole
    return tree.unflatten(treedef, leaves)


_Way = Callable[[ShardTable, Sequence[str], Sequence[Tensor]], list[Tensor]]
"""The type of `_gather` and `_reduce`: from the tensors of the named parameters to a list of tensors."""


@torch.no_grad()
def _gather(layout: ShardTable, names: Sequence[str], locals_: Sequence[Tensor]) -> list[Tensor]:
    """Gather the named parameters. Return whole tensors on every rank, given this rank's shards in `locals_`."""
    wholes = [local.new_empty(layout.specs[name].shape) for name, local in zip(names, locals_, strict=True)]
    for places in in_buckets(wholes, BUCKET):
        first = wholes[places[0]]
        outgoing: list[list[Tensor]] = [[] for _ in range(layout.size)]
        incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
        crossing = False
        for place in places:
            for piece, ranks in layout.holders(names[place]).items():
                crossing = crossing or len(ranks) < layout.size
                if layout.rank in ranks:
                    sent = [window.of(locals_[place]) for window in _windows(layout, names[place])]
                    outgoing[layout.rank] += sent
                    incoming[layout.rank] += [part(wholes[place], box) for box in piece.boxes]
                    held = set(ranks)
                    # rank t receives from holder number t modulo the number of holders
                    for taker in range(ranks.index(layout.rank), layout.size, len(ranks)):
                        if taker not in held:
                            outgoing[taker] += sent
                else:
                    incoming[ranks[layout.rank % len(ranks)]] += [part(wholes[place], box) for box in piece.boxes]
        if crossing and layout.group is not None:
            exchange(outgoing, incoming, first, layout, "gathering")
        else:
            copied(outgoing[layout.rank], incoming[layout.rank])
    return wholes


def _windows(layout: ShardTable, name: str) -> list[Window]:
    """Return where each rectangular part (box) of a parameter's shard is in this rank's local tensor. Cached."""
    piece = layout.piece(name)
    return layout.once(("windows", name), lambda: [piece.window(box) for box in piece.boxes])


class _Linear(torch.autograd.Function):
    """A gather and a mean over ranks as an autograd function. Each is the backward pass of the other."""

    # Gathering is the transpose of the mean over ranks if whole gradients are gradients of each rank's own loss, and
    # gradients of shards are gradients of the mean loss.

    @staticmethod
    def forward(
        there: _Way, back: _Way, layout: ShardTable, names: Sequence[str], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(there(layout, names, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.there, ctx.back, ctx.layout, ctx.names = inputs[:4]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, *_Linear.apply(ctx.back, ctx.there, ctx.layout, ctx.names, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Linear.apply(ctx.there, ctx.back, ctx.layout, ctx.names, *tangents[4:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        there, back, layout, names, *tensors = inputs
        count, number = info.batch_size, len(tensors)
        batches = [
            tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[4:], strict=True)
        ]
        each = [batch[place] for place in range(count) for batch in batches]
        found = _Linear.apply(there, back, layout, [*names] * count, *each)
        return tuple(torch.stack(found[place::number]) for place in range(number)), (0,) * number


def reduce_scattered(layout: ShardTable, grads: PyTree) -> PyTree:
    """Average the whole gradients of all ranks. Return a tree with this rank's shards of the mean."""
    leaves, treedef = tree.flatten(grads)
    names = tree.names(grads)
    with outside_transforms("layout.reduce_scatter", grads) as problem:
        for name, leaf in zip(names, leaves, strict=True):
            if name not in layout.specs:
                problem = ShardingError(f"{name!r} is not a parameter of {layout!r}")
            elif leaf is not None and leaf.dtype not in DTYPES:
                problem = ShardingError(f"the gradient of {name!r} has dtype {leaf.dtype}, expected a floating dtype")
            elif leaf is not None and tuple(leaf.shape) != layout.specs[name].shape:
                problem = ShardingError(
                    f"the gradient of {name!r} has shape {tuple(leaf.shape)}, expected {layout.specs[name].shape}, the "
                    "global shape of the parameter: pass unsharded gradients"
                )
        codes = agree_on_leaves("reducing gradients", names, leaves, layout, problem).codes
        device = tree.device_of(grads)
        places = [place for place, code in enumerate(codes) if code]
        full = [
            torch.zeros(layout.specs[names[place]].shape, dtype=dtype_of(codes[place]), device=device)
            if leaves[place] is None
            else leaves[place].detach()
            for place in places
        ]
        pieces = _reduce(layout, [names[place] for place in places], full)
    for place, piece in zip(places, pieces, strict=True):
        leaves[place] = piece
    return tree.unflatten(treedef, leaves)


@torch.no_grad()
def _reduce(layout: ShardTable, names: Sequence[str], full: Sequence[Tensor]) -> list[Tensor]:
    """Average the whole tensors in `full` over all ranks. Return a list with this rank's shards of the means."""
    held = [ranks for name in names for ranks in layout.holders(name).values()]
    if held and all(len(ranks) == layout.size for ranks in held) and layout.size > 1:
        # Every rank holds every element: reduce-scatter equal parts, then gather them.
        equal = _in_equal_parts(layout, tuple(names))
        return _gather(equal, names, _reduce(equal, names, full))
    results = [layout.piece(name).blank(whole) for name, whole in zip(names, full, strict=True)]
    for places in in_buckets(full, BUCKET):
        outgoing = [
            [part(full[place], box) for place in places for box in layout.piece(names[place], rank).boxes]
            for rank in range(layout.size)
        ]
        targets = [window.of(results[place]) for place in places for window in _windows(layout, names[place])]
        begun: Exchange | None = None
        if layout.group is not None:
            expected = [sum(target.numel() for target in targets)] * layout.size
            begun = start_exchange(
                layout, outgoing, expected, full[places[0]].dtype, full[places[0]].device, "reducing gradients"
            )
            outgoing = begun.arrived([[target.shape for target in targets]] * layout.size)
        for target, *theirs in zip(targets, *outgoing, strict=True):
            _average(theirs, target)
        if begun is not None:
            begun.end()
    return results


def _in_equal_parts(layout: ShardTable, names: tuple[str, ...]) -> ShardTable:
    """Return a layout in which the named parameters are split equally over the same ranks. Cached."""

    def make() -> ShardTable:
        specs = {name: layout.specs[name] for name in names}
        pieces = equal_intervals(specs, layout.size)
        return replace(layout, kind="flat", specs=specs, pieces=pieces, dtensors={}, once=Once())

    return layout.once(("equal parts", names), make)


def exchange(
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[Tensor]],
    wire: Tensor,
    layout: ShardTable,
    what: str,
) -> None:
    """Exchange tensors with all ranks: send ``outgoing[r]`` to rank r, and receive ``incoming[r]`` from it in place.

    Messages are sent in the dtype of `wire`, on its device. `what` names the operation in errors.
    """
    expected = [sum(tensor.numel() for tensor in tensors) for tensors in incoming]
    start_exchange(layout, outgoing, expected, wire.dtype, wire.device, what).wait(incoming)


def start_exchange(
    layout: ShardTable,
    outgoing: Sequence[Sequence[Tensor]],
    expected: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    what: str,
) -> Exchange:
    """Start an all-to-all: send ``outgoing[r]`` to rank r, and receive ``expected[r]`` elements from it.

    Messages have this `dtype` and `device`. `what` names the operation in errors. Call ``wait`` on the result.
    """
    assert layout.group is not None
    return Exchange(
        outgoing, expected, dtype=dtype, device=device, group=layout.group, what=what, buffers=layout.buffers
    )


def _average(parts: Sequence[Tensor], into: Tensor) -> None:
    """Write the mean of the tensors `parts` to `into`. Add them in order in fp32 or higher, and round once."""
    wide = ew.wide_dtype(into.dtype)
    if into.dtype == wide and len(parts) > 1:
        total, rest = torch.add(parts[0], parts[1], out=into), parts[2:]
    else:
        total, rest = parts[0].to(wide, copy=True), parts[1:]
    for theirs in rest:
        total += theirs
    into.copy_(total.div_(len(parts)))


def in_buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[int]]:
    """Group tensors of one dtype into lists of at most `limit` bytes. Yield each list, as indices of tensors."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        yield from cut_into_buckets({i: x.nbytes for i, x in enumerate(tensors) if x.dtype == dtype}, limit)
