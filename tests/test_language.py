"""The mechanical part of plain English: phrases and lengths of sentences in docstrings, comments, errors and pages."""

import ast
import functools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
AVOIDED = {
    "a what-clause as subject": r"(?:^|[.:] )What [a-z][^?]*$",
    "a what-clause as object": r"\b(?:of|for|from|with|by|than|at|on) what\b",
    "a verb of speech or thought for code": r"\b(?:asks?|asked|wants|knows|hears?|minds|tells?|told)\b",
    "a verb of travel or rest for data": (
        r"\b(?:lies|lay|stands|travels?|travelled|goes on|goes back|comes? back|came back|hands? on)\b"
    ),
    "a homespun word": (
        r"\b(?:anew|mend(?:s|ed)?|by halves|of now|alike|beside|nobody|anybody|so many|made whole"
        r"|(?:dealt|deals?|shared?) out|as (?:it|they) comes?|came of)\b"
    ),
}
ALLOWED = ("beside-others", "`alike`", "beside Optax, TorchOpt")
"""Texts in which a phrase is a name or has its usual meaning."""
LONGEST_SENTENCE = 40
"""In words. A formula and a link count as one word."""

FRAGMENT = re.compile(
    r"Such as|Of |Else |None: |Or |As in |Also |By the |Not |Nor |Without repetitions"
)
"""How a comment begins that continues the line before it. Above a line, it has no subject."""

FOLDERS = ("muonfx", "tests", "examples", "benchmarks", "scripts")
MODULES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs/concepts").glob("*.md"),
]


def texts_of_module(path: Path) -> Iterator[tuple[int, str]]:
    """Yield docstrings without their examples, comments, and messages of errors and warnings, with line numbers."""
    with path.open(encoding="utf-8") as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield (
                node.lineno,
                re.sub(r"(?m)^ *(?:>>>|\.\.\.) .*(?:\n.*\S.*)*", "", node.value.value),
            )
        elif isinstance(node, ast.Raise) or (
            isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
        ):
            strings = [
                part for part in ast.walk(node) if isinstance(part, ast.JoinedStr | ast.Constant)
            ]
            for part in strings:
                if isinstance(part, ast.JoinedStr):
                    pieces = [
                        one.value if isinstance(one, ast.Constant) else "x" for one in part.values
                    ]
                    yield part.lineno, "".join(map(str, pieces))
                elif isinstance(part.value, str):
                    yield part.lineno, part.value


def texts_of_page(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a page, without code blocks and comments."""
    whole = re.sub(
        r"(?ms)^ *(```|~~~).*?^ *\1|<!--.*?-->",
        lambda block: "\n" * block[0].count("\n"),
        path.read_text("utf-8"),
    )
    for paragraph in re.finditer(r"(?:.*\S.*\n?)+", whole):
        yield whole.count("\n", 0, paragraph.start()) + 1, paragraph[0]


@functools.cache
def all_texts() -> list[tuple[str, str]]:
    """Return the place and the text of every docstring, comment, message and paragraph."""
    readers = [(path, texts_of_module) for path in MODULES] + [
        (path, texts_of_page) for path in PAGES
    ]
    return [
        (f"{path.relative_to(ROOT)}:{number}", text)
        for path, texts in sorted(readers, key=str)
        for number, text in texts(path)
    ]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. Items of lists and of ``Args:`` begin a sentence; rows of tables are skipped."""
    text = re.sub(r"\$[^$]+\$|\]\([^)]*\)", "x", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*#|] ?)|\n(?=\s*[\w*, ]+: )|\n(?=\s*\d+\. )", text):
        if not block.lstrip().startswith("|"):
            yield from re.split(r"(?<=[.:;?!)])\s+", " ".join(block.split()))


@pytest.mark.parametrize("phrase", AVOIDED)
def test_texts_avoid(phrase: str):
    found: list[str] = []
    for place, text in all_texts():
        for line in text.splitlines():
            match = re.search(AVOIDED[phrase], line.strip())
            if match and not any(allowed in line for allowed in ALLOWED):
                found.append(f"{place}: {match[0]!r} in {line.strip()}")
    assert not found, "\n".join(found)


def comments_above_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of the first line of each comment that has lines of its own."""
    is_in_comment = False
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        text = line.strip()
        if text.startswith("# ") and not is_in_comment:
            yield number, text.removeprefix("# ")
        is_in_comment = text.startswith("#")


def test_comments_above_lines_are_no_fragments():
    found: list[str] = []
    for path in (ROOT / "muonfx").rglob("*.py"):
        for number, text in comments_above_lines(path):
            if FRAGMENT.match(text):
                found.append(f"{path.relative_to(ROOT)}:{number}: {text}")
    assert not found, "\n".join(found)


def test_sentences_are_short():
    found = [
        f"{place}: {len(sentence.split())} words: {sentence}"
        for place, text in all_texts()
        for sentence in sentences(text)
        if len(sentence.split()) > LONGEST_SENTENCE
    ]
    assert not found, "\n".join(found)
