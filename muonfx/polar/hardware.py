"""Query the capabilities of this machine and of this build of torch; nothing is measured."""

from __future__ import annotations

import functools

import torch

_ASSUMED_CAPABILITY = (9, 0)  # of an H100


@functools.cache
def cuda_capability(index: int | None) -> tuple[int, int]:
    """Return the compute capability, such as (8, 0), of a CUDA device by its index; None: the current device.

    A plan for a GPU can be printed on a machine without one. There, the capability of an H100 is assumed.
    """
    if not torch.cuda.is_available():
        return _ASSUMED_CAPABILITY
    return torch.cuda.get_device_capability(index)


@functools.cache
def cpu_has_bf16() -> bool:
    """Return True if the CPU has bf16 instructions (AMX or AVX512-BF16) and torch has oneDNN, which uses them."""
    has_instructions = cpu_has_amx() or _has_feature("_is_avx512_bf16_supported")
    return has_instructions and torch.backends.mkldnn.is_available()


@functools.cache
def cpu_has_amx() -> bool:
    """Return True if the CPU has AMX tile registers for matrix products."""
    return _has_feature("_is_amx_tile_supported")


def _has_feature(query: str) -> bool:
    function = getattr(torch.cpu, query, None)  # private in torch, so it may be removed
    return function is not None and bool(function())
