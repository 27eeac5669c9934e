"""The pages of benchmarks are made from the committed results."""

import shutil
from pathlib import Path

import pytest

from benchmarks import optimizer_laws, rates_table, report, widths
from benchmarks.track import sizes, standings

PAGES = {
    report.PAGE: report.FINDINGS_SECTIONS,
    report.TABLES_PAGE: report.SECTIONS,
    report.TRAINING_PAGE: report.TRAINING_SECTIONS,
    standings.PAGE: standings.SECTIONS | sizes.SECTIONS,
    widths.PAGE: widths.SECTIONS,
    rates_table.PAGE: rates_table.SECTIONS,
    optimizer_laws.PAGE: optimizer_laws.SECTIONS,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_what_its_results_make(page: Path, tmp_path: Path):
    copy = Path(shutil.copy(page, tmp_path))
    report.rewrite(copy, PAGES[page])
    assert copy.read_text() == page.read_text()
