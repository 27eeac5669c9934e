"""The benchmarks run, at tiny sizes, and their tables and plot say what the results say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import measure, peers, plots, polar, report, step
from benchmarks.__main__ import main
from benchmarks.quality import judge, matrix, up_to_scale
from muonfx.polar import KNOWN, orthogonalize

TINY = ((8, 8), (8, 24), (3, 8, 16))
TINY_SETS = {"tiny": [(8, 8), (8, 8), (24, 8), (8, 24)]}


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results go to a folder of the test's own."""
    for module in (measure, report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def saved_tiny() -> None:
    # What is compiled takes a minute, and runs in every real run of the benchmarks.
    measure.save("polar_speed", polar.speed(3, TINY, compiled=False))
    measure.save("polar_quality", polar.quality(TINY, compiled=False))
    measure.save("step_speed", step.speed(3, TINY_SETS, compiled=False))
    measure.save("step_quality", step.quality(TINY_SETS, compiled=False))


def test_every_time_has_its_quality(results: Path) -> None:
    saved_tiny()
    for name, keys in (("polar", ("candidate", "shape")), ("step", ("candidate", "case"))):
        rows = {
            kind: json.loads((results / f"{name}_{kind}.json").read_text())["rows"] for kind in ("speed", "quality")
        }
        found = {kind: {tuple(str(row[key]) for key in keys) for row in own} for kind, own in rows.items()}
        assert {row for row in found["speed"] if not row[0].endswith(" again")} == found["quality"]
        for row in rows["quality"]:
            assert 0 <= row["error"] < 0.5
            assert 0 <= row["smallest"] <= row["largest"] < 1.5
            assert any(character.isdigit() for character in row["package"])
        for row in rows["speed"]:
            assert row["milliseconds"]["p10"] <= row["milliseconds"]["median"] <= row["milliseconds"]["p90"]


def test_tables_and_plot_are_made_from_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    saved_tiny()
    measure.save("polar_scratch", polar.scratch({"tiny": [(8, 8), (24, 8)]}, [torch.float32]))
    page = tmp_path / "page.md"
    marks = [f"{report.BEGIN.format(name)}\nold\n{report.END}\nprose\n" for name in report.SECTIONS]
    page.write_text("\n".join(marks))
    report.rewrite(page)
    text = page.read_text()
    assert "old" not in text
    assert text.count("prose") == len(report.SECTIONS)
    assert "### 8 x 24" in text
    assert "### tiny" in text
    assert "| muonfx, float32 | keller |" in text
    report.rewrite(page)
    assert page.read_text() == text
    monkeypatch.setattr(plots, "SHOWN", ("8 x 8", "8 x 24"))
    picture = plots.draw(tmp_path / "picture.svg")
    assert picture is not None
    assert "8 x 24" in picture.read_text()
    page.write_text("nothing")
    with pytest.raises(ValueError, match="found no line"):
        report.rewrite(page)


def test_a_peer_that_is_not_installed_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    peers.installed.cache_clear()
    assert peers.installed("no_such_package", "no_such_package.inside") is None
    assert "no_such_package is not installed and left out" in capsys.readouterr().out


@pytest.mark.parametrize("name", KNOWN)
def test_the_plain_iteration_computes_the_polynomial(name: str) -> None:
    if KNOWN[name].row_scaling:
        pytest.skip("the plain iteration has no row scaling, and no candidate needs it")
    for spectrum in ("gaussian", "geometric"):
        x = matrix(spectrum, (12, 20))
        found = orthogonalize(x.double(), coefficients=name, method="standard", dtype=torch.float64)
        assert judge(found, x, name).error < 1e-9
        assert judge(found.mT, x.mT, name).error < 1e-9


def test_quality_sees_what_is_worse() -> None:
    x = matrix("gaussian", (12, 20))
    good = orthogonalize(x.double(), coefficients="keller", dtype=torch.float64)
    assert judge(good + 0.1 * good, x, "keller").error == pytest.approx(0.1)
    assert judge(up_to_scale(-3 * good, good), x, "keller").error < 1e-9
    values = torch.linalg.svdvals(good)
    found = judge(good, x, "keller")
    assert math.isclose(found.smallest, values.min().item(), rel_tol=1e-6)
    assert math.isclose(found.largest, values.max().item(), rel_tol=1e-6)
    row = {"candidate": "other", "ratio": {"median": 0.5}}
    quality = {name: {s: {"error": e} for s in report.SPECTRA} for name, e in (("other", 0.2), (report.BASELINE, 0.1))}
    assert report.faster_and_worse(row, quality)
    assert not report.faster_and_worse({**row, "ratio": {"median": 1.5}}, quality)
    assert not report.faster_and_worse({**row, "candidate": report.BASELINE}, quality)


def test_the_geometric_spectrum_falls_from_one_to_a_ten_thousandth() -> None:
    values = torch.linalg.svdvals(matrix("geometric", (20, 12)).double())
    torch.testing.assert_close(values, torch.logspace(0, -4, 12, dtype=torch.float64), rtol=1e-3, atol=1e-6)


def test_unknown_benchmarks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["speed"])
    assert "what: found speed, expected some of adapter, polar, step" in capsys.readouterr().err
