"""Boxes and pieces: exact covers of arrays, intersections, and the tensors that hold an interval."""

import pickle
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonfx.sharding.boxes import Box, boxes_of_interval, cover, intersection
from muonfx.sharding.shards import FlatPiece, IntervalTensor, part

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    flat = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return flat[tuple(map(slice, box.offsets, box.ends))].flatten().tolist()


@given(SHAPES, st.data())
def test_the_boxes_of_an_interval_hold_its_elements_in_order(shape, data):
    numel = torch.Size(shape).numel()
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = boxes_of_interval(shape, start, stop)
    assert [i for box in boxes for i in elements(shape, box)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel for box in boxes)
    assert len({box.offsets for box in boxes}) == len(boxes)


@given(SHAPES, st.data())
def test_a_cut_array_is_covered_and_nothing_less_or_more_is(shape, data):
    numel = torch.Size(shape).numel()
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    boxes = [box for a, b in pairwise(cuts) for box in boxes_of_interval(shape, a, b)]
    boxes = data.draw(st.permutations(boxes))
    assert cover(shape, boxes) is None
    if boxes:
        assert "elements of" in str(cover(shape, boxes[1:]))
        assert "elements of" in str(cover(shape, [*boxes, boxes[0]]))


def test_a_hole_beside_an_overlap_is_no_cover():
    rows = [Box((0, 0), (2, 3)), Box((1, 0), (2, 3)), Box((3, 0), (1, 3))]  # 15 elements, of 4 x 3 = 12
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
    tensor = IntervalTensor.of(FlatPiece((4, 5), 3, torch.arange(5.0)))
    assert tensor.shape == (4, 5)
    copy = pickle.loads(pickle.dumps(tensor.clone()))
    tensor.fill_(1.0)
    assert tensor.piece.data.tolist() == [1.0] * 5
    assert copy.piece.data.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert tensor.copy_(copy) is tensor
    assert torch.equal(tensor.piece.data, copy.piece.data)
    assert tensor.to(torch.float64).piece.dtype == torch.float64
    elsewhere = IntervalTensor.of(FlatPiece((4, 5), 4, torch.arange(5.0)))
    for refused in (lambda: tensor + 1, lambda: tensor.copy_(elsewhere), lambda: tensor.copy_(torch.zeros(4, 5))):
        with pytest.raises(NotImplementedError, match="only a part of the whole"):
            refused()


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple), st.data())
def test_the_parts_of_a_flat_piece_are_the_values_of_its_boxes(shape: tuple[int, ...], data: st.DataObject):
    whole = torch.arange(prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, whole.numel()))
    piece = FlatPiece.cut(whole, start, data.draw(st.integers(start, whole.numel())))
    for box in piece.boxes:
        assert piece.part(box).equal(part(whole, box))
    assert sum(box.numel for box in piece.boxes) == piece.data.numel()
