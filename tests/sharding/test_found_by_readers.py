"""What readers of the sharding layer have found wrong, each by name."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding import ShardingError
from tests.processes import Failed, Here, World
from tests.sharding.cases import bits

pytestmark = pytest.mark.dist


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def flat(here: Here, params: dict[str, Tensor]) -> Any:
    layout = sharding.zero(params, here.group, partition="flat")
    return layout, layout.shard(params)


def alike(results: list[Any]) -> bool:
    return len({tuple(sorted((name, bits(leaf)) for name, leaf in tree.items())) for tree in results}) == 1


def placed(here: Here, tensor: Tensor, *placements: Any) -> DTensor:
    return distribute_tensor(tensor, here.mesh, list(placements), src_data_rank=None)


# ------------------------------------------------------------------------------------------------ dtypes and trees


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


def differing(here: Here, trouble: str) -> None:
    params = {"a": some(4, 4), "b": some(6, 3)}
    layout, local = flat(here, params)
    odd = here.rank == 1
    tx = sharding.sharded(mfx.chain(mfx.orthogonalize(dtype=torch.float32), mfx.add_decayed_weights(0.1)), layout)
    state = tx.init(local)
    if trouble == "dtype":
        tx.update({n: x.bfloat16() if odd else x for n, x in local.items()}, state, local)
    elif trouble == "a leaf fewer":
        tx.update({n: x for n, x in local.items() if not (odd and n == "b")}, state, local)
    elif trouble == "no tensor":
        tx.update(local | ({"a": 1.0} if odd else {}), state, local)
    elif trouble == "no params":
        tx.update(local, state, None if odd else local)
    elif trouble == "gather none":
        layout.gather(local | ({"a": None} if odd else {}))
    elif trouble == "gather shape":
        layout.gather(local | ({"a": torch.zeros(1)} if odd else {}))
    elif trouble == "reduce a name":
        layout.reduce_scatter(params | ({"c": torch.zeros(1)} if odd else {}))
    elif trouble == "reduce a leaf fewer":
        layout.reduce_scatter({n: x for n, x in params.items() if not (odd and n == "b")})
    elif trouble == "init none":
        sharding.sharded(mfx.ema_params(dtype=mfx.int8()), layout).init(local | ({"a": None} if odd else {}))


@pytest.mark.parametrize(
    "trouble",
    [
        "dtype",
        "a leaf fewer",
        "no tensor",
        "no params",
        "gather none",
        "gather shape",
        "reduce a name",
        "reduce a leaf fewer",
        "init none",
    ],
)
def test_what_differs_on_one_rank_is_an_error_on_all(world: World, trouble: str):
    found = world.run(3, differing, trouble=trouble)
    assert all(isinstance(result, Failed) for result in found), found
    for rank in (0, 2):
        assert isinstance(found[rank].error, ShardingError), found[rank].trace
        assert "has ended" not in str(found[rank].error)
    assert isinstance(found[1].error, ShardingError | TypeError | ValueError), found[1].trace


# ------------------------------------------------------------------------------------------------------------- states


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
    own, state, wanted = sharding.sharded(tx, layout, bucket_bytes=bucket_bytes), None, tx.init(params)
    state = own.init(local)
    far = 0.0
    for step in range(steps):
        grads = {name: some(*p.shape, seed=7 + step) for name, p in params.items()}
        out, state = own.update(layout.shard(grads), state, local)
        state = sharding.local(own, sharding.logical(own, state))
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


def initial_numbers(here: Here) -> list[float]:
    layout, local = flat(here, {"a": some(4, 4)})
    made = [
        sharding.sharded(mfx.cautious(mfx.inject_hyperparams(mfx.momentum(decay))), layout).init(local)
        for decay in (0.9, 0.5)
    ]
    return [float(state.hyperparams["decay"]) for state in made]


def test_a_state_begins_with_the_numbers_of_its_own_transform(world: World):
    assert world.check(2, initial_numbers) == [[0.9, 0.5]] * 2


def two_over_one_layout(here: Here) -> str:
    layout, local = flat(here, {"a": some(4, 4), "b": some(5)})
    first, second = sharding.sharded(mfx.momentum(0.9), layout), sharding.sharded(mfx.scale_by_adam(), layout)
    state = first.init({"a": local["a"]})
    second.init({"b": local["b"]})
    return str(sharding.logical(first, state).trace["a"].shape)


def test_two_transforms_over_one_layout_do_not_meet_in_logical(world: World):
    assert world.check(2, two_over_one_layout) == ["(4, 4)"] * 2


# ----------------------------------------------------------------------------------------- what may not be written to


def overwritten(here: Here, kind: str) -> bool:
    params = {"a": some(8, 8)}
    layout = sharding.replicated(here.group) if kind == "replicated" else sharding.zero(params, here.group)
    tx = mfx.chain(mfx.ema_params(dtype=mfx.int8()), mfx.scale(-0.1))
    own = sharding.sharded(tx, layout, replicas="everyone")
    local = layout.of(params).shard(params)
    grads = layout.of(params).shard({"a": torch.ones(8, 8)})
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
    layout = sharding.replicated(here.group)
    tx = sharding.sharded(mfx.momentum(0.9), layout)
    return tx.update({"a": torch.ones(()).expand(4, 4)}, tx.init(params), params, donate=True)[0]


def test_expanded_gradients_may_be_donated(world: World):
    assert alike(world.check(2, expanded))


# ------------------------------------------------------------------------------------------------------------ replicas


def one_replica(here: Here, trouble: str) -> dict[str, Tensor]:
    params = {"a": some(4, 4), "b": some(3)}
    layout = sharding.replicated(here.group)
    tx = sharding.sharded(mfx.skip_nonfinite(mfx.momentum(0.9)), layout)
    grads: dict[str, Any] = {"a": torch.ones(4, 4), "b": torch.ones(3)}
    if here.rank == 1:
        grads["a"] = None if trouble == "none" else torch.full((4, 4), float("nan"))
    updates, state = tx.update(grads, tx.init(params), params)
    return {**updates, "trace": state.inner.trace["a"], "skipped": state.skipped}


@pytest.mark.parametrize("trouble", ["none", "nan"])
def test_replicas_stay_the_same_whatever_one_of_them_has(world: World, trouble: str):
    found = world.check(3, one_replica, trouble=trouble)
    assert alike(found)
    assert int(found[0]["skipped"]) == (trouble == "nan")
    if trouble == "none":
        assert bool((found[1]["a"] != 0).all())


# ------------------------------------------------------------------------------------------------------- and the rest


def moved(here: Here) -> None:
    weights = some(4, 4)
    params = {"a": distribute_tensor(weights, here.grid, [Replicate(), Shard(0)], src_data_rank=None)}
    layout = sharding.from_dtensors(params)
    tx = sharding.sharded(mfx.add_decayed_weights(0.1), layout)
    state = tx.init(params)
    other = {"a": params["a"].redistribute(placements=[Shard(0), Replicate()])}
    tx.update(other, state, other)


def test_parameters_whose_placements_have_changed_are_an_error(world: World):
    for result in world.run(4, moved):
        assert isinstance(result, Failed)
        assert isinstance(result.error, ShardingError), result.trace
        assert "placed" in str(result.error)


def nothing_to_reduce(here: Here) -> None:
    params = {"a": some(2, 2), "e": torch.zeros(0, 3)}
    for layout in (
        sharding.replicated(here.group).of(params),
        sharding.zero(params, here.group),
        sharding.zero(params, here.group, partition="flat"),
    ):
        assert layout.reduce_scatter({"a": None, "e": None}) == {"a": None, "e": None}
        assert layout.reduce_scatter({"a": None, "e": torch.zeros(0, 3)})["e"].numel() == 0


def test_nothing_to_reduce_is_reduced_to_nothing(world: World):
    world.check(2, nothing_to_reduce)


def not_met(here: Here) -> None:
    grads: dict[str, Any] = {"a": torch.ones(2, 2), "b": None if here.rank == 0 else torch.ones(2)}
    sharding.replicated(here.group).reduce_scatter(grads | {"b": None})


def test_a_replicated_layout_says_that_it_has_not_met_a_parameter(world: World):
    for result in world.run(2, not_met):
        assert isinstance(result, Failed)
        assert "has not met 'b'" in str(result.error)


def test_functions_that_choose_work_within_a_run(world: World):
    world.check(2, chosen_by_function)


def of_two_dims(params: Any) -> Any:
    return {name: leaf.ndim >= 2 for name, leaf in params.items()}


def chosen_by_function(here: Here) -> None:
    params = {"a": some(4, 4), "b": some(5), "c": some(2, 6)}
    tx = mfx.cautious(mfx.chain(mfx.momentum(), mfx.add_decayed_weights(0.1, mask=of_two_dims)))
    assert run_both(here, tx, params, 1 << 20) < 1e-5


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


@pytest.mark.parametrize(
    ("setting", "value"), [("exchange_dtype", torch.int8), ("exchange_dtype", "bf16"), ("machine", 3), ("gram", 1)]
)
def test_settings_are_looked_at_when_they_are_given(setting: str, value: Any):
    with pytest.raises((TypeError, ValueError), match=setting):
        sharding.sharded(mfx.momentum(), sharding.replicated(2), **{setting: value})
