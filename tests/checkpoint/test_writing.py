"""Whatever fails while a checkpoint is written: the previous or the new one stands, whole, and the error says which."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import muonfx as mfx
from muonfx.checkpoint import CheckpointError, WriteError, catalog
from tests.checkpoint.common import assert_same_tree, copies
from tests.checkpoint.faults import Faults, faults
from tests.processes import Failed, Here, ProcessEnded, World

ck = mfx.checkpoint
ROOT = Path(__file__).resolve().parents[2]
OLD = {"w": torch.arange(1000.0), "b": torch.zeros(3)}
NEW = {"w": torch.arange(1000.0) + 1, "b": torch.ones(3)}

CASES = {
    "the first at a path": {},
    "in place of another": {"replaces": True},
    "of a series": {"earlier": (1,)},
    "with keep": {"earlier": (1, 2, 3), "keep": 2},
    "with keep, in place of another": {"earlier": (1, 2, 3), "replaces": True, "keep": 1},
}


def prepare(folder: Path, *, earlier: tuple[int, ...] = (), replaces: bool = False, keep: int | None = None) -> Path:
    """An empty folder, in which steps were saved; the path of the next."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = ck.step_path(folder, 9)
    for step in earlier:
        ck.save(ck.step_path(folder, step), OLD, step=step)
    if replaces:
        ck.save(path, OLD, step=8)
    return path


def assert_previous_or_new(path: Path, fault: Faults, error: Exception | None, case: dict[str, Any]) -> bool:
    """That one of the two stands, and the error says which; whether it is the new one."""
    try:
        index = ck.verify(path)
    except ck.NotFoundError:
        assert not case.get("replaces"), f"{fault.failed}: lost what was there"
        new = False
    else:
        new = index.step == 9
        assert new or case.get("replaces"), fault.failed
        assert_same_tree(ck.load(path, like=OLD), NEW if new else OLD)
    if not new and case.get("earlier"):
        newest = ck.latest(path.parent, verify=True)
        assert newest is not None, f"{fault.failed}: lost the whole series"
        assert newest == (path if case.get("replaces") else ck.step_path(path.parent, max(case["earlier"])))
    if error is None:
        assert new, f"{fault.failed}: nothing was written, and nothing said"
    else:
        assert isinstance(error, WriteError), f"{fault.failed}: {error!r}"
        assert str(path) in str(error)
        assert error.written in (new, None), f"{fault.failed}: {error}"
        said = {True: "was written, but", False: "was not written", None: "not known whether"}[error.written]
        assert said in str(error), f"{fault.failed}: {error}"
    return new


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory where the system has such: hundreds of saves, and a disk may be busy."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as made:
        yield Path(made).resolve()


@pytest.mark.parametrize("always", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_save_that_fails_at_any_call_leaves_the_previous_or_the_new_one(in_memory: Path, case: Any, always: bool):
    at, outcomes = 0, []
    while True:
        path = prepare(in_memory / "runs", **case)
        error = None
        with faults(in_memory / "runs", at, always=always) as fault, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                ck.save(path, NEW, step=9, keep=case.get("keep"))
            except CheckpointError as caught:
                error = caught
        outcomes.append(assert_previous_or_new(path, fault, error, case))
        if not fault.failed:
            break
        # The next save is as good as any, and leaves nothing of the one that failed.
        ck.save(path, NEW, step=9, keep=case.get("keep"))
        assert len(list(path.iterdir())) == 2, (fault.failed, told)
        at += 1
    assert at > 20
    assert {True, False} == set(outcomes)


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
import os, torch
from pathlib import Path
torch.set_num_threads(1)
from tests.checkpoint.test_writing import CASES, NEW, assert_previous_or_new, ck, prepare
from tests.checkpoint.faults import Faults, faults

folder = Path(sys.argv[2]) / "runs"
for name, case in CASES.items():
    at = 0
    while True:
        path = prepare(folder, **case)
        child = os.fork()
        if child == 0:
            with faults(folder, at, kill=True):
                ck.save(path, NEW, step=9, keep=case.get("keep"))
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        new = ck.checkpoints(folder)[-1:] == [path] and ck.verify(path).step == 9
        error = None if new else ck.WriteError(f"{path} was not written")
        assert_previous_or_new(path, Faults(folder, at), error, case)
        ck.save(path, NEW, step=9, keep=case.get("keep"))
        assert len(list(path.iterdir())) == 2, (name, at, list(path.iterdir()))
        if survived:
            break
        at += 1
    assert at > 20
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="forks")
def test_a_writer_killed_at_any_call_leaves_the_previous_or_the_new_one(in_memory: Path):
    command = [sys.executable, "-W", "error", "-c", KILLED, str(ROOT), str(in_memory)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["refused", "^C"]
)
@pytest.mark.parametrize("readable", [True, False], ids=["", "unreadable"])
@pytest.mark.parametrize("done", [True, False], ids=["done all the same", "not done"])
def test_a_rename_that_may_have_been_done_takes_nothing_back(
    in_memory: Path, monkeypatch, error: BaseException, done: bool, readable: bool
):
    """As network file systems report it, and an interrupt leaves it."""
    path = in_memory / "one"
    ck.save(path, OLD, step=8)
    replace, read = os.replace, catalog.read_parsed

    def refused(source: Path, target: Path) -> None:
        if done:
            replace(source, target)
        if not readable:
            monkeypatch.setattr(catalog, "read_parsed", unreadable)
        raise error

    def unreadable(path: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises((WriteError, KeyboardInterrupt)) as caught:
        ck.save(path, NEW, step=9)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(catalog, "read_parsed", read)
    assert ck.verify(path).step == (9 if done else 8)
    if isinstance(caught.value, WriteError):
        assert caught.value.written is (done if readable else None)
    ck.save(path, OLD)
    assert len(list(path.iterdir())) == 2


# ---------------------------------------------------------------------------------------------------- ranks of a group


def halves(here: Here, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Each rank has a part of each leaf."""
    numels = {name: leaf.numel() // 2 for name, leaf in whole.items()}
    return {
        name: ck.FlatPiece.cut(leaf, 0, numels[name]) if here.rank == 0 else ck.FlatPiece.cut(leaf, numels[name], 9999)
        for name, leaf in whole.items()
    }


def failing_on_one_rank(here: Here, folder: Path, on: int, case: dict[str, Any], always: bool) -> int:
    """Save again and again, a later call failing on one rank each time, and look at what stands."""
    at, outcomes = 0, []
    while True:
        path = ck.step_path(folder, 9)
        if here.rank == 0:
            prepare(folder, **case)
        dist.barrier(here.group)
        error = None
        where = folder if here.rank == on else folder / "nothing"
        with faults(where, at, always=always) as fault, warnings.catch_warnings(record=True):
            try:
                ck.save(path, halves(here, NEW), step=9, keep=case.get("keep"), group=here.group)
            except CheckpointError as caught:
                error = caught
        said: list[Any] = [None, None]
        dist.all_gather_object(said, (fault.failed, str(error or "")), group=here.group)
        assert said[0][1] == said[1][1]  # on all ranks alike
        fault.failed = said[on][0]
        outcomes.append(assert_previous_or_new(path, fault, error, case))
        dist.barrier(here.group)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ck.save(path, halves(here, NEW), step=9, keep=case.get("keep"), group=here.group)
        assert_same_tree(ck.load(path, like=OLD), NEW)
        assert len(list(path.iterdir())) == 3, (fault.failed, list(path.iterdir()))
        dist.barrier(here.group)
        if not fault.failed:
            break
        at += 1
    assert True in outcomes
    assert False in outcomes
    return at


@pytest.mark.dist
@pytest.mark.parametrize("always", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("case", ["the first at a path", "with keep, in place of another"])
def test_a_group_save_that_fails_at_any_call_of_any_rank_leaves_the_previous_or_the_new_one(
    world: World, in_memory: Path, case: str, on: int, always: bool
):
    (at, _) = world.check(2, failing_on_one_rank, folder=in_memory / "runs", on=on, case=CASES[case], always=always)
    assert at > 4


# -------------------------------------------------------------------------------------- ranks that end, and bad paths


def killed(here: Here, path: Path, on: int, at: str) -> None:
    """Save or load, one rank being killed at some point of it."""
    from muonfx.checkpoint import distributed

    if at == "the load":
        ck.save(path, halves(here, OLD), group=here.group)
        dist.barrier(here.group)
    if here.rank == on:

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        owner, name = {
            "the plan": (distributed._SavePlanner, "set_up_planner"),
            "the writing": (distributed, "write_data"),
            "the commit": (distributed.Draft, "commit"),
            "after the commit": (distributed.Draft, "tidy"),
            "the load": (distributed._Reader, "read_data"),
        }[at]
        setattr(owner, name, die)
    whole = halves(here, NEW)
    if at == "the load":
        ck.load(path, like=whole, group=here.group)
    else:
        ck.save(path, whole, step=9, group=here.group)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("at", "on"),
    [
        ("the plan", 1),
        ("the writing", 0),
        ("the writing", 1),
        ("the commit", 0),
        ("after the commit", 0),
        ("the load", 1),
    ],
)
def test_a_rank_that_is_killed_makes_the_others_fail_in_time_and_truly(tmp_path: Path, at: str, on: int):
    path = tmp_path / "one"
    if at != "the load":
        ck.save(path, OLD, step=8)
    own = World(2)
    try:
        found = own.run(2, killed, path=path, on=on, at=at)
    finally:
        own.close()
    assert all(isinstance(result, Failed) for result in found), found
    assert isinstance(found[on].error, ProcessEnded)
    error = found[1 - on].error
    assert isinstance(error, CheckpointError), found[1 - on].trace
    assert str(path) in str(error)
    assert "another rank has ended" in str(error)
    new = ck.verify(path).step == 9
    assert new == (at == "after the commit")
    if at != "the load":
        assert isinstance(error, WriteError)
        # Rank 1 cannot know what rank 0 was about to do.
        assert error.written in (new, None)
        assert error.written is not None or on == 0
    ck.save(path, NEW)
    assert len(list(path.iterdir())) == 2  # nothing is left of what was broken off


BAD_PATHS = {
    "NUL": ("a\0b", ValueError, "path must name a folder"),
    "surrogate": ("a\ud800b", ValueError, "path must name a folder"),
    "too long": ("x" * 300, CheckpointError, "name too long"),
    "below a file": ("file/x", CheckpointError, "file is a file|no such folder"),
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
    for look in (ck.read, ck.inspect, ck.verify):
        with pytest.raises(error, match="name too long" if kind == "too long" else "path|checkpoint"):
            look(path)
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
@pytest.mark.parametrize("kind", [kind for kind in BAD_PATHS if kind != "a file"])
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


def odd_progress(here: Here, path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if here.rank == 1:
            raise Odd(1, 2)

    ck.save(path, halves(here, OLD), group=here.group, progress=progress)


@pytest.mark.dist
def test_an_error_that_cannot_be_sent_reaches_all_ranks_in_words(world: World, tmp_path: Path):
    for result in world.run(2, odd_progress, path=tmp_path / "one"):
        assert isinstance(result, Failed)
        assert isinstance(result.error, CheckpointError), result.trace
        assert "rank 1: " in str(result.error)
        assert "Odd: odd" in str(result.error)
