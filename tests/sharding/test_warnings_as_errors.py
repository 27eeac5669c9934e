"""A warning that is an error on one rank, as under ``python -W error``, is an error on all ranks."""

import warnings
from pathlib import Path

import pytest

import muonfx as mfx
from muonfx import sharding
from muonfx.checkpoint import background
from muonfx.testing.transforms import halve
from tests.processes import Failed, Here, World
from tests.sharding.cases import some

pytestmark = pytest.mark.dist


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
