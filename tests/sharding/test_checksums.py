"""Checksums see every bit and its place, and nothing of how a tensor lies in memory."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muonfx.sharding.checksums import BLOCK, ROW, checksum, scattered
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
    assert int(checksum(x.clone())) == number
    assert int(checksum(x.mT.contiguous().mT if x.ndim >= 2 else x)) == number  # other strides
    padded = torch.cat([x.new_zeros(1), x.reshape(-1)])[1:]  # begins elsewhere in its storage
    assert int(checksum(padded)) == number
    order = data.draw(st.permutations(range(x.numel())))
    other = x.reshape(-1)[order].view(x.shape) if x.numel() else x
    assert (int(checksum(other)) == number) == (bits(other) == bits(x))


@given(tensors(), st.lists(st.tuples(st.integers(0, 728), st.integers(0, 63)), min_size=1, max_size=4))
def test_flipped_bits_are_seen(x: Tensor, flips: list[tuple[int, int]]):
    """Also the signs of two elements, and 0.0 for -0.0: of which the weights have no say in the last bits."""
    other = x.clone()
    octets = other.view(-1).view(torch.uint8) if x.numel() else other.view(torch.uint8)
    for place, bit in flips:
        if x.numel() and x.dtype != torch.bool:
            octets[place * x.element_size() % octets.numel() + bit // 8 % x.element_size()] ^= 1 << bit % 8
    assert (int(checksum(other)) == int(checksum(x))) == (bits(other) == bits(x))


def test_elements_count_wherever_rows_and_blocks_begin():
    x = torch.arange(2 * BLOCK // 4 + 3 * ROW + 5, dtype=torch.int32)
    number = int(checksum(x))
    for one, other in ((0, ROW), (5, BLOCK // 4 + 5), (BLOCK // 4, 2 * BLOCK // 4 + 3 * ROW + 1), (7, len(x) - 1)):
        y = x.clone()
        y[one], y[other] = x[other], x[one]
        assert int(checksum(y)) != number, (one, other)
    rows = x[: 4 * ROW].view(4, ROW)
    assert int(checksum(rows[[1, 0, 2, 3]])) != int(checksum(rows))


def test_weights_are_those_of_the_definition():
    x = torch.tensor([3, -1, 7, 2], dtype=torch.int32)
    wanted = sum(scattered(place) * int(word) for place, word in enumerate(x)) * scattered(0)
    assert int(checksum(x)) % 2**64 == wanted % 2**64
