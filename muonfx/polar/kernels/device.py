"""Report whether the kernels run on a device. The kernels and Triton are imported only if the answer needs them."""

from __future__ import annotations

import functools
import os

import torch

from muonfx.tree.tracing import called_once


def available(device: torch.device) -> bool:
    """Return True if `symmetric_matmul` runs on `device`; cached, and never raises."""
    return _available(device.type, device.index)


@called_once  # a tracer calls this once and keeps the answer
def _available(kind: str, index: int | None) -> bool:
    if kind == "cuda":
        return _is_capable(index) and _interpreted() is not None
    # Without the variable the interpreter is off, so Triton need not be imported.
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
    """Return True if the kernels run in Triton's interpreter; None if Triton is missing or broken."""
    try:
        from muonfx.polar.kernels.launch import INTERPRETED

        return INTERPRETED.value
    except Exception:  # plain products work, whatever the error of Triton is
        return None
