"""Run the benchmarks and write results, tables and plots.

``python -m benchmarks [adapter polar step parts checkpoint sharding sharding_timeline engines bind planner overhead]``,
and against another checkout ``python -m benchmarks versions --before FOLDER``

``python -m benchmarks simulator --model llama-70b --mesh dp=8,shard=64`` measures nothing: it prints our plan for a
mesh of ranks beside other libraries' schemes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks import (
    adapter,
    bind,
    checkpoint,
    engines,
    overhead,
    parts,
    planner,
    plots,
    polar,
    report,
    sharding,
    sharding_timeline,
    step,
    versions,
)
from benchmarks.measure import save
from benchmarks.simulator.__main__ import main as simulate

WHAT = {
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
    "overhead": "overhead_speed",
    "versions": "versions_speed",
}
"""What can be asked for, and the results that it writes; one of these can be asked for by itself."""


def main(arguments: list[str] | None = None) -> None:
    """Measure, save, print and rewrite the tables of the documentation."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["simulator"]:
        simulate(arguments[1:])
        return
    results = [name for names in WHAT.values() for name in names.split()]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="*", metavar="what", help=f"{', '.join([*WHAT, *results])}")
    parser.add_argument("--rounds", type=int, default=60, help="rounds in which all candidates take turns")
    parser.add_argument("--seconds", type=float, default=60, help="for one case, if it has had ten rounds by then")
    parser.add_argument("--megabytes", type=int, default=1024, help="of the state in the benchmark of checkpoints")
    parser.add_argument("--folder", help="where to write checkpoints; default: where temporary files go")
    parser.add_argument("--before", type=Path, help="the checkout of muonfx that versions compares with this one")
    parser.add_argument("--cases", nargs="+", default=[""], help="of versions: those with one of these words in them")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="threads for torch")
    parser.add_argument("--no-compile", action="store_true", help="leave out what goes through torch.compile")
    parser.add_argument("--no-report", action="store_true", help="leave the documentation alone: results only")
    options = parser.parse_args(arguments)
    if unknown := set(options.what) - {*WHAT, *results}:
        parser.error(f"what: found {', '.join(sorted(unknown))}, expected some of {', '.join([*WHAT, *results])}")
    asked = options.what or [name for name in WHAT if name != "versions" or options.before]
    if options.before is None and {"versions", "versions_speed"} & set(asked):
        parser.error("versions: say with --before where the other checkout of muonfx lies")
    cases = [case for case in versions.CASES if any(word in case.name for word in options.cases)]
    if not cases:
        parser.error(f"--cases: found none with {options.cases}; there are {[case.name for case in versions.CASES]}")
    torch.set_num_threads(options.threads)
    rounds, compiled = options.rounds, not options.no_compile
    measures = {
        "adapter_speed": lambda: adapter.speed(rounds),
        "adapter_memory": adapter.memory,
        "polar_speed": lambda: polar.speed(rounds, compiled=compiled, seconds=options.seconds),
        "polar_quality": lambda: polar.quality(compiled=compiled),
        "polar_scratch": polar.scratch,
        "step_speed": lambda: step.speed(rounds, compiled=compiled, seconds=options.seconds),
        "step_quality": lambda: step.quality(compiled=compiled),
        "parts_speed": lambda: parts.speed(rounds, compiled=compiled, seconds=options.seconds),
        "checkpoint_speed": lambda: checkpoint.speed(options.megabytes, min(rounds, 10), options.folder),
        "checkpoint_fresh": lambda: checkpoint.fresh(options.megabytes, min(rounds, 10), options.folder),
        "checkpoint_memory": lambda: checkpoint.memory(options.megabytes, options.folder),
        "planner_speed": lambda: planner.speed(rounds, seconds=options.seconds),
        "sharding_speed": lambda: sharding.speed(rounds, seconds=options.seconds),
        "sharding_timeline": sharding_timeline.times,
        "engines_speed": lambda: engines.speed(max(2, min(rounds, 5))),
        "bind_speed": lambda: bind.speed(min(rounds, 3)),
        "overhead_speed": lambda: overhead.speed(min(rounds, 30), seconds=options.seconds),
        "versions_speed": lambda: versions.speed(options.before, rounds, cases=cases, seconds=options.seconds),
    }
    for name in [one for what in asked for one in WHAT.get(what, what).split()]:
        print(f"saved {save(name, measures[name]()).name}", flush=True)
    if not options.no_report:
        print(report.tables())
        report.rewrite(report.PAGE, report.FINDINGS_SECTIONS)
        report.rewrite()
        report.rewrite(report.PARTS_PAGE, report.PARTS_SECTIONS)
        plots.draw()
        plots.draw_findings()
        plots.draw_parts()
        report.rewrite(report.TRAINING_PAGE, report.TRAINING_SECTIONS)
        plots.draw_training()
        sharding_timeline.draw()


if __name__ == "__main__":
    main()
