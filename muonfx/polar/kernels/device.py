"""Tell whether the kernels can run on a device. They, and Triton with them, are imported where the answer needs it."""

from __future__ import annotations

import functools
import os

import torch

from muonfx.tree.symbols import called_once


def available(device: torch.device) -> bool:
    """True if `symmetric_matmul` runs on `device`: a cached answer, and never an error.

    That is so on CUDA devices (NVIDIA's) of capability 8.0 or more where Triton can be imported, and on the CPU where
    Triton's interpreter is on (`TRITON_INTERPRET=1` when Triton is first imported): correct there, and slow.

    Args:
        device: any device, also of a kind that is not there.

    >>> available(torch.device("meta"))
    False
    """
    return _available(device.type, device.index)


@called_once  # a tracer calls this once and keeps the answer
def _available(kind: str, index: int | None) -> bool:
    if kind == "cuda":
        return _is_capable(index) and _interpreted() is not None
    # Without the variable the interpreter is off, whatever Triton says; do not import it for that.
    return kind == "cpu" and bool(os.environ.get("TRITON_INTERPRET")) and _interpreted() is True


@functools.cache
def _is_capable(index: int | None) -> bool:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    if index is not None and index >= torch.cuda.device_count():
        return False
    return torch.cuda.get_device_capability(index)[0] >= 8


@functools.cache
def _interpreted() -> bool | None:
    """True if the kernels go through Triton's interpreter; None where Triton is missing or broken."""
    try:
        from muonfx.polar.kernels.launch import INTERPRETED

        return INTERPRETED.value
    except Exception:  # whatever it is that is wrong with Triton, plain products work
        return None
