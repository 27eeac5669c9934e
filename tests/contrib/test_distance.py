"""`scale_by_dog` and `scale_by_dowg`: distances count every leaf that has moved."""

import pytest
import torch

import muonfx as mfx

PARAMS = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.tensor([3.0], dtype=torch.float64)}


@pytest.mark.parametrize("factory", [mfx.contrib.scale_by_dog, mfx.contrib.scale_by_dowg])
def test_a_leaf_without_a_gradient_has_still_moved(factory):
    tx = factory()
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    moved = {**PARAMS, "b": PARAMS["b"] + 2.0}
    _, state = tx.update({"w": PARAMS["w"], "b": None}, state, moved)
    assert float(state[1] if factory is mfx.contrib.scale_by_dog else state[0].sqrt()) == pytest.approx(2.0)
