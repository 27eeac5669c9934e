"""Saves in the background: where they go, that the process waits for them, and that failures are heard of."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import muonfx as mfx
from muonfx.checkpoint import CheckpointError, WriteError
from tests.processes import Here, World

ck = mfx.checkpoint
ROOT = Path(__file__).resolve().parents[2]


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
    with pytest.raises(ValueError, match="path must name a folder"):
        ck.save("", {"w": torch.ones(1)})


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
    gone = threading.Event()

    def progress(done: int, total: int) -> None:
        assert gone.wait(60)

    state = {"w": ck.FlatPiece.cut(torch.ones(8), 2 * here.rank, 2 * here.rank + 2)}
    savings: list[ck.Saving] = []
    if when == "before":
        # It waits for one that waits for us.
        savings.append(ck.save_async(path / f"own-{here.rank}" / "step-1", {"w": torch.ones(3)}, progress=progress))
        saving = ck.save_async(path / f"own-{here.rank}" / "step-1", state, group=group)
    else:
        saving = ck.save_async(path / "one", state, group=group, progress=progress)
        while not list(path.glob("one/data-*")):
            time.sleep(0.01)
    dist.barrier(here.group)
    dist.destroy_process_group(group)
    gone.set()
    for first in savings:
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
