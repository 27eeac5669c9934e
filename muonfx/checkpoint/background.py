"""Run saves in the background, in order, and report failed saves on which `Saving.wait` was not called.

The saves of a process are written one after another, in the order of the calls. Otherwise a save in the background
could end after a later save to the same path and replace its result, and two saves could exchange messages on one
process group at the same time.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

__all__ = ["Saving", "start", "wait_for_saves", "warn_of_failed_saves"]


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
        if error is not None:
            if self in _savings:
                _savings.remove(self)  # the failure is reported here
            raise error
        return self.path

    def failure(self) -> str | None:
        """Return a sentence that describes the error of this finished save; None if the save succeeded."""
        error = self._future.exception()
        if error is None:
            return None
        return f"the save to {self.path} in the background failed, and wait() was not called on it: {error!r}"


_savings: list[Saving] = []
"""The saves in the background that have not ended, and failed saves on which `wait` was not called."""


def start(path: Path, save: Callable[[], None]) -> Saving:
    """Start a thread that calls ``save`` when all earlier background saves have ended; return its handle."""
    earlier = _under_way()

    def run() -> None:
        wait(earlier)
        save()

    # One thread per save, which ends with it: threads do not survive a fork.
    pool = ThreadPoolExecutor(1, thread_name_prefix="muonfx-save")
    saving = Saving(path, pool.submit(run))
    pool.shutdown(wait=False)
    _savings.append(saving)
    return saving


def wait_for_saves() -> None:
    """Wait until all background saves that this process has started have ended."""
    wait(_under_way())


def _under_way() -> list[Future[None]]:
    return [saving._future for saving in _savings if not saving.done]


def warn_of_failed_saves() -> None:
    """Warn of failed background saves on which `Saving.wait` was not called, of each save only once."""
    for saving in [saving for saving in _savings if saving.done]:
        _savings.remove(saving)
        if (failure := saving.failure()) is not None:
            warnings.warn(f"{failure}: call wait() on the result of save_async", stacklevel=4)


@atexit.register
def _report_at_exit() -> None:
    """Print, when the process exits, the failed background saves on which `Saving.wait` was not called."""
    for saving in _savings:
        if saving.done and (failure := saving.failure()) is not None:
            print(f"muonfx: {failure}", file=sys.stderr)


if hasattr(os, "register_at_fork"):
    # A child process has none of the threads, and only the parent reports failures.
    os.register_at_fork(after_in_child=_savings.clear)
