"""Tables for a terminal and a notebook: one value, written as plain text or as HTML.

A `Report` is a sequence of lines and tables; the rows of a `Table` may have rows within them. `Shown` is the base of
values that print as a report: ``str()`` is its text, a notebook shows its HTML. The HTML needs no JavaScript and takes
its colours from the page around it, so that it reads on light and dark pages alike.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Column", "Report", "Row", "Shown", "Table", "format_bytes", "format_shape", "printable"]

_LEAST = 8
"""Characters to which a column may be narrowed."""

_OPEN_ROWS = 40
"""Rows up to which a nested row is open when a notebook shows it first."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: its header.
        right: True if its cells are flush right, as numbers are.
    """

    title: str
    right: bool = False


@dataclass(frozen=True)
class Row:
    """One row of a table, with the rows within it.

    Attributes:
        cells: one text for each column.
        children: rows that belong under it; indented in text, foldable in HTML.
        share: between 0 and 1, drawn as a bar behind the last cell in HTML; None for no bar.
    """

    cells: tuple[str, ...]
    children: tuple[Row, ...] = ()
    share: float | None = None

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Row]]:
        """The row and all within it with their depths, each before those within it."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


@dataclass(frozen=True)
class Table:
    """Columns, rows that may hold rows, and footers such as totals.

    Attributes:
        columns: the columns, from left to right.
        rows: the body.
        footers: rows below the body and a line.
        title: a line above the table; "" for none.
        is_open: False for a table that a notebook shows folded at first; it needs a title.

    Raises:
        ValueError: a row has not one cell for each column.

    >>> table = Table((Column("leaf"), Column("bytes", right=True)), (Row(("w", "8"), (Row(("a", "16")),)),))
    >>> print(table.to_text())
    leaf  bytes
    w         8
      a      16
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    footers: tuple[Row, ...] = ()
    title: str = ""
    is_open: bool = True

    def __post_init__(self) -> None:
        for _, row in self._walk():
            if len(row.cells) != len(self.columns):
                raise ValueError(
                    f"a row has {len(row.cells)} cells, expected one for each of {len(self.columns)} columns: {row!r}"
                )

    @classmethod
    def of(cls, titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), title: str = ""):
        """A table without nesting, from texts.

        Args:
            titles: the headers of the columns.
            rows: the cells of each row.
            right: the places of the columns that are flush right.
            title: a line above the table.
        """
        columns = tuple(Column(text, at in right) for at, text in enumerate(titles))
        return cls(columns, tuple(Row(tuple(row)) for row in rows), title=title)

    def _walk(self) -> Iterator[tuple[int, Row]]:
        for row in (*self.rows, *self.footers):
            yield from row.walk()

    @property
    def is_nested(self) -> bool:
        """True if some row has rows within it."""
        return any(row.children for row in (*self.rows, *self.footers))

    def to_text(self, width: int | None = None, depth: int | None = None) -> str:
        """Lines of plain text, with columns as wide as their cells.

        Args:
            width: characters of a line at most; the widest cells flush left are shortened in their middle. None: as
                many as there are.
            depth: rows nested deeper are left out; None: none are.
        """
        _check_sizes(width, depth)
        lines = [tuple(_one_line(column.title) for column in self.columns)]
        lines += self._lines(self.rows, depth)
        feet = self._lines(self.footers, depth)
        rule = len(lines)
        lines += feet
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        if width is not None:
            widths = self._narrowed(widths, width)
        body = [
            "  ".join(
                _shortened(cell, wide).rjust(wide) if column.right else _shortened(cell, wide).ljust(wide)
                for cell, wide, column in zip(line, widths, self.columns, strict=True)
            ).rstrip()
            for line in lines
        ]
        if feet:
            body.insert(rule, "-" * max(map(len, body)))
        return "\n".join([_one_line(self.title), *body] if self.title else body)

    @staticmethod
    def _lines(rows: Sequence[Row], depth: int | None) -> list[tuple[str, ...]]:
        """The cells of rows and of all within them, the first indented."""
        found: list[tuple[str, ...]] = []
        for row in rows:
            for level, one in row.walk():
                if depth is None or level <= depth:
                    cells = [_one_line(cell) for cell in one.cells]
                    found.append(("  " * level + cells[0], *cells[1:]))
        return found

    def _narrowed(self, widths: list[int], width: int) -> list[int]:
        """Take what is too much from the widest column flush left, one character at a time."""
        widths = list(widths)
        left = [at for at, column in enumerate(self.columns) if not column.right]
        while left and sum(widths) + 2 * (len(widths) - 1) > width:
            widest = max(left, key=lambda at: widths[at])
            if widths[widest] <= _LEAST:
                break
            widths[widest] -= 1
        return widths

    def to_html(self) -> str:
        """A fragment of HTML, without its style: a table, or rows that fold where some are nested."""
        body = self._nested() if self.is_nested else self._flat()
        if not self.title:
            return body
        shown = " open" if self.is_open else ""
        return f'<details class="mfx-part"{shown}><summary>{_escaped(self.title)}</summary>{body}</details>'

    def _flat(self) -> str:
        def line(row: Row, tag: str = "td") -> str:
            cells = zip(row.cells, self.columns, strict=True)
            last = len(self.columns) - 1
            return "".join(
                f"<{tag}{_class('mfx-r' if column.right else '')}{_bar(row.share if at == last else None)}>"
                f"{_escaped(cell)}</{tag}>"
                for at, (cell, column) in enumerate(cells)
            )

        head = line(Row(tuple(column.title for column in self.columns)), "th")
        rows = "".join(f"<tr>{line(row)}</tr>" for row in self.rows)
        foot = "".join(f"<tr>{line(row)}</tr>" for row in self.footers)
        foot = f"<tfoot>{foot}</tfoot>" if foot else ""
        return f'<div class="mfx-scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>{foot}</table></div>'

    def _nested(self) -> str:
        everything = list(self._walk())
        widths = [len(column.title) for column in self.columns]
        for level, row in everything:
            for at, cell in enumerate(row.cells):
                widths[at] = max(widths[at], len(cell) + (2 * level + 3 if at == 0 else 0))
        grid = " ".join(f"{wide + 2}ch" for wide in widths)
        head = self._line(Row(tuple(column.title for column in self.columns)), 0, "div", "mfx-row mfx-head")
        rows = "".join(self._branch(row, 0, is_open=len(everything) <= _OPEN_ROWS) for row in self.rows)
        foot = "".join(self._branch(row, 0, is_open=False) for row in self.footers)
        foot = f'<div class="mfx-foot">{foot}</div>' if foot else ""
        return f'<div class="mfx-scroll"><div class="mfx-tree" style="--mfx-grid:{grid}">{head}{rows}{foot}</div></div>'

    def _branch(self, row: Row, depth: int, *, is_open: bool) -> str:
        if not row.children:
            return self._line(row, depth, "div", "mfx-row")
        inner = "".join(self._branch(child, depth + 1, is_open=is_open) for child in row.children)
        # Where there is much, the outermost level alone is open at first.
        shown = " open" if is_open or depth == 0 else ""
        return f"<details{shown}>{self._line(row, depth, 'summary', 'mfx-row')}{inner}</details>"

    def _line(self, row: Row, depth: int, tag: str, style: str) -> str:
        last = len(self.columns) - 1
        cells = "".join(
            f"<span{_class('mfx-r' if column.right else '')}{_bar(row.share if at == last else None)}>"
            f"{_escaped(cell)}</span> "  # the space is all that parts two cells where a host takes the style away
            for at, (cell, column) in enumerate(zip(row.cells, self.columns, strict=True))
        )
        return f'<{tag} class="{style}" style="--mfx-depth:{depth}">{cells}</{tag}>'


class Shown:
    """A value that prints as a report: plain text in a terminal, foldable tables in a notebook.

    A class that derives from it defines `report`.
    """

    def report(self) -> Report:
        """The report that the value prints as."""
        raise NotImplementedError(f"{type(self).__name__} defines no report()")

    def to_text(self, width: int | None = None, depth: int | None = None) -> str:
        """Plain text.

        Args:
            width: characters of a line at most: long cells are shortened in their middle; None: as many as there are.
            depth: rows nested deeper are left out; None: none are.
        """
        return self.report().to_text(width, depth)

    def to_html(self) -> str:
        """A fragment of HTML with its own style and without scripts."""
        return self.report().to_html()

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return self.to_html()


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """Notes and tables, one below the other, with a blank line between two of them in text.

    Attributes:
        parts: the notes, of one line or several, and the tables.

    >>> print(Report(("two leaves", Table.of(["leaf"], [["w"], ["v"]]))).to_text())
    two leaves
    <BLANKLINE>
    leaf
    w
    v
    """

    parts: tuple[str | Table, ...]

    def report(self) -> Report:
        """Itself."""
        return self

    def to_text(self, width: int | None = None, depth: int | None = None) -> str:
        """Plain text; the arguments are those of `Table.to_text`."""
        return "\n\n".join(
            "\n".join(map(_one_line, part.split("\n"))) if isinstance(part, str) else part.to_text(width, depth)
            for part in self.parts
        )

    def to_html(self) -> str:
        """A fragment of HTML with its own style, which touches nothing outside it."""
        body = "".join(_note(part) if isinstance(part, str) else part.to_html() for part in self.parts)
        return f'<div class="mfx-report"><style>{_STYLE}</style>{body}</div>'


# ---------------------------------------------------------------------------------------------------- words and sizes


def format_bytes(nbytes: float) -> str:
    """Bytes in a binary unit.

    >>> format_bytes(12), format_bytes(1536), format_bytes(3 * 2**30)
    ('12 B', '1.50 KiB', '3.00 GiB')
    """
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def format_shape(sides: Sequence[int]) -> str:
    """The sides of a shape.

    >>> format_shape((4, 2)), format_shape(())
    ('4 x 2', 'scalar')
    """
    return " x ".join(map(str, sides)) or "scalar"


def printable(text: object) -> str:
    r"""A text fit for a terminal: characters that do not print are escaped.

    >>> printable("a\x1b[31m")
    'a\\x1b[31m'
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


def _check_sizes(width: int | None, depth: int | None) -> None:
    if width is not None and width < 1:
        raise ValueError(f"width must be at least 1 character, found {width}")
    if depth is not None and depth < 0:
        raise ValueError(f"depth must be at least 0, found {depth}")


def _one_line(text: str) -> str:
    return text if text.isprintable() else printable(text)


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    indent = len(text) - len(text.lstrip())
    end = (width - 3 - indent) // 2
    if end < 1:
        return text[:width]
    return text[: width - 3 - end] + "..." + text[-end:]


def _escaped(text: str) -> str:
    return html.escape(_one_line(text))


def _note(text: str) -> str:
    return f'<p class="mfx-note">{"<br>".join(map(_escaped, text.split(chr(10))))}</p>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _bar(share: float | None) -> str:
    return "" if share is None else f' style="--mfx-share:{100 * share:.1f}%"'


# Colours are the page's own, or grey at some opacity: a page may be dark by a theme of the notebook, of which the
# system's preference says nothing. A bar may be tinted, as it carries no text of its own. The class is said three
# times, so that rules for all tables, which Jupyter writes more specific than one class, do not win.
_STYLE = (
    """
.mfx-report{font:12px/1.5 var(--jp-code-font-family,ui-monospace,Menlo,Consolas,monospace);
color:var(--jp-ui-font-color1,inherit);background:transparent;margin:.3em 0;text-align:left;
--mfx-line:rgba(128,128,128,.35);--mfx-tint:rgba(54,124,190,.22)}
@media(prefers-color-scheme:dark){.mfx-report{--mfx-tint:rgba(96,165,235,.30)}}
.mfx-report .mfx-scroll{overflow-x:auto;max-width:100%}
.mfx-report .mfx-note{margin:.4em 0;white-space:pre-wrap;font:inherit;color:inherit}
.mfx-report table{border-collapse:collapse;border:0;margin:.2em 0 .6em;font:inherit;color:inherit;
width:auto;display:table}
.mfx-report tr,.mfx-report tr:nth-child(n){background:transparent;border:0}
.mfx-report th,.mfx-report td{border:0;padding:.1em 1.6em .1em 0;text-align:left;white-space:pre;font:inherit;
color:inherit;background:transparent;max-width:none}
.mfx-report thead th{font-weight:600;border-bottom:1px solid var(--mfx-line)}
.mfx-report tfoot tr:first-child td{font-weight:600}
.mfx-report tfoot tr:first-child td{border-top:1px solid var(--mfx-line)}
.mfx-report .mfx-r{text-align:right}
.mfx-report .mfx-tree{display:inline-block;min-width:min-content}
.mfx-report .mfx-row{display:grid;grid-template-columns:var(--mfx-grid);list-style:none;white-space:pre;padding:.05em 0}
.mfx-report .mfx-row:hover,.mfx-report tbody tr:hover{background:rgba(128,128,128,.12)}
.mfx-report .mfx-row>span{padding-right:2ch;overflow:visible}
.mfx-report .mfx-row>span:first-child{padding-left:calc(var(--mfx-depth)*2ch + 2ch)}
.mfx-report .mfx-head,.mfx-report .mfx-foot>.mfx-row:first-child{font-weight:600}
.mfx-report .mfx-head{border-bottom:1px solid var(--mfx-line)}
.mfx-report .mfx-foot{border-top:1px solid var(--mfx-line)}
.mfx-report details,.mfx-report summary{margin:0;border:0;border-radius:0;background:transparent;box-shadow:none;
color:inherit;font-size:inherit;font-weight:inherit}
.mfx-report summary{cursor:pointer}
.mfx-report summary.mfx-row::-webkit-details-marker{display:none}
.mfx-report summary.mfx-row>span:first-child{position:relative}
.mfx-report summary.mfx-row>span:first-child::before{content:"\\25B8";position:absolute;
left:calc(var(--mfx-depth)*2ch + .2ch);opacity:.7}
.mfx-report details[open]>summary.mfx-row>span:first-child::before{content:"\\25BE"}
.mfx-report .mfx-part>summary{font-weight:600;margin:.4em 0 .2em}
.mfx-report [style*="--mfx-share"]{background:linear-gradient(to left,var(--mfx-tint) var(--mfx-share),transparent 0);
background-clip:content-box}
""".strip()
    .replace("\n", "")
    .replace(".mfx-report ", 3 * ".mfx-report" + " ")
)
