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


def test_a_leaf_without_a_norm_keeps_its_updates():
    grads, params = drawn(1), drawn(0)
    grads["b"], params["w"] = torch.zeros(3), torch.zeros(4, 6)
    updates = updated(mfx.scale_by_trust_ratio(), grads, params)
    assert torch.equal(updates["b"], grads["b"])
    assert torch.equal(updates["w"], grads["w"])
    assert not torch.equal(updates["k"], grads["k"])


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
