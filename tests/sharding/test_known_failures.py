"""Bugs of other libraries: each scheme is shown to be wrong, and its case right here.

First the schemes, in the simplest form of the released code, in one process that simulates all ranks. A function
receives the gradients as one dict for each rank, and returns the update of each parameter, joined from all ranks.
"""

from collections.abc import Sequence
from itertools import accumulate as running
from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx import sharding
from muonfx.polar import orthogonalize
from tests.processes import Here, World, on_ranks
from tests.sharding.cases import (
    Case,
    Flat,
    LayoutCase,
    Leaf,
    Model,
    Placed,
    Replicated,
    Zero,
    laid_out,
    model,
    muon,
    two_groups,
)
from tests.sharding.test_law import check

pytestmark = pytest.mark.dist


Trees = Sequence[dict[str, Tensor]]


def mean(grads: Trees) -> dict[str, Tensor]:
    """The result of an all-reduce, added in the order of the ranks."""
    return {
        name: sum(tree[name].double() for tree in grads).div(len(grads)).float()
        for name in grads[0]
    }


def newton_schulz(x: Tensor) -> Tensor:
    return orthogonalize(x, dtype=torch.float32)


def whole(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """The right answer."""
    return {name: newton_schulz(grad) for name, grad in grads.items()}


def _flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in tree.values()])


def _unflat(flat: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([leaf.numel() for leaf in like.values()])
    return {
        name: part.view(leaf.shape) for part, (name, leaf) in zip(parts, like.items(), strict=True)
    }


def on_partly_reduced_gradients(grads: Trees, cuts: Sequence[int]) -> dict[str, Tensor]:
    """ZeRO with reduce_scatter, as DeepSpeed issue 7807 has it.

    A rank has the mean in its own interval of the buffer only; beyond, its own gradient is still there. A matrix that
    crosses a boundary is orthogonalized as stored there, and each rank keeps its interval of the result.
    """
    reduced, out = _flat(mean(grads)), []
    for rank, tree in enumerate(grads):
        begin, end = cuts[rank], cuts[rank + 1]
        buffer = _flat(tree)
        buffer[begin:end] = reduced[begin:end]
        out.append(_flat(whole(_unflat(buffer, tree)))[begin:end])
    return _unflat(torch.cat(out), grads[0])


def on_shards(grad: Tensor, ranks: int) -> Tensor:
    """Newton-Schulz on each rank's rows, as LLaMA-Factory's first Muon for FSDP2."""
    return torch.cat([newton_schulz(rows) for rows in grad.tensor_split(ranks)])


def on_shards_of_fixed_size(grad: Tensor, ranks: int) -> Tensor:
    """The same where a shard is a buffer of equal size on each rank, whose tail is not initialized."""
    size = -(-grad.shape[0] // ranks)
    rows = torch.full((size * ranks, grad.shape[1]), float("nan"))  # what empty() may hold
    rows[: len(grad)] = grad
    return torch.cat([newton_schulz(part) for part in rows.split(size)])[: len(grad)]


def in_padded_chunks(grads: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """A chunk of as many matrices as ranks at a time, the last one padded by repeating its last matrix as an output."""
    names = list(grads)
    out = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    for base in range(0, len(names), ranks):
        chunk = names[base : base + ranks]
        # One tensor, several outputs.
        outputs = [out[name] for name in chunk] + [out[chunk[-1]]] * (ranks - len(chunk))
        # all_gather: each rank's contribution goes to its output
        for rank, output in enumerate(outputs):
            has_one = rank < len(chunk)
            output.copy_(newton_schulz(grads[chunk[rank]]) if has_one else torch.zeros_like(output))
    return out


def aligned_as_a_whole(
    grads: dict[str, Tensor], ranks: int, alignment: int
) -> tuple[list[int], list[int]]:
    """Padding at the tail only: where parameters begin, and where the buffer is cut."""
    starts = [0, *running(grad.numel() for grad in grads.values())]
    step = ranks * alignment
    total = -(-starts[-1] // step) * step
    return starts[:-1], [rank * total // ranks for rank in range(ranks + 1)]


def by_position(groups: Sequence[dict[str, Tensor]], muon_groups: int) -> dict[str, Tensor]:
    """Take the first groups for Muon's, whatever their parameters are."""
    out: dict[str, Tensor] = {}
    for place, group in enumerate(groups):
        for name, grad in group.items():
            out[name] = (
                newton_schulz(grad) if place < muon_groups and grad.ndim == 2 else grad.sign()
            )
    return out


def one_buffer_for_each_group(groups: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """A flat buffer for each group, empty or not."""
    return [torch.cat([grad.reshape(-1) for grad in group.values()]) for group in groups]


NS = mfx.orthogonalize(dtype=torch.float32)
FAR, NEAR = 0.05, 2e-5  # a wrong answer is nowhere near


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of an element; infinite where one is NaN."""
    off = max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
    return off if off == off else float("inf")


def own_gradients(drawn: Model, size: int) -> list[dict[str, Any]]:
    return [drawn.grads(drawn.steps - 1, rank) for rank in range(size)]


@pytest.mark.parametrize(
    "case",
    [
        *(Zero(2, "flat"), Zero(2, "whole"), Flat(("b", "a"), (0, 0, 20, 74))),
        *(Replicated(), Placed({"a": ("0",), "b": ("0",)})),
    ],
)
@on_ranks(3)
def test_each_rank_gets_its_pieces_of_the_reduced_gradients(here: Here, case: LayoutCase):
    """As local tensors of the kind that shards are."""
    drawn = model(steps=1, a=(7, 5), b=(3, 13))
    own = own_gradients(drawn, here.size)
    wanted = {name: sum(tree[name] for tree in own) / here.size for name in own[0]}
    layout = laid_out(case, drawn.params(), here)
    reduced, shards = layout.reduce_scatter(own[here.rank]), layout.shard(drawn.params())
    assert [type(leaf) for leaf in mfx.tree.leaves(reduced)] == [
        type(leaf) for leaf in mfx.tree.leaves(shards)
    ]
    assert apart(layout.gather(reduced), wanted) < 1e-6


@pytest.mark.parametrize("case", [Zero(2, "flat"), Flat(("a", "b"), (0, 29, 58))])
@on_ranks(2)
def test_matrices_that_cross_a_boundary_under_reduce_scatter(here: Here, case: LayoutCase):
    """DeepSpeed issue 7807: every rank has gradients of its own, which are reduced to pieces."""
    drawn = model(steps=1, a=(6, 5), b=(7, 4))
    own = own_gradients(drawn, here.size)
    wanted = whole(mean(own))
    assert apart(on_partly_reduced_gradients(own, [0, 29, 58]), wanted) > FAR
    layout = laid_out(case, drawn.params(), here, NS)
    local, sharded = layout.shard(drawn.params()), sharding.sharded(NS, layout)
    updates, _ = sharded.update(layout.reduce_scatter(own[here.rank]), sharded.init(local), local)
    assert apart(layout.gather(updates), wanted) < NEAR


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_fewer_matrices_than_ranks_and_a_last_chunk_that_is_not_full(world: World, count: int):
    """DeepSpeed pull requests 7919 and 7939: one tensor as several outputs of an all_gather."""
    drawn = model(steps=2, **{f"m{i}": (i + 2, 9) for i in range(count)})
    grads = drawn.grads(0)
    assert apart(in_padded_chunks(grads, 4), whole(grads)) > FAR
    layouts = (
        Zero(1, "whole"),
        Zero(3, "flat"),
        Replicated(),
        Placed(dict.fromkeys(drawn.leaves, ("0",))),
    )
    check(
        world, 4, [Case(drawn, two_groups(drawn.labels), layout, exact=True) for layout in layouts]
    )


def test_odd_sizes_in_bf16_that_padding_at_the_tail_cuts(world: World):
    """A buffer that is padded at its tail and cut equally keeps no parameter whole; whole partitions keep all."""
    shapes = {"a": (7, 3), "b": (5, 5), "c": (3, 11), "d": (9, 2)}
    drawn = Model(
        {n: Leaf(s, "muon", torch.bfloat16) for n, s in shapes.items()} | {"e": Leaf((13,))}, 0
    )
    drawn = Model(drawn.leaves, 0, (frozenset(),) * 2)
    starts, cuts = aligned_as_a_whole(drawn.grads(0), 3, 8)
    ends = [
        start + drawn.leaves[name].numel for start, name in zip(starts, drawn.leaves, strict=True)
    ]
    assert any(start < cut < end for start, end in zip(starts, ends, strict=True) for cut in cuts)

    layout = Zero(1, "whole").of(drawn.params(), 3)
    for name, leaf in drawn.leaves.items():
        assert [layout.position(name, rank).numel for rank in range(3)].count(leaf.numel) == 1
    tx = two_groups(drawn.labels)
    check(world, 3, [Case(drawn, tx, Zero(1, kind), exact=True) for kind in ("whole", "flat")])


@pytest.mark.parametrize("first", ["adamw", "muon"])
def test_groups_in_any_order(world: World, first: str):
    """AdamW's parameters in front of Muon's, in the tree and in the buffer; matrices among AdamW's."""
    leaves = {
        "a": Leaf((4, 6)),
        "b": Leaf((5,)),
        "y": Leaf((3, 5), "muon"),
        "z": Leaf((6, 2), "muon"),
    }
    names = sorted(leaves, key=lambda name: (leaves[name].label != first, name))
    drawn = Model({name: leaves[name] for name in names}, 0)
    grads = drawn.grads(0)
    groups = [
        {n: grads[n] for n in names if leaves[n].label == label} for label in ("adamw", "muon")
    ]
    assert apart(by_position(groups, 1), by_position(groups[::-1], 1)) > FAR
    cuts = (0, 20, 40, drawn.numel)
    layouts = (Flat(tuple(names), cuts), Flat(tuple(reversed(names)), cuts), Zero(1, "whole"))
    check(
        world, 3, [Case(drawn, two_groups(drawn.labels), layout, exact=True) for layout in layouts]
    )


@pytest.mark.parametrize("rows", [8, 7, 2])
def test_newton_schulz_on_shards(world: World, rows: int):
    """LLaMA-Factory pull request 10618: each rank its own rows; wrong from the first step, NaN from the second."""
    drawn = model(steps=3, w=(rows, 9))
    grad = drawn.grads(0)["w"]
    wanted = whole({"w": grad})
    assert apart({"w": on_shards(grad, 4)}, wanted) > FAR
    if rows % -(-rows // 4):  # a shard that is not full
        assert apart({"w": on_shards_of_fixed_size(grad, 4)}, wanted) == float("inf")
    case = Case(drawn, muon(), Placed({"w": ("0",)}), exact=True)
    check(world, 4, [case])
    check(world, 4, [case], dtensors=True)


def test_labels_chosen_for_a_number_accept_its_flat_shard(world: World):
    """The guard of `partition` against stacks of models compared the dims of a shard with those of the parameter."""
    drawn = model(steps=2, a=(), w=(3, 4))
    vectors = mfx.masked(mfx.scale_by_shape("fan_in"), mfx.routing.ndim(min=2))
    tx = mfx.partition({"muon": muon(), "adamw": vectors}, mfx.routing.default_labels_by_name)
    check(world, 3, [Case(drawn, tx, Flat(("w", "a"), (0, 5, 13, 13)), exact=True)])


@pytest.mark.parametrize("left", ["muon", "adamw"])
@pytest.mark.parametrize("how", ["no gradient", "zero update"])
def test_all_but_one_group_frozen(world: World, left: str, how: str):
    leaves = {
        "a": Leaf((4, 5), "muon"),
        "b": Leaf((5,)),
        "c": Leaf((6, 3), "muon"),
        "d": Leaf((3, 3)),
    }
    frozen = frozenset(name for name, leaf in leaves.items() if leaf.label != left)
    if how == "zero update":
        leaves = {
            n: Leaf(leaf.shape, "frozen") if n in frozen else leaf for n, leaf in leaves.items()
        }
    drawn = Model(leaves, 0, (frozen if how == "no gradient" else frozenset(),) * 2)
    grads = {name: grad for name, grad in drawn.grads(0).items() if name not in frozen}
    empty = [
        {n: grads[n] for n in grads if leaves[n].label == label} for label in ("muon", "adamw")
    ]
    with pytest.raises((RuntimeError, ValueError), match="non-empty"):
        one_buffer_for_each_group(empty)
    layouts = (
        Zero(1, "whole"),
        Zero(2, "flat"),
        Replicated(),
        Placed(dict.fromkeys(leaves, ("0",))),
    )
    check(
        world, 3, [Case(drawn, two_groups(drawn.labels), layout, exact=True) for layout in layouts]
    )


def test_the_wrong_schemes_are_right_where_nothing_is_uneven():
    """So it is the case that breaks them, not a slip in how they are written down here."""
    drawn = model(steps=1, a=(6, 5), b=(7, 4))
    same = [drawn.grads(0)] * 2
    # where all ranks have the same gradients, partly reduced ones are fully reduced: the scheme is then right
    assert apart(on_partly_reduced_gradients(same, [0, 29, 58]), whole(mean(same))) < NEAR
    grads = drawn.grads(0)
    assert apart(in_padded_chunks(grads, 2), whole(grads)) < NEAR  # a full chunk
