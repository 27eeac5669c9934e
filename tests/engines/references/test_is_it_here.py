"""The page that compares muonfx with Optax lists all of its names, with its signatures."""

import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

optax = pytest.importorskip("optax")
from optax import contrib  # noqa: E402

pytestmark = pytest.mark.engines

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "beside-others.md").read_text()
NAMED = {
    name.split(".")[-1]
    for row in re.findall(r"^\| (.*?) \|", PAGE, re.M)
    for name in re.findall(r"`([\w.]+)`", row)
}


def makes_a_transform(function: object) -> bool:
    return inspect.isfunction(function) and "GradientTransformation" in str(
        inspect.signature(function).return_annotation
    )


@pytest.mark.parametrize(
    ("module", "is_named"), [(optax, makes_a_transform), (contrib, inspect.isfunction)]
)
def test_every_transform_of_optax_is_told_of(module: Any, is_named: Callable[[object], bool]):
    public = {
        name for name in dir(module) if not name.startswith("_") and is_named(getattr(module, name))
    }
    assert len(public) > (80 if module is optax else 25)
    assert public <= NAMED, sorted(public - NAMED)


def test_the_table_of_defaults_is_that_of_the_signatures():
    made = runpy.run_path(str(DOCS.parent / "scripts" / "defaults_table.py"))["table"]()
    assert made in PAGE
