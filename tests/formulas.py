"""Comparison of a chain with a formula for one parameter, in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import muonfx as mfx
from muonfx.testing import Example

EXACT = mfx.orthogonalize(coefficients=((1.875, -1.25, 0.375),), steps=40, dtype=torch.float64)
Step = Callable[[int, Tensor, Tensor, dict[str, Any]], Tensor]


def assert_follows(
    tx: mfx.Transform, step: Step, example: Example, *, rtol: float, atol: float
) -> None:
    """Compare parameters after each step with ``step(t, x, g, memory)``, which returns the next x; t begins at 1."""
    params, steps = example
    state, memory = tx.init(params), {name: {} for name in params}
    theirs = dict(params)
    for t, grads in enumerate(steps, start=1):
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
        for name, x in theirs.items():
            theirs[name] = step(t, x, grads[name], memory[name])
            torch.testing.assert_close(params[name], theirs[name], rtol=rtol, atol=atol)


def average(memory: dict[str, Any], key: str, new: Tensor, beta: float = 0.9) -> Tensor:
    memory[key] = beta * memory.get(key, torch.zeros_like(new)) + (1 - beta) * new
    return memory[key]
