"""The polar factor by SVD."""

from __future__ import annotations

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
