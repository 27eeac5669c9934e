"""`Buffers`: memory for messages that is used again."""

from __future__ import annotations

import torch
from torch import Tensor


class Buffers:
    """Reusable CPU memory for messages between ranks. Fresh memory would cost as much time as sending the data."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """The total size in bytes of the buffers that are free to be reused."""
        return sum(map(len, self._free))

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized 1-d tensor, on the CPU in memory that was given back before, if it is large enough.

        >>> buffers = Buffers()
        >>> message = buffers.take(4, torch.float32, torch.device("cpu"))
        >>> buffers.give_back(message)
        >>> buffers.take(2, torch.float32, torch.device("cpu")).data_ptr() == message.data_ptr()
        True
        """
        # Other devices have torch's caching allocator.
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        # The shortest free buffer that is long enough: they are in ascending order of size.
        nbytes = numel * dtype.itemsize
        for index, memory in enumerate(self._free):
            if len(memory) >= nbytes:
                del self._free[index]
                return memory[:nbytes].view(dtype)
        # Even the longest is too short, and would stay unused in such calls. A new, longer buffer replaces it.
        if self._free:
            self._free.pop()
        return torch.empty(nbytes, dtype=torch.uint8).view(dtype)

    def give_back(self, tensor: Tensor) -> None:
        """Make the memory of a tensor from `take` free again, so that a later message can reuse it."""
        if tensor.device.type == "cpu" and tensor.numel():
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._free.append(memory)
            self._free.sort(key=len)
