"""The interface of an executor that a wrapper calls when its state is offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from muonfx.core import Donation, EmptyState, Transform, identity
from muonfx.core.contract import InStore
from muonfx.tree import PyTree

__all__ = ["INNER_FIRST", "StoreExecutor", "init_in_store"]


class StoreExecutor(Protocol):
    """Runs a transform that works leaf by leaf in buckets, with its state in a store."""

    def init_in_store(self, tx: Transform, params: PyTree) -> PyTree:
        """Build the transform's state in the store."""
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
        """Update in buckets; with ``absent``, also update the state of leaves without an update."""
        ...

    def kept_state(self, state: PyTree, params: PyTree, donate: Donation) -> PyTree:
        """Return an unchanged state, copied unless the state is donated."""
        ...


def init_in_store(executor: StoreExecutor, tx: Transform, params: PyTree) -> PyTree:
    """Build the state of a wrapper with a field ``inner``: its own part in the store, then the inner state."""
    own = executor.init_in_store(tx.with_children(lambda _: identity()), params)
    return own._replace(inner=tx.children[0].functions.init(params))


def _update_in_store(
    executor: StoreExecutor,
    tx: Transform,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    donate: Donation,
    extras: Mapping[str, object],
) -> tuple[PyTree, PyTree]:
    out, inner = tx.children[0].run(updates, state.inner, params, donate=donate, **extras)
    own = state._replace(inner=EmptyState())
    given = Donation(False, donate.state)
    out, after = executor.update_in_store(tx.with_children(lambda _: identity()), out, own, params, given, extras)
    return out, after._replace(inner=inner)


INNER_FIRST = InStore(init_in_store, _update_in_store)
"""For a wrapper that runs its inner transform first, then works elementwise; the inner state is in ``inner``."""
