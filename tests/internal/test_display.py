"""`muonfx.internal.display`: text and HTML say the same, nothing in a cell can break out; the tree of a transform."""

import re
import tempfile
from collections.abc import Mapping
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx.internal.display import Report, Row, Table, walk
from muonfx.placement.offload import offload

VOID = {"br", "hr", "img"}


class Parsed(HTMLParser):
    """A fragment whose elements were opened and closed in order, with the texts that are shown."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(data)


texts = st.text(max_size=12)


@st.composite
def rows(draw: st.DrawFn, columns: int, depth: int = 2) -> Row:
    children = draw(st.lists(rows(columns, depth - 1), max_size=2)) if depth else []
    return Row(tuple(draw(texts) for _ in range(columns)), tuple(children))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    columns = draw(st.integers(1, 3))
    return Table(
        [draw(texts) for _ in range(columns)],
        draw(st.lists(rows(columns), max_size=3)),
        draw(st.lists(st.integers(0, columns - 1))),
        draw(st.lists(rows(columns, 0), max_size=2)),
        draw(texts),
    )


def cells_of(table: Table) -> list[str]:
    return [cell for _, cells in walk([*table.rows, *table.footers]) for cell in cells]


@given(tables())
def test_html_is_well_formed_has_every_cell_and_no_script(table: Table):
    parsed = Parsed(Report((table, "a note <b>")).to_html())
    shown = "".join(parsed.texts)
    for cell in cells_of(table):
        assert "".join(c if c.isprintable() else repr(c)[1:-1] for c in cell) in shown
    assert not {"script", "img", "link", "iframe", "b"} & set(parsed.tags)


@given(tables())
def test_text_has_a_line_for_each_row_and_nothing_that_moves_a_cursor(table: Table):
    text = Table(table.titles, table.rows, table.right, table.footers).to_text()
    count = len(list(walk([*table.rows, *table.footers])))
    assert len(text.split("\n")) == 1 + count + bool(table.footers)
    assert all(line.isprintable() for line in text.split("\n"))


def explained() -> list[object]:
    params = {"up": torch.zeros(64, 16), "down": torch.zeros(16, 64)}
    plan = mfx.sharding.plan_for(mfx.muon(0.1), mfx.sharding.zero(params, 2, partition="flat"))
    path = mfx.checkpoint.save(
        tempfile.mkdtemp(), {"<up>": torch.zeros(2)}, step=7, extra={"note": "<b>"}
    )
    return [
        plan,
        plan.explain(),
        mfx.polar.explain((64, 128)),
        mfx.placement.placed(mfx.muon(0.1), params),
        mfx.checkpoint.inspect(path),
        mfx.describe({"w": "muon"}, {"w": params["up"]}),
        mfx.summary(params),
        mfx.muon(0.1).tree(),
    ]


def test_what_explains_itself_says_the_same_words_in_html():
    for value in explained():
        parsed = Parsed(value._repr_html_())  # pyright: ignore
        shown = "".join(parsed.texts).replace(" ", "")
        for word in re.findall(
            r"[\w.<>]{3,}", str(value) if not isinstance(value, Mapping) else " ".join(value)
        ):
            assert word in shown, f"{type(value).__name__}: {word} is not in the HTML"
        assert "b" not in parsed.tags
        assert "script" not in parsed.tags


def rows_of(tx: mfx.Transform):
    return [cells for _, cells in walk(tx.tree().parts[0].rows)]


def transforms_in(tx: mfx.Transform):
    return [tx] + [inner for child in tx.children for inner in transforms_in(child)]


def test_arguments_that_are_transforms_have_rows_of_their_own():
    tx = offload(mfx.momentum(0.9))
    assert [cells[2] for cells in rows_of(tx)] == ["", "decay=0.9"]


LABELS = {"a": "muon", "b": "adamw", "c": "adamw"}
CHAINS = [
    mfx.momentum(0.9),
    mfx.muon_with_adamw(0.02, 1e-3, labels=LABELS),
    mfx.skip_nonfinite(mfx.accumulate(mfx.chain(mfx.momentum(), mfx.momentum(0.5)), 4)),
    mfx.sharding.sharded(
        mfx.masked(mfx.momentum(), {"w": True}), mfx.sharding.zero({"w": torch.zeros(2, 2)}, 2)
    ),
]


@pytest.mark.parametrize("tx", CHAINS)
def test_each_transform_has_a_row_with_its_locality(tx: mfx.Transform):
    inside, rows = transforms_in(tx), rows_of(tx)
    assert [row[0].rpartition(": ")[2] for row in rows] == [one.name for one in inside]
    assert [row[1] for row in rows] == [one.locality.name for one in inside]
