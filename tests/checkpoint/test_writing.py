"""Saves: never lose the last good checkpoint, and no other file; paths that cannot be, and errors that cannot be sent.

`test_faults` fails the system calls.
"""

import errno
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint import CheckpointError, WriteError, catalog
from muonfx.checkpoint.data import Reader
from muonfx.checkpoint.index import INDEX
from muonfx.checkpoint.writing import Draft
from muonfx.polar import policy
from tests.checkpoint.common import assert_same_tree, copies
from tests.checkpoint.faults import faults
from tests.processes import Failed, Here, World

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
    with Reader(tmp_path, ck.inspect(tmp_path)) as reader:
        reader.check_files()
        ck.save(tmp_path, NEW)
        found = torch.empty(1000)
        reader.read_into({"w": found})
        assert torch.equal(found, OLD["w"])
    assert_same_tree(ck.load(tmp_path, like=OLD), NEW)


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in ck.checkpoints(folder)]


def test_the_newest_are_kept(tmp_path: Path):
    for step in (1, 2, 30, 4_000_000_000, 12_000_000_000):
        ck.save(ck.step_path(tmp_path, step), OLD, step=step, keep=3)
    assert steps(tmp_path) == [30, 4_000_000_000, 12_000_000_000]
    assert ck.latest(tmp_path) == ck.step_path(tmp_path, 12_000_000_000)
    assert ck.prune(tmp_path, 5) == []
    assert ck.prune(tmp_path, 1) == [ck.step_path(tmp_path, 30), ck.step_path(tmp_path, 4_000_000_000)]
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
    made = [path / f".{INDEX}-{'0' * 16}.part", path / f"data-{'0' * 16}-00000-of-00001.safetensors"]
    for file in made:
        file.write_bytes(b"unfinished")
    return made


def test_a_save_removes_only_the_files_of_the_checkpoint_that_it_replaces(tmp_path: Path):
    """The others may belong to another writer; `clean` removes them, and no file with another name."""
    folders = [ck.step_path(tmp_path, step) for step in (1, 2, 3, 4)]
    for step in (2, 3):
        ck.save(folders[step - 1], OLD, step=step)
    left = [file for folder in folders for file in leftovers(folder)]
    others = [folders[1] / "notes.txt", folders[2] / "model.safetensors", tmp_path / "step-7.txt", tmp_path / "x.part"]
    for file in others:
        file.write_text("mine")
    (tmp_path / "step-x").mkdir()
    with pytest.warns(UserWarning, match="checkpoints of later steps"):
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
            UserWarning, match=f"step-.*{step} was written, but the folder has checkpoints of later steps, up to"
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
    replace, read = os.replace, catalog.read_index

    def refused(source: Path, target: Path) -> None:
        if done:
            replace(source, target)
        if not readable:
            monkeypatch.setattr(catalog, "read_index", unreadable)
        raise error

    def unreadable(path: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises((WriteError, KeyboardInterrupt)) as caught:
        ck.save(path, NEW, step=9)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(catalog, "read_index", read)
    assert ck.verify(path).step == (9 if done else 8)
    if isinstance(caught.value, WriteError):
        assert caught.value.written is (done if readable else None)
    ck.clean(path)
    assert len(list(path.iterdir())) == 2


BAD_PATHS = {
    "NUL": ("a\0b", ValueError, "path must name a folder"),
    "too long": ("x" * 300, CheckpointError, "name too long"),
    "below a file": ("file/x", CheckpointError, "Not a directory|no such folder"),
    "a file": ("file", CheckpointError, "a checkpoint is a folder"),
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
    path = os.path.join(str(tmp_path), name) if isinstance(name, str) else name
    for found in attempts(path, None):
        assert isinstance(found, error), found
        assert re.search(message, str(found)), found
    for look in (ck.latest, ck.checkpoints, lambda path: ck.prune(path, 1)):
        if kind in ("below a file", "a file"):
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
def test_a_path_that_cannot_be_on_one_rank_is_an_error_on_all(world: World, tmp_path: Path, kind: str):
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
    """Cannot be made again from what it was pickled as."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__("odd")


def odd_error(here: Here, path: Path) -> None:
    def write(*args: Any) -> Any:
        raise Odd(1, 2)

    half = ck.FlatPiece.cut(OLD["w"], 500 * here.rank, 500 * (here.rank + 1))
    with mock.patch.object(Draft, "write", write) if here.rank == 1 else nullcontext():
        ck.save(path, {"w": half}, group=here.group)


@pytest.mark.dist
def test_an_error_that_cannot_be_sent_reaches_all_ranks_in_words(world: World, tmp_path: Path):
    for result in world.run(2, odd_error, path=tmp_path / "one"):
        assert isinstance(result, Failed)
        assert isinstance(result.error, CheckpointError), result.trace
        assert "rank 1: " in str(result.error)
        assert "Odd: odd" in str(result.error)


def test_the_recorded_chain_has_the_numbers_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The record of a transform is kept for the next save, but not if a tensor in it may change in place."""
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: False)  # float32 products for float32, on every machine
    rate = torch.tensor(0.5)
    tx = mfx.chain(mfx.momentum(), mfx.scale(rate))
    for number in (0.5, 0.25):
        rate.fill_(number)
        ck.save(tmp_path, tx.init(OLD), tx=tx)
        assert f"torch.tensor({number}" in str(ck.inspect(tmp_path).chain)
    tx = mfx.orthogonalize()
    for dtype, product in ((torch.float32, "float32"), (torch.float64, "float64"), (torch.float32, "float32")):
        params = {"w": torch.ones(2, 2, dtype=dtype)}
        index = ck.inspect(ck.save(tmp_path, tx.init(params), tx=tx, params=params))
        assert index.products == {"orthogonalize": product}
        assert index.chain == repr(tx)
