"""How a tensor lies in memory changes nothing: odd strides, offsets, negated and expanded views."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding.messages import copied, octets
from muonfx.sharding.replicas import checksum
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
        stride if side > 1 else 7 + dim for dim, (side, stride) in enumerate(zip(x.shape, x.stride(), strict=True))
    ]
    anything = torch.zeros(max(1, 2 * x.numel()), dtype=x.dtype).as_strided(x.shape, strides)
    copies = {"gaps": gaps, "backwards": backwards, "shifted": shifted, "any stride": anything}
    for copy in copies.values():
        copy.copy_(x)
    return copies | {"negated": torch._neg_view(-x)}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 3
    return drawn.to(draw(st.sampled_from(DTYPES)))


@given(tensors())
def test_checksums_and_messages_are_of_elements_in_order(x: Tensor):
    for how, other in variants(x).items():
        assert int(checksum(other)) == int(checksum(x)), how
        assert octets(other).tolist() == octets(x).tolist(), how
        target = variants(torch.zeros_like(x))[how]
        if how != "negated":
            copied([other], [target])
            assert bits(target) == bits(x), how
    for one in (torch.ones(()).expand(2, 3), torch.ones(1, 3).expand(2, 3), torch.ones(2, 1).expand(2, 3)):
        assert int(checksum(one)) == int(checksum(torch.ones(2, 3)))


@given(tensors())
def test_checkpoints_hold_elements_in_order(x: Tensor):
    state = variants(x) | {"expanded": x.new_ones(()).expand(3, 2), "plain": x}
    with folder() as path:
        ck.save(path, state, params=state)
        for found in (ck.load(path, like=state), ck.load_params(path, like=state)):
            assert {name: bits(leaf) for name, leaf in found.items()} == {n: bits(leaf) for n, leaf in state.items()}
        assert {name: bits(leaf) for name, leaf in ck.load(path, like={"plain": x}, allow_extra=True).items()} == {
            "plain": bits(x)
        }


@pytest.mark.parametrize("kind", ["flat", "whole", "replicated"])
@pytest.mark.parametrize("how", variants(torch.zeros(1)))
@on_ranks(2)
def test_steps_over_ranks_are_of_elements_in_order(here: Here, how: str, kind: Any):
    plain = {"a": torch.arange(6.0).reshape(2, 3) + 1, "b": torch.ones(1), "c": torch.ones(()), "e": torch.zeros(0, 2)}

    def odd(tree: Any) -> Any:
        return mfx.tree.map(lambda leaf: variants(leaf)[how], tree)

    is_zero = kind != "replicated"
    layout = sharding.zero(plain, here.group, partition=kind) if is_zero else sharding.replicated(plain, here.group)
    tx = sharding.sharded(mfx.chain(mfx.momentum(), mfx.scale(0.1)), layout)

    def run(given: Any) -> list[bytes]:
        params = given(layout.shard(given(plain)))
        state = tx.init(params)
        for _ in range(2):
            pieces = layout.reduce_scatter(given(plain))
            updates, state = tx.update(given(pieces), given(state), params)
            params = given(mfx.apply_updates(params, updates))
        same = sharding.broadcast(params, layout)
        return [bits(leaf) for leaf in mfx.tree.tensors((layout.gather(params), layout.gather(same), state))]

    assert run(odd) == run(lambda tree: tree)


@mfx.transform(locality=mfx.Locality.MATRIX)
def turned():
    def init(params: Any) -> Any:
        return mfx.core.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return mfx.tree.map(lambda u: u.mT, updates), state

    return init, update


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_an_update_that_is_a_view_of_its_input_is_not_taken_for_the_input(here: Here):
    params = {"w": torch.arange(9.0).reshape(3, 3)}
    layout = sharding.zero(params, here.group)
    tx, local = sharding.sharded(turned(), layout), layout.shard(params)
    updates, _ = tx.update(local, tx.init(local), local)
    assert torch.equal(layout.gather(updates)["w"], params["w"].mT)
