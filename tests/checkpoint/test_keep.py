"""The newest checkpoints are kept, and nothing else is touched."""

import json
from pathlib import Path

import pytest
import torch

import muonfx as mfx

ck = mfx.checkpoint


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_run_that_goes_back_keeps_what_it_writes(tmp_path: Path, keep: int):
    for step in (80, 90, 100, 60, 70):
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
