"""Saves of one process take turns: what was asked for later ends later, and so is what stands.

A save in a thread could otherwise be overtaken by the next to the same folder, whose result it would then replace. And
two exchanges on one process group at a time would take each other's messages.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["Turn", "keys_of"]


class Turn:
    """A place in the queues of some keys, taken when it is made; a context that waits for those before it."""

    def __init__(self, keys: frozenset[Hashable]) -> None:
        self._keys, self._over, self._thread = keys, threading.Event(), 0
        with _Queue.lock:
            # One that this thread is in the midst of has called us, from `progress` say: it will not end before us.
            here = threading.get_ident()
            self._before = [turn for turn in _Queue.turns if turn._keys & keys and turn._thread != here]
            _Queue.turns.append(self)

    def __enter__(self) -> None:
        try:
            for turn in self._before:
                turn._over.wait()
        except BaseException:  # an interrupt
            self.end()
            raise
        self._before, self._thread = [], threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let the next one begin."""
        with _Queue.lock:
            if self in _Queue.turns:
                _Queue.turns.remove(self)
        self._over.set()


class _Queue:
    lock = threading.Lock()
    turns: ClassVar[list[Turn]] = []


def _forget() -> None:
    """In a forked process: the threads that would end the turns are not there."""
    _Queue.lock, _Queue.turns = threading.Lock(), []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def keys_of(path: Path, group: Any, *, in_series: bool) -> frozenset[Hashable]:
    """List what only one save may use at a time: a path, the folder of a series of checkpoints, a process group."""
    keys: set[Hashable] = {os.path.realpath(path)}
    if in_series:
        keys.add(os.path.realpath(path.parent))
    if group is not None:
        keys.add(id(group))
    return frozenset(keys)
