"""The README's picture: its study trains as the track does, and finished runs are kept."""

from pathlib import Path

import pytest
import torch

import muonfx as mfx
from benchmarks import headline
from benchmarks.headline import ADAMW, MUON, SEEDS, TASK, TORCH
from benchmarks.track.task import train


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two steps, in eager mode."""
    monkeypatch.setattr(headline, "STEPS", 2)
    monkeypatch.setattr(headline, "PATH", tmp_path / "headline.json")
    monkeypatch.setattr(headline, "FOLDER", tmp_path / "runs")
    monkeypatch.setattr(torch, "compile", lambda model: model)


@pytest.mark.parametrize(
    ("make", "contender"), [(headline.muon, "muon"), (headline.adamw_with_two_rates, "adam_hidden")]
)
def test_a_run_of_the_study_is_a_run_of_the_track(make, contender: str):
    task = headline.study_task()
    rows = mfx.study(
        task, {"tx": make}, rates=[0.01], seeds=[1], steps=2, vmap=False, progress=False
    )
    expected = train(TASK, contender, {"rate": 0.01}, 2, 1)["loss"]
    assert rows[-1]["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_finished_runs_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(headline, "RATES", {MUON: (0.01,), ADAMW: (0.005,)})
    monkeypatch.setattr(headline, "TORCH_RATES", (0.01,))
    monkeypatch.setattr(headline, "SEEDS", SEEDS[:1])
    rows = headline.measure()
    assert [row["optimizer"] for row in rows] == [MUON, ADAMW, TORCH]

    def no_training(*arguments: object) -> None:
        raise AssertionError("the run was finished")

    monkeypatch.setattr(headline, "train", no_training)
    assert headline.measure() == rows
