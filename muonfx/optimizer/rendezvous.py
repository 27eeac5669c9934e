"""Ranks that wait for one another through their group's store, and compare what each has to say.

No collective is begun before all are there: a rank that comes alone disturbs no exchange of the others, such as those
of the next backward pass, and is told by name for whom it waited.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from muonfx.sharding.consensus import host_device
from muonfx.sharding.messages import ShardingError

__all__ = ["Rendezvous"]

PATIENCE = timedelta(seconds=20)
"""The time after which a rank that waits for others says so."""

_made: dict[str, int] = {}
"""The number made for each group, by its name: all ranks make them together, so they count alike."""


class Rendezvous:
    """A barrier of a group's ranks in its store, used any number of times; they make it together.

    Args:
        group: the ranks.
    """

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
        """Wait until all ranks are there; raise on all of them what is wrong on one.

        Args:
            what: what all ranks are to call, for an error.
            problem: what is wrong here, if anything.
            said: for `heard`.

        Raises:
            ShardingError: something is wrong on another rank, or some do not come within the group's timeout.
            Exception: ``problem`` itself, where it was found.
        """
        at = f"{self._key}/{self._round}"
        text = f"{type(problem).__name__}: {problem}"
        try:
            # The first byte tells a problem from what is said.
            self._store.set(f"{at}/{self._rank}", "=" + said.hex() if problem is None else "!" + text)
            if problem is not None:
                self._store.add(f"{at}/problems", 1)
            if self._store.add(f"{at}/arrived", 1) == self._size:
                self._store.set(f"{at}/all", "")
            try:
                self._wait(at, what)
            except BaseException:  # of whatever kind, an interrupt too
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
        """The messages of some ranks at the last meeting."""
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
        """Take back that this rank came, so that all can meet later; False: the last one came just now."""
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
        shown = ", ".join(map(str, absent[:10])) + (", ..." if len(absent) > 10 else "")
        return f"rank{'s' * (len(absent) != 1)} {shown}"

    def _problems(self, at: str) -> str:
        said = [self._store.get(f"{at}/{rank}") for rank in range(self._size)]
        found = [f"rank {rank}: {text[1:].decode()}" for rank, text in enumerate(said) if text[:1] == b"!"]
        return "\n".join(found[:10])


def _timeout(group: Any) -> timedelta:
    """The timeout of a group."""
    try:
        return group._get_backend(host_device(group)).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
