"""The laws of the polar iteration, on matrices with chosen spectra; many matrices at once equal one after another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import _muon

from muonfx.polar import PRESETS, band, orthogonalize, orthogonalize_many, polar_factor, scalar_polynomial

from .strategies import (
    DTYPES,
    TOLERANCE,
    Problem,
    coarse,
    gap,
    orthogonal,
    problem,
    problems,
    relative,
    steepest,
    tolerance,
)

# Scaling the rows does not commute with rotations, so `aol` is held to the other laws only.
EQUIVARIANT = tuple(name for name in PRESETS if name != "aol")
sets = st.sampled_from(EQUIVARIANT)
dtypes = st.sampled_from(DTYPES)
wide_dtypes = st.sampled_from([torch.float64, torch.float32])


@given(problems(), sets)
def test_singular_values_are_those_of_the_scalar_polynomial(p: Problem, name: str) -> None:
    found = torch.linalg.svdvals(orthogonalize(p.x, coefficients=name))
    expected = scalar_polynomial(name, p.s).sort(dim=-1, descending=True).values
    assert gap(found, expected) < 10 * tolerance(name, torch.float64)


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "aol"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_band_holds_in_low_precision(name: str, dtype: torch.dtype) -> None:
    p = problem(3, 24, 32, "clustered", (2,))
    low, _, peak = band(name, p.s.min().item())
    found = torch.linalg.svdvals(orthogonalize(p.x.to(dtype), coefficients=name, dtype=dtype).double())
    margin = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]
    assert found.min() > low - margin
    assert found.max() < peak + margin


@given(problems(), sets, wide_dtypes)
def test_error_against_a_float64_run_of_the_same_polynomial(p: Problem, name: str, dtype: torch.dtype) -> None:
    x = p.x.to(dtype)
    exact = orthogonalize(x.double(), coefficients=name)
    assert relative(orthogonalize(x, coefficients=name, dtype=dtype), exact) <= tolerance(name, dtype)


@given(problems(), sets, wide_dtypes, st.integers(0, 10**6))
def test_rotations_pass_through(p: Problem, name: str, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    m, n = p.x.shape[-2:]
    left, right = orthogonal(m, m, generator=generator), orthogonal(n, n, generator=generator)
    x = p.x.to(dtype)
    inner = left @ orthogonalize(x, coefficients=name, dtype=dtype).double() @ right.mT
    outer = orthogonalize((left @ x.double() @ right.mT).to(dtype), coefficients=name, dtype=dtype)
    assert relative(outer, inner) < 4 * tolerance(name, dtype)


@given(problems(), st.sampled_from(list(PRESETS)), dtypes)
def test_negation_is_exact_and_the_input_has_a_positive_inner_product(
    p: Problem, name: str, dtype: torch.dtype
) -> None:
    x = p.x.to(dtype)
    y = orthogonalize(x, coefficients=name, dtype=dtype)
    assert torch.equal(orthogonalize(-x, coefficients=name, dtype=dtype), -y)
    assert ((x.double() * y.double()).sum((-2, -1)) > 0).all()


@given(
    problems(),
    st.sampled_from(list(PRESETS)),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    dtypes,
    st.integers(-100, 100),
)
def test_power_of_two_scale_is_exact(p: Problem, name: str, held: torch.dtype, dtype: torch.dtype, k: int) -> None:
    x = coarse(p.x).to(held)
    scaled = x * 2.0**k
    assert torch.equal(scaled / 2.0**k, x)
    y = orthogonalize(x, coefficients=name, dtype=dtype)
    assert torch.equal(orthogonalize(scaled, coefficients=name, dtype=dtype), y)


@given(problems(), st.sampled_from(list(PRESETS)), wide_dtypes, st.randoms())
def test_permutations_and_transposes_pass_through(p: Problem, name: str, dtype: torch.dtype, random) -> None:
    m, n = p.x.shape[-2:]
    rows, columns = random.sample(range(m), m), random.sample(range(n), n)
    x = p.x.to(dtype)
    y = orthogonalize(x, coefficients=name, dtype=dtype)
    z = orthogonalize(x[..., rows, :][..., columns], coefficients=name, dtype=dtype)
    assert relative(z, y[..., rows, :][..., columns]) < 4 * tolerance(name, dtype)
    if name != "aol":
        assert relative(orthogonalize(x.mT, coefficients=name, dtype=dtype).mT, y) < tolerance(name, dtype)


@given(problems(("geometric", "clustered", "deficient")))  # a Gaussian matrix may need more than 14 steps
def test_long_schedule_is_the_polar_factor(p: Problem) -> None:
    y = orthogonalize(p.x, coefficients="polar_express", steps=14)
    assert gap(y, polar_factor(p.x, rtol=1e-9)) < 1e-9


@given(problems(), st.sampled_from(list(PRESETS)), dtypes, st.one_of(st.just("auto"), dtypes))
def test_input_is_left_alone_and_output_is_like_it(p: Problem, name: str, held: torch.dtype, dtype) -> None:
    x = p.x.to(held)
    copy, version = x.clone(), x._version
    y = orthogonalize(x, coefficients=name, dtype=dtype)
    assert torch.equal(x, copy)
    assert x._version == version
    assert (y.shape, y.dtype, y.device, y.is_contiguous()) == (x.shape, x.dtype, x.device, True)
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(y, orthogonalize(x, coefficients=name, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["keller", "quintic", "polar_express_5"])
@pytest.mark.parametrize("shape", [(8, 12), (33, 16), (64, 128)])
def test_stated_tolerances_hold_on_gaussian_matrices(shape: tuple[int, int], name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    m, n = shape
    x = torch.randn(2, m, n, dtype=torch.float64, generator=generator).to(dtype)
    left, right = orthogonal(m, m, generator=generator), orthogonal(n, n, generator=generator)

    def run(z: torch.Tensor) -> torch.Tensor:
        return orthogonalize(z.to(dtype), coefficients=name, dtype=dtype).double()

    y = run(x)
    bound = TOLERANCE[dtype]
    assert gap(y, orthogonalize(x.double(), coefficients=name)) < bound
    assert gap(run(x.mT).mT, y) < bound
    assert gap(run(left @ x.double() @ right.mT), left @ y @ right.mT) < bound
    assert gap(run(x.double() * 3.7), y) < bound
    assert gap(torch.stack([run(z) for z in x]), y) < bound


@pytest.mark.parametrize("name", list(PRESETS))
def test_no_set_amplifies_rounding_without_bound(name: str) -> None:
    # One part in 256 (bf16) too much at every step: CANS without its safety factor gives 1e60.
    s = torch.linspace(0, 1, 100_001, dtype=torch.float64) * (1 + 2.0**-8) / PRESETS[name].norm_safety
    for step in PRESETS[name].steps:
        s = scalar_polynomial([step], s) * (1 + 2.0**-8)
    assert s.abs().max() < 1.4
    assert steepest(name) < 1e5


def test_more_steps_repeat_the_last_polynomial_and_fewer_take_the_first() -> None:
    x = problem(0, 6, 9).x
    a, b = (3.4445, -4.7750, 2.0315), (1.5, -0.5)
    assert torch.equal(orthogonalize(x, coefficients=[a, b], steps=4), orthogonalize(x, coefficients=[a, b, b, b]))
    assert torch.equal(orthogonalize(x, coefficients=[a, b], steps=1), orthogonalize(x, coefficients=[a]))


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (12, 12)])
def test_row_scaling_bounds_the_spectral_norm_and_keeps_zero_rows(shape: tuple[int, int]) -> None:
    x = problem(5, *shape, "gaussian").x
    narrow = 0 if shape[0] <= shape[1] else 1
    x.select(narrow, 1).zero_()
    y = orthogonalize(x, coefficients="aol")
    assert y.isfinite().all()
    assert (y.select(narrow, 1) == 0).all()
    assert torch.linalg.svdvals(y).max() < band("aol").peak + 1e-6


KELLER = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("shape", [(16, 16), (32, 64), (64, 32), (128, 128)])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_keller_in_bf16_is_that_of_torch_muon(shape: tuple[int, int], held: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(held)
    theirs = _muon._zeropower_via_newtonschulz(x, KELLER, 5, 1e-7).double()
    ours = orthogonalize(x, coefficients="keller", dtype=torch.bfloat16).double()
    exact = orthogonalize(x.double(), coefficients="keller")
    assert (ours - theirs).abs().max() < 0.1
    assert (ours - theirs).norm() / theirs.norm() < 0.05
    # As near to the polynomial without rounding as torch's own, which rounds the norm too.
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()


shapes = st.tuples(
    st.lists(st.integers(0, 3), max_size=2), st.sampled_from([0, 1, 5, 8]), st.sampled_from([0, 1, 5, 8])
)


def tensors(shapes: list, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [
        torch.randn(*batch, m, n, dtype=torch.float64, generator=generator).to(dtype)
        for (batch, m, n), dtype in zip(shapes, dtypes, strict=False)
    ]


@given(
    st.lists(shapes, max_size=8),
    st.lists(st.sampled_from(DTYPES), min_size=8, max_size=8),
    st.sampled_from(list(PRESETS)),
    st.sampled_from([None, 1, 3000]),
)
def test_many_equals_a_loop(shapes: list, dtypes: list[torch.dtype], name: str, scratch: int | None) -> None:
    xs = tensors(shapes, dtypes)
    copies, versions = [x.clone() for x in xs], [x._version for x in xs]
    found = orthogonalize_many(xs, coefficients=name, dtype=torch.float64, max_scratch_bytes=scratch)
    assert len(found) == len(xs)
    for y, x, copy, version in zip(found, xs, copies, versions, strict=True):
        one = orthogonalize(x, coefficients=name, dtype=torch.float64)
        assert (y.shape, y.dtype, x._version) == (x.shape, x.dtype, version)
        # Another order of summation, then one rounding to the dtype of x.
        slack = 0 if x.dtype == torch.float64 else torch.finfo(x.dtype).eps
        assert gap(y, one) <= 2 * tolerance(name, torch.float64) + slack
        assert torch.equal(x, copy)
        assert x.numel() == 0 or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_equals_a_loop_in_low_precision(dtype: torch.dtype) -> None:
    xs = tensors([((), 16, 24), ((), 24, 16), ((2,), 16, 24), ((), 16, 16)], [torch.float32] * 4)
    for y, x in zip(orthogonalize_many(xs, dtype=dtype), xs, strict=True):
        assert gap(y, orthogonalize(x, dtype=dtype)) < {torch.float32: 2e-5, torch.float16: 0.03}.get(dtype, 0.2)


def test_one_group_is_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[torch.Size] = []
    real = torch.bmm

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products.append(a.shape)
        return real(a, b)

    monkeypatch.setattr(torch, "bmm", counted)
    xs = tensors([((), 4, 6), ((), 6, 4), ((3,), 4, 6), ((0,), 4, 6), ((2, 2), 6, 4)], [torch.float32] * 5)
    orthogonalize_many(xs, steps=1)
    assert products == [(9, 4, 6)]
    products.clear()
    orthogonalize_many(xs, steps=1, max_scratch_bytes=1)
    assert products == [(1, 4, 6)] * 9


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 8, 12), (256, 300), (300, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_memory_changes_no_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape)
    gaps = torch.zeros([2 * side for side in shape])[(slice(None, None, 2),) * x.ndim].copy_(x)
    for other in (x.mT.contiguous().mT, gaps, x.unsqueeze(1).expand(shape[0], 1, *shape[1:]).squeeze(1)):
        assert torch.equal(orthogonalize(other, dtype=dtype), orthogonalize(x, dtype=dtype))
        assert torch.equal(orthogonalize_many([other], dtype=dtype)[0], orthogonalize_many([x], dtype=dtype)[0])
