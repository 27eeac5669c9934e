"""Files of killed saves do not accumulate, and the files of a running save are never removed."""

import errno
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint import files, folder, index
from muonfx.checkpoint.__main__ import main
from muonfx.checkpoint.index import INDEX
from tests.checkpoint.common import assert_same_tree
from tests.checkpoint.faults import faults
from tests.processes import ROOT

ck = mfx.checkpoint
STATE = {"w": torch.arange(1000.0)}
pytestmark = pytest.mark.skipif(os.name == "nt", reason="locks")

WRITER = """
import sys
import warnings
import torch
import muonfx as mfx
from muonfx.checkpoint.writer import Draft

commit = Draft.commit

def commit_later(draft, index):
    print("written", flush=True)
    assert sys.stdin.readline()
    commit(draft, index)

Draft.commit = commit_later
for path in sys.argv[1:]:
    mfx.checkpoint.save(path, {"w": torch.arange(1000.0)})
    print("saved", flush=True)
"""


@contextmanager
def writer(*paths: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that saves to each path in turn, and waits for a line before it writes each index."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITER, *map(str, paths)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def require_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == text


def data_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def test_saves_leave_the_files_of_a_running_save_and_remove_those_of_a_killed_one(tmp_path: Path):
    early, late = ck.step_path(tmp_path, 1), ck.step_path(tmp_path, 2)
    with writer(early, late) as process:
        for path, later_steps in ((early, (3, 4, 5)), (late, (6, 7, 8))):
            require_line(process, "written")
            before = set(path.iterdir())
            assert len(before) == 2  # the data, and the lock
            for step in later_steps:
                ck.save(ck.step_path(tmp_path, step), STATE, step=step, keep=2)
            assert not set(before) & set(ck.clean(tmp_path))
            assert set(path.iterdir()) == before
            if path == early:
                assert process.stdin is not None
                print("go on", file=process.stdin, flush=True)
                require_line(process, "saved")
                assert_same_tree(ck.load(path, like=STATE), STATE)
    assert late.exists()  # its writer was killed
    ck.save(ck.step_path(tmp_path, 9), STATE, step=9, keep=2)
    assert not late.exists()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-000000008",
        "step-000000009",
    ]
    assert data_bytes(tmp_path) < 2.1 * 4000 + 1000


def test_a_save_in_place_removes_the_files_of_a_killed_one(tmp_path: Path):
    path = ck.save(tmp_path / "here", STATE)
    with writer(path) as process:
        require_line(process, "written")
        ck.save(path, STATE)
        assert len(list(path.iterdir())) == 4
    ck.save(path, STATE)
    assert len(list(path.iterdir())) == 2


def test_files_of_another_machine_stay_and_latest_warns_with_path_and_bytes(
    tmp_path: Path, monkeypatch
):
    ck.save(ck.step_path(tmp_path, 1), STATE, step=1)
    other = ck.step_path(tmp_path, 2)
    with writer(other) as process:
        require_line(process, "written")
    with monkeypatch.context() as patched:
        patched.setattr(folder, "this_boot", lambda: b"another machine")
        path = ck.save(ck.step_path(tmp_path, 3), STATE, step=3, keep=1)
        assert len(list(other.iterdir())) == 2
        with pytest.warns(UserWarning, match=r"step-000000002.*clean") as told:
            assert ck.latest(tmp_path) == path
        assert " in 2 files " in str(told[0].message)
        assert len(ck.clean(tmp_path)) == 2
    assert ck.latest(tmp_path) == path


def test_latest_does_not_warn_of_a_save_that_ends_after_the_folder_was_listed(
    tmp_path: Path, monkeypatch
):
    """Its unfinished index was listed, and is a complete index when the save is examined."""
    path = ck.step_path(tmp_path, 1)
    with writer(path) as process:
        require_line(process, "written")
        unfinished = index.unfinished_index_name(
            index.save_id_of(next(path.glob("*.safetensors")).name)
        )
        listed = [*os.listdir(path), unfinished]
        assert process.stdin is not None
        print("go on", file=process.stdin, flush=True)
        require_line(process, "saved")
    listdir = os.listdir
    monkeypatch.setattr(
        os, "listdir", lambda folder: listed if Path(folder) == path else listdir(folder)
    )
    # A third save has replaced the index.
    monkeypatch.setattr(folder, "_names_in_index", lambda folder: set())
    assert ck.latest(tmp_path) == path


def test_latest_does_not_warn_of_a_save_that_has_just_begun(tmp_path: Path):
    """It has created its lock file, and not yet locked it and written the boot id."""
    path = ck.save(ck.step_path(tmp_path, 1), STATE, step=1)
    lock = path / index.lock_name("0123456789abcdef")
    lock.touch()
    assert folder._leftover_files(path, ("unknown",)) == [lock]
    lock.write_bytes(b"x" * 36)  # it may be written between the search and the sum of the sizes
    assert ck.latest(tmp_path) == path


def test_a_checkpoint_that_was_removed_by_half_is_removed_by_the_next_save(tmp_path: Path):
    """A process was killed after it had removed the index."""
    old = ck.save(ck.step_path(tmp_path, 1), STATE, step=1)
    (old / INDEX).unlink()
    (old / "notes.txt").write_text("mine")
    ck.save(ck.step_path(tmp_path, 2), STATE, step=2)
    assert [file.name for file in old.iterdir()] == ["notes.txt"]


def test_links_to_checkpoints_are_followed_and_removed_as_links(tmp_path: Path, capsys):
    archive = ck.save(tmp_path / "archive" / "first", STATE, step=7)
    folder = tmp_path / "run"
    folder.mkdir()
    link = ck.step_path(folder, 7)
    link.symlink_to(archive)
    assert ck.checkpoints(folder) == [link]
    assert ck.latest(folder, verify=True) == link
    assert ck.inspect(link).step == 7
    assert main(["inspect", str(folder)]) == 0
    assert "step-000000007" in capsys.readouterr().out
    for step in (8, 9):
        ck.save(ck.step_path(folder, step), STATE, step=step, keep=2)
    assert [path.name for path in ck.checkpoints(folder)] == ["step-000000008", "step-000000009"]
    assert not link.is_symlink()
    assert ck.verify(archive).step == 7  # never the target


def test_a_link_to_nowhere_is_named(tmp_path: Path, capsys):
    path = ck.save(ck.step_path(tmp_path, 1), STATE, step=1)
    ck.step_path(tmp_path, 2).symlink_to(tmp_path / "nowhere")
    with pytest.warns(UserWarning, match=r"step-000000002 is not used.*no such folder"):
        assert ck.latest(tmp_path) == path
    assert main(["inspect", str(tmp_path)]) == 0
    assert "step-000000002" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="a system without unnamed files")
def test_a_save_that_ends_while_it_makes_its_lock_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def is_killed() -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "this_boot", is_killed)
    with pytest.raises(KeyboardInterrupt):
        files.SaveLock(tmp_path / "lock").acquire()
    assert not list(tmp_path.iterdir())


QUERIES: dict[str, Callable[[Path], object]] = {
    "latest": ck.latest,
    "checkpoints": ck.checkpoints,
    "clean": ck.clean,
    "prune": lambda folder: ck.prune(folder, keep=1),
    "save": lambda folder: ck.save(ck.step_path(folder, 3), STATE, keep=2),
}


class FailingStat:
    """Replaces `os.stat`: fails for a folder and the files in it, from the call numbered ``first_failure`` on."""

    def __init__(self, folder: Path, first_failure: int) -> None:
        self.folder, self.first_failure = folder, first_failure
        self.stat, self.calls = os.stat, 0

    def __call__(self, path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(self.folder)):
            self.calls += 1
            if self.calls > self.first_failure:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return self.stat(path, *args, **options)


@pytest.mark.parametrize("query", QUERIES)
def test_a_file_whose_status_cannot_be_read_is_an_error_of_ours_and_stays(
    tmp_path: Path, monkeypatch, query: str
):
    for first_failure in itertools.count():
        folder = tmp_path / str(first_failure)
        for step in (1, 2):
            ck.save(ck.step_path(folder, step), STATE, step=step)
        # Of a save that ended.
        (ck.step_path(folder, 1) / "data-0123456789abcdef-00000-of-00001.safetensors").touch()
        failing_stat = FailingStat(folder, first_failure)
        with (
            monkeypatch.context() as patched,
            warnings.catch_warnings(),
            suppress(ck.CheckpointError),
        ):
            patched.setattr(os, "stat", failing_stat)
            warnings.simplefilter("ignore")
            QUERIES[query](folder)
        newest = ck.latest(folder)
        assert newest is not None
        assert_same_tree(ck.load(newest, like=STATE), STATE)
        if failing_stat.calls <= first_failure:  # it made no further call
            break
    assert first_failure > 1


def test_latest_raises_its_own_error_whichever_call_to_the_system_fails(tmp_path: Path):
    """A disk error in any call is a `CheckpointError`, or a warning and an older checkpoint."""
    path = ck.save(ck.step_path(tmp_path, 1), STATE, step=1)
    newer = ck.save(ck.step_path(tmp_path, 2), STATE, step=2)
    (newer / "data-0123456789abcdef-00000-of-00001.safetensors").touch()
    (newer / index.lock_name("fedcba9876543210")).touch()
    for number in itertools.count():
        newest, error_text = None, ""
        with faults(tmp_path, number, reads=True) as fault, warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                newest = ck.latest(tmp_path)
            except ck.CheckpointError as error:
                error_text = str(error)
        assert newest in (newer, path, None)
        assert not error_text or str(tmp_path) in error_text
        if not fault.failed:
            break
    assert number > 20
