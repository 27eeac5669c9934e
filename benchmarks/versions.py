"""Step times of two checkouts of muonfx, to find regressions since an older commit.

Two versions of a package cannot be imported in one process. Each version therefore runs in worker processes, which
prepare the same cases (`benchmarks.versions_worker`). In each round, every version in turn takes some steps while the
others wait; the order rotates. A ratio is the median of the ratios within rounds. A second set of workers of the older
version measures the noise: a ratio within the noise percentiles is not significant. Rows also report whether both
versions computed the same bits.

Run ``git worktree add ../before <commit>``, then ``python -m benchmarks versions --before ../before``. ``--cases``
selects the cases whose name contains one of the given words.
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
from benchmarks.measure import MIN_ROUNDS, summary
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
    *(
        Case(face, model, state="cpu")
        for face in ("optimizer", "function")
        for model in ("small", "large")
    ),
    Case("optimizer", "small", state="cpu", change="new rate"),
    *(Case("function", model, state="disk") for model in ("small", "large")),
    Case("optimizer", "small", "FSDP2", state="cpu"),
)

VERSIONS = ("before", "after", "before again")


class Worker:
    """The worker processes of one version, which take steps together.

    Args:
        checkout: the folder that contains the package.
        ranks: number of processes.
        threads: threads per process.
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

    def request(self, **message: Any) -> list[Any]:
        """Send a request to every rank and return the answers.

        Raises:
            RuntimeError: a process has ended; its error is on standard error.
        """
        for process in self._processes:
            assert process.stdin is not None
            try:
                print(json.dumps(message), file=process.stdin, flush=True)
            except BrokenPipeError:
                continue  # the missing answer is reported below
        answers: list[Any] = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(
                    f"{message}: rank {rank} ended without an answer; see its error above"
                )
            answers.append(json.loads(line))
        return answers

    def seconds(self, steps: int) -> float:
        """Return the median seconds of some steps, each on its slowest rank."""
        return statistics.median(
            max(ranks) for ranks in zip(*self.request(steps=steps), strict=True)
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if error[0] is not None:
                # A process that waits for another rank does not notice the end of its input.
                process.kill()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()  # the worker exits at the end of its input
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._folder.cleanup()


def commit(checkout: Path) -> str | None:
    """Return the commit of a checkout, with a plus sign if files have changed; None if it is not a git checkout."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or None


def measure(
    case: Case, workers: dict[str, Worker], sizes: Sizes, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Return the rows of a case, one for each version."""
    for worker in workers.values():
        worker.request(prepare=case, sizes=sizes)
    times: dict[str, list[float]] = {name: [] for name in workers}
    names = list(workers)
    began = time.perf_counter()
    for turn in range(1 + rounds):
        if turn > MIN_ROUNDS and time.perf_counter() - began > seconds:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found = workers[name].seconds(case.steps)
            if turn > 0:  # the first round builds the plans
                times[name].append(found)
    bits = {name: worker.request(digest=True) for name, worker in workers.items()}
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
    sizes: Sizes = Sizes(),  # noqa: B008  immutable
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Return three rows for each case: the older checkout, this one, and the older one again.

    Args:
        before: the folder of the older checkout.
        rounds: number of rounds. In each round, every version takes one step that is not timed, then some timed steps.
        cases: the cases to measure.
        sizes: the sizes of their models.
        seconds: time limit for one case, after at least `MIN_ROUNDS` rounds.

    Raises:
        FileNotFoundError: ``before`` does not contain the package.
        RuntimeError: one of the versions cannot run a case.
    """
    if not (before / "muonfx" / "__init__.py").exists():
        raise FileNotFoundError(
            f"before: found no muonfx in {before}, expected a worktree of an older commit"
        )
    checkouts = dict(zip(VERSIONS, (before, HERE, before), strict=True))
    commits = {name: commit(checkout) for name, checkout in checkouts.items()}
    rows: list[dict[str, Any]] = []
    for ranks in dict.fromkeys(case.ranks for case in cases):
        threads = torch.get_num_threads() if ranks == 1 else 1
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(Worker(checkout, ranks, threads))
                for name, checkout in checkouts.items()
            }
            for case in (case for case in cases if case.ranks == ranks):
                found = measure(case, workers, sizes, rounds, seconds)
                rows += [
                    {**row, "commit": commits[row["candidate"]], "threads": threads}
                    for row in found
                ]
                print(line(found), flush=True)
    return rows


def line(rows: list[dict[str, Any]]) -> str:
    """Format the rows of a case: median and minimum milliseconds, and the ratios with their percentiles."""
    row_of = {row["candidate"]: row for row in rows}
    before, after, again = [row_of[name] for name in VERSIONS]
    times = [f"{row['milliseconds']['median']:.2f} ({row['least']:.2f})" for row in (before, after)]
    bits = "" if after["same bits"] else ", other bits"
    return f"{after['case']}: {' to '.join(times)} ms, {_ratio_text(after)}, noise {_ratio_text(again)}{bits}"


def _ratio_text(row: dict[str, Any]) -> str:
    """Format the ratio of a row with its percentiles: "1.02 (0.75 to 1.15)"."""
    return "{median:.2f} ({p10:.2f} to {p90:.2f})".format(**row["ratio"])
