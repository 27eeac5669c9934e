"""The pages of benchmarks are made from the committed results."""

import re
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


def test_the_page_of_benchmarks_has_no_measured_number_that_is_typed_by_hand():
    text = report.PAGE.read_text(encoding="utf-8")
    generated = re.compile(r"<!-- tables: .*?<!-- end of tables -->", re.DOTALL)
    assert not re.findall(r"\d+\.\d+", generated.sub("", text))
