"""Skipping of whole steps with NaN or infinite gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx.core import Donation, EmptyState, Locality, Transform, identity, transform
from muonfx.core.contract import NOTHING, InStore
from muonfx.transforms._in_store import StoreExecutor
from muonfx.transforms._pinned import new_count
from muonfx.tree import Present, PyTree, device_of, map
from muonfx.tree import elementwise as ew

__all__ = ["SkipNonfiniteState", "skip_nonfinite"]


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`."""

    skipped: Tensor
    """Steps skipped in all, int64."""
    in_a_row: Tensor
    """Steps skipped since the last good one, int64."""
    inner: PyTree
    """The inner transform's state."""


def _init_in_store(executor: StoreExecutor, tx: Transform, params: PyTree) -> PyTree:
    own = tx.with_children(lambda _: identity()).functions.init(params)
    return own._replace(inner=tx.children[0].functions.init(params))


def _update_in_store(
    executor: StoreExecutor,
    tx: Transform,
    updates: PyTree,
    state: SkipNonfiniteState,
    params: PyTree,
    donate: Donation,
    extras: Mapping[str, object],
) -> tuple[PyTree, SkipNonfiniteState]:
    """Read whether the step is finite and branch on it, since selecting would load both offloaded states."""
    looking = tx.with_children(lambda _: identity())
    clean, after = looking.run(updates, state._replace(inner=EmptyState()), params, donate=donate, **extras)
    if int(after.in_a_row):
        return clean, after._replace(inner=executor.kept_state(state.inner, updates, donate))
    out, inner = tx.children[0].run(clean, state.inner, params, donate=Donation(True, donate.state), **extras)
    return out, after._replace(inner=inner)


@transform(locality=Locality.TREE, own_locality=Locality.TREE, in_store=InStore(_init_in_store, _update_in_store))
def skip_nonfinite(inner: Transform):
    """Leave the state of a transform bitwise as it was, and update nothing, when any gradient is NaN or infinite.

    Nothing is read back from the device: old or new is selected there. So the inner transform runs at every step, on
    zeros where the step is skipped, and its old state cannot be donated to it. Around `accumulate`, whose counters
    are in host memory, the selection waits for the device: ``accumulate(skip_nonfinite(...), k)`` does not.

    Args:
        inner: usually the whole chain, so that one bad leaf skips the whole step.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.skip_nonfinite(mfx.momentum(0.9, nesterov=False))
        >>> state = tx.init({"w": torch.zeros(1)})
        >>> updates, state = tx.update({"w": torch.tensor([float("nan")])}, state)
        >>> updates, int(state.skipped), state.inner.trace
        ({'w': tensor([0.])}, 1, {'w': tensor([0.])})
    """
    if not isinstance(inner, Transform):
        raise TypeError(f"skip_nonfinite: inner must be a Transform, found {inner!r}")

    def init(params: PyTree) -> SkipNonfiniteState:
        device = device_of(params)
        return SkipNonfiniteState(new_count(device), new_count(device), inner.functions.init(params))

    def update(
        updates: PyTree,
        state: SkipNonfiniteState,
        params: PyTree = None,
        *,
        sum_over_leaves: Callable[[PyTree], Tensor],
        donate: Donation = NOTHING,
        **extras: object,
    ):
        at = Present(updates)
        leaves = at.pick(updates)
        # Use infinity as the flag: every rank sees it in the sum, whichever ranks contribute.
        peaks = ew.peaks(leaves)
        bad = sum_over_leaves(
            at.fill([torch.where(p.isfinite(), 0.0, torch.inf).to(device=p.device, dtype=torch.float32) for p in peaks])
        )
        good = bad.to(state.skipped.device) == 0
        # Use torch.where: zero times NaN is NaN. It also keeps derivatives finite.
        clean = at.fill([torch.where(good.to(leaf.device), leaf, torch.zeros_like(leaf)) for leaf in leaves])
        extras["sum_over_leaves"] = sum_over_leaves
        out, new_inner = inner.run(clean, state.inner, params, donate=Donation(True, False), **extras)

        def select(new: Any, old: Any) -> Any:
            return torch.where(good.to(new.device), new, old) if isinstance(new, Tensor) else new

        skipped = (~good).to(torch.int64)
        new_state = SkipNonfiniteState(
            state.skipped + skipped, (state.in_a_row + 1) * skipped, map(select, new_inner, state.inner)
        )
        return map(lambda u: torch.where(good.to(u.device), u, torch.zeros_like(u)), out), new_state

    return init, update
