"""The newest checkpoints are kept, and nothing else is touched."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import muonfx as mfx

ck = mfx.checkpoint


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_run_that_goes_back_keeps_what_it_writes(tmp_path: Path, keep: int):
    for step in (80, 90, 100, 60, 70):
        told = pytest.warns(UserWarning, match=f"step-.*{step} was written beside checkpoints of later steps, up to")
        with told if step < 80 and keep > 1 else nullcontext():
            path = ck.save(ck.step_path(tmp_path, step), {"w": torch.ones(1)}, step=step, keep=keep)
        assert ck.verify(path).step == step
        assert len(ck.checkpoints(tmp_path)) <= keep


def test_links_and_the_files_of_others_stay(tmp_path: Path):
    archive, other = tmp_path / "archive", tmp_path / "run" / "step-1"
    ck.save(archive, {"w": torch.ones(1)})
    other.mkdir(parents=True)
    (other / "index.json").write_text('{"mine": 1}')
    (tmp_path / "run" / "step-000000002").symlink_to(archive)
    for step in (5, 10, 11):
        ck.save(ck.step_path(tmp_path / "run", step), {"w": torch.ones(2)}, step=step, keep=1)
    assert json.loads((other / "index.json").read_text()) == {"mine": 1}
    assert ck.verify(archive)


def test_a_checkpoint_may_be_a_link_to_a_folder_and_not_to_nowhere(tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for number in (1, 2):
        ck.save(tmp_path / "link", {"w": torch.full((2,), float(number))}, step=number)
    assert ck.verify(tmp_path / "there").step == 2
    assert len(list((tmp_path / "there").iterdir())) == 2
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(ck.WriteError, match="File exists"):
        ck.save(tmp_path / "nowhere", {"w": torch.ones(1)})
    with pytest.raises(ck.NotFoundError, match="no such folder"):
        ck.read(tmp_path / "nowhere")


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
