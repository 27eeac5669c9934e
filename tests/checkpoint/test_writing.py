"""Saves never lose the last good checkpoint, nor any other file, with several writers and readers at one path too.

`test_faults` fails the system calls.
"""

import errno
import itertools
import os
import re
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import muonfx as mfx
from muonfx.checkpoint import CheckpointError, FlatShard, WriteError, folder, writer
from muonfx.checkpoint.index import INDEX
from muonfx.checkpoint.reader import DataReader
from muonfx.checkpoint.writer import Draft
from muonfx.polar import policy
from tests.checkpoint.common import assert_same_tree, copies
from tests.checkpoint.faults import faults
from tests.processes import Here, World, on_ranks, run_python

ck = mfx.checkpoint
OLD = {"w": torch.arange(1000.0), "b": torch.zeros(3)}
NEW = {"w": torch.arange(1000.0) + 1, "b": torch.ones(3)}


def test_data_are_on_the_disk_before_the_index_gets_its_name(tmp_path: Path):
    with faults(tmp_path, -1) as made:
        ck.save(tmp_path / "here", OLD)
    (data,) = (tmp_path / "here").glob("*.safetensors")
    assert [call for call in made.calls if call.startswith(("fsync", "os.rename"))] == [
        f"fsync {tmp_path.name}",
        f"fsync {data.name}",
        "fsync here",
        f"fsync .{INDEX}-{ck.inspect(tmp_path / 'here').save_id}.part",
        f"os.rename {INDEX}",
        "fsync here",
    ]


def test_a_reader_of_the_old_one_is_not_disturbed_by_the_new(tmp_path: Path):
    ck.save(tmp_path, OLD)
    with DataReader(tmp_path, ck.inspect(tmp_path)) as reader:
        reader.check_files()
        ck.save(tmp_path, NEW)
        found = torch.empty(1000)
        reader.read(reader.transfers_to({"w": found}))
        assert torch.equal(found, OLD["w"])
    assert_same_tree(ck.load(tmp_path, like=OLD), NEW)


@pytest.mark.skipif(os.name == "nt", reason="locks")
def test_a_save_waits_for_a_reader_that_has_not_opened_the_files_yet(tmp_path: Path):
    ck.save(tmp_path, OLD)
    with folder.inspect_and_keep(tmp_path) as index:
        saving = ck.save_async(tmp_path, NEW)
        while ck.inspect(tmp_path).save_id == index.save_id:
            time.sleep(0.001)
        with DataReader(tmp_path, index) as reader:
            assert reader.verify() is index
        assert not saving.done
    saving.wait()
    assert len(list(tmp_path.iterdir())) == 2
    assert_same_tree(ck.load(tmp_path, like=OLD), NEW)


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in ck.checkpoints(folder)]


def test_the_newest_are_kept(tmp_path: Path):
    for step in (1, 2, 30, 4_000_000_000, 12_000_000_000):
        ck.save(ck.step_path(tmp_path, step), OLD, step=step, keep=3)
    assert steps(tmp_path) == [30, 4_000_000_000, 12_000_000_000]
    assert ck.latest(tmp_path) == ck.step_path(tmp_path, 12_000_000_000)
    assert ck.prune(tmp_path, 5) == []
    assert ck.prune(tmp_path, 1) == [
        ck.step_path(tmp_path, 30),
        ck.step_path(tmp_path, 4_000_000_000),
    ]
    assert steps(tmp_path) == [12_000_000_000]
    for bad in (0, -1, True, "3"):
        with pytest.raises((ValueError, TypeError), match="keep must be"):
            ck.prune(tmp_path, bad)


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path):
    for step in range(1, 5):
        ck.save(ck.step_path(tmp_path, step), OLD, step=step)
    for step in (2, 4):
        next(ck.step_path(tmp_path, step).glob("*.safetensors")).unlink()
    assert ck.prune(tmp_path, 2) == []
    ck.save(ck.step_path(tmp_path, 5), OLD, step=5, keep=2)
    assert steps(tmp_path) == [3, 4, 5]


def leftovers(path: Path) -> list[Path]:
    """The files that a killed writer leaves."""
    path.mkdir(exist_ok=True)
    made = [
        path / f".{INDEX}-{'0' * 16}.part",
        path / f"data-{'0' * 16}-00000-of-00001.safetensors",
    ]
    for file in made:
        file.write_bytes(b"unfinished")
    return made


def test_a_save_removes_only_the_files_of_the_checkpoint_that_it_replaces(tmp_path: Path):
    """The others may belong to another writer; `clean` removes them, and no file with another name."""
    folders = [ck.step_path(tmp_path, step) for step in (1, 2, 3, 4)]
    for step in (2, 3):
        ck.save(folders[step - 1], OLD, step=step)
    left = [file for folder in folders for file in leftovers(folder)]
    others = [
        folders[1] / "notes.txt",
        folders[2] / "model.safetensors",
        tmp_path / "step-7.txt",
        tmp_path / "x.part",
    ]
    others += [
        folders[1] / "data-0123456789abcdef.part",
        folders[2] / ".save-0123456789abcdef.part",
    ]
    for file in others:
        file.write_text("mine")
    (tmp_path / "step-x").mkdir()
    with pytest.warns(UserWarning, match="the folder has later steps"):
        ck.save(folders[1], NEW, step=2)
    ck.save(ck.step_path(tmp_path, 5), OLD, step=5, keep=1)
    assert steps(tmp_path) == [5]
    assert all(file.exists() for file in left + others)
    assert sorted(ck.clean(tmp_path)) == sorted(left)
    assert all(file.exists() for file in others)
    kept = {"step-000000002", "step-000000003", "step-000000005", "step-7.txt", "step-x", "x.part"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert_same_tree(ck.load(ck.step_path(tmp_path, 5), like=OLD), OLD)


def test_clean_leaves_a_folder_whose_index_cannot_be_read(tmp_path: Path):
    path = ck.save(tmp_path / "here", OLD)
    leftovers(path)
    (path / INDEX).write_bytes((path / INDEX).read_bytes()[:-1])
    assert ck.clean(path) == []
    ck.save(path, OLD)
    assert len(list(path.iterdir())) == 5  # the files that the damaged index named are not known
    assert len(ck.clean(path)) == 3


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_run_that_goes_back_keeps_what_it_writes(tmp_path: Path, keep: int):
    for step in (80, 90, 100, 60, 70):
        told = pytest.warns(
            UserWarning, match=f"step-.*{step} was written, but the folder has later steps, up to"
        )
        with told if step < 80 and keep > 1 else nullcontext():
            path = ck.save(ck.step_path(tmp_path, step), {"w": torch.ones(1)}, step=step, keep=keep)
        assert ck.verify(path).step == step
        assert len(ck.checkpoints(tmp_path)) <= keep


def test_a_checkpoint_and_its_folder_may_be_links(tmp_path: Path):
    archive = ck.save(tmp_path / "archive", {"w": torch.ones(1)})
    (tmp_path / "step-000000002").symlink_to(archive)
    for step in (5, 10):
        ck.save(ck.step_path(tmp_path, step), {"w": torch.ones(2)}, step=step, keep=1)
    assert ck.verify(archive)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for number in (1, 2):
        ck.save(tmp_path / "link", {"w": torch.full((2,), float(number))}, step=number)
    assert ck.verify(tmp_path / "there").step == 2
    assert len(list((tmp_path / "there").iterdir())) == 2


def test_a_state_without_tensors_has_a_data_file_too(tmp_path: Path):
    """As in all checkpoints of one process so far."""
    ck.save(tmp_path, {}, extra={"epoch": 3})
    assert len(ck.verify(tmp_path).files) == 1
    assert ck.read(tmp_path) == {}


def test_each_leaf_begins_at_a_multiple_of_its_element_size(tmp_path: Path):
    """Whatever the order of the names, so that other programs can map the file into memory."""
    dtypes = {"a": torch.int8, "b": torch.float64, "c": torch.int16, "d": torch.float32}
    index = ck.inspect(
        ck.save(tmp_path, {name: torch.ones(3, dtype=dtype) for name, dtype in dtypes.items()})
    )
    for name, leaf in index.leaves.items():
        assert leaf.chunks[0].begin % dtypes[name].itemsize == 0, name


def test_a_folder_that_is_in_use_for_something_else_is_not_written_over(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    ck.save(tmp_path, {"w": torch.ones(1)})
    assert (tmp_path / "notes.txt").read_text() == "mine"
    other = tmp_path / "site"
    other.mkdir()
    (other / "index.json").write_text('{"mine": 1}')
    with pytest.raises(ck.WriteError, match=r"has an index.json that muonfx has not written"):
        ck.save(other, {"w": torch.ones(1)})
    assert [file.read_text() for file in other.iterdir()] == ['{"mine": 1}']
    # A damaged one of ours is written over.
    for damaged in (b"", bytes(1000), (tmp_path / "index.json").read_bytes()[:200]):
        (tmp_path / "index.json").write_bytes(damaged)
        ck.save(tmp_path, {"w": torch.ones(1)})
        ck.verify(tmp_path)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["refused", "^C"]
)
@pytest.mark.parametrize("readable", [True, False], ids=["", "unreadable"])
@pytest.mark.parametrize("done", [True, False], ids=["done all the same", "not done"])
def test_a_rename_that_may_have_been_done_takes_nothing_back(
    tmp_path: Path, monkeypatch, error: BaseException, done: bool, readable: bool
):
    """As network file systems report it, and an interrupt leaves it."""
    path = tmp_path / "one"
    ck.save(path, OLD, step=8)
    replace, read = os.replace, folder.read_index

    def refused(source: Path, target: Path) -> None:
        if done:
            replace(source, target)
        if not readable:
            monkeypatch.setattr(folder, "read_index", unreadable)
        raise error

    def unreadable(path: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises((WriteError, KeyboardInterrupt)) as caught:
        ck.save(path, NEW, step=9)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(folder, "read_index", read)
    assert ck.verify(path).step == (9 if done else 8)
    if isinstance(caught.value, WriteError):
        assert caught.value.written is (done and readable)
        assert ("may have been written or not" in str(caught.value)) is not readable
    ck.clean(path)
    assert len(list(path.iterdir())) == 2


BAD_PATHS = {
    "NUL": ("a\0b", ValueError, "path must name a folder"),
    "a surrogate": ("a\ud800b", ValueError, "path must name a folder"),
    "too long": ("x" * 300, CheckpointError, "name too long"),
    "below a file": ("file/x", CheckpointError, "Not a directory|no such folder"),
    "a file": ("file", CheckpointError, "a checkpoint is a folder"),
    "a link to nowhere": (
        "link",
        CheckpointError,
        "link is a symbolic link to nowhere|no such folder",
    ),
    "below a link to nowhere": (
        "link/x",
        CheckpointError,
        "link is a symbolic link to nowhere|no such folder",
    ),
    "no path": (None, TypeError, "path must be a str or a path, found None"),
    "bytes": (b"x", TypeError, "path must be a str or a path, found b'x'"),
}


def attempts(path: Any, group: Any) -> list[BaseException]:
    """The errors of a save, a save in the background, and a load."""
    found: list[BaseException] = []
    for attempt in (
        lambda: ck.save(path, OLD, group=group),
        lambda: ck.save_async(path, OLD, group=group).wait(),
        lambda: ck.load(path, like=OLD, group=group),
    ):
        with pytest.raises((CheckpointError, ValueError, TypeError)) as caught:
            attempt()
        found.append(caught.value)
    return found


@pytest.mark.parametrize("kind", BAD_PATHS)
def test_a_path_that_cannot_be_is_an_error_of_ours(tmp_path: Path, kind: str):
    name, error, message = BAD_PATHS[kind]
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    path = os.path.join(str(tmp_path), name) if isinstance(name, str) else name
    for found in attempts(path, None):
        assert isinstance(found, error), found
        assert re.search(message, str(found)), found
    for look in (ck.latest, ck.checkpoints, lambda path: ck.prune(path, 1)):
        if kind in ("below a file", "a file", "a link to nowhere", "below a link to nowhere"):
            assert not look(path)
        else:
            with pytest.raises(error, match="name too long" if kind == "too long" else message):
                look(path)


def bad_path_on_one_rank(here: Here, folder: Path, name: Any) -> list[tuple[str, str]]:
    path = os.path.join(str(folder), name) if isinstance(name, str) else name
    found = attempts(path if here.rank == 1 else folder / "good", here.background)
    return [(type(error).__name__, str(error)) for error in found]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["NUL", "below a file", "no path"])
def test_a_path_that_cannot_be_on_one_rank_is_an_error_on_all(
    world: World, tmp_path: Path, kind: str
):
    name, _, message = BAD_PATHS[kind]
    (tmp_path / "file").write_text("mine")
    ck.save(tmp_path / "good", OLD)
    before = copies(tmp_path / "good")
    one, other = world.check(2, bad_path_on_one_rank, folder=tmp_path, name=name)
    # A load or a save says what is wrong with the path, or that the ranks' paths differ.
    assert [kind for kind, _ in one] == [kind for kind, _ in other]
    for _, text in one + other:
        assert "rank 1: " in text
        assert re.search(f"{message}|with different path=", text), text
    assert copies(tmp_path / "good") == before


class Odd(Exception):
    """An object whose pickle cannot be loaded."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__("odd")


@on_ranks(2)
def test_an_error_that_cannot_be_sent_reaches_all_ranks_in_words(here: Here, tmp_path: Path):
    def write(*args: Any) -> Any:
        raise Odd(1, 2)

    half = ck.FlatShard.cut(OLD["w"], 500 * here.rank, 500 * (here.rank + 1))
    with (
        mock.patch.object(Draft, "write", write) if here.rank == 1 else nullcontext(),
        pytest.raises(CheckpointError, match=r"rank 1: .*Odd: odd"),
    ):
        ck.save(tmp_path / "one", {"w": half}, group=here.group)


def test_the_recorded_chain_has_the_numbers_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also if a tensor in the transform has changed in place since the last save."""
    # float32 products for float32, on every machine
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: False)
    rate = torch.tensor(0.5)
    tx = mfx.chain(mfx.momentum(), mfx.scale(rate))
    for number in (0.5, 0.25):
        rate.fill_(number)
        ck.save(tmp_path, tx.init(OLD), tx=tx)
        assert f"torch.tensor({number}" in str(ck.inspect(tmp_path).chain)
    tx = mfx.orthogonalize()
    for dtype, product in (
        (torch.float32, "float32"),
        (torch.float64, "float64"),
        (torch.float32, "float32"),
    ):
        params = {"w": torch.ones(2, 2, dtype=dtype)}
        index = ck.inspect(ck.save(tmp_path, tx.init(params), tx=tx, params=params))
        assert index.products == {"orthogonalize": product}
        assert index.chain == repr(tx)


def state_of(number: int, size: int = 500) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), float(number)) for name in "abcd"}


def assert_one_of(found: dict[str, torch.Tensor]) -> int:
    """That all leaves are of one save; its number."""
    numbers = {float(value) for leaf in found.values() for value in leaf.unique()}
    assert len(numbers) == 1, f"a mix of {numbers}"
    return int(numbers.pop())


def each_for_itself(here: Here, folder: Path, rounds: int) -> list[str]:
    """All ranks save to the same paths without a group; returns the messages of each."""
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


@on_ranks(4)
def test_groups_of_other_ranks_do_not_save_to_one_path(here: Here, tmp_path: Path):
    """Such as two stages of a pipeline: the first group saves, and the other raises an error on all of its ranks."""
    group = here.grid["inner"].get_group()
    ranks = dist.get_process_group_ranks(group)
    outcome = "saved"
    try:
        ck.save(tmp_path / "one", state_of(ranks[0]), group=group)
    except ck.CheckpointError as error:
        outcome = str(error)
    outcomes = [""] * 4
    dist.all_gather_object(outcomes, outcome, group=here.group)
    assert outcomes.count("saved") == 2, outcomes
    (message,) = set(outcomes) - {"saved"}
    first, second = (
        ("ranks 0, 1", "ranks 2, 3") if outcomes[0] == "saved" else ("ranks 2, 3", "ranks 0, 1")
    )
    assert f"was not written by {second}: {first} of this job save to it too" in message
    assert assert_one_of(ck.load(tmp_path / "one", like=state_of(0))) == int(first.split()[1][0])
    assert not list((tmp_path / "one").glob(".save*"))

    # The same group may replace its checkpoint, and other groups have other paths.
    for _ in range(2):
        ck.save(tmp_path / f"of {ranks[0]}", state_of(1), group=group)
    dist.barrier(here.group)
    # Of all ranks, which include those of before.
    ck.save(tmp_path / "one", state_of(5), group=here.group)


def test_the_later_of_two_saves_at_the_same_time_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
    return run_python("-c", f"import torch, muonfx as mfx; mfx.checkpoint.{call}").stderr


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
    with pytest.warns(
        UserWarning, match=r"file in the background failed, and wait\(\) was not called on it"
    ):
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
    assert (
        f"muonfx: the save to {tmp_path / 'file'} in the background failed, and wait() was not called"
        in said
    )
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


@on_ranks(3)
def test_many_saves_with_one_group_are_done_in_order(here: Here, tmp_path: Path):
    """Several on one group, and saves and loads in the foreground meanwhile, wait for nothing but each other."""
    state, group = {"w": torch.full((300_000,), 1.0)}, here.background
    savings = [ck.save_async(tmp_path / "one", state, step=step, group=group) for step in range(5)]
    savings.append(ck.save_async(tmp_path / "other", state, step=5, group=group))
    ck.save(tmp_path / "one", state, step=6, group=group)
    assert torch.equal(ck.load(tmp_path / "other", like=state, group=group)["w"], state["w"])
    for saving in savings:
        saving.wait()
    assert ck.verify(tmp_path / "one").step == 6
    dist.barrier(here.group)
    # Leaves that all ranks share are written once.
    assert len(list((tmp_path / "one").iterdir())) == 2


def with_a_destroyed_group(here: Here, path: Path, when: str) -> str:
    """Save with a group that is gone before the save begins, or in the midst of it."""
    group: Any = dist.new_group(list(range(4)), backend="gloo")
    gone, original, together = threading.Event(), Draft.write, writer.Together

    def write(draft: Draft, *args: Any) -> Any:
        written = original(draft, *args)
        assert gone.wait(60)
        return written

    def late(*args: Any) -> Any:
        assert gone.wait(60)
        return together(*args)

    if when == "before":
        writer.Together = late
    else:
        Draft.write = write
    state = {"w": FlatShard.cut(torch.ones(8), 2 * here.rank, 2 * here.rank + 2)}
    saving = ck.save_async(path / "one", state, group=group)
    while when == "in the midst" and not list(path.glob("one/data-*")):
        time.sleep(0.01)
    dist.barrier(here.group)
    dist.destroy_process_group(group)
    gone.set()
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


@pytest.mark.parametrize("times", [20, pytest.param(500, marks=pytest.mark.deep)])
@on_ranks(4)
def test_ranks_load_one_checkpoint_while_it_is_replaced(here: Here, tmp_path: Path, times: int):
    """Rank 3 replaces the checkpoint until the others have loaded it several times: together, in parts, and whole."""
    readers, path = dist.new_group([0, 1, 2]), tmp_path / "one"
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
                "b": FlatShard.cut(whole["b"], *((0, 100), (100, 300), (300, 500))[here.rank]),
                "c": FlatShard.cut(whole["c"], *((0, 0), (0, 499), (499, 500))[here.rank]),
            }
            found = ck.load(path, like=like, group=readers)
            plain = {
                name: leaf.data if isinstance(leaf, FlatShard) else leaf
                for name, leaf in found.items()
            }
            seen: list[int] = [0, 0, 0]
            dist.all_gather_object(seen, assert_one_of(plain), group=readers)
            assert len(set(seen)) == 1, f"ranks have loaded {seen}"
        done.touch()
    dist.barrier(here.group)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_said_to_be_gone(
    tmp_path: Path, monkeypatch
):
    from muonfx.checkpoint.reader import DataReader

    path = ck.save(ck.step_path(tmp_path, 1), state_of(1))
    check = DataReader.check_files

    def late(self: DataReader, *arguments: Any) -> DataReader:
        monkeypatch.setattr(DataReader, "check_files", check)
        if path.exists():
            ck.save(ck.step_path(tmp_path, 2), state_of(2), keep=1)
        return check(self, *arguments)

    monkeypatch.setattr(DataReader, "check_files", late)
    with pytest.raises(ck.NotFoundError, match="no such folder"):
        ck.load(path, like=state_of(0))
    assert_same_tree(ck.load(ck.step_path(tmp_path, 2), like=state_of(0)), state_of(2))
