"""The store of a state between steps: with the parameters, in host memory, or in files on a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.program.offload.files import PAGE, folder_of, in_file, require_room
from muonfx.tree import Spec

__all__ = ["IN_MEMORY", "Store"]


class Store(NamedTuple):
    """Where a state is kept between steps, and how much of it is loaded at a time. Default: with the parameters."""

    to: str | None = None
    """ "cpu" for host memory, or the folder on whose disk the state is; None: the parameters' device."""
    bucket_bytes: int = 0
    """About how many bytes of state are loaded at a time; a larger leaf is a bucket of its own."""

    @property
    def on_disk(self) -> bool:
        """True if the state is in files."""
        return self.to not in (None, "cpu")

    def is_direct(self, device: torch.device) -> bool:
        """Return True if a transform on a device can update the stored state in place."""
        return self.to == "cpu" and device.type == "cpu"

    def has(self, leaf: Tensor, device: torch.device) -> bool:
        """Return True if a leaf is in this store, for a transform on a device."""
        if leaf.device.type != "cpu":
            return False
        if self._in_file(tree.spec(leaf)):
            return folder_of(leaf) == self.to
        return device.type != "cuda" or leaf.is_pinned()

    def allocate(self, specs: Sequence[Spec], device: torch.device) -> list[Tensor]:
        """Allocate uninitialized tensors, in host memory pinned if `device` is CUDA."""
        mapped = iter(in_file([spec for spec in specs if self._in_file(spec)], str(self.to)))
        pin = device.type == "cuda"
        return [
            next(mapped) if self._in_file(x) else torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pin)
            for x in specs
        ]

    def require(self, specs: Sequence[Spec]) -> None:
        """Raise OSError unless the disk has room for further tensors."""
        if self.to is not None and self.on_disk and specs:
            require_room(self.to, sum(spec.nbytes for spec in specs if self._in_file(spec)))

    def _in_file(self, spec: Spec) -> bool:
        return self.on_disk and spec.nbytes >= PAGE  # in a file a smaller tensor would take a whole page


IN_MEMORY = Store()
