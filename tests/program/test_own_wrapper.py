"""A user's own wrapper runs wherever the built-in ones do, with no line about it in muonfx."""

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx import sharding
from tests.processes import World
from tests.program.own_wrapper import chain, damped, on_ranks, three_steps, values


def test_in_one_process_it_scales_by_a_number_of_its_state():
    tx = damped(mfx.scale(2.0), decay=0.5)
    updates, state = tx.update({"w": torch.ones(2)}, tx.init({"w": torch.zeros(2)}))
    again, state = tx.update({"w": torch.ones(2)}, state)
    assert (updates["w"].tolist(), again["w"].tolist(), float(state.factor)) == ([2.0, 2.0], [1.0, 1.0], 0.25)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("kind", ["replicated", "whole", "flat"])
@pytest.mark.parametrize("size", [1, 2])
def test_sharded_and_offloaded_it_is_what_it_is_in_one_process(world: World, size: int, kind: str, offloaded: bool):
    expected = three_steps(chain())
    for found in world.check(size, on_ranks, kind=kind, offloaded=offloaded):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_offloaded_in_one_process_it_is_the_same_bit_by_bit(to: str, tmp_path):
    tx = sharding.offload(chain(), "cpu" if to == "cpu" else tmp_path, bucket_bytes=1 << 20)
    torch.testing.assert_close(three_steps(tx), three_steps(chain()), rtol=0, atol=0)


def test_under_the_torch_optimizer_it_is_the_same_and_its_numbers_are_in_the_groups():
    model = nn.ParameterDict({name: nn.Parameter(value) for name, value in values(0).items()})
    optimizer = mfx.TransformOptimizer(model, chain())
    for step in range(1, 4):
        for name, grad in values(step).items():
            model[name].grad = grad
        optimizer.step()
    expected = three_steps(chain())
    torch.testing.assert_close({name: p.detach() for name, p in model.items()}, expected, rtol=1e-6, atol=1e-6)
    assert {group["damped.decay"] for group in optimizer.param_groups} == {0.75}
