"""The coordinate check for Muon: the operator norm of its updates and the loss over the rate, for four widths.

A GPT of one block trains for some steps at each width, under each ``lr_scaling``, at several rates of its hidden
matrices, from two seeds, by `muonfx.study`. All else follows muP, so that only the scaling of the hidden matrices can
move the best rate: the embedding's rate is constant, and the rate of the head is proportional to 1 / width.

Run ``python -m benchmarks.widths``, which takes about eight minutes of one thread. An interrupted study continues at
its last report. The results are in ``results/widths_quality.json``, the page is ``docs/widths.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import muonfx as mfx
from benchmarks import report
from benchmarks.measure import RESULTS, machine
from benchmarks.plots import ASSETS, GREY, pyplot

# The examples are scripts, not a package.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt import GPT
from text import Corpus, read_corpus

PATH = RESULTS / "widths_quality.json"
FOLDER = Path(__file__).parents[1] / "runs" / "widths"
"""Folder of the checkpoints of an interrupted study."""
PAGE, PICTURE = report.DOCS / "widths.md", ASSETS / "widths.svg"

WIDTHS = (64, 128, 256, 512)
RATES = {
    "match_rms_adamw": (0.004, 0.008, 0.016, 0.032, 0.064, 0.128),
    "original": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4),
    "spectral": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4),
}
"""The rates of the hidden matrices by ``lr_scaling``."""
SEEDS = (0, 1)
STEPS, BATCH, CONTEXT = 30, 8, 32
VALIDATION = 64
"""Number of validation windows."""

NORM_STEPS = 10
"""Number of steps before the norms of an update are measured. The first gradients of most matrices are zero."""
MATRICES = {
    "query": "blocks.0.attention.query.weight",
    "up": "blocks.0.mlp.up.weight",
    "down": "blocks.0.mlp.down.weight",
}
"""A square, a tall and a wide matrix."""

ADAM_RATE = 0.01
"""The rate of the embedding and of gains at every width, and of the head at the first width."""

ORTHOGONALIZE = mfx.orthogonalize(dtype=torch.bfloat16)
"""In bf16, as on most accelerators."""

Params = dict[str, Tensor]


@cache
def corpus() -> Corpus:
    """Return the text, which is read once."""
    return read_corpus(None)


def new_model(width: int, seed: int = 0) -> GPT:
    """Return a model with the initial weights of a seed."""
    return GPT(width=width, depth=1, context=CONTEXT, seed=seed)


def task(width: int) -> mfx.studies.Task:
    """Return the task of the study at one width."""

    def make_model() -> GPT:
        return new_model(width, seed=torch.initial_seed())  # the study sets the seed

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        return corpus().batch(seed, step, BATCH, CONTEXT)

    def loss(model: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    (validation,) = corpus().validation_batches(1, VALIDATION, CONTEXT)
    return mfx.studies.Task.of_module(make_model, batch, loss, validation)


def muon(lr_scaling: str) -> mfx.Transform:
    """Return Muon without a rate."""
    return mfx.chain(
        mfx.momentum(0.95, nesterov=True), ORTHOGONALIZE, mfx.scale_by_shape(lr_scaling)
    )


def optimizer(width: int, lr_scaling: str, rate: float) -> mfx.Transform:
    """Return Muon for the hidden matrices at one rate, and Adam for all other parameters, at rates that follow muP."""
    adam = mfx.scale_by_adam(0.9, 0.95)
    head_rate = ADAM_RATE * WIDTHS[0] / width
    parts = {
        "hidden": mfx.chain(muon(lr_scaling), mfx.scale_by_learning_rate(rate)),
        "head": mfx.chain(adam, mfx.scale_by_learning_rate(head_rate)),
        "rest": mfx.chain(adam, mfx.scale_by_learning_rate(ADAM_RATE)),
    }
    labels = dict(mfx.default_labels(new_model(width), muon="hidden", other="rest"))
    labels["head.weight"] = "head"
    fall = mfx.scale(mfx.linear_schedule(1.0, 0.0, STEPS))
    return mfx.chain(mfx.partition(parts, labels), fall)


def losses_at(width: int) -> list[dict[str, Any]]:
    """Train at one width, and return a row for each scaling, rate and seed."""
    optimizers = {rule: lambda rate, rule=rule: optimizer(width, rule, rate) for rule in RATES}
    rows = mfx.study(
        task(width),
        optimizers,
        rates=RATES,
        seeds=SEEDS,
        steps=STEPS,
        folder=FOLDER / f"width {width}",
        vmap=width < 256,  # wide models fill the processor alone
    )
    final_rows = []
    for row in rows:
        if row["step"] == STEPS:
            final_rows.append({"width": width, **row})
    return final_rows


def operator_norm(update: Tensor) -> float:
    """Return the operator norm of a matrix (outputs, inputs), where both sides have the root mean square as norm.

    >>> operator_norm(torch.eye(4)), operator_norm(torch.ones(1, 4))
    (1.0, 4.0)
    """
    outputs, inputs = update.shape
    spectral_norm = torch.linalg.matrix_norm(update.float(), ord=2)
    return round(float(spectral_norm) * math.sqrt(inputs / outputs), 4)


def norms_at(width: int) -> list[dict[str, Any]]:
    """Return the operator norms of the updates after some steps at one width, at a rate of 1."""
    rows = []
    params, grads = trained(width)
    for rule in RATES:
        tx = muon(rule)
        hidden = {name: params[path] for name, path in MATRICES.items()}
        updates, _ = tx.update(
            {name: grads[path] for name, path in MATRICES.items()}, tx.init(hidden), hidden
        )
        norms = {name: operator_norm(update) for name, update in updates.items()}
        rows.append({"width": width, "optimizer": rule, **norms})
    return rows


def trained(width: int) -> tuple[Params, Params]:
    """Return parameters and gradients after some steps of a model of one width."""
    work = task(width)
    tx = optimizer(width, "spectral", 0.1)
    params = work.init(SEEDS[0])
    state = tx.init(params)
    gradient_of = torch.func.grad(work.loss)
    for step in range(NORM_STEPS):
        grads = gradient_of(params, work.batch(SEEDS[0], step))
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
    return params, gradient_of(params, work.batch(SEEDS[0], NORM_STEPS))


# --------------------------------------------------------------------------------------------------------------- page


def mean_losses(rows: list[dict[str, Any]], lr_scaling: str, width: int) -> dict[float, float]:
    """Return the mean loss over seeds by rate."""
    losses: dict[float, list[float]] = {}
    for row in rows:
        if row["optimizer"] == lr_scaling and row["width"] == width:
            losses.setdefault(row["rate"], []).append(row["validation_loss"])
    return {rate: fmean(by_seed) for rate, by_seed in losses.items()}


def best_rate(losses: dict[float, float]) -> float:
    """Return the rate with the lowest loss.

    >>> best_rate({0.1: 3.0, 0.2: 2.5, 0.4: 2.8})
    0.2
    """
    return min(losses, key=lambda rate: losses[rate])


def norms_table() -> str:
    """Return the table of the operator norms."""
    results = report.load("widths_quality")
    if results is None:
        return ""
    lines = []
    for rule in RATES:
        by_width = {row["width"]: row for row in results["norms"] if row["optimizer"] == rule}
        for name in MATRICES:
            norms = [f"{by_width[width][name]:.2f}" for width in WIDTHS]
            lines.append([f"`{rule}`, `{name}`", *norms])
    return report.table(["operator norm of an update at rate 1", *_width_columns()], lines) + "\n"


def rates_table() -> str:
    """Return the table of the best rates, and of the loss that the best rate of the narrowest model costs."""
    results = report.load("widths_quality")
    if results is None:
        return ""
    lines = []
    for rule in RATES:
        losses = [mean_losses(results["rows"], rule, width) for width in WIDTHS]
        first_rate = best_rate(losses[0])
        best = [f"{best_rate(by_rate):g}" for by_rate in losses]
        regrets = [f"{by_rate[first_rate] - min(by_rate.values()):+.3f}" for by_rate in losses]
        lines.append([f"`{rule}`: best rate", *best])
        lines.append([f"`{rule}`: loss at {first_rate:g}, above the best", *regrets])
    machine_line = report.machine_line(results, "one thread")
    return f"{report.table(['', *_width_columns()], lines)}\n\n{machine_line}\n"


def _width_columns() -> list[str]:
    return [f"width {width}" for width in WIDTHS]


def draw() -> None:
    """Draw the norms over the width, and the loss over the rate; do nothing without results or matplotlib."""
    results = report.load("widths_quality")
    plt = pyplot()
    if results is None or plt is None:
        return
    with mfx.plot.style():
        figure, axes = plt.subplots(2, 2, figsize=(6.4, 5.6), layout="constrained")
        _draw_norms(axes[0, 0], results["norms"])
        for panel, rule in zip(axes.flat[1:], RATES, strict=True):
            rows = [
                row | {"optimizer": f"{row['width']}"}
                for row in results["rows"]
                if row["optimizer"] == rule
            ]
            mfx.plot.plot_rates(rows, ax=panel)
            panel.set_title(rule, loc="left")
            panel.set(ylabel="loss", ylim=(2.53, 2.81))
            panel.set_xticks(RATES[rule][::2], [f"{rate:g}" for rate in RATES[rule][::2]])
            panel.minorticks_off()
            panel.get_legend().remove()
        panel.legend(title="width", loc="upper center")  # the last panel has space for it
        figure.savefig(PICTURE, transparent=True, metadata={"Date": None})
        plt.close(figure)


def _draw_norms(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the operator norm over the width, for a square matrix and for a wide one."""
    for rule, color, marker in zip(RATES, mfx.plot.COLORS.values(), "os^", strict=False):
        for name, line in {"query": "-", "down": ":"}.items():
            norms = [row[name] for row in rows if row["optimizer"] == rule]
            label = rule if name == "query" else None
            axes.plot(WIDTHS, norms, line, color=color, marker=marker, label=label)
    axes.set(xscale="log", yscale="log", xlabel="width", ylabel="operator norm of an update")
    axes.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_title("at rate 1; dotted: down", loc="left", color=GREY)
    axes.legend()


SECTIONS = {"norms": norms_table, "widths": rates_table}


def main() -> None:
    """Measure all widths, and write the results, the tables and the picture."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    norms: list[dict[str, Any]] = []
    for width in WIDTHS:
        norms += norms_at(width)
        rows += losses_at(width)
    results = {"machine": machine(), "text": corpus().digest, "norms": norms, "rows": rows}
    PATH.write_text(json.dumps(results, indent=1) + "\n")
    report.rewrite(PAGE, SECTIONS)
    draw()


if __name__ == "__main__":
    main()
