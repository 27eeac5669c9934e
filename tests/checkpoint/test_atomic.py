"""Never lose the last good one: killed writers, full disks, and folders of checkpoints."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint.index import INDEX
from tests.checkpoint.common import assert_same_tree
from tests.checkpoint.faults import faults

ck = mfx.checkpoint
STATE = {"trace": {"w": torch.arange(1000.0), "b": torch.zeros(3)}}
LATER = mfx.tree.map(lambda leaf: leaf + 1, STATE)


def test_data_are_on_the_disk_before_the_index_gets_its_name(tmp_path: Path):
    with faults(tmp_path, -1) as made:
        ck.save(tmp_path / "here", STATE)
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
    from muonfx.checkpoint.data import Reader

    ck.save(tmp_path, STATE)
    with Reader(tmp_path, ck.inspect(tmp_path)) as reader:
        reader.check_files()
        ck.save(tmp_path, LATER)
        found = torch.empty(1000)
        reader.read_into({"trace/w": found})
        assert torch.equal(found, STATE["trace"]["w"])
    assert_same_tree(ck.load(tmp_path, like=STATE), LATER)


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in ck.checkpoints(folder)]


def test_the_newest_are_kept(tmp_path: Path):
    for step in (1, 2, 30, 4_000_000_000, 12_000_000_000):
        ck.save(ck.step_path(tmp_path, step), STATE, step=step, keep=3)
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
        ck.save(ck.step_path(tmp_path, step), STATE, step=step)
    for step in (2, 4):
        next(ck.step_path(tmp_path, step).glob("*.safetensors")).unlink()
    assert ck.prune(tmp_path, 2) == []
    ck.save(ck.step_path(tmp_path, 5), STATE, step=5, keep=2)
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
        ck.save(folders[step - 1], STATE, step=step)
    left = [file for folder in folders for file in leftovers(folder)]
    others = [folders[1] / "notes.txt", folders[2] / "model.safetensors", tmp_path / "step-7.txt", tmp_path / "x.part"]
    for file in others:
        file.write_text("mine")
    (tmp_path / "step-x").mkdir()
    with pytest.warns(UserWarning, match="checkpoints of later steps"):
        ck.save(folders[1], LATER, step=2)
    ck.save(ck.step_path(tmp_path, 5), STATE, step=5, keep=1)
    assert steps(tmp_path) == [5]
    assert all(file.exists() for file in left + others)
    assert sorted(ck.clean(tmp_path)) == sorted(left)
    assert all(file.exists() for file in others)
    kept = {"step-000000002", "step-000000003", "step-000000005", "step-7.txt", "step-x", "x.part"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert_same_tree(ck.load(ck.step_path(tmp_path, 5), like=STATE), STATE)


def test_clean_leaves_a_folder_whose_index_cannot_be_read(tmp_path: Path):
    path = ck.save(tmp_path / "here", STATE)
    leftovers(path)
    (path / INDEX).write_bytes((path / INDEX).read_bytes()[:-1])
    assert ck.clean(path) == []
    ck.save(path, STATE)
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


def test_links_stay(tmp_path: Path):
    archive = ck.save(tmp_path / "archive", {"w": torch.ones(1)})
    (tmp_path / "step-000000002").symlink_to(archive)
    for step in (5, 10):
        ck.save(ck.step_path(tmp_path, step), {"w": torch.ones(2)}, step=step, keep=1)
    assert ck.verify(archive)


def test_a_checkpoint_may_be_a_link_to_a_folder(tmp_path: Path):
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
