"""What this machine and this build of torch can do. Nothing is measured: the same machine gives the same answer."""

from __future__ import annotations

import functools

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
    """True if the CPU has instructions for bf16 products (AMX or AVX512-BF16) and torch has oneDNN's kernels for them.

    Without either, a bf16 product can be hundreds of times slower than one in fp32.

    >>> isinstance(cpu_has_bf16(), bool)
    True
    """
    has_instructions = cpu_has_amx() or _has_feature("_is_avx512_bf16_supported")
    return has_instructions and torch.backends.mkldnn.is_available()


@functools.cache
def cpu_has_amx() -> bool:
    """True if the CPU has tile registers for matrix products.

    >>> isinstance(cpu_has_amx(), bool)
    True
    """
    return _has_feature("_is_amx_tile_supported")


def _has_feature(query: str) -> bool:
    function = getattr(torch.cpu, query, None)  # private, so it may go away
    return function is not None and bool(function())
