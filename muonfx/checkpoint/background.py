"""Run one save in the background, and report its error if `Saving.wait` is not called.

A process has at most one save in the background: the next save first waits for it. So the saves of a process are
written in the order of the calls, two saves never exchange messages on one process group at the same time, and host
memory holds one copy of a state.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path


class Saving:
    """The handle of a save that runs in a background thread; `save_async` returns it.

    >>> import tempfile
    >>> saving = mfx.checkpoint.save_async(tempfile.mkdtemp(), {"w": torch.ones(2)})
    >>> saving.wait() == saving.path, saving.done
    (True, True)
    """

    def __init__(self, path: Path, future: Future[None]) -> None:
        self.path = path
        self._future = future
        self._is_reported = False

    @property
    def done(self) -> bool:
        """True if the save has ended, successfully or with an error. `wait` raises that error."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is written.

        Args:
            timeout: the longest time to wait, in seconds; None for no limit.

        Returns:
            The path of the checkpoint.

        Raises:
            TimeoutError: the save is not done yet.
            CheckpointError: the save failed, as in `save`.
        """
        # A TimeoutError of `exception` itself is raised here and is not a failure of the save, which continues.
        error = self._future.exception(timeout)
        self._is_reported = True
        if error is not None:
            raise error
        return self.path

    def unreported_failure(self) -> str | None:
        """Wait for the end, and return a sentence about an error that was not reported yet; None without one."""
        error = self._future.exception()
        if error is None or self._is_reported:
            return None
        self._is_reported = True
        return f"the save to {self.path} in the background failed, and wait() was not called on it: {error!r}"


_latest: Saving | None = None
"""The last save that was started in the background. All earlier ones have ended, and their errors were reported."""


def start(path: Path, save: Callable[[], None]) -> Saving:
    """Call ``save`` in a thread, and return the handle; the caller has called `finish_earlier_save`."""
    global _latest
    # One thread per save, which ends with it: threads do not survive a fork. The interpreter waits for it at exit.
    pool = ThreadPoolExecutor(1, thread_name_prefix="muonfx-save")
    _latest = Saving(path, pool.submit(save))
    pool.shutdown(wait=False)
    return _latest


def wait_for_save() -> None:
    """Wait until the save in the background has ended, if there is one."""
    if _latest is not None:
        wait([_latest._future])


def finish_earlier_save() -> None:
    """Wait until the save in the background has ended; warn once if it failed and `Saving.wait` was not called."""
    if _latest is None:
        return
    failure = _latest.unreported_failure()
    if failure is not None:
        warnings.warn(f"{failure}: call wait() on the result of save_async", stacklevel=4)


@atexit.register
def _report_at_exit() -> None:
    """Print, when the process exits, the error of a save on which `Saving.wait` was not called."""
    if _latest is None:
        return
    failure = _latest.unreported_failure()
    if failure is not None:
        print(f"muonfx: {failure}", file=sys.stderr)


def _forget() -> None:
    """Forget the save in a child process, which does not have its thread; the parent process reports its error."""
    global _latest
    _latest = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
