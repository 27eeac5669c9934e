"""Final losses of small language models for each candidate for the default coefficients, over seeds, rates and sizes.

The model, the text, the training loop, the learning rate schedule and the comparison with ``torch.optim.Muon`` are
those of ``examples/train_gpt.py``. Candidates differ only in the coefficients of Newton-Schulz. Each candidate runs
with every seed at every rate of one grid, which is the same for all but AdamW. A seed determines initial weights and
batches, so runs of the same seed are compared with each other.

A run takes minutes, and all runs take hours. Finished runs are kept in ``results/training_quality.json`` and not
repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import muonfx as mfx
from benchmarks.measure import RESULTS, machine

# The examples are scripts, not a package.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from baseline import TorchMuon
from gpt import GPT
from text import read_corpus

PATH = RESULTS / "training_quality.json"
SEEDS = (0, 1, 2, 3, 4)
STEPS = 300
REST_RATE = 0.06
BASELINE = "torch.optim.Muon"


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    width: int
    batch: int
    depth: int = 4
    context: int = 128


SIZES = {"0.23 M": Size(width=64, batch=16), "0.85 M": Size(width=128, batch=8)}
SMALL, LARGE = SIZES

RATES = {
    SMALL: (0.0085, 0.01, 0.0118, 0.0139, 0.0164),
    LARGE: (0.0061, 0.0072, 0.0078, 0.0085, 0.01),
}
"""Learning rates of hidden matrices by model size, for every candidate but AdamW."""

ADAM_RATES = (0.0025, 0.0035, 0.005, 0.007)

CANDIDATES = ("polar_express_4", "polar_express_5", BASELINE, "keller", "quintic", "AdamW")
"""Presets of ``muonfx.polar``, torch's own Muon, and AdamW for all parameters."""


def hidden_transform(candidate: str) -> mfx.Transform:
    """Return the transforms of hidden matrices before the learning rate."""
    if candidate == "AdamW":
        return mfx.scale_by_adam(0.9, 0.95)
    return mfx.chain(
        mfx.momentum(0.95, nesterov=True),
        mfx.orthogonalize(coefficients=candidate, dtype=torch.float32),
        mfx.scale_by_shape("match_rms_adamw"),
    )


@cache
def corpus() -> Any:
    """Return the text, which is read once."""
    return read_corpus(None)


def runs() -> Iterator[dict[str, Any]]:
    """Yield all runs seed by seed, so that a study that is stopped early has the same seeds for all candidates."""
    for size in SIZES:
        for seed in SEEDS:
            for candidate in CANDIDATES:
                if candidate == "AdamW" and size != LARGE:
                    continue
                for rate in ADAM_RATES if candidate == "AdamW" else RATES[size]:
                    yield {"size": size, "candidate": candidate, "rate": rate, "seed": seed}


def train(size: str, candidate: str, rate: float, seed: int) -> dict[str, float]:
    """Train one model; return its validation loss and the processor seconds of the model and of the optimizer."""
    own, text = SIZES[size], corpus()
    torch.manual_seed(seed)
    model = GPT(width=own.width, depth=own.depth, context=own.context, seed=seed)
    forward = torch.compile(model)
    labels = mfx.default_labels(model, muon="hidden", other="rest")
    hidden, rest = (
        mfx.warmup_stable_decay_schedule(
            peak, STEPS // 20, STEPS // 2, STEPS, start=peak / (STEPS // 20)
        )
        for peak in (rate, REST_RATE)
    )
    tx: Any = TorchMuon(labels, hidden, rest, weight_decay=0.1, max_norm=1.0)
    if candidate != BASELINE:
        parts = {"hidden": hidden_transform(candidate), "rest": mfx.scale_by_adam(0.9, 0.95)}
        rates = {
            "hidden": mfx.scale_by_learning_rate(hidden),
            "rest": mfx.scale_by_learning_rate(rest),
        }
        tx = mfx.chain(
            mfx.clip_by_global_norm(1.0),
            mfx.partition(parts, labels),
            mfx.add_decayed_weights(0.1, mask=mfx.routing.ndim(min=2)),
            mfx.partition(rates, labels),
        )
    params = dict(model.named_parameters())
    state = tx.init(params)
    spent = {"model": 0.0, "optimizer": 0.0}
    for step in range(STEPS):
        inputs, targets = text.batch(seed, step, own.batch, own.context)
        began = time.thread_time()
        loss = F.cross_entropy(forward(inputs).flatten(0, 1), targets.flatten())
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        between = time.thread_time()
        with torch.no_grad():
            updates, state = tx.update(grads, state, params, donate=True)
            for name, update in updates.items():
                if update is not None:
                    params[name].add_(update)
        spent["model"] += between - began
        spent["optimizer"] += time.thread_time() - between
    with torch.no_grad():
        judged = text.validation_batches(32, 16, own.context)
        losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y in judged]
    return {"loss": statistics.fmean(losses)} | {
        f"{what}_seconds": took for what, took in spent.items()
    }


def finished() -> list[dict[str, Any]]:
    """Return the finished runs."""
    return json.loads(PATH.read_text())["rows"] if PATH.exists() else []


def main(arguments: list[str] | None = None) -> None:
    """Run the missing runs; several processes share them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--size", default="", help="run only this model size")
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), help="only these")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, began = finished(), time.monotonic()
    known = [tuple(row[key] for key in ("size", "candidate", "rate", "seed")) for row in rows]
    for run in runs():
        if tuple(run.values()) in known or options.size not in ("", run["size"]):
            continue
        if run["candidate"] not in options.candidates:
            continue
        if time.monotonic() - began > 60 * options.minutes:
            break
        row = run | train(**run)
        print(*run.values(), f"{row['loss']:.4f}", flush=True)
        rows = [*finished(), row]
        PATH.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
