"""The symmetric products: a GPU's own kernel where there is one, else the same kernel in Triton's interpreter.

The law is one: a result is the upper triangle of `alpha p p^T + beta addend + identity I`, mirrored.
"""

import importlib.util
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muonfx as mfx
from muonfx.polar import explain, kernels, orthogonalize, policy
from muonfx.polar.kernels import available, exact_product
from tests.processes import ROOT, run_python

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILES = (None, (16, 16, 16, 4, 3), (16, 32, 16, 4, 3), (32, 32, 32, 4, 3))

with_kernels = pytest.mark.skipif(not available(DEVICE), reason="Triton is missing, or the GPU is too old")


def drawn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def multiply(
    p: torch.Tensor, addend: torch.Tensor | None, factors: tuple[float, float, float], tile: tuple[int, ...] | None
) -> torch.Tensor:
    from muonfx.polar.kernels import symmetric

    out = p.new_full((p.shape[0], p.shape[1], p.shape[1]), torch.nan)
    config = None if tile is None else symmetric.tile(*tile, group=tile[1] // 8)
    symmetric.launch(p, addend, *factors, out, config)
    return out


@with_kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of infinity times zero
@settings(max_examples=20)  # the interpreter is slow
@given(
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 2), st.integers(1, 70), st.integers(1, 50)),
    st.tuples(*[st.sampled_from([0.0, 1.0, -0.5, 2.031, 1 / 3])] * 3),
    st.sampled_from(TILES),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_the_result_is_the_mirrored_upper_triangle_of_the_formula(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    factors: tuple[float, float, float],
    tile: tuple[int, ...] | None,
    transposed: bool,
    added: bool,
    seed: int,
) -> None:
    b, n, k = shape
    generator = torch.Generator().manual_seed(seed)
    p, addend = drawn(generator, b, n, k, dtype=dtype), drawn(generator, b, n, n, dtype=dtype)
    addend = addend.triu() + addend.triu(1).mT if added else None
    p = p.mT.contiguous().mT if transposed else p
    found = multiply(p, addend, factors, tile)

    exact, bound = exact_product(p, addend, *factors)
    assert torch.equal(found, found.mT)
    assert ((found.double() - exact).abs() <= bound).all()
    # NaN and infinity stay in their matrix.
    p[0, n // 2, k // 2] = torch.inf
    beside = multiply(p, addend, factors, tile)
    assert torch.equal(beside[1:], found[1:])
    assert not beside[0, n // 2, n // 2].isfinite()


# ------------------------------------------------------------------------------------------------------- the self-test


def right(p: torch.Tensor, *, addend=None, alpha=1.0, beta=0.0, identity=0.0, out: torch.Tensor) -> torch.Tensor:
    """A stand-in for the kernel, by the formula."""
    exact, _ = exact_product(p, addend, alpha, beta, identity)
    return out.copy_(exact.triu() + exact.triu(1).mT)


def slightly_wrong(p: torch.Tensor, *, out: torch.Tensor, **factors: Any) -> torch.Tensor:
    """A stand-in with one wrong entry, by a little more than rounding explains."""
    _, bound = exact_product(p, **{"addend": None, "alpha": 1.0, "beta": 0.0, "identity": 0.0, **factors})
    right(p, out=out, **factors)
    out[-1, 3, 3] += 4 * bound[-1, 3, 3]
    return out


def asymmetric(p: torch.Tensor, *, out: torch.Tensor, **factors: Any) -> torch.Tensor:
    """A stand-in whose error is allowed, but differs between the triangles."""
    right(p, out=out, **factors)
    out[0, 1, 0] = (
        torch.nextafter(out[0, 0, 1].float(), torch.tensor(9.0)) if out.dtype == torch.float32 else out[0, 1, 0]
    )
    return out


def unfinished(p: torch.Tensor, *, out: torch.Tensor, **factors: Any) -> torch.Tensor:
    """A stand-in that does not write its last row."""
    kept = out[:, -1].clone()
    right(p, out=out, **factors)
    out[:, -1] = kept
    return out


def raising(p: torch.Tensor, **factors: Any) -> torch.Tensor:
    raise OSError("no compiler for this device")


WRONG: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "slightly wrong": (slightly_wrong, "times the error that rounding explains"),
    "asymmetric": (asymmetric, r"in torch\.float32 is not symmetric"),
    "unfinished": (unfinished, "has nan times the error"),
    "raising": (raising, "OSError: no compiler for this device"),
}


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process whose CPU has kernels that were not tested."""
    kernels._failure.cache_clear()
    monkeypatch.setattr(kernels, "available", lambda device: device.type == "cpu")
    yield monkeypatch
    kernels._failure.cache_clear()


@pytest.mark.parametrize("what", WRONG)
def test_kernels_that_fail_their_self_test_are_replaced_by_the_products_of_torch(
    untested: pytest.MonkeyPatch, what: str
) -> None:
    stand_in, message = WRONG[what]
    untested.setattr(kernels, "symmetric_matmul", stand_in)
    x = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    tx = mfx.orthogonalize(products="triton", dtype=torch.float32)
    with pytest.warns(RuntimeWarning, match=f"failed their self-test on cpu, so torch's products are used.*{message}"):
        found = tx.update({"w": x}, mfx.core.EmptyState())[0]["w"]
    with warnings.catch_warnings(action="error"):  # once a process
        assert torch.equal(found, orthogonalize(x, products="triton", dtype=torch.float32))
        plan = explain((300, 400), dtype=torch.float32, products="triton")
    assert torch.equal(found, orthogonalize(x, products="batched", dtype=torch.float32))
    assert (plan.products, plan.small_products) == ("batched", "batched")
    assert re.search(f"the kernels failed their self-test on cpu: .*{message}", str(plan))


def test_kernels_that_pass_their_self_test_are_used(untested: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def counted(p: torch.Tensor, **rest: Any) -> torch.Tensor:
        calls.append(tuple(p.shape))
        return right(p, **rest)

    untested.setattr(kernels, "symmetric_matmul", counted)
    before = torch.random.get_rng_state()
    plan = explain((300, 400), dtype=torch.float32, products="triton")
    assert plan.products == plan.small_products == "triton"
    assert "as given; the kernels passed their self-test on cpu" in str(plan)
    assert torch.equal(before, torch.random.get_rng_state())
    tested = len(calls)
    orthogonalize(torch.randn(300, 400), products="triton", dtype=torch.float32)
    assert calls[tested:]
    assert all(max(shape) >= 300 for shape in calls[tested:]), "the self-test ran again"


@pytest.mark.parametrize("around", ["fake tensors", "a derivative", "a default device"])
def test_the_self_test_computes_values_whatever_surrounds_its_first_use(
    untested: pytest.MonkeyPatch, around: str
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    untested.setattr(kernels, "symmetric_matmul", right)
    cpu = torch.device("cpu")
    if around == "a derivative":
        torch.func.grad(lambda x: x * (kernels.failure(cpu) is None))(torch.tensor(1.0))
    else:
        with FakeTensorMode() if around == "fake tensors" else torch.device("meta"):
            kernels.failure(cpu)
    assert kernels.failure(cpu) is None


def test_kernels_are_not_tested_unless_they_are_asked_for(untested: pytest.MonkeyPatch) -> None:
    untested.setattr(kernels, "symmetric_matmul", raising)
    for products in ("auto", "batched", "blocks"):
        orthogonalize(torch.randn(300, 400), products=products)
    plan_on_paper = policy.plan(
        *(300, 400, torch.float32, torch.device("cuda"), policy.polynomials("keller", None)),
        products="triton",
        dtype=torch.float32,
        portable=True,
    )
    assert plan_on_paper.products == "triton"
    assert kernels._failure.cache_info().currsize == 0


@with_kernels
def test_the_kernels_pass_their_self_test_here() -> None:
    assert kernels.failure(DEVICE) is None


# ---------------------------------------------------------------------------------------- availability and compilation


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing")
def test_where_triton_is_there_the_kernels_are() -> None:
    """Without this, a kernel that Triton refuses would be a run of skipped tests."""
    old = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] < 8
    assert available(DEVICE) != old
    assert not available(torch.device("meta"))
    assert not available(torch.device("cuda", 10**6))


def test_the_package_needs_no_triton_that_works(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: broken')")
    script = "import torch, muonfx.polar.kernels as k; assert not k.available(torch.device('cpu'))"
    run_python("-c", script, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", TRITON_INTERPRET="1")


COMPILE = """
import json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from muonfx.polar.kernels.symmetric import TILES, symmetric_kernel

found = []
for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
    for tile in TILES[dtype]:
        flags = dict.fromkeys(("ADDEND", "ALONG_K", "EVEN_N", "EVEN_K"), True)
        constants = tile.kwargs | flags | {"ALIGN_N": 8, "ALIGN_K": 8}
        kinds = dict.fromkeys(("p", "addend", "out"), "*" + name) | dict.fromkeys(("alpha", "beta", "identity"), "fp32")
        kinds |= dict.fromkeys(constants, "constexpr")
        signature = {arg: kinds.get(arg, "i32") for arg in symmetric_kernel.arg_names}
        aligned = {(at,): [["tt.divisibility", 16]] for at in range(3)}
        source = ASTSource(symmetric_kernel, signature, constants, aligned)
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.maxnreg}
        kernel = compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
        found.append((name, tile.kwargs["BLOCK_N"], kernel.metadata.shared, kernel.asm["ptx"]))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "instruction"),
    [
        (90, "wgmma.mma_async"),
        *(pytest.param(*one, marks=pytest.mark.deep) for one in ((80, "mma.sync"), (100, "tcgen05.mma"))),
    ],
)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing")
def test_every_tile_compiles_for_a_gpu(tmp_path: Path, capability: int, instruction: str) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    for dtype, columns, shared, ptx in json.loads(run_python("-c", COMPILE, capability, **environment).stdout):
        assert shared <= 227 * 1024
        assert "tf32" not in ptx
        assert "cp.async.cg.shared.global" in ptx
        if dtype == "bf16" and columns >= 64:
            assert instruction in ptx
