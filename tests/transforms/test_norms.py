"""Updates by the size of what they belong to: laws of the trust ratio, of the tree's norm, and of centered rows."""

import pytest
import torch
from torch import Tensor

import muonfx as mfx

SHAPES = {"w": (4, 6), "b": (3,), "k": (2, 3, 5)}


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def updated(tx: mfx.Transform, grads: dict[str, Tensor], params: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    return tx.update(grads, tx.init(grads), params)[0]


@pytest.mark.parametrize("tx", [mfx.scale_by_trust_ratio(), mfx.normalize_by_update_norm(eps=0.0)], ids=repr)
@pytest.mark.parametrize("exponent", [-100, -30, 1, 60, 100])
def test_updates_of_any_size_give_the_same(tx: mfx.Transform, exponent: int):
    grads, params = drawn(1), drawn(0)
    scaled = {name: leaf * 2.0**exponent for name, leaf in grads.items()}
    once, again = updated(tx, grads, params), updated(tx, scaled, params)
    assert all(torch.equal(once[name], again[name]) for name in grads)


@pytest.mark.parametrize("size", [1e-150, 1.0, 1e150])
def test_norms_are_right_at_any_size(size: float):
    grads = {name: leaf * size for name, leaf in drawn(1, torch.float64).items()}
    params = drawn(0, torch.float64)
    for name, leaf in updated(mfx.scale_by_trust_ratio(trust_coefficient=0.5), grads, params).items():
        torch.testing.assert_close(leaf.norm(), 0.5 * params[name].norm())
    updates = updated(mfx.normalize_by_update_norm(-3.0, 0.0), grads)
    torch.testing.assert_close(mfx.global_norm(updates), torch.tensor(3.0, dtype=torch.float64))


def test_a_leaf_without_a_norm_keeps_its_updates():
    grads, params = drawn(1), drawn(0)
    grads["b"], params["w"] = torch.zeros(3), torch.zeros(4, 6)
    updates = updated(mfx.scale_by_trust_ratio(), grads, params)
    assert torch.equal(updates["b"], grads["b"])
    assert torch.equal(updates["w"], grads["w"])
    assert not torch.equal(updates["k"], grads["k"])


def test_no_updates_at_all_stay_none_at_all():
    zeros = {name: torch.zeros_like(leaf) for name, leaf in drawn(0).items()}
    for eps in (0.0, 1e-6):
        assert not any(leaf.any() for leaf in updated(mfx.normalize_by_update_norm(eps=eps), zeros).values())


def test_nan_in_a_norm_is_seen():
    grads, params = drawn(1), drawn(0)
    params["w"][0, 0] = torch.nan
    updates = updated(mfx.scale_by_trust_ratio(), grads, params)
    assert updates["w"].isnan().all()
    assert not updates["k"].isnan().any()


def test_rows_have_no_mean_and_centering_again_changes_nothing():
    once = updated(mfx.centralize(), drawn(1, torch.float64))
    again = updated(mfx.centralize(), once)
    for name in ("w", "k"):
        assert once[name].flatten(1).mean(1).abs().max() < 1e-15
        torch.testing.assert_close(again[name], once[name], rtol=0, atol=1e-15)
    assert torch.equal(once["b"], drawn(1, torch.float64)["b"])


def test_a_constant_added_to_a_row_is_taken_away():
    grads = drawn(1, torch.float64)
    moved = {name: leaf + 3.0 if leaf.ndim > 1 else leaf for name, leaf in grads.items()}
    torch.testing.assert_close(updated(mfx.centralize(), moved), updated(mfx.centralize(), grads))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mfx.scale_by_trust_ratio(-1.0), "min_norm must be at least 0, found -1.0"),
        (lambda: mfx.scale_by_trust_ratio(trust_coefficient=-1.0), "trust_coefficient must be at least 0"),
        (lambda: mfx.normalize_by_update_norm(eps=-1.0), "eps must be at least 0"),
        (lambda: updated(mfx.scale_by_trust_ratio(), drawn(0)), "scale_by_trust_ratio needs the parameters"),
    ],
)
def test_wrong_arguments_are_named(make: object, message: str):
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
