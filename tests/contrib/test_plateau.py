"""`reduce_on_plateau`: the scale of updates follows the loss that it is given."""

import pytest
import torch
from torch import nn

import muonfx as mfx

ONES = {"w": torch.ones(2)}


def test_the_scale_is_that_of_torchs_scheduler():
    parameter = nn.Parameter(torch.zeros(1))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        torch.optim.SGD([parameter], lr=1.0), factor=0.5, patience=1, cooldown=2, threshold=1e-3
    )
    # torch reduces at the loss after its patience, and counts that one
    tx = mfx.contrib.reduce_on_plateau(0.5, patience=2, cooldown=2, rtol=1e-3)
    state = tx.init(ONES)
    for loss in (3.0, 2.0, 2.0, 1.9995, 1.5, 1.5, 1.6, 1.5, 1.5, 1.5, 1.0, 1.0, 1.0, 1.0):
        scheduler.step(loss)
        updates, state = tx.update(ONES, state, value=torch.tensor(loss))
        assert float(state.scale) == scheduler.get_last_lr()[0]
        assert torch.equal(updates["w"], torch.full((2,), float(state.scale)))
    assert float(state.scale) < 0.5


def test_the_loss_may_carry_a_graph_and_be_a_number():
    tx = mfx.contrib.reduce_on_plateau()
    weight = torch.ones(2, requires_grad=True)
    _, state = tx.update(ONES, tx.init(ONES), value=weight.sum(0, keepdim=True))
    assert not any(leaf.requires_grad for leaf in mfx.tree.tensors(state))
    _, state = tx.update(ONES, state, value=1.0)
    assert float(state.best_value) == 1.0


def test_a_loss_of_several_elements_is_refused():
    tx = mfx.contrib.reduce_on_plateau()
    with pytest.raises(ValueError, match="one element"):
        tx.update(ONES, tx.init(ONES), value=torch.ones(2))
