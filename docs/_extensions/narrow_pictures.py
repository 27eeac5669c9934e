"""Pictures for narrow windows: a second rendering of a wide picture, which a phone shows in its place.

It is a file beside the picture, ``polynomials-narrow.svg`` beside ``polynomials.svg``, or it is made here from parts of
the picture, one below the other: ``docs/assets/narrow.json`` lists the parts as ``"findings": [[x, y, width, height],
...]`` in the units of the picture's ``viewBox``.
"""

import json
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ASSETS = Path(__file__).resolve().parents[1] / "assets"
PICTURE = re.compile(r'<img [^>]*?src="(?P<folder>[^"]*_images/)(?P<name>[\w-]+)\.svg"[^>]*>')
ROOT_ELEMENT = re.compile(r"<svg\b[^>]*>(?P<content>.*)</svg>", re.DOTALL)
Box = list[float]


def stacked(picture: str, parts: list[Box]) -> str:
    """The SVG of some parts of a picture, one below the other.

    >>> stacked("<svg><circle/></svg>", [[0, 0, 4, 2], [4, 0, 3, 2]]).splitlines()[2]
    '<svg x="0" y="0" width="4" height="2" viewBox="0 0 4 2"><use href="#whole"/></svg>'
    """
    match = ROOT_ELEMENT.search(picture)
    assert match is not None
    width = max(part[2] for part in parts)
    height = sum(part[3] for part in parts)
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    lines = [
        f'<svg {names} viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
    ]
    lines.append(f'<defs><g id="whole">{match["content"].strip()}</g></defs>')
    top = 0.0
    for x, y, part_width, part_height in parts:
        left = (width - part_width) / 2
        place = f'x="{left:g}" y="{top:g}" width="{part_width:g}" height="{part_height:g}"'
        lines.append(
            f'<svg {place} viewBox="{x:g} {y:g} {part_width:g} {part_height:g}"><use href="#whole"/></svg>'
        )
        top += part_height
    return "\n".join([*lines, "</svg>", ""])


def narrow_pictures() -> dict[str, str]:
    """The SVG of every narrow picture, by the name of the wide one."""
    found = {
        path.stem.removesuffix("-narrow"): path.read_text("utf-8")
        for path in ASSETS.rglob("*-narrow.svg")
    }
    wide = {path.stem: path for path in ASSETS.rglob("*.svg")}
    for name, parts in json.loads((ASSETS / "narrow.json").read_text("utf-8")).items():
        found[name] = stacked(wide[name].read_text("utf-8"), parts)
    return found


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        for name, text in narrow_pictures().items():
            (Path(app.outdir) / "_images" / f"{name}-narrow.svg").write_text(text, encoding="utf-8")


def _offer(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Write ``<picture>`` around each image that has a narrow picture."""
    names = narrow_pictures()

    def with_narrow(match: re.Match[str]) -> str:
        if match["name"] not in names:
            return match[0]
        source = f"{match['folder']}{match['name']}-narrow.svg"
        return f'<picture><source media="(max-width: 600px)" srcset="{source}">{match[0]}</picture>'

    if "body" in context:
        context["body"] = PICTURE.sub(with_narrow, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("html-page-context", _offer)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
