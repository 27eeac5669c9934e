"""Laws of layouts, which hold before any process runs: what each rank holds, and what follows from that alone."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding import boxes
from tests.sharding.cases import Model, Zero, bits
from tests.sharding.strategies import models, pretended, zeros

SIZES = st.integers(1, 5)


@st.composite
def looked_at(draw: st.DrawFn, kinds: Any = pretended) -> tuple[Model, Any]:
    """A model, and a layout of it that no process runs."""
    drawn, size = draw(models()), draw(SIZES)
    kind = draw(kinds(drawn, size))
    return drawn, kind.of(drawn.params(), size)


@given(looked_at())
def test_every_element_is_held_once_or_by_all(case: tuple[Model, Any]):
    drawn, layout = case
    for name in drawn.leaves:
        shape = layout.specs[name].shape
        assert shape == drawn.leaves[name].shape
        held = {piece.boxes for rank in range(layout.size) if (piece := layout.piece(name, rank)).numel}
        assert boxes.cover(shape, [box for part in held for box in part]) is None
        for rank in range(layout.size):
            piece = layout.piece(name, rank)
            assert sum(box.numel for box in piece.boxes) == piece.numel == torch.Size(piece.shape).numel()


@given(looked_at())
def test_assemble_undoes_shard(case: tuple[Model, Any]):
    drawn, layout = case
    for whole in (drawn.params(), drawn.grads(0)):
        before = [leaf if leaf is None else leaf.clone() for leaf in whole.values()]
        locals_ = [layout.shard(whole, rank) for rank in range(layout.size)]
        again = layout.assemble(locals_)
        assert list(again) == list(whole)
        for name, leaf in whole.items():
            assert (again[name] is None) == (leaf is None)
            assert leaf is None or bits(again[name]) == bits(leaf)
        for rank, local in enumerate(locals_):
            for name, leaf in local.items():
                assert leaf is None or leaf.dtype == drawn.leaves[name].dtype
                assert leaf is None or tuple(leaf.shape) == tuple(layout.piece(name, rank).shape)
        for leaf in mfx.tree.tensors(locals_):
            leaf.fill_(7)  # local tensors are copies
        assert all(x is y or bits(x) == bits(y) for x, y in zip(whole.values(), before, strict=True))


@given(looked_at(lambda drawn, size: zeros()), st.sampled_from((1, 2, 8)))
def test_alignment_holds_for_each_rank_of_its_own(case: tuple[Model, Any], alignment: int):
    drawn, layout = case
    for partition in ("whole", "flat", "each"):
        layout = Zero(1, partition, alignment).of(drawn.params(), layout.size)
        assert all(length % alignment == 0 for length in layout.buffer.lengths)
        if partition == "flat":
            continue
        spans: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(layout.size)}
        for name, leaf in drawn.leaves.items():
            pieces = {rank: layout.piece(name, rank) for rank in range(layout.size)}
            owners = [rank for rank, piece in pieces.items() if piece.numel]
            start = layout.buffer.starts[name]
            assert start % alignment == 0
            assert sum(piece.numel for piece in pieces.values()) == leaf.numel
            if partition == "whole":
                assert len(owners) == (leaf.numel > 0)  # whole, at one rank
                assert all(tuple(pieces[rank].shape) == leaf.shape for rank in owners)
            else:
                assert all(pieces[rank].numel == pieces[owners[0]].numel for rank in owners[:-1])
                assert all(pieces[rank].numel % alignment == 0 for rank in owners[:-1])
            for rank in owners:
                spans[rank].append((start, start + pieces[rank].numel))
        for rank, found in spans.items():
            found.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(found))
            assert not found or found[-1][1] <= layout.buffer.lengths[rank]


@given(models(), SIZES)
def test_a_layout_is_replicated_where_every_rank_holds_all(drawn: Model, size: int):
    params = drawn.params()
    assert sharding.replicated(params, size).is_replicated
    assert not sharding.replicated(params, size).is_flat
    for partition in ("whole", "flat", "each"):
        layout = sharding.zero(params, size, partition=partition)
        assert layout.is_flat
        assert layout.is_replicated == (size == 1 or not drawn.numel)


AB = {"a": torch.zeros(2, 2), "b": torch.zeros(2, 3)}
BA = {"b": torch.zeros(2), "a": torch.zeros(3), "none": torch.zeros(0)}
LISTS = {"blocks": [{"w": torch.zeros(2), "b": torch.zeros(3)}]}
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: sharding.flat(AB, 3, order=["b", "a"], cuts=[0, 4, 9]), "cuts"),
    (lambda: sharding.flat(AB, 3, order=["b", "a"], cuts=[0, 4, 3, 10]), "cuts"),
    (lambda: sharding.flat(AB, 3, order=["b", "a"], cuts=[1, 4, 9, 10]), "cuts"),
    (lambda: sharding.flat(AB, 3, order=["b", "a"], cuts=[0, 4, 8, 9]), "'a'"),
    (lambda: sharding.flat(AB, 3, order=["b"], cuts=[0, 4, 9, 10]), "'a'"),
    (lambda: sharding.flat(AB, 3, order=["b", "a", "a"], cuts=[0, 4, 9, 10]), "'a'"),
    (lambda: sharding.flat(AB, 1, order=["a", "b"], cuts=[0, 12], starts={"a": 0, "b": 3}), "'b'"),
    (lambda: sharding.flat(BA, 1, cuts=[0, 5]), r"order: missing, .* give order=list\(params\)"),
    (lambda: sharding.flat(LISTS, 1, cuts=[0, 5]), r"order: missing, .* give order=list\(params\)"),
    (lambda: sharding.flat(BA, 1, cuts=[0, 8], starts={"bb": 0, "b": 0, "a": 4, "none": 4}), "'bb' is no parameter"),
    (lambda: sharding.flat(BA, 1, cuts=[0, 8], starts={"b": 0, "none": 4}), "starts: 'a' begins at None"),
    (
        lambda: sharding.flat(BA, 1, cuts=[0, 8], starts={"b": 0, "a": 1, "none": 4}),
        "starts: 'a' begins at 1, expected 2 or more, where 'b' ends",
    ),
    (lambda: sharding.zero(AB, 2, stage=4), "stage"),
    (lambda: sharding.zero(AB, 2, partition="rows"), "partition"),
    (lambda: sharding.zero(AB, 2, alignment=0), "alignment"),
    (lambda: sharding.zero(AB, 0), "group: found 0"),
    (lambda: sharding.replicated(), r"params: found .* write replicated\(params\)"),
    (lambda: sharding.replicated(4), r"params: found .* write replicated\(params\)"),
    (lambda: sharding.zero(AB, 2).shard({"other": torch.zeros(2, 2)}), "'other'"),
    (lambda: sharding.zero(AB, 2).shard({"a": torch.zeros(2, 3)}), r"'a' has shape \(2, 3\)"),
]
SHARDED = [make for make, _ in WRONG[-2:]]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_layout_names_a_wrong_argument_or_leaf(make: Callable[[], Any], message: str):
    kind = TypeError if message.startswith("params") else sharding.ShardingError if make in SHARDED else ValueError
    with pytest.raises(kind, match=message):
        make()


def test_flat_buffers_have_the_given_order_or_that_of_the_starts():
    params = {"b": torch.zeros(2), "a": torch.zeros(3), "none": torch.zeros(0)}
    for layout, numels in (
        (sharding.flat(params, 2, order=list(params), cuts=[0, 2, 5]), [0, 2]),
        (sharding.flat(params, 2, starts={"b": 0, "a": 4, "none": 4}, cuts=[0, 4, 8]), [0, 2]),
        (sharding.flat(dict(sorted(params.items())), 2, cuts=[0, 3, 5]), [3, 0]),
    ):
        assert [layout.piece(name, 0).numel for name in ("a", "b")] == numels
