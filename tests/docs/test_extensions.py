"""The extensions of the documentation: docstrings in the project's dialect become what Sphinx reads."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "docs" / "_extensions")]
import api_pages  # noqa: E402
import code_references  # noqa: E402
import public_api  # noqa: E402


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
