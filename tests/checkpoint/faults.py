"""Fail, or kill, a process at any one of the calls to the system by which it touches a folder.

An audit hook intercepts the calls that the interpreter audits (opening, listing, renaming, removing, making folders),
in every module. Calls that it does not audit (writing, flushing, reading a status) are patched. With ``reads``, the
further calls of a load are patched, too: the status of an open file, seeking, reading and closing.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from muonfx.checkpoint import files

_AUDITED = {
    "open",
    "os.listdir",
    "os.scandir",
    "os.mkdir",
    "os.rmdir",
    "os.remove",
    "os.rename",
    "os.link",
    "os.chmod",
}


class Faults:
    """Counts the calls that touch a folder and fails the one numbered `at`, or that and all after it.

    Attributes:
        calls: what was called, such as "os.rename index.json".
        failed: the call that failed; "" if there were fewer calls.
    """

    def __init__(
        self, folder: Path, at: int, *, always=False, code=errno.EIO, kill=False, reads=False
    ):
        self.folder, self.at, self.always = os.path.realpath(folder), at, always
        self.code, self.kill, self.reads = code, kill, reads
        self.calls: list[str] = []
        self.failed = ""

    def touch(self, what: str, path: Any) -> None:
        """Count a call, and fail it if its turn has come."""
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(self.folder):
            return
        self.calls.append(f"{what} {Path(path).name}")
        number = len(self.calls) - 1
        if number == self.at or (self.always and number > self.at):
            self.failed = self.failed or self.calls[-1]
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
                while True:
                    signal.pause()  # a system may end the process a little later
            raise OSError(self.code, os.strerror(self.code))


_active: list[Faults] = []
_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _active and event in _AUDITED:
        _active[-1].touch(event, arguments[1] if event == "os.rename" else arguments[0])


def _path_of(handle: int) -> str:
    return os.readlink(f"/proc/self/fd/{handle}")


class _CountedFile(FileIO):
    def write(self, data: Any) -> int:
        _active[-1].touch("write", self.name)
        return super().write(bytes(data[:1000]))  # a system may take fewer bytes than it is given

    def _read(self, what: str) -> None:
        if _active and _active[-1].reads and not self.closed:
            _active[-1].touch(what, _path_of(self.fileno()))

    def seek(self, *arguments: Any) -> int:
        self._read("seek")
        return super().seek(*arguments)

    def readinto(self, room: Any) -> int | None:
        self._read("read")
        return super().readinto(room)

    def readall(self) -> bytes | None:
        self._read("read")
        return super().readall()

    def close(self) -> None:
        try:
            self._read("close")
        finally:
            super().close()  # a system closes a file even if it reports an error


@contextmanager
def faults(folder: Path, at: int, **how: Any) -> Generator[Faults]:
    """Fail a call within the block; see `Faults`. Use `at=-1` to count only."""
    global _hooked
    if not _hooked:  # a hook cannot be taken away again
        sys.addaudithook(_hook)
        _hooked = True
    made = Faults(folder, at, **how)

    def counted(name: str, path_of: Callable[[Any], Any]) -> Any:
        original = getattr(os, name)

        def call(first: Any, *arguments: Any, **more: Any) -> Any:
            made.touch(name, path_of(first))
            return original(first, *arguments, **more)

        return patch.object(os, name, call)

    calls = {"fsync": _path_of, "stat": lambda path: path}
    if made.reads:
        calls |= {"fstat": _path_of, "preadv": _path_of}
    with ExitStack() as stack:
        for name, path_of in calls.items():
            stack.enter_context(counted(name, path_of))
        stack.enter_context(patch.object(files, "FileIO", _CountedFile))
        _active.append(made)
        stack.callback(_active.pop)
        yield made
