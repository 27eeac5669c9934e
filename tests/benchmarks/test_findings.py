"""The pages of benchmarks say what the committed results say, and what is found stands first."""

import shutil
from pathlib import Path

import pytest

from benchmarks import report

PAGES = {
    report.PAGE: report.SECTIONS,
    report.PARTS_PAGE: report.PARTS_SECTIONS,
    report.TRAINING_PAGE: report.TRAINING_SECTIONS,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_what_its_results_make(page: Path, tmp_path: Path):
    copy = Path(shutil.copy(page, tmp_path))
    report.rewrite(copy, PAGES[page])
    assert copy.read_text() == page.read_text()


def test_what_is_slower_is_found(monkeypatch: pytest.MonkeyPatch):
    """The third finding is made of all rows that are slower, and is left out where there is none."""
    rows = {
        "polar_speed": [
            {"candidate": name, "shape": [8, size], "ratio": {"median": ratio}}
            for name, size, ratio in (("muonfx", 8, 1.3), ("muonfx", 9, 1.05), ("HeavyBall", 8, 1.5))
        ],
        "checkpoint_speed": [{"what": "load", "muonfx": {"ratio": {"median": 2.0}}}],
    }
    monkeypatch.setattr(report, "load", lambda name: {"rows": rows[name]})
    assert "orthogonalizing 8 x 8 takes 1.30 times" in report._slower()
    assert "load runs at 0.50 of" in report._slower()
    assert "8 x 9" not in report._slower()
    assert "1.50" not in report._slower()
    rows["polar_speed"].clear()
    rows["checkpoint_speed"].clear()
    assert report._slower() == ""
