"""Read the code, configurations and inline code of pages, notebooks and docstrings, also where it cannot run."""

import ast
import doctest
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml

ROOT = Path(__file__).resolve().parent.parent

ALLOWANCE = re.compile(r"(?:<!--|#) not checked: (?P<reason>\S.*)")
"""A comment directly above a block, ``<!-- not checked: the reason -->``, or in it, ``# not checked: the reason``."""

COMMENTS = r"(?P<comments>(?:^ *<!-- [^\n]*-->\n\s*)*)"
FENCE = re.compile(
    COMMENTS + r"^(?P<indent> *)```(?P<language>[a-z{}-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"(?<!`)(`{1,2})(?!`)(?P<text>[^`\n]+)\1(?!`)")
MAGIC = re.compile(r"^[%!].*$", re.MULTILINE)
"""A command of the notebook, such as ``%matplotlib inline``."""


@dataclass(frozen=True)
class Snippet:
    """A piece of code: where it is, its language ("inline" within a sentence), and the reason if it is exempt."""

    page: str
    line: int
    language: str
    text: str
    allowance: str = ""

    @property
    def place(self) -> str:
        """Page and line, such as ``docs/huggingface.md:11``."""
        return f"{self.page}:{self.line}"


def of_markdown(page: str, text: str) -> Iterator[Snippet]:
    """Yield the fenced blocks and the inline code of a page in Markdown, in order.

    >>> [
    ...     (snippet.language, snippet.text)
    ...     for snippet in of_markdown("a.md", "Use `f(1)`:\\n```yaml\\nlr: 2\\n```\\n")
    ... ]
    [('yaml', 'lr: 2\\n'), ('inline', 'f(1)')]
    """
    for match in FENCE.finditer(text):
        indent = match["indent"]
        lines = [line.removeprefix(indent) for line in match["text"].splitlines()]
        allowance = ALLOWANCE.search(match["comments"] + match["text"])
        yield Snippet(
            page,
            text[: match.start("text")].count("\n") + 1,
            match["language"],
            "\n".join(lines) + "\n",
            allowance["reason"] if allowance else "",
        )
    prose = FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for number, line in enumerate(prose.splitlines(), 1):
        for match in INLINE.finditer(line):
            yield Snippet(page, number, "inline", match["text"])


def of_notebook(path: Path) -> Iterator[Snippet]:
    """Yield the code cells of a notebook, and the code in its Markdown cells. The line is that of the cell's text."""
    page = path.relative_to(ROOT).as_posix()
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            yield from of_markdown(page, cell.source)
        elif cell.cell_type == "code":
            allowance = ALLOWANCE.search(cell.source)
            reason = allowance["reason"] if allowance else ""
            yield Snippet(page, 1, "python", MAGIC.sub("", cell.source), reason)


def of_docstrings(path: Path) -> Iterator[Snippet]:
    """Yield the examples and the inline code of all docstrings of a module."""
    page = path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None:
            continue
        line = 1 if isinstance(node, ast.Module) else node.lineno
        examples = doctest.DocTestParser().get_examples(docstring)
        source = "".join(example.source for example in examples)
        yield Snippet(page, line, "python", source)
        for match in INLINE.finditer(docstring):
            yield Snippet(page, line, "inline", match["text"])


def snippets() -> Iterator[Snippet]:
    """Yield everything that a user may copy: of README, docs, examples, notebooks and docstrings.

    Records of the past are no pages to copy from: decisions and the changelog.
    """
    pages = [
        ROOT / "README.md",
        ROOT / "examples" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    for path in pages:
        page = path.relative_to(ROOT).as_posix()
        if not page.startswith(("docs/decisions/", "docs/changelog")):
            yield from of_markdown(page, path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "notebooks").rglob("*.ipynb")):
        if ".ipynb_checkpoints" not in path.parts:
            yield from of_notebook(path)
    for path in sorted((ROOT / "muonfx").rglob("*.py")):
        yield from of_docstrings(path)


def python_of(snippet: Snippet) -> list[ast.Module]:
    """Return the Python in a snippet. Of a diff, each side is a module: before, then after.

    A session loses its prompts and outputs. Inline code that is no Python has none.
    """
    text = snippet.text
    if snippet.language == "diff":
        sides = [
            [line[2:] for line in text.splitlines() if line[:1] in (mark, " ")] for mark in "-+"
        ]
        return [ast.parse("\n".join(side)) for side in sides]
    if snippet.language == "pycon" or text.lstrip().startswith(">>>"):
        text = "".join(example.source for example in doctest.DocTestParser().get_examples(text))
        return [ast.parse(text)]
    if snippet.language in ("python", "py"):
        return [ast.parse(text)]
    if snippet.language == "inline":
        return _inline_python(text)
    return []


def _inline_python(text: str) -> list[ast.Module]:
    """Return the Python of inline code: arguments alone, such as ``lr=0.02``, or an expression or statement."""
    sources = [text]
    if re.match(r"\w+=[^=]", text):
        sources = [f"arguments({text})", text]
    for source in sources:
        try:
            return [ast.parse(source)]
        except SyntaxError:
            continue
    return []


def configurations_of(snippet: Snippet) -> Iterator[dict[str, Any]]:
    """Yield all mappings in a configuration in YAML or JSON, the inner ones too."""
    data: object = None
    if snippet.language in ("yaml", "yml"):
        data = yaml.safe_load(snippet.text)
    elif snippet.language == "json":
        data = json.loads(snippet.text)
    elif snippet.language == "inline" and snippet.text.startswith("{"):
        try:
            data = yaml.safe_load(snippet.text)  # of which JSON is a part
        except yaml.YAMLError:
            return
    yield from mappings_in(data)


def mappings_in(data: object) -> Iterator[dict[str, Any]]:
    """Yield a mapping and the mappings in it.

    >>> list(mappings_in([{"a": {"b": 1}}]))
    [{'a': {'b': 1}}, {'b': 1}]
    """
    values: list[object] = []
    if isinstance(data, dict):
        yield data
        values = list(data.values())
    elif isinstance(data, list):
        values = data
    for value in values:
        yield from mappings_in(value)
