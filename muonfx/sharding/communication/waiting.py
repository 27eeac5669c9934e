"""Let ranks wait for each other without a collective, through the key-value store of their process group.

`ranks_that_claimed` also uses a store, to find out about groups of other ranks, which have no collective with these.

A caller may start a collective on one rank alone by mistake. A rank that first waits here disturbs no collective of the
others, for example in the next backward pass, and its error names the missing ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from muonfx.core.checks import warn_caller
from muonfx.sharding.communication.differences import listed
from muonfx.sharding.communication.messages import collective, host_device
from muonfx.sharding.errors import ShardingError

CONSTRUCTING = "the construction of a sharded transform or optimizer"

PATIENCE = timedelta(seconds=20)
"""The time after which a rank that waits for others in `wait_for_all` warns."""

_WITHOUT_STORE = ("fake", "mpi")
"""Backends whose groups have no key-value store: torch's pretended ranks, and MPI. Their ranks do not wait here."""

_barriers_passed: Counter[tuple[str, str]] = Counter()
"""How many barriers this rank has passed, by name of the group and purpose, such as "checkpoint.save"."""


def _keys_of_barrier(group: dist.ProcessGroup, purpose: str) -> tuple[list[str], str]:
    """Return the key that each rank sets when it arrives at the next barrier, and the key of a failure.

    After two barriers for the purpose, they are ``["muonfx/checkpoint.save/2/0", "muonfx/checkpoint.save/2/1"]`` and
    "muonfx/checkpoint.save/2/failed" on two ranks.
    """
    number = _barriers_passed[group.group_name, purpose]
    prefix = f"muonfx/{purpose}/{number}"
    size = dist.get_world_size(group)
    keys_of_ranks = [f"{prefix}/{rank}" for rank in range(size)]
    return keys_of_ranks, f"{prefix}/failed"


def wait_for_all(group: dist.ProcessGroup, purpose: str) -> None:
    """Wait until every rank of a group has called this with the same `purpose`. After a timeout, name missing ranks.

    Ranks call this before an operation that all must begin together, such as "checkpoint.save". ``dist.barrier`` is a
    collective: if one rank called it alone by mistake, it would be taken for the next collective of the others.

    So each rank sets a key of its own in the store of the group, such as "muonfx/checkpoint.save/2/0" on rank 0, and
    waits for the keys of all ranks. The 2 counts these waits so far, so each has new keys. If a rank called
    `report_failure` instead, its error is raised on all ranks.
    """
    if dist.get_backend(group) in _WITHOUT_STORE:
        return
    store = group.get_group_store()
    keys, key_of_failure = _keys_of_barrier(group, purpose)
    key_of_rank = keys[dist.get_rank(group)]
    with collective(purpose):
        # 1. This rank arrives, and waits for the others.
        store.set(key_of_rank, "")
        try:
            _require_all(store, keys, purpose, _timeout(group))
        except BaseException:
            # After a KeyboardInterrupt, too, this rank has not arrived, and may call this again.
            store.delete_key(key_of_rank)
            raise
        # 2. All ranks have arrived, so all of them count the barrier, also if one has failed.
        _barriers_passed[group.group_name, purpose] += 1
        if store.check([key_of_failure]):
            text = store.get(key_of_failure).decode()
            raise ShardingError(f"nothing was changed on any rank:\n{text}")


def ranks_that_claimed(name: str, group: dist.ProcessGroup) -> list[int]:
    """Claim a name for a process group, so that no other group of the job uses it. Return the ranks that have it.

    One rank of each group calls this. If the group of ranks 0 and 1 claims the name of a folder first, and the group of
    ranks 2 and 3 claims it too, the result is ``[0, 1]`` for both.
    """
    ranks = dist.get_process_group_ranks(group)
    world = dist.group.WORLD
    # The group has all ranks of the job, or the job has no store in which another group could have claimed the name.
    if (
        world is None
        or len(ranks) == dist.get_world_size()
        or dist.get_backend(world) in _WITHOUT_STORE
    ):
        return ranks
    # `compare_set` with "" writes the ranks if the key has no value yet, and returns the value of the key: the ranks of
    # the first group, such as "0 1".
    text = " ".join(map(str, ranks))
    with collective(f"claiming {name}"):
        store = world.get_group_store()
        claimed = store.compare_set(f"muonfx/claims/{name}", "", text)
    ranks_as_texts = claimed.decode().split()
    return list(map(int, ranks_as_texts))


def report_failure(group: dist.ProcessGroup, purpose: str, problem: BaseException) -> None:
    """Send this rank's error to the ranks that wait for it in `wait_for_all`, or will. They raise it at once.

    The error is stored under a key such as "muonfx/checkpoint.save/2/failed". This rank does not wait.
    """
    if dist.get_backend(group) in _WITHOUT_STORE:
        return
    store = group.get_group_store()
    keys, key_of_failure = _keys_of_barrier(group, purpose)
    rank = dist.get_rank(group)
    store.set(key_of_failure, f"rank {rank}: {type(problem).__name__}: {problem}")
    # The other ranks wait for the keys of all ranks before they look for an error. All keys are set here, so that they
    # do not wait for a rank that is late.
    for key in keys:
        store.set(key, "")
    _barriers_passed[group.group_name, purpose] += 1


@contextmanager
def construction(find_group: Callable[[], dist.ProcessGroup | None]) -> Generator[None]:
    """Report an error of the ``with`` block to the other ranks, which may wait for this rank.

    Each rank constructs an optimizer, for example, in ``with construction(lambda: layout.group):``, and the ranks meet
    in ``wait_for_all(group, CONSTRUCTING)`` near the end of the block. If a rank fails before it, because its arguments
    are wrong, the others would wait for it until the timeout of the group. With the report, they raise its error at
    once.

    `find_group` returns the group of these ranks, or None if this rank constructs alone. It is called after an error
    only.
    """
    passed_before = _barriers_passed.copy()  # of all groups: that of this block is not known yet
    try:
        yield
    except Exception as error:
        group = find_group()
        if group is None or dist.get_world_size(group) == 1:  # no rank waits for this one
            raise
        # If the ranks have met at the barrier in the block, none waits there any more, and they exchange later errors
        # themselves. `report_failure` counts as a meeting: an inner block has then reported this error.
        barrier = group.group_name, CONSTRUCTING
        has_met_others = _barriers_passed[barrier] > passed_before[barrier]
        if not has_met_others:
            report_failure(group, CONSTRUCTING, error)
        raise


def _require_all(store: dist.Store, keys: Sequence[str], purpose: str, timeout: timedelta) -> None:
    """Wait until each rank has set its key. Warn after `PATIENCE` (20 seconds), and raise after the timeout.

    The warning is "checkpoint.save waits for rank 3: all ranks must call it together".
    """
    # 1. A short wait, which nearly always suffices. Then a warning, and the rest of the time.
    missing_ranks = _missing(store, keys, min(PATIENCE, timeout))
    if missing_ranks and timeout > PATIENCE:
        warn_caller(f"{purpose} waits for {missing_ranks}: all ranks must call it together")
        missing_ranks = _missing(store, keys, timeout - PATIENCE)
    # 2. Some ranks have not arrived at all.
    if missing_ranks:
        raise ShardingError(
            f"nothing was changed: all ranks must call {purpose} together, but {missing_ranks} did not within {timeout}"
        )


def _missing(store: dist.Store, keys: Sequence[str], patience: timedelta) -> str:
    """Wait until each rank has set its key. Return the ranks that have not, such as "ranks 1, 3", or "" if all have."""
    try:
        store.wait(list(keys), patience)
    except RuntimeError:
        # Most stores raise DistStoreError, which is a RuntimeError, after the patience.
        absent_ranks = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if absent_ranks:
            return listed(absent_ranks)
    return ""


def _timeout(group: Any) -> timedelta:
    """Return how long the collectives of a process group wait before they fail."""
    try:
        return group._get_backend(host_device(group)).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
