"""The documentation shows the list of checks as it is."""

from pathlib import Path

import pytest

pytest.importorskip("expecttest")

from tests.peers.registry import page_table

pytestmark = pytest.mark.engines


def test_the_page_shows_the_checks_that_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "peers.md").read_text()
    assert page_table() in page, page_table()
