"""The storage of torch.distributed.checkpoint: any model and optimizer, any number of ranks, and every refusal."""

import collections
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonfx as mfx
from tests.checkpoint.common import bits, copies
from tests.checkpoint.faults import faults
from tests.processes import Here, World, on_ranks

ck = mfx.checkpoint
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:.*assuming the intent"
)


def cause(error: BaseException) -> BaseException:
    """The error of the first rank in the `CheckpointException` that dcp.save and dcp.load raise."""
    assert isinstance(error, CheckpointException), error
    return error.failures[min(error.failures)][0]


def save(state: dict[str, Any], path: Path, here: Here | None = None, **options: Any) -> None:
    dcp.save(
        state,
        storage_writer=ck.Writer(path, **options),
        process_group=here and here.group,
        no_dist=here is None,
    )


def load(state: dict[str, Any], path: Path, here: Here | None = None, **options: Any) -> None:
    dcp.load(
        state,
        storage_reader=ck.Reader(path, **options),
        process_group=here and here.group,
        no_dist=here is None,
    )


def fails(call: Any, *arguments: Any, **options: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        call(*arguments, **options)
    return cause(caught.value)


# ------------------------------------------------------------------------------------------------- a model and an AdamW


def trained(
    here: Here | None, seed: int, steps: int = 2
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with uneven shapes and its AdamW after some steps, under FSDP2 if there are ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))
    if here is not None:
        fully_shard(model[0], mesh=here.mesh)
        fully_shard(model, mesh=here.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1), betas=(0.8, 0.9))
    torch.manual_seed(seed + 100)
    for _ in range(steps):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole tensors, and the groups without their parameters."""
    state = state_of(model, optimizer)
    tensors = {f"model {name}": bits(value) for name, value in state["model"].items()}
    for name, entries in state["optim"]["state"].items():
        tensors |= {f"{name} {key}": bits(value) for key, value in entries.items()}
    return {**tensors, "groups": state["optim"]["param_groups"]}


def save_trained(here: Here, path: Path, seed: int) -> dict[str, Any]:
    pair = trained(here, seed)
    save(state_of(*pair), path, here, step=2)
    return values_of(*pair)


def load_trained(here: Here, path: Path, seed: int) -> dict[str, Any]:
    pair = trained(here, seed)
    state = state_of(*pair)
    load(state, path, here)
    set_state_dict(*pair, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return values_of(*pair)


@pytest.mark.dist
@pytest.mark.parametrize("savers", [2, 3])
def test_a_model_and_an_adamw_load_on_any_number_of_ranks(
    world: World, tmp_path: Path, savers: int
):
    saved = world.check(savers, save_trained, path=tmp_path, seed=0)
    assert ck.verify(tmp_path).step == 2
    assert not any(
        file.suffix in (".pt", ".pkl", ".distcp", ".metadata") for file in tmp_path.iterdir()
    )
    for loaders in {1, 2, 3, 4} - {savers}:
        for loaded in world.check(loaders, load_trained, path=tmp_path, seed=1):
            assert loaded == saved[0]
    # one process without a group, and without DCP
    model, optimizer = trained(None, 1)
    state = state_of(model, optimizer)
    load(state, tmp_path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    assert values_of(model, optimizer) == saved[0]
    tensors = {"model": state["model"], "optim": {"state": state["optim"]["state"]}}
    loaded = ck.load(tmp_path, like=tensors)
    assert bits(loaded["optim"]["state"]["0.weight"]["exp_avg"]) == saved[0]["0.weight exp_avg"]


@on_ranks(2)
def test_async_save_writes_the_values_at_the_call(here: Here, tmp_path: Path):
    state = {"w": distribute_tensor(torch.ones(5, 3), here.mesh, [Shard(0)]), "steps": 3}
    future = dcp.async_save(
        state, storage_writer=ck.Writer(tmp_path), process_group=here.background
    )
    state["w"].zero_()
    future.result()
    load(state, tmp_path, here)
    assert torch.equal(state["w"].full_tensor(), torch.ones(5, 3))


def test_muon_is_saved_by_dcp_too(tmp_path: Path):
    """And what `mfx.checkpoint.save` has written is loaded by dcp.load."""
    model = nn.Linear(3, 2)
    optimizer = mfx.Muon(model, lr=0.1)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    path = ck.save(
        tmp_path / "ours", {"model": dict(model.named_parameters()), "count": torch.tensor(3)}
    )
    state = {
        "model": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)},
        "count": torch.tensor(0),
    }
    load(state, path)
    assert torch.equal(state["model"]["weight"], model.weight)
    assert state["count"] == 3
    whole = state_of(model, optimizer)
    save(whole, tmp_path / "dcp")
    # Without a template.
    rebuilt = _load_state_dict_from_keys(storage_reader=ck.Reader(tmp_path / "dcp"))
    assert rebuilt["optim"]["param_groups"] == whole["optim"]["param_groups"]


# ------------------------------------------------------------------------------------------------------- values, format


class Own:
    """A value that only pickle could write."""


def test_values_that_are_no_tensors_come_back_as_they_were(tmp_path: Path):
    state: dict[str, Any] = {
        "none": None, "flag": True, "count": 7, "rate": 0.1, "best": math.inf, "worst": -math.inf, "text": "a/b~c",
        "betas": (0.9, 0.95), "nested": [(1, [2.5, None]), ()], "raw": b"\0\xff", "milestones": ({30: 1},),
        "counter": [collections.Counter({3: 2})][0:0], "big": 2**80, "~tuple": ({"~x": 1},), "many": {"a": {"b": [1]}},
    }  # fmt: skip
    save(state, tmp_path)
    blank: dict[str, Any] = dict.fromkeys(state) | {"many": {"a": {"b": None}}}
    load(blank, tmp_path)
    assert blank == state
    assert [type(value) for value in blank.values()] == [type(value) for value in state.values()]
    save({"nan": math.nan}, tmp_path)
    load(blank := {"nan": 0.0}, tmp_path)
    assert math.isnan(blank["nan"])


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a": {"own": Own()}}, "a/own"),
        ({"a": [1, {2}]}, "a/1"),
        ({"a": ({"f": len},)}, "a/0/f"),
        ({"a": (torch.ones(2, 2),)}, "a/0"),
        ({"a": torch.ones(2).to_sparse()}, "a"),
    ],
)
def test_what_no_file_can_hold_is_refused_by_name(tmp_path: Path, state: dict[str, Any], name: str):
    save({"w": torch.ones(1)}, tmp_path)
    before = copies(tmp_path)
    error = fails(save, {"w": torch.zeros(1), **state}, tmp_path)
    assert isinstance(error, TypeError)
    assert repr(name) in str(error)
    assert copies(tmp_path) == before


def test_plain_safetensors_reads_the_tensors(tmp_path: Path):
    save(
        {"model": {"fc.weight": torch.ones(2, 3), "e": torch.zeros(0, 2)}, "s": torch.tensor(2)},
        tmp_path,
    )
    (file,) = tmp_path.glob("*.safetensors")
    loaded: dict[str, Tensor] = load_file(file)
    assert {name: tuple(value.shape) for name, value in loaded.items()} == {
        "model/fc.weight": (2, 3),
        "model/e": (0, 2),
        "s": (),
    }


def test_every_dtype_and_planner_is_accepted(tmp_path: Path):
    from muonfx.tree.dtypes import NAMES

    state = {name: torch.ones(2, 3, dtype=torch.float32).to(dtype) for dtype, name in NAMES.items()}
    state |= {"view": torch.arange(6.0).reshape(2, 3).T, "x.y": torch.ones(2)}
    for planners in (
        (None, None),
        (
            dcp.DefaultSavePlanner(flatten_state_dict=False),
            dcp.DefaultLoadPlanner(flatten_state_dict=False),
        ),
        (
            dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            dcp.DefaultLoadPlanner(allow_partial_load=True),
        ),
    ):
        dcp.save(state, storage_writer=ck.Writer(tmp_path), planner=planners[0], no_dist=True)
        blank = {name: torch.zeros_like(value) for name, value in state.items()}
        dcp.load(blank, storage_reader=ck.Reader(tmp_path), planner=planners[1], no_dist=True)
        assert {name: bits(value) for name, value in blank.items()} == {
            k: bits(v) for k, v in state.items()
        }


def test_what_hides_the_plans_of_ranks_is_refused(tmp_path: Path):
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            {"w": torch.ones(1)}, storage_writer=ck.Writer(tmp_path), planner=planner, no_dist=True
        )
    assert "enable_plan_caching" in str(cause(caught.value))
    with pytest.raises(ValueError, match="use_collectives=False"):
        dcp.save(
            {"w": torch.ones(1)},
            storage_writer=ck.Writer(tmp_path),
            use_collectives=False,
            no_dist=True,
        )
    assert not any(tmp_path.iterdir())


def test_arguments_are_checked_when_they_are_given(tmp_path: Path):
    with pytest.raises(TypeError, match="extra"):
        ck.Writer(tmp_path, extra={"a": {1}})
    with pytest.raises(ValueError, match="step_path"):
        ck.Writer(tmp_path, keep=2)
    with pytest.raises(TypeError, match="cast"):
        ck.Reader(tmp_path, cast=torch.bfloat16)  # pyright: ignore[reportArgumentType]
    assert ck.Writer.validate_checkpoint_id(tmp_path)
    assert not ck.Reader.validate_checkpoint_id("")
    writer = ck.Writer(ck.step_path(tmp_path, 0), keep=1)
    for step in range(3):
        dcp.save(
            {"w": torch.ones(1)},
            checkpoint_id=ck.step_path(tmp_path, step),
            storage_writer=writer,
            no_dist=True,
        )
    assert [path.name for path in ck.checkpoints(tmp_path)] == ["step-000000002"]
    with pytest.raises(ValueError, match="step_path"):
        writer.reset(tmp_path / "other")


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_narrower_dtype_needs_cast_and_a_wider_one_does_not(tmp_path: Path):
    save({"m": {"w": torch.full((2,), 1 / 3), "n": torch.ones(2)}}, tmp_path)
    state = {
        "m": {"w": torch.zeros(2, dtype=torch.bfloat16), "n": torch.zeros(2, dtype=torch.float64)}
    }
    error = fails(load, state, tmp_path)
    assert isinstance(error, ck.MismatchError)
    assert "'m/w': torch.bfloat16" in str(error)
    assert "'m/n'" not in str(error)
    assert not state["m"]["n"].any()
    for cast in ({"m/w": torch.float16}, {"m.w": torch.bfloat16}):
        assert isinstance(fails(load, state, tmp_path, cast=cast), ck.MismatchError)
    load(state, tmp_path, cast={"m/w": torch.bfloat16})
    assert torch.equal(state["m"]["w"], torch.full((2,), 1 / 3).bfloat16())
    assert state["m"]["n"].all()


def test_damage_is_found_and_nothing_is_loaded(tmp_path: Path):
    assert isinstance(fails(load, {"a": torch.ones(1)}, tmp_path / "none"), ck.NotFoundError)
    save({"a": torch.ones(400), "b": torch.ones(400), "n": 3}, tmp_path)
    for file in sorted(tmp_path.iterdir()):
        whole = file.read_bytes()
        for at in {0, 20, len(whole) // 2, len(whole) - 2}:
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            state = {"a": torch.zeros(400), "b": torch.zeros(400), "n": 0}
            assert isinstance(fails(load, state, tmp_path), ck.CorruptError), (file.name, at)
            assert not state["a"].any()
            assert not state["b"].any()
            assert state["n"] == 0
        file.write_bytes(whole[:-1])
        assert isinstance(fails(load, {"a": torch.zeros(400)}, tmp_path), ck.CorruptError)
        file.write_bytes(whole)
    load({"a": torch.zeros(400), "b": torch.zeros(400), "n": 0}, tmp_path)


@on_ranks(2)
def test_replicas_that_differ_are_an_error_and_the_earlier_checkpoint_stays(
    here: Here, tmp_path: Path
):
    good = {
        "w": torch.ones(3),
        "n": 1,
        "sharded": distribute_tensor(torch.ones(4, 2), here.mesh, [Shard(0)]),
    }
    save(good, tmp_path, here)
    here_only = {f"rank {here.rank}": here.rank, f"part {here.rank}": torch.ones(here.rank + 1)}
    for name, value in {
        "w": torch.ones(3) * (here.rank + 1), "n": here.rank, "w ": torch.ones(3 + here.rank),
        "d": torch.ones(3, dtype=[torch.float32, torch.float64][here.rank]), "kind": [torch.ones(()), 1.0][here.rank],
        "flag": [1, True][here.rank],
    }.items():  # fmt: skip
        error = fails(save, {**good, **here_only, name: value}, tmp_path, here)
        assert (repr(name) in str(error) and "rank 1" in str(error)) or name == "kind", error
        assert ck.verify(tmp_path).objects == {"n": 1}
    error = fails(save, good, tmp_path, here, step=here.rank)
    assert "step" in str(error)
    error = fails(save, good, tmp_path / str(here.rank), here)
    assert "path" in str(error)
    save({**good, **here_only}, tmp_path, here)  # values of one rank have their own keys
    assert set(ck.inspect(tmp_path).objects) == {"n", "rank 0", "rank 1"}
    dist.barrier(here.group)
    assert len(list(tmp_path.glob("*.part"))) + len(list(tmp_path.glob(".save*"))) == 0
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


@on_ranks(2)
def test_optimizers_of_stages_are_refused_with_the_flag_that_saves_them(here: Here, tmp_path: Path):
    stage = nn.ModuleDict({f"layer{here.rank}": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    error = fails(save, {"optim": get_optimizer_state_dict(stage, optimizer)}, tmp_path, here)
    assert "'optim/param_groups/0/params' is ['layer1." in str(error)
    assert (
        "call get_optimizer_state_dict with options=StateDictOptions(flatten_optimizer_state_dict=True)"
        in str(error)
    )
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    save({"optim": get_optimizer_state_dict(stage, optimizer, options=options)}, tmp_path, here)
    assert {"optim/param_groups.layer0.bias.lr", "optim/param_groups.layer1.bias.lr"} <= ck.verify(
        tmp_path
    ).objects.keys()


def save_until_killed(here: Here, path: Path, at: int) -> None:
    state = {"w": distribute_tensor(torch.zeros(4, 2), here.mesh, [Shard(0)]), "n": 2}
    with faults(path, at if here.rank == 1 else -1, kill=True):
        save(state, path, here)


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_the_earlier_checkpoint(world: World, tmp_path: Path):
    state = {"w": torch.ones(4, 2), "n": 1}
    save(state, tmp_path)
    broken = World(2, timeout=10)
    broken.run(2, save_until_killed, path=tmp_path, at=1)
    broken.close()
    load(state, tmp_path)
    assert state["n"] == 1
    assert state["w"].all()
    save(state, tmp_path)  # removes what the killed ranks have left
    assert len(list(tmp_path.iterdir())) == 2


def forked(call: Any) -> int:
    """Call a function in a forked process; return its wait status."""
    child = os.fork()
    if not child:
        try:
            call()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("how", [{"kill": True}, {}])
def test_a_save_that_ends_at_any_call_leaves_one_whole_checkpoint(
    tmp_path: Path, how: dict[str, Any]
):
    """A kill, or an error of the system, at each call that touches the folder."""

    def write(number: int) -> None:
        save({"w": torch.full((50,), float(number)), "n": number}, tmp_path)

    write(0)
    seen: set[int] = set()
    for at in range(100):

        def attempt(at: int = at) -> None:
            with faults(tmp_path, at, **how) as made, warnings.catch_warnings(action="ignore"):
                write(at + 1)
            if not made.failed:
                os._exit(0)

        status = forked(attempt)
        state = {"w": torch.zeros(50), "n": 0}
        load(state, tmp_path)
        assert torch.equal(state["w"], torch.full((50,), float(state["n"])))
        seen.add(int(state["n"] == at + 1))
        if status == 0:
            break
        assert how == {} or os.WTERMSIG(status) == signal.SIGKILL
    assert status == 0
    assert at > 5
    assert seen == {0, 1}
    write(0)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_save_that_replaces_a_checkpoint_while_it_is_read_is_found(tmp_path: Path):
    """The reader has opened the files, so it reads the old values; ranks that have opened different ones raise."""
    save({"w": torch.ones(3)}, tmp_path)
    reader = ck.Reader(tmp_path)
    metadata = reader.read_metadata()
    state = {"w": torch.zeros(3)}
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    save({"w": torch.full((3,), 2.0)}, tmp_path)
    other = ck.Reader(tmp_path)
    planner.set_up_planner(state, other.read_metadata(), True)
    other_plan = other.prepare_local_plan(planner.create_local_plan())
    with pytest.raises(ck.CheckpointError, match="replaced"):
        reader.prepare_global_plan([plan, other_plan])
    reader.read_data(plan, planner).wait()
    assert torch.equal(state["w"], torch.ones(3))


@on_ranks(2)
def test_uneven_and_replicated_tensors(here: Here, tmp_path: Path):
    """A DTensor with no elements on rank 1, one that is replicated, and one with no elements at all."""
    leaves = {
        "uneven": distribute_tensor(torch.arange(1.0), here.mesh, [Shard(0)]),
        "replicated": distribute_tensor(torch.arange(3.0), here.mesh, [Replicate()]),
        "empty": distribute_tensor(torch.zeros(4, 0), here.mesh, [Shard(0)]),
    }
    save(leaves, tmp_path, here)
    dist.barrier(here.group)
    values = {name: value.tolist() for name, value in ck.read(tmp_path).items()}
    assert values == {"uneven": [0.0], "replicated": [0.0, 1.0, 2.0], "empty": [[], [], [], []]}
    blank = {name: torch.zeros_like(value) for name, value in leaves.items()}
    load(blank, tmp_path, here)
    assert {name: bits(value) for name, value in blank.items()} == {
        k: bits(v) for k, v in leaves.items()
    }
