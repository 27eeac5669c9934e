"""The place of a tensor in memory changes nothing: odd strides, offsets, negated and expanded views; and checksums."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding.communication.messages import copied
from muonfx.sharding.digests import WORDS, checksum, octets
from tests.checkpoint.common import bits, folder
from tests.processes import Here, on_ranks

ck = mfx.checkpoint
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def variants(x: Tensor) -> dict[str, Tensor]:
    """The same values in other memory."""
    gaps = torch.zeros([3 * side + 2 for side in x.shape], dtype=x.dtype)[
        tuple(slice(1, 1 + 3 * n, 3) for n in x.shape)
    ]
    backwards = torch.empty(x.shape[::-1], dtype=x.dtype).permute(list(range(x.ndim))[::-1])
    shifted = torch.zeros(x.numel() + 3, dtype=x.dtype)[3:].view(x.shape)
    # The stride of a dim with at most one index means nothing, and may be anything.
    strides = [
        stride if side > 1 else 7 + dim
        for dim, (side, stride) in enumerate(zip(x.shape, x.stride(), strict=True))
    ]
    anything = torch.zeros(max(1, 2 * x.numel()), dtype=x.dtype).as_strided(x.shape, strides)
    copies = {"gaps": gaps, "backwards": backwards, "shifted": shifted, "any stride": anything}
    for copy in copies.values():
        copy.copy_(x)
    return copies | {"negated": torch._neg_view(-x)}


@st.composite
def tensors(draw: st.DrawFn, side: int = 3, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
    shape = draw(st.lists(st.integers(0, side), max_size=3))
    drawn = (
        torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 3
    )
    return drawn.to(draw(st.sampled_from(dtypes)))


@given(tensors())
def test_checksums_and_messages_are_of_elements_in_order(x: Tensor):
    for how, other in variants(x).items():
        assert int(checksum(other)) == int(checksum(x)), how
        assert octets(other).tolist() == octets(x).tolist(), how
        target = variants(torch.zeros_like(x))[how]
        if how != "negated":
            copied([other], [target])
            assert bits(target) == bits(x), how
    for one in (
        torch.ones(()).expand(2, 3),
        torch.ones(1, 3).expand(2, 3),
        torch.ones(2, 1).expand(2, 3),
    ):
        assert int(checksum(one)) == int(checksum(torch.ones(2, 3)))


@given(tensors())
def test_checkpoints_hold_elements_in_order(x: Tensor):
    state = variants(x) | {"expanded": x.new_ones(()).expand(3, 2), "plain": x}
    with folder() as path:
        ck.save(path, state, params=state)
        for found in (ck.load(path, like=state), ck.load_params(path, like=state)):
            assert {name: bits(leaf) for name, leaf in found.items()} == {
                n: bits(leaf) for n, leaf in state.items()
            }
        assert {
            name: bits(leaf)
            for name, leaf in ck.load(path, like={"plain": x}, allow_extra=True).items()
        } == {"plain": bits(x)}


@pytest.mark.parametrize("kind", ["flat", "whole", "replicated"])
@pytest.mark.parametrize("how", variants(torch.zeros(1)))
@on_ranks(2)
def test_steps_over_ranks_are_of_elements_in_order(here: Here, how: str, kind: Any):
    plain = {
        "a": torch.arange(6.0).reshape(2, 3) + 1,
        "b": torch.ones(1),
        "c": torch.ones(()),
        "e": torch.zeros(0, 2),
    }

    def odd(tree: Any) -> Any:
        return mfx.tree.map(lambda leaf: variants(leaf)[how], tree)

    is_zero = kind != "replicated"
    layout = (
        sharding.zero(plain, here.group, partition=kind)
        if is_zero
        else sharding.replicated(plain, here.group)
    )
    tx = sharding.sharded(mfx.chain(mfx.momentum(), mfx.scale(0.1)), layout)

    def run(given: Any) -> list[bytes]:
        params = given(layout.shard(given(plain)))
        state = tx.init(params)
        for _ in range(2):
            pieces = layout.reduce_scatter(given(plain))
            updates, state = tx.update(given(pieces), given(state), params)
            params = given(mfx.apply_updates(params, updates))
        same = sharding.broadcast(params, layout)
        return [
            bits(leaf)
            for leaf in mfx.tree.tensors((layout.gather(params), layout.gather(same), state))
        ]

    assert run(odd) == run(lambda tree: tree)


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_an_update_that_is_a_view_of_its_input_is_not_taken_for_the_input(here: Here):
    params = {"w": torch.arange(9.0).reshape(3, 3)}
    layout = sharding.zero(params, here.group)
    turned = mfx.stateless(
        lambda updates, params: mfx.tree.map(lambda u: u.mT, updates), mfx.Locality.MATRIX
    )
    tx, local = sharding.sharded(turned, layout), layout.shard(params)
    updates, _ = tx.update(local, tx.init(local), local)
    assert torch.equal(layout.gather(updates)["w"], params["w"].mT)


WITH_INTEGERS = (*DTYPES, torch.int8, torch.int64, torch.bool)


@given(tensors(9, WITH_INTEGERS), st.data())
def test_a_checksum_is_of_bits_in_their_order(x: Tensor, data: st.DataObject):
    number = int(checksum(x))
    order = data.draw(st.permutations(range(x.numel())))
    other = x.reshape(-1)[order].view(x.shape) if x.numel() else x
    assert (int(checksum(other)) == number) == (bits(other) == bits(x))


@given(
    tensors(9, WITH_INTEGERS),
    st.lists(st.tuples(st.integers(0, 728), st.integers(0, 63)), min_size=1, max_size=4),
)
def test_flipped_bits_change_the_checksum(x: Tensor, flips: list[tuple[int, int]]):
    """Also the signs of two elements, and 0.0 for -0.0, which an even weight would hide."""
    other = x.clone()
    octets = other.view(-1).view(torch.uint8) if x.numel() else other.view(torch.uint8)
    for place, bit in flips:
        if x.numel() and x.dtype != torch.bool:
            octets[place * x.element_size() % octets.numel() + bit // 8 % x.element_size()] ^= (
                1 << bit % 8
            )
    assert (int(checksum(other)) == int(checksum(x))) == (bits(other) == bits(x))


def test_elements_count_wherever_a_pass_begins():
    x = torch.arange(2 * WORDS + 5, dtype=torch.int32)
    number = int(checksum(x))
    for one, other in ((0, 1), (5, WORDS + 5), (WORDS, 2 * WORDS + 1), (7, len(x) - 1)):
        y = x.clone()
        y[one], y[other] = x[other], x[one]
        assert int(checksum(y)) != number, (one, other)
