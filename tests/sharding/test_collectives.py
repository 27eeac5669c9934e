"""Reduce, gather and their derivatives, as a training loop calls them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from muonfx import sharding
from tests.processes import Here, World
from tests.sharding.cases import flat, placed, some

pytestmark = pytest.mark.dist


def reduce_bf16(here: Here) -> dict[str, Tensor]:
    params = {"a": torch.ones(2, 2), "b": torch.ones(2)}
    layout, _ = flat(here, params)
    grads: dict[str, Any] = {"a": torch.ones(2, 2).bfloat16(), "b": torch.full((2,), 3.0).bfloat16()}
    if here.rank == 0:
        grads["b"] = None
    return layout.gather(layout.reduce_scatter(grads, "sum"))


def test_a_gradient_that_is_none_on_some_ranks_counts_as_zeros_of_its_own_dtype(world: World):
    for found in world.check(2, reduce_bf16):
        assert found["b"].dtype == torch.bfloat16
        assert found["b"].tolist() == [3.0, 3.0]
        assert found["a"].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def nothing_to_reduce(here: Here) -> None:
    params = {"a": some(2, 2), "e": torch.zeros(0, 3)}
    for layout in (
        sharding.replicated(params, here.group),
        sharding.zero(params, here.group),
        sharding.zero(params, here.group, partition="flat"),
    ):
        assert layout.reduce_scatter({"a": None, "e": None}) == {"a": None, "e": None}
        assert layout.reduce_scatter({"a": None, "e": torch.zeros(0, 3)})["e"].numel() == 0


def test_nothing_to_reduce_is_reduced_to_nothing(world: World):
    world.check(2, nothing_to_reduce)


def gathers_of_dtensors(here: Here) -> Tensor:
    layout_of = {"a": placed(here, some(4, 4), Shard(0))}
    layout = sharding.from_dtensors(layout_of)
    leaf = torch.nn.Parameter(layout_of["a"])
    whole = layout.all_gather({"a": leaf}, op="sum")["a"]
    (whole * torch.arange(16.0).reshape(4, 4)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.full_tensor()


def test_a_gradient_flows_through_all_gather_to_a_dtensor(world: World):
    for grad in world.check(2, gathers_of_dtensors):
        assert torch.equal(grad, 2 * torch.arange(16.0).reshape(4, 4))
