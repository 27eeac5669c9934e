"""Draw the pictures of docs/studies.md from the code of the page: ``python scripts/study_pictures.py [folder]``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

import muonfx as mfx

mpl.use("Agg")  # writes files without a display
from matplotlib import pyplot as plt

NARROW = 4.4
"""The width of a second rendering in inches, which a window of 390 pixels shows in a legible size."""
DOCS = Path(__file__).resolve().parent.parent / "docs"


def rows_of_page() -> list[dict[str, Any]]:
    """Run the code of the page up to its study, and return the rows."""
    page = (DOCS / "studies.md").read_text(encoding="utf-8")
    code = re.findall(
        r"^```python\n(.*?)^```", page.partition("## Rows and pictures")[0], flags=re.M | re.S
    )
    names: dict[str, Any] = {}
    exec("\n".join(code), names)
    return names["rows"]


def main(folder: Path = DOCS / "assets") -> None:
    """Write both pictures to a folder, each in two widths."""
    rows = rows_of_page()
    with mfx.plot.style():
        for name, plot in (
            ("study-rates", mfx.plot.plot_rates),
            ("study-losses", mfx.plot.plot_losses),
        ):
            figure = plot(rows).figure
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            figure.set_size_inches(NARROW, figure.get_size_inches()[1])
            figure.savefig(folder / f"{name}-narrow.svg", metadata={"Date": None})
            plt.close("all")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
