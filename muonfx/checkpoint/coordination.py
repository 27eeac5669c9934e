"""Coordinate concurrent saves, between processes and within one process.

Each save has a unique id, which is part of all its file names, so two writers never write to the same file. The rename
of the index decides which save is at the path. A writer places a *claim*, ``.writing-<save id>``, in the folder before
its first file and removes it after its index is renamed. Files that belong neither to a live save nor to the current
index may be removed.

Claims are used because file locks do not work on every network file system or between all machines. A claim names the
process that made it. On that process's machine, `claims` checks whether the process still runs; on any other machine
a claim expires after a day.

Within a process, saves are queued, so the save that was requested last also finishes last. Otherwise a background save
could finish after a later save to the same folder and replace its result. The queue also keeps two saves from
exchanging messages on one process group at the same time.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import re
import sys
import threading
import time
import warnings
from collections.abc import Hashable, Iterator
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch.distributed as dist

from muonfx.checkpoint.errors import CheckpointError
from muonfx.checkpoint.files import write_all
from muonfx.checkpoint.index import INDEX, read_parsed

__all__ = [
    "Claim",
    "Ticket",
    "claim",
    "claim_of",
    "claims",
    "forget_failure",
    "id_of",
    "note_failure",
    "note_rank",
    "part_name",
    "release",
    "warn_of_failed_saves",
    "warn_of_other_writers",
]

# ----------------------------------------------------------------------------------------- claims between processes

_OURS = (
    re.compile(r"data-([0-9a-f]{16})-\d+-of-\d+\.safetensors"),
    re.compile(rf"\.{re.escape(INDEX)}-([0-9a-f]{{16}})\.part"),
    re.compile(r"\.writing-([0-9a-f]{16})\.part"),
    re.compile(rf"\.{re.escape(INDEX)}(\.part)"),  # the unfinished index of muonfx 0.1, without a save id
)
_CLAIM = re.compile(r"\.writing-([0-9a-f]{16})")
_live: set[str] = set()
"""Ids of the saves in progress in this process."""
ABANDONED = 24 * 3600.0
"""Seconds after which a claim expires if its process cannot be checked."""


class Claim(NamedTuple):
    """The process that writes a save; ``birth`` is its start time, since process ids are reused."""

    save_id: str
    host: str
    machine: str
    pid: int
    birth: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def id_of(name: str) -> str | None:
    """Return the save id in a file name, None if no save wrote the file."""
    return next((found[1] for pattern in _OURS if (found := pattern.fullmatch(name))), None)


def part_name(save_id: str) -> str:
    """Return the name of an unfinished index."""
    return f".{INDEX}-{save_id}.part"


def claim_of(path: Path, save_id: str) -> Path:
    """Return the path of the claim file of a save."""
    return path / f".writing-{save_id}"


def claim(path: Path, save_id: str) -> None:
    """Place the claim of a save in a folder, which must exist."""
    _live.add(save_id)
    own = Claim(save_id, platform.node(), _machine(), os.getpid(), _birth(os.getpid()) or "")
    final = claim_of(path, save_id)
    unfinished = final.with_name(final.name + ".part")
    # Renamed into place when complete: an empty claim of a killed writer would count as live, as it names no process.
    for last in (False,) * 99 + (True,):
        with FileIO(unfinished, "wb") as file:
            write_all(file, json.dumps(own._asdict()).encode())
        try:
            unfinished.rename(final)
            return
        except FileNotFoundError:  # `clean` in another process has just removed the file
            if last:
                raise


def release(path: Path, save_id: str) -> None:
    """Mark a save as ended in this process and remove its claim file."""
    _live.discard(save_id)
    with suppress(FileNotFoundError):
        claim_of(path, save_id).unlink()


def claims(path: Path) -> Iterator[tuple[Path, str, Claim | None, bool]]:
    """Yield the claims in a folder: file, save id, `Claim` (None if unreadable), and whether the save is live."""
    for file in sorted(path.iterdir()):
        if found := _CLAIM.fullmatch(file.name):
            try:
                made, text = file.stat().st_mtime, file.read_bytes()
            except FileNotFoundError:
                continue
            claimed = _parsed(text)
            yield file, found[1], claimed, time.time() - made < ABANDONED and not _has_ended(claimed)


def _parsed(text: bytes) -> Claim | None:
    """Return the claim in a claim file, None if the file is incomplete."""
    try:
        said = Claim(**json.loads(text))
    except (ValueError, TypeError):
        return None
    return said if isinstance(said.pid, int) else None


def _has_ended(claimed: Claim | None) -> bool:
    """True if the process that made a claim is known to have ended."""
    if claimed is None or claimed.machine != _machine():
        return False
    if claimed.pid == os.getpid():
        return claimed.save_id not in _live
    birth = _birth(claimed.pid)
    return birth is None or bool(birth and claimed.birth and birth != claimed.birth)


@cache
def _machine() -> str:
    """Identify the machine and its process id namespace, since each container has its own."""
    said = [platform.node()]
    with suppress(OSError):
        said.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        said.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(said)


def _birth(pid: int) -> str | None:
    """Return the start time of a local process: None if there is no such process, "" if the time is unknown."""
    with suppress(OSError):
        return _from_proc(Path(f"/proc/{pid}/stat").read_text())
    if os.name == "nt":  # os.kill(pid, 0) would end the process
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (PermissionError, OverflowError):
        pass
    return ""


def _from_proc(text: str) -> str | None:
    """Return the start time in the text of /proc/<pid>/stat, None for a process that has ended."""
    # The second field, the name in parentheses, may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


# ------------------------------------------------------------------------------------ other writers to the same path

_ONE_JOB = "if these are the ranks of one job, say group= on all of them, or save on one only"


def note_rank(save_id: str) -> None:
    """Record in the default store of torch.distributed that this rank saves on its own, without communication."""
    if (store := _store()) is not None:
        with suppress(RuntimeError):  # the process that holds the store has ended
            store.set(_key(save_id), str(dist.get_rank()))


def warn_of_other_writers(path: Path, save_id: str) -> None:
    """Warn if another process, or another rank of this job on its own, also saves to the path."""
    live = {other: claimed for _, other, claimed, is_live in claims(path) if is_live and other != save_id}
    if ranks := _ranks(path, live.keys() - {save_id}):
        warnings.warn(
            f"{path}: rank {min(ranks)} saves there and now rank {dist.get_rank()} too, each for itself: the last one "
            f"stands, and it is assumed that all ranks have the same; {_ONE_JOB}",
            stacklevel=2,
        )
    elif live:
        who = next((str(claimed) for claimed in live.values() if claimed is not None), "another process")
        warnings.warn(
            f"{path}: {who} is writing there at the same time: the last one to be done stands; {_ONE_JOB}", stacklevel=2
        )


def _ranks(path: Path, save_ids: set[str]) -> set[int]:
    """Return the other ranks of this job that made the given saves or the checkpoint at the path."""
    store = _store()
    if store is None:
        return set()
    with suppress(OSError, CheckpointError):
        save_ids = save_ids | {read_parsed(path).save_id}
    try:
        keys = [_key(save_id) for save_id in save_ids]
        return {int(store.get(key)) for key in keys if store.check([key])} - {dist.get_rank()}
    except RuntimeError:
        return set()


def _store() -> dist.Store | None:
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.distributed_c10d._get_default_store() if several else None


def _key(save_id: str) -> str:
    return f"muonfx save {save_id}"


# -------------------------------------------------------------------------------------- the queue within a process


class Ticket:
    """A place in the queue of each key (path, folder or process group); as a context, it waits for earlier tickets."""

    def __init__(self, *keys: Hashable) -> None:
        self._keys, self._over, self._thread = frozenset(keys), threading.Event(), 0
        with _Queue.lock:
            # Skip a save that this thread is running, which called us from `progress`: it cannot end before we return.
            here = threading.get_ident()
            self._before = [other for other in _Queue.tickets if other._keys & self._keys and other._thread != here]
            _Queue.tickets.append(self)

    def __enter__(self) -> None:
        try:
            for other in self._before:
                other._over.wait()
        except BaseException:  # such as KeyboardInterrupt
            self.end()
            raise
        self._before, self._thread = [], threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Release the place, so that the next ticket can begin."""
        with _Queue.lock:
            if self in _Queue.tickets:
                _Queue.tickets.remove(self)
        self._over.set()


class _Queue:
    lock = threading.Lock()
    tickets: ClassVar[list[Ticket]] = []


def _forget() -> None:
    """Reset the queue in a forked process, which has none of the threads that hold its tickets."""
    _Queue.lock, _Queue.tickets = threading.Lock(), []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


# ----------------------------------------------------------------------------------- failures of background saves


_failed: list[tuple[Path, BaseException]] = []


def note_failure(path: Path, error: BaseException) -> None:
    """Record a failed background save, to be reported if nobody waits for it."""
    _failed.append((path, error))


def forget_failure(error: BaseException | None) -> None:
    """Remove a failure from the record once `wait` has raised it."""
    _failed[:] = [(path, other) for path, other in _failed if other is not error]


def warn_of_failed_saves() -> None:
    """Warn once of each background save that has failed and that nobody has waited for."""
    while _failed:
        path, error = _failed.pop(0)
        warnings.warn(f"{_sentence(path, error)}: call wait() on what save_async returns", stacklevel=4)


def _sentence(path: Path, error: BaseException) -> str:
    return f"the save to {path} in the background has failed, and nobody has waited for it: {error!r}"


@atexit.register
def _tell_at_exit() -> None:
    """Print the failed background saves that nobody has waited for, after all threads have ended."""
    for path, error in _failed:
        print(f"muonfx: {_sentence(path, error)}", file=sys.stderr)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_failed.clear)  # after fork() only the parent reports its failed saves
