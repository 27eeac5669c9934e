"""Whatever call to the system fails, or ends the process: no checkpoint is lost, and the error says which one is there.

One sweep for saves and loads, of one process and of two ranks: the operation runs in forked processes, again and again,
and a later call of one of them fails, or all calls fail from then on, or the process is killed there.
"""

import itertools
import os
import pickle
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import muonfx as mfx
from muonfx.checkpoint import CheckpointError, FlatShard, WriteError
from muonfx.sharding.communication import waiting
from tests.checkpoint.common import assert_same_tree
from tests.checkpoint.faults import faults
from tests.processes import run_python

ck = mfx.checkpoint
OLD = {"w": torch.arange(1000.0).reshape(10, 100), "b": torch.zeros(3)}
NEW = {name: leaf + 1 for name, leaf in OLD.items()}

SAVES: dict[str, dict[str, Any]] = {
    "the first at a path": {},
    "in place of another": {"replaces": True},
    "of a series": {"earlier": (1,)},
    "with keep": {"earlier": (1, 2, 3), "keep": 2},
    "with keep, in place of another": {"earlier": (1, 2, 3), "replaces": True, "keep": 1},
}
LOADS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: ck.load(path, like=OLD),
    "load of transposed": lambda path: ck.load(path, like=OLD | {"w": torch.zeros(100, 10).T}),
    "load_params": lambda path: ck.load_params(path, like=OLD),
    "read": ck.read,
    "verify": ck.verify,
    "inspect": ck.inspect,
    "latest": lambda path: ck.latest(path.parent),
}
HOW: dict[str, dict[str, Any]] = {
    "once": {},
    "from then on": {"always": True},
    "killed": {"kill": True},
}


class Outcome(NamedTuple):
    """The report of a process: the call that failed, its error, its arguments and its result."""

    failed: str
    error: Exception | None
    text: str


def prepare(
    folder: Path, *, earlier: tuple[int, ...] = (), replaces: bool = False, keep: int | None = None
) -> Path:
    """Make an empty folder with checkpoints of earlier steps; return the path of step 9."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = ck.step_path(folder, 9)
    for step in earlier:
        ck.save(ck.step_path(folder, step), OLD, step=step)
    if replaces:
        ck.save(path, OLD, params=OLD, step=8)
    return path


def part_of(leaf: torch.Tensor, rank: int) -> FlatShard:
    half = leaf.numel() // 2
    return FlatShard.cut(leaf, 0, half) if rank == 0 else FlatShard.cut(leaf, half, leaf.numel())


def operate(what: str, path: Path, rank: int, group: Any) -> Any:
    """Save or load, on this rank of a group, if there is one."""
    if what in SAVES:
        state = NEW if group is None else {name: part_of(leaf, rank) for name, leaf in NEW.items()}
        return ck.save(path, state, step=9, keep=SAVES[what].get("keep"), group=group)
    return LOADS[what](path) if group is None else ck.load(path, like=OLD, group=group)


def run(folder: Path, work: Callable[[int, Any], Outcome], ranks: int) -> list[Outcome | None]:
    """Call a function in forked processes; None for one that was killed."""
    reports, store = [folder / str(rank) for rank in range(ranks)], folder / "store"
    children: list[int] = []
    for rank, report in enumerate(reports):
        report.unlink(missing_ok=True)
        if (child := os.fork()) == 0:
            group = None
            if ranks > 1:
                shared, timeout = dist.FileStore(str(store), ranks), timedelta(seconds=60)
                dist.init_process_group(
                    "gloo", store=shared, rank=rank, world_size=ranks, timeout=timeout
                )
                # The other rank may still be connecting; it could not, if this rank were killed at once.
                shared.set(f"connected {rank}", "")
                shared.wait([f"connected {other}" for other in range(ranks)])
                group = dist.group.WORLD
            try:
                report.write_bytes(pickle.dumps(work(rank, group)))
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    store.unlink(missing_ok=True)
    return [pickle.loads(report.read_bytes()) if report.exists() else None for report in reports]


def attempt(what: str, path: Path, on: int, at: int, how: str, rank: int, group: Any) -> Outcome:
    """Save or load; the call number ``at`` fails on one rank."""
    error = result = None
    if at == -1:  # killed before it meets the others
        if rank == on:
            os.kill(os.getpid(), signal.SIGKILL)
        waiting._timeout = lambda group: timedelta(seconds=1)
    where = path.parent if rank == on else path.parent / "nothing"
    with (
        faults(where, at, reads=what in LOADS, **HOW[how]) as fault,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        try:
            result = operate(what, path, rank, group)
        except CheckpointError as caught:
            error = caught
    return Outcome(
        fault.failed, error, str(error or [str(warning.message) for warning in told] or result)
    )


def sweep(
    folder: str, what: str, how: str, ranks: int, on: int, stride: int, first: int = 0
) -> None:
    """Let every call from number `first` on fail, or each `stride`-th, until the operation has no more calls."""
    made = Path(folder)
    runs, at, outcomes = made / "runs", -1 if how == "killed" and not first else first, set[bool]()
    while True:
        path = prepare(runs, **SAVES.get(what, {"replaces": True}))
        found = run(made, partial(attempt, what, path, on, at, how), ranks)
        over = found[on] is not None and not found[on].failed
        call = f"call {at}, {found[on].failed if found[on] is not None else 'killed'}"
        try:
            assert how == "killed" or None not in found, (
                "a rank raised an error that is not a CheckpointError"
            )
            if what in SAVES:
                outcomes.add(check_save(what, path, found, how))
            else:
                check_load(what, path, found, over)
        except BaseException as error:
            error.add_note(f"{call}: {found}")
            raise
        if over:
            break
        at += stride
    assert at > 4
    assert what in LOADS or True in outcomes
    print("done", at)


def check_save(what: str, path: Path, found: list[Outcome | None], how: str) -> bool:
    """Require the previous checkpoint or the new one, whole, and errors that say which; return if it is the new one."""
    case = SAVES[what]
    try:
        index = ck.verify(path)
    except ck.NotFoundError:
        assert not case.get("replaces"), "lost what was there"
        new = False
    else:
        new = index.step == 9
        assert new or case.get("replaces")
        assert_same_tree(ck.load(path, like=OLD), NEW if new else OLD)
    if not new and case.get("earlier"):
        newest = path if case.get("replaces") else ck.step_path(path.parent, max(case["earlier"]))
        assert ck.latest(path.parent, verify=True) == newest
    alive = [outcome for outcome in found if outcome is not None]
    for outcome in alive:
        if outcome.error is None:
            assert new, "nothing was written, and nothing said"
        else:
            assert isinstance(outcome.error, WriteError)
            assert str(path) in outcome.text
            assert outcome.error.written in (new, False)
            if outcome.error.written:
                assert "was written" in outcome.text
            else:
                assert (
                    "was not written" in outcome.text and not new
                ) or "may have been written" in outcome.text
    if len(alive) == len(found):
        assert len({str(outcome.error) for outcome in alive}) == 1, "the ranks have other errors"
    assert_names_the_end(found)
    left = ck.clean(path.parent)
    if how == "once" and not new and not any("remove" in outcome.failed for outcome in alive):
        assert not left, "a save that fails removes its own files"
    ck.save(path, NEW, step=9, keep=case.get("keep"))
    assert_same_tree(ck.load(path, like=OLD), NEW)
    assert len(list(path.iterdir())) == 2
    assert len(ck.checkpoints(path.parent)) <= case.get("keep", 9)
    return new


def check_load(what: str, path: Path, found: list[Outcome | None], over: bool) -> None:
    """Require one error of the checkpoint on all ranks, unless no call failed; the files are as they were.

    Only an error of the close of a data file or an index may be ignored, on all ranks: the values that were read have
    been verified before.
    """
    alive = [outcome for outcome in found if outcome is not None]
    closes = any(
        outcome.failed.startswith(("close data-", "close index.json")) for outcome in alive
    )
    for outcome in alive:
        if outcome.error is not None or what == "latest":  # which warns
            assert str(path.parent) in outcome.text or path.name in outcome.text
        assert outcome.error is not None or over or closes or what == "latest"
        assert (outcome.error is not None) <= (not over)
    if len(found) > 1:
        assert len({outcome.text for outcome in alive}) == 1
        assert_names_the_end(found)
    assert_same_tree(ck.load(path, like=OLD), OLD)


def assert_names_the_end(found: list[Outcome | None]) -> None:
    """Require that, if a rank was killed, the others say that a rank has ended, or which did not come."""
    for outcome in found:
        if outcome is not None and None in found:
            gone = "another rank has ended", f"rank {found.index(None)} did not"
            assert any(words in outcome.text for words in gone)


def kill_writers(folder: str, seed: int, tries: int) -> None:
    """Kill writers at random times: each time the newest checkpoint is there, whole, and no older than before."""
    draw, steps, one = random.Random(seed), Path(folder) / "steps", Path(folder) / "one"

    def save(step: int) -> None:
        state = {"w": torch.full((100_000,), step % 100.0), "b": torch.full((3,), step % 100)}
        ck.save(ck.step_path(steps, step), state, step=step, keep=2)
        ck.save(one, state, step=step)

    started = time.perf_counter()
    save(0)
    took = time.perf_counter() - started  # a disk may be slow today
    seen, unfinished, kills = {steps: 0, one: 0}, 0, 0
    # Longer than that if the machine is so busy that few writers finished, or so idle that few were caught.
    while kills < tries or min(*seen.values(), unfinished) <= tries // 50:
        kills, before = kills + 1, {**seen}
        if (child := os.fork()) == 0:
            for step in itertools.count(max(seen.values()) + 1):
                save(step)
        time.sleep(draw.uniform(0.0, 1.5 * took))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for which, path in ((steps, ck.latest(steps, verify=True)), (one, one)):
            assert path is not None, "nothing is left"
            step = ck.verify(path).step or 0
            assert step >= seen[which]
            seen[which] = step
            assert all((leaf == step % 100).all() for leaf in ck.read(path).values())
        unfinished += bool(ck.clean(one))
        took *= 1.1 if seen == before else 0.95
    save(max(seen.values()) + 1)  # removes the files of all killed saves
    assert len(list(steps.iterdir())) == len(list(one.iterdir())) == 2
    print("done")


def run_apart(*calls: str) -> None:
    """Call functions of this file in a process of one thread, which can fork safely."""
    code = "import tests.checkpoint.test_faults as t; " + "; ".join(calls)
    done = run_python("-c", code)
    assert done.stdout.count("done") == len(calls), done.stderr


def sweep_apart(*sweeps: tuple[str | int, ...]) -> None:
    """Sweep in a process of its own, and in memory, if the system has a folder there."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as made:
        run_apart(*[f"t.sweep{(os.path.realpath(made), *arguments)!r}" for arguments in sweeps])


pytestmark = pytest.mark.skipif(os.name == "nt", reason="forks")


@pytest.mark.dist
def test_faults_of_one_process_and_of_one_of_two_ranks_lose_nothing():
    what = "with keep, in place of another"
    sweep_apart(
        *((what, how, 1, 0, 12) for how in HOW),
        ("load", "once", 1, 0, 9),
        (what, "once", 2, 1, 5),
        (what, "killed", 2, 0, 17),
        (what, "killed", 2, 1, 7),
        ("load", "once", 2, 1, 9),
    )


@pytest.mark.parametrize(
    ("seed", "tries"),
    [(0, 15), *(pytest.param(seed, 2000, marks=pytest.mark.deep) for seed in range(1, 5))],
)
def test_a_writer_killed_at_any_time_leaves_the_previous_one(tmp_path: Path, seed: int, tries: int):
    run_apart(f"t.kill_writers({str(tmp_path)!r}, {seed}, {tries})")


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.deep)])
@pytest.mark.parametrize("what", [*SAVES, *LOADS])
def test_faults_at_every_second_call_of_one_process_lose_nothing(what: str, first: int):
    # A load writes nothing, so that one that is killed at any call shows the same as another.
    hows = [how for how in HOW if how != "killed" or what in SAVES or what == "load"]
    # The ways to fail take turns at the calls. The two values of ``first`` together are every call.
    sweep_apart(*((what, how, 1, 0, 2, (first + turn) % 2) for turn, how in enumerate(hows)))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.deep) for first in (1, 2, 3))]
)
@pytest.mark.parametrize("what", [*SAVES, "load"])
def test_faults_at_every_fourth_call_of_one_of_two_ranks_lose_nothing(what: str, first: int):
    # The ranks, and the ways to fail, take turns at the calls. The four values of ``first`` together are every call.
    turns = enumerate([(how, on) for how in HOW for on in (0, 1)])
    sweep_apart(*((what, how, 2, on, 4, (first + turn) % 4) for turn, (how, on) in turns))
