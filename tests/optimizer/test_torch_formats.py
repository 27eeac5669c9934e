"""The state of an optimizer over ranks in torch's own formats: complete, or refused, and never another rank's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from muonfx.sharding import ShardingError
from tests.optimizer import torch_formats as ranks
from tests.processes import Failed, World

pytestmark = pytest.mark.dist

SIZES = {"fsdp": 2, "hsdp": 4, "tp": 2, "fsdp+tp": 4, "ddp": 2}


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    """Two processes by themselves: torch broadcasts state dicts in the default group."""
    found = World(2)
    yield found
    found.close()


def errors(results: list[object]) -> list[BaseException]:
    assert all(isinstance(result, Failed) for result in results), results
    return [result.error for result in results if isinstance(result, Failed)]


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize(
    ("saver", "loader"), [("fsdp", "hsdp"), ("hsdp", "tp"), ("fsdp+tp", "fsdp"), ("tp", "fsdp+tp"), ("ddp", "hsdp")]
)
def test_a_full_state_dict_is_complete_and_loads_on_another_mesh(
    world: World, pair: World, tmp_path: Path, saver: str, loader: str, broadcast: bool
):
    """Muon, row moments at owners, a stack of experts and AdamW, on two and on four ranks."""
    for kind, what, more in ((saver, ranks.save_full, {}), (loader, ranks.load_full, {"broadcast": broadcast})):
        processes = pair if SIZES[kind] == 2 else world
        processes.check(SIZES[kind], what, kind=kind, path=tmp_path / "saved", **more)


def test_under_ddp_any_rank_alone_has_a_complete_state(world: World, tmp_path: Path):
    world.check(2, ranks.rank_0_saves, kind="ddp", path=tmp_path / "saved")
    world.check(2, ranks.all_load, kind="ddp", path=tmp_path / "saved")
    world.check(4, ranks.all_load, kind="ddp", path=tmp_path / "saved")
    world.check(2, ranks.all_load, kind="fsdp", path=tmp_path / "saved")  # a whole tensor is good for any layout


@pytest.mark.parametrize("kind", list(SIZES))
def test_every_rank_can_load_the_file_that_it_wrote(world: World, tmp_path: Path, kind: str):
    world.check(SIZES[kind], ranks.each_saves, kind=kind, path=tmp_path / "saved")


def test_what_another_rank_had_of_a_sharded_state_is_refused_by_name(world: World, tmp_path: Path):
    world.check(2, ranks.each_saves, kind="fsdp", path=tmp_path / "saved")
    first, second = errors(world.run(2, ranks.load_of_rank, kind="fsdp", path=tmp_path / "saved", ranks=[0, 0]))
    assert isinstance(second, ValueError)
    assert isinstance(first, ShardingError)
    for error in (first, second):
        assert "'back.weight': 'muon/momentum/trace' is the shard of the rank at position (0,)" in str(error)
        assert "expected that of position (1,)" in str(error)


def test_replicas_may_load_one_anothers_file(world: World, tmp_path: Path):
    """Under HSDP ranks 0 and 2, and 1 and 3, hold the same."""
    world.check(4, ranks.each_saves, kind="hsdp", path=tmp_path / "saved")
    world.check(4, ranks.load_of_rank, kind="hsdp", path=tmp_path / "saved", ranks=[2, 1, 0, 1])
    for error in errors(world.run(4, ranks.load_of_rank, kind="hsdp", path=tmp_path / "saved", ranks=[1, 0, 3, 2])):
        assert "is the shard of the rank at position" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["load", "load what does not fit", "save"])
def test_a_rank_that_comes_alone_is_told_and_disturbs_nobody(world: World, what: str):
    said, nothing = world.check(2, ranks.alone_with_patience, kind="fsdp", what=what, seconds=1.5)
    assert nothing == []
    error, *warned = said
    called = "state_dict()" if what == "save" else "load_state_dict()"
    assert f"all ranks must call {called} together, but rank 1 did not" in error
    assert any(f"{called} waits for rank 1" in one for one in warned)


@pytest.mark.parametrize("kind", ["ddp", "hsdp", "fsdp"])
def test_ranks_that_load_states_of_different_moments_are_told_at_the_next_step(world: World, kind: str):
    found = errors(world.run(SIZES[kind], ranks.loads_of_two_moments, kind=kind))
    assert all(isinstance(error, ShardingError) for error in found)
    assert all("count' is " in str(error) for error in found), found


def test_under_ddp_a_rank_may_load_alone_and_the_next_step_tells_all(world: World):
    found = errors(world.run(2, ranks.one_rank_loads_alone, kind="ddp"))
    assert all("count' is 2 of torch.int64 on rank 0 and 1 of" in str(error) for error in found), found


@pytest.mark.parametrize("groups", ["one", "two"])
def test_the_order_in_which_a_rank_gives_its_parameters_does_not_matter(world: World, groups: str):
    world.check(2, ranks.in_another_order, groups=groups)
