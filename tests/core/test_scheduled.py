"""A schedule in the place of a number: the same as that number at each step, whatever is done with the transform."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import muonfx as mfx

RISING = mfx.linear_schedule(0.5, 0.9, 4)
PARAMS = {"w": torch.ones(3, 2), "b": torch.ones(3)}
STEPS = 6


DRAW = torch.Generator().manual_seed(0)
GRADS = [{name: torch.randn(leaf.shape, generator=DRAW) for name, leaf in PARAMS.items()} for _ in range(STEPS)]


def run(tx: mfx.Transform, steps: int = STEPS) -> tuple[list[Any], Any]:
    state, found = tx.init(PARAMS), []
    for step in range(steps):
        updates, state = tx.update(GRADS[step], state, PARAMS)
        found.append(updates)
    return found, state


@mfx.transform(locality=mfx.Locality.ELEMENT)
def shifted(amount: float, *, often: float = 1.0):
    def init(params: Any) -> mfx.core.EmptyState:
        return mfx.core.EmptyState()

    def update(updates: Any, state: mfx.core.EmptyState, params: Any = None, *, more: float = 0.0):
        return mfx.tree.map(lambda u: u + often * (amount + more), updates), state

    return init, update


MAKERS: dict[str, Callable[[Any], mfx.Transform]] = {
    "momentum": mfx.momentum,
    "adam": lambda number: mfx.scale_by_adam(b1=number, b2=number, eps=number),
    "rms": lambda number: mfx.scale_by_rms(number, nu_dtype=mfx.int8(block=4, min_size=0)),
    "clip": mfx.clip_by_global_norm,
    "neurons": lambda number: mfx.masked(mfx.normalize_neurons(number), mfx.select.ndim(min=2)),
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
    followed, _ = run(MAKERS[name](RISING))
    tx = mfx.as_tensors(MAKERS[name](0.5))
    state = tx.init(PARAMS)
    scheduled = [own for own, number in mfx.hyperparams(tx).items() if float(number) == 0.5]
    assert scheduled
    for step in range(STEPS):
        number = torch.tensor(RISING(step), dtype=torch.float64)
        now = mfx.with_hyperparams(tx, dict.fromkeys(scheduled, number))
        updates, state = now.update(GRADS[step], state, PARAMS)
        torch.testing.assert_close(followed[step], updates)


def test_localities_extras_and_promises_are_those_of_the_transform():
    for plain, tx in ((make(0.5), make(RISING)) for make in MAKERS.values()):
        assert (tx.locality, tx.reads_params) == (plain.locality, plain.reads_params)
        assert (tx.extras, tx.keeps_donation_promise) == (plain.extras, plain.keeps_donation_promise)
    updates, _ = shifted(RISING).update(PARAMS, shifted(RISING).init(PARAMS), more=1.0)
    assert torch.equal(updates["b"], torch.full((3,), 2.5))


def test_a_rate_that_would_overflow_after_the_run_is_accepted():
    rate = mfx.exponential_decay(1e-6, 10, 1.5)
    assert rate(1_000_000) == float("inf")
    assert mfx.scale_by_learning_rate(rate).arguments["learning_rate"] == rate


def test_a_rate_that_becomes_nan_is_refused():
    with pytest.raises(ValueError, match="at step 10000, learning_rate must be finite, found nan"):
        mfx.scale_by_learning_rate(mfx.exponential_decay(0.0, 1, 2.0))
