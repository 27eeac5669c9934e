"""Which dtype the matrix products run in.

bf16 is what Muon uses on accelerators, but on a CPU without bf16 hardware it is hundreds of times slower than fp32, and
on one with it a build may still lack the kernels. So a CPU is asked for the feature and then timed, once a process.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Literal

import torch

SUPPORTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of inputs and of matrix products."""

DTypeLike = torch.dtype | Literal["auto"]
"""How the dtype of matrix products is asked for: by itself, or "auto" for what `compute_dtype` says."""


def compute_dtype(dtype: torch.dtype, device: torch.device, requested: DTypeLike = "auto") -> torch.dtype:
    """The dtype for matrix products on inputs of `dtype` on `device`.

    `"auto"` keeps float64. Else, on CUDA, bf16 from compute capability 8.0 on; on a CPU, bf16 where the CPU has native
    bf16 products and a cached measurement finds them faster than fp32; fp32 everywhere else.

    The measurement may come out differently on two hosts: ranks that must agree bit for bit should share one answer.

    Raises:
        ValueError: a string other than "auto".
        TypeError: a dtype that is not one of `SUPPORTED`.

    >>> compute_dtype(torch.float64, torch.device("cpu"))
    torch.float64
    >>> compute_dtype(torch.float32, torch.device("cpu"), torch.bfloat16)
    torch.bfloat16
    """
    if isinstance(requested, str):
        if requested != "auto":
            raise ValueError(f"dtype: found {requested!r}, expected 'auto' or a torch.dtype such as torch.bfloat16")
        return torch.float64 if dtype == torch.float64 else _fastest(device.type, device.index)
    if requested not in SUPPORTED:
        raise TypeError(f"dtype: found {requested!r}, expected 'auto' or one of {', '.join(map(str, SUPPORTED))}")
    return requested


@torch.compiler.assume_constant_result  # a tracer calls this once and keeps the answer: no clock in the graph
def _fastest(kind: str, index: int | None) -> torch.dtype:
    """The fastest dtype that is good enough for an input of at most fp32."""
    if kind == "cpu":
        fast = _cpu_has_bf16() and _cpu_bf16_is_faster()
    elif kind == "cuda":
        fast = _cuda_capability(index)[0] >= 8
    else:
        fast = False
    return torch.bfloat16 if fast else torch.float32


@functools.cache
def _cuda_capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _cpu_has_bf16() -> bool:
    """Whether the CPU says that it multiplies bf16 matrices; False where this torch cannot be asked."""
    for query in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        ask = getattr(torch.cpu, query, None)  # private, so it may go away
        if ask is not None and ask():
            return True
    return False


@functools.cache
def _cpu_bf16_is_faster() -> bool:
    """Time a 512 x 512 x 512 product in bf16 and in fp32, best of five after one to warm up: a few milliseconds."""
    seconds: dict[torch.dtype, float] = {}

    def measure() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(512, 512, dtype=dtype, device="cpu")
            torch.mm(x, x)
            seconds[dtype] = min(_timed(x) for _ in range(5))

    # Modes (vmap levels, fake tensors, tracing, autocast) belong to a thread, so a new thread measures real products.
    thread = threading.Thread(target=measure, name="muonfx-bf16-measurement")
    thread.start()
    thread.join()
    return torch.bfloat16 in seconds and seconds[torch.bfloat16] < seconds[torch.float32]


def _timed(x: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(x, x)
    return time.perf_counter() - start
