"""Several writers at one path, and readers beside them: each sees one whole checkpoint, and never a false error."""

import itertools
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import muonfx as mfx
from muonfx.checkpoint import CheckpointError, FlatPiece, WriteError
from muonfx.checkpoint.writing import Draft
from tests.checkpoint.common import assert_same_tree
from tests.processes import Here, World

ck = mfx.checkpoint
ROOT = Path(__file__).resolve().parents[2]


def state_of(number: int, size: int = 500) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), float(number)) for name in "abcd"}


def assert_one_of(found: dict[str, torch.Tensor]) -> int:
    """That all leaves are of one save; its number."""
    numbers = {float(value) for leaf in found.values() for value in leaf.unique()}
    assert len(numbers) == 1, f"a mix of {numbers}"
    return int(numbers.pop())


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
    told = world.check(4, each_for_itself, folder=tmp_path, rounds=5)
    for number in range(5):
        path = tmp_path / str(number)
        ck.clean(path)
        assert ck.verify(path)
        assert len(list(path.iterdir())) == 2, list(path.iterdir())
    heard = [line for said in told for line in said]
    assert heard
    assert all("pass group= on all of them, or save on one only" in line for line in heard)


def test_the_later_of_two_saves_at_the_same_time_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = Draft.write

    def write(draft: Draft, *args: Any) -> Any:
        monkeypatch.setattr(Draft, "write", original)
        ck.save(tmp_path / "one", state_of(2))
        return original(draft, *args)

    monkeypatch.setattr(Draft, "write", write)
    with pytest.warns(UserWarning, match="another process saved to this path at the same time"):
        ck.save(tmp_path / "one", state_of(1))
    assert assert_one_of(ck.load(tmp_path / "one", like=state_of(0))) == 1


def run_apart(call: str) -> str:
    """Call something of `checkpoint` in a process that ends at once, and return its stderr."""
    code = f"import torch, muonfx as mfx; mfx.checkpoint.{call}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stderr


@pytest.mark.slow
def test_a_process_that_ends_at_once_waits_for_a_large_save(tmp_path: Path):
    run_apart(f"save_async({str(tmp_path / 'a')!r}, {{'w': torch.ones(3_000_000)}})")
    assert ck.read(tmp_path / "a")["w"].sum() == 3_000_000


def test_a_save_in_the_background_goes_where_it_was_asked_to(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saving = ck.save_async("here", {"w": torch.ones(2_000_000)})
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    assert saving.wait() == tmp_path / "here"
    assert ck.verify(tmp_path / "here")


def test_a_failed_save_that_nobody_waits_for_is_told_of_when_the_next_begins(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    saving = ck.save_async(tmp_path / "file", {"w": torch.ones(1)})
    while not saving.done:
        time.sleep(0.01)
    with pytest.warns(UserWarning, match="file in the background has failed, and nobody has waited for it"):
        ck.save(tmp_path / "a", {"w": torch.ones(1)})
    ck.save(tmp_path / "a", {"w": torch.ones(1)})  # and once is enough
    for _ in range(2):
        with pytest.raises(WriteError, match="a checkpoint is a folder"):
            saving.wait()
    # Nor where it was waited for.
    with pytest.raises(WriteError):
        ck.save_async(tmp_path / "file", {"w": torch.ones(1)}).wait()
    ck.save(tmp_path / "a", {"w": torch.ones(1)})


def test_a_failed_save_that_nobody_waits_for_is_told_of_at_the_end_of_the_process(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    said = run_apart(f"save_async({str(tmp_path / 'file')!r}, {{'w': torch.ones(3)}})")
    assert f"muonfx: the save to {tmp_path / 'file'} in the background has failed, and nobody" in said
    assert "a checkpoint is a folder" in said


def test_saves_in_the_background_end_in_the_order_in_which_they_began(tmp_path: Path):
    for number in range(0, 30, 3):
        for later in range(3):
            saving = ck.save_async(tmp_path / "one", state_of(number + later), step=number + later)
        saving.wait()
        assert ck.verify(tmp_path / "one").step == number + 2
        assert len(list((tmp_path / "one").iterdir())) == 2
    ck.save_async(tmp_path / "one", state_of(100, size=1_000_000), step=100)
    ck.save(tmp_path / "one", state_of(101), step=101)
    assert ck.verify(tmp_path / "one").step == 101


def many_in_flight(here: Here, path: Path) -> None:
    """Several on one group, and saves and loads in the foreground meanwhile, wait for nothing but each other."""
    state = {"w": torch.full((300_000,), 1.0)}
    savings = [ck.save_async(path / "one", state, step=step, group=here.background) for step in range(5)]
    savings.append(ck.save_async(path / "other", state, step=5, group=here.background))
    ck.save(path / "one", state, step=6, group=here.background)
    loaded = ck.load(path / "other", like=state, group=here.background)
    assert torch.equal(loaded["w"], state["w"])
    for saving in savings:
        saving.wait()
    assert ck.verify(path / "one").step == 6


@pytest.mark.dist
def test_many_saves_with_one_group_are_done_in_order(world: World, tmp_path: Path):
    world.check(3, many_in_flight, path=tmp_path)
    assert len(list((tmp_path / "one").iterdir())) == 2  # what is the same on all ranks is written once


def with_a_destroyed_group(here: Here, path: Path, when: str) -> str:
    """Save with a group that is gone before the save begins, or in the midst of it."""
    group: Any = dist.new_group(list(range(4)), backend="gloo")
    gone, first, original = threading.Event(), None, Draft.write

    def write(draft: Draft, *args: Any) -> Any:
        written = original(draft, *args)
        assert gone.wait(60)
        return written

    Draft.write = write
    state = {"w": FlatPiece.cut(torch.ones(8), 2 * here.rank, 2 * here.rank + 2)}
    if when == "before":  # it waits for one that waits for us
        first = ck.save_async(path / f"own-{here.rank}", {"w": torch.ones(3)})
    saving = ck.save_async(path / "one", state, group=group)
    while when == "in the midst" and not list(path.glob("one/data-*")):
        time.sleep(0.01)
    dist.barrier(here.group)
    dist.destroy_process_group(group)
    gone.set()
    if first is not None:
        first.wait()
    with pytest.raises(CheckpointError) as caught:
        saving.wait()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("when", ["before", "in the midst"])
def test_a_save_whose_group_is_destroyed_says_so(tmp_path: Path, when: str):
    own = World(4, timeout=30)
    try:
        said = own.check(4, with_a_destroyed_group, path=tmp_path, when=when)
    finally:
        own.close()
    assert all("group" in text for text in said), said
    assert not (tmp_path / "one" / "index.json").exists()


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
