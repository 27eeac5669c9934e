"""Clipped singular values equal those of an SVD; norms of all kinds hold at any size, and NaN stays where it is."""

from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx.testing.violation import is_close


def with_spectrum(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(side, len(values), generator=generator, dtype=torch.float64))[0]
        for side in (rows, columns)
    )
    return (left * values) @ right.T


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (8, 8)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 2e-4), (torch.float32, 2e-4), (torch.bfloat16, 2e-2)])
def test_singular_values_are_clipped(shape: tuple[int, int], dtype: torch.dtype, bound: float):
    values = torch.logspace(2, -6, 8, dtype=torch.float64)
    tx = mfx.clip_singular_values(1.0)
    matrix = with_spectrum(values, *shape).to(dtype)
    found = tx.update({"w": matrix}, tx.init({"w": matrix}))[0]["w"]
    assert found.dtype == dtype
    error = torch.linalg.matrix_norm(found.double() - with_spectrum(values.clamp(max=1.0), *shape), 2)
    assert error < bound * (100 if dtype == torch.bfloat16 else 1)  # the input itself is rounded, at its largest value


@pytest.mark.parametrize(("top", "steps", "bound"), [(3, 10, 2e-3), (4, 15, 1e-2)])
def test_more_steps_clip_larger_singular_values(top: int, steps: int, bound: float):
    values = torch.logspace(top, -4, 64, dtype=torch.float64)
    tx = mfx.clip_singular_values(1.0, steps=steps)
    matrix = {"w": with_spectrum(values, 64, 200).float()}
    found = tx.update(matrix, tx.init(matrix))[0]["w"].double()
    assert torch.linalg.matrix_norm(found - with_spectrum(values.clamp(max=1.0), 64, 200), 2) < bound


def test_a_matrix_below_the_threshold_passes_as_it_is():
    matrix = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)) * 1e-20
    tx = mfx.clip_singular_values(1.0)
    assert torch.equal(tx.update({"w": matrix}, tx.init({"w": matrix}))[0]["w"], matrix)


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
    dims = {"dims": ((-2,), (-1,))}
    tx = EACH[name].replace(**dims)
    out = tx.update(grads, tx.init(grads), {"w": torch.ones(2, 3, 4)})[0]["w"]
    assert out[0].isfinite().all()
    assert out[1].isnan().any()


def test_a_dual_norm_is_that_of_the_inner_direction():
    grads = {"w": torch.tensor([[1e-30, -2e-30], [0.0, 3e-30]])}
    tx = mfx.scale_by_dual_norm(mfx.scale_by_sign())
    torch.testing.assert_close(tx.update(grads, tx.init(grads))[0]["w"], 6e-30 * grads["w"].sign(), rtol=1e-6, atol=0)
