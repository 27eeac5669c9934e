"""Never lose the last good one: killed writers, full disks, and folders of checkpoints."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint import WriteError
from muonfx.checkpoint.index import INDEX
from tests.checkpoint.common import assert_same_tree, copies
from tests.checkpoint.faults import faults

ck = mfx.checkpoint
STATE = {"trace": {"w": torch.arange(1000.0), "b": torch.zeros(3)}}
LATER = mfx.tree.map(lambda leaf: leaf + 1, STATE)

# Forks writers and kills them at random times; every time the newest checkpoint must be there, whole, and no older than
# what was seen before. Without torch's threads, so that forking is safe.
KILLER = """
import os, random, signal, sys, time
import torch
sys.path.insert(0, sys.argv[3])
torch.set_num_threads(1)
import muonfx as mfx
ck = mfx.checkpoint
folder, tries = sys.argv[1], int(sys.argv[2])
draw = random.Random(int(sys.argv[4]))

def state(step):
    return {"trace": {"w": torch.full((100_000,), float(step)), "b": torch.full((3,), step, dtype=torch.int8)}}

def steps(step):
    ck.save(ck.step_path(folder + "/steps", step), state(step % 100), step=step, keep=2)

def one(step):
    ck.save(folder + "/one", state(step % 100), step=step)

def writer(step, first, second):
    while True:
        first(step), second(step)
        step += 1

started = time.perf_counter()
steps(0), one(0)
took = time.perf_counter() - started  # a disk may be slow today
seen = {"steps": 0, "one": 0}
unfinished = kills = 0
# Longer than that if the machine is so busy that few writers finished, or so idle that few were caught.
while kills < tries or min(*seen.values(), unfinished) <= tries // 50:
    kills += 1
    before = sum(seen.values())
    order = draw.sample([steps, one], 2)
    pid = os.fork()
    if pid == 0:
        writer(max(seen.values()) + 1, *order)
    time.sleep(draw.uniform(0.0, 1.5 * took))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    newest = {"steps": ck.latest(folder + "/steps", verify=True), "one": folder + "/one"}
    for which, path in newest.items():
        assert path is not None, f"{which}: nothing is left"
        step = ck.verify(path).step
        assert step >= seen[which], f"{which}: back from {seen[which]} to {step}"
        seen[which] = step
        for name, leaf in ck.load(path, like=state(0))["trace"].items():
            assert (leaf == step % 100).all(), name
    unfinished += bool(ck.clean(folder + "/one"))
    took *= 1.1 if sum(seen.values()) == before else 0.95
ck.save(ck.step_path(folder + "/steps", max(seen.values()) + 1), state(0), keep=2)
assert ck.clean(folder + "/steps") and len(os.listdir(folder + "/steps")) == 2
assert len(os.listdir(folder + "/one")) == 2
"""


@pytest.mark.skipif(os.name == "nt", reason="forks")
@pytest.mark.parametrize(
    ("seed", "tries"), [(0, 120), *(pytest.param(seed, 2000, marks=pytest.mark.deep) for seed in range(1, 5))]
)
def test_a_writer_killed_at_any_time_leaves_the_previous_one(tmp_path: Path, seed: int, tries: int):
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-W", "error", "-c", KILLER, str(tmp_path), str(tries), str(root), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------------- the system says no


def test_a_new_checkpoint_that_does_not_fit_leaves_no_trace(tmp_path: Path):
    ck.save(ck.step_path(tmp_path, 1), STATE, step=1)
    for at in range(6):
        with (
            faults(tmp_path / "step-000000002", at, code=errno.ENOSPC),
            pytest.raises(WriteError, match="step-000000002 was not written: No space left"),
        ):
            ck.save(ck.step_path(tmp_path, 2), STATE, step=2)
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_a_real_limit_of_the_system_is_a_write_error(tmp_path: Path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limit[1]))
    try:
        with pytest.raises(WriteError, match="File too large"):
            ck.save(tmp_path / "new", STATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_ours_is_a_write_error(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(WriteError, match="Permission denied"):
        ck.save(tmp_path / "new", STATE)


def test_data_are_on_the_disk_before_the_index_gets_its_name(tmp_path: Path, monkeypatch):
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def named(handle: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{handle}")).name

    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(f"flush {named(handle)}"), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(f"rename to {Path(b).name}"), replace(a, b))[1])
    ck.save(tmp_path / "here", STATE)
    (data,) = (tmp_path / "here").glob("*.safetensors")
    assert calls == [
        f"flush {tmp_path.name}",
        f"flush {data.name}",
        "flush here",
        f"flush .{INDEX}-{ck.inspect(tmp_path / 'here').save_id}.part",
        f"rename to {INDEX}",
        "flush here",
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


def test_an_interrupt_while_writing_leaves_what_was_there(tmp_path: Path):
    ck.save(tmp_path, STATE)
    before = copies(tmp_path)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ck.save(tmp_path, LATER, progress=interrupt)
    assert copies(tmp_path) == before


# ---------------------------------------------------------------------------------------------- a folder of checkpoints


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
    left = leftovers(path)
    whole = (path / INDEX).read_bytes()
    (path / INDEX).write_bytes(whole[:-1])
    assert ck.clean(path) == []
    ck.save(path, STATE)
    assert len(list(path.iterdir())) == 5  # the files that the damaged index named are not known
    assert len(ck.clean(path)) == 3
    assert not any(file.exists() for file in left)


def test_bad_steps_are_refused():
    for bad in (-1, 1.0, True, "1"):
        with pytest.raises(ValueError, match="step must be"):
            ck.step_path("folder", bad)
