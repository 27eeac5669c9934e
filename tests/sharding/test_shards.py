"""Pieces of tensors, and the tensors that stand for them."""

import pickle
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonfx.sharding.shards import FlatPiece, IntervalTensor, part


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
