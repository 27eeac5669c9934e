"""What laws about every public factory share: the names of `muonfx` and `muonfx.contrib`, and expected warnings."""

import pytest

import muonfx as mfx

NAMES = {name: getattr(module, name) for module in (mfx.contrib, mfx) for name in module.__all__}

NO_MATCH = [
    pytest.mark.filterwarnings("ignore:partition. no parameter has the label"),
    pytest.mark.filterwarnings("ignore:(dims|blocks). .*matches none of"),
]
"""Marks for laws: a drawn tree may have no leaf for a label, or for a name that a case has settings for."""
