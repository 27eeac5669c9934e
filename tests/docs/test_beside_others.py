"""The table beside other libraries names what exists: here always, elsewhere where the package is installed."""

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
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
