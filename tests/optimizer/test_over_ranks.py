"""`TransformOptimizer` over sharded models, with real processes: the parameters and states of one process."""

import copy
import gc
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding import ShardingError, consensus
from muonfx.sharding.shards import IntervalTensor
from tests.optimizer import ranks
from tests.optimizer.ranks import (
    FULL,
    alone,
    assert_same,
    chains,
    close,
    goes_on,
    groups_of,
    made,
    named,
    optimized,
    quiet,
    sharded,
    train,
    whole,
)
from tests.processes import Here, World, errors_of

pytestmark = pytest.mark.dist


BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def local_leaves(optimizer: Any) -> list[Tensor]:
    leaves = [leaf for held in optimizer.state.values() for leaf in held.values()]
    return [
        leaf.piece.data if isinstance(leaf, IntervalTensor) else getattr(leaf, "_local_tensor", leaf) for leaf in leaves
    ]


def with_weights_of(net: Any, steps: int) -> None:
    """Give a model the weights that one process has after some steps."""
    values = {name: param.detach() for name, param in named(alone(steps)[0]).items()}
    for name, param in named(net).items():
        like = param.detach()
        if isinstance(like, DTensor):
            like.copy_(distribute_tensor(values[name], like.device_mesh, like.placements, src_data_rank=None))
        else:
            like.copy_(values[name])


@quiet()
def save_full(here: Here, kind: str, path: Path) -> None:
    """The usual line for a full state dict; rank 0 has all, as one process has it, and writes it."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_optimizer_state_dict(net, optimizer, options=options)
    if dist.get_rank() == 0:
        one, other = alone(2)
        wanted = get_optimizer_state_dict(one, other)
        assert found["state"].keys() == wanted["state"].keys()
        for name, leaves in wanted["state"].items():
            assert leaves.keys() == found["state"][name].keys(), name
            for key, leaf in leaves.items():
                assert type(found["state"][name][key]) is torch.Tensor
                close(found["state"][name][key], leaf, f"{name} {key}")
        torch.save(found, path)


@quiet()
def load_full(here: Here, kind: str, path: Path, broadcast: bool) -> None:
    """The usual line for loading it: rank 0 reads and sends, or every rank reads."""
    net, optimizer = optimized(kind, here)
    with_weights_of(net, 2)
    saved = torch.load(path, weights_only=True) if not broadcast or dist.get_rank() == 0 else {}
    set_optimizer_state_dict(net, optimizer, saved, options=BROADCAST if broadcast else FULL)
    goes_on(net, optimizer)


@quiet()
def rank_0_saves(here: Here, kind: str, path: Path) -> None:
    """Under data parallelism one rank alone asks for the state, and no other rank waits for it."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(2))
    if here.rank == here.size - 1:
        found = optimizer.state_dict()
        assert {type(leaf) for leaves in found["state"].values() for leaf in leaves.values()} == {torch.Tensor}
        torch.save(found, path)
    train(net, optimizer, range(2, 3))
    dist.barrier(here.group)


@quiet()
def all_load(here: Here, kind: str, path: Path) -> None:
    net, optimizer = optimized(kind, here)
    with_weights_of(net, 2)
    optimizer.load_state_dict(torch.load(path, weights_only=True))
    goes_on(net, optimizer)


@quiet()
def each_saves(here: Here, kind: str, path: Path) -> None:
    """Every rank writes what it has, and loads its own into the same storage."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(2))
    torch.save(optimizer.state_dict(), f"{path}.{here.rank}")
    leaves = local_leaves(optimizer)
    before = [leaf.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.zero_()
    optimizer.load_state_dict(torch.load(f"{path}.{here.rank}", weights_only=True))
    assert [leaf.data_ptr() for leaf in local_leaves(optimizer)] == [leaf.data_ptr() for leaf in leaves]
    assert all(map(torch.equal, leaves, before))
    goes_on(net, optimizer)


@quiet()
def load_of_rank(here: Here, kind: str, path: Path, ranks: list[int]) -> None:
    """Every rank loads what some rank has written; nothing may change where that is refused."""
    _, optimizer = optimized(kind, here)
    saved = torch.load(f"{path}.{ranks[here.rank]}", weights_only=True)
    before = [leaf.clone() for leaf in local_leaves(optimizer)]
    try:
        optimizer.load_state_dict(saved)
    except Exception:
        assert all(map(torch.equal, local_leaves(optimizer), before))
        raise


@quiet()
def alone_with_patience(here: Here, kind: str, what: str, seconds: float) -> list[str]:
    """One rank alone calls what all must; the others go on with collectives of their own. Afterwards all can do it."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(1))
    saved = optimizer.state_dict()
    said: list[str] = []
    kept = consensus._timeout, consensus.PATIENCE
    consensus._timeout, consensus.PATIENCE = (lambda group: timedelta(seconds=seconds)), timedelta(seconds=0.2)
    try:
        if here.rank == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    if what == "save":
                        optimizer.state_dict()
                    else:
                        optimizer.load_state_dict(saved if what == "load" else {**saved, "state": {}})
                except sharding.ShardingError as error:
                    said = [str(error), *[str(one.message) for one in caught]]
    finally:
        consensus._timeout, consensus.PATIENCE = kept
    dist.all_reduce(torch.ones(3), group=here.group)
    train(net, optimizer, range(1, 2))
    optimizer.load_state_dict(optimizer.state_dict())
    gc.collect()
    return said


@quiet()
def loads_of_two_moments(here: Here, kind: str) -> None:
    """One rank loads an older state than the others."""
    net, optimizer = optimized(kind, here)
    found = []
    for step in range(2):
        train(net, optimizer, range(step, step + 1))
        found.append(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(found[0 if here.rank == 1 else 1])
    before = {name: whole(param).clone() for name, param in named(net).items()}
    try:
        optimizer.step()
    finally:
        for name, param in named(net).items():
            assert torch.equal(whole(param), before[name]), name


@quiet()
def one_rank_loads_alone(here: Here, kind: str) -> None:
    """A rank alone loads an earlier state: its state dict has that state, and the next step is an error on all."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    train(net, optimizer, range(1, 2))
    if here.rank == 1:
        optimizer.load_state_dict(saved)
        for index, leaves in optimizer.state_dict()["state"].items():
            for key, leaf in leaves.items():
                assert torch.equal(leaf, saved["state"][index][key]), key
    optimizer.step()


@quiet()
def in_another_order(here: Here) -> None:
    """One rank gives its parameters, and its groups, in another order: the same training."""
    net, _ = sharded("fsdp", here)
    params, order = list(named(net).items()), -1 if here.rank == 1 else 1
    optimizer = mfx.TransformOptimizer(groups_of(dict(params[::order]), "two")[::order], chains(made())["by label"])
    train(net, optimizer, range(3))
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same((net, optimizer), alone(3))


SIZES = {"fsdp": 2, "hsdp": 4, "tp": 2, "fsdp+tp": 4, "ddp": 2}
KINDS = list(SIZES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_trains_as_a_whole_one(world: World, kind: str):
    world.check(SIZES[kind], ranks.trains_as_one, kind=kind, chain="by label", groups="two")


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


MOVES = [("fsdp", "hsdp"), ("hsdp", "fsdp"), ("fsdp", "fsdp+tp"), ("fsdp+tp", "tp"), ("ddp", "hsdp"), ("tp", "ddp")]


@pytest.mark.parametrize(("saver", "loader", "how"), [(*move, ("dcp", "ours")[i % 2]) for i, move in enumerate(MOVES)])
def test_what_one_mesh_saves_another_loads(world: World, tmp_path: Path, saver: str, loader: str, how: str):
    world.check(SIZES[saver], ranks.save, kind=saver, path=tmp_path / "saved", how=how)
    world.check(SIZES[loader], ranks.load_and_go_on, kind=loader, path=tmp_path / "saved", how=how)


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


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [("a bad rate", ValueError, "learning_rate"), ("another rate", ShardingError, "0.5 on rank 1")],
)
def test_a_wrong_or_another_rate_on_one_rank_is_raised_on_all_and_changes_nothing(
    world: World, what: str, kind: type[Exception], said: str
):
    first, second = errors_of(world.run(2, ranks.trouble, what=what, on=1))
    assert isinstance(first, ShardingError)
    assert isinstance(second, kind)
    assert all(said in str(error) and "learning_rate" in str(error) for error in (first, second))


def test_a_state_dict_that_does_not_fit_on_one_rank_is_loaded_on_none(world: World):
    first, second = errors_of(world.run(2, ranks.bad_state_on_one_rank, on=1))
    assert isinstance(second, ValueError)
    assert isinstance(first, ShardingError)


def test_a_layout_for_dtensors_is_refused(world: World):
    for error in errors_of(world.run(2, ranks.told_too_much)):
        assert isinstance(error, TypeError)
        assert "leave layout out" in str(error)


def test_copies_on_different_meshes_that_differ_are_an_error(world: World):
    for error in errors_of(world.run(4, ranks.copies_that_differ)):
        assert isinstance(error, ShardingError)
        assert "'own' lies on different meshes" in str(error)


# ------------------------------------------------------------------------------------------- torch's own formats


@pytest.mark.parametrize(
    ("saver", "loader", "broadcast"),
    [
        ("fsdp", "hsdp", True),
        ("hsdp", "tp", False),
        ("fsdp+tp", "fsdp", True),
        ("tp", "fsdp+tp", False),
        ("ddp", "hsdp", True),
    ],
)
def test_a_full_state_dict_is_complete_and_loads_on_another_mesh(
    world: World, pair: World, tmp_path: Path, saver: str, loader: str, broadcast: bool
):
    """Muon, row moments at owners, a stack of experts and AdamW, on two and on four ranks."""
    for kind, what, more in (
        (saver, save_full, {}),
        (loader, load_full, {"broadcast": broadcast}),
    ):
        processes = pair if SIZES[kind] == 2 else world
        processes.check(SIZES[kind], what, kind=kind, path=tmp_path / "saved", **more)


def test_under_ddp_any_rank_alone_has_a_complete_state(world: World, tmp_path: Path):
    world.check(2, rank_0_saves, kind="ddp", path=tmp_path / "saved")
    world.check(2, all_load, kind="ddp", path=tmp_path / "saved")
    world.check(4, all_load, kind="ddp", path=tmp_path / "saved")
    world.check(2, all_load, kind="fsdp", path=tmp_path / "saved")  # a whole tensor is good for any layout


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_can_load_the_file_that_it_wrote(world: World, tmp_path: Path, kind: str):
    world.check(SIZES[kind], each_saves, kind=kind, path=tmp_path / "saved")


def test_what_another_rank_had_of_a_sharded_state_is_refused_by_name(world: World, tmp_path: Path):
    world.check(2, each_saves, kind="fsdp", path=tmp_path / "saved")
    first, second = errors_of(world.run(2, load_of_rank, kind="fsdp", path=tmp_path / "saved", ranks=[0, 0]))
    assert isinstance(second, ValueError)
    assert isinstance(first, ShardingError)
    for error in (first, second):
        assert "'back.weight': 'muon/momentum/trace' is the shard of the rank at position (0,)" in str(error)
        assert "expected position (1,)" in str(error)


def test_replicas_may_load_one_anothers_file(world: World, tmp_path: Path):
    """Under HSDP ranks 0 and 2, and 1 and 3, hold the same."""
    world.check(4, each_saves, kind="hsdp", path=tmp_path / "saved")
    world.check(4, load_of_rank, kind="hsdp", path=tmp_path / "saved", ranks=[2, 1, 0, 1])
    for error in errors_of(world.run(4, load_of_rank, kind="hsdp", path=tmp_path / "saved", ranks=[1, 0, 3, 2])):
        assert "is the shard of the rank at position" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["load", "load what does not fit", "save"])
def test_a_rank_that_comes_alone_is_told_and_disturbs_nobody(world: World, what: str):
    said, nothing = world.check(2, alone_with_patience, kind="fsdp", what=what, seconds=1.5)
    assert nothing == []
    error, *warned = said
    called = "state_dict()" if what == "save" else "load_state_dict()"
    assert f"all ranks must call {called} together, but rank 1 did not" in error
    assert any(f"{called} waits for rank 1" in one for one in warned)


@pytest.mark.parametrize("kind", ["ddp", "hsdp", "fsdp"])
def test_ranks_that_load_states_of_different_moments_are_told_at_the_next_step(world: World, kind: str):
    found = errors_of(world.run(SIZES[kind], loads_of_two_moments, kind=kind))
    assert all(isinstance(error, ShardingError) for error in found)
    assert all("count' is " in str(error) for error in found), found


def test_under_ddp_a_rank_may_load_alone_and_the_next_step_tells_all(world: World):
    found = errors_of(world.run(2, one_rank_loads_alone, kind="ddp"))
    assert all("count' is 2 of torch.int64 on rank 0 and 1 of" in str(error) for error in found), found


def test_the_order_in_which_a_rank_gives_its_parameters_does_not_matter(world: World):
    world.check(2, in_another_order)
