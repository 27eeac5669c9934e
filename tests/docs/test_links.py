"""Links of pages as GitHub resolves them: relative to the file, with the anchors that GitHub gives to headings."""

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]
BUILT = ("docs/notebooks/",)
"""Folders that `make docs` writes. GitHub has no such pages; a link to one is broken there."""

FENCE = re.compile(r"^( *)(`{3,}|:{3,}).*?^\1\2", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*)$", re.MULTILINE)
TARGET = re.compile(r'(?:<a (?:id|name)="|<[a-z]+ id=")([^"]+)"')


def anchor_of(heading: str) -> str:
    """The anchor that GitHub gives to a heading.

    >>> anchor_of("What `resume` takes, and from where")
    'what-resume-takes-and-from-where'
    """
    words = re.sub(r"\]\([^)]*\)", "]", heading)  # a link within the heading counts as its text
    kept = re.sub(r"[^\w\- ]", "", words.lower())
    return kept.strip().replace(" ", "-")


@cache
def anchors_of(page: Path) -> set[str]:
    """All anchors of a page. A repeated heading gets a suffix, as ``example-1``."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    anchors: set[str] = set(TARGET.findall(text))
    for heading in HEADING.findall(text):
        anchor = anchor_of(heading)
        count = 0
        while anchor in anchors:
            count += 1
            anchor = f"{anchor_of(heading)}-{count}"
        anchors.add(anchor)
    return anchors


def links_of(page: Path) -> list[str]:
    """The links of a page outside of code."""
    text = re.sub(
        r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    return LINK.findall(CODE.sub("", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_on_github(page: Path):
    broken: list[str] = []
    for link in links_of(page):
        if re.match(r"[a-z]+:", link):
            continue
        address, anchor = urldefrag(unquote(link))
        target = (page.parent / address).resolve() if address else page
        if not target.exists() or target.relative_to(ROOT).as_posix().startswith(BUILT):
            broken.append(f"{link}: GitHub has no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors_of(target):
            broken.append(f"{link}: no heading of {target.name} has this anchor")
    assert broken == []
