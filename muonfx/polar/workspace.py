"""Memory for intermediates that is kept between calls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_ALIGNMENT = 64
"""Alignment in bytes: a cache line, and the widest vector of a CPU."""


class Workspace:
    """Memory on the CPU for the intermediates of batches of matrices, reused by one batch after another.

    On other devices the allocator of torch keeps memory by itself, and new tensors come from there.

    It is as large as the largest batch so far needed: `orthogonalize_many` bounds a batch by its
    ``max_scratch_bytes``, or by one matrix if that is more. It contains no result. A workspace serves one call at a
    time; a copy is empty.

    >>> workspace = Workspace()
    >>> for _ in range(2):
    ...     workspace.clear()
    ...     x = workspace.empty((3, 4), torch.float32, torch.device("cpu"))
    >>> workspace.nbytes
    64
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._used = 0

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        """Copy and pickle without the memory."""
        return Workspace, ()

    @property
    def nbytes(self) -> int:
        """The bytes that are kept."""
        return 0 if self._memory is None else len(self._memory)

    def clear(self) -> None:
        """Take back all that was given out; where it was more than there is, make as much room before the next."""
        if self._used > self.nbytes:
            self._memory = None  # freed first, so that old and new memory are never allocated together
            self._memory = torch.empty(self._used, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give out a tensor with any values, good until `clear`."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        start, size = self._used, math.prod(shape) * dtype.itemsize
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None or self._used > self.nbytes:
            return torch.empty(shape, dtype=dtype)
        return self._memory[start : start + size].view(dtype).view(shape)
