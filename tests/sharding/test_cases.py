"""Named cases of states, donated storage and collectives, each once wrong."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here, on_ranks
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


def check_three_updates(
    here: Here, tx: mfx.Transform, params: dict[str, Tensor], bucket_bytes: int, off: float
) -> None:
    """They are near those of one process; the states are taken to the global view and back too."""
    layout, local = flat(here, params)
    own, wanted = sharding.sharded(tx, layout, bucket_bytes=bucket_bytes), tx.init(params)
    state = own.init(local)
    for step in range(3):
        grads = {name: some(*p.shape, seed=7 + step) for name, p in params.items()}
        out, state = own.update(layout.shard(grads), state, local)
        state = sharding.from_global(own, sharding.to_global(own, state))
        expected, wanted = tx.update(grads, wanted, params)
        torch.testing.assert_close(layout.gather(out), expected, rtol=0, atol=off)


@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
@on_ranks(2)
def test_a_record_for_each_parameter_survives_several_buckets(here: Here, bucket_bytes: int):
    params = {"a": some(4, 4), "b": some(5, 5), "c": some(3, 3)}
    check_three_updates(here, recorded_by_parameter(), params, bucket_bytes, off=1e-4)


@on_ranks(2)
def test_a_parameter_may_be_called_as_a_field_of_a_state_is(here: Here):
    params = {"count": some(4, 4), "z": some(4, 4), "y": some(4, 4)}
    check_three_updates(here, mfx.cautious(mfx.scale_by_adam()), params, 100, off=1e-5)
    check_three_updates(here, mfx.scale_by_adam(), {"count": some(), "w": some(4)}, 100, off=1e-5)


@on_ranks(2)
def test_a_state_begins_with_the_numbers_of_its_own_transform(here: Here):
    layout, local = flat(here, {"a": some(4, 4)})
    for b1 in (0.9, 0.5):
        tx = mfx.contrib.schedule_free(mfx.scale(-0.1), 0.1, b1)
        assert float(sharding.sharded(tx, layout).init(local).b1) == b1


@on_ranks(2)
def test_two_transforms_over_one_layout_do_not_share_global_shapes(here: Here):
    layout, local = flat(here, {"a": some(4, 4), "b": some(5)})
    first, second = sharding.sharded(mfx.momentum(0.9), layout), sharding.sharded(mfx.scale_by_adam(), layout)
    state = first.init({"a": local["a"]})
    second.init({"b": local["b"]})
    assert sharding.to_global(first, state).trace["a"].shape == (4, 4)


@on_ranks(2)
def test_a_gradient_that_is_none_on_some_ranks_counts_as_zeros_of_its_own_dtype(here: Here):
    layout, _ = flat(here, {"a": torch.ones(2, 2), "b": torch.ones(2)})
    grads: dict[str, Any] = {"a": torch.ones(2, 2).bfloat16(), "b": torch.full((2,), 3.0).bfloat16()}
    found = layout.gather(layout.reduce_scatter(grads | ({"b": None} if here.rank == 0 else {}), "sum"))
    assert found["b"].dtype == torch.bfloat16
    assert (found["a"].tolist(), found["b"].tolist()) == ([[2.0, 2.0], [2.0, 2.0]], [3.0, 3.0])


@on_ranks(2)
def test_nothing_to_reduce_is_reduced_to_nothing(here: Here):
    params = {"a": some(2, 2), "e": torch.zeros(0, 3)}
    zeros = [sharding.zero(params, here.group, partition=kind) for kind in ("whole", "flat")]
    for layout in (sharding.replicated(params, here.group), *zeros):
        assert layout.reduce_scatter({"a": None, "e": None}) == {"a": None, "e": None}
        assert layout.reduce_scatter({"a": None, "e": torch.zeros(0, 3)})["e"].numel() == 0


@on_ranks(2)
def test_a_gradient_flows_through_all_gather_to_a_dtensor(here: Here):
    placements = {"a": placed(here, some(4, 4), Shard(0))}
    leaf = torch.nn.Parameter(placements["a"])
    whole = sharding.from_dtensors(placements).all_gather({"a": leaf}, op="sum")["a"]
    (whole * torch.arange(16.0).reshape(4, 4)).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.full_tensor(), 2 * torch.arange(16.0).reshape(4, 4))


@on_ranks(2)
def test_gradients_that_pass_through_a_run_are_not_overwritten(here: Here):
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


@on_ranks(2)
def test_a_state_of_dtensors_shares_nothing_with_the_one_before(here: Here):
    params = {"a": placed(here, some(4, 4), Shard(0)), "b": placed(here, some(4, 4), Shard(0))}
    tx = sharding.sharded(mfx.momentum(0.9), sharding.from_dtensors(params))
    _, first = tx.update(params, tx.init(params), params)
    _, second = tx.update({"a": params["a"], "b": None}, first, params)
    before = bits(first.trace["b"].to_local())
    tx.update(params, second, params, donate=True)
    assert bits(first.trace["b"].to_local()) == before


@on_ranks(2)
def test_expanded_gradients_may_be_donated(here: Here):
    params = {"a": some(4, 4)}
    tx = mfx.momentum(0.9)
    own = sharding.sharded(tx, sharding.replicated(params, here.group))
    found, _ = own.update({"a": torch.ones(()).expand(4, 4)}, own.init(params), params, donate=True)
    assert torch.equal(found["a"], tx.update({"a": torch.ones(4, 4)}, tx.init(params))[0]["a"])
