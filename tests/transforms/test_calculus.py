"""Calculus on whole chains: sweeps by vmap, derivatives by a transform and through training steps, compiled steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx import testing as kit
from muonfx.core.transform import within
from muonfx.testing.law import without_torchs_own_warnings
from muonfx.testing.laws.compiling import Counter
from tests.transforms.tables import EVERY_CASE, Case


def muon_like(rate: Any = 0.1) -> mfx.Transform:
    return mfx.chain(
        mfx.clip_by_global_norm(5.0),
        mfx.momentum(0.9, dtype=None),
        mfx.orthogonalize(coefficients="cubic", dtype=torch.float64),
        mfx.scale_by_shape(),
        mfx.add_decayed_weights(0.1),
        mfx.scale_by_learning_rate(rate),
    )


def regression() -> tuple[dict[str, Tensor], Any, Any]:
    """Weights of two layers, and a training and a validation loss of them."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    params = {"first": normal(5, 4) / 2, "second": normal(3, 5) / 2}
    inputs, targets = normal(16, 4), normal(16, 3)

    def loss_on(rows: slice) -> Any:
        def loss(params: dict[str, Tensor]) -> Tensor:
            hidden = torch.tanh(inputs[rows] @ params["first"].mT)
            return (hidden @ params["second"].mT - targets[rows]).square().mean()

        return loss

    return params, loss_on(slice(0, 10)), loss_on(slice(10, 16))


def trained(tx: mfx.Transform, params: Any, loss: Any, steps: int = 3) -> Any:
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(torch.func.grad(loss)(params), state, params)
        params = mfx.apply_updates(params, updates)
    return params


def differences(function: Any, tx: mfx.Transform) -> dict[str, float]:
    """Central differences with respect to each number of a transform."""
    found = {}
    for name, value in mfx.hyperparams(tx).items():
        step = 1e-6 * max(1.0, abs(float(value)))
        up, down = (
            function(mfx.with_hyperparams(tx, {name: value + sign * step})) for sign in (1, -1)
        )
        found[name] = float(up - down) / (2 * step)
    return found


def test_grad_of_a_validation_loss_by_the_transform_is_a_transform_of_derivatives():
    params, loss, validation = regression()

    def after_training(tx: mfx.Transform) -> Tensor:
        return validation(trained(tx, params, loss))

    tx = muon_like()
    slope = torch.func.grad(after_training)(mfx.as_tensors(tx))
    assert isinstance(slope, mfx.Transform)
    found = mfx.hyperparams(slope)
    assert list(found) == list(mfx.hyperparams(tx))
    for name, expected in differences(after_training, tx).items():
        assert float(found[name]) == pytest.approx(expected, rel=1e-5, abs=1e-8), name
    assert any(float(value) for value in found.values())


def test_grad_through_three_steps_by_the_initial_parameters():
    params, loss, validation = regression()

    def after_training(first: Tensor) -> Tensor:
        return validation(trained(muon_like(), {**params, "first": first}, loss))

    slope = torch.func.grad(after_training)(params["first"])
    direction = torch.randn(slope.shape, dtype=torch.float64)
    up, down = (after_training(params["first"] + sign * 1e-6 * direction) for sign in (1, -1))
    assert float((slope * direction).sum()) == pytest.approx(
        float(up - down) / 2e-6, rel=1e-4, abs=1e-8
    )


@pytest.mark.slow
def test_a_whole_training_step_compiles_once():
    params, loss, _ = regression()
    given = mfx.as_tensors(muon_like(mfx.linear_schedule(0.1, 0.01, 3)))
    torch._dynamo.reset()
    counter = Counter("inductor")

    def step(tx: mfx.Transform, params: Any, state: Any) -> Any:
        updates, state = tx.update(torch.func.grad(loss)(params), state, params)
        return mfx.apply_updates(params, updates), state

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    state, eager, eager_state = given.init(params), params, given.init(params)
    graphs: list[int] = []
    for number in range(5):
        start = torch.tensor(0.1 + 0.01 * number, dtype=torch.float64)
        tx = mfx.with_hyperparams(given, {"scale_by_learning_rate.learning_rate.start": start})
        params, state = compiled(tx, params, state)
        eager, eager_state = step(tx, eager, eager_state)
        torch.testing.assert_close(params, eager, rtol=1e-9, atol=1e-9)
        graphs.append(counter.graphs)
    assert len(set(graphs)) == 1


def test_a_step_with_a_named_coefficient_set_and_its_gradient_compiles_once():
    params, loss, _ = regression()
    tx = mfx.muon_with_adamw(0.1, labels={"first": "muon", "second": "adamw"})
    [rate, *_] = mfx.hyperparams(tx)
    torch.compiler.reset()
    counter = Counter("eager")

    def step(tx: mfx.Transform, params: Any, state: Any) -> Any:
        gradients, _ = torch.func.grad_and_value(loss)(params)
        updates, state = tx.update(gradients, state, params)
        return mfx.apply_updates(params, updates), state

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    state = tx.init(params)
    for number in range(3):
        other_rate = torch.tensor(0.1 + 0.01 * number, dtype=torch.float64)
        other = mfx.with_hyperparams(mfx.as_tensors(tx), {rate: other_rate})
        torch.testing.assert_close(compiled(other, params, state), step(other, params, state))
    assert counter.graphs == 1


def test_a_sweep_over_stacked_transforms_with_a_named_coefficient_set_compiles():
    params, loss, _ = regression()
    chain = mfx.chain(
        mfx.momentum(), mfx.orthogonalize(dtype=torch.float64), mfx.scale_by_learning_rate(0.1)
    )
    sweep = mfx.stack(
        [chain, mfx.with_hyperparams(chain, {"scale_by_learning_rate.learning_rate": 0.2})]
    )

    def step(tx: mfx.Transform, params: Any) -> Any:
        return tx.update(torch.func.grad(loss)(params), tx.init(params), params)[0]

    def swept(sweep: mfx.Transform, params: Any) -> Any:
        return torch.func.vmap(step, in_dims=(0, None))(sweep, params)

    torch.compiler.reset()
    compiled = torch.compile(swept, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(sweep, params), swept(sweep, params))


@pytest.mark.slow
def test_a_compiled_step_is_compiled_once_however_many_other_masks_there_are():
    tx = mfx.masked(mfx.momentum(0.9), mfx.routing.ndim(min=2))
    others = [
        mfx.masked(mfx.identity(), lambda params, i=i: dict.fromkeys(params, i > 3))
        for i in range(5000)
    ]
    for other in others:
        other.init({"w": torch.zeros(2)})
    kit.check_transform(tx, laws=["changing_a_number_does_not_recompile"], max_examples=5)


def _is_exact(tx: mfx.Transform) -> bool:
    return not any(
        isinstance(value, mfx.QuantizedDtype)
        for part in within(tx)
        for value in part.arguments.values()
    )


READS_PARAMS = [
    pytest.param(case.values[0], id=case.id)
    for case in EVERY_CASE
    if case.values[0].tx.reads_params
]
READS_PARAMS = [case for case in READS_PARAMS if _is_exact(case.values[0].tx)]


def _in_float64(tx: mfx.Transform) -> mfx.Transform:
    """Return a transform with matrix products in float64, for finite differences."""
    inner = tx.with_children(list(map(_in_float64, tx.children))) if tx.children else tx
    return inner.replace(dtype=torch.float64) if inner.name == "orthogonalize" else inner


def _loss_after_training(tx: mfx.Transform, params: dict[str, Tensor]) -> Tensor:
    """Return a function of the parameters after two steps, whose gradients depend on the parameters."""
    state = tx.init(params)
    for _ in range(2):
        grads = {name: param**2 + 0.5 for name, param in params.items()}
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, {name: 0.1 * update for name, update in updates.items()})
    return sum((param**3).sum() for param in params.values())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of growing graphs, as intended
@pytest.mark.parametrize("case", READS_PARAMS)
def test_derivatives_by_the_initial_parameters_equal_finite_differences(case: Case):
    params, (direction,) = case.example(1, torch.float64)
    tx = _in_float64(case.tx)

    def along(distance: Tensor) -> Tensor:
        return _loss_after_training(tx, {n: p + distance * direction[n] for n, p in params.items()})

    step = torch.tensor(1e-6, dtype=torch.float64)
    expected = float(along(step) - along(-step)) / 2e-6
    assert float(torch.func.grad(along)(0 * step)) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    start = (0 * step).requires_grad_()
    assert float(torch.autograd.grad(along(start), start)[0]) == pytest.approx(
        expected, rel=1e-5, abs=1e-7
    )

    distances = torch.tensor([-0.1, 0.0, 0.2], dtype=torch.float64)
    looped = torch.stack([along(distance) for distance in distances])
    torch.testing.assert_close(torch.func.vmap(along)(distances), looped, rtol=1e-9, atol=1e-9)


def test_forward_mode_differentiates_a_scalar_parameter_by_the_interpolation_of_schedule_free():
    def last(b1: Tensor) -> Tensor:
        tx = mfx.contrib.schedule_free(mfx.scale(-0.1), 0.1, b1=b1)
        params = {"w": torch.tensor(1.0)}
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update({"w": 0.3 * params["w"]}, state, params)
            params = mfx.apply_updates(params, updates)
        return params["w"]

    b1 = torch.tensor(0.9, dtype=torch.float64)
    with without_torchs_own_warnings():
        tangent = torch.func.jvp(last, (b1,), (torch.ones_like(b1),))[1]
    torch.testing.assert_close(
        tangent.double(), torch.func.grad(last)(b1).double(), rtol=1e-4, atol=1e-6
    )


def test_forward_mode_differentiates_the_momentum_of_a_scaled_scalar():
    tx = mfx.chain(mfx.scale(0.5), mfx.momentum(0.9))

    def update(grad: Tensor) -> Tensor:
        params = {"w": torch.tensor(1.0)}
        updates, _ = tx.update({"w": grad}, tx.init(params), params)
        return updates["w"]

    grad = torch.tensor(2.0)
    with without_torchs_own_warnings():
        tangent = torch.func.jvp(update, (grad,), (torch.ones(()),))[1]
    torch.testing.assert_close(tangent.float(), torch.func.grad(update)(grad))
