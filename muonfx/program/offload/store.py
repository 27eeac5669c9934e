"""Where the leaves of an offloaded state lie when nobody computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.program.offload.files import PAGE, folder_of, in_file, nbytes_of, release, require_room
from muonfx.program.offload.transfer import BucketTransfer
from muonfx.tree import Spec

__all__ = ["OffloadStore"]

CPU = torch.device("cpu")


class OffloadStore(NamedTuple):
    """Host memory or a disk, and how state comes from there: what the caller of `offload` has chosen."""

    folder: str | None
    """On whose disk; None: host memory."""
    bucket_bytes: int
    """About how many bytes of state are brought in at a time; a single larger leaf stands alone."""
    on_host: bool
    """True if the transform computes on the CPU, wherever the gradients are."""

    def device(self, given: torch.device) -> torch.device:
        """The device to compute on, with updates that are on a device."""
        return CPU if self.on_host else given

    def is_direct(self, device: torch.device) -> bool:
        """True if a transform on a device can work in the state where it lies."""
        return self.folder is None and device.type == "cpu"

    def has(self, leaf: Tensor, device: torch.device) -> bool:
        """True if a leaf lies at home, for a transform on a device."""
        if leaf.device.type != "cpu":
            return False
        if self.folder is not None and _on_disk(Spec(tuple(leaf.shape), leaf.dtype)):
            return folder_of(leaf) == self.folder
        return device.type != "cuda" or leaf.is_pinned()

    def allocate(self, specs: Sequence[Spec], device: torch.device) -> list[Tensor]:
        """Make tensors at home, with any values: on disk those of a page or more, in memory the rest.

        Args:
            specs: shapes and dtypes.
            device: where transforms compute: for CUDA the memory is pinned.

        Raises:
            OSError: the disk has no room, or the folder cannot be written to.
        """
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
        """Never: state is brought in."""
        return False

    def computing_with_updates(self) -> OffloadStore:
        """The same place, for transforms that compute where the updates are."""
        return self._replace(on_host=False)

    def transfer(self, device: torch.device, buckets: Sequence[Sequence[Tensor]]) -> BucketTransfer:
        """Begin to bring the leaves of some buckets in."""
        return BucketTransfer(device, buckets, filed=self.folder is not None)

    def release(self, leaf: Tensor) -> None:
        """Let go of the memory that a leaf's pages take in this process, where it lies in a file."""
        release(leaf)

    def require(self, specs: Sequence[Spec]) -> None:
        """Require that there is room for further tensors, before anything is changed.

        Raises:
            OSError: there is none.
        """
        if self.folder is not None and specs:
            require_room(self.folder, sum(nbytes_of(spec) for spec in specs if _on_disk(spec)))


def _on_disk(spec: Spec) -> bool:
    return nbytes_of(spec) >= PAGE  # a smaller one would take a page there
