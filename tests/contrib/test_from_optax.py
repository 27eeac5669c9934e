"""Parts of Optax: what holds beyond the trajectories that tests/engines/references compares with Optax."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import muonfx as mfx
from tests import variants
from tests.processes import Here, on_ranks

PARAMS = {
    "w": torch.tensor([1.0, -2.0], dtype=torch.float64),
    "b": torch.tensor([3.0], dtype=torch.float64),
}
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


def test_the_first_update_of_prodigy_is_bias_corrected():
    """It has the size of the estimate, where it would be 3.16 times as large without the correction."""
    params = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    tx = mfx.contrib.scale_by_prodigy(estim_lr0=1e-3)
    updates, _ = tx.update(params, tx.init(params), params)
    torch.testing.assert_close(updates["w"], 1e-3 * params["w"].sign())


def test_the_estimate_of_prodigy_does_not_jump_when_a_leaf_has_no_gradient():
    tx = variants.prodigy(estim_lr0=1e-2)
    state, params = tx.init(PARAMS), PARAMS
    for _ in range(20):
        updates, state = tx.update(params, state, params)
        params = mfx.apply_updates(params, updates)
    before = float(state["scale_by_prodigy"].estim_lr)
    grads = {"w": None, "b": torch.full((1,), 1e-9, dtype=torch.float64)}
    _, state = tx.update(grads, state, params)
    assert before <= float(state["scale_by_prodigy"].estim_lr) < 1.01 * before


# ------------------------------------------------------------------------------------------------------- schedule_free

DESCENT = mfx.scale(-0.1)


def test_a_constant_rate_gives_the_plain_average_of_the_iterates():
    tx = mfx.contrib.schedule_free(DESCENT, 0.1, b1=0.6)
    state, params, iterates = tx.init(PARAMS), PARAMS, []
    for _ in range(5):
        updates, state = tx.update(params, state, params)
        params = mfx.apply_updates(params, updates)
        iterates.append(state.z)
    average = mfx.tree.map(lambda *zs: torch.stack(zs).mean(0), *iterates)
    evaluated = mfx.contrib.schedule_free_eval_params(state, params)
    torch.testing.assert_close(evaluated, average)
    torch.testing.assert_close(
        params, mfx.tree.map(lambda z, mean: 0.4 * z + 0.6 * mean, state.z, average)
    )


def test_the_average_stays_where_it_is_when_the_interpolation_changes():
    tx = mfx.contrib.schedule_free(mfx.scale(0.0), 0.1, b1=0.9)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    apart = state._replace(
        z=mfx.tree.map(lambda z: z + 1.0, state.z), weight_sum=state.weight_sum * 1e12
    )
    before = mfx.contrib.schedule_free_eval_params(apart, PARAMS)
    updates, after = tx.replace(b1=0.5).update(PARAMS, apart, PARAMS)
    moved = mfx.apply_updates(PARAMS, updates)
    torch.testing.assert_close(mfx.contrib.schedule_free_eval_params(after, moved), before)
    torch.testing.assert_close(
        moved, mfx.tree.map(lambda z, mean: 0.5 * z + 0.5 * mean, apart.z, before)
    )


def test_parameters_to_evaluate_are_found_within_chains_routes_and_optimizers():
    model = nn.ParameterDict({name: nn.Parameter(p.clone()) for name, p in PARAMS.items()})
    tx = mfx.partition(
        {"slow": mfx.contrib.schedule_free(DESCENT, 0.1, b1=0.5), "rest": DESCENT},
        {"w": "slow", "b": "rest"},
    )
    optimizer = mfx.TransformOptimizer(model, mfx.skip_nonfinite(mfx.chain(tx, mfx.identity())))
    for _ in range(3):
        for parameter in model.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    params = {name: p.detach() for name, p in model.named_parameters()}
    evaluated = mfx.contrib.schedule_free_eval_params(optimizer.transform_state, params)
    assert torch.equal(evaluated["b"], params["b"])
    torch.testing.assert_close(evaluated["w"], PARAMS["w"] - 0.2)  # of 0.1, 0.2, 0.3


@on_ranks(2)
def test_pieces_of_the_parameters_to_evaluate_are_those_of_the_whole(here: Here):
    torch.manual_seed(0)
    models = [nn.Linear(6, 5, dtype=torch.float64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fully_shard(models[0], mesh=here.mesh)
    found: list[dict[str, torch.Tensor]] = []
    for model in models:
        inner = mfx.chain(mfx.scale_by_adam(b1=0.0), mfx.scale_by_learning_rate(0.1))
        optimizer = mfx.TransformOptimizer(model, mfx.contrib.schedule_free(inner, 0.1))
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 6), step + 1.0, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        params = {name: p.detach() for name, p in model.named_parameters()}
        found.append(mfx.contrib.schedule_free_eval_params(optimizer.transform_state, params))
    whole = {name: p.full_tensor() for name, p in found[0].items()}
    torch.testing.assert_close(whole, found[1], rtol=0, atol=1e-12)


def test_another_rate_and_a_momentum_within_are_warned_of():
    rate, other = mfx.linear_schedule(0.0, 0.1, 5), mfx.linear_schedule(0.1, 0.0, 5)
    plain = mfx.chain(mfx.scale_by_adam(0.0), mfx.scale_by_learning_rate(rate))
    for given in (0.5, other):
        with pytest.warns(
            UserWarning, match=r"^schedule_free: found learning_rate=.* give both the same"
        ) as caught:
            mfx.contrib.schedule_free(plain, given)
        assert [found.filename for found in caught] == [__file__]
    for part, name in ((mfx.scale_by_adam(), "b1=0.9"), (mfx.momentum(), "decay=0.95")):
        with pytest.warns(
            UserWarning,
            match=rf"^schedule_free: {part.name} in the inner transform has a momentum, {name}",
        ):
            mfx.contrib.schedule_free(
                mfx.skip_nonfinite(mfx.chain(part, mfx.scale_by_learning_rate(0.1))), 0.1
            )
    groups = {"a": plain, "b": mfx.scale_by_learning_rate(0.2)}
    mfx.contrib.schedule_free(mfx.partition(groups, {"w": "a"}), rate)
    mfx.contrib.schedule_free(plain, other, weight_lr_power=0.0)  # the rate is not read
    mfx.contrib.schedule_free(mfx.scale(-0.1), 0.5)


# ----------------------------------------------------------------------------------------------------------------- sam


def gradient(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: p**3 - p for name, p in params.items()}


def test_the_step_has_its_length_and_the_gradient_is_the_one_behind_it():
    grads = gradient(PARAMS)
    step, _ = mfx.contrib.sam(0.25).update(grads, mfx.core.EmptyState())
    torch.testing.assert_close(float(mfx.tree.norm(step)), 0.25)
    behind = gradient(mfx.apply_updates(PARAMS, step))
    sharded = mfx.sharding.sharded(mfx.contrib.sam(0.25), mfx.sharding.zero(PARAMS, 1))
    for tx in (mfx.contrib.sam(0.25), sharded):
        torch.testing.assert_close(
            mfx.contrib.sam_gradient(gradient, PARAMS, tx), behind, rtol=0, atol=0
        )


def test_a_gradient_of_zero_gives_no_step_and_a_nan_shows():
    zero = {"w": torch.zeros(2)}
    assert torch.equal(
        mfx.contrib.sam().update(zero, mfx.core.EmptyState())[0]["w"], torch.zeros(2)
    )
    bad = {"w": torch.tensor([float("nan"), 1.0])}
    assert mfx.contrib.sam().update(bad, mfx.core.EmptyState())[0]["w"].isnan().all()


def test_what_comes_beside_the_gradient_is_that_of_the_parameters_themselves():
    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return params["w"].square().sum()

    given = {"w": PARAMS["w"]}
    grads, value = mfx.contrib.sam_gradient(torch.func.grad_and_value(loss), given, has_aux=True)
    assert float(value) == float(loss(given))
    torch.testing.assert_close(grads, mfx.contrib.sam_gradient(torch.func.grad(loss), given))
