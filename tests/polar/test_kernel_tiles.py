"""How the kernel goes over the triangle, and what a GPU would be given: compiled for four of them, none at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonfx.polar.kernels import available

triton = pytest.importorskip("triton", reason="Triton is missing")
import triton.language as tl  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if not available(DEVICE):
    pytest.skip("no kernels on this device", allow_module_level=True)

from muonfx.polar.kernels.symmetric import upper_tile  # noqa: E402


@triton.jit
def _places(out, tiles, GROUP: tl.constexpr):
    i, j = upper_tile(tl.program_id(0), tiles, GROUP)
    tl.store(out + 2 * tl.program_id(0), i)
    tl.store(out + 2 * tl.program_id(0) + 1, j)


@given(st.integers(1, 24), st.integers(1, 9))
def test_every_tile_on_or_above_the_diagonal_is_visited_once(tiles: int, group: int) -> None:
    count = tiles * (tiles + 1) // 2
    out = torch.full((count, 2), -1, dtype=torch.int32, device=DEVICE)
    _places[(count,)](out, tiles, group)
    assert sorted(map(tuple, out.tolist())) == [(i, j) for i in range(tiles) for j in range(i, tiles)]


def test_programs_that_run_together_share_panels() -> None:
    tiles, group = 32, 8
    count = tiles * (tiles + 1) // 2
    out = torch.empty(count, 2, dtype=torch.int32, device=DEVICE)
    _places[(count,)](out, tiles, group)
    together = out[: group * 8]  # 64 programs, one after the other: 16 panels would be the least, 65 is a row by row
    assert len(set(together.flatten().tolist())) <= 32
    assert max(len(set(together[:, side].tolist())) for side in (0, 1)) <= 18


# ------------------------------------------------------------------------------------- the compiler, without a device


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "kibibytes", "instruction"),
    [
        pytest.param(80, 163, "mma.sync", marks=pytest.mark.deep),  # compiling is all that takes time here
        pytest.param(86, 99, "mma.sync", marks=pytest.mark.deep),
        (90, 227, "wgmma.mma_async"),
        pytest.param(100, 227, "tcgen05.mma", marks=pytest.mark.deep),
    ],
)
def test_the_kernel_compiles_for_a_gpu(tmp_path: Path, capability: int, kibibytes: int, instruction: str) -> None:
    script = Path(__file__).with_name("pretended_gpu.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(script), str(capability), str(kibibytes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    report = json.loads(done.stdout)

    for name, launches in report["launches"].items():
        measured = [launch["tile"] for launch in launches[:-1]]
        assert len(measured) == len(set(measured)), name
        assert all(launch["grid"] == launch["expected grid"] for launch in launches), name
        assert all(launch["shared"] <= kibibytes * 1024 for launch in launches), name
        if name != "half again":
            assert len(measured) >= 2, name  # there was a choice
    assert len(report["launches"]["half again"]) == 1  # another size of the same bucket
    if kibibytes > 200:
        assert max(launch["rows"] * launch["columns"] for launch in report["launches"]["large"]) == 128 * 256
    for kernel in report["kernels"]:
        half = kernel["dtype"] != "fp32"
        assert "tf32" not in kernel["words"]
        if half and kernel["columns"] >= 64:
            assert instruction in kernel["words"], kernel
        if not half:
            assert not set(kernel["words"]) & {"mma.sync", "wgmma.mma_async", "tcgen05.mma"}, kernel
        if kernel["aligned"]:
            assert "16-byte asynchronous load" in kernel["words"], kernel
