"""Norms of all kinds hold at any size, and NaN stays where it is."""

from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.testing.violation import is_close

EACH: dict[str, Any] = {
    "rows": mfx.normalize_rows(),
    "columns": mfx.normalize_columns(),
    "matrices": mfx.normalize_matrices(),
    "leaves": mfx.normalize_leaves(),
    "sphere": mfx.match_weight_norms(),
}


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("exponent", [-120, 60, 120])
def test_norms_are_the_same_at_any_size(name: str, exponent: int):
    generator = torch.Generator().manual_seed(0)
    params, grads = ({"w": torch.randn(4, 3, generator=generator)} for _ in range(2))
    tx, state = EACH[name], EACH[name].init(params)
    once = tx.update(grads, state, params)[0]["w"]
    assert torch.equal(tx.update({"w": grads["w"] * 2.0**exponent}, state, params)[0]["w"], once)
    assert not tx.update({"w": torch.zeros(4, 3)}, state, params)[0]["w"].any()


@pytest.mark.parametrize("exponent", [-120, 120])
def test_weights_keep_their_norm_at_any_size(exponent: int):
    generator = torch.Generator().manual_seed(0)
    params, grads = ({"w": torch.randn(4, 3, generator=generator) * 2.0**exponent} for _ in range(2))
    tx = mfx.keep_weight_norms()
    after = mfx.apply_updates(params, tx.update(grads, tx.init(params), params)[0])["w"]
    assert is_close((after * 2.0**-exponent).norm(), (params["w"] * 2.0**-exponent).norm(), 1e-6)
    assert not is_close(after * 2.0**-exponent, params["w"] * 2.0**-exponent, 0.1)


@pytest.mark.parametrize("name", ["rows", "columns", "matrices", "sphere"])
def test_nan_stays_in_its_matrix(name: str):
    grads = {"w": torch.ones(2, 3, 4)}
    grads["w"][1, 1, 1] = torch.nan
    tx = EACH[name].replace(view=mfx.MatrixView(((-2,), (-1,))))
    out = tx.update(grads, tx.init(grads), {"w": torch.ones(2, 3, 4)})[0]["w"]
    assert out[0].isfinite().all()
    assert out[1].isnan().any()
