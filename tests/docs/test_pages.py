"""The extensions of the documentation, the names in its table of other libraries, and its pages about ranks."""

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.processes import Failed, Here, World
from tests.test_docs import ROOT, api_pages, public_api, run_page

code_references = importlib.import_module("code_references")


def restructured(text: str) -> str:
    lines = text.split("\n")
    code_references._to_restructured(None, "function", "f", None, None, lines)  # type: ignore[arg-type]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("the step $a_t$ and $b$", "the step :math:`a_t` and :math:`b`"),
        (r"over two $x +" + "\n" + r"    \beta$ lines", r"over two :math:`x + \beta` lines"),
        ("all ``leaf``s of the $n$th", "all ``leaf``\\ s of the :math:`n`\\ th"),
        (">>> '$a$'\n'$a$'\n\n$b$", ">>> '$a$'\n'$a$'\n\n:math:`b`"),
        ("`momentum`, ``x`` and `y`.", "`momentum`, ``x`` and `y`."),
    ],
)
def test_formulas_and_words_behind_code_are_translated_and_examples_are_not(markdown: str, expected: str):
    assert restructured(markdown) == expected


def test_a_block_gives_every_name_a_row_and_an_entry():
    text = api_pages.expand(["muonfx.recipes"])
    assert "{py:obj}`mfx.muon <muonfx.muon>`" in text
    assert ".. autofunction:: muonfx.muon\n" in text
    assert text.count(".. autofunction::") == len(public_api.symbols_of("muonfx.recipes"))


PAGE = (ROOT / "docs" / "beside-others.md").read_text(encoding="utf-8")
PACKAGES = ("muonfx", "optax", "torchopt", "equinox", "torch.optim")
COLUMNS = dict(zip(("muonfx", "Optax", "TorchOpt", "Equinox", "torch.optim"), PACKAGES, strict=True))
HERE = {"muonfx", "torch.optim"}
"""Columns of packages that are always installed."""

ELSEWHERE = ("torch", "jax")
"""Packages whose names are written in full in any column."""

OF_OBJECTS = {"fused", "foreach", "mu_dtype", "keller", "param_groups", "init", "update"}
"""Arguments, attributes of instances and values: no names of a package."""


def cells(column: str) -> list[str]:
    """The cells of a column, over all tables of the page."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:1] == "|"]
    head = rows[0]
    assert all(len(row) == len(head) for row in rows)
    return [row[head.index(column)] for row in rows if row != head and "---" not in row]


def names(column: str) -> list[str]:
    """The names that stand as code in a column: no arguments, no expressions."""
    return [name for cell in cells(column) for name in re.findall(r"`([A-Za-z_][\w.]*)`", cell) if name != "py.typed"]


def look_up(package: str, name: str) -> Any:
    """The object of a dotted name within a package; its submodules are imported as needed."""
    first = name.partition(".")[0]
    parts = name.split(".") if first in ELSEWHERE else [*package.split("."), *name.split(".")]
    found: Any = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            found = importlib.import_module(".".join(parts[:place]))
        else:
            found = getattr(found, part)
    return found


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch.distributed.optim uses what is deprecated
@pytest.mark.parametrize(
    "column",
    [pytest.param(column, marks=[] if column in HERE else pytest.mark.engines) for column in COLUMNS],
)
def test_what_the_table_names_is_there(column: str):
    package = COLUMNS[column]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    own = names(column)
    if column == "muonfx":
        assert len(own) > 30
    for name in set(own) - OF_OBJECTS:
        look_up(package, name)


PAGES_OVER_RANKS = ["checkpoints-over-ranks.md", "muonclip.md", "sharding.md", "sharding-agreement.md"]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    """Processes whose default group has as many ranks as there are of them."""
    if request.param == 2:
        yield request.getfixturevalue("pair")
    else:
        made = World(request.param)
        yield made
        made.close()


def read_out(here: Here, page: str, folder: Path) -> int:
    """Run a page as torchrun would: every rank types it in, in one folder."""
    torch.manual_seed(0)
    os.chdir(folder)
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        return run_page(ROOT / "docs" / page)


@pytest.mark.dist
@pytest.mark.parametrize("page", PAGES_OVER_RANKS)
def test_the_code_of_a_page_runs_on_ranks(ranks: World, tmp_path: Path, page: str):
    if page == "muonclip.md" and ranks.size == 3:
        pytest.skip("its tensor parallelism shares out two key heads")
    found = ranks.run(ranks.size, read_out, page=page, folder=tmp_path)
    traces = [result.trace for result in found if isinstance(result, Failed)]
    assert not traces, "\n".join(traces)
    assert min(found) > 1
