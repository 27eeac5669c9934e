"""The symmetric products: a GPU's own kernel where there is one, else the same kernel in Triton's interpreter.

The law is one: a result is the upper triangle of `alpha p p^T + beta addend + identity I`, mirrored.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonfx.polar.kernels import available

from .strategies import symmetric_product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILES = (None, (16, 16, 16, 4, 3), (16, 32, 16, 4, 3), (32, 32, 32, 4, 3))
ROOT = Path(__file__).parents[2]

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

    exact, bound = symmetric_product(p, addend, *factors)
    assert torch.equal(found, found.mT)
    assert ((found.double() - exact).abs() <= bound).all()
    # What is not finite stays in its matrix.
    p[0, n // 2, k // 2] = torch.inf
    beside = multiply(p, addend, factors, tile)
    assert torch.equal(beside[1:], found[1:])
    assert not beside[0, n // 2, n // 2].isfinite()


# ---------------------------------------------------------------------------------------- availability and compilation


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing")
def test_where_triton_is_there_the_kernels_are() -> None:
    """Without this, a kernel that Triton refuses would be a run of skipped tests."""
    old = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] < 8
    assert available(DEVICE) != old
    assert not available(torch.device("meta"))
    assert not available(torch.device("cuda", 10**6))


def run_in_process(script: str, *arguments: object, **environment: str) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)
    return done.stdout


def test_the_package_needs_no_triton_that_works(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: broken')")
    script = "import torch, muonfx.polar.kernels as k; assert not k.available(torch.device('cpu'))"
    run_in_process(script, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", TRITON_INTERPRET="1")


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
    environment = {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    for dtype, columns, shared, ptx in json.loads(run_in_process(COMPILE, capability, **environment)):
        assert shared <= 227 * 1024
        assert "tf32" not in ptx
        assert "cp.async.cg.shared.global" in ptx
        if dtype == "bf16" and columns >= 64:
            assert instruction in ptx
