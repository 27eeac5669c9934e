"""Tables for a terminal and a notebook: one value, printed as plain text or as HTML.

A `Report` is a sequence of lines of text and of tables. The rows of a `Table` may have child rows, which are indented.
`Shown` is the base class of values that print as a report: ``str()`` returns the text, and a notebook shows the HTML.
The HTML has no scripts and inherits the colours of the page, so it is readable on light and dark pages.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, zip_longest
from typing import TypeVar

T = TypeVar("T")

_LISTED = 10
"""The largest number of items that `format_list` shows."""


@dataclass(frozen=True)
class Row:
    """One row of a `Table`, with child rows, which are printed below it and indented."""

    cells: tuple[str, ...]
    children: tuple[Row, ...] = ()


Rows = Sequence[Row | Sequence[str]]
"""The rows of a table. A row without child rows may be a list of cells."""


@dataclass(frozen=True)
class Table:
    """A table that prints as plain text or HTML.

    Attributes:
        titles: the titles of the columns.
        rows: the rows.
        right: the indices of the columns that are aligned right, as for numbers.
        footers: rows below a line at the end, such as totals.
        title: a line above the table; empty for none.
    """

    titles: Sequence[str]
    rows: Rows
    right: Sequence[int] = ()
    footers: Sequence[Row] = ()
    title: str = ""

    def to_text(self, depth: int | None = None) -> str:
        """Return the table as plain text; ``depth`` limits the levels of child rows that are shown (None: all).

        >>> print(
        ...     Table(
        ...         ("name", "size"),
        ...         [("w", "12"), ("b", "3")],
        ...         right=[1],
        ...         footers=[Row(("all", "15"))],
        ...     ).to_text()
        ... )
        name  size
        w       12
        b        3
        ----------
        all     15
        """
        head = list(map(printable, self.titles))
        body = _lines(self.rows, depth)
        foot = _lines(self.footers, depth)
        # A row may have fewer cells than others.
        columns = zip_longest(head, *body, *foot, fillvalue="")
        aligned_columns = list(map(self._aligned, count(), columns))
        lines = ["  ".join(cells).rstrip() for cells in zip(*aligned_columns, strict=True)]
        if foot:  # below a line, after the head and the body
            lines.insert(1 + len(body), "-" * max(map(len, lines)))
        if self.title:
            lines.insert(0, printable(self.title))
        return "\n".join(lines)

    def _aligned(self, index: int, cells: Sequence[str]) -> list[str]:
        """Return the cells of a column, filled with spaces to the width of the longest; ``index`` is its number."""
        width = max(map(len, cells))
        if index in self.right:
            return [cell.rjust(width) for cell in cells]
        return [cell.ljust(width) for cell in cells]

    def to_html(self) -> str:
        """Return the table as HTML without CSS. Child rows are indented by spaces, as in plain text.

        The parts of ``<table>`` are in the order of the HTML standard: caption, head, body and foot.
        """
        text = ""
        if self.title:
            text += f"<caption>{_escaped(self.title)}</caption>"
        text += f"<thead>{self._html_row(self.titles, 0, 'th')}</thead>"
        text += f"<tbody>{self._html_rows(self.rows)}</tbody>"
        if self.footers:
            text += f"<tfoot>{self._html_rows(self.footers)}</tfoot>"
        return f"<table>{text}</table>"

    def _html_rows(self, rows: Rows) -> str:
        return "".join([self._html_row(cells, depth) for depth, cells in walk(rows)])

    def _html_row(self, cells: Sequence[str], depth: int, tag: str = "td") -> str:
        """Return a row as HTML. Its first cell is indented by its depth in the tree of rows.

        >>> Table((), ())._html_row(["w", "12"], depth=1)
        '<tr><td>&nbsp;&nbsp;w</td><td>12</td></tr>'
        """
        row = ""
        indent = "&nbsp;&nbsp;" * depth
        for column, cell in enumerate(cells):
            # The style of the report aligns cells of this class right.
            css_class = ' class="mfx-right"' if column in self.right else ""
            row += f"<{tag}{css_class}>{indent}{_escaped(cell)}</{tag}>"
            indent = ""  # only the first cell
        return f"<tr>{row}</tr>"


def walk(rows: Rows, depth: int = 0) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield (nesting depth, cells) for each row of a table and each of its child rows, parents first.

    >>> list(walk([Row(("muon",), children=(Row(("scale",)),))]))
    [(0, ('muon',)), (1, ('scale',))]
    """
    for row in rows:
        if isinstance(row, Row):  # else it is a list of cells, which has no child rows
            yield depth, row.cells
            yield from walk(row.children, depth + 1)
        else:
            yield depth, row


def _lines(rows: Rows, depth: int | None) -> list[list[str]]:
    """Return the cells of each row, and of child rows down to the level ``depth``, with the first cell indented.

    >>> _lines([Row(("muon", "MATRIX"), children=(Row(("scale", "ELEMENT")),))], depth=None)
    [['muon', 'MATRIX'], ['  scale', 'ELEMENT']]
    """
    # A level is 0 for the rows of the table, 1 for their child rows, and so on.
    lines: list[list[str]] = []
    for level, cells in walk(rows):
        if depth is None or level <= depth:
            line = list(map(printable, cells))
            line[0] = "  " * level + line[0]
            lines.append(line)
    return lines


class Shown:
    """Base class of values that print as tables: as text in a terminal, as HTML in a notebook.

    Subclasses define `report`.
    """

    def report(self) -> Report:
        """Return the tables and lines of text that are printed for this value."""
        raise NotImplementedError

    def to_text(self, depth: int | None = None) -> str:
        """Return the tables as plain text; ``depth`` limits the levels of child rows that are shown (None: all)."""
        return self.report().to_text(depth)

    def to_html(self) -> str:
        """Return the tables as an HTML fragment with its own CSS and without scripts."""
        return self.report().to_html()

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.to_html()


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """A sequence of lines of text and of tables, which print with a blank line between them."""

    parts: tuple[str | Table, ...]

    def to_text(self, depth: int | None = None) -> str:
        """Return the report as plain text; ``depth`` limits the levels of child rows in tables (None: all)."""
        texts: list[str] = []
        for item in self.parts:
            if isinstance(item, Table):
                texts.append(item.to_text(depth))
            else:
                texts.append("\n".join(map(printable, item.split("\n"))))
        return "\n\n".join(texts)

    def to_html(self) -> str:
        """Return the report as an HTML fragment with its own CSS, which affects nothing outside it."""
        # A table becomes <table>, and text becomes a paragraph with its line breaks.
        body = ""
        for item in self.parts:
            if isinstance(item, Table):
                body += item.to_html()
            else:
                lines = map(_escaped, item.split("\n"))
                body += f"<p>{'<br>'.join(lines)}</p>"
        return f'<div class="mfx-report"><style>{_STYLE}</style>{body}</div>'


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes in the largest suitable binary unit.

    >>> format_bytes(1_572_864)
    '1.50 MiB'
    """
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    value = nbytes / 1024
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            return f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} PiB"


def format_list(items: Sequence[T], shown: Callable[[T], str] = repr) -> str:
    """Format a list for a message: the first ten items, then a count, as in "'a', 'b' and 5 more"."""
    text = ", ".join(map(shown, items[:_LISTED]))
    if len(items) > _LISTED:
        text += f" and {len(items) - _LISTED} more"
    return text


def format_count(count: int, singular: str, plural: str) -> str:
    """Format a number with its noun.

    >>> format_count(1, "rank", "ranks"), format_count(2000, "rank", "ranks")
    ('1 rank', '2,000 ranks')
    """
    noun = singular if count == 1 else plural
    return f"{count:,} {noun}"


def shown_name(name: str) -> str:
    """Return the quoted name of a leaf for a message; the empty name of a tree that is a leaf gives words."""
    return repr(name) if name else "the tree's only leaf"


def format_shape(sides: Sequence[int]) -> str:
    """Format a shape, as in "3 x 4"; "scalar" if it has no dims."""
    return " x ".join(map(str, sides)) or "scalar"


def printable(text: object) -> str:
    """Escape the characters of a text that do not print in a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


def _escaped(text: str) -> str:
    return html.escape(printable(text))


# The class is repeated so that these rules win over the more specific rules of Jupyter for all tables.
_STYLE = (
    ".mfx-report{font:12px/1.5 var(--jp-code-font-family,ui-monospace,Menlo,Consolas,monospace);overflow-x:auto}"
    ".mfx-report.mfx-report.mfx-report table"
    "{border-collapse:collapse;margin:.4em 0;font:inherit;width:auto;display:table}"
    ".mfx-report.mfx-report.mfx-report caption{text-align:left;font-weight:600;caption-side:top}"
    ".mfx-report.mfx-report.mfx-report th,.mfx-report.mfx-report.mfx-report td"
    "{border:0;padding:.1em 1.6em .1em 0;text-align:left;white-space:pre;max-width:none}"
    ".mfx-report.mfx-report.mfx-report thead th{border-bottom:1px solid rgba(128,128,128,.35)}"
    ".mfx-report.mfx-report.mfx-report tfoot td{font-weight:600}"
    ".mfx-report.mfx-report.mfx-report tfoot tr:first-child td{border-top:1px solid rgba(128,128,128,.35)}"
    ".mfx-report.mfx-report.mfx-report .mfx-right{text-align:right}"
)
