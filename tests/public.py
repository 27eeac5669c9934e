"""The public names of `muonfx` and `muonfx.contrib`, and warnings to expect in laws about all of them."""

import pytest

import muonfx as mfx

NAMES = {name: getattr(module, name) for module in (mfx.contrib, mfx) for name in module.__all__}

NO_MATCH = [
    pytest.mark.filterwarnings("ignore:partition. no parameter has the label"),
    pytest.mark.filterwarnings("ignore:view. .*matches none of"),
]
"""Marks for laws that draw random trees, which may have no leaf with a label or name that a case refers to."""
