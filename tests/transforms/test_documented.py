"""The transforms that README and docs teach obey the laws that ours are held to."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx import testing as kit
from muonfx.tree import PyTree

ROOT = Path(__file__).resolve().parent.parent.parent
FENCE = re.compile(r"^(?P<indent> *)```python[^\n]*\n(?P<text>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL)
TAUGHT = {
    "docs/editor.md": {"sign_of_average"},
    "docs/index.md": {"sign_descent"},
    "docs/concepts/transforms.md": {"running_sign", "center", "scale_by_loss"},
    "docs/concepts/locality.md": {"normalize"},
    "docs/check-your-own.md": {"normalized_momentum"},
}
DECORATED = re.compile(r"^( *)@mfx\.(?:transform|leafwise)\b.*?(?=^\1[^ \n@d]|\Z)", re.MULTILINE | re.DOTALL)


@mfx.transform(locality=mfx.Locality.ELEMENT)
def with_loss(factory: Callable[[], mfx.Transform]):
    """Gives a transform the extra ``value``, which laws do not know of."""
    inner = factory()

    def update(updates: PyTree, state: PyTree, params: PyTree = None):
        return inner.update(updates, state, params, value=torch.tensor(0.5))

    return inner.init, update


def taught(page: str) -> dict[str, Any]:
    """The factories that the code of a page defines, by name; of several with one name the last."""
    found: dict[str, Any] = {"mfx": mfx, "torch": torch}
    for fence in FENCE.finditer((ROOT / page).read_text(encoding="utf-8")):
        for definition in DECORATED.finditer(fence["text"]):
            lines = [line.removeprefix(definition[1]) for line in definition[0].splitlines()]
            exec("\n".join(lines), found)
    return {name: value for name, value in found.items() if hasattr(value, "definition")}


def test_every_transform_that_a_page_defines_is_checked():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = {str(page.relative_to(ROOT)): set(taught(str(page.relative_to(ROOT)))) for page in pages}
    assert {page: found for page, found in names.items() if found} == TAUGHT


@pytest.mark.parametrize("page", TAUGHT)
def test_a_taught_transform_obeys_the_laws(page: str):
    for name, factory in taught(page).items():
        tx = with_loss(factory) if name == "scale_by_loss" else factory()
        report = kit.check_transform(tx, max_examples=6)
        assert len(report.held) >= 20
