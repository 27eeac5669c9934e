"""Laws of layouts before any process runs: boxes and pieces, the cut over ranks, and what each rank holds."""

import pickle
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding.shards import boxes, cut
from muonfx.sharding.shards.boxes import Box, boxes_of_interval, cover, intersection
from muonfx.sharding.shards.flat_shard import FlatShard, FlatShardTensor
from muonfx.sharding.shards.position import ShardPosition
from tests.checkpoint.common import bits
from tests.sharding.cases import Model, Zero, models, pretended

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
        held = {
            piece.boxes
            for rank in range(layout.size)
            if (piece := layout.position(name, rank)).numel
        }
        assert boxes.cover(shape, [box for part in held for box in part]) is None
        for rank in range(layout.size):
            piece = layout.position(name, rank)
            assert (
                sum(box.numel for box in piece.boxes)
                == piece.numel
                == torch.Size(piece.shape).numel()
            )


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
                assert leaf is None or tuple(leaf.shape) == tuple(layout.position(name, rank).shape)
        for leaf in mfx.tree.tensors(locals_):
            leaf.fill_(7)  # local tensors are copies
        assert all(
            x is y or bits(x) == bits(y) for x, y in zip(whole.values(), before, strict=True)
        )


@given(models(), SIZES)
def test_zero_gives_whole_parameters_to_one_rank_or_equal_parts_to_each(drawn: Model, size: int):
    for partition in ("whole", "each"):
        layout = Zero(1, partition).of(drawn.params(), size)
        for name, leaf in drawn.leaves.items():
            pieces = [layout.position(name, rank) for rank in range(size)]
            held = [piece for piece in pieces if piece.numel]
            assert sum(piece.numel for piece in pieces) == leaf.numel
            if partition == "whole":
                assert len(held) == (leaf.numel > 0)
                assert all(tuple(piece.shape) == leaf.shape for piece in held)
            else:
                assert all(piece.numel == held[0].numel for piece in held[:-1])


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
    (lambda: sharding.flat(BA, 1, cuts=[0, 5]), r"order: found None, .* pass order=list\(params\)"),
    (
        lambda: sharding.flat(LISTS, 1, cuts=[0, 5]),
        r"order: found None, .* pass order=list\(params\)",
    ),
    (
        lambda: sharding.flat(BA, 1, cuts=[0, 8], starts={"bb": 0, "b": 0, "a": 4, "none": 4}),
        "starts: found 'bb'",
    ),
    (lambda: sharding.flat(BA, 1, cuts=[0, 8], starts={"b": 0, "none": 4}), "starts: found 'a'"),
    (
        lambda: sharding.flat(BA, 1, cuts=[0, 8], starts={"b": 0, "a": 1, "none": 4}),
        "starts: 'a' begins at 1, expected 2 or more, where 'b' ends",
    ),
    (lambda: sharding.zero(AB, 2, stage=4), "stage"),
    (lambda: sharding.zero(AB, 2, partition="rows"), "partition"),
    (
        lambda: sharding.zero(AB, 0),
        "group, a number of ranks, must be an int of 1 or more, found 0",
    ),
    (lambda: sharding.replicated(4), "params must be a tensor or None, found int"),
    (lambda: sharding.zero(AB, 2).shard({"other": torch.zeros(2, 2)}), "'other'"),
    (lambda: sharding.zero(AB, 2).shard({"a": torch.zeros(2, 3)}), r"'a' has shape \(2, 3\)"),
]
SHARDED = [make for make, _ in WRONG[-2:]]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_layout_names_a_wrong_argument_or_leaf(make: Callable[[], Any], message: str):
    kind = (
        TypeError
        if message.startswith("params")
        else sharding.ShardingError
        if make in SHARDED
        else ValueError
    )
    with pytest.raises(kind, match=message):
        make()


def test_flat_buffers_have_the_given_order_or_that_of_the_starts():
    params = {"b": torch.zeros(2), "a": torch.zeros(3), "none": torch.zeros(0)}
    for layout, numels in (
        (sharding.flat(params, 2, order=list(params), cuts=[0, 2, 5]), [0, 2]),
        (sharding.flat(params, 2, starts={"b": 0, "a": 4, "none": 4}, cuts=[0, 4, 8]), [0, 2]),
        (sharding.flat(dict(sorted(params.items())), 2, cuts=[0, 3, 5]), [3, 0]),
    ):
        assert [layout.position(name, 0).numel for name in ("a", "b")] == numels


def test_flat_takes_names_from_an_iterator_and_a_tree_without_parameters():
    layout = sharding.flat(AB, 2, order=iter(["b", "a"]), cuts=[0, 6, 10])
    assert [layout.position("b", rank).numel for rank in range(2)] == [6, 0]
    assert not sharding.flat([], 1, cuts=[0, 0]).specs


def test_assemble_takes_the_values_of_the_lowest_rank_of_replicas():
    layout = sharding.replicated({"a": torch.zeros(2)}, 2)
    whole = layout.assemble([{"a": torch.ones(2)}, {"a": torch.zeros(2)}])
    assert torch.equal(whole["a"], torch.ones(2))


@pytest.mark.parametrize("other", [{"a": AB["a"]}, {**AB, "c": AB["a"]}])
def test_assemble_requires_the_same_leaves_of_all_ranks(other: dict[str, torch.Tensor]):
    layout = sharding.replicated(AB, 2)
    with pytest.raises(ValueError, match="argument 2"):
        layout.assemble([AB, other])


def test_converting_a_state_for_a_checkpoint_does_not_repeat_warnings_of_a_mask():
    def mask(params: Any) -> Any:
        warnings.warn("a mask of the user", stacklevel=2)
        return dict.fromkeys(params, True)

    tx = sharding.sharded(
        mfx.chain(mfx.momentum(), mfx.add_decayed_weights(0.1, mask=mask)), sharding.zero(AB, 1)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = tx.init(AB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharding.to_global(tx, state)


SMALL_SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    flat = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return flat[tuple(map(slice, box.offsets, box.ends))].flatten().tolist()


@given(SMALL_SHAPES, st.data())
def test_the_boxes_of_an_interval_hold_its_elements_in_order(shape, data):
    numel = torch.Size(shape).numel()
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = boxes_of_interval(shape, start, stop)
    assert [i for box in boxes for i in elements(shape, box)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel for box in boxes)
    assert len({box.offsets for box in boxes}) == len(boxes)


@given(SMALL_SHAPES, st.data())
def test_a_cut_array_is_covered_and_nothing_less_or_more_is(shape, data):
    numel = torch.Size(shape).numel()
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    boxes = [box for a, b in pairwise(cuts) for box in boxes_of_interval(shape, a, b)]
    boxes = data.draw(st.permutations(boxes))
    assert cover(shape, boxes) is None
    if boxes:
        assert "elements of" in str(cover(shape, boxes[1:]))
        assert cover(shape, [*boxes, boxes[0]]) == "overlap"


def test_a_hole_beside_an_overlap_is_no_cover():
    # 15 elements, of 4 x 3 = 12
    rows = [Box((0, 0), (2, 3)), Box((1, 0), (2, 3)), Box((3, 0), (1, 3))]
    assert cover((5, 3), rows) == "overlap"
    assert cover((4, 3), [Box((0, 0), (4, 3, 1))]) == "go beyond its sides"
    assert cover((4,), [Box((3,), (4,))]) == "go beyond its sides"
    assert cover((), [Box((), ())]) is None
    assert cover((0, 3), []) is None


@given(st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 4)) for _ in range(4)]))
def test_an_intersection_is_what_both_have(sides):
    shape = (8, 8)
    one, other = Box(*zip(*sides[:2], strict=True)), Box(*zip(*sides[2:], strict=True))
    common = set(elements(shape, one)) & set(elements(shape, other))
    both = intersection(one, other)
    assert (set() if both is None else set(elements(shape, both))) == common


def test_an_interval_is_copied_and_filled_and_nothing_else():
    tensor = FlatShardTensor.of(FlatShard((4, 5), 3, torch.arange(5.0)))
    assert tensor.shape == (4, 5)
    copy = pickle.loads(pickle.dumps(tensor.clone()))
    tensor.fill_(1.0)
    assert tensor.shard.data.tolist() == [1.0] * 5
    assert copy.shard.data.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert tensor.copy_(copy) is tensor
    assert torch.equal(tensor.shard.data, copy.shard.data)
    assert tensor.to(torch.float64).shard.dtype == torch.float64
    elsewhere = FlatShardTensor.of(FlatShard((4, 5), 4, torch.arange(5.0)))
    for refused in (
        lambda: tensor + 1,
        lambda: tensor.copy_(elsewhere),
        lambda: tensor.copy_(torch.zeros(4, 5)),
    ):
        with pytest.raises(NotImplementedError, match="only a shard of the whole"):
            refused()


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple), st.data())
def test_the_parts_of_a_flat_piece_are_the_values_of_its_boxes(
    shape: tuple[int, ...], data: st.DataObject
):
    whole = torch.arange(prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, whole.numel()))
    piece = FlatShard.cut(whole, start, data.draw(st.integers(start, whole.numel())))
    for box in piece.boxes:
        assert piece.values_in(box).equal(box.of(whole))
    assert sum(box.numel for box in piece.boxes) == piece.data.numel()


SHAPES = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)


def held(piece: ShardPosition, shape: Sequence[int]) -> list[int]:
    """The elements of a piece, in the order of its local tensor."""
    return piece.cut(torch.arange(prod(shape)).view(*shape)).flatten().tolist()


@st.composite
def on_meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    shape = draw(SHAPES)
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ways = st.one_of(
        st.just(Replicate()),
        st.integers(0, len(shape) - 1).map(Shard),
        st.builds(
            lambda dim, factor: _StridedShard(dim, split_factor=factor),
            st.integers(0, len(shape) - 1),
            st.integers(1, 3),
        ),
    )
    return shape, mesh, draw(st.lists(ways, min_size=len(mesh), max_size=len(mesh)))


@given(on_meshes(), st.randoms(use_true_random=False))
def test_pieces_on_a_mesh_are_those_that_torch_cuts_for_each_rank(case: Any, random: Any):
    shape, mesh, placements = case
    coordinates: list[Any] = [*product(*map(range, mesh)), None]  # the last is on no mesh
    random.shuffle(coordinates)
    found = cut.OnMesh(shape, cut.MeshCoordinates(mesh, coordinates), placements)
    for rank, at in enumerate(coordinates):
        whole = torch.arange(prod(shape)).view(shape)
        for place, placement, parts in zip(at or (), placements, mesh, strict=at is not None):
            if not isinstance(placement, Replicate):
                whole = placement._split_tensor(whole, parts, with_padding=False, contiguous=True)[
                    0
                ][place]
        if at is None:
            assert found[rank].numel == 0
        else:
            assert tuple(found[rank].shape) == tuple(whole.shape)
            assert held(found[rank], shape) == whole.flatten().tolist()


@st.composite
def cuts(draw: st.DrawFn) -> cut.Cut:
    shape, size = draw(SHAPES), draw(st.integers(1, 5))
    start = draw(st.integers(0, 5))
    places = sorted(
        draw(st.lists(st.integers(0, start + prod(shape)), min_size=size - 1, max_size=size - 1))
    )
    shape_on_mesh, mesh, placements = draw(on_meshes())
    coordinates = list(product(*map(range, mesh)))
    return draw(
        st.sampled_from(
            [
                cut.Whole(shape, size, draw(st.none() | st.integers(0, size - 1))),
                cut.Intervals(shape, start, (0, *places, start + prod(shape))),
                cut.OnMesh(shape_on_mesh, cut.MeshCoordinates(mesh, coordinates), placements),
            ]
        )
    )


def test_coordinates_have_the_same_digest_in_a_list_and_in_a_tuple():
    """Those that ranks send each other are in a tuple, and those that a rank finds on its own mesh in a list."""
    coordinates = [(0,), None, (1,)]
    digests = {
        cut.MeshCoordinates((2,), values).digest for values in (coordinates, tuple(coordinates))
    }
    assert len(digests) == 1


@given(cuts())
def test_holders_are_found_as_by_a_loop_over_all_ranks(drawn: cut.Cut):
    naive: dict[ShardPosition, list[int]] = {}
    for rank in range(drawn.size):
        if drawn[rank].numel:
            naive.setdefault(drawn[rank], []).append(rank)
    assert list(drawn.holders.items()) == [(piece, tuple(ranks)) for piece, ranks in naive.items()]
    assert drawn.copies == tuple(tuple(ranks) for ranks in naive.values() if len(ranks) > 1)
    numel = prod(drawn.shape)
    assert drawn.complete == tuple(
        sorted(r for p, ranks in naive.items() if p.numel == numel for r in ranks)
    )
    assert drawn.taking_part == tuple(rank for rank in range(drawn.size) if drawn[rank].numel)
