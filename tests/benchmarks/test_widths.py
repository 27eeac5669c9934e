"""The page on widths: what it says follows from the committed runs, and the measurement runs."""

from pathlib import Path

import pytest
import torch

from benchmarks import report, widths
from benchmarks.widths import MATRICES, RATES, SEEDS, WIDTHS, best_rate, mean_losses


@pytest.fixture(scope="module")
def results() -> dict:
    results = report.load("widths_quality")
    assert results is not None
    return results


def test_every_width_has_every_rate_and_seed(results: dict):
    found = {(row["width"], row["optimizer"], row["rate"], row["seed"]) for row in results["rows"]}
    expected = {
        (w, rule, rate, seed)
        for w in WIDTHS
        for rule in RATES
        for rate in RATES[rule]
        for seed in SEEDS
    }
    assert found == expected
    assert len(results["rows"]) == len(expected)


def test_only_the_norm_of_match_rms_adamw_grows_with_the_width(results: dict):
    for rule, power in {"match_rms_adamw": 0.5, "original": 0.0, "spectral": 0.0}.items():
        rows = {row["width"]: row for row in results["norms"] if row["optimizer"] == rule}
        for name in MATRICES:
            growth = rows[WIDTHS[-1]][name] / rows[WIDTHS[0]][name]
            assert growth == pytest.approx((WIDTHS[-1] / WIDTHS[0]) ** power, rel=0.02), (
                rule,
                name,
            )


def test_a_best_rate_is_inside_the_rates_that_were_tried(results: dict):
    for rule in RATES:
        for width in WIDTHS:
            assert best_rate(mean_losses(results["rows"], rule, width)) in RATES[rule][1:-1], (
                rule,
                width,
            )


def test_the_advice_of_the_page_follows(results: dict):
    for rule in ("original", "spectral"):
        assert {best_rate(mean_losses(results["rows"], rule, width)) for width in WIDTHS} == {0.1}
    narrow, *_, wide = [mean_losses(results["rows"], "match_rms_adamw", width) for width in WIDTHS]
    assert (best_rate(narrow), best_rate(wide)) == (0.064, 0.016)
    assert wide[0.064] - wide[0.016] == pytest.approx(0.04, abs=0.001)
    assert wide[0.032] - wide[0.016] == pytest.approx(0.003, abs=0.001)
    losses = [min(mean_losses(results["rows"], rule, WIDTHS[-1]).values()) for rule in RATES]
    assert sorted(losses) == pytest.approx([2.542, 2.547, 2.555], abs=0.0006)


def test_the_measurement_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(widths, "FOLDER", tmp_path)
    monkeypatch.setattr(widths, "STEPS", 2)
    monkeypatch.setattr(widths, "NORM_STEPS", 2)
    monkeypatch.setattr(widths, "RATES", {"spectral": (0.1,)})
    (norms,) = widths.norms_at(32)
    assert norms["query"] == pytest.approx(norms["down"], rel=0.1)
    rows = widths.losses_at(32)
    assert [(row["width"], row["step"], row["seed"]) for row in rows] == [
        (32, 2, seed) for seed in SEEDS
    ]
    assert all(torch.tensor(row["validation_loss"]).isfinite() for row in rows)
