"""Measure how many steps each contender needs to reach the target loss; write the results and their page.

Run ``python -m benchmarks.track --jobs 2``. For each contender:

1. Tuning. Each of its numbers in turn is multiplied or divided by a constant factor as long as the loss falls, with a
   seed that is used nowhere else.
2. Measurement. It trains with every seed for a number of steps, then for the next shorter or longer lengths of a fixed
   series. The search ends at two neighbors: the shorter misses the target in the mean, and the longer reaches it. A
   schedule ends with the run, so each length is a run of its own.

The steps to the target are interpolated between these two lengths for each seed, on a logarithmic scale. Finished runs
are kept and not repeated, so the command can be stopped and started again. Times are processor times of one thread.

For a larger machine, change the task and the file: ``--width 512 --depth 8 --batch 64 --device cuda --target 1.2 --out
track_large.json``. Learning rates start from the values of the small model and are tuned again.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.measure import RESULTS, machine
from benchmarks.track import contenders, standings
from benchmarks.track.task import Task, corpus, module_of, train

SEEDS = (0, 1, 2, 3, 4)
TUNING_SEED = 100
FACTOR = 2**0.5
"""Ratio of neighboring values in the search for a learning rate."""
LENGTHS = tuple(10 * round(20 * 1.15**k) for k in range(-4, 13))
"""Numbers of steps of a run."""

Settings = dict[str, float]
Run = Callable[[Settings, int, int], float]


def tuned(start: Mapping[str, float], loss_of: Callable[[Settings], float]) -> Settings:
    """Return the settings after one search along each number, starting with the given ones."""
    best, least = dict(start), loss_of(dict(start))
    for name in start:
        for factor in (FACTOR, 1 / FACTOR):
            center = best[name]
            while (
                loss := loss_of(moved := best | {name: float(f"{best[name] * factor:.3g}")})
            ) < least:
                best, least = moved, loss
            if best[name] != center:
                break
    return best


def measured(settings: Settings, steps: int, target: float, run: Run) -> None:
    """Run lengths upward or downward from ``steps`` until two neighbors enclose the target."""
    index = min(range(len(LENGTHS)), key=lambda k: abs(LENGTHS[k] - steps))

    def reached(index: int) -> bool:
        return sum(run(settings, LENGTHS[index], seed) for seed in SEEDS) / len(SEEDS) <= target

    first = reached(index)
    while 0 < index < len(LENGTHS) - 1:
        index += -1 if first else 1
        if reached(index) != first:
            return


class Record:
    """The finished runs, in memory and in a file."""

    def __init__(self, path: Path, task: Task) -> None:
        self.path, self.task, self.lock = path, task, threading.Lock()
        # The text is a part of the Python installation, so another version of Python has another text.
        self.about = {"task": asdict(task), "text": corpus().digest, "tuning_seed": TUNING_SEED}
        found = (
            json.loads(path.read_text())
            if path.exists()
            else self.about | {"rows": [], "settings": {}}
        )
        for key, value in self.about.items():
            if found[key] != value:
                raise SystemExit(
                    f"{path}: {key}: found {found[key]}, expected {value}: choose another file with --out"
                )
        self.rows, self.settings = found["rows"], found["settings"]

    def find(self, contender: str, settings: Settings, steps: int, seed: int) -> float | None:
        """Return the loss of a finished run, or None."""
        key = (contender, settings, steps, seed)
        rows = (
            r for r in self.rows if (r["contender"], r["settings"], r["steps"], r["seed"]) == key
        )
        return next((row["loss"] for row in rows), None)

    def write(self) -> None:
        """Write the file; the previous one stays intact if this fails."""
        found = {"machine": machine(), **self.about, "settings": self.settings, "rows": self.rows}
        text = json.dumps(found, indent=1)
        (temporary := self.path.with_suffix(".tmp")).write_text(text + "\n")
        temporary.replace(self.path)


def settle(contender: str, record: Record, pool: ProcessPoolExecutor) -> None:
    """Tune and measure one contender; finished runs are read from the record."""
    module = module_of(contender)

    def run(settings: Settings, steps: int, seed: int) -> float:
        if (known := record.find(contender, settings, steps, seed)) is not None:
            return known
        found = pool.submit(train, record.task, contender, settings, steps, seed).result()
        with record.lock:
            row = {
                "contender": contender,
                "settings": settings,
                "steps": steps,
                "seed": seed,
            } | found
            record.rows.append(row)
            record.write()
            print(contender, settings, steps, seed, f"{found['loss']:.4f}", flush=True)
        return float(found["loss"])

    steps = getattr(module, "STEPS", 300)
    settings = tuned(module.SETTINGS, lambda settings: run(settings, steps, TUNING_SEED))
    with record.lock:
        record.settings[contender] = settings
        record.write()
    measured(settings, steps, record.task.target, run)


def main() -> None:
    """Run the contenders that have no result yet."""
    names = [module.name for module in pkgutil.iter_modules(contenders.__path__)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contenders", nargs="*", default=names, help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread")
    parser.add_argument("--out", default="track_quality.json", help="file in benchmarks/results")
    for field in fields(Task):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = parser.parse_args()
    task = Task(**{field.name: getattr(options, field.name) for field in fields(Task)})
    record = Record(RESULTS / options.out, task)
    spawn = get_context("spawn")
    with (
        ProcessPoolExecutor(
            options.jobs, spawn, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool,
        ThreadPoolExecutor(options.jobs + 1) as threads,
    ):
        for done in [threads.submit(settle, name, record, pool) for name in options.contenders]:
            done.result()
    if options.out == parser.get_default("out"):
        report.rewrite(standings.PAGE, standings.SECTIONS)
        standings.draw_track()


if __name__ == "__main__":
    main()
