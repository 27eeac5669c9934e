"""Schedules: their values, and a schedule in the place of a number."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import testing as kit

RATE = 0.7


@given(kit.schedules(), st.integers(0, 12))
def test_a_count_as_an_int_or_a_tensor_gives_the_same(schedule: mfx.Schedule, count: int):
    found = schedule(torch.tensor(count))
    assert found.shape == ()
    assert float(found) == schedule(count)


@given(kit.schedules(), st.integers(0, 12))
def test_numbers_as_tensors_give_the_same_and_have_derivatives(schedule: mfx.Schedule, count: int):
    tensors = mfx.as_tensors(schedule)
    assert float(tensors(torch.tensor(count))) == pytest.approx(schedule(count), abs=1e-12)
    slopes = torch.func.grad(lambda drawn: drawn(torch.tensor(count)))(tensors)
    assert all(math.isfinite(slope) for slope in mfx.hyperparams(slopes).values())


@pytest.mark.parametrize("steps", [1, 4])
def test_an_exponential_is_a_power_of_its_rate(steps: int):
    for count in range(14):
        assert mfx.exponential_decay(2.0, steps, RATE)(count) == pytest.approx(
            2.0 * RATE ** (count / steps)
        )


@pytest.mark.parametrize(
    ("schedule", "start"),
    [
        (mfx.cosine_decay_schedule(1.0, 8), 1.0),
        (mfx.warmup_cosine_decay_schedule(1.0, 2, 8), 0.0),
        (mfx.warmup_stable_decay_schedule(1.0, 2, 4, 8), 0.0),
    ],
)
def test_a_decay_ends_at_zero_where_a_warmup_begins(schedule: mfx.Schedule, start: float):
    assert schedule(0) == start
    assert schedule(8) == schedule(100) == 0.0


RISING = mfx.linear_schedule(0.5, 0.9, 4)
PARAMS, GRADS = kit.Example.of({"w": (3, 2), "b": (3,)}, steps=6)


@mfx.transform(locality=mfx.Locality.ELEMENT)
def shifted(amount: float, *, often: float = 1.0):
    def update(updates: Any, state: mfx.core.EmptyState, params: Any = None, *, more: float = 0.0):
        return mfx.tree.map(lambda u: u + often * (amount + more), updates), state

    return mfx.identity().functions.init, update


MAKERS: dict[str, Callable[[Any], mfx.Transform]] = {
    "momentum": mfx.momentum,
    "adam": lambda number: mfx.scale_by_adam(b1=number, b2=number, eps=number),
    "rms": lambda number: mfx.scale_by_rms(number, nu_dtype=mfx.int8(block=4, min_size=0)),
    "clip": mfx.clip_by_global_norm,
    "neurons": lambda number: mfx.masked(mfx.normalize_neurons(number), mfx.routing.ndim(min=2)),
    "wrapper": lambda number: mfx.cautious(mfx.momentum(number), min_share=number),
    "average": mfx.ema_params,
    "own": lambda number: shifted(number, often=number),
    "rate": mfx.scale_by_learning_rate,
    "decoupled decay": mfx.add_decayed_weights,
    "independent decay": mfx.subtract_decayed_weights,
    "factor": mfx.scale,
    "estimate": mfx.contrib.scale_by_prodigy,
    "recipe": lambda number: mfx.lion(0.1, b1=number, weight_decay=number),
}


@pytest.mark.parametrize("name", MAKERS)
def test_each_step_uses_the_schedules_number(name: str):
    """As a loop does that gives the transform that number before each step."""
    followed = kit.examples.updates_of(MAKERS[name](RISING), PARAMS, GRADS)
    tx = mfx.as_tensors(MAKERS[name](0.5))
    state = tx.init(PARAMS)
    scheduled = [own for own, number in mfx.hyperparams(tx).items() if float(number) == 0.5]
    assert scheduled
    for step, grads in enumerate(GRADS):
        number = torch.tensor(RISING(step), dtype=torch.float64)
        now = mfx.with_hyperparams(tx, dict.fromkeys(scheduled, number))
        updates, state = now.update(grads, state, PARAMS)
        torch.testing.assert_close(followed[step], updates)


def test_localities_extras_and_promises_are_those_of_the_transform():
    for plain, tx in ((make(0.5), make(RISING)) for make in MAKERS.values()):
        assert (tx.locality, tx.reads_params) == (plain.locality, plain.reads_params)
        assert (tx.extras, tx._keeps_donation_promise) == (
            plain.extras,
            plain._keeps_donation_promise,
        )
    updates, _ = shifted(RISING).update(PARAMS, shifted(RISING).init(PARAMS), more=1.0)
    assert torch.equal(updates["b"], PARAMS["b"] + 1.5)


def test_a_peak_that_is_no_finite_number_is_named():
    with pytest.raises(ValueError, match="peak must be finite, found nan"):
        mfx.warmup_cosine_decay_schedule(math.nan, 1, 10)
    with pytest.raises(ValueError, match="peak must be finite, found inf"):
        mfx.warmup_stable_decay_schedule(math.inf, 1, 2, 10)


def test_a_rate_that_would_overflow_after_the_run_is_accepted():
    rate = mfx.exponential_decay(1e-6, 10, 1.5)
    assert rate(1_000_000) == float("inf")
    assert mfx.scale_by_learning_rate(rate).arguments["learning_rate"] == rate


@pytest.mark.parametrize("count", [0, 99_999, 100_000, 100_100])
def test_derivatives_by_numbers_of_a_later_schedule_are_finite(count: int):
    """Before its boundary, the decay would overflow to inf."""

    def rate(start: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        parts = [mfx.constant_schedule(0.1), mfx.exponential_decay(start, 100, factor)]
        return mfx.join_schedules(parts, [100_000])(torch.tensor(float(count)))

    numbers = torch.tensor([0.1, 0.1], dtype=torch.float64)
    by_start, by_factor = torch.func.grad(rate, argnums=(0, 1))(*numbers)
    assert bool(by_start.isfinite())
    assert bool(by_factor.isfinite())
    if count < 100_000:
        assert float(by_start) == 0.0


RETURNS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float": lambda count: 0.25,
    "int": lambda count: 2,
    "numpy": lambda count: np.float32(0.25),
    "shape (1,)": lambda count: torch.tensor([0.25]),
    "float64": lambda count: torch.tensor(0.25, dtype=torch.float64),
    "int tensor": lambda count: torch.tensor(2),
    "branch": lambda count: 0.5 if count < 3 else 0.25,
    "python number": lambda count: 1 / (float(count) + 1),
}


@pytest.mark.parametrize("kind", RETURNS)
def test_the_function_of_a_schedule_may_return_any_single_number(kind: str):
    function = RETURNS[kind]
    schedule = mfx.schedule(lambda: function)()
    assert schedule(torch.tensor(4)).shape == ()
    tx = mfx.scale(schedule)
    grads = {"w": torch.ones(2), "scalar": torch.tensor(1.0)}
    state = tx.init(grads)
    for count in range(5):
        updates, state = tx.update(grads, state)
        number = float(function(torch.tensor(count)))
        assert updates["w"].tolist() == pytest.approx([number] * 2)
        assert schedule(count) == pytest.approx(number)
        assert updates["scalar"].shape == ()


@pytest.mark.parametrize("value", [None, "0.1", [0.1], torch.ones(2)])
def test_a_schedule_that_returns_no_number_is_an_error_when_a_transform_receives_it(value: Any):
    schedule = mfx.schedule(lambda: lambda count: value)()
    with pytest.raises(
        TypeError, match=r"<lambda>\(\): .* must return a number or a 0-d tensor, found"
    ):
        mfx.scale(schedule)


def test_a_constant_number_and_several_steps_at_once_can_be_compiled_and_batched():
    schedule = mfx.schedule(lambda: lambda count: 0.25)()
    assert schedule(torch.arange(3)).tolist() == [0.25] * 3
    assert torch.func.vmap(schedule)(torch.arange(3)).tolist() == [0.25] * 3
    assert torch.compile(schedule, fullgraph=True, backend="eager")(torch.tensor(1)).item() == 0.25


def test_a_table_of_values_may_end_with_the_run():
    table = torch.tensor([0.1, 0.2, 0.3])
    tx = mfx.scale(mfx.schedule(lambda: lambda count: table[count.long()])())
    state = tx.init(PARAMS)
    for _ in table:
        _, state = tx.update(PARAMS, state)
    with pytest.raises(IndexError, match="out of bounds"):
        tx.update(PARAMS, state)


@pytest.mark.parametrize("part", [0.1, mfx.constant_schedule, lambda count: count])
def test_only_schedules_can_be_joined(part: Any):
    with pytest.raises(
        TypeError, match=r"join_schedules: schedules\[1\] must be a Schedule, found"
    ):
        mfx.join_schedules([mfx.constant_schedule(0.1), part], [10])


def loss_after_training(rate: torch.Tensor) -> torch.Tensor:
    """The mean square of the error after three steps of AdamW under a schedule that starts at ``rate``."""
    tx = mfx.adamw(mfx.cosine_decay_schedule(rate, 10))
    params = {"w": torch.zeros(4, 2, dtype=torch.float64)}
    state = tx.init(params)
    for _ in range(3):
        grads = {"w": params["w"] - 1}
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
    return (params["w"] - 1).square().mean()


RATES = torch.tensor([0.01, 0.1], dtype=torch.float64)


@pytest.mark.filterwarnings("error")
def test_vmap_over_a_number_of_a_schedule_equals_a_loop():
    losses = torch.stack([loss_after_training(rate) for rate in RATES])
    torch.testing.assert_close(torch.func.vmap(loss_after_training)(RATES), losses)


@pytest.mark.filterwarnings("error")
def test_derivatives_by_a_number_of_a_schedule_are_differences_alone_and_under_vmap():
    slope_of_loss = torch.func.grad(loss_after_training)
    slopes = torch.stack([slope_of_loss(rate) for rate in RATES])
    step = 1e-6
    differences = [
        loss_after_training(rate + step) - loss_after_training(rate - step) for rate in RATES
    ]
    torch.testing.assert_close(slopes, torch.stack(differences) / (2 * step), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(torch.func.vmap(slope_of_loss)(RATES), slopes)


@pytest.mark.filterwarnings("error")
def test_a_number_of_a_schedule_may_require_grad():
    rate = RATES[1].clone().requires_grad_()
    loss_after_training(rate).backward()
    torch.testing.assert_close(rate.grad, torch.func.grad(loss_after_training)(RATES[1]))
