"""Magnitudes, zeros, non-finite entries, and shapes at the edge; the polar factor by SVD."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonfx.polar import PRESETS, orthogonalize, orthogonalize_many, polar_factor

from .strategies import DTYPES, FULL_RANK, Problem, coarse, gap, problem, problems


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [torch.float64, torch.float32, torch.bfloat16])
def test_no_magnitude_vanishes_or_overflows(held: torch.dtype, dtype: torch.dtype) -> None:
    x = coarse(problem(1, 12, 16, "clustered").x)
    x = x / x.abs().max()
    reference = orthogonalize(x)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4} if held == torch.float64 else {}
    beyond = [1e-305, 1e-300, 1e-100, 1e100, 1e300, 1.7e308] if held == torch.float64 else []
    for magnitude in (1e-38, 1e-30, 1e-20, 1e-7, 1e7, 1e20, 1e30, 1e38, *beyond):
        found = orthogonalize((x * magnitude).to(held), dtype=dtype)
        assert gap(found, reference) < tolerance.get(dtype, 0.2), magnitude


@pytest.mark.parametrize(("held", "magnitude"), [(torch.float64, 1e-320), (torch.float32, 1e-42)])
def test_subnormal_input_loses_only_the_bits_it_never_had(held: torch.dtype, magnitude: float) -> None:
    x = coarse(problem(1, 12, 16, "clustered").x)
    x = (x / x.abs().max() * magnitude).to(held)
    ulp = torch.finfo(held).smallest_normal * torch.finfo(held).eps
    reference = orthogonalize((x / ulp).double())  # the same matrix, in whole units of the last place
    assert gap(orthogonalize(x, dtype=torch.float64), reference) < (1e-11 if held == torch.float64 else 1e-6)
    assert gap(orthogonalize(x, dtype=torch.float16), reference) < 0.05


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [(torch.float32, torch.bfloat16), (torch.float64, torch.bfloat16), (torch.float64, torch.float32)],
)
@pytest.mark.parametrize("name", ["polar_express_5", "aol"])
def test_rounding_before_the_door_changes_no_bit(wide: torch.dtype, narrow: torch.dtype, name: str) -> None:
    # What lets an exchange in the compute dtype equal one in the dtype of the gradients.
    x = problem(6, 12, 17, "gaussian", (2,)).x.to(wide) * 1e-9
    y = orthogonalize(x, coefficients=name, dtype=narrow)
    assert torch.equal(orthogonalize(x.to(narrow).to(wide), coefficients=name, dtype=narrow), y)
    assert torch.equal(orthogonalize(x.to(narrow), coefficients=name, dtype=narrow), y.to(narrow))


def test_exponent_is_that_of_each_matrix() -> None:
    x = coarse(problem(2, 5, 7, batch=(3,)).x).float()
    scales = torch.tensor([2.0**-90, 1.0, 2.0**90]).reshape(3, 1, 1)
    assert torch.equal(orthogonalize(x * scales), orthogonalize(x))


@pytest.mark.parametrize("name", list(PRESETS))
def test_zero_gives_zero(name: str) -> None:
    for held, dtype in itertools.product(DTYPES, DTYPES):
        zero = torch.zeros(2, 3, 4, dtype=held)
        assert torch.equal(orthogonalize(zero, coefficients=name, dtype=dtype), zero)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["keller", "aol", "cubic"])
def test_a_non_finite_entry_stays_in_its_matrix(bad: float, dtype: torch.dtype, name: str) -> None:
    x = problem(4, 5, 6, batch=(3,)).x.float()
    clean = orthogonalize(x, coefficients=name, dtype=dtype)
    x[1, 2, 3] = bad
    found = orthogonalize(x, coefficients=name, dtype=dtype)
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[2], clean[2])
    assert not found[1].isfinite().all()
    many = orthogonalize_many(list(x), coefficients=name, dtype=dtype)
    assert many[0].isfinite().all()
    assert not many[1].isfinite().all()


@given(
    st.lists(st.integers(0, 3), max_size=2),
    st.integers(0, 33),
    st.integers(0, 33),
    st.sampled_from(DTYPES),
    st.sampled_from(["keller", "aol", "cubic"]),
)
def test_every_shape_comes_back(batch: list[int], m: int, n: int, dtype: torch.dtype, name: str) -> None:
    x = torch.randn(*batch, m, n, generator=torch.Generator().manual_seed(m + 100 * n)).to(dtype)
    for y in (orthogonalize(x, coefficients=name), orthogonalize_many([x], coefficients=name)[0], polar_factor(x)):
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert y.isfinite().all()
        assert y is not x


def test_meta_tensors_go_through() -> None:
    for y in (
        orthogonalize(torch.empty(3, 5, 4, device="meta")),
        *orthogonalize_many([torch.empty(5, 4, device="meta")]),
    ):
        assert y.device.type == "meta"
        assert y.shape[-2:] == (5, 4)


def test_autocast_changes_nothing() -> None:
    x = problem(0, 6, 9).x.float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = orthogonalize(x, dtype=torch.float32)
        (many,) = orthogonalize_many([x], dtype=torch.float32)
    assert torch.equal(inside, orthogonalize(x, dtype=torch.float32))
    assert torch.equal(many, inside)


@given(problems(FULL_RANK))
def test_full_rank_factor_is_the_product_of_the_singular_vectors(p: Problem) -> None:
    assert gap(polar_factor(p.x), p.u @ p.v.mT) < 1e-11


@given(problems(("deficient",)))
def test_low_rank_factor_leaves_the_null_space_out(p: Problem) -> None:
    kept = (p.s > 0).double()
    assert gap(polar_factor(p.x, rtol=1e-10), (p.u * kept.unsqueeze(-2)) @ p.v.mT) < 1e-12


def test_exact_low_rank_needs_no_rtol() -> None:
    x = torch.zeros(3, 4)
    x[0, 1] = 1e-30
    assert torch.equal(polar_factor(x), (x > 0).float())
    assert torch.equal(polar_factor(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_every_dtype_comes_back_rounded_once() -> None:
    x = problem(0, 6, 9, batch=(2,)).x
    for dtype in DTYPES:
        y = polar_factor(x.to(dtype))
        assert y.dtype == dtype
        assert torch.equal(y, polar_factor(x.to(dtype).double()).to(dtype))


def test_a_non_finite_matrix_gives_nan_and_spares_its_batch() -> None:
    x = problem(0, 4, 5, batch=(3,)).x
    clean = polar_factor(x)
    x[1, 0, 0] = torch.inf
    found = polar_factor(x)
    assert found[1].isnan().all()
    assert gap(found[[0, 2]], clean[[0, 2]]) < 1e-14


ORTHONORMAL = torch.linalg.qr(torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # what torch derives products with
@pytest.mark.parametrize(
    "x",
    [torch.eye(3).double(), ORTHONORMAL, ORTHONORMAL.mT, torch.diag(torch.tensor([2.0, 2.0, 1.0]).double())],
    ids=["identity", "tall", "wide", "two equal"],
)
def test_derivatives_exist_at_equal_singular_values(x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(polar_factor, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(polar_factor, x, check_fwd_over_rev=True)


def test_the_derivative_at_zero_is_zero() -> None:
    x = torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(polar_factor(x).sum(), x)
    assert torch.equal(found, torch.zeros_like(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # what torch derives products with
def test_at_low_rank_the_derivative_is_that_among_matrices_of_that_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, da, db = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in [(5, 2), (2, 4)] * 2)

    def factor(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return polar_factor(a @ b, rtol=1e-9)

    _, found = torch.func.jvp(factor, (a, b), (da, db))
    step = 1e-6
    expected = (factor(a + step * da, b + step * db) - factor(a - step * da, b - step * db)) / (2 * step)
    assert gap(found, expected) < 1e-7
