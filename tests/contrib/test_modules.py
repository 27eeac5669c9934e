"""The modules of `muonfx.contrib` have the names of methods: calling one names the transform."""

from typing import Any

import pytest

import muonfx as mfx


@pytest.mark.parametrize(("module", "transform"), [("soap", "scale_by_soap"), ("prodigy", "scale_by_prodigy")])
def test_calling_a_module_names_its_transform(module: str, transform: str):
    family: Any = getattr(mfx.contrib, module)
    with pytest.raises(TypeError, match=rf"call muonfx\.contrib\.{transform}"):
        family(0.1)
