"""The picture of the README: the loss over the rate for AdamW, ``torch.optim.Muon`` and ``mfx.Muon``.

Model, text, batches, schedule and numbers are the track's. One call of `muonfx.study` trains with both transforms;
``torch.optim.Muon`` is no transform, so its runs are the track's runs of its contender, as rows of the same study.

Run ``python -m benchmarks.headline``, which takes about six minutes of one thread. An interrupted call continues. The
results are in ``results/headline_quality.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import muonfx as mfx
from benchmarks import plots
from benchmarks.measure import RESULTS, machine
from benchmarks.track.parts import DECAY, FP32, adamw, chain_with_adamw, schedule
from benchmarks.track.task import GPT, Task, corpus, train

PATH = RESULTS / "headline_quality.json"
FOLDER = Path(__file__).parents[1] / "runs" / "headline"
"""Folder of the checkpoints of an interrupted study."""

TASK = Task()
STEPS = 200
SEEDS = (0, 1, 2)
ADAMW, TORCH, MUON = "AdamW, two rates", "torch.optim.Muon", "mfx.Muon"
MUON_RATES = (0.00707, 0.01, 0.0141)
RATES = {MUON: MUON_RATES, ADAMW: (0.00354, 0.005, 0.00707)}
"""The rates of the hidden matrices. All other parameters have `ADAM_RATE` of the track."""
TORCH_RATES = (*MUON_RATES, 0.02)

Row = dict[str, Any]


def new_model(seed: int = 0) -> GPT:
    """Return the track's model with the initial weights of a seed."""
    return GPT(width=TASK.width, depth=TASK.depth, context=TASK.context, seed=seed)


def study_task() -> mfx.studies.Task:
    """Return the track's task for a study."""

    def make_model() -> GPT:
        return new_model(torch.initial_seed())  # the study sets the seed

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        return corpus().batch(seed, step, TASK.batch, TASK.context)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    # The windows that `train` reads.
    (validation,) = corpus().validation_batches(1, 512, TASK.context)
    return mfx.studies.Task.of_module(make_model, batch, loss, validation)


def muon(rate: float) -> mfx.Transform:
    """Return Muon for the hidden matrices and AdamW for the rest."""
    hidden = mfx.muon(schedule(rate, STEPS), weight_decay=DECAY, orthogonalize=FP32)
    return chain_with_adamw(new_model(), hidden, STEPS)


def adamw_with_two_rates(rate: float) -> mfx.Transform:
    """Return AdamW with a rate for the hidden matrices and another one for the rest."""
    return chain_with_adamw(new_model(), adamw(rate, STEPS), STEPS)


def rows_of_torch(rate: float, seed: int) -> list[Row]:
    """Return the last row of a run of ``torch.optim.Muon``, as a row of the study."""
    result = train(TASK, "torch_muon", {"rate": rate}, STEPS, seed)
    return [
        {
            "optimizer": TORCH,
            "rate": rate,
            "seed": seed,
            "step": STEPS,
            "validation_loss": result["loss"],
        }
    ]


def measure() -> list[Row]:
    """Train with all optimizers, and return the last row of each run."""
    optimizers = {MUON: muon, ADAMW: adamw_with_two_rates}
    rows = mfx.study(
        study_task(),
        optimizers,
        rates=RATES,
        seeds=SEEDS,
        steps=STEPS,
        report_every=STEPS,
        folder=FOLDER,
        vmap=False,
    )
    for row in rows:
        del row["loss"]  # of the training batches
    finished = saved_rows()
    for rate in TORCH_RATES:
        for seed in SEEDS:
            same = [
                row
                for row in finished
                if (row["optimizer"], row["rate"], row["seed"]) == (TORCH, rate, seed)
            ]
            rows += same or rows_of_torch(rate, seed)
            save(rows)
    return rows


def saved_rows() -> list[Row]:
    """Return the rows of the file, if it exists."""
    return json.loads(PATH.read_text())["rows"] if PATH.exists() else []


def save(rows: list[Row]) -> None:
    """Write the file."""
    results = {"machine": machine(), "text": corpus().digest, "rows": rows}
    PATH.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Run the missing runs, and draw the picture."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    measure()
    plots.draw_headline()


if __name__ == "__main__":
    main()
