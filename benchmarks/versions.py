"""Two checkouts of muonfx, step against step: is this one slower than a worktree of an older commit?

Two versions of a package cannot live in one process. So each has processes of its own that live as long as the
benchmark and prepare the same cases (`benchmarks.versions_worker`); they are asked for some steps in turn, round by
round, in an order that moves on, and all others wait meanwhile. A ratio is the median of the ratios within rounds. The
older version has a second set of processes, and its ratio to the first is the noise: a ratio within its percentiles
says nothing. Rows also tell if both versions came to the same bits.

``git worktree add ../before <commit>``, then ``python -m benchmarks versions --before ../before``; ``--cases`` takes
words, and runs the cases that have one of them in their name.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks import versions_worker
from benchmarks.measure import LEAST, summary
from benchmarks.versions_worker import Case, Sizes

HERE = Path(__file__).parent.parent

CASES = (
    *(Case("optimizer", "small", change=change) for change in ("", "new rate", "two groups")),
    Case("optimizer", "large"),
    *(Case("function", "small", change=change) for change in ("", "new rate")),
    *(Case("optimizer", "small", "FSDP2", change=change) for change in ("", "new rate")),
    Case("optimizer", "large", "FSDP2"),
    *(Case("function", "small", "FSDP2", change=change) for change in ("", "new rate")),
    *(Case("function", "small", "replicated", change=change) for change in ("", "new rate")),
    Case("function", "large", "replicated"),
    *(Case("function", "small", "zero flat", change=change) for change in ("", "new rate")),
    Case("function", "large", "zero flat"),
    *(Case(face, model, state="cpu") for face in ("optimizer", "function") for model in ("small", "large")),
    Case("optimizer", "small", state="cpu", change="new rate"),
    *(Case("function", model, state="disk") for model in ("small", "large")),
    Case("optimizer", "small", "FSDP2", state="cpu"),
)

VERSIONS = ("before", "after", "before again")


class Worker:
    """The processes of one version that take steps together.

    Args:
        checkout: the folder that holds its package.
        ranks: how many processes.
        threads: of each.
    """

    def __init__(self, checkout: Path, ranks: int, threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": str(threads)}
        script = [sys.executable, "-P", versions_worker.__file__]
        self._processes = [
            subprocess.Popen(
                [*script, str(rank), str(ranks), self._folder.name, str(checkout), str(threads)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def ask(self, **what: Any) -> list[Any]:
        """The answer of each rank.

        Raises:
            RuntimeError: a process has ended; its error is on standard error.
        """
        for process in self._processes:
            assert process.stdin is not None
            try:
                print(json.dumps(what), file=process.stdin, flush=True)
            except BrokenPipeError:
                continue  # it has no answer, which is told below
        answers: list[Any] = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{what}: rank {rank} has ended without an answer; its error is above")
            answers.append(json.loads(line))
        return answers

    def seconds(self, steps: int) -> float:
        """Of a step on the slowest rank; the median of some."""
        return statistics.median(max(ranks) for ranks in zip(*self.ask(steps=steps), strict=True))

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if error[0] is not None:
                process.kill()  # one that waits for another rank does not see that its input ends
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()  # it ends by itself
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._folder.cleanup()


def commit(checkout: Path) -> str | None:
    """The commit of a checkout, with a plus sign if files were changed since; None where it is no work of git's."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or None


def measure(case: Case, workers: dict[str, Worker], sizes: Sizes, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row of a case for each version."""
    for worker in workers.values():
        worker.ask(prepare=case, sizes=sizes)
    times: dict[str, list[float]] = {name: [] for name in workers}
    names = list(workers)
    began = time.perf_counter()
    for turn in range(1 + rounds):
        if turn > LEAST and time.perf_counter() - began > seconds:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found = workers[name].seconds(case.steps)
            if turn > 0:  # the first makes plans
                times[name].append(found)
    bits = {name: worker.ask(digest=True) for name, worker in workers.items()}
    about = {"case": case.name, "processes": case.ranks}
    spreads = summary(times, "before")
    return [
        {
            **about,
            "candidate": name,
            "same bits": bits[name] == bits["before"],
            "least": 1e3 * min(times[name]),
            **spreads[name],
        }
        for name in workers
    ]


def speed(
    before: Path,
    rounds: int = 60,
    *,
    cases: Sequence[Case] = CASES,
    sizes: Sizes = Sizes(),  # noqa: B008  a frozen value
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Three rows for each case: the older checkout, this one, and the older one again.

    Args:
        before: the folder of the older checkout.
        rounds: in each of which every version takes some steps, and one before these that is not timed.
        cases: to measure.
        sizes: of their models.
        seconds: for one case, if it has had `LEAST` rounds by then.

    Raises:
        FileNotFoundError: there is no package in ``before``.
        RuntimeError: a case cannot be run by one of the versions.
    """
    if not (before / "muonfx" / "__init__.py").exists():
        raise FileNotFoundError(f"before: found no muonfx in {before}, expected the worktree of an older commit")
    checkouts = dict(zip(VERSIONS, (before, HERE, before), strict=True))
    commits = {name: commit(checkout) for name, checkout in checkouts.items()}
    rows: list[dict[str, Any]] = []
    for ranks in dict.fromkeys(case.ranks for case in cases):
        threads = torch.get_num_threads() if ranks == 1 else 1
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(Worker(checkout, ranks, threads)) for name, checkout in checkouts.items()
            }
            for case in (case for case in cases if case.ranks == ranks):
                found = measure(case, workers, sizes, rounds, seconds)
                rows += [{**row, "commit": commits[row["candidate"]], "threads": threads} for row in found]
                print(line(found), flush=True)
    return rows


def line(rows: list[dict[str, Any]]) -> str:
    """The rows of a case, to read: median milliseconds (the least), and the ratios with their percentiles."""
    before, after, again = (next(row for row in rows if row["candidate"] == name) for name in VERSIONS)

    def ratio(row: dict[str, Any]) -> str:
        return "{median:.2f} ({p10:.2f} to {p90:.2f})".format(**row["ratio"])

    took = " to ".join(f"{row['milliseconds']['median']:.2f} ({row['least']:.2f})" for row in (before, after))
    bits = "" if after["same bits"] else ", other bits"
    return f"{after['case']}: {took} ms, {ratio(after)}, noise {ratio(again)}{bits}"
