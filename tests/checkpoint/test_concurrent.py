"""Several writers at one path, and readers beside them: each sees one whole checkpoint, and never a false error."""

import itertools
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import muonfx as mfx
from muonfx.checkpoint import FlatPiece
from tests.checkpoint.common import assert_same_tree
from tests.processes import Here, World

ck = mfx.checkpoint


def state_of(number: int, size: int = 500) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), float(number)) for name in "abcd"}


def assert_one_of(found: dict[str, torch.Tensor]) -> int:
    """That all leaves are of one save; its number."""
    numbers = {float(value) for leaf in found.values() for value in leaf.unique()}
    assert len(numbers) == 1, f"a mix of {numbers}"
    return int(numbers.pop())


# ------------------------------------------------------------------------------------------------------------- writers


def each_for_itself(here: Here, folder: Path, rounds: int) -> list[str]:
    """All ranks save to the same paths, none with a group; what each was told."""
    said: list[str] = []
    for number in range(rounds):
        dist.barrier(here.group)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ck.save(folder / str(number), state_of(10 * number + here.rank), step=here.rank)
        said += [str(warning.message) for warning in told]
        dist.barrier(here.group)
        assert_one_of(ck.load(folder / str(number), like=state_of(0)))
    return said


@pytest.mark.dist
def test_ranks_that_each_save_to_one_path_lose_nothing_and_are_told(world: World, tmp_path: Path):
    told = world.check(4, each_for_itself, folder=tmp_path, rounds=8)
    for number in range(8):
        path = tmp_path / str(number)
        ck.clean(path)
        assert ck.verify(path)
        assert len(list(path.iterdir())) == 2, list(path.iterdir())
    heard = [line for said in told for line in said]
    assert heard
    assert all("say group= on all of them, or save on one only" in line for line in heard)


def each_to_its_own(here: Here, folder: Path) -> None:
    """What is right gives no warning: one rank saves, or each to a path of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(2):
            if here.rank == 0:
                ck.save(ck.step_path(folder, number), state_of(number), step=number, keep=1)
            ck.save(folder / f"rank-{here.rank}", state_of(number))
            ck.save(folder / "together", state_of(number), group=here.group)


@pytest.mark.dist
def test_ranks_that_save_to_paths_of_their_own_are_told_nothing(world: World, tmp_path: Path):
    world.check(4, each_to_its_own, folder=tmp_path)


def test_saves_in_the_background_end_in_the_order_in_which_they_began(tmp_path: Path):
    for number in range(0, 30, 3):
        for later in range(3):
            saving = ck.save_async(tmp_path / "one", state_of(number + later), step=number + later)
        saving.wait()
        assert ck.verify(tmp_path / "one").step == number + 2
        assert len(list((tmp_path / "one").iterdir())) == 2
    # and with a save that waits for none of them
    ck.save_async(tmp_path / "one", state_of(100, size=1_000_000), step=100)
    ck.save(tmp_path / "one", state_of(101), step=101)
    assert ck.verify(tmp_path / "one").step == 101


def test_saves_in_the_background_to_a_series_keep_the_newest(tmp_path: Path):
    savings = [
        ck.save_async(ck.step_path(tmp_path, step), state_of(step, size=100_000 // step), step=step, keep=1)
        for step in range(1, 8)
    ]
    for saving in savings:
        saving.wait()
    assert ck.checkpoints(tmp_path) == [ck.step_path(tmp_path, 7)]


def test_a_save_within_a_save_does_not_wait_for_it(tmp_path: Path):
    inner: list[Path] = []

    def progress(done: int, total: int) -> None:
        if not inner:
            inner.append(ck.save(tmp_path / "one", state_of(2)))

    with pytest.warns(UserWarning, match="another process saved there at the same time"):
        ck.save(tmp_path / "one", state_of(1), progress=progress)
    assert assert_one_of(ck.load(tmp_path / "one", like=state_of(0))) == 1


# ------------------------------------------------------------------------------------------------------------- readers


@pytest.mark.parametrize("times", [20, pytest.param(2000, marks=pytest.mark.deep)])
def test_a_reader_sees_one_checkpoint_while_it_is_replaced(tmp_path: Path, times: int):
    path, until = ck.save(ck.step_path(tmp_path, 1), state_of(0)), threading.Event()

    def replace() -> None:
        for number in itertools.takewhile(lambda _: not until.is_set(), itertools.count()):
            ck.save(path, state_of(number), step=number)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(times):
            assert_one_of(ck.load(path, like=state_of(0)))
            assert_one_of(ck.read(path))
            ck.verify(path)
            assert ck.latest(tmp_path) == path
    finally:
        until.set()
        writer.join()


def ranks_reading(here: Here, path: Path, times: int) -> None:
    """Rank 3 replaces until the others have loaded so many times, together, each a part, and all of it."""
    readers = dist.new_group([0, 1, 2])
    if here.rank == 3:
        ck.save(path, state_of(0))
    dist.barrier(here.group)
    done = path.with_name("done")
    if here.rank == 3:
        number = 0
        while not done.exists():
            number += 1
            ck.save(path, state_of(number), step=number)
    else:
        for _ in range(times):
            whole = state_of(0)
            like: Any = whole | {
                "b": FlatPiece.cut(whole["b"], *((0, 100), (100, 300), (300, 500))[here.rank]),
                "c": FlatPiece.cut(whole["c"], *((0, 0), (0, 499), (499, 500))[here.rank]),
            }
            found = ck.load(path, like=like, group=readers)
            plain = {name: leaf.data if isinstance(leaf, FlatPiece) else leaf for name, leaf in found.items()}
            seen: list[int] = [0, 0, 0]
            dist.all_gather_object(seen, assert_one_of(plain), group=readers)
            assert len(set(seen)) == 1, f"ranks have loaded {seen}"
        done.touch()
    dist.barrier(here.group)


@pytest.mark.dist
@pytest.mark.parametrize("times", [20, pytest.param(500, marks=pytest.mark.deep)])
def test_ranks_load_one_checkpoint_while_it_is_replaced(world: World, tmp_path: Path, times: int):
    world.check(4, ranks_reading, path=tmp_path / "one", times=times)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_said_to_be_gone(tmp_path: Path, monkeypatch):
    from muonfx.checkpoint.data import Reader

    path = ck.save(ck.step_path(tmp_path, 1), state_of(1))
    check = Reader.check_files

    def late(self: Reader, *arguments: Any) -> Reader:
        monkeypatch.setattr(Reader, "check_files", check)
        if path.exists():
            ck.save(ck.step_path(tmp_path, 2), state_of(2), keep=1)
        return check(self, *arguments)

    monkeypatch.setattr(Reader, "check_files", late)
    with pytest.raises(ck.NotFoundError, match="no such folder"):
        ck.load(path, like=state_of(0))
    assert_same_tree(ck.load(ck.step_path(tmp_path, 2), like=state_of(0)), state_of(2))
