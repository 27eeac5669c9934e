"""Run the benchmarks and write results, tables and plots.

Run ``python -m benchmarks [adapter polar step parts checkpoint sharding sharding_timeline engines bind planner
overhead operations optimizer_laws attack]``. To compare with another checkout, run
``python -m benchmarks versions --before FOLDER``.

``python -m benchmarks simulator --model llama-70b --mesh dp=8,shard=64`` measures nothing. It predicts the cost of our
plan and of other libraries' schemes on a mesh of ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    adapter,
    attack,
    bind,
    checkpoint,
    engines,
    leaves,
    operations,
    operations_compiled,
    optimizer_laws,
    overhead,
    parts,
    planner,
    plots,
    polar,
    rates_table,
    report,
    sharding,
    sharding_timeline,
    step,
    versions,
    widths,
)
from benchmarks.measure import save
from benchmarks.simulator.__main__ import main as simulate
from benchmarks.track import sizes, standings

BENCHMARKS = {
    "adapter": "adapter_speed adapter_memory",
    "polar": "polar_speed polar_quality polar_scratch",
    "step": "step_speed step_quality",
    "parts": "parts_speed",
    "checkpoint": "checkpoint_speed checkpoint_fresh checkpoint_memory",
    "sharding": "sharding_speed",
    "sharding_timeline": "sharding_timeline",
    "engines": "engines_speed",
    "bind": "bind_speed",
    "planner": "planner_speed",
    "overhead": "leaves_speed overhead_speed",
    "operations": "operations_count operations_compiled",
    "optimizer_laws": "optimizer_laws",
    "attack": "checkpoint_attack",
    "versions": "versions_speed",
}
"""The benchmarks, and the names of the results that each one writes. Each result can also be measured alone."""


def main(arguments: list[str] | None = None) -> None:
    """Measure, save the results, print the tables, and rewrite them in the documentation."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["simulator"]:
        simulate(arguments[1:])
        return
    options = read_options(arguments)
    torch.set_num_threads(options.threads)
    measures = measures_for(options)
    for name in options.names:
        for result in BENCHMARKS.get(name, name).split():
            path = save(result + options.suffix, measures[result]())
            print(f"saved {path.name}", flush=True)
    if not options.no_report:
        print(report.tables())
        write_report()


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Parse and check the command line. In the result, `cases` are cases of `versions`, not words."""
    results = [result for results in BENCHMARKS.values() for result in results.split()]
    known = [*BENCHMARKS, *results]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"benchmarks or results to run: {', '.join(known)}"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=60,
        help="number of rounds; each round runs every candidate once",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="time limit for one case, after at least ten rounds",
    )
    parser.add_argument(
        "--megabytes", type=int, default=1024, help="size of the state in the checkpoint benchmark"
    )
    parser.add_argument(
        "--folder", help="folder for checkpoints; default: the system's folder of temporary files"
    )
    parser.add_argument(
        "--before", type=Path, help="other checkout of muonfx, for the benchmark versions"
    )
    parser.add_argument(
        "--cases", nargs="+", default=[""], help="words; versions runs the cases whose name has one"
    )
    parser.add_argument(
        "--threads", type=int, default=min(2, os.cpu_count() or 1), help="number of torch threads"
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="skip candidates that use torch.compile"
    )
    parser.add_argument(
        "--suffix", default="", help="end of the names of results, such as _amx for another machine"
    )
    parser.add_argument(
        "--no-report", action="store_true", help="write results only, not the documentation"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(known)
    if unknown:
        parser.error(
            f"name: found {', '.join(sorted(unknown))}, expected some of {', '.join(known)}"
        )
    if not options.names:
        options.names = [name for name in BENCHMARKS if name != "versions" or options.before]
    if options.before is None and not {"versions", "versions_speed"}.isdisjoint(options.names):
        parser.error(
            "versions: found no other checkout of muonfx, expected one: give its folder with --before"
        )
    cases = [case for case in versions.CASES if any(word in case.name for word in options.cases)]
    if not cases:
        every = ", ".join([case.name for case in versions.CASES])
        parser.error(
            f"--cases: found {options.cases}, which no case contains, expected a word of: {every}"
        )
    options.cases = cases
    return options


def measures_for(options: argparse.Namespace) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """Return the function that measures each result."""
    rounds, seconds = options.rounds, options.seconds
    megabytes, folder = options.megabytes, options.folder
    compiled = not options.no_compile
    return {
        "adapter_speed": lambda: adapter.speed(rounds),
        "adapter_memory": adapter.memory,
        "polar_speed": lambda: polar.speed(rounds, compiled=compiled, seconds=seconds),
        "polar_quality": lambda: polar.quality(compiled=compiled),
        "polar_scratch": polar.scratch,
        "step_speed": lambda: step.speed(rounds, compiled=compiled, seconds=seconds),
        "step_quality": lambda: step.quality(compiled=compiled),
        "parts_speed": lambda: parts.speed(rounds, compiled=compiled, seconds=seconds),
        "checkpoint_speed": lambda: checkpoint.speed(megabytes, min(rounds, 10), folder),
        "checkpoint_fresh": lambda: checkpoint.fresh(megabytes, min(rounds, 10), folder),
        "checkpoint_memory": lambda: checkpoint.memory(megabytes, folder),
        "checkpoint_attack": attack.outcomes,
        "planner_speed": lambda: planner.speed(rounds, seconds=seconds),
        "sharding_speed": lambda: sharding.speed(rounds, seconds=seconds),
        "sharding_timeline": sharding_timeline.times,
        "engines_speed": lambda: engines.speed(max(2, min(rounds, 5))),
        "bind_speed": lambda: bind.speed(min(rounds, 3)),
        "leaves_speed": lambda: leaves.speed(rounds),
        "operations_count": operations.counts,
        "operations_compiled": operations_compiled.counts,
        "optimizer_laws": optimizer_laws.rows,
        "overhead_speed": lambda: overhead.speed(min(rounds, 30), seconds=seconds),
        "versions_speed": lambda: versions.speed(
            options.before, rounds, cases=options.cases, seconds=seconds
        ),
    }


def write_report() -> None:
    """Write all tables and pictures of the documentation from the saved results."""
    report.rewrite(report.PAGE, report.FINDINGS_SECTIONS)
    report.rewrite()
    report.rewrite(report.GPU_PAGE, report.OPERATIONS_SECTIONS)
    report.rewrite(optimizer_laws.PAGE, optimizer_laws.SECTIONS)
    report.rewrite(report.TRAINING_PAGE, report.TRAINING_SECTIONS)
    report.rewrite(rates_table.PAGE, rates_table.SECTIONS)
    report.rewrite(attack.PAGE, attack.SECTIONS)
    report.rewrite(standings.PAGE, standings.SECTIONS | sizes.SECTIONS)
    report.rewrite(widths.PAGE, widths.SECTIONS)
    plots.draw()
    plots.draw_findings()
    plots.draw_parts()
    plots.draw_training()
    plots.draw_headline()
    standings.draw_track()
    sizes.draw_sizes()
    widths.draw()
    sharding_timeline.draw()


if __name__ == "__main__":
    main()
