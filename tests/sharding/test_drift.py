"""Replicas that come to differ in a run: what a step reports, what a save reports, and for which transform."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding import ShardingError
from tests.processes import Here, on_ranks
from tests.sharding.cases import some
from tests.sharding.counting import counting

pytestmark = pytest.mark.dist

PARAMS: dict[str, Any] = {"a": some(4, 5), "b": some(3)}


def unreduced(here: Here) -> dict[str, Any]:
    """Gradients that differ between ranks."""
    return {name: leaf + here.rank for name, leaf in PARAMS.items()}


def warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def assert_verified(step: Callable[[], Any]) -> None:
    """Require that a step with unreduced gradients warns of them."""
    messages = warnings_of(step)
    assert any(
        "the gradient of 'a' has other values on rank 1 than on rank 0" in text for text in messages
    ), messages


# ------------------------------------------------------------------------------------- one layout, several transforms


@pytest.mark.parametrize("second", ["equal", "another chain", "no state", "not initialized"])
@on_ranks(2)
def test_each_transform_of_a_layout_is_verified_at_its_own_first_step(here: Here, second: str):
    layout = sharding.replicated(PARAMS, here.group)
    chains = {
        "equal": mfx.chain(mfx.momentum(), mfx.scale(-0.1)),
        "another chain": mfx.scale_by_adam(),
        "no state": mfx.contrib.sam(0.05),
        "not initialized": mfx.contrib.sam(0.05),
    }
    first_tx = sharding.sharded(chains["equal"], layout)
    second_tx = sharding.sharded(chains[second], layout)
    first_state = first_tx.init(PARAMS)
    second_state: Any = mfx.core.EmptyState()
    if second != "not initialized":
        second_state = second_tx.init(PARAMS)
    for _ in range(2):
        _, first_state = first_tx.update(PARAMS, first_state, PARAMS)
    assert_verified(lambda: second_tx.update(unreduced(here), second_state, PARAMS))


@pytest.mark.parametrize("order", ["both at once", "the second first", "one later", "again"])
@on_ranks(2)
def test_each_state_of_one_transform_is_verified_at_its_first_step(here: Here, order: str):
    layout = sharding.replicated(PARAMS, here.group)
    tx = sharding.sharded(mfx.momentum(), layout)
    first_state = tx.init(PARAMS)
    if order in ("both at once", "the second first"):
        second_state = tx.init(PARAMS)
    if order == "the second first":
        first_state, second_state = second_state, first_state
    _, first_state = tx.update(PARAMS, first_state, PARAMS)
    if order in ("one later", "again"):
        second_state = tx.init(PARAMS)
    if order == "one later":
        _, first_state = tx.update(PARAMS, first_state, PARAMS)
    assert_verified(lambda: tx.update(unreduced(here), second_state, PARAMS))


@on_ranks(2)
def test_each_optimizer_of_a_layout_is_verified_at_its_own_first_step_and_after_its_own_load(
    here: Here,
):
    layout = sharding.replicated(PARAMS, here.group)
    weights = [
        {name: nn.Parameter(leaf.clone()) for name, leaf in PARAMS.items()} for _ in range(2)
    ]
    optimizers = [mfx.TransformOptimizer(own, mfx.momentum(), layout=layout) for own in weights]

    def step(number: int, grads: dict[str, Any]) -> None:
        for name, weight in weights[number].items():
            weight.grad = grads[name].clone()
        optimizers[number].step()

    step(0, PARAMS)
    assert_verified(lambda: step(1, unreduced(here)))
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    step(0, PARAMS)
    weights[1]["a"].data.copy_(PARAMS["a"])  # the step above has moved the replicas apart
    weights[1]["b"].data.copy_(PARAMS["b"])
    with pytest.raises(
        ShardingError, match="of the state has other values on rank 1 than on rank 0"
    ):
        step(1, PARAMS)


@on_ranks(2)
def test_later_steps_with_other_numbers_or_new_objects_are_not_verified_again(here: Here):
    """A step costs one all-reduce of 44 bytes, also if its transform has other numbers or is built again."""
    layout = sharding.replicated(PARAMS, here.group)
    chain = mfx.chain(mfx.momentum(), mfx.scale(-0.1))
    tx = sharding.sharded(chain, layout)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    for later in (
        tx,
        mfx.with_hyperparams(tx, {"scale.factor": -0.2}),
        sharding.sharded(chain, layout),
    ):
        with counting(here) as counted:
            _, state = later.update(PARAMS, state, PARAMS)
        assert counted.sent == {"all_reduce": 44}


# ------------------------------------------------------------------------------------------------ three kinds of drift


class Trouble:
    """Raises in the step of one rank."""

    is_due = False


@mfx.transform(locality=mfx.Locality.ELEMENT)
def sometimes_failing():
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        if Trouble.is_due:
            raise RuntimeError("out of memory")
        return updates, state

    return lambda params: mfx.core.EmptyState(), update


@pytest.mark.parametrize("how", ["functional", "optimizer"])
@on_ranks(2)
def test_a_rank_that_goes_on_after_an_error_inside_its_step_is_an_error_at_the_next_step(
    here: Here, tmp_path: Path, how: str
):
    """And a checkpoint that all ranks load makes them equal again."""
    layout = sharding.replicated(PARAMS, here.group)
    chain = mfx.chain(sometimes_failing(), mfx.scale(-0.1))
    weights = {name: nn.Parameter(leaf.clone()) for name, leaf in PARAMS.items()}
    local = {name: weight.detach() for name, weight in weights.items()}
    if how == "optimizer":
        optimizer = mfx.TransformOptimizer(weights, chain, layout=layout)
    else:
        tx = sharding.sharded(chain, layout)
        state = tx.init(local)

    def step() -> None:
        nonlocal state
        if how == "optimizer":
            for name, weight in weights.items():
                weight.grad = PARAMS[name].clone()
            optimizer.step()
            return
        updates, state = tx.update(PARAMS, state, local)
        for name, update in updates.items():
            local[name].add_(update)

    step()
    Trouble.is_due = here.rank == 1
    if Trouble.is_due:
        with pytest.raises(RuntimeError, match="out of memory"):
            step()
    else:
        step()
    Trouble.is_due = False
    before = local["a"].clone()
    with pytest.raises(ShardingError) as caught:
        step()
    for part in ("numbers of completed steps", "2\n", "1\n", "load one checkpoint on all ranks"):
        assert part in str(caught.value), caught.value
    assert torch.equal(local["a"], before)
    with pytest.raises(
        mfx.checkpoint.CheckpointError, match="'params/a' has other values on rank 1 than on rank 0"
    ):
        mfx.checkpoint.save(tmp_path / "x", None, params=local, group=here.group)
    for name, leaf in local.items():
        leaf.copy_(PARAMS[name])
    if how == "optimizer":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        state = sharding.from_global(tx, state)
    step()
    step()


@pytest.mark.parametrize("drift", ["unreduced gradients", "an edited parameter", "an edited state"])
@on_ranks(2)
def test_a_drift_in_values_is_an_error_of_the_next_save_that_names_the_leaf(
    here: Here, tmp_path: Path, drift: str
):
    """Steps compare no values after the first, so that they communicate 44 bytes; a save compares all replicas."""
    layout = sharding.replicated(PARAMS, here.group)
    tx = sharding.sharded(mfx.chain(mfx.momentum(), mfx.scale(-0.1)), layout)
    local = {name: leaf.clone() for name, leaf in PARAMS.items()}
    state = tx.init(local)

    def step(grads: dict[str, Any]) -> None:
        nonlocal local, state
        updates, state = tx.update(grads, state, local)
        local = mfx.apply_updates(local, updates)

    step(PARAMS)
    path = mfx.checkpoint.save(tmp_path / "good", state, params=local, tx=tx)
    name = "params/a"
    if drift == "unreduced gradients":
        step(unreduced(here))
        name = "momentum/trace/a"
    if drift == "an edited parameter" and here.rank == 1:
        local["a"][0, 0] += 1
    if drift == "an edited state":
        name = "momentum/trace/b"
        if here.rank == 1:
            state["momentum"].trace["b"][0] += 1
    step(PARAMS)
    for where in (path, tmp_path / "new"):
        with pytest.raises(mfx.checkpoint.CheckpointError) as caught:
            mfx.checkpoint.save(where, state, params=local, tx=tx)
        assert f"the leaf {name!r} has other values on rank 1 than on rank 0" in str(caught.value)
    assert mfx.checkpoint.verify(path).leaves
    assert not (tmp_path / "new").exists()
