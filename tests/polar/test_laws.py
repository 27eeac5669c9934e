"""The laws of the polar iteration, also at extreme magnitudes and shapes; the polar factor by SVD."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import _muon

from muonfx.polar import (
    PRESETS,
    band,
    orthogonalize,
    orthogonalize_many,
    polar_factor,
    scalar_polynomial,
)

from .strategies import (
    DTYPES,
    FULL_RANK,
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
    found = torch.linalg.svdvals(
        orthogonalize(p.x.to(dtype), coefficients=name, dtype=dtype).double()
    )
    margin = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]
    assert found.min() > low - margin
    assert found.max() < peak + margin


@given(problems(), sets, wide_dtypes)
def test_error_against_a_float64_run_of_the_same_polynomial(
    p: Problem, name: str, dtype: torch.dtype
) -> None:
    x = p.x.to(dtype)
    exact = orthogonalize(x.double(), coefficients=name)
    assert relative(orthogonalize(x, coefficients=name, dtype=dtype), exact) <= tolerance(
        name, dtype
    )


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
def test_power_of_two_scale_is_exact(
    p: Problem, name: str, held: torch.dtype, dtype: torch.dtype, k: int
) -> None:
    x = coarse(p.x).to(held)
    scaled = x * 2.0**k
    assert torch.equal(scaled / 2.0**k, x)
    y = orthogonalize(x, coefficients=name, dtype=dtype)
    assert torch.equal(orthogonalize(scaled, coefficients=name, dtype=dtype), y)


@given(problems(), st.sampled_from(list(PRESETS)), wide_dtypes, st.randoms())
def test_permutations_and_transposes_pass_through(
    p: Problem, name: str, dtype: torch.dtype, random
) -> None:
    m, n = p.x.shape[-2:]
    rows, columns = random.sample(range(m), m), random.sample(range(n), n)
    x = p.x.to(dtype)
    y = orthogonalize(x, coefficients=name, dtype=dtype)
    z = orthogonalize(x[..., rows, :][..., columns], coefficients=name, dtype=dtype)
    assert relative(z, y[..., rows, :][..., columns]) < 4 * tolerance(name, dtype)
    if name != "aol":
        assert relative(orthogonalize(x.mT, coefficients=name, dtype=dtype).mT, y) < tolerance(
            name, dtype
        )


# A Gaussian matrix may need more than 14 steps.
@given(problems(("geometric", "clustered", "deficient")))
def test_long_schedule_is_the_polar_factor(p: Problem) -> None:
    y = orthogonalize(p.x, coefficients="polar_express", steps=14)
    assert gap(y, polar_factor(p.x, rtol=1e-9)) < 1e-9


@given(problems(), st.sampled_from(list(PRESETS)), dtypes, st.one_of(st.just("auto"), dtypes))
def test_input_is_left_alone_and_output_is_like_it(
    p: Problem, name: str, held: torch.dtype, dtype
) -> None:
    x = p.x.to(held)
    copy, version = x.clone(), x._version
    y = orthogonalize(x, coefficients=name, dtype=dtype)
    assert torch.equal(x, copy)
    assert x._version == version
    assert (y.shape, y.dtype, y.device, y.is_contiguous()) == (x.shape, x.dtype, x.device, True)
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(y, orthogonalize(x, coefficients=name, dtype=dtype))


@pytest.mark.parametrize("name", list(PRESETS))
def test_no_set_amplifies_rounding_without_bound(name: str) -> None:
    # One part in 256 (bf16) too much at every step: CANS without its safety factor gives 1e60.
    s = (
        torch.linspace(0, 1, 100_001, dtype=torch.float64)
        * (1 + 2.0**-8)
        / PRESETS[name].norm_safety
    )
    for step in PRESETS[name].steps:
        s = scalar_polynomial([step], s) * (1 + 2.0**-8)
    assert s.abs().max() < 1.4
    assert steepest(name) < 1e5


def test_more_steps_repeat_the_last_polynomial_and_fewer_take_the_first() -> None:
    x = problem(0, 6, 9).x
    a, b = (3.4445, -4.7750, 2.0315), (1.5, -0.5)
    assert torch.equal(
        orthogonalize(x, coefficients=[a, b], steps=4), orthogonalize(x, coefficients=[a, b, b, b])
    )
    assert torch.equal(
        orthogonalize(x, coefficients=[a, b], steps=1), orthogonalize(x, coefficients=[a])
    )


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
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from([0, 1, 5, 8]),
    st.sampled_from([0, 1, 5, 8]),
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
def test_many_equals_a_loop(
    shapes: list, dtypes: list[torch.dtype], name: str, scratch: int | None
) -> None:
    xs = tensors(shapes, dtypes)
    copies, versions = [x.clone() for x in xs], [x._version for x in xs]
    found = orthogonalize_many(
        xs, coefficients=name, dtype=torch.float64, max_scratch_bytes=scratch
    )
    assert len(found) == len(xs)
    for y, x, copy, version in zip(found, xs, copies, versions, strict=True):
        one = orthogonalize(x, coefficients=name, dtype=torch.float64)
        assert (y.shape, y.dtype, x._version) == (x.shape, x.dtype, version)
        # Another order of summation, then one rounding to the dtype of x.
        slack = 0 if x.dtype == torch.float64 else torch.finfo(x.dtype).eps
        assert gap(y, one) <= 2 * tolerance(name, torch.float64) + slack
        assert torch.equal(x, copy)
        assert x.numel() == 0 or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_one_group_is_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[torch.Size] = []
    real = torch.bmm

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products.append(a.shape)
        return real(a, b)

    monkeypatch.setattr(torch, "bmm", counted)
    xs = tensors(
        [((), 4, 8), ((), 8, 4), ((3,), 4, 8), ((0,), 4, 8), ((2, 2), 8, 4)], [torch.float32] * 5
    )
    orthogonalize_many(xs, steps=1)
    assert products == [(9, 4, 8)]
    products.clear()
    orthogonalize_many(xs, steps=1, max_scratch_bytes=1)
    assert products == [(1, 4, 8)] * 9


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 8, 12), (256, 300), (300, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_memory_changes_no_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape)
    gaps = torch.zeros([2 * side for side in shape])[(slice(None, None, 2),) * x.ndim].copy_(x)
    for other in (
        x.mT.contiguous().mT,
        gaps,
        x.unsqueeze(1).expand(shape[0], 1, *shape[1:]).squeeze(1),
    ):
        assert torch.equal(orthogonalize(other, dtype=dtype), orthogonalize(x, dtype=dtype))
        assert torch.equal(
            orthogonalize_many([other], dtype=dtype)[0], orthogonalize_many([x], dtype=dtype)[0]
        )


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
def test_subnormal_input_loses_only_the_bits_it_never_had(
    held: torch.dtype, magnitude: float
) -> None:
    x = coarse(problem(1, 12, 16, "clustered").x)
    x = (x / x.abs().max() * magnitude).to(held)
    ulp = torch.finfo(held).smallest_normal * torch.finfo(held).eps
    # The same matrix, in whole units of the last place.
    reference = orthogonalize((x / ulp).double())
    assert gap(orthogonalize(x, dtype=torch.float64), reference) < (
        1e-11 if held == torch.float64 else 1e-6
    )
    assert gap(orthogonalize(x, dtype=torch.float16), reference) < 0.05


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
)
@pytest.mark.parametrize("name", ["polar_express_5", "aol"])
def test_rounding_before_the_door_changes_no_bit(
    wide: torch.dtype, narrow: torch.dtype, name: str
) -> None:
    # The reason why an exchange in the compute dtype equals one in the dtype of the gradients.
    x = problem(6, 12, 17, "gaussian", (2,)).x.to(wide) * 1e-9
    y = orthogonalize(x, coefficients=name, dtype=narrow)
    assert torch.equal(orthogonalize(x.to(narrow).to(wide), coefficients=name, dtype=narrow), y)
    assert torch.equal(orthogonalize(x.to(narrow), coefficients=name, dtype=narrow), y.to(narrow))


def test_exponent_is_that_of_each_matrix() -> None:
    x = coarse(problem(2, 5, 7, batch=(3,)).x).float()
    scales = torch.tensor([2.0**-90, 1.0, 2.0**90]).reshape(3, 1, 1)
    assert torch.equal(orthogonalize(x * scales), orthogonalize(x))


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
def test_every_shape_comes_back(
    batch: list[int], m: int, n: int, dtype: torch.dtype, name: str
) -> None:
    x = torch.randn(*batch, m, n, generator=torch.Generator().manual_seed(m + 100 * n)).to(dtype)
    for y in (
        orthogonalize(x, coefficients=name),
        orthogonalize_many([x], coefficients=name)[0],
        polar_factor(x),
    ):
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


ORTHONORMAL = torch.linalg.qr(
    torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
)[0]


# torch.jit, with which torch derives products, warns.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "x",
    [
        torch.eye(3).double(),
        ORTHONORMAL,
        ORTHONORMAL.mT,
        torch.diag(torch.tensor([2.0, 2.0, 1.0]).double()),
    ],
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


# torch.jit, with which torch derives products, warns.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_at_low_rank_the_derivative_is_that_among_matrices_of_that_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, da, db = (
        torch.randn(*s, dtype=torch.float64, generator=generator) for s in [(5, 2), (2, 4)] * 2
    )

    def factor(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return polar_factor(a @ b, rtol=1e-9)

    _, found = torch.func.jvp(factor, (a, b), (da, db))
    step = 1e-6
    expected = (factor(a + step * da, b + step * db) - factor(a - step * da, b - step * db)) / (
        2 * step
    )
    assert gap(found, expected) < 1e-7
