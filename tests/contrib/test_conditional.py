"""`conditionally_transform` and `conditionally_mask`: the inner state moves at the chosen steps only."""

import pytest
import torch

import muonfx as mfx
from muonfx.testing.transforms import every_other
from muonfx.testing.violation import bits_equal

GRADS = {"w": torch.tensor([1.0, -2.0])}


@pytest.mark.parametrize("factory", [mfx.contrib.conditionally_transform, mfx.contrib.conditionally_mask])
def test_the_inner_transform_sees_the_chosen_steps_only(factory):
    inner = mfx.scale_by_adam()
    tx = factory(inner, every_other)
    state, alone = tx.init(GRADS), inner.init(GRADS)
    for step in range(4):
        grads = {"w": GRADS["w"] * (step + 1)}
        updates, state = tx.update(grads, state)
        if step % 2 == 0:
            expected, alone = inner.update(grads, alone)
        else:
            expected = grads if factory is mfx.contrib.conditionally_transform else {"w": torch.zeros(2)}
        assert bits_equal(updates["w"], expected["w"])
        for mine, other in zip(mfx.tree.leaves(state.inner), mfx.tree.leaves(alone), strict=True):
            assert bits_equal(mine, other)


@pytest.mark.parametrize("factory", [mfx.contrib.conditionally_transform, mfx.contrib.conditionally_mask])
def test_a_condition_that_is_no_tensor_is_refused(factory):
    tx = factory(mfx.identity(), lambda count: True)
    with pytest.raises(TypeError, match="0-d bool tensor"):
        tx.update(GRADS, tx.init(GRADS))
