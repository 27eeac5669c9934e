"""Wait for all ranks before a collective that a caller may have started on one rank alone.

The ranks wait in their group's store, where no collective has begun. A rank that calls alone therefore disturbs no
collective of the others, for example in the next backward pass, and its error names the missing ranks.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from muonfx.sharding.consensus import host_device, listed
from muonfx.sharding.messages import ShardingError, collective

__all__ = ["wait_for_all"]

PATIENCE = timedelta(seconds=20)
"""The time after which a waiting rank warns."""

_met: dict[tuple[str, str], int] = {}
"""How often the ranks of a group have met for a purpose; equal on all of its ranks."""


def wait_for_all(group: dist.ProcessGroup, what: str) -> None:
    """Return once all ranks of a group have called this for the same purpose; ShardingError names missing ranks."""
    turn = _met.get((group.group_name, what), 0)
    keys = [f"muonfx/{what}/{turn}/{rank}" for rank in range(dist.get_world_size(group))]
    own = keys[dist.get_rank(group)]
    with collective(what):
        store = group.get_group_store()
        store.set(own, "")
        try:
            _wait(store, keys, what, _timeout(group))
        except BaseException:  # also an interrupt: this rank no longer waits, and all can meet later
            store.delete_key(own)
            raise
    _met[group.group_name, what] = turn + 1


def _wait(store: dist.Store, keys: list[str], what: str, patience: timedelta) -> None:
    """Wait until the keys of all ranks are set."""
    missing = _missing(store, keys, min(PATIENCE, patience))
    if missing and patience > PATIENCE:
        warnings.warn(f"{what} waits for {missing}: all ranks must call it together", stacklevel=5)
        missing = _missing(store, keys, patience - PATIENCE)
    if missing:
        raise ShardingError(
            f"nothing was changed: all ranks must call {what} together, but {missing} did not within {patience}"
        )


def _missing(store: dist.Store, keys: list[str], patience: timedelta) -> str:
    """Return the ranks whose keys are not set within some time; an empty string if there are none."""
    try:
        store.wait(keys, patience)
    except RuntimeError:  # DistStoreError of most stores
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return listed(absent) if absent else ""
    return ""


def _timeout(group: Any) -> timedelta:
    """Return the timeout of a group."""
    try:
        return group._get_backend(host_device(group)).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
