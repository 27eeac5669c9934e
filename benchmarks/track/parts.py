"""Parts that most contenders share: the schedule, products in fp32, and AdamW for all but hidden matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import muonfx as mfx

DECAY = 0.1
ADAM_RATE = 0.06
"""AdamW's learning rate for embeddings, the head and gains, from the study of the default coefficients."""

FP32 = mfx.orthogonalize(dtype=torch.float32)
"""`orthogonalize` with its default coefficients in fp32, because not every processor has bf16 products."""


def schedule(peak: float, steps: int) -> mfx.Schedule:
    """Return a warm-up of 5 % of the steps, the peak up to half of the steps, and a linear decay to zero."""
    warmup = max(1, steps // 20)
    return mfx.warmup_stable_decay_schedule(peak, warmup, steps // 2, steps, start=peak / warmup)


def adamw(rate: float, steps: int, decay: float = DECAY) -> mfx.Transform:
    """Return AdamW without decay of vectors."""
    return mfx.adamw(
        schedule(rate, steps), b2=0.95, weight_decay=decay, mask=mfx.routing.ndim(min=2)
    )


def chain_with_adamw(
    model: nn.Module,
    hidden: mfx.Transform,
    steps: int,
    rest: float = ADAM_RATE,
    decay: float = DECAY,
) -> mfx.Transform:
    """Return clipping, then a transform for the hidden matrices and AdamW for the rest.

    Args:
        model: the model.
        hidden: the transform of the hidden matrices, with its schedule and its decay.
        steps: number of training steps.
        rest: AdamW's learning rate.
        decay: AdamW's weight decay.
    """
    parts = {"muon": hidden, "adamw": adamw(rest, steps, decay)}
    return mfx.chain(mfx.clip_by_global_norm(1.0), mfx.partition(parts, mfx.default_labels(model)))


def with_adamw(
    model: nn.Module,
    hidden: mfx.Transform,
    steps: int,
    rest: float = ADAM_RATE,
    decay: float = DECAY,
) -> Callable[[], None]:
    """Return the step of an optimizer that applies `chain_with_adamw`."""
    tx = chain_with_adamw(model, hidden, steps, rest, decay)
    return mfx.TransformOptimizer(model, tx).step


def clipped(model: nn.Module, steps: int, *optimizers: torch.optim.Optimizer) -> Callable[[], None]:
    """Return the step of torch optimizers with the same clipping and the same schedule; each ``lr`` is a peak."""
    planned = schedule(1.0, steps)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: float(planned(step)))
        for one in optimizers
    ]

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()

    return step
