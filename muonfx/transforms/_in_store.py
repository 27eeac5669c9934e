"""The part of an executor that a wrapper calls when its state is offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from muonfx.core import Donation, Transform
from muonfx.tree import PyTree

__all__ = ["StoreExecutor"]


class StoreExecutor(Protocol):
    """Carries out a transform that looks at one leaf at a time by buckets, with its state in a store."""

    def init_in_store(self, tx: Transform, params: PyTree) -> PyTree:
        """Build its state, in the store."""
        ...

    def update_in_store(
        self,
        tx: Transform,
        updates: PyTree,
        state: PyTree,
        params: PyTree,
        donate: Donation,
        extras: Mapping[str, object],
        *,
        absent: bool = False,
    ) -> tuple[PyTree, PyTree]:
        """Update by it; with ``absent``, also the state of leaves that have no update."""
        ...

    def kept_state(self, state: PyTree, params: PyTree, donate: Donation) -> PyTree:
        """Return a state that does not change."""
        ...
