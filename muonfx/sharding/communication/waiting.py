"""Let ranks wait for each other without a collective, through the key-value store of their process group.

A caller may start a collective on one rank alone by mistake. A rank that first waits here disturbs no collective of the
others, for example in the next backward pass, and its error names the missing ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Meeting:
    """The next meeting of the ranks of a group for a purpose, such as "checkpoint.save"."""

    group: dist.ProcessGroup
    purpose: str

    @property
    def store(self) -> dist.Store:
        """The key-value store that the ranks share."""
        return self.group.get_group_store()

    @property
    def prefix(self) -> str:
        """The start of the keys of this meeting: "muonfx/checkpoint.save/2" after two meetings for this purpose."""
        return f"muonfx/{self.purpose}/{_meetings.get((self.group.group_name, self.purpose), 0)}"

    @property
    def keys(self) -> list[str]:
        """The key that each rank sets when it arrives, such as "muonfx/checkpoint.save/2/0" for rank 0."""
        return [f"{self.prefix}/{rank}" for rank in range(dist.get_world_size(self.group))]

    @property
    def failure_key(self) -> str:
        """The key of the text of an error, such as "muonfx/checkpoint.save/2/failed"."""
        return f"{self.prefix}/failed"

    def end(self) -> None:
        """Record that this rank has met the others, so that the next meeting has other keys."""
        key = self.group.group_name, self.purpose
        _meetings[key] = _meetings.get(key, 0) + 1


def wait_for_all(group: dist.ProcessGroup, purpose: str) -> None:
    """Wait until every rank of a group has called this with the same `purpose`. After a timeout, name missing ranks.

    Each rank sets a key of its own in the store of the group and waits for the keys of all ranks. If a rank called
    `report_failure` instead, its error is raised on all ranks.
    """
    if dist.get_backend(group) in _WITHOUT_STORE:
        return
    meeting = _Meeting(group, purpose)
    own_key = meeting.keys[dist.get_rank(group)]
    with collective(purpose):
        meeting.store.set(own_key, "")
        try:
            _require_all(meeting, _timeout(group))
        except BaseException:  # also an interrupt: this rank no longer waits, and all can meet later
            meeting.store.delete_key(own_key)
            raise
        failure_key = meeting.failure_key
        meeting.end()
        if meeting.store.check([failure_key]):
            text = meeting.store.get(failure_key).decode()
            raise ShardingError(f"nothing was changed on any rank:\n{text}")


def report_failure(group: dist.ProcessGroup, purpose: str, problem: BaseException) -> None:
    """Let the ranks that wait in `wait_for_all`, or will, raise this rank's error at once. This rank does not wait."""
    if dist.get_backend(group) in _WITHOUT_STORE:
        return
    meeting = _Meeting(group, purpose)
    text = f"rank {dist.get_rank(group)}: {type(problem).__name__}: {problem}"
    meeting.store.set(meeting.failure_key, text)
    for key in meeting.keys:  # also the keys of other ranks, so that no rank waits for another that is late
        meeting.store.set(key, "")
    meeting.end()


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


def _require_all(meeting: _Meeting, timeout: timedelta) -> None:
    """Wait until each rank has set its key. Warn after `PATIENCE`, and raise after the timeout."""
    missing = _missing(meeting, min(PATIENCE, timeout))
    if missing and timeout > PATIENCE:
        warnings.warn(f"{meeting.purpose} waits for {missing}: all ranks must call it together", stacklevel=5)
        missing = _missing(meeting, timeout - PATIENCE)
    if missing:
        raise ShardingError(
            f"nothing was changed: all ranks must call {meeting.purpose} together, but {missing} did not within "
            f"{timeout}"
        )


def _missing(meeting: _Meeting, patience: timedelta) -> str:
    """Wait until each rank has set its key. Return a text of the ranks that have not, or "" if all have."""
    try:
        meeting.store.wait(meeting.keys, patience)
    except RuntimeError:  # DistStoreError of most stores
        absent = [rank for rank, key in enumerate(meeting.keys) if not meeting.store.check([key])]
        return listed(absent) if absent else ""
    return ""


def _timeout(group: Any) -> timedelta:
    """Return how long the collectives of a process group wait before they fail."""
    try:
        return group._get_backend(host_device(group)).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
