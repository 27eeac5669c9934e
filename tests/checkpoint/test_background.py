"""Saves in the background: where they go, and that the process waits for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import muonfx as mfx

ck = mfx.checkpoint
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_process_that_ends_at_once_waits_for_a_large_save(tmp_path: Path):
    call = f"mfx.checkpoint.save_async({str(tmp_path / 'a')!r}, {{'w': torch.ones(3_000_000)}})"
    code = f"import torch, muonfx as mfx; {call}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
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
