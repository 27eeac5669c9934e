"""The table of coefficients in docs/concepts/numerics.md has the numbers of the polynomials."""

import math
import re
from pathlib import Path

import pytest

from muonfx import polar

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "numerics.md"
ROW = re.compile(
    r"^\| `(\w+)` \| (\d+) \| \[([\d.]+),&nbsp;([\d.]+)\] \| ([\d.]+) \| ([\d,]+) \|", re.MULTILINE
)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


def test_the_table_has_every_set():
    assert {row[0] for row in ROWS} == set(polar.PRESETS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_table(row: tuple[str, ...]):
    name, steps, low, high, peak, slope = row
    coefficients = polar.PRESETS[name]
    assert len(coefficients.steps) == int(steps)
    steepness = math.prod(a for a, _, _ in coefficients.steps) / coefficients.norm_safety
    assert round(steepness) == int(slope.replace(",", ""))
    assert polar.band(coefficients, 0.01) == pytest.approx(
        (float(low), float(high), float(peak)), abs=6e-4
    )
