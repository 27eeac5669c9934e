"""The memory of tensors, as bytes to be read into and written from."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

__all__ = ["bytes_of", "room_for"]

_PAGE = 1 << 21
_MADV_HUGEPAGE = 14
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor in host memory as bytes; the tensor must be kept alive by the caller."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def room_for(like: Tensor, device: torch.device | str | None = None) -> Tensor:
    """An empty tensor of the shape, dtype and strides of another, about to be filled.

    Fresh memory comes in pages of 4 KiB, and to fault one in for each costs more than to read what goes there. Linux is
    asked for pages of 2 MiB where the tensor is large (three times as fast, measured on ext4 with a warm cache); it may
    decline.
    """
    room = torch.empty_like(like, device=device, requires_grad=False)
    if _madvise is not None and room.device.type == "cpu" and type(room) is Tensor and room.nbytes >= 2 * _PAGE:
        begin = -(-room.data_ptr() // _PAGE) * _PAGE
        end = (room.data_ptr() + room.nbytes) // _PAGE * _PAGE
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return room
