"""Non-finite gradients: they stay visible in their own leaf, and zeros give finite updates."""

import math

import pytest
import torch

import muonfx as mfx
from muonfx import tree
from muonfx.core.transform import within
from muonfx.testing.examples import updates_of
from muonfx.testing.violation import widened
from tests.public import NO_MATCH
from tests.transforms.tables import EVERY_CASE, Case, Tensors

pytestmark = NO_MATCH

HIDES = {"set_to_zero", "skip_nonfinite"}
"""The transforms whose purpose is that no NaN reaches the parameters."""
BAD = {"nan": math.nan, "inf": math.inf, "minus inf": -math.inf}
BAD_STEP = 2
STEPS = 6


def _with_one_bad_element(grads: Tensors, leaf: str, value: float) -> Tensors:
    spoiled = grads[leaf].clone()
    spoiled.view(-1)[-1] = value
    return grads | {leaf: spoiled}


def _is_finite(update: torch.Tensor) -> bool:
    return bool(update.isfinite().all())


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_nonfinite_gradient_stays_visible_in_its_own_leaf(case: Case, value: float):
    params, steps = case.example(STEPS)
    usual = case.run(params, steps)
    for leaf in case.shapes:
        spoiled_steps = list(steps)
        spoiled_steps[BAD_STEP] = _with_one_bad_element(steps[BAD_STEP], leaf, value)
        updates = case.run(params, spoiled_steps)
        if case.name not in HIDES:
            _check_visible(updates, usual, leaf)
        if case.tx.locality is not mfx.Locality.TREE:
            for other in case.shapes.keys() - {leaf}:
                assert all(
                    torch.equal(a[other], b[other]) for a, b in zip(updates, usual, strict=True)
                ), other


def _check_visible(updates: list[Tensors], usual: list[Tensors], leaf: str) -> None:
    # A transform that accumulates delays it by at most two steps.
    assert not all(_is_finite(step[leaf]) for step in updates[BAD_STEP : BAD_STEP + 3]), leaf
    for number in range(BAD_STEP, STEPS):
        update = updates[number][leaf]
        # The square of infinity stops one element, which may be the only one.
        if update.numel() > 1 and usual[number][leaf].any():
            assert update.isnan().any() or update.any(), (
                f"zeros without a word in {leaf} at step {number}"
            )


@pytest.mark.parametrize("case", EVERY_CASE)
def test_zero_gradients_give_finite_updates(case: Case):
    params, steps = case.example(2)
    zeros = {name: torch.zeros(shape) for name, shape in case.shapes.items()}
    for sequence in ([zeros] * 4, [*steps, zeros, zeros, steps[0]], [zeros, *steps]):
        for updates in case.run(params, sequence):
            for leaf, update in updates.items():
                assert _is_finite(update), leaf


def _is_exact(tx: mfx.Transform) -> bool:
    """Return True unless a state has few bits: rounding has no derivative."""
    return not any(
        isinstance(value, mfx.QuantizedDtype)
        for part in within(tx)
        for value in part.arguments.values()
    )


@pytest.mark.parametrize("case", [case for case in EVERY_CASE if _is_exact(case.values[0].tx)])
def test_derivatives_at_zero_gradients_are_finite(case: Case):
    params, steps = case.example(2, torch.float64)
    zeros = tree.map(torch.zeros_like, params)
    first = next(iter(case.shapes))
    one_is_zero = steps[0] | {first: zeros[first]}
    tx = mfx.as_tensors(widened(case.tx))

    def total(tx: mfx.Transform, sequence: list[Tensors]) -> torch.Tensor:
        updates = tree.tensors(updates_of(tx, params, sequence))
        return sum((update.square().sum() + update.sum() for update in updates), torch.zeros(()))

    for sequence in ([zeros, zeros], [*steps, zeros], [one_is_zero, one_is_zero, steps[1]]):
        derivatives = torch.func.grad(total, argnums=(0, 1) if tree.leaves(tx) else 1)(tx, sequence)
        assert all(map(_is_finite, tree.tensors(derivatives)))
