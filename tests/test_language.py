"""The mechanical part of plain English: phrases that docstrings and pages avoid."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
AVOIDED = {
    "a what-clause as subject": r"(?:^|[.:] )What [a-z][^?]*$",
    "a verb of speech or thought for code": r"\b(?:asks|wants|knows|hears|minds|tells|is told)\b",
    "a verb of travel or rest for data": r"\b(?:lies|stands|travels|goes on|comes? back|hands? on)\b",
    "a homespun word": r"\b(?:anew|mend(?:s|ed)?|by halves|of now|alike|beside)\b",
}
ALLOWED = ("beside-others", "`alike`")
"""Texts in which a phrase is a name or has its usual meaning."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of all docstrings of a module, without examples."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            for number, line in enumerate(node.value.value.splitlines(), node.lineno):
                if not line.lstrip().startswith((">>>", "...")):
                    yield number, line.strip()


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page outside its code blocks."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        is_code ^= line.lstrip().startswith(("```", "~~~"))
        if not is_code:
            yield number, line.strip()


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "concepts").glob("*.md"))]
MODULES = sorted((ROOT / "muonfx").rglob("*.py"))


@functools.cache
def all_lines() -> list[tuple[Path, int, str]]:
    lines = [(path, *line) for path in MODULES for line in docstrings(path)]
    return lines + [(path, *line) for path in PAGES for line in prose(path)]


@pytest.mark.parametrize("phrase", AVOIDED)
def test_docstrings_and_pages_avoid(phrase: str):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path, number, line in all_lines()
        if re.search(AVOIDED[phrase], line) and not any(text in line for text in ALLOWED)
    ]
    assert not found, "\n".join(found)
