"""The task of the track: a small GPT, its text and its batches, which are the same for every contender."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

# The examples are scripts, not a package.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt import GPT
from text import Corpus, read_corpus


@dataclass(frozen=True)
class Task:
    """Model, batch and target. The defaults are the track; other values are for larger machines."""

    width: int = 64
    depth: int = 4
    batch: int = 8
    context: int = 128
    target: float = 1.68
    """Validation loss to reach, in nats per byte."""
    device: str = "cpu"


@cache
def corpus() -> Corpus:
    """Return the text, which is read once per process."""
    return read_corpus(None)


def train(
    task: Task, contender: str, settings: Mapping[str, float], steps: int, seed: int
) -> dict[str, Any]:
    """Train one model; return its validation loss, and the medians of the processor milliseconds of a step.

    ``model_ms`` is the time of forward and backward, ``optimizer_ms`` of the optimizer.

    Args:
        task: model, batch and target.
        contender: name of a module in ``contenders``.
        settings: learning rates and other numbers, for the contender's function ``optimizer``.
        steps: number of training steps.
        seed: seed of the initial weights and of the batches.
    """
    text, device = corpus(), torch.device(task.device)
    torch.manual_seed(seed)
    model = GPT(width=task.width, depth=task.depth, context=task.context, seed=seed).to(device)
    forward = torch.compile(model)
    step: Callable[[], None] = module_of(contender).optimizer(model, steps, **settings)
    model_times: list[float] = []
    optimizer_times: list[float] = []
    for index in range(steps):
        inputs, targets = (
            part.to(device) for part in text.batch(seed, index, task.batch, task.context)
        )
        start = time.thread_time()
        F.cross_entropy(forward(inputs).flatten(0, 1), targets.flatten()).backward()
        middle = time.thread_time()
        step()
        end = time.thread_time()
        model_times.append(1e3 * (middle - start))
        optimizer_times.append(1e3 * (end - middle))
        model.zero_grad()
    with torch.no_grad():
        judged = [
            (x.to(device), y.to(device)) for x, y in text.validation_batches(32, 16, task.context)
        ]
        losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y in judged]
    return {
        "loss": statistics.fmean(losses),
        "model_ms": statistics.median(model_times),
        "optimizer_ms": statistics.median(optimizer_times),
    }


def module_of(contender: str) -> Any:
    """Return the module of a contender."""
    return import_module(f"benchmarks.track.contenders.{contender}")
