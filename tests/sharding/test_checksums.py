"""Checksums depend on every bit and its place; `tests/test_memory_layouts.py` has other memory layouts."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muonfx.sharding.replicas import WORDS, checksum
from tests.sharding.cases import bits

DTYPES = st.sampled_from(
    (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool)
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 3
    return drawn.to(draw(DTYPES))


@given(tensors(), st.data())
def test_a_checksum_is_of_bits_in_their_order(x: Tensor, data: st.DataObject):
    number = int(checksum(x))
    order = data.draw(st.permutations(range(x.numel())))
    other = x.reshape(-1)[order].view(x.shape) if x.numel() else x
    assert (int(checksum(other)) == number) == (bits(other) == bits(x))


@given(tensors(), st.lists(st.tuples(st.integers(0, 728), st.integers(0, 63)), min_size=1, max_size=4))
def test_flipped_bits_change_the_checksum(x: Tensor, flips: list[tuple[int, int]]):
    """Also the signs of two elements, and 0.0 for -0.0, which an even weight would hide."""
    other = x.clone()
    octets = other.view(-1).view(torch.uint8) if x.numel() else other.view(torch.uint8)
    for place, bit in flips:
        if x.numel() and x.dtype != torch.bool:
            octets[place * x.element_size() % octets.numel() + bit // 8 % x.element_size()] ^= 1 << bit % 8
    assert (int(checksum(other)) == int(checksum(x))) == (bits(other) == bits(x))


def test_elements_count_wherever_a_pass_begins():
    x = torch.arange(2 * WORDS + 5, dtype=torch.int32)
    number = int(checksum(x))
    for one, other in ((0, 1), (5, WORDS + 5), (WORDS, 2 * WORDS + 1), (7, len(x) - 1)):
        y = x.clone()
        y[one], y[other] = x[other], x[one]
        assert int(checksum(y)) != number, (one, other)
