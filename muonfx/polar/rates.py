"""The speed of devices at the products of the iteration: one table of numbers, each with its source.

Methods and products are chosen by these numbers (`muonfx.polar.policy`). The choice must be the same on all ranks and
in a resumed run, so nothing is measured at run time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Rates(NamedTuple):
    """The speed of a device at symmetric products; in multiply-adds unless said otherwise."""

    halved_from: float
    """The size of a product, `n^2 k`, from which on leaving out its half pays; infinite where it never does."""
    share: float
    """The time that it then takes, over that of the full product."""
    pass_cost: float
    """Multiply-adds in the time that one element of a small matrix is read and written again."""
    source: str
    """A sentence on the measurement, or on the guess."""


_AVX512 = "measured on 2 cores of an AVX512-BF16 CPU, torch 2.13"
_AVX = "measured on 2 cores of an AVX512-BF16 CPU, with all of it and held to AVX2 alike, torch 2.13"
_AVX2 = "bf16 that the CPU has no products for: measured on 2 cores of one that was held to AVX2, torch 2.13"
_AMX = (
    "halving measured to lose up to 1024 x 4096, on 2 threads of a CPU with AMX, torch 2.13; "
    "a pass scaled from AVX512-BF16, not measured"
)
_H200 = "from an H200's data sheet, not measured"
_NEVER = math.inf

BUILT_IN: dict[tuple[str, torch.dtype], Rates] = {
    ("cpu", torch.bfloat16): Rates(1.3e8, 0.8, 35, _AVX512),
    ("cpu", torch.float32): Rates(6e7, 0.75, 25, _AVX),
    ("cpu", torch.float64): Rates(6e7, 0.75, 25, "taken over from fp32, not measured"),
    ("avx2", torch.bfloat16): Rates(2e7, 0.67, 1, _AVX2),
    ("amx", torch.bfloat16): Rates(_NEVER, 1.0, 200, _AMX),
    ("cuda", torch.bfloat16): Rates(1e9, 0.6, 1000, _H200),
    ("cuda", torch.float16): Rates(1e9, 0.6, 1000, _H200),
    ("cuda", torch.float32): Rates(1e9, 0.6, 100, _H200),
}
"""By kind of device ("cpu", "amx" for one with tile registers, "avx2" for one without bf16 products, "cuda") and dtype
of the products."""

UNKNOWN = Rates(_NEVER, 1.0, 100, "a guess that loses least: nothing is known about this device and dtype")


def built_in(kind: str, tiles: bool, dtype: torch.dtype, *, has_bf16: bool = True) -> Rates:
    """The rates of a kind of device, or a guess if the table has none.

    >>> built_in("cpu", False, torch.float32).share, built_in("tpu", False, torch.float32).halved_from
    (0.75, inf)
    """
    if kind == "cpu" and dtype == torch.bfloat16:
        kind = "amx" if tiles else "cpu" if has_bf16 else "avx2"
    return BUILT_IN.get((kind, dtype), UNKNOWN)
