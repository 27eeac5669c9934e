"""Which dtype the products run in, and that rounding pushes no singular value far beyond its band."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

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
    hardware,
    orthogonalize,
    policy,
    with_safety,
)
from muonfx.polar.policy import SUPPORTED
from muonfx.polar.polynomials import polynomials
from muonfx.polar.stability import TOLERANCE, growth_by_rounding, stable_restarts

from .strategies import SCALINGS, gap, scaled

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The features that CPU, build and CUDA device report."""
    reported: dict[str, Any] = {
        "avx512": False,
        "amx": False,
        "onednn": False,
        "capability": (8, 0),
    }
    monkeypatch.setattr(
        torch.cpu, "_is_avx512_bf16_supported", lambda: reported["avx512"], raising=False
    )
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: reported["amx"], raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: reported["onednn"])
    monkeypatch.setattr(policy, "cuda_capability", lambda index: reported["capability"])
    yield reported
    forget()


def forget() -> None:
    hardware.cpu_has_bf16.cache_clear()
    hardware.cpu_has_amx.cache_clear()


def test_an_explicit_dtype_is_taken_and_float64_stays() -> None:
    for held, dtype in itertools.product(SUPPORTED, SUPPORTED):
        assert compute_dtype(held, CPU, dtype) is dtype
    for device in ("cpu", "cuda", "mps", "meta"):
        assert compute_dtype(torch.float64, torch.device(device)) is torch.float64
    assert compute_dtype(torch.bfloat16, torch.device("meta")) is torch.float32


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cpu_takes_bf16_with_instructions_and_kernels(
    machine: dict[str, Any], held: torch.dtype
) -> None:
    for avx512, amx, onednn in itertools.product((False, True), repeat=3):
        machine.update(avx512=avx512, amx=amx, onednn=onednn)
        forget()
        assert compute_dtype(held, CPU) is (
            torch.bfloat16 if (avx512 or amx) and onednn else torch.float32
        )


def test_a_torch_without_these_queries_has_no_bf16(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for query in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, query)
    machine.update(onednn=True)
    forget()
    assert compute_dtype(torch.float32, CPU) is torch.float32


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)],
)
def test_cuda_takes_bf16_from_capability_8(
    machine: dict[str, Any], capability: tuple[int, int], expected: torch.dtype
) -> None:
    machine["capability"] = capability
    assert compute_dtype(torch.float32, torch.device("cuda", 0)) is expected
    assert compute_dtype(torch.float16, torch.device("cuda")) is expected


def test_auto_is_what_orthogonalize_uses(machine: dict[str, Any]) -> None:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    for avx512, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        machine.update(avx512=avx512, onednn=True)
        forget()
        assert torch.equal(orthogonalize(x), orthogonalize(x, dtype=dtype))
        assert explain((8, 12)).dtype == dtype


def test_halving_never_pays_on_tiles_and_the_gram_form_does(machine: dict[str, Any]) -> None:
    """8 of 1024 x 1024 took 131 ms batched and 193 by blocks; 4 of 512 x 2048 26 ms in the Gram form, 29 without."""
    machine.update(amx=True, onednn=True)
    forget()
    shapes = {
        (512, 512): "standard",
        (1024, 1024): "standard",
        (512, 2048): "gram",
        (1024, 4096): "gram",
    }
    for shape, method in shapes.items():
        found = explain(shape, dtype=torch.bfloat16)
        assert (found.products, found.small_products, found.method) == (
            "batched",
            "batched",
            method,
        ), shape


def test_an_unknown_device_takes_what_loses_least() -> None:
    found = explain((512, 512), "xpu", coefficients="keller", dtype=torch.float16)
    assert (found.products, found.method) == ("batched", "standard")


LOW = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FITTED = {
    f"fitted {steps}, {lower}, {safety}": fit_coefficients(steps, lower, safety=safety)
    for steps, lower in ((5, 1e-3), (8, 1e-4), (12, 0.1))
    for safety in (1.01, 1.02)
}
SAFER = {
    f"{name}, safety 1.05": with_safety(name, 1.05) for name in ("keller", "cans", "polar_express")
}
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
def test_every_method_and_dtype_stays_in_the_band(
    name, kind, dtype, method, steps, shape, spread, seed
) -> None:
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
            assert (
                excess(x, name, dtype=torch.bfloat16, method=method, products=products) <= TOLERANCE
            )


RAW = fit_coefficients(8, safety=1.0)


def test_auto_gives_polynomials_without_safety_a_wider_dtype() -> None:
    cpu, x = torch.device("cpu"), torch.ones(4, 6)
    for coefficients, wide in ((RAW, torch.float32), (fit_coefficients(8, 1e-4), torch.float64)):
        assert compute_dtype(torch.float32, cpu, coefficients=coefficients) == wide
        assert explain((4, 6), coefficients=coefficients).dtype == wide
        assert torch.linalg.matrix_norm(orthogonalize(x, coefficients=coefficients), 2) < 1.01
    assert "with_safety" in str(explain((4, 6), coefficients=fit_coefficients(8, 1e-4)))
    assert compute_dtype(torch.float32, cpu, coefficients="keller") == compute_dtype(
        torch.float32, cpu
    )


def test_a_given_dtype_in_which_the_set_may_diverge_is_warned_of() -> None:
    with pytest.warns(RuntimeWarning, match=r"in torch.bfloat16 these coefficients may diverge"):
        orthogonalize(torch.ones(4, 6), coefficients=RAW, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", list(SETS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bound_covers_what_is_found(name: str, dtype: torch.dtype) -> None:
    chosen = polynomials(SETS[name])
    cut = stable_restarts(chosen.steps, chosen.restarts, chosen.safety, dtype)
    assert growth_by_rounding(chosen.steps, cut, chosen.safety, dtype) <= TOLERANCE
    assert dtype != torch.float32 or cut == chosen.restarts
    for kind in ("diagonal", "rotated pairs", "parallel rows", "rows", "two rows"):
        x = scaled(kind, 0, 8, 20, batch=100)
        # Both are found on grids.
        bound = growth_by_rounding(chosen.steps, cut, chosen.safety, dtype) + 2e-5
        assert excess(x, name, dtype=dtype, method="gram") <= bound, kind


def test_small_rows_of_a_row_scaled_matrix_are_scaled_in_fp16() -> None:
    # Sums of squares of rows of 1e-4 vanish in fp16.
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(0)) * 10.0 ** -torch.arange(
        12.0
    )[:, None].div(2)
    found = orthogonalize(x, coefficients="aol", dtype=torch.float16)
    assert gap(found, orthogonalize(x, coefficients="aol", dtype=torch.float64)) < 0.05
