"""What the machine can do, asked or measured once a process."""

from __future__ import annotations

import functools
import threading
import time

import torch


@functools.cache
def cuda_capability(index: int | None) -> tuple[int, int]:
    """The compute capability of a CUDA device.

    >>> cuda_capability(None) >= (1, 0) if torch.cuda.is_available() else True
    True
    """
    return torch.cuda.get_device_capability(index)


@functools.cache
def cpu_has_bf16() -> bool:
    """True if the CPU says that it multiplies bf16 matrices; False where this torch cannot be asked.

    >>> cpu_has_bf16() or not cpu_has_amx()
    True
    """
    return cpu_has_amx() or _ask("_is_avx512_bf16_supported")


@functools.cache
def cpu_has_amx() -> bool:
    """True if the CPU has tile registers for matrix products; False where this torch cannot be asked.

    >>> isinstance(cpu_has_amx(), bool)
    True
    """
    return _ask("_is_amx_tile_supported")


def _ask(query: str) -> bool:
    ask = getattr(torch.cpu, query, None)  # private, so it may go away
    return ask is not None and bool(ask())


@functools.cache
def cpu_bf16_is_faster() -> bool:
    """Time a 512 x 512 x 512 product in bf16 and in fp32, best of five after one to warm up: a few milliseconds.

    >>> isinstance(cpu_bf16_is_faster(), bool)
    True
    """
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
