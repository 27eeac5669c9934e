"""`scale_by_prodigy`: an estimate that never falls, is finite, and counts the leaves that have no gradient now."""

import torch

import muonfx as mfx

PARAMS = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.tensor([3.0], dtype=torch.float64)}


def test_no_gradient_and_no_rate_leave_the_estimate_as_it_is():
    zeros = mfx.tree.map(torch.zeros_like, PARAMS)
    for rate, grads in ((1.0, zeros), (0.0, PARAMS), (1.0, {"w": None, "b": None})):
        tx = mfx.contrib.scale_by_prodigy(rate)
        updates, state = tx.update(grads, tx.init(PARAMS), PARAMS)
        assert float(state.estim_lr) == 1e-6
        assert all(u is None or u.isfinite().all() for u in updates.values())


def test_the_estimate_does_not_jump_when_a_leaf_has_no_gradient():
    tx = mfx.contrib.prodigy(estim_lr0=1e-2)
    state, params = tx.init(PARAMS), PARAMS
    for _ in range(20):
        updates, state = tx.update(params, state, params)
        params = mfx.apply_updates(params, updates)
    before = float(state["scale_by_prodigy"].estim_lr)
    grads = {"w": None, "b": torch.full((1,), 1e-9, dtype=torch.float64)}
    _, state = tx.update(grads, state, params)
    assert before <= float(state["scale_by_prodigy"].estim_lr) < 1.01 * before
