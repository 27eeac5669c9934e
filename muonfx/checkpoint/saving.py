"""Saving while training goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muonfx.checkpoint.coordination import forget_failure, note_failure, warn_of_failed_saves
from muonfx.checkpoint.data import Progress
from muonfx.checkpoint.writing import Request, write
from muonfx.core import Transform
from muonfx.tree import PyTree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Saving", "save_async"]


class Saving:
    """A save that is under way, as `save_async` returns it.

    >>> import tempfile
    >>> saving = save_async(tempfile.mkdtemp(), {"w": torch.ones(2)})
    >>> saving.wait() == saving.path, saving.done
    (True, True)
    """

    def __init__(self, path: Path, future: Future[Any]) -> None:
        self.path = path
        self._future = future

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; `wait` tells."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is there.

        Args:
            timeout: seconds to wait at most; None: for as long as it takes.

        Returns:
            Its path.

        Raises:
            TimeoutError: it is not done yet.
            CheckpointError: what `save` raises, and whatever ``progress`` raised.
        """
        # Whose error: a TimeoutError may be that of waiting, after which the save goes on.
        error = self._future.exception(timeout)
        if error is not None:
            forget_failure(error)
            raise error
        return self.path


def save_async(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    tx: Transform | None = None,
    params: PyTree = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> Saving:
    """Copy state and parameters into host memory now, and write them while training goes on.

    The state may change, and be donated, as soon as this returns; the copy needs as much host memory as there is to
    save. Saves to one path, to steps in one folder, or with one group are written one after another, in the order of
    the calls. A process that ends waits for its saves. One that fails, and that nobody waits for, is told of by a
    warning when the next begins, or on stderr at the end of the process.

    Args:
        path: as in `save`, like all that follows.
        state: as there.
        tx: as there.
        params: as there.
        step: as there.
        extra: as there.
        keep: as there.
        progress: as there; called from another thread.
        group: as there. It must have a backend for host memory (gloo), and nothing else may use it until the save is
            done: make one for this, ``dist.new_group(backend="gloo")``. Wait before it is destroyed.

    Returns:
        The save, to `Saving.wait` for: errors while writing are raised there.

    Raises:
        TypeError: what is wrong with the arguments is raised at once, as by `save`; with a group, by `Saving.wait`, on
            all ranks alike.

    Example:
        >>> import tempfile
        >>> import muonfx as mfx
        >>> state = {"w": torch.ones(3)}
        >>> saving = mfx.checkpoint.save_async(tempfile.mkdtemp(), state, step=1)
        >>> _ = state["w"].zero_()
        >>> mfx.checkpoint.load(saving.wait(), like=state)
        {'w': tensor([1., 1., 1.])}
    """
    warn_of_failed_saves()
    request = Request.of(path, state, params, tx, step, extra, keep)
    if group is not None:
        from muonfx.checkpoint.distributed import save_together, staged_job

        job = staged_job(request, progress)
        return _started(request, group, lambda: save_together(job, group))
    leaves = {name: leaf.detach().to("cpu", copy=True) for name, leaf in request.leaves(whole=True).items()}
    request = request._replace(state=None, params=None, extra=request.about().extra)
    return _started(request, None, lambda: write(request.path, leaves, request, progress))


def _started(request: Request, group: Any, work: Callable[[], None]) -> Saving:
    """Begin in a thread, when those before it are done."""
    turn = request.turn(group)

    def run() -> None:
        try:
            with turn:
                work()
        except BaseException as error:
            note_failure(request.path, error)
            raise

    try:
        # One of its own: those whose turn it is not only wait.
        with_one_thread = ThreadPoolExecutor(1, thread_name_prefix="muonfx-save")
        future = with_one_thread.submit(run)
    except BaseException:  # the process is at its end and starts no thread any more
        turn.end()
        raise
    with_one_thread.shutdown(wait=False)
    return Saving(request.path, future)
