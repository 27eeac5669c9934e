"""States of sharded transforms: told as logical trees, taken back, and begun with the right numbers."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here, World
from tests.sharding.cases import flat, some

pytestmark = pytest.mark.dist


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


def initial_numbers(here: Here) -> list[float]:
    layout, local = flat(here, {"a": some(4, 4)})
    made = [
        sharding.sharded(mfx.contrib.schedule_free(mfx.scale(-0.1), 0.1, b1), layout).init(local) for b1 in (0.9, 0.5)
    ]
    return [float(state.b1) for state in made]


def test_a_state_begins_with_the_numbers_of_its_own_transform(world: World):
    assert world.check(2, initial_numbers) == [[0.9, 0.5]] * 2


def two_over_one_layout(here: Here) -> str:
    layout, local = flat(here, {"a": some(4, 4), "b": some(5)})
    first, second = sharding.sharded(mfx.momentum(0.9), layout), sharding.sharded(mfx.scale_by_adam(), layout)
    state = first.init({"a": local["a"]})
    second.init({"b": local["b"]})
    return str(sharding.to_global(first, state).trace["a"].shape)


def test_two_transforms_over_one_layout_do_not_meet_in_logical(world: World):
    assert world.check(2, two_over_one_layout) == ["(4, 4)"] * 2


def of_two_dims(params: Any) -> Any:
    return {name: leaf.ndim >= 2 for name, leaf in params.items()}


def chosen_by_function(here: Here) -> None:
    params = {"a": some(4, 4), "b": some(5), "c": some(2, 6)}
    tx = mfx.cautious(mfx.chain(mfx.momentum(), mfx.add_decayed_weights(0.1, mask=of_two_dims)))
    assert run_both(here, tx, params, 1 << 20) < 1e-5


def test_functions_that_choose_work_within_a_run(world: World):
    world.check(2, chosen_by_function)
