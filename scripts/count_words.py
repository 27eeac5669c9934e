"""Count the words of the documentation: ``python scripts/count_words.py``.

Counted are README.md, CONTRIBUTING.md and the pages of docs/. Pages of docs/api/ are left out: their text is that of
docstrings. A word is what spaces separate, as for ``wc -w``. Fenced code is counted apart, and so are the decision
records, which are not in the menu of the site.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2", re.MULTILINE | re.DOTALL)


def words_of(text: str) -> tuple[int, int]:
    r"""The number of words in the text of a page, and in its fenced code.

    >>> words_of("Two words.\n```python\nx = 1\n```\n")
    (2, 3)
    """
    fenced = [block[0] for block in CODE.finditer(text)]
    fences = 2 * len(fenced)
    code = sum(len(block.split()) for block in fenced) - fences
    prose = len(CODE.sub("", text).split())
    return prose, code


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and the pages of docs/ without docs/api/, decision records last."""
    written = [
        path
        for path in (ROOT / "docs").rglob("*.md")
        if "api" not in path.parts and "notebooks" not in path.parts
    ]
    written.sort(key=lambda path: ("decisions" in path.parts, path))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *written]


def print_total(title: str, counts: list[tuple[int, int]]) -> None:
    """Print the sums of the words of several pages."""
    prose = sum(count[0] for count in counts)
    code = sum(count[1] for count in counts)
    print(f"{prose:7,} {code:7,}  {title}: {len(counts)} pages, {prose + code:,} words")


def main() -> None:
    """Print a row for each page, and the totals."""
    print("   text    code  page")
    of_pages: list[tuple[int, int]] = []
    of_decisions: list[tuple[int, int]] = []
    for path in pages():
        prose, code = words_of(path.read_text(encoding="utf-8"))
        print(f"{prose:7,} {code:7,}  {path.relative_to(ROOT).as_posix()}")
        if "decisions" in path.parts:
            of_decisions.append((prose, code))
        else:
            of_pages.append((prose, code))
    print_total("all but decision records", of_pages)
    print_total("decision records", of_decisions)


if __name__ == "__main__":
    main()
