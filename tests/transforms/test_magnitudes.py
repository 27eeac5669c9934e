"""Gradients of any size: finite updates that are not zero, in the range that a transform declares."""

from typing import Literal

import pytest
import torch

import muonfx as mfx
from tests.public import NO_MATCH
from tests.transforms.tables import EVERY_CASE, Case

pytestmark = NO_MATCH

EXPONENTS = (-100, -66, -40, 40, 66, 100)
"""Powers of two, from 1e-30 to 1e30."""
SQUARES = {
    "scale_by_adam": (-100, 60),
    "scale_by_rms": (-100, 60),
    "scale_by_factored_rms": (-100, 60),
    "scale_by_prodigy": (-100, 60),
    "scale_by_shampoo": (-100, 60),
    "scale_by_namo": (-60, 66),  # it stores a larger square as the largest finite number
}
"""The exponents of transforms that store squares in fp32, as their docstrings say."""
ROUNDED_AWAY = {"keep_weight_norms", "radial_brake", "master_params", "schedule_free"}
"""The transforms that add the update to parameters, where a small one is lost to rounding."""


def _range_of(tx: mfx.Transform) -> tuple[int, int]:
    """Return the least and the largest exponent of gradients for which the docstrings promise nothing else."""
    ranges = [SQUARES.get(tx.name, EXPONENTS[:: len(EXPONENTS) - 1]), *map(_range_of, tx.children)]
    least = max(low for low, _ in ranges)
    if tx.name in ROUNDED_AWAY:
        least = max(least, 0)
    return least, min(high for _, high in ranges)


@pytest.mark.parametrize("case", EVERY_CASE)
def test_gradients_of_any_size_give_finite_updates_that_are_not_zero(case: Case):
    params, steps = case.example(2)
    usual = case.run(params, steps)
    least, largest = _range_of(case.tx)
    for exponent in EXPONENTS:
        if not least <= exponent <= largest:
            continue
        scaled = [{name: grad * 2.0**exponent for name, grad in grads.items()} for grads in steps]
        for updates, expected in zip(case.run(params, scaled), usual, strict=True):
            for name, update in updates.items():
                assert update.isfinite().all(), (exponent, name)
                assert update.any() or not expected[name].any(), (exponent, name)


@pytest.mark.parametrize(
    "tx", [mfx.normalize_neurons(eps=0.0), mfx.contrib.scale_by_namo(mfx.identity(), eps=0.0)]
)
def test_zeros_stay_zeros_without_eps(tx: mfx.Transform):
    grads = {"rows": torch.tensor([[3.0, 4.0], [0.0, 0.0]]), "zeros": torch.zeros(2, 3)}
    updates, _ = tx.update(grads, tx.init(grads))
    assert updates["rows"][0].all()
    assert not updates["rows"][1].any()
    assert not updates["zeros"].any()


@pytest.mark.parametrize(
    ("tx", "sign"),
    [
        (mfx.add_decayed_weights(0.1, cautious=True), -1),
        (mfx.subtract_decayed_weights(0.1, cautious=True), 1),
    ],
)
def test_cautious_decay_does_not_oppose_tiny_updates(tx: mfx.Transform, sign: int):
    params = {"w": torch.tensor([1e-30, -1e-30])}
    opposed = {"w": sign * params["w"]}
    assert torch.equal(tx.update(opposed, tx.init(params), params)[0]["w"], opposed["w"])


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e19, 1e30, 3e38])
def test_clipping_by_the_rms_of_a_leaf_holds_at_every_size(size: float):
    tx = mfx.clip_by_block_rms(0.5)
    updates, _ = tx.update({"w": torch.full((3, 4), size)}, mfx.core.EmptyState())
    torch.testing.assert_close(updates["w"], torch.full((3, 4), min(size, 0.5)))


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e150, 1e160, 1e300])
def test_clipping_by_the_norm_of_all_leaves_holds_at_every_size(size: float):
    grads = {"w": torch.full((3, 4), size, dtype=torch.float64)}
    updates, _ = mfx.clip_by_global_norm(0.5).update(grads, mfx.core.EmptyState())
    expected = torch.full_like(grads["w"], min(size, 0.5 / 12**0.5))
    torch.testing.assert_close(updates["w"], expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("factors", ["shampoo", "kl"])
@pytest.mark.parametrize("size", [1e19, 1e30])
def test_a_huge_gradient_leaves_no_nan_in_soap(factors: Literal["shampoo", "kl"], size: float):
    tx = mfx.contrib.scale_by_soap(factors=factors)
    grads = {"w": torch.randn(4, 6)}
    state = tx.init(grads)
    for scale in (1.0, 1.0, size, 1.0, 1.0):
        updates, state = tx.update({"w": scale * grads["w"]}, state)
        assert updates["w"].isfinite().all()
    for leaf in (state.mu, state.nu, state.left, state.right, state.left_basis, state.right_basis):
        assert leaf["w"].isfinite().all()
