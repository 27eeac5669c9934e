"""The memory of tensors as bytes, to be read into and written from."""

from __future__ import annotations

import ctypes

from torch import Tensor

__all__ = ["bytes_of"]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor in host memory as bytes; the tensor must be kept alive by the caller."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
