"""A barrier for ranks in their group's store, which also exchanges errors and messages.

No collective starts before all ranks have arrived. A rank that calls alone therefore disturbs no collective of the
others, for example in the next backward pass, and its error names the missing ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from muonfx.sharding.consensus import host_device
from muonfx.sharding.messages import ShardingError
from muonfx.tree.display import format_list

__all__ = ["Rendezvous"]

PATIENCE = timedelta(seconds=20)
"""The time after which a waiting rank warns."""

_made: dict[str, int] = {}
"""The number of rendezvous of each group name: all ranks create them together, so the numbers agree."""


class Rendezvous:
    """A reusable barrier of a group's ranks in its store; all ranks create it together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        name = group.group_name
        _made[name] = _made.get(name, 0) + 1
        self._group = group
        self._key, self._round = f"muonfx/{_made[name]}", 0
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def _store(self) -> dist.Store:
        return self._group.get_group_store()

    def wait_for_all(self, what: str, problem: Exception | None = None, said: bytes = b"") -> None:
        """Wait for all ranks; a problem of any rank, or a missing rank, raises an error on all."""
        at = f"{self._key}/{self._round}"
        text = f"{type(problem).__name__}: {problem}"
        try:
            # The first byte distinguishes a problem from a message.
            self._store.set(f"{at}/{self._rank}", "=" + said.hex() if problem is None else "!" + text)
            if problem is not None:
                self._store.add(f"{at}/problems", 1)
            if self._store.add(f"{at}/arrived", 1) == self._size:
                self._store.set(f"{at}/all", "")
            try:
                self._wait(at, what)
            except BaseException:  # also an interrupt
                if self._withdraw(at, problem):
                    raise
            failed = self._store.add(f"{at}/problems", 0)
        except RuntimeError as error:
            if isinstance(error, ShardingError):
                raise
            raise ShardingError(f"{what} failed: the ranks' store cannot be reached: {error}") from error
        self._round += 1
        if problem is not None:
            raise problem
        if failed:
            raise ShardingError(f"nothing was changed on any rank: {what} failed on another\n{self._problems(at)}")

    def heard(self, ranks: Sequence[int]) -> list[bytes]:
        """Return the messages (`said`) of some ranks at the last meeting."""
        said = [self._store.get(f"{self._key}/{self._round - 1}/{rank}").decode() for rank in ranks]
        return [bytes.fromhex(text[1:]) for text in said]

    def _wait(self, at: str, what: str) -> None:
        whole = _timeout(self._group)
        first = min(PATIENCE, whole)
        if self._came(at, first):
            return
        if whole > first:
            warnings.warn(
                f"rank {self._rank} waits in {what} for {self._missing(at)}: all ranks must call it together",
                stacklevel=5,
            )
            if self._came(at, whole - first):
                return
        raise ShardingError(
            f"nothing was changed: all ranks must call {what} together, but {self._missing(at)} did not within {whole}"
        )

    def _withdraw(self, at: str, problem: Exception | None) -> bool:
        """Withdraw this rank's arrival so that all can meet later; return False if the last rank has just arrived."""
        self._store.add(f"{at}/arrived", -1)
        if self._store.check([f"{at}/all"]):
            return False
        if problem is not None:
            self._store.add(f"{at}/problems", -1)
        self._store.delete_key(f"{at}/{self._rank}")
        return True

    def _came(self, at: str, patience: timedelta) -> bool:
        try:
            self._store.wait([f"{at}/all"], patience)
        except RuntimeError:  # DistStoreError of most stores
            return self._store.check([f"{at}/all"])
        return True

    def _missing(self, at: str) -> str:
        absent = [rank for rank in range(self._size) if not self._store.check([f"{at}/{rank}"])]
        return f"rank{'s' * (len(absent) != 1)} {format_list(absent, str)}"

    def _problems(self, at: str) -> str:
        said = [self._store.get(f"{at}/{rank}") for rank in range(self._size)]
        found = [f"rank {rank}: {text[1:].decode()}" for rank, text in enumerate(said) if text[:1] == b"!"]
        return "\n".join(found[:10])


def _timeout(group: Any) -> timedelta:
    """Return the timeout of a group."""
    try:
        return group._get_backend(host_device(group)).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
