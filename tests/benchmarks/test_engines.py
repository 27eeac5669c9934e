"""The table of engines is made of rows for each stage and dtype; what they hold takes minutes to measure."""

from pathlib import Path
from unittest import mock

import pytest

from benchmarks import engines, measure, report, world


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (measure, report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")


def test_a_row_of_the_table_compares_candidates_of_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {engines.BASELINE: 0.2, engines.OURS: 0.1, engines.ADAMW: 0.05}

    def run(processes, function, candidate, size, cases, iterations):
        return [(times[candidate] * stage, None) for stage, _ in cases]

    monkeypatch.setattr(world, "run", run)
    monkeypatch.setattr(engines.peers, "deepspeed_runs", lambda: True)
    with mock.patch.object(engines, "versioned", lambda package: f"{package} 1"):
        measure.save("engines_speed", engines.speed(3))
    table = report.engines()
    assert (
        "| an iteration | DeepSpeed's Muon, ms | muonfx, ms | DeepSpeed's AdamW, ms | muonfx / first column |" in table
    )
    assert "| ZeRO-3, bfloat16 | 600.00 | 300.00 | 150.00 | 0.50 (0.50 to 0.50) |" in table
    assert table.count("| ZeRO-") == 6


def test_without_deepspeed_there_are_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.peers, "deepspeed_runs", lambda: False)
    measure.save("engines_speed", engines.speed(3))
    assert not report.engines()
