"""Measure how the track's differences change from one model size to the next.

Run ``python -m benchmarks.track.scaling``. Each run has as many tokens as the model has parameters. In this order:

1. Tuning at the small size: rate, decay, and the rate of embeddings, head and gains, one after another, with a seed
   that is used nowhere else.
2. Measurement at both sizes with these settings, with each seed. AdamW also trains for longer, so that each loss has a
   number of AdamW's steps that give the same loss.
3. A check at the large size: each rate and each decay is multiplied and divided by a factor, on one seed.

Finished runs are kept in ``results/scaling_quality.json`` and not repeated, so the command can be stopped and started
again. ``--times`` measures the processor time of a step instead, which needs an idle machine. ``python -m
benchmarks.track.sizes`` writes the section of the page and its picture.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.measure import RESULTS, machine
from benchmarks.track.parts import ADAM_RATE, DECAY
from benchmarks.track.task import GPT, Task, corpus, train

PATH = RESULTS / "scaling_quality.json"

SMALL, LARGE = "0.23 M", "0.85 M"
"""The number of parameters, which is also the number of tokens of a run."""
SIZES = {SMALL: Task(width=64, batch=8), LARGE: Task(width=128, batch=16)}

REFERENCE = "adam_hidden"
START_RATES = {
    REFERENCE: 0.00707,
    "torch_muon": 0.00707,
    "muon": 0.01,
    "normuon": 0.01,
    "adamuon": 0.0141,
}
"""The contenders, with the rates of the track, where the tuning starts."""

LENGTHS = (1.0, 1.41, 2.0)
"""AdamW's lengths, as multiples of the length of the other contenders."""

SEEDS = (0, 1)
TUNING_SEED = 100
CHECK_SEED = 0
FACTORS = {"rate": 2**0.5, "decay": 2.0, "rest": 2**0.5}
"""Ratio of neighboring values in the search and in the check."""
CHECKED = ("rate", "decay")
TIMED_STEPS = 60

Settings = dict[str, float]


class Run(NamedTuple):
    """One training run."""

    size: str
    contender: str
    settings: Settings
    steps: int
    seed: int


def steps_of(size: str, length: float = 1.0) -> int:
    """Return the number of steps of a run with ``length`` tokens for each parameter.

    >>> steps_of("0.23 M"), steps_of("0.85 M")
    (225, 417)
    """
    task = SIZES[size]
    model = GPT(width=task.width, depth=task.depth, context=task.context, seed=0)
    parameters = sum(param.numel() for param in model.parameters())
    return round(length * parameters / (task.batch * task.context))


def moved(settings: Mapping[str, float], name: str, factor: float) -> Settings:
    """Return the settings with one value multiplied, rounded to three digits.

    >>> moved({"rate": 0.01, "decay": 0.1}, "decay", 2.0)
    {'rate': 0.01, 'decay': 0.2}
    """
    return dict(settings) | {name: float(f"{settings[name] * factor:.3g}")}


class Record:
    """The finished runs, in memory and in a file."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {"text": corpus().digest, "settings": {}, "rows": []}
        if PATH.exists():
            saved = json.loads(PATH.read_text())
            if saved["text"] != self.content["text"]:
                raise SystemExit(
                    f"{PATH}: its runs trained on another text; this Python has {self.content['text']}"
                )
            self.content = saved
        self.settings: dict[str, Settings] = self.content["settings"]
        self.rows: list[dict[str, Any]] = self.content["rows"]

    def loss(self, run: Run) -> float | None:
        """Return the loss of a finished run, or None."""
        for row in self.rows:
            if all(row[key] == value for key, value in run._asdict().items()):
                return row["loss"]
        return None

    def write(self) -> None:
        """Write the file; the previous one stays intact if this fails."""
        self.content["machine"] = machine()
        temporary = PATH.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        temporary.replace(PATH)

    def trained(self, run: Run) -> float:
        """Return the loss of a run, and train it if it is not finished."""
        loss = self.loss(run)
        if loss is not None:
            return loss
        began = time.thread_time()
        result = train(SIZES[run.size], run.contender, run.settings, run.steps, run.seed)
        seconds = round(time.thread_time() - began, 1)
        self.rows.append(run._asdict() | {"loss": result["loss"], "seconds": seconds})
        self.write()
        print(*run, f"{result['loss']:.4f}", f"{seconds:.0f} s", flush=True)
        return result["loss"]


def tuned(record: Record, contender: str) -> Settings:
    """Return the settings of a search along rate, decay and the rate of the rest, in this order."""
    best = {"rate": START_RATES[contender], "decay": DECAY, "rest": ADAM_RATE}

    def loss_of(settings: Settings) -> float:
        return record.trained(Run(SMALL, contender, settings, steps_of(SMALL), TUNING_SEED))

    lowest = loss_of(best)
    for name, factor in FACTORS.items():
        first = best[name]
        for direction in (factor, 1 / factor):
            while (loss := loss_of(moved(best, name, direction))) < lowest:
                best = moved(best, name, direction)
                lowest = loss
            if best[name] != first:  # the loss fell in this direction, so it rises in the other
                break
    return best


def measurements(size: str, settings: Mapping[str, Settings]) -> Iterator[Run]:
    """Yield the measured runs of one size, seed by seed, so that an interrupted study has whole seeds."""
    for seed in SEEDS:
        for contender in START_RATES:
            yield Run(size, contender, settings[contender], steps_of(size), seed)
        for length in LENGTHS[1:]:
            yield Run(size, REFERENCE, settings[REFERENCE], steps_of(size, length), seed)


def checks(name: str, settings: Mapping[str, Settings]) -> Iterator[Run]:
    """Yield the runs that check one number at the large size."""
    for contender in START_RATES:
        for factor in (FACTORS[name], 1 / FACTORS[name]):
            neighbor = moved(settings[contender], name, factor)
            yield Run(LARGE, contender, neighbor, steps_of(LARGE), CHECK_SEED)


def run_all() -> None:
    """Train all runs that are not finished."""
    record = Record()
    for contender in START_RATES:
        record.settings[contender] = tuned(record, contender)
    for run in measurements(SMALL, record.settings):
        record.trained(run)
    torch.compiler.reset()  # else the shapes of the large model would be compiled as dynamic ones
    for run in measurements(LARGE, record.settings):
        record.trained(run)
    for name in CHECKED:
        for run in checks(name, record.settings):
            record.trained(run)


def measure_times() -> None:
    """Measure the time of a step of each contender at each size, and save it with the load of the machine."""
    record = Record()
    rows: list[dict[str, Any]] = []
    for size, task in SIZES.items():
        # Else the shapes of the second model would be compiled as dynamic ones.
        torch.compiler.reset()
        for contender in START_RATES:
            result = train(task, contender, record.settings[contender], TIMED_STEPS, SEEDS[0])
            row = {"size": size, "contender": contender}
            for name in ("model_ms", "optimizer_ms"):
                row[name] = round(result[name], 2)
            print(row, flush=True)
            rows.append(row)
    record.content["times"] = {"machine": machine(), "rows": rows}
    record.write()


def main() -> None:
    """Run the missing runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--times", action="store_true", help="measure the time of a step, on an idle machine"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.times:
        measure_times()
    else:
        run_all()
    print("finished; python -m benchmarks.track.sizes writes the page")


if __name__ == "__main__":
    main()
