"""Let ranks wait for each other without a collective, through the key-value store of their process group.

A caller may start a collective on one rank alone by mistake. A rank that first waits here disturbs no collective of the
others, for example in the next backward pass, and its error names the missing ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from muonfx.sharding.communication.differences import listed
from muonfx.sharding.communication.messages import collective, host_device
from muonfx.sharding.errors import ShardingError

CONSTRUCTING = "the construction of a sharded transform or optimizer"

PATIENCE = timedelta(seconds=20)
"""The time after which a rank that waits for others in `wait_for_all` warns."""

_WITHOUT_STORE = ("fake", "mpi")
"""Backends whose groups have no key-value store: torch's pretended ranks, and MPI. Their ranks do not wait here."""

_meetings: dict[tuple[str, str], int] = {}
"""How often the ranks of a group have met for a purpose: from (name of the group, purpose) to a number."""


def wait_for_all(group: dist.ProcessGroup, purpose: str) -> None:
    """Wait until every rank of a group has called this with the same `purpose`. After a timeout, name missing ranks.

    Each rank sets a key of its own in the store of the group, such as "muonfx/checkpoint.save/2/0" on rank 0, and waits
    for the keys of all ranks. The number 2 counts the meetings before this one, so no key is used twice. If a rank
    called `report_failure` instead, its error is raised on all ranks.
    """
    if dist.get_backend(group) in _WITHOUT_STORE:
        return
    keys = _keys(group, purpose)
    failure_key = _failure_key(group, purpose)
    own_key = keys[dist.get_rank(group)]
    with collective(purpose):
        store = group.get_group_store()
        store.set(own_key, "")
        try:
            _require_all(store, keys, _timeout(group), purpose)
        except BaseException:  # also an interrupt: this rank no longer waits, and all can meet later
            store.delete_key(own_key)
            raise
        _count_meeting(group, purpose)
        if store.check([failure_key]):
            raise ShardingError(f"nothing was changed on any rank:\n{store.get(failure_key).decode()}")


def report_failure(group: dist.ProcessGroup, purpose: str, problem: BaseException) -> None:
    """Let the ranks that wait in `wait_for_all`, or will, raise this rank's error at once. This rank does not wait."""
    if dist.get_backend(group) in _WITHOUT_STORE:
        return
    store = group.get_group_store()
    store.set(_failure_key(group, purpose), f"rank {dist.get_rank(group)}: {type(problem).__name__}: {problem}")
    for key in _keys(group, purpose):  # also the keys of other ranks, so that no rank waits for another that is late
        store.set(key, "")
    _count_meeting(group, purpose)


@contextmanager
def construction(find_group: Callable[[], dist.ProcessGroup | None]) -> Generator[None]:
    """Report an error of the ``with`` block to the other ranks, if this rank has not met them in the block.

    Without the report, they would wait for this rank until the timeout of the group. `find_group` returns their group,
    and is called after an error only; None if this rank constructs alone.
    """
    meetings_before = dict(_meetings)
    try:
        yield
    except Exception as error:
        group = find_group()
        if group is not None and dist.get_world_size(group) > 1:
            key = group.group_name, CONSTRUCTING
            if _meetings.get(key) == meetings_before.get(key):
                report_failure(group, CONSTRUCTING, error)
        raise


def _count_meeting(group: dist.ProcessGroup, purpose: str) -> None:
    """Record that this rank has met the others, so that the next meeting has other keys."""
    key = group.group_name, purpose
    _meetings[key] = _meetings.get(key, 0) + 1


def _prefix(group: dist.ProcessGroup, purpose: str) -> str:
    """Return the start of the keys of the next meeting, such as "muonfx/checkpoint.save/2"."""
    return f"muonfx/{purpose}/{_meetings.get((group.group_name, purpose), 0)}"


def _keys(group: dist.ProcessGroup, purpose: str) -> list[str]:
    """Return the key that each rank sets to meet the others, such as "muonfx/checkpoint.save/2/0" for rank 0."""
    return [f"{_prefix(group, purpose)}/{rank}" for rank in range(dist.get_world_size(group))]


def _failure_key(group: dist.ProcessGroup, purpose: str) -> str:
    """Return the key of the text of an error, such as "muonfx/checkpoint.save/2/failed"."""
    return f"{_prefix(group, purpose)}/failed"


def _require_all(store: dist.Store, keys: list[str], timeout: timedelta, purpose: str) -> None:
    """Wait until each rank has set its key. Warn after `PATIENCE`, and raise after the timeout."""
    missing = _missing(store, keys, min(PATIENCE, timeout))
    if missing and timeout > PATIENCE:
        warnings.warn(f"{purpose} waits for {missing}: all ranks must call it together", stacklevel=5)
        missing = _missing(store, keys, timeout - PATIENCE)
    if missing:
        raise ShardingError(
            f"nothing was changed: all ranks must call {purpose} together, but {missing} did not within {timeout}"
        )


def _missing(store: dist.Store, keys: list[str], patience: timedelta) -> str:
    """Wait until each rank has set its key in a store. Return a text of the ranks that have not, or "" if all have."""
    try:
        store.wait(keys, patience)
    except RuntimeError:  # DistStoreError of most stores
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return listed(absent) if absent else ""
    return ""


def _timeout(group: Any) -> timedelta:
    """Return how long the collectives of a process group wait before they fail."""
    try:
        return group._get_backend(host_device(group)).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
