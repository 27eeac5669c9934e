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

_barriers_passed: dict[tuple[str, str], int] = {}
"""How many barriers this rank has passed: from (name of the group, purpose), such as "checkpoint.save", to a count."""


@dataclass(frozen=True)
class _Barrier:
    """The next barrier of the ranks of a group for a purpose, such as "checkpoint.save"."""

    group: dist.ProcessGroup
    purpose: str

    @property
    def store(self) -> dist.Store:
        """The key-value store that the ranks share."""
        return self.group.get_group_store()

    @property
    def number(self) -> int:
        """The number of barriers for this purpose that this rank has passed."""
        return _barriers_passed.get((self.group.group_name, self.purpose), 0)

    @property
    def prefix(self) -> str:
        """The start of the keys of this barrier: "muonfx/checkpoint.save/2" after two barriers for this purpose."""
        return f"muonfx/{self.purpose}/{self.number}"

    @property
    def keys(self) -> list[str]:
        """The key that each rank sets when it arrives, such as "muonfx/checkpoint.save/2/0" for rank 0."""
        return [f"{self.prefix}/{rank}" for rank in range(dist.get_world_size(self.group))]

    @property
    def failure_key(self) -> str:
        """The key of the text of an error, such as "muonfx/checkpoint.save/2/failed"."""
        return f"{self.prefix}/failed"

    def end(self) -> None:
        """Count the barrier as passed, so that the next barrier for this purpose has other keys."""
        _barriers_passed[self.group.group_name, self.purpose] = self.number + 1


def wait_for_all(group: dist.ProcessGroup, purpose: str) -> None:
    """Wait until every rank of a group has called this with the same `purpose`. After a timeout, name missing ranks.

    Each rank sets a key of its own in the store of the group, such as "muonfx/checkpoint.save/2/0" on rank 0, and waits
    for the keys of all ranks. If a rank called `report_failure` instead, its error is raised on all ranks.
    """
    if dist.get_backend(group) in _WITHOUT_STORE:
        return
    barrier = _Barrier(group, purpose)
    store = barrier.store
    key_of_rank = barrier.keys[dist.get_rank(group)]
    failure_key = barrier.failure_key  # of this barrier; after `end`, the attribute is the key of the next one
    with collective(purpose):
        store.set(key_of_rank, "")
        try:
            _require_all(barrier, _timeout(group))
        except BaseException:  # also KeyboardInterrupt: this rank has not arrived, and may call this again
            store.delete_key(key_of_rank)
            raise
        barrier.end()  # on all ranks, also if one has failed: they pass the next barrier together
        if store.check([failure_key]):
            text = store.get(failure_key).decode()
            raise ShardingError(f"nothing was changed on any rank:\n{text}")


def report_failure(group: dist.ProcessGroup, purpose: str, problem: BaseException) -> None:
    """Let the ranks that wait in `wait_for_all`, or will, raise this rank's error at once. This rank does not wait."""
    if dist.get_backend(group) in _WITHOUT_STORE:
        return
    barrier = _Barrier(group, purpose)
    text = f"rank {dist.get_rank(group)}: {type(problem).__name__}: {problem}"
    barrier.store.set(barrier.failure_key, text)
    for key in barrier.keys:  # also the keys of other ranks, so that no rank waits for another that is late
        barrier.store.set(key, "")
    barrier.end()


@contextmanager
def construction(find_group: Callable[[], dist.ProcessGroup | None]) -> Generator[None]:
    """Report an error of the ``with`` block to the other ranks, which may wait for this rank in `wait_for_all`.

    Without the report, they would wait until the timeout of the group. `find_group` returns their group, and is called
    after an error only; None if this rank constructs alone.
    """
    passed_before = dict(_barriers_passed)
    try:
        yield
    except Exception as error:
        group = find_group()
        if group is None or dist.get_world_size(group) == 1:
            raise
        key = group.group_name, CONSTRUCTING
        # If this rank has passed the barrier in the block, no rank waits for it there any more.
        if _barriers_passed.get(key) == passed_before.get(key):
            report_failure(group, CONSTRUCTING, error)
        raise


def _require_all(barrier: _Barrier, timeout: timedelta) -> None:
    """Wait until each rank has set its key. Warn after `PATIENCE`, and raise after the timeout."""
    missing = _missing(barrier, min(PATIENCE, timeout))
    if missing and timeout > PATIENCE:
        # The warning shows the line of the caller of the public function.
        warnings.warn(f"{barrier.purpose} waits for {missing}: all ranks must call it together", stacklevel=5)
        missing = _missing(barrier, timeout - PATIENCE)
    if missing:
        raise ShardingError(
            f"nothing was changed: all ranks must call {barrier.purpose} together, but {missing} did not within "
            f"{timeout}"
        )


def _missing(barrier: _Barrier, patience: timedelta) -> str:
    """Wait until each rank has set its key. Return a text of the ranks that have not, or "" if all have."""
    try:
        barrier.store.wait(barrier.keys, patience)
    except RuntimeError:  # DistStoreError of most stores
        absent = [rank for rank, key in enumerate(barrier.keys) if not barrier.store.check([key])]
        if absent:
            return listed(absent)
    return ""


def _timeout(group: Any) -> timedelta:
    """Return how long the collectives of a process group wait before they fail."""
    try:
        return group._get_backend(host_device(group)).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
