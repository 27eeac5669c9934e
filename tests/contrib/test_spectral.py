"""Clipped singular values equal those of an SVD, and wrong arguments of the family are named."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx


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
    tx = mfx.contrib.clip_singular_values(1.0)
    matrix = with_spectrum(values, *shape).to(dtype)
    found = tx.update({"w": matrix}, tx.init({"w": matrix}))[0]["w"]
    assert found.dtype == dtype
    error = torch.linalg.matrix_norm(found.double() - with_spectrum(values.clamp(max=1.0), *shape), 2)
    assert error < bound * (100 if dtype == torch.bfloat16 else 1)  # the input itself is rounded, at its largest value


@given(st.integers(-120, 120), st.sampled_from([(4, 3), (3, 4), (2, 4, 3)]), st.integers(0, 99))
def test_no_singular_value_is_above_the_threshold_whatever_the_matrix_size(exponent: int, shape: Any, seed: int):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    tx = mfx.contrib.clip_singular_values(0.5, view=mfx.MatrixView(dims=((-2,), (-1,))))
    found = torch.linalg.svdvals(tx.update({"w": matrix}, tx.init({"w": matrix}))[0]["w"].double())
    assert found.max() <= 0.5 * 1.01


def test_a_matrix_below_the_threshold_passes_as_it_is():
    matrix = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)) * 1e-20
    tx = mfx.contrib.clip_singular_values(1.0)
    assert torch.equal(tx.update({"w": matrix}, tx.init({"w": matrix}))[0]["w"], matrix)


def test_a_dual_norm_is_that_of_the_inner_direction():
    grads = {"w": torch.tensor([[1e-30, -2e-30], [0.0, 3e-30]])}
    tx = mfx.contrib.scale_by_dual_norm(mfx.scale_by_sign())
    torch.testing.assert_close(tx.update(grads, tx.init(grads))[0]["w"], 6e-30 * grads["w"].sign(), rtol=1e-6, atol=0)
