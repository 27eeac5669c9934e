"""The polar factor by SVD."""

import pytest
import torch
from hypothesis import given

from muonfx.polar import polar_factor

from .strategies import DTYPES, FULL_RANK, Problem, gap, problem, problems


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
