"""Named cases of states, donated storage and collectives, each once wrong."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here, World
from tests.sharding.cases import bits, flat, some

pytestmark = pytest.mark.dist


def placed(here: Here, tensor: Tensor, *placements: Any) -> DTensor:
    return distribute_tensor(tensor, here.mesh, list(placements), src_data_rank=None)


class PerParameter(NamedTuple):
    number: Tensor
    average: Tensor


@mfx.transform(locality=mfx.Locality.MATRIX)
def recorded_by_parameter():
    """Keeps a record for each parameter, not a tree for each field."""

    def init(params: Any) -> Any:
        return mfx.tree.map(lambda p: PerParameter(torch.zeros(()), torch.zeros_like(p)), params)

    def update(updates: Any, state: Any, params: Any = None):
        out: dict[str, Any] = {}
        after: dict[str, Any] = {}
        for name, u in updates.items():
            if u is None:
                out[name], after[name] = None, state[name]
                continue
            average = state[name].average * 0.9 + u
            out[name], after[name] = average @ average.mT @ average, PerParameter(state[name].number + 1, average)
        return out, after

    return init, update


def run_both(here: Here, tx: mfx.Transform, params: dict[str, Tensor], bucket_bytes: int, steps: int = 3) -> float:
    """How far three updates are from those of one process; the states are told and taken back too."""
    layout, local = flat(here, params)
    own, wanted, far = sharding.sharded(tx, layout, bucket_bytes=bucket_bytes), tx.init(params), 0.0
    state = own.init(local)
    for step in range(steps):
        grads = {name: some(*p.shape, seed=7 + step) for name, p in params.items()}
        out, state = own.update(layout.shard(grads), state, local)
        state = sharding.from_global(own, sharding.to_global(own, state))
        expected, wanted = tx.update(grads, wanted, params)
        whole = layout.gather(out)
        far = max([far, *(float((whole[n] - expected[n]).abs().max()) for n in params)])
    return far


@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
def test_a_record_for_each_parameter_survives_several_buckets(world: World, bucket_bytes: int):
    params = {"a": some(4, 4), "b": some(5, 5), "c": some(3, 3)}
    for far in world.check(2, run_both, tx=recorded_by_parameter(), params=params, bucket_bytes=bucket_bytes):
        assert far < 1e-4


def test_a_parameter_may_be_called_as_a_field_of_a_state_is(world: World):
    params = {"count": some(4, 4), "z": some(4, 4), "y": some(4, 4)}
    tx = mfx.cautious(mfx.scale_by_adam())
    assert max(world.check(2, run_both, tx=tx, params=params, bucket_bytes=100)) < 1e-5
    params = {"count": some(), "w": some(4)}
    assert max(world.check(2, run_both, tx=mfx.scale_by_adam(), params=params, bucket_bytes=100)) < 1e-5


def a_state_begins_with_the_numbers_of_its_own_transform(here: Here) -> None:
    layout, local = flat(here, {"a": some(4, 4)})
    for b1 in (0.9, 0.5):
        tx = mfx.contrib.schedule_free(mfx.scale(-0.1), 0.1, b1)
        assert float(sharding.sharded(tx, layout).init(local).b1) == b1


def two_transforms_over_one_layout_do_not_share_global_shapes(here: Here) -> None:
    layout, local = flat(here, {"a": some(4, 4), "b": some(5)})
    first, second = sharding.sharded(mfx.momentum(0.9), layout), sharding.sharded(mfx.scale_by_adam(), layout)
    state = first.init({"a": local["a"]})
    second.init({"b": local["b"]})
    assert sharding.to_global(first, state).trace["a"].shape == (4, 4)


def a_gradient_that_is_none_on_some_ranks_counts_as_zeros_of_its_own_dtype(here: Here) -> None:
    layout, _ = flat(here, {"a": torch.ones(2, 2), "b": torch.ones(2)})
    grads: dict[str, Any] = {"a": torch.ones(2, 2).bfloat16(), "b": torch.full((2,), 3.0).bfloat16()}
    found = layout.gather(layout.reduce_scatter(grads | ({"b": None} if here.rank == 0 else {})))
    assert found["b"].dtype == torch.bfloat16
    assert (found["a"].tolist(), found["b"].tolist()) == ([[1.0, 1.0], [1.0, 1.0]], [1.5, 1.5])


def nothing_to_reduce_is_reduced_to_nothing(here: Here) -> None:
    params = {"a": some(2, 2), "e": torch.zeros(0, 3)}
    zeros = [sharding.zero(params, here.group, partition=kind) for kind in ("whole", "flat")]
    for layout in (sharding.replicated(params, here.group), *zeros):
        assert layout.reduce_scatter({"a": None, "e": None}) == {"a": None, "e": None}
        assert layout.reduce_scatter({"a": None, "e": torch.zeros(0, 3)})["e"].numel() == 0


def a_gradient_flows_through_all_gather_to_a_dtensor(here: Here) -> None:
    placements = {"a": placed(here, some(4, 4), Shard(0))}
    leaf = torch.nn.Parameter(placements["a"])
    whole = sharding.from_dtensors(placements).all_gather({"a": leaf})["a"]
    (whole * torch.arange(16.0).reshape(4, 4)).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.full_tensor(), torch.arange(16.0).reshape(4, 4))


def gradients_that_pass_through_a_run_are_not_overwritten(here: Here) -> None:
    params = {"a": some(8, 8)}
    tx = mfx.chain(mfx.scale(-0.1), mfx.ema_params(dtype=mfx.int8()))
    for make in (sharding.replicated, sharding.zero):
        layout = make(params, here.group)
        own, local, grads = (
            sharding.sharded(tx, layout, replicas="everyone"),
            layout.shard(params),
            layout.shard(params),
        )
        before = bits(grads["a"])
        own.update(grads, own.init(local), local, donate=mfx.Donation(updates=False, state=True))
        assert bits(grads["a"]) == before


def a_state_of_dtensors_shares_nothing_with_the_one_before(here: Here) -> None:
    params = {"a": placed(here, some(4, 4), Shard(0)), "b": placed(here, some(4, 4), Shard(0))}
    tx = sharding.sharded(mfx.momentum(0.9), sharding.from_dtensors(params))
    _, first = tx.update(params, tx.init(params), params)
    _, second = tx.update({"a": params["a"], "b": None}, first, params)
    before = bits(first.trace["b"].to_local())
    tx.update(params, second, params, donate=True)
    assert bits(first.trace["b"].to_local()) == before


def expanded_gradients_may_be_donated(here: Here) -> None:
    params = {"a": some(4, 4)}
    tx = mfx.momentum(0.9)
    own = sharding.sharded(tx, sharding.replicated(params, here.group))
    found, _ = own.update({"a": torch.ones(()).expand(4, 4)}, own.init(params), params, donate=True)
    assert torch.equal(found["a"], tx.update({"a": torch.ones(4, 4)}, tx.init(params))[0]["a"])


@pytest.mark.parametrize(
    "holds",
    [
        a_state_begins_with_the_numbers_of_its_own_transform,
        two_transforms_over_one_layout_do_not_share_global_shapes,
        a_gradient_that_is_none_on_some_ranks_counts_as_zeros_of_its_own_dtype,
        nothing_to_reduce_is_reduced_to_nothing,
        a_gradient_flows_through_all_gather_to_a_dtensor,
        gradients_that_pass_through_a_run_are_not_overwritten,
        a_state_of_dtensors_shares_nothing_with_the_one_before,
        expanded_gradients_may_be_donated,
    ],
    ids=lambda function: function.__name__,
)
def test_on_every_rank(world: World, holds: Callable[[Here], None]):
    world.check(2, holds)
