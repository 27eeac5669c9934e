"""The store of an offloaded state: host memory, or files on a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.program.offload.files import PAGE, folder_of, in_file, release, require_room
from muonfx.program.offload.transfer import BucketTransfer
from muonfx.tree import Spec

__all__ = ["OffloadStore"]

CPU = torch.device("cpu")


class OffloadStore(NamedTuple):
    """The settings of `offload`: where the state is stored, and how it is loaded."""

    folder: str | None
    """The folder on whose disk the state is; None: host memory."""
    bucket_bytes: int
    """About how many bytes of state are loaded at a time; a larger leaf is a bucket of its own."""
    on_host: bool
    """True if the transform computes on the CPU, on whatever device the gradients are."""

    def device(self, given: torch.device) -> torch.device:
        """Return the device on which transforms compute, for updates on a given device."""
        return CPU if self.on_host else given

    def is_direct(self, device: torch.device) -> bool:
        """Return True if a transform on a device can update the stored state in place."""
        return self.folder is None and device.type == "cpu"

    def has(self, leaf: Tensor, device: torch.device) -> bool:
        """Return True if a leaf is in this store, for a transform on a device."""
        if leaf.device.type != "cpu":
            return False
        if self.folder is not None and _on_disk(Spec(tuple(leaf.shape), leaf.dtype)):
            return folder_of(leaf) == self.folder
        return device.type != "cuda" or leaf.is_pinned()

    def allocate(self, specs: Sequence[Spec], device: torch.device) -> list[Tensor]:
        """Allocate uninitialized tensors: on disk from one page on, else in memory, pinned if `device` is CUDA."""
        filed = [self.folder is not None and _on_disk(spec) for spec in specs]
        mapped = iter(
            in_file([spec for spec, on_disk in zip(specs, filed, strict=True) if on_disk], self.folder)
            if self.folder is not None
            else []
        )
        pin = device.type == "cuda"
        return [
            next(mapped) if on_disk else torch.empty(spec.shape, dtype=spec.dtype, device=CPU, pin_memory=pin)
            for spec, on_disk in zip(specs, filed, strict=True)
        ]

    @property
    def is_resident(self) -> bool:
        """False: the state is loaded for each step."""
        return False

    def computing_with_updates(self) -> OffloadStore:
        """Return the same store for transforms that compute on the updates' device."""
        return self._replace(on_host=False)

    def transfer(self, device: torch.device, buckets: Sequence[Sequence[Tensor]]) -> BucketTransfer:
        """Start to load the leaves of some buckets."""
        return BucketTransfer(device, buckets, filed=self.folder is not None)

    def release(self, leaf: Tensor) -> None:
        """Free the memory that a leaf in a file uses in this process."""
        release(leaf)

    def require(self, specs: Sequence[Spec]) -> None:
        """Raise OSError unless the disk has room for further tensors."""
        if self.folder is not None and specs:
            require_room(self.folder, sum(spec.nbytes for spec in specs if _on_disk(spec)))


def _on_disk(spec: Spec) -> bool:
    return spec.nbytes >= PAGE  # on disk a smaller tensor would take a whole page
