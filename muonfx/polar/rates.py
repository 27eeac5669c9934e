"""Speed of devices at the matrix products of the Newton-Schulz iteration: a table of numbers, each with its source.

Methods and products are chosen by these numbers (`muonfx.polar.policy`). The choice must be the same on all ranks and
in a resumed run, so nothing is measured at run time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Rates(NamedTuple):
    """The speed of a device at symmetric products. A "halved" product computes one half and mirrors it."""

    halving_threshold: float
    """The multiply-adds `n^2 k` of a product from which halving it by blocks is faster; infinity if it never is."""
    share: float
    """The time of a halved product divided by the time of the full product."""
    pass_cost: float
    """The number of multiply-adds in the time to read and write one element of an `n x n` matrix."""
    source: str
    """The source of the numbers: a measurement, a data sheet or a guess."""


_AVX512 = "measured on 2 cores of Zen 5, torch 2.13"
_AVX = "measured on 2 cores of an AVX512-BF16 CPU, with AVX512 and restricted to AVX2, torch 2.13"
_AVX2 = (
    "bf16 without bf16 instructions: measured on 2 cores of a CPU restricted to AVX2, torch 2.13"
)
_AMX = (
    "halving measured to lose up to 1024 x 4096, on 2 threads of a CPU with AMX, torch 2.13; "
    "a pass scaled from AVX512-BF16, not measured"
)
_H200 = "not measured on a GPU; a halved product, by quack-kernels, and a pass are from an H200's data sheet"
_NEVER = math.inf

BUILT_IN: dict[tuple[str, torch.dtype], Rates] = {
    ("cpu", torch.bfloat16): Rates(2e8, 0.8, 35, _AVX512),
    ("cpu", torch.float32): Rates(6e7, 0.75, 25, _AVX),
    ("cpu", torch.float64): Rates(6e7, 0.75, 25, "the numbers of fp32, not measured"),
    ("avx2", torch.bfloat16): Rates(2e7, 0.67, 1, _AVX2),
    ("amx", torch.bfloat16): Rates(_NEVER, 1.0, 200, _AMX),
    ("cuda", torch.bfloat16): Rates(_NEVER, 0.6, 1000, _H200),
    ("cuda", torch.float16): Rates(_NEVER, 0.6, 1000, _H200),
    ("cuda", torch.float32): Rates(_NEVER, 0.6, 100, _H200),
}
"""`Rates` by device kind and dtype. Kinds: "cpu", "amx" (tile registers), "avx2" (no bf16 products) and "cuda".

Ranks that must make the same choice without communication assume "cpu" on every CPU."""

UNKNOWN = Rates(_NEVER, 1.0, 100, "a cautious guess: nothing was measured on this device and dtype")
