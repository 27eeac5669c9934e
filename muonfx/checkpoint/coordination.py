"""Saves beside one another: in one process one after another, in several without harm to what the others write.

A save has an id that no other has, and all its files carry it in their names; so two writers never write to one file,
and the rename of an index decides which of them stands. What is left to settle is what may be removed. A writer puts a
claim, ``.writing-<save id>``, into the folder before its first file and takes it away after its index has been renamed.
Files belong to a live save, to the index that is there, or to nobody; only the last may go.

Claims and no locks: locks do not work on every network file system, and where they do, not between all machines. A
claim says which process has made it. On the machine of that process one can look whether it still runs; elsewhere a
claim counts until it is a day old.

Within a process, saves queue up: what was asked for later ends later, and so is what stands. A save in a thread could
otherwise be overtaken by the next to the same folder, whose result it would then replace. And two exchanges on one
process group at a time would take each other's messages.
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

# ------------------------------------------------------------------------------------------ claims, between processes

_OURS = (
    re.compile(r"data-([0-9a-f]{16})-\d+-of-\d+\.safetensors"),
    re.compile(rf"\.{re.escape(INDEX)}-([0-9a-f]{{16}})\.part"),
    re.compile(r"\.writing-([0-9a-f]{16})\.part"),
    re.compile(rf"\.{re.escape(INDEX)}(\.part)"),  # muonfx 0.1 gave every writer's unfinished index this name
)
_CLAIM = re.compile(r"\.writing-([0-9a-f]{16})")
_live: set[str] = set()
"""The saves of this process that are under way."""
ABANDONED = 24 * 3600.0
"""Seconds after which a claim no longer counts, if nobody can look whether its process runs."""


class Claim(NamedTuple):
    """The process that writes: its number, its machine, and its birth, since numbers of processes are reused."""

    save_id: str
    host: str
    machine: str
    pid: int
    birth: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def id_of(name: str) -> str | None:
    """The save that a file belongs to, by its name; None if no save has written it."""
    return next((found[1] for pattern in _OURS if (found := pattern.fullmatch(name))), None)


def part_name(save_id: str) -> str:
    """The name of an index that is not finished."""
    return f".{INDEX}-{save_id}.part"


def claim_of(path: Path, save_id: str) -> Path:
    """The file that says that a save is under way."""
    return path / f".writing-{save_id}"


def claim(path: Path, save_id: str) -> None:
    """Say that a save is under way; the folder must exist."""
    _live.add(save_id)
    own = Claim(save_id, platform.node(), _machine(), os.getpid(), _birth(os.getpid()) or "")
    final = claim_of(path, save_id)
    unfinished = final.with_name(final.name + ".part")
    # Whole from the first moment: one that a killed writer has left empty would count as live, since nobody can tell.
    for last in (False,) * 99 + (True,):
        with FileIO(unfinished, "wb") as file:
            write_all(file, json.dumps(own._asdict()).encode())
        try:
            unfinished.rename(final)
            return
        except FileNotFoundError:  # another writer has tidied up just now
            if last:
                raise


def release(path: Path, save_id: str) -> None:
    """Say that a save has ended: to this process in any case, and to others if the claim can be removed."""
    _live.discard(save_id)
    with suppress(FileNotFoundError):
        claim_of(path, save_id).unlink()


def claims(path: Path) -> Iterator[tuple[Path, str, Claim | None, bool]]:
    """The claims in a folder: the file, the id of the save, who has made it if he says so, and whether it is live."""
    for file in sorted(path.iterdir()):
        if found := _CLAIM.fullmatch(file.name):
            try:
                made, text = file.stat().st_mtime, file.read_bytes()
            except FileNotFoundError:
                continue
            claimed = _parsed(text)
            yield file, found[1], claimed, time.time() - made < ABANDONED and not _has_ended(claimed)


def _parsed(text: bytes) -> Claim | None:
    """The claim that a file makes; None if it is not written to the end."""
    try:
        said = Claim(**json.loads(text))
    except (ValueError, TypeError):
        return None
    return said if isinstance(said.pid, int) else None


def _has_ended(claimed: Claim | None) -> bool:
    """Tell whether the process that has made a claim is known to have ended."""
    if claimed is None or claimed.machine != _machine():
        return False
    if claimed.pid == os.getpid():
        return claimed.save_id not in _live
    birth = _birth(claimed.pid)
    return birth is None or bool(birth and claimed.birth and birth != claimed.birth)


@cache
def _machine() -> str:
    """The machine, and the space of process numbers in it: containers have their own."""
    said = [platform.node()]
    with suppress(OSError):
        said.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        said.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(said)


def _birth(pid: int) -> str | None:
    """When a process of this machine began, as far as the system tells; None if there is no such process."""
    with suppress(OSError):
        return _from_proc(Path(f"/proc/{pid}/stat").read_text())
    if os.name == "nt":  # where asking with signal 0 would end the process
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (PermissionError, OverflowError):
        pass
    return ""


def _from_proc(text: str) -> str | None:
    """The start time in /proc/<pid>/stat, behind the name, which may hold anything; None for a process that is over."""
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


# ------------------------------------------------------------------------------------ other writers to the same path

_ONE_JOB = "if these are the ranks of one job, say group= on all of them, or save on one only"


def note_rank(save_id: str) -> None:
    """Note which rank saves, for itself, in the store by which the ranks of a job have found each other.

    That needs nothing of any other rank: rank 0 may save alone, and each rank to a path of its own.
    """
    if (store := _store()) is not None:
        with suppress(RuntimeError):  # its process has ended, and with it the job
            store.set(_key(save_id), str(dist.get_rank()))


def warn_of_other_writers(path: Path, save_id: str) -> None:
    """Tell when another process is writing to a path, or another rank of this job has written there for itself.

    Args:
        path: claimed by this save.
        save_id: of this save, noted before it was claimed: of two ranks at least the later sees the other.

    Warns:
        UserWarning: there is one. This save will replace what it has written, or the other way round; both are whole.
    """
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
    """The other ranks of this job that have made these saves, or the one that is at the path."""
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
    """A place in the queues of some keys, taken when it is made; a context that waits for those before it.

    A key is what only one may use at a time: a path, the folder of a series of checkpoints, a process group.
    """

    def __init__(self, *keys: Hashable) -> None:
        self._keys, self._over, self._thread = frozenset(keys), threading.Event(), 0
        with _Queue.lock:
            # One that this thread is in the midst of has called us, from `progress` say: it will not end before us.
            here = threading.get_ident()
            self._before = [other for other in _Queue.tickets if other._keys & self._keys and other._thread != here]
            _Queue.tickets.append(self)

    def __enter__(self) -> None:
        try:
            for other in self._before:
                other._over.wait()
        except BaseException:  # an interrupt
            self.end()
            raise
        self._before, self._thread = [], threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let the next one begin."""
        with _Queue.lock:
            if self in _Queue.tickets:
                _Queue.tickets.remove(self)
        self._over.set()


class _Queue:
    lock = threading.Lock()
    tickets: ClassVar[list[Ticket]] = []


def _forget() -> None:
    """In a forked process: the threads that would hand the tickets back are not there."""
    _Queue.lock, _Queue.tickets = threading.Lock(), []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


# ------------------------------------------------------------- failures in the background that nobody has waited for


_failed: list[tuple[Path, BaseException]] = []


def note_failure(path: Path, error: BaseException) -> None:
    """Note that a save has failed; somebody may still wait for it, and hear of it then."""
    _failed.append((path, error))


def forget_failure(error: BaseException | None) -> None:
    """Note that somebody has waited, and heard."""
    _failed[:] = [(path, other) for path, other in _failed if other is not error]


def warn_of_failed_saves() -> None:
    """Tell of saves that have failed by now and that nobody has waited for: each once, when the next one begins.

    Warns:
        UserWarning: there is one.
    """
    while _failed:
        path, error = _failed.pop(0)
        warnings.warn(f"{_sentence(path, error)}: call wait() on what save_async returns", stacklevel=4)


def _sentence(path: Path, error: BaseException) -> str:
    return f"the save to {path} in the background has failed, and nobody has waited for it: {error!r}"


@atexit.register
def _tell_at_exit() -> None:
    """All threads have ended by then."""
    for path, error in _failed:
        print(f"muonfx: {_sentence(path, error)}", file=sys.stderr)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_failed.clear)  # they are the parent's to tell
