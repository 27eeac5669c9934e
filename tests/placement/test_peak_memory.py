"""A step needs the memory that the table of docs/cost-memory-risk.md gives, in one process and over ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

import muonfx as mfx
from benchmarks.measure import PeakBytes
from muonfx.sharding.shards.dtensors import local_of
from tests.processes import Here, on_ranks

CLIP = mfx.clip_by_global_norm(1.0)
DONATED = "alone, or `clip_by_global_norm`, with `donate_grads=True`"
CHAINS: dict[str, list[Callable[[mfx.Transform], mfx.Transform]]] = {  # by their row in the table
    "alone": [lambda inner: inner],
    "`clip_by_global_norm`": [lambda inner: mfx.chain(CLIP, inner)],
    DONATED: [lambda inner: inner, lambda inner: mfx.chain(CLIP, inner)],
    "`skip_nonfinite` around clipping": [lambda inner: mfx.skip_nonfinite(mfx.chain(CLIP, inner))],
    "... and around `master_params`, bf16": [
        lambda inner: mfx.skip_nonfinite(mfx.master_params(mfx.chain(CLIP, inner)))
    ],
}
INNER = {"Muon": mfx.muon(1e-3), "AdamW": mfx.adamw(1e-3)}
PAGE = Path(__file__).parents[2] / "docs" / "cost-memory-risk.md"


def bytes_on_page(row: str, column: str) -> int:
    """Return a number of the table of bytes for each element."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    (titles,) = [line.split(" | ") for line in lines if line.startswith("| chain | Muon |")]
    (cells,) = [line.split(" | ") for line in lines if line.startswith(f"| {row} |")]
    return int(cells[[title.strip("| ") for title in titles].index(column)].strip("| "))


def set_gradients(params: dict[str, Tensor], make: Callable[[Tensor], Tensor]) -> None:
    for param in params.values():
        param.grad = make(torch.ones(32, 32, dtype=param.dtype))


def require_peaks(
    row: str, inner: str, column: str, make: Callable[[Tensor], Tensor], bucket_bytes: int
) -> None:
    """Assert that the second step of each chain of a row needs the memory of the page, and less than a byte more.

    ``make`` turns a matrix into a parameter or a gradient, such as a DTensor.
    """
    dtype = torch.bfloat16 if "bf16" in row else torch.float32
    for wrap in CHAINS[row]:
        params = {str(number): make(torch.zeros(32, 32, dtype=dtype)) for number in range(128)}
        is_donated = row == DONATED
        optimizer = mfx.TransformOptimizer(
            params, wrap(INNER[inner]), bucket_bytes=bucket_bytes, donate_grads=is_donated
        )
        set_gradients(params, make)
        optimizer.step()
        set_gradients(params, make)
        with PeakBytes() as peak:
            optimizer.step()
        elements = sum(local_of(param).numel() for param in params.values())
        expected = bytes_on_page(row, column)
        assert expected <= peak.most / elements <= expected + 1


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("row", CHAINS)
def test_the_peak_of_a_step_in_one_process_is_as_the_page_says(row: str, inner: str) -> None:
    require_peaks(row, inner, inner, lambda matrix: matrix, bucket_bytes=4096)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("row", CHAINS)
@on_ranks(2)
def test_the_peak_of_a_step_over_ranks_is_as_the_page_says(
    here: Here, row: str, inner: str
) -> None:
    def sharded(matrix: Tensor) -> Any:
        return distribute_tensor(matrix, here.mesh, [Shard(0)])

    require_peaks(row, inner, f"{inner} over ranks", sharded, bucket_bytes=6 * 4096)
