"""Storage that was not donated is never written to, and no two states share any."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here, World
from tests.sharding.cases import all_same_bits, bits, placed, some

pytestmark = pytest.mark.dist


def overwritten(here: Here, kind: str) -> bool:
    params = {"a": some(8, 8)}
    layout = (sharding.replicated if kind == "replicated" else sharding.zero)(params, here.group)
    tx = mfx.chain(mfx.scale(-0.1), mfx.ema_params(dtype=mfx.int8()))
    own = sharding.sharded(tx, layout, replicas="everyone")
    local = layout.shard(params)
    grads = layout.shard({"a": torch.ones(8, 8)})
    before = bits(grads["a"])
    own.update(grads, own.init(local), local, donate=mfx.Donation(updates=False, state=True))
    return before != bits(grads["a"])


@pytest.mark.parametrize("kind", ["replicated", "whole"])
def test_gradients_that_pass_through_a_run_are_not_overwritten(world: World, kind: str):
    assert not any(world.check(2, overwritten, kind=kind))


def shared_states(here: Here) -> bool:
    params = {"a": placed(here, some(4, 4), Shard(0)), "b": placed(here, some(4, 4), Shard(0))}
    tx = sharding.sharded(mfx.momentum(0.9), sharding.from_dtensors(params))
    _, first = tx.update(params, tx.init(params), params)
    _, second = tx.update({"a": params["a"], "b": None}, first, params)
    before = bits(first.trace["b"].to_local())
    tx.update(params, second, params, donate=True)
    return before != bits(first.trace["b"].to_local())


def test_a_state_of_dtensors_shares_nothing_with_the_one_before(world: World):
    assert not any(world.check(2, shared_states))


def expanded(here: Here) -> dict[str, Tensor]:
    params = {"a": some(4, 4)}
    layout = sharding.replicated(params, here.group)
    tx = sharding.sharded(mfx.momentum(0.9), layout)
    return tx.update({"a": torch.ones(()).expand(4, 4)}, tx.init(params), params, donate=True)[0]


def test_expanded_gradients_may_be_donated(world: World):
    assert all_same_bits(world.check(2, expanded))
