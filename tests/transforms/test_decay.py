"""Weight decay follows its definitions, each written out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx

RATE, DECAY = 0.1, 0.3


def draw(steps: int = 4) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (4, 3), "b": (5,)}
    drawn = [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        for _ in range(steps + 1)
    ]
    return drawn[0], drawn[1:]


def run(tx: mfx.Transform, params: Any, steps: list[dict[str, Tensor]]) -> Any:
    state = tx.init(params)
    for grads in steps:
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
    return params


def assert_follows(tx: mfx.Transform, step: Any) -> None:
    """Compare with ``step(t, x, g)``, the next parameter."""
    params, steps = draw()
    found = run(tx, params, steps)
    for name, x in params.items():
        for t, grads in enumerate(steps):
            x = step(t, x, grads[name])
        torch.testing.assert_close(found[name], x, rtol=1e-14, atol=1e-15)


def test_cautious_decay_is_algorithm_1_of_its_paper():
    def step(t: int, x: Tensor, u: Tensor) -> Tensor:
        return x - RATE * (u + DECAY * x * (u * x >= 0))

    tx = mfx.chain(mfx.add_decayed_weights(DECAY, cautious=True), mfx.scale_by_learning_rate(RATE))
    assert_follows(tx, step)


def test_independent_decay_does_not_know_the_learning_rate():
    decay = mfx.subtract_decayed_weights(DECAY)
    assert_follows(mfx.chain(mfx.scale_by_learning_rate(RATE), decay), lambda t, x, g: x - RATE * g - DECAY * x)
    assert_follows(mfx.chain(mfx.scale_by_learning_rate(0.0), decay), lambda t, x, g: (1 - DECAY) * x)


def test_decay_with_the_square_of_the_learning_rate_is_a_schedule_of_its_shape():
    tx = mfx.chain(
        mfx.add_decayed_weights(mfx.cosine(DECAY, steps=8)), mfx.scale_by_learning_rate(mfx.cosine(RATE, steps=8))
    )

    def step(t: int, x: Tensor, g: Tensor) -> Tensor:
        rate = RATE * (1 + math.cos(math.pi * t / 8)) / 2
        return x - rate * g - DECAY * rate**2 / RATE * x

    assert_follows(tx, step)


@pytest.mark.parametrize("make", [mfx.add_decayed_weights, mfx.subtract_decayed_weights])
def test_caution_is_not_lost_to_underflow_or_zero(make: Any):
    params = {"w": torch.tensor([1e-30, -1e-30, 1e-30, 0.0, 2.0])}
    updates = {"w": torch.tensor([1e-30, 1e-30, -1e-30, 1.0, 0.0])}
    tx = make(0.5, cautious=True)
    sign = 1 if make is mfx.add_decayed_weights else -1
    updates = {"w": sign * updates["w"]}
    out = tx.update(updates, tx.init(params), params)[0]["w"]
    assert (out - updates["w"] == sign * torch.tensor([5e-31, 0.0, 0.0, 0.0, 1.0])).all()
