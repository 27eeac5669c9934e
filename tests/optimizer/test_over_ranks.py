"""`TransformOptimizer` over sharded models, with real processes: the parameters and states of one process."""

from pathlib import Path
from typing import Any

import pytest

from muonfx.sharding import ShardingError
from tests.optimizer import sharded_optimizers as ranks
from tests.processes import Failed, World

pytestmark = pytest.mark.dist

SIZES = {"fsdp": 2, "hsdp": 4, "tp": 2, "fsdp+tp": 4, "ddp": 2}
KINDS = list(SIZES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chain", ["by label", "outer"])
def test_a_sharded_model_trains_as_a_whole_one(world: World, kind: str, chain: str):
    world.check(SIZES[kind], ranks.trains_as_one, kind=kind, chain=chain, groups="two")


@pytest.mark.parametrize("chain", ["skipping", "accumulating", "watched"])
def test_chains_that_look_at_the_whole_tree_do_so_over_ranks(world: World, chain: str):
    world.check(2, ranks.trains_as_one, kind="fsdp", chain=chain, groups="one")


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_clip_grad_norm_comes_before_a_step(world: World, kind: str):
    world.check(SIZES[kind], ranks.trains_as_one, kind=kind, chain="by label", groups="one", clip=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chain", ["by label", "outer"])
def test_given_gradients_give_the_same_bits(world: World, kind: str, chain: str):
    """With groups that differ, a frozen and a tied parameter, and a gradient that is absent on one rank."""
    world.check(SIZES[kind], ranks.by_given_gradients, kind=kind, chain=chain, groups="two")


def test_plain_tensors_and_dtensors_on_several_meshes_go_together(world: World):
    world.check(4, ranks.mixed_parameters)


@pytest.mark.parametrize("how", ["dcp", "ours"])
@pytest.mark.parametrize(
    ("saver", "loader"),
    [("fsdp", "hsdp"), ("hsdp", "fsdp"), ("fsdp", "fsdp+tp"), ("fsdp+tp", "tp"), ("ddp", "hsdp"), ("tp", "ddp")],
)
def test_what_one_mesh_saves_another_loads(world: World, tmp_path: Path, saver: str, loader: str, how: str):
    world.check(SIZES[saver], ranks.save, kind=saver, path=tmp_path / "saved", how=how)
    world.check(SIZES[loader], ranks.load_and_go_on, kind=loader, path=tmp_path / "saved", how=how)


def test_what_two_ranks_save_four_load(world: World, tmp_path: Path):
    world.check(2, ranks.save, kind="fsdp", path=tmp_path / "saved", how="dcp")
    world.check(4, ranks.load_and_go_on, kind="fsdp", path=tmp_path / "saved", how="dcp")


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_added_later_keeps_the_state_of_others_though_owners_change(world: World, kind: str):
    world.check(SIZES[kind], ranks.add_a_group, kind=kind)


def test_a_step_agrees_once_and_groups_add_no_exchange(world: World):
    for calls in world.check(2, ranks.counted, kind="fsdp"):
        one, two = zip(*calls.values(), strict=True)
        assert one == two, calls
        # one agreement, the norm of all gradients; the matrices of both labels there and back
        assert calls["all_reduce"] == [2, 2]
        assert set(calls) == {"all_reduce", "all_to_all_single"}


def test_where_nothing_is_sharded_no_rank_is_asked(world: World):
    assert world.check(2, ranks.nothing_is_sharded) == [{}, {}]


def failures(results: list[Any]) -> list[BaseException]:
    assert all(isinstance(result, Failed) for result in results), results
    return [result.error for result in results]


@pytest.mark.parametrize(
    ("what", "match"), [("a bad rate", "learning_rate"), ("a gradient of integers", "leave it out")]
)
def test_what_is_wrong_on_one_rank_is_raised_on_all_and_changes_nothing(world: World, what: str, match: str):
    first, second = failures(world.run(2, ranks.trouble, what=what, on=1))
    assert isinstance(second, ValueError)
    assert isinstance(first, ShardingError)
    assert match in str(second)
    assert match in str(first)


def test_a_hyperparameter_that_differs_between_ranks_is_an_error_on_all(world: World):
    for error in failures(world.run(2, ranks.trouble, what="another rate", on=1)):
        assert isinstance(error, ShardingError)
        assert "learning_rate' is " in str(error)
        assert "0.5 on rank 1" in str(error)


def test_a_state_dict_that_does_not_fit_on_one_rank_is_loaded_on_none(world: World):
    first, second = failures(world.run(2, ranks.bad_state_on_one_rank, on=1))
    assert isinstance(second, ValueError)
    assert isinstance(first, ShardingError)


def test_a_layout_for_dtensors_is_refused(world: World):
    for error in failures(world.run(2, ranks.told_too_much)):
        assert isinstance(error, TypeError)
        assert "leave layout out" in str(error)


def test_owned_state_is_a_dtensor_on_its_owners_mesh(world: World):
    first, second = world.check(2, ranks.functional_state)
    owners = [(a.endswith("True"), b.endswith("True")) for a, b in zip(first, second, strict=True)]
    assert sum(owners[0]) == sum(owners[1]) == 1  # a matrix has one owner
    assert owners[2] == (True, True)  # experts stay where they are


def test_copies_on_different_meshes_that_differ_are_an_error(world: World):
    for error in failures(world.run(4, ranks.copies_that_differ)):
        assert isinstance(error, ShardingError)
        assert "'own' lies on different meshes" in str(error)
