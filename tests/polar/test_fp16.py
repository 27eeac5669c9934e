"""Products in fp16, before and after which "auto" rounds to bf16, as on a CUDA device but computed on a CPU."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muonfx as mfx
from muonfx.core.precision import product_libraries
from muonfx.polar import band, explain, hardware, orthogonalize, orthogonalize_many, policy, quack
from muonfx.polar.cost import newton_schulz_cost
from muonfx.polar.iteration import (
    normalize_by_powers_,
    normalize_in_fp64_,
    normalized_in_fp64,
    unit_power,
)
from muonfx.polar.stability import TOLERANCE
from muonfx.testing.laws.declarations import rounding_first_changes_nothing

from .strategies import orthogonal, relative, scaled

SHAPE = (256, 1024)
CUDA = torch.device("cuda", 0)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "auto" choose on this CPU as on a CUDA device: bf16, or fp16 where that allows fewer stages."""
    monkeypatch.setattr(policy, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(policy, "_has_fast_fp16", lambda device: True)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans for a CUDA device be made without one, also by a build of torch for CUDA."""
    monkeypatch.setattr(policy, "cuda_capability", lambda index: (9, 0))
    monkeypatch.setattr(quack, "is_capable", lambda device: False)


def lengths(plan: mfx.polar.Plan) -> list[int]:
    return [len(stage.steps) for stage in plan.stages]


# ------------------------------------------------------------------------------------------------- what "auto" takes


@pytest.mark.parametrize("torch_is_for_cuda", [False, True])
def test_a_plan_for_a_gpu_is_printed_without_one(
    monkeypatch: pytest.MonkeyPatch, torch_is_for_cuda: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if torch_is_for_cuda else None)
    hardware.cuda_capability.cache_clear()
    try:
        plan = explain((2048, 8192), "cuda")
    finally:
        hardware.cuda_capability.cache_clear()
    assert "compute capability 9.0, assumed" in str(plan)
    assert plan.dtype == torch.float16


@pytest.mark.usefixtures("cuda")
def test_auto_takes_fp16_where_it_allows_fewer_stages_than_bf16() -> None:
    plan = explain((2048, 8192), CUDA)
    assert (plan.dtype, plan.rounded_to, lengths(plan)) == (
        torch.float16,
        torch.bfloat16,
        [2, 1, 2],
    )
    assert lengths(explain((2048, 8192), CUDA, dtype=torch.bfloat16)) == [1, 1, 1, 2]
    assert "3 stages, for which bf16 rounds too much" in str(plan)
    assert plan.bound is not None
    assert 1 <= plan.bound <= TOLERANCE


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((2048, 2048), {}),  # the standard form takes less time
        ((128, 4096), {}),  # the Gram form rounds more below a side of 256
        ((8192, 65536), {}),  # elements may be too small
        ((2048, 8192), {"method": "standard"}),
        ((2048, 8192), {"coefficients": "polar_express"}),  # its stages have one step in fp16 too
        ((2048, 8192), {"coefficients": "polar_express_4"}),  # as many stages in bf16
        ((2048, 8192), {"coefficients": "cubic"}),
    ],
)
def test_auto_stays_with_bf16_where_fp16_saves_nothing_or_is_too_narrow(
    shape: tuple[int, int], settings: dict
) -> None:
    plan = explain(shape, CUDA, **settings)
    assert (plan.dtype, plan.rounded_to) == (torch.bfloat16, None)


def test_ranks_estimate_the_time_of_the_stages_that_fp16_allows() -> None:
    longer = {"dtype": torch.bfloat16, "may_take_fp16": True}
    assert newton_schulz_cost((2048, 8192), "cuda", **longer).load < 0.95 * bf16_load((2048, 8192))
    assert newton_schulz_cost((2048, 2048), "cuda", **longer).load == bf16_load((2048, 2048))
    shape, tx = (2048, 8192), mfx.orthogonalize()
    of_leaf = tx.declaration.matrices.cost(tx, "cuda", torch.bfloat16)
    assert of_leaf("w", shape, torch.float32) == newton_schulz_cost(shape, "cuda", **longer).load


def bf16_load(shape: tuple[int, int]) -> float:
    return newton_schulz_cost(shape, "cuda", dtype=torch.bfloat16).load


@pytest.mark.parametrize(
    ("failing", "library"),
    [
        ((), "quack-kernels"),
        ((torch.float16,), "torch for float16"),
        ((torch.bfloat16, torch.float16), "torch for bfloat16, float16"),
    ],
)
def test_ranks_compare_the_library_of_both_dtypes(
    failing: tuple[torch.dtype, ...], library: str, cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        quack, "failure", lambda device, dtype: "broken" if dtype in failing else None
    )
    libraries = product_libraries(mfx.orthogonalize(), [torch.float32], CUDA)
    assert set(libraries.values()) == {library}


def test_auto_has_no_fp16_without_the_device(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain((2048, 8192), "cpu").dtype != torch.float16
    assert explain((2048, 8192), CUDA, held=torch.float64).dtype == torch.float64
    monkeypatch.setattr(policy, "cuda_capability", lambda index: (7, 5))
    assert explain((2048, 8192), CUDA).dtype == torch.float32


@pytest.mark.usefixtures("half")
def test_derivatives_are_not_in_fp16() -> None:
    x = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(0))
    orthogonalizer = mfx.polar.many.Orthogonalizer()
    kind = mfx.polar.many._kind_of(x, True)
    assert orthogonalizer.plan_for(kind, differentiated=False, traced=False).dtype == torch.float16
    assert orthogonalizer.plan_for(kind, differentiated=True, traced=False).dtype == torch.float32


def test_the_smallest_elements_of_the_largest_matrix_lose_one_unit_roundoff() -> None:
    lost_by_each = 2.0**-25  # half of the distance of fp16's subnormal numbers
    assert math.sqrt(policy.LARGEST_IN_FP16) * lost_by_each == torch.finfo(torch.float16).eps / 2


# -------------------------------------------------------------------------------------------- accuracy and stability


def matrix(kind: str, n: int, m: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    if kind == "gaussian":
        x = normal(n, m)
    elif kind == "log-uniform":
        left, right = orthogonal(n, n, generator=generator), orthogonal(m, n, generator=generator)
        x = (left * torch.logspace(0, -4, n, dtype=torch.float64)) @ right.mT
    elif kind == "low rank":
        x = normal(n, n // 8) @ normal(n // 8, m)
    elif kind == "row-scaled":
        x = normal(n, m) * torch.exp(3 * normal(n, 1))
    elif kind == "near-parallel":
        x = normal(n, m)
        x[1::2] = x[::2] + 1e-3 * x[1::2]
    else:
        raise AssertionError(kind)
    return x.float()


KINDS = ("gaussian", "log-uniform", "low rank", "row-scaled", "near-parallel")


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["polar_express_5", "keller", "quintic"])
def test_fp16_is_more_accurate_than_bf16(kind: str, name: str) -> None:
    x = matrix(kind, *SHAPE)
    assert explain(SHAPE, coefficients=name).dtype == torch.float16
    y = orthogonalize(x, coefficients=name)
    in_bf16 = orthogonalize(x, coefficients=name, dtype=torch.bfloat16)
    exact = orthogonalize(x, coefficients=name, dtype=torch.float64)
    of_rounded = orthogonalize(x.bfloat16(), coefficients=name, dtype=torch.float64)
    assert relative(y, exact) <= 0.9 * relative(in_bf16, exact)
    # Without the error of the matrix, which is rounded to bf16 in both.
    assert relative(y, of_rounded) <= 0.5 * relative(in_bf16, of_rounded)
    assert torch.linalg.matrix_norm(y.double(), 2) <= 1.02 * band(name).peak


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize(
    "kind", ["rows", "two rows", "parallel rows", "one huge row", "entries", "zero rows"]
)
@pytest.mark.parametrize("name", ["polar_express_5", "keller", "quintic", "deepseek_v4"])
def test_singular_values_stay_within_the_bound_of_the_plan(kind: str, name: str) -> None:
    plan = explain(SHAPE, coefficients=name, method="gram")
    assert plan.dtype == torch.float16
    assert plan.bound is not None
    y = orthogonalize(scaled(kind, 0, *SHAPE, batch=2)[0], coefficients=name, method="gram")
    # And one rounding to bf16.
    assert torch.linalg.matrix_norm(y.double(), 2) <= (plan.bound + 2e-3) * band(name).peak


# ------------------------------------------------------------------------------------------------------ laws


@pytest.mark.usefixtures("half")
def test_rounding_to_bf16_first_changes_no_bit() -> None:
    example = mfx.testing.Example.of(
        {"wide": SHAPE, "tall": SHAPE[::-1], "square": (256, 256)}, steps=2
    )
    rounding_first_changes_nothing(mfx.orthogonalize(), *example)


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("exponent", [-100, 100])
def test_a_power_of_two_changes_no_bit(exponent: int) -> None:
    x = matrix("row-scaled", *SHAPE).bfloat16().float()  # all of it normal numbers after scaling
    x[x.abs() < 1e-6 * x.abs().max()] = 0
    assert torch.equal(orthogonalize(x), orthogonalize(x * 2.0**exponent))


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_has_the_same_bits_alone_in_a_batch_and_donated(dtype: torch.dtype) -> None:
    x, other = (matrix(kind, *SHAPE).to(dtype) for kind in ("gaussian", "low rank"))
    other[3, 5] = torch.nan
    alone = orthogonalize(x)
    assert alone.dtype == dtype
    assert torch.equal(orthogonalize_many([other, x, other.mT.contiguous()])[1], alone)
    stack = torch.stack([other, x])
    assert torch.equal(orthogonalize(stack)[1], alone)
    # Adjacent in memory, or not.
    for donated in ([x.clone(), other.clone()], list(stack.clone().unbind())):
        donated[0].copy_(x)
        results = orthogonalize_many(donated, donate=True)
        assert results[0] is donated[0]
        assert torch.equal(results[0], alone)
    assert orthogonalize(torch.zeros_like(x)).eq(0).all()
    assert orthogonalize(other).isnan().any()


@pytest.mark.usefixtures("half")
def test_the_function_and_the_iteration_in_place_agree() -> None:
    x = matrix("gaussian", *SHAPE)
    mapped = torch.func.vmap(orthogonalize)(x[None])[0]
    assert relative(mapped, orthogonalize(x).double()) < 0.005
    assert torch.equal(mapped, mapped.bfloat16().float())


# ------------------------------------------------------------------------------------------------ normalization


@pytest.mark.parametrize(
    ("held", "compute"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize("exponent", [-100, 0, 100])
def test_devices_normalize_as_cpus_do(
    held: torch.dtype, compute: torch.dtype, exponent: int
) -> None:
    batch = torch.stack(
        [matrix("row-scaled", 8, 20), torch.zeros(8, 20), torch.full((8, 20), torch.inf)]
    )
    batch = batch.to(held) * 2.0**exponent
    on_cpu = normalize_by_powers_(batch.clone(), 1.02, compute)
    on_device = normalize_in_fp64_(batch.clone(), 1.02, compute)
    assert on_device.dtype == on_cpu.dtype == compute
    wide = batch.double()
    norms = torch.linalg.matrix_norm(wide, keepdim=True).clamp(
        min=torch.finfo(torch.float64).smallest_normal
    )
    eps = torch.finfo(compute).eps
    half_of_subnormal_step = torch.finfo(compute).smallest_normal * eps / 2
    torch.testing.assert_close(
        on_device.double(),
        wide / (1.02 * norms),
        rtol=0.501 * eps,
        atol=half_of_subnormal_step,
        equal_nan=True,
    )
    compiled = normalized_in_fp64(batch, compute, 1.02)
    torch.testing.assert_close(compiled, on_device, rtol=eps, atol=0, equal_nan=True)
    # On a CPU, fp32 is also rounded in between: the norm, its root and their product with the safety.
    rtol = 2 * eps if compute == torch.float32 else eps
    torch.testing.assert_close(on_device, on_cpu, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("held", "compute"), [(torch.bfloat16, torch.float16), (torch.float32, torch.float32)]
)
@given(st.integers(-126, 127))
def test_devices_normalize_each_matrix_alone_and_at_any_magnitude(
    held: torch.dtype, compute: torch.dtype, exponent: int
) -> None:
    x = matrix("row-scaled", 8, 20).to(held)
    x = x * unit_power(x.float()).to(held)  # the largest magnitude is in [1, 2)
    smallest = max(exponent, -126 - math.floor(math.log2(x[x != 0].abs().min())))
    exact = normalize_in_fp64_(x[None].clone(), 1.02, compute)[0]
    found = normalize_in_fp64_(torch.stack([x, x * 2.0**smallest, 3 * x.flip(0)]), 1.02, compute)
    assert torch.equal(found[0], exact)
    assert torch.equal(found[1], exact)


@pytest.mark.usefixtures("cuda")
def test_auto_takes_fp16_for_given_stages_that_bf16_does_not_allow() -> None:
    assert explain(SHAPE, CUDA, method=(2, 1, 2)).dtype == torch.float16
    assert explain(SHAPE, CUDA, method=(1, 1, 1, 2)).dtype == torch.bfloat16
