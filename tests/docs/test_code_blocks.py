"""Blocks of code on pages: each runs alone, or the page shows what it needs from blocks above it."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))
import code_needs  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CITED = {"docs/track.md": "whose blocks are written from the functions of benchmarks/track"}
"""Pages whose blocks are parts of files of the repository."""
COMMENT = re.compile(r"# (.*)")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_name_in_a_block_is_defined_above_or_explained_in_a_comment(path: Path):
    """A comment such as ``# model, batches: yours`` explains a name that a reader has."""
    if path.relative_to(ROOT).as_posix() in CITED:
        pytest.skip(CITED[path.relative_to(ROOT).as_posix()])
    text = path.read_text(encoding="utf-8")
    explained: set[str] = set()
    unexplained: list[str] = []
    for block in code_needs.blocks(text):
        comments = " ".join(COMMENT.findall(text[block.start : block.end]))
        explained |= set(re.findall(r"\w+", comments))
        line = text[: block.start].count("\n") + 1
        unexplained += [f"line {line}: {name}" for name in block.missing if name not in explained]
    assert not unexplained


def test_a_block_of_the_readme_needs_no_other():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(not block.needs for block in code_needs.blocks(text))


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("def f(a):\n    return a + b + g()\n\ndef g():\n    return c\n", {"b", "c"}),
        ("x += 1", {"x"}),
        ("y = [a * i for i in b]\nwith open(p) as file:\n    print(file, i)", {"a", "b", "p", "i"}),
        (">>> x = f(1)\n>>> x\n3\n", {"f"}),
        ("try:\n    import a\nexcept ImportError as error:\n    print(error, a)", set()),
        (
            "@decorated\nclass A(B):\n    n: int = m\n    def f(self):\n        return self, A, late\nlate = 1",
            {"decorated", "B", "m"},
        ),
    ],
)
def test_names_that_a_block_reads(code: str, read: set[str]):
    assert code_needs.Names.of(code + "\n").read == read


def test_a_note_links_to_the_block_that_defines_a_name_last():
    page = "```python\nx = 1\n```\n\n```python\nx = 2\n```\n\n```python\nprint(x)\n```\n"
    noted = code_needs.with_notes(page)
    assert noted.count("code-anchor") == 1
    assert noted.endswith(
        '```\n\n<p class="code-needs">Uses <code>x</code> from <a href="#code-1">above</a>.</p>\n\n'
    )
