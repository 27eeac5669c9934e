"""Rounding pushes no singular value far beyond its band, whatever finite matrix comes in."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonfx.polar import (
    PRESETS,
    Coefficients,
    band,
    compute_dtype,
    explain,
    fit_coefficients,
    orthogonalize,
    with_safety,
)
from muonfx.polar.polynomials import polynomials
from muonfx.polar.stability import TOLERANCE, largest, stable_restarts

from .strategies import SCALINGS, gap, scaled

LOW = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FITTED = {
    f"fitted {steps}, {lower}, {safety}": fit_coefficients(steps, lower, safety=safety)
    for steps, lower in ((5, 1e-3), (8, 1e-4), (12, 0.1))
    for safety in (1.01, 1.02)
}
SAFER = {f"{name}, safety 1.05": with_safety(name, 1.05) for name in ("keller", "cans", "polar_express")}
SETS: dict[str, Coefficients] = {**PRESETS, **FITTED, **SAFER}


@functools.cache
def peak(name: str, steps: int | None) -> float:
    return band(SETS[name], steps=steps, points=20_001).peak


def excess(x: torch.Tensor, name: str, steps: int | None = None, **settings) -> float:
    """The largest singular value of a result over the largest one that its polynomials have."""
    y = orthogonalize(x, coefficients=SETS[name], steps=steps, **settings)
    if not y.isfinite().all():
        return torch.inf
    return torch.linalg.matrix_norm(y.double(), 2).max().item() / peak(name, steps)


@given(
    st.sampled_from(list(SETS)),
    st.sampled_from(SCALINGS),
    st.sampled_from(LOW),
    st.sampled_from(["standard", "gram", "auto"]),
    st.sampled_from([None, None, 1, 3, 7, 12]),
    st.tuples(st.integers(1, 24), st.integers(1, 40)),
    st.sampled_from([1.0, 3.0]),
    st.integers(0, 10**6),
)
def test_every_method_and_dtype_stays_in_the_band(name, kind, dtype, method, steps, shape, spread, seed) -> None:
    x = scaled(kind, seed, *shape, batch=8, spread=spread)
    assert excess(x, name, steps, dtype=dtype, method=method) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v4", "polar_express", "polar_express_5", "keller"])
@pytest.mark.parametrize("products", ["batched", "blocks"])
def test_large_matrices_with_scaled_rows_stay_in_the_band(name: str, products: str) -> None:
    # The largest singular value of deepseek_v4 was 1e15 for the first of these, of polar_express_5 1e5 for the second.
    for kind, spread in (("rows", 1.0), ("two rows", 1.0), ("parallel rows", 1.0)):
        x = scaled(kind, 0, 256, 1024, batch=2, spread=spread)
        for method in ("auto", "gram"):
            assert excess(x, name, dtype=torch.bfloat16, method=method, products=products) <= TOLERANCE


RAW = fit_coefficients(8, safety=1.0)


def test_auto_gives_polynomials_without_safety_a_wider_dtype() -> None:
    cpu, x = torch.device("cpu"), torch.ones(4, 6)
    for coefficients, wide in ((RAW, torch.float32), (fit_coefficients(8, 1e-4), torch.float64)):
        assert compute_dtype(torch.float32, cpu, coefficients=coefficients) == wide
        assert explain((4, 6), coefficients=coefficients).dtype == wide
        assert torch.linalg.matrix_norm(orthogonalize(x, coefficients=coefficients), 2) < 1.01
    assert "with_safety" in str(explain((4, 6), coefficients=fit_coefficients(8, 1e-4)))
    assert compute_dtype(torch.float32, cpu, coefficients="keller") == compute_dtype(torch.float32, cpu)


def test_a_given_dtype_in_which_the_set_may_diverge_is_warned_of() -> None:
    with pytest.warns(RuntimeWarning, match=r"in torch.bfloat16 these coefficients may diverge"):
        orthogonalize(torch.ones(4, 6), coefficients=RAW, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", list(SETS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bound_covers_what_is_found(name: str, dtype: torch.dtype) -> None:
    chosen = polynomials(SETS[name])
    cut = stable_restarts(chosen.steps, chosen.restarts, chosen.safety, dtype)
    assert largest(chosen.steps, cut, chosen.safety, dtype) <= TOLERANCE
    assert dtype != torch.float32 or cut == chosen.restarts
    for kind in ("diagonal", "rotated pairs", "parallel rows", "rows", "two rows"):
        x = scaled(kind, 0, 8, 20, batch=100)
        bound = largest(chosen.steps, cut, chosen.safety, dtype) + 2e-5  # both are found on grids
        assert excess(x, name, dtype=dtype, method="gram") <= bound, kind


def test_the_bound_knows_two_steps_in_bf16_to_be_too_many() -> None:
    for name in ("deepseek_v4", "polar_express", "polar_express_5", "cans", "quintic"):
        chosen = polynomials(name)
        assert largest(chosen.steps, chosen.restarts, chosen.safety, torch.bfloat16) == torch.inf
        assert largest(chosen.steps, chosen.restarts, chosen.safety, torch.float32) < 1.01


def test_small_rows_of_a_row_scaled_matrix_are_scaled_in_fp16() -> None:
    # Sums of squares of rows of 1e-4 vanish in fp16.
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(0)) * 10.0 ** -torch.arange(12.0)[:, None].div(2)
    found = orthogonalize(x, coefficients="aol", dtype=torch.float16)
    assert gap(found, orthogonalize(x, coefficients="aol", dtype=torch.float64)) < 0.05
