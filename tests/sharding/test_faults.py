"""Faults between ranks: one that ends, a warning that is an error on one, None or NaN on some, and moved parameters."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from muonfx.checkpoint import background
from muonfx.polar.many import Orthogonalizer
from muonfx.sharding import ShardingError
from muonfx.testing.transforms import halve
from tests.processes import Failed, Here, ProcessEnded, World, on_ranks
from tests.sharding.cases import (
    Flat,
    LayoutCase,
    Leaf,
    Model,
    Placed,
    Replicated,
    Zero,
    bits,
    laid_out,
    model,
    some,
    two_groups,
)
from tests.sharding.test_law import plain

pytestmark = pytest.mark.dist


SMALL = model(steps=3, a=(6, 5), b=(7, 4), c=(3, 9), d=Leaf((5,)))
TX = two_groups(SMALL.labels)


def killed_in_mid_step(here: Here, model: Model, tx: mfx.Transform, case: LayoutCase, on: int) -> None:
    """A step in which one rank ends while matrices are computed."""
    params = model.params()
    layout = laid_out(case, params, here, tx)
    sharded = sharding.sharded(tx, layout)
    state = sharded.init(layout.shard(params))
    if here.rank == on:
        Orthogonalizer.__call__ = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    for step in range(model.steps):
        _, state = sharded.update(layout.shard(model.grads(step)), state, layout.shard(params))


def soak(here: Here, model: Model, tx: mfx.Transform, case: LayoutCase, steps: int) -> Any:
    """Many steps with None and NaN here and there; the parameters in the end, and how many steps were skipped."""
    params = model.params()
    layout = laid_out(case, params, here, tx)
    local, sharded = layout.shard(params), sharding.sharded(mfx.skip_nonfinite(tx), layout)
    state = sharded.init(local)
    for step in range(steps):
        reduced = layout.reduce_scatter(troubled(model, step, here.rank))
        grads = {name: None if leaf is None else plain(leaf) for name, leaf in reduced.items()}
        updates, state = sharded.update(grads, state, local)
        local = mfx.apply_updates(local, updates)
    whole = layout.gather(local)
    return {name: bits(leaf) for name, leaf in whole.items()}, int(state.skipped)


def troubled(model: Model, step: int, rank: int) -> dict[str, Any]:
    """Gradients of one rank, of which some are None and, seldom, one has a NaN."""
    draw = torch.Generator().manual_seed(step * 101 + rank)
    grads: dict[str, Any] = {
        name: torch.randn(leaf.shape, generator=draw).to(leaf.dtype) for name, leaf in model.leaves.items()
    }
    chance = torch.rand(2 * len(grads), generator=draw).tolist()
    for place, (name, leaf) in enumerate(model.leaves.items()):
        if chance[2 * place] < 0.2:
            grads[name] = None
        elif chance[2 * place + 1] < 0.02 and leaf.numel:
            grads[name].view(-1)[step % leaf.numel] = float("nan")
    return grads


@pytest.mark.slow
def test_a_rank_that_is_killed_in_mid_step_makes_the_others_fail_in_time():
    own = World(3)
    try:
        found = own.run(3, killed_in_mid_step, model=SMALL, tx=TX, case=Zero(1, "flat"), on=1)
    finally:
        own.close()
    assert all(isinstance(result, Failed) for result in found), found
    assert isinstance(found[1].error, ProcessEnded)
    for survivor in (found[0], found[2]):
        assert isinstance(survivor.error, ShardingError), survivor.trace
        assert "another rank has ended" in str(survivor.error)


def alone(drawn: Model, tx: mfx.Transform, steps: int, size: int) -> tuple[dict[str, torch.Tensor], int]:
    """What one process makes of the same gradients."""
    params, tx = drawn.params(), mfx.skip_nonfinite(tx)
    state = tx.init(params)
    for step in range(steps):
        each = [troubled(drawn, step, rank) for rank in range(size)]
        grads: dict[str, Any] = {}
        for name, leaf in params.items():
            there = [own[name] for own in each if own[name] is not None]
            total = torch.zeros_like(leaf)
            for grad in there:
                total = total + grad
            grads[name] = total / size if there else None
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
    return params, int(state.skipped)


ABCD = Placed(dict.fromkeys("abcd", ("0",)))
SOAKS = [Zero(2, "flat"), Zero(1, "whole"), Replicated(), ABCD, Flat(tuple("dacb"), (0, 3, 20, 30))]


@pytest.mark.parametrize("steps", [40, pytest.param(1000, marks=[pytest.mark.deep, pytest.mark.slow])])
@pytest.mark.parametrize("layout", SOAKS, ids=["flat", "whole", "ddp", "rows", "cuts"])
def test_a_soak_with_none_and_nan_here_and_there(world: World, layout: Any, steps: int):
    drawn = Model({"a": Leaf((4, 3), "muon"), "b": Leaf((5, 2), "muon"), "c": Leaf((3,)), "d": Leaf((2, 2), "muon")}, 3)
    found = world.check(3, soak, model=drawn, tx=two_groups(drawn.labels), case=layout, steps=steps)
    params, skipped = alone(drawn, two_groups(drawn.labels), steps, 3)
    assert {count for _, count in found} == {skipped}
    assert 0 < skipped < steps
    assert found[1:] == found[:-1]  # identical on all ranks
    for name, leaf in params.items():
        assert found[0][0][name] == bits(leaf), name


@pytest.mark.parametrize("trouble", ["none", "nan"])
@on_ranks(3)
def test_replicas_stay_the_same_whatever_one_of_them_has(here: Here, trouble: str):
    params = {"a": some(4, 4), "b": some(3)}
    layout = sharding.replicated(params, here.group)
    tx = sharding.sharded(mfx.skip_nonfinite(mfx.momentum(0.9)), layout)
    grads: dict[str, Any] = {"a": torch.ones(4, 4), "b": torch.ones(3)}
    if here.rank == 1:
        grads["a"] = None if trouble == "none" else torch.full((4, 4), float("nan"))
    updates, state = tx.update(grads, tx.init(params), params)
    held = [bits(leaf) for leaf in mfx.tree.tensors((updates, state))]
    found: list[Any] = [None] * here.size
    dist.all_gather_object(found, held, group=here.group)
    assert found == [held] * here.size
    assert int(state.skipped) == (trouble == "nan")
    assert trouble == "nan" or bool((updates["a"] != 0).all())


@on_ranks(4)
def test_parameters_whose_placements_have_changed_are_an_error(here: Here):
    params = {"a": distribute_tensor(some(4, 4), here.grid, [Replicate(), Shard(0)], src_data_rank=None)}
    layout = sharding.from_dtensors(params)
    tx = sharding.sharded(mfx.add_decayed_weights(0.1), layout)
    state = tx.init(params)
    other = {"a": params["a"].redistribute(placements=[Shard(0), Replicate()])}
    with pytest.raises(ShardingError, match="placed"):
        tx.update(other, state, other)


def strict_on_one_rank(here: Here, what: str, on: int, folder: Path) -> None:
    """Something to warn of, which is an error on one rank; then a step as ever."""
    params = {"a": some(4, 5), "b": some(3)}
    layout = sharding.replicated(params, here.group)
    local = layout.shard(params)
    tx = mfx.momentum()
    if what == "a pattern":
        blocks = mfx.MatrixView(blocks={"*.qvk": 3})
        tx = mfx.masked(mfx.orthogonalize(view=blocks), {"a": True, "b": False})
    if what == "gathering":
        tx = mfx.stateless(halve)  # of the whole tree
    over = sharding.sharded(tx, layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if here.rank == on else "ignore")
        if what == "a failed save":

            def fail() -> None:
                raise ValueError("no room")

            saving = background.start(folder, fail)
            background.wait_for_saves()
            assert saving.done
            mfx.checkpoint.save(folder / "new", params, group=here.group)
        state = over.init(local)
        grads = {name: leaf + here.rank for name, leaf in local.items()} if what == "gradients" else local
        over.update(grads, state, local)


@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("what", ["gradients", "a pattern", "gathering", "a failed save"])
def test_a_warning_that_is_an_error_on_one_rank_is_one_on_all(world: World, tmp_path: Path, what: str, on: int):
    size = 3
    found = world.run(size, strict_on_one_rank, what=what, on=on, folder=tmp_path)
    for rank, result in enumerate(found):
        assert isinstance(result, Failed), rank
        if rank == on:
            assert isinstance(result.error, UserWarning | mfx.checkpoint.CheckpointError), result.trace
        else:
            assert isinstance(result.error, sharding.ShardingError | mfx.checkpoint.CheckpointError), result.trace
            assert f"rank {on}: " in str(result.error)
    world.check(size, steps)


def steps(here: Here) -> None:
    """Every verb under strict warnings: neither ours nor torch's is one."""
    params = {"a": some(4, 5), "b": some(3)}
    made = sharding.replicated(params, here.group)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if here.rank == 0 else "ignore")
        tx = sharding.sharded(mfx.scale_by_adam(), made)
        local = made.shard(params)
        state = tx.init(local)
        for _ in range(2):
            _, state = tx.update(made.reduce_scatter(params), state, local)
        sharding.broadcast(made.shard(made.gather(local)), made)
