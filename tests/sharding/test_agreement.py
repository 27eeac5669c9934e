"""Ranks agree on what they must agree on: or an error on all, or a warning, says what differs and between which."""

from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.sharding import ShardingError
from tests.processes import Failed, World
from tests.sharding import bound

pytestmark = pytest.mark.dist


def errors(found: list[Any]) -> list[str]:
    """The same error on all ranks."""
    assert all(isinstance(result, Failed) for result in found), found
    assert all(isinstance(result.error, ShardingError) for result in found), [result.trace for result in found]
    return [str(result.error) for result in found]


# ---------------------------------------------------------------------------------------------------------- "auto"


def test_machines_on_which_auto_differs_are_an_error_and_a_dtype_is_none(world: World):
    for said in errors(world.run(2, bound.machines_differ, dtype="auto")):
        assert "'orthogonalize' is bfloat16 on rank 0 and float32 on rank 1" in said
        assert "dtype=torch.float32" in said
    for dtype in (torch.float32, torch.bfloat16):
        assert world.check(2, bound.machines_differ, dtype=dtype) == [dtype] * 2


# -------------------------------------------------------------------------------------------------------- replicas

KINDS = {"replicated": ("a", 3), "hsdp": ("a", 4), "replicate": ("b", 2), "plain beside DTensors": ("b", 3)}


@pytest.mark.parametrize("how", ["functional", "optimizer"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_differ_at_the_start_are_an_error_and_broadcast_mends_it(world: World, kind: str, how: str):
    name, size = KINDS[kind]
    for said in world.check(size, bound.replicas_differ, kind=kind, name=name, on=size - 1, how=how):
        assert len(said) == 1
        assert f"'{name}'" in said[0]
        assert f"rank {size - 1}" in said[0]
        assert "broadcast(params, layout)" in said[0]


def test_the_copy_that_is_odd_may_be_the_first(world: World):
    for (said,) in world.check(3, bound.replicas_differ, kind="replicated", name="b", on=0, how="functional"):
        assert "'b' has other values on ranks 1, 2 than on rank 0" in said


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("loaded at the start", "mu.a"),
        ("taken back", "mu.a"),
        ("at all owners", "nu.a"),
        ("a counter", "count"),
        ("a hyperparameter", "hyperparams.b1"),
    ],
)
def test_states_that_differ_between_ranks_are_an_error_and_change_nothing(world: World, where: str, said: str):
    for found in world.check(2, bound.states_differ, where=where):
        assert len(found) == 1
        assert said in found[0]
        assert "rank 1" in found[0]


# ----------------------------------------------------------------------------------------------- chains and settings


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a version", f"'muonfx' is {mfx.__version__} on rank 0 and 0.0.1 on rank 1"),
        ("a default dtype", "'default dtype' is torch.float32 on rank 0 and torch.float64 on rank 1"),
        ("a precision", "'float32 matmul precision' is highest on rank 0 and medium on rank 1"),
        ("bucket_bytes", "bucket_bytes=1001"),
        ("the order of names", "different"),
        ("labels", "'b' is partition, y on rank 0 and partition, x on rank 1"),
    ],
)
def test_what_differs_when_a_chain_is_bound_is_an_error_on_all(world: World, what: str, said: str):
    for error in errors(world.run(3, bound.at_bind, what=what)):
        assert said in error


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("torch", "rank 1: torch 9.9"),
        ("gradients", "were gradients reduced over the ranks?"),
    ],
)
def test_what_may_differ_is_a_warning_on_all(world: World, what: str, said: str):
    for warnings in world.check(2, bound.warned_at_bind, what=what):
        assert len(warnings) == 1
        assert said in warnings[0]
    assert world.check(2, bound.warned_at_bind, what="nothing") == [[], []]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a tensor", "'scale.factor' is -0.1"),
        ("an extra", "'value' is 1.0 on rank 0 and 2.0 on rank 1"),
        ("a counter", "'scale_by_adam.count' is 1 of torch.int64 on rank 0 and 6 of torch.int64 on rank 1"),
        ("a new chain", "'scale.factor' is -0.1 on rank 0 and -0.3 on rank 1"),
    ],
)
def test_what_differs_in_a_step_is_an_error_on_all_and_changes_nothing(world: World, what: str, said: str):
    for error in errors(world.run(2, bound.in_a_step, what=what)):
        assert said in error


def test_a_chain_that_one_rank_alone_has_made_anew_is_compared_by_all(world: World):
    assert world.check(3, bound.a_chain_made_anew_on_one_rank) == [True] * 3


def test_groups_that_hold_other_parameters_on_another_rank_are_an_error(world: World):
    for error in errors(world.run(2, bound.groups_swapped)):
        assert "different" in error


def test_a_bind_sends_the_same_few_bytes_however_many_the_parameters(world: World):
    (few, more) = (world.check(4, bound.bytes_of_bind, count=count) for count in (2, 200))
    assert few == more
    for sent, calls in more:
        assert sent <= 256
        assert calls <= 2


def test_a_first_update_without_init_compares_what_init_would(world: World):
    for error in errors(world.run(2, bound.different_layouts_without_init)):
        assert "different parameters: 'c' is missing on rank 0" in error


def test_donation_may_differ_between_ranks(world: World):
    found = world.check(2, bound.donating_on_one_rank)
    assert found[0] == found[1]


def test_a_state_that_some_ranks_have_loaded_and_others_not_is_an_error_on_all(world: World):
    for error in errors(world.run(3, bound.loaded_on_one_rank, everywhere=False)):
        assert "load on all ranks, or on none" in error
    world.check(3, bound.loaded_on_one_rank, everywhere=True)


# ------------------------------------------------------------------------------------ what used to hang or go unnoticed

SIZES = pytest.mark.parametrize("size", [2, 3])


@SIZES
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a label function", "'b' is partition, y on rank 0 and partition, x on rank"),
        ("a mask function", "different transforms of a parameter: 'b'"),
        ("a mask of decay", "different chains"),
        ("a mask within another", "different transforms of a parameter: 'b'"),
        ("a schedule", "scale_by_learning_rate.learning_rate' is 0.1 on rank 0 and 0.2 on rank"),
        ("a schedule of decay", "add_decayed_weights.weight_decay' is 0.1 on rank 0 and 0.2 on rank"),
    ],
)
def test_functions_with_different_results_are_an_error_on_all(world: World, what: str, said: str, size: int):
    for error in errors(world.run(size, bound.functions_differ, what=what)):
        assert said in error


@SIZES
def test_a_function_that_raises_on_one_rank_is_an_error_on_all(world: World, size: int):
    found = world.run(size, bound.function_raises_on_one_rank)
    assert all(isinstance(result, Failed) for result in found), found
    assert all("ZeroDivisionError" in result.trace for result in found)


@SIZES
def test_a_state_offloaded_on_one_rank_only_is_an_error_on_all(world: World, size: int):
    for error in errors(world.run(size, bound.offloaded_on_one_rank)):
        assert "different stores of the state" in error


@SIZES
@pytest.mark.parametrize("how", ["functional", "optimizers", "one layout"])
def test_two_of_one_shape_stepped_in_another_order_are_an_error_on_all(world: World, how: str, size: int):
    for error in errors(world.run(size, bound.stepped_in_another_order, how=how)):
        assert "all ranks must step them in the same order" in error


@SIZES
def test_different_calls_at_one_time_are_an_error_on_all(world: World, size: int):
    for error in errors(world.run(size, bound.different_calls)):
        assert "different calls: rank 0 has a step" in error
        assert "rank 1: gathering leaves" in error
