"""Run the benchmarks and write their results and tables: ``python -m benchmarks [adapter] [checkpoint]``."""

from __future__ import annotations

import argparse
import os

import torch

from benchmarks import adapter, checkpoint, report
from benchmarks.measure import save


def main() -> None:
    """Measure, save, print and rewrite the tables of the documentation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = ["adapter", "checkpoint"]
    parser.add_argument("what", nargs="*", default=known, choices=known, help="which benchmarks to run")
    parser.add_argument("--rounds", type=int, default=60, help="rounds in which all candidates take turns")
    parser.add_argument("--megabytes", type=int, default=1024, help="of the state in the benchmark of checkpoints")
    parser.add_argument("--folder", help="where to write checkpoints; default: where temporary files go")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="threads for torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if "adapter" in options.what:
        save("adapter_speed", adapter.speed(options.rounds))
        save("adapter_memory", adapter.memory())
    if "checkpoint" in options.what:
        save("checkpoint_speed", checkpoint.speed(options.megabytes, min(options.rounds, 20), options.folder))
        save("checkpoint_memory", checkpoint.memory(options.megabytes, options.folder))
    print(report.tables())
    report.rewrite()


if __name__ == "__main__":
    main()
