"""Parts of Optax: what holds beyond the trajectories that tests/engines/references compares with Optax."""

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.testing.transforms import every_other
from muonfx.testing.violation import bits_equal

PARAMS = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.tensor([3.0], dtype=torch.float64)}
ONES = {"w": torch.ones(2)}


@pytest.mark.parametrize("factory", [mfx.contrib.conditionally_transform, mfx.contrib.conditionally_mask])
def test_a_conditional_inner_transform_sees_the_chosen_steps_only(factory):
    inner = mfx.scale_by_adam()
    tx = factory(inner, every_other)
    state, alone = tx.init(PARAMS), inner.init(PARAMS)
    for step in range(4):
        grads = mfx.tree.map(lambda p, step=step: p * (step + 1), PARAMS)
        updates, state = tx.update(grads, state)
        if step % 2 == 0:
            expected, alone = inner.update(grads, alone)
        else:
            kept = factory is mfx.contrib.conditionally_transform
            expected = grads if kept else mfx.tree.map(torch.zeros_like, grads)
        for mine, other in zip(
            mfx.tree.leaves((updates, state.inner)), mfx.tree.leaves((expected, alone)), strict=True
        ):
            assert bits_equal(mine, other)
    tx = factory(mfx.identity(), lambda count: True)
    with pytest.raises(TypeError, match="0-d bool tensor"):
        tx.update(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("factory", [mfx.contrib.scale_by_dog, mfx.contrib.scale_by_dowg])
def test_distances_count_a_leaf_without_a_gradient_that_has_moved(factory):
    tx = factory()
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    moved = {**PARAMS, "b": PARAMS["b"] + 2.0}
    _, state = tx.update({"w": PARAMS["w"], "b": None}, state, moved)
    assert float(state[1] if factory is mfx.contrib.scale_by_dog else state[0].sqrt()) == pytest.approx(2.0)


def test_slow_weights_move_at_every_meeting_and_are_the_parameters_there():
    tx = mfx.contrib.lookahead(mfx.scale(-0.5), sync_period=3, slow_step_size=0.25)
    state, params, slow = tx.init(PARAMS), PARAMS, PARAMS["w"]
    fast = slow
    for step in range(1, 10):
        updates, state = tx.update(params, state, params)
        params = mfx.apply_updates(params, updates)
        fast = 0.5 * fast
        if step % 3 == 0:
            fast = slow = slow + 0.25 * (fast - slow)
        torch.testing.assert_close(params["w"], fast)
        torch.testing.assert_close(state.slow["w"], slow)
    tx, lost = mfx.contrib.lookahead(mfx.identity(), 2, 0.5), mfx.tree.map(lambda p: p * torch.nan, PARAMS)
    _, state = tx.update(lost, tx.init(PARAMS), PARAMS)
    assert torch.equal(state.slow["w"], PARAMS["w"])  # between meetings, lost parameters do not reach the slow weights


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


def noise(tx: mfx.Transform, params: dict[str, torch.Tensor], steps: int = 1) -> list[dict[str, torch.Tensor]]:
    state, found = tx.init(params), []
    for _ in range(steps):
        updates, state = tx.update(params, state)
        found.append(updates)
    return found


def test_noise_is_a_function_of_seed_step_name_and_place():
    zeros = {"w": torch.zeros(40, 50), "v": torch.zeros(40, 50)}
    first, second = noise(mfx.contrib.add_noise(1.0, 0.0), zeros, 2)
    (other,) = noise(mfx.contrib.add_noise(1.0, 0.0, seed=1), zeros)
    several = [first["w"], first["v"], second["w"], second["v"], other["w"], other["v"]]
    correlations = torch.corrcoef(torch.stack([leaf.flatten() for leaf in several])) - torch.eye(6)
    assert correlations.abs().max() < 0.1
    # Neighbours and dims do not matter: the place is that in the flattened leaf.
    (alone,) = noise(mfx.contrib.add_noise(1.0, 0.0), {"w": torch.zeros(40 * 50)})
    assert torch.equal(first["w"].flatten(), alone["w"])


def test_the_variance_of_noise_falls_with_the_steps():
    for step, updates in enumerate(noise(mfx.contrib.add_noise(0.25, 0.5), {"w": torch.zeros(100_000)}, 4), start=1):
        assert float(updates["w"].var()) == pytest.approx(0.25 / step**0.5, rel=0.02)
        assert float(updates["w"].mean()) == pytest.approx(0.0, abs=0.01)


def test_a_batch_has_noise_of_its_own_where_its_keys_differ():
    tx = mfx.contrib.add_noise(1.0, 0.0)
    state = tx.init({"w": torch.zeros(5)})
    keys = {"w": state.keys["w"] + torch.tensor([0, 1 << 40])}
    batch = torch.func.vmap(
        lambda key: tx.update({"w": torch.zeros(5)}, state._replace(keys=key))[0]["w"], in_dims=({"w": 0},)
    )(keys)
    assert torch.equal(batch[0], tx.update({"w": torch.zeros(5)}, state)[0]["w"])
    assert not torch.equal(batch[0], batch[1])
