"""Parts of Optax: what holds beyond the trajectories that tests/engines/references compares with Optax."""

import pytest
import torch
from torch import nn

import muonfx as mfx

PARAMS = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.tensor([3.0], dtype=torch.float64)}
ONES = {"w": torch.ones(2)}


def test_the_scale_on_a_plateau_is_that_of_torchs_scheduler():
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


def test_the_loss_of_a_plateau_may_carry_a_graph_and_be_a_number_but_not_several():
    tx = mfx.contrib.reduce_on_plateau()
    weight = torch.ones(2, requires_grad=True)
    _, state = tx.update(ONES, tx.init(ONES), value=weight.sum(0, keepdim=True))
    assert not any(leaf.requires_grad for leaf in mfx.tree.tensors(state))
    _, state = tx.update(ONES, state, value=1.0)
    assert float(state.best_value) == 1.0
    with pytest.raises(ValueError, match="one element"):
        tx.update(ONES, state, value=torch.ones(2))


def test_no_gradient_and_no_rate_leave_the_estimate_of_prodigy_as_it_is():
    zeros = mfx.tree.map(torch.zeros_like, PARAMS)
    for rate, grads in ((1.0, zeros), (0.0, PARAMS), (1.0, {"w": None, "b": None})):
        tx = mfx.contrib.scale_by_prodigy(rate)
        updates, state = tx.update(grads, tx.init(PARAMS), PARAMS)
        assert float(state.estim_lr) == 1e-6
        assert all(u is None or u.isfinite().all() for u in updates.values())


def test_the_estimate_of_prodigy_does_not_jump_when_a_leaf_has_no_gradient():
    tx = mfx.contrib.prodigy(estim_lr0=1e-2)
    state, params = tx.init(PARAMS), PARAMS
    for _ in range(20):
        updates, state = tx.update(params, state, params)
        params = mfx.apply_updates(params, updates)
    before = float(state["scale_by_prodigy"].estim_lr)
    grads = {"w": None, "b": torch.full((1,), 1e-9, dtype=torch.float64)}
    _, state = tx.update(grads, state, params)
    assert before <= float(state["scale_by_prodigy"].estim_lr) < 1.01 * before
