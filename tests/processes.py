"""Processes with torch.distributed (gloo) that run functions of test modules.

The fixture `world` starts four processes at first use and keeps them for the whole test session. A test with fewer
ranks uses a group of the first ranks. A test that kills a rank creates its own `World`.
"""

import importlib
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

ROOT = Path(__file__).resolve().parent.parent
WORLD = 4
PATIENCE = 240
"""Timeout for the result of a rank in seconds, longer than any call takes on a busy machine."""


def run_python(
    *words: object, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a fresh process, with one thread and this checkout on its path; require that it succeeds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


class Failed:
    """An error raised by a worker."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.trace = _portable(error), "".join(traceback.format_exception(error))

    def __repr__(self) -> str:
        return f"Failed({self.error!r})"


def _portable(error: BaseException) -> BaseException:
    """Return the error, or a RuntimeError with the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Here:
    """A rank of a group of processes, the first argument of a function on a worker.

    Attributes:
        rank: rank within the group, which has `size` ranks.
        group: process group for collectives; `background` has the same ranks, for other threads than the main one.
        mesh: mesh of the group with one dim; `grid` is a mesh of all four ranks with two dims.
    """

    def __init__(
        self, rank: int, size: int, group: Any, background: Any, grid: DeviceMesh | None
    ) -> None:
        self.rank, self.size, self.group, self.background, self._grid = (
            rank,
            size,
            group,
            background,
            grid,
        )
        self.mesh = DeviceMesh.from_group(group, "cpu")

    @property
    def grid(self) -> DeviceMesh:
        assert self._grid is not None, f"found {self.size} ranks, expected {WORLD} for the grid"
        return self._grid


def errors_of(results: list[Any]) -> list[BaseException]:
    """Return the error of each rank, and assert that every rank raised one."""
    assert all(isinstance(result, Failed) for result in results), results
    return [result.error for result in results]


class World:
    """Processes that run functions of test modules on every rank; they start at the first call.

    Args:
        size: number of processes.
        timeout: timeout of collectives in seconds.
    """

    def __init__(self, size: int = WORLD, *, timeout: float = 60) -> None:
        self.size, self.timeout = size, timeout
        self._running: _Running | None = None

    def run(self, size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call a function of a module on the first `size` ranks.

        The function receives a `Here` and the arguments. Arguments and results are pickled.

        Returns:
            For each rank, the result of the function, or `Failed` with its error.
        """
        if self._running is None:
            self._running = _Running(self.size, self.timeout)
        found = self._running.run(size, function, arguments, patience=PATIENCE)
        if not _agree(found) and not (_all_raised(found) and self._running.is_in_step(size)):
            self.close()  # a rank may still wait for another, or have an incomplete message
        return found

    def check(self, size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call `run` and assert that no rank raised an error."""
        results = self.run(size, function, **arguments)
        traces = [
            f"rank {rank}:\n{r.trace}" for rank, r in enumerate(results) if isinstance(r, Failed)
        ]
        assert not traces, "\n".join(traces)
        return results

    @property
    def is_closed(self) -> bool:
        """True if the next call starts new processes."""
        return self._running is None

    def close(self) -> None:
        """Stop the processes; the next call starts new ones."""
        running, self._running = self._running, None
        if running is not None:
            running.close()


def on_ranks(size: int | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of a function that runs on ``size`` ranks and raises on none; by default the test takes `size`.

    The function gets a `Here` as its first argument; its other arguments are the test's.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def test(world: World, **arguments: Any) -> None:
            world.check(arguments.pop("size") if size is None else size, test, **arguments)

        test.__module__, test.__name__, test.__qualname__ = (
            function.__module__,
            function.__name__,
            function.__name__,
        )
        names = [
            "world",
            *["size"] * (size is None),
            *list(inspect.signature(function).parameters)[1:],
        ]
        keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        vars(test).update(
            on_rank=function, __signature__=inspect.Signature(keywords)
        )  # what pytest gives, and `_serve`
        return pytest.mark.dist(test)

    return decorate


def _agree(results: list[Any]) -> bool:
    """Return True if all ranks returned, or all raised the same error."""
    errors = [(type(r.error), str(r.error)) if isinstance(r, Failed) else None for r in results]
    return len(set(errors)) == 1


def _all_raised(results: list[Any]) -> bool:
    """Return True if every rank raised an error of the function itself, and none ended or timed out."""
    return all(
        isinstance(r, Failed) and not isinstance(r.error, ProcessEnded | TimeoutError)
        for r in results
    )


def meet(here: Here) -> None:
    """Pass a barrier in each group; fail after 5 seconds if the ranks have started different numbers of collectives."""
    groups = [
        here.group,
        here.background,
        *(here.grid.get_all_groups() if here.size == WORLD else []),
    ]
    for group in groups:
        dist.monitored_barrier(group, timeout=timedelta(seconds=5))


class _Running:
    """Running processes that wait for tasks."""

    def __init__(self, size: int, timeout: float) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._inboxes = [context.Queue() for _ in range(size)]
        self._outbox = context.Queue()
        self._task_number = 0
        store = str(Path(self._folder.name) / "store")
        self._processes = [
            context.Process(
                target=_serve, args=(rank, size, timeout, store, inbox, self._outbox), daemon=True
            )
            for rank, inbox in enumerate(self._inboxes)
        ]
        # Set before a child imports torch: one thread per process is faster on few cores, and sums have a fixed order.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for process in self._processes:
            process.start()
        self._await_all()

    def _await_all(self) -> None:
        """Wait until all have imported torch, then let them connect, so that a slow import causes no timeout."""
        until = time.monotonic() + 180
        for _ in self._processes:
            self._outbox.get(timeout=max(0.1, until - time.monotonic()))
        for inbox in self._inboxes:
            inbox.put("connect")

    def run(
        self, size: int, function: Callable[..., Any], arguments: dict[str, Any], patience: float
    ) -> list[Any]:
        """Return the answer of each rank, or `Failed` for a rank that ended or gave no answer in time."""
        self._task_number += 1
        # Pickled here, so that tensors share no memory, and a task that cannot be pickled raises in the test.
        task = pickle.dumps(
            (self._task_number, function.__module__, function.__qualname__, size, arguments)
        )
        for inbox in self._inboxes[:size]:
            inbox.put(task)
        found: dict[int, Any] = {}
        until = time.monotonic() + patience
        while len(found) < size:
            try:
                rank, number, answer = self._outbox.get(timeout=0.2)
            except Empty:
                for rank in set(range(size)) - found.keys():
                    if (code := self._processes[rank].exitcode) is not None:
                        found[rank] = Failed(ProcessEnded(f"rank {rank} ended with {code}"))
                if time.monotonic() > until:
                    waited = TimeoutError(
                        f"{function.__name__}: only ranks {sorted(found)} have answered"
                    )
                    found |= {rank: Failed(waited) for rank in set(range(size)) - found.keys()}
            else:
                if number == self._task_number:
                    found[rank] = pickle.loads(answer)
        return [found[rank] for rank in range(size)]

    def is_in_step(self, size: int) -> bool:
        """Return True if the first `size` ranks can be reused; new processes take ten seconds of processor time."""
        return not any(
            isinstance(result, Failed) for result in self.run(size, meet, {}, patience=100)
        )

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        until = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for queue in (*self._inboxes, self._outbox):
            queue.close()
            queue.cancel_join_thread()
        self._folder.cleanup()


class ProcessEnded(RuntimeError):
    """A worker process has ended."""


def _serve(rank: int, world: int, timeout: float, store: str, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    outbox.put(rank)
    inbox.get()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    sizes = range(1, world + 1)
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    background = {size: dist.new_group(list(range(size)), backend="gloo") for size in sizes}
    grid = (
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("outer", "inner"))
        if world == WORLD
        else None
    )
    places: dict[int, Here] = {}
    while (task := inbox.get()) is not None:
        number, module, name, size, arguments = pickle.loads(task)
        try:
            if size not in places:
                places[size] = Here(
                    rank, size, groups[size], background[size], grid if size == WORLD else None
                )
            function = getattr(importlib.import_module(module), name)
            answer = pickle.dumps(getattr(function, "on_rank", function)(places[size], **arguments))
        except BaseException as error:
            answer = pickle.dumps(Failed(error))
        outbox.put((rank, number, answer))
    dist.destroy_process_group()
    outbox.close()
    outbox.join_thread()
    # Threads of torch may abort the process while the interpreter exits, or delay it by seconds.
    os._exit(0)
