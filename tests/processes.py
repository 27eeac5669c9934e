"""Real processes with torch.distributed (gloo), which tests have call functions of their modules.

One world of four processes serves a whole test session (the fixture `world`): a test with fewer ranks uses the group of
the first so many. It starts when first asked for something. A test that kills a rank makes a `World` of its own.
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
"""Seconds until a rank that has not answered counts as failed: more than any call takes on a busy machine."""


def run_python(*words: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a fresh process, with one thread and this checkout on its path; require that it succeeds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


class Failed:
    """An error on a worker."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.trace = _portable(error), "".join(traceback.format_exception(error))

    def __repr__(self) -> str:
        return f"Failed({self.error!r})"


def _portable(error: BaseException) -> BaseException:
    """The error, or one that says the same if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Here:
    """One rank of a group of processes: what a function on a worker gets as its first argument.

    Attributes:
        rank: within the group, which has `size` ranks.
        group: for collectives; `background` has the same ranks, for threads beside the main one.
        mesh: the group in one dim; `grid`: all four ranks in two dims.
    """

    def __init__(self, rank: int, size: int, group: Any, background: Any, grid: DeviceMesh | None) -> None:
        self.rank, self.size, self.group, self.background, self._grid = rank, size, group, background, grid
        self.mesh = DeviceMesh.from_group(group, "cpu")

    @property
    def grid(self) -> DeviceMesh:
        assert self._grid is not None, f"the grid has {WORLD} ranks, not {self.size}"
        return self._grid


def errors_of(results: list[Any]) -> list[BaseException]:
    """The error of each rank; none has returned."""
    assert all(isinstance(result, Failed) for result in results), results
    return [result.error for result in results]


class World:
    """Processes that run functions by module and name, each with its rank; they start when first needed.

    Args:
        size: how many processes.
        timeout: seconds until a collective that waits for a rank is an error.
    """

    def __init__(self, size: int = WORLD, *, timeout: float = 60) -> None:
        self.size, self.timeout = size, timeout
        self._running: _Running | None = None

    def run(self, size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call a function of a module on so many ranks.

        The function gets a `Here` and the arguments, and what it returns is pickled, as they are.

        Returns:
            What each returned, or `Failed` with the error that it raised, by rank.
        """
        if self._running is None:
            self._running = _Running(self.size, self.timeout)
        found = self._running.run(size, function, arguments, patience=PATIENCE)
        if not _alike(found) and not (_all_raised(found) and self._running.is_in_step(size)):
            self.close()  # some rank may still wait for another, or hold half of a message
        return found

    def check(self, size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """The same, where no error is expected."""
        results = self.run(size, function, **arguments)
        traces = [f"rank {rank}:\n{r.trace}" for rank, r in enumerate(results) if isinstance(r, Failed)]
        assert not traces, "\n".join(traces)
        return results

    @property
    def is_closed(self) -> bool:
        """True if the next call starts new processes."""
        return self._running is None

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        running, self._running = self._running, None
        if running is not None:
            running.close()


def on_ranks(size: int | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of a function that runs on so many ranks and raises on none; without a number, the test takes `size`.

    The function gets a `Here` as its first argument; its other arguments are the test's.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def test(world: World, **arguments: Any) -> None:
            world.check(arguments.pop("size") if size is None else size, test, **arguments)

        test.__module__, test.__name__, test.__qualname__ = function.__module__, function.__name__, function.__name__
        names = ["world", *["size"] * (size is None), *list(inspect.signature(function).parameters)[1:]]
        keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        vars(test).update(
            on_rank=function, __signature__=inspect.Signature(keywords)
        )  # what pytest gives, and `_serve`
        return pytest.mark.dist(test)

    return decorate


def _alike(results: list[Any]) -> bool:
    errors = [(type(r.error), str(r.error)) if isinstance(r, Failed) else None for r in results]
    return len(set(errors)) == 1


def _all_raised(results: list[Any]) -> bool:
    """True if each function ended by an error of its own: none waits, none was sent what it has not taken."""
    return all(isinstance(r, Failed) and not isinstance(r.error, ProcessEnded | TimeoutError) for r in results)


def meet(here: Here) -> None:
    """Meet in each group: an error in 5 seconds if the ranks have not taken part in equally many collectives."""
    groups = [here.group, here.background, *(here.grid.get_all_groups() if here.size == WORLD else [])]
    for group in groups:
        dist.monitored_barrier(group, timeout=timedelta(seconds=5))


class _Running:
    """Processes that wait for something to do."""

    def __init__(self, size: int, timeout: float) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._inboxes = [context.Queue() for _ in range(size)]
        self._outbox = context.Queue()
        self._asked = 0
        store = str(Path(self._folder.name) / "store")
        self._processes = [
            context.Process(target=_serve, args=(rank, size, timeout, store, inbox, self._outbox), daemon=True)
            for rank, inbox in enumerate(self._inboxes)
        ]
        # Before a child imports torch: four processes on few cores, and sums in one order.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for process in self._processes:
            process.start()
        self._await_all()

    def _await_all(self) -> None:
        """Let them connect only when all are there: how long one takes to import torch is not to count as a fault."""
        until = time.monotonic() + 180
        for _ in self._processes:
            self._outbox.get(timeout=max(0.1, until - time.monotonic()))
        for inbox in self._inboxes:
            inbox.put("connect")

    def run(self, size: int, function: Callable[..., Any], arguments: dict[str, Any], patience: float) -> list[Any]:
        """What each rank answers; `Failed` for one that ended, or did not answer while another had failed."""
        self._asked += 1
        # Bytes, so that nothing of a tensor is shared, and what does not pickle is found here.
        task = pickle.dumps((self._asked, function.__module__, function.__qualname__, size, arguments))
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
                    waited = TimeoutError(f"{function.__name__}: only ranks {sorted(found)} have answered")
                    found |= {rank: Failed(waited) for rank in set(range(size)) - found.keys()}
            else:
                if number == self._asked:
                    found[rank] = pickle.loads(answer)
        return [found[rank] for rank in range(size)]

    def is_in_step(self, size: int) -> bool:
        """True if the first so many can go on together: new processes take ten seconds of processor time."""
        return not any(isinstance(result, Failed) for result in self.run(size, meet, {}, patience=100))

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
    """A worker is no more."""


def _serve(rank: int, world: int, timeout: float, store: str, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    outbox.put(rank)
    inbox.get()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    sizes = range(1, world + 1)
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    background = {size: dist.new_group(list(range(size)), backend="gloo") for size in sizes}
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("outer", "inner")) if world == WORLD else None
    places: dict[int, Here] = {}
    while (task := inbox.get()) is not None:
        number, module, name, size, arguments = pickle.loads(task)
        try:
            if size not in places:
                places[size] = Here(rank, size, groups[size], background[size], grid if size == WORLD else None)
            function = getattr(importlib.import_module(module), name)
            answer = pickle.dumps(getattr(function, "on_rank", function)(places[size], **arguments))
        except BaseException as error:
            answer = pickle.dumps(Failed(error))
        outbox.put((rank, number, answer))
    dist.destroy_process_group()
    outbox.close()
    outbox.join_thread()
    os._exit(0)  # torch's threads may abort an interpreter that ends, and take seconds to
