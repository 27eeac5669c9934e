"""`Workspace`: memory for the temporary tensors of `orthogonalize_many` that is reused between calls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Alignment in bytes: a cache line, and the widest vector of a CPU."""


class Workspace:
    """CPU memory that several calls of `orthogonalize_many` reuse for their temporary tensors.

    `empty` returns a tensor in this memory. `clear` frees the memory for the next batch, and enlarges it if the last
    batch did not fit. Results are never in it. On other devices, `empty` allocates new tensors, because torch's
    allocator reuses memory there. Use a workspace in one call at a time. A copy of a workspace has no memory yet.

    A new workspace has no memory. The second `clear` allocates it here, in multiples of a cache line:

    >>> workspace = Workspace()
    >>> for _ in range(2):
    ...     workspace.clear()
    ...     x = workspace.empty((3, 4), torch.float32, torch.device("cpu"))
    >>> workspace.nbytes
    64
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._used = 0

    def __repr__(self) -> str:
        return f"<workspace of {self.nbytes} bytes>"

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()

    @property
    def nbytes(self) -> int:
        """The size of the reused memory in bytes."""
        return 0 if self._memory is None else len(self._memory)

    def clear(self) -> None:
        """Free the memory for new tensors. Tensors that `empty` returned before must not be used any more.

        If they did not fit into the memory, it is enlarged to their total size.
        """
        if self._used > self.nbytes:
            # Freed first, so that old and new memory are never allocated together.
            self._memory = None
            self._memory = torch.empty(self._used, dtype=torch.uint8, device="cpu")
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor, in the reused memory if it fits. Do not use it after the next `clear`."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        # Take the next bytes of the memory, rounded up so that every tensor begins at a cache line.
        start = self._used
        size = math.prod(shape) * dtype.itemsize
        self._used += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
        # Does not fit; `clear` will enlarge the memory.
        if self._memory is None or self._used > self.nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return self._memory[start : start + size].view(dtype).view(shape)
