"""Pictures for narrow windows: the parts of a wide picture that are stacked contain each panel of it as a whole."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))
import narrow_pictures  # noqa: E402

PARTS = json.loads((narrow_pictures.ASSETS / "narrow.json").read_text(encoding="utf-8"))
PANEL = re.compile(r'<g id="axes_\d+">\s*<g id="patch_\d+">\s*<path d="([^"]*)"')
"""The ground of a panel, as matplotlib writes it."""


def wide_picture(name: str) -> str:
    """The text of the picture of which a narrow one is made."""
    (path,) = narrow_pictures.ASSETS.rglob(f"{name}.svg")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PARTS)
def test_every_panel_of_a_picture_is_whole_in_one_part(name: str):
    text = wide_picture(name)
    view = re.search(r"viewBox=[\"']0 0 ([\d.]+) ([\d.]+)[\"']", text)
    assert view is not None
    for x, y, width, height in PARTS[name]:
        assert x >= 0
        assert y >= 0
        assert x + width <= float(view[1])
        assert y + height <= float(view[2])
    for path in PANEL.findall(text):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
        left, right = min(numbers[::2]), max(numbers[::2])
        top, bottom = min(numbers[1::2]), max(numbers[1::2])
        holds = [
            x <= left and right <= x + width and y <= top and bottom <= y + height
            for x, y, width, height in PARTS[name]
        ]
        assert holds.count(True) == 1, (
            f"{name}: no part of docs/assets/narrow.json holds the panel at {left:g}, {top:g}"
        )


@pytest.mark.parametrize("name", narrow_pictures.narrow_pictures())
def test_a_narrow_picture_is_valid_and_narrower_than_the_wide_one(name: str):
    narrow = ElementTree.fromstring(narrow_pictures.narrow_pictures()[name])
    wide = ElementTree.fromstring(wide_picture(name))
    assert float(narrow.attrib["viewBox"].split()[2]) < 0.75 * float(
        wide.attrib["viewBox"].split()[2]
    )
