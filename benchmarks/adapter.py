"""Time and memory of a step of a chain as a torch optimizer, compared with torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import muonfx as mfx
from benchmarks.measure import PeakBytes, interleaved, summary

Params = dict[str, nn.Parameter]
Shapes = list[tuple[int, ...]]

MANY_SMALL: dict[str, Shapes] = {
    "300 leaves, 64 x 64 and smaller": [(64, 64), (64, 32), (32, 64), (48, 48)] * 75,
    "300 leaves, 16 x 16 and smaller": [(16, 16), (16, 8), (8, 16), (12, 12)] * 75,
}
LAYERS: Shapes = [(512, 512)] * 4 + [(2048, 512)] * 2 + [(512, 2048)] * 2


def make(shapes: Shapes) -> Params:
    """Return random parameters with random gradients."""
    generator = torch.Generator().manual_seed(0)
    params = {
        f"p{i}": nn.Parameter(torch.randn(shape, generator=generator))
        for i, shape in enumerate(shapes)
    }
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def torch_muon(params: Params) -> torch.optim.Optimizer:
    """Return torch.optim.Muon with its default settings."""
    return torch.optim.Muon(list(params.values()), lr=1e-3, weight_decay=0.1)


def our_muon(params: Params) -> torch.optim.Optimizer:
    """Return the same optimizer as a chain."""
    return mfx.TransformOptimizer(
        params,
        mfx.muon(
            1e-3,
            weight_decay=0.1,
            orthogonalize=mfx.orthogonalize(coefficients="keller"),
            lr_scaling="original",
        ),
    )


def torch_adamw(params: Params) -> torch.optim.Optimizer:
    """Return torch.optim.AdamW in its multi-tensor form."""
    return torch.optim.AdamW(list(params.values()), lr=1e-3, foreach=True)


def our_adamw(params: Params) -> torch.optim.Optimizer:
    """Return the same optimizer as a chain."""
    return mfx.TransformOptimizer(params, mfx.adamw(1e-3))


Make = Callable[[Params], torch.optim.Optimizer]
PAIRS: dict[str, tuple[Make, Make]] = {
    "Muon": (torch_muon, our_muon),
    "AdamW": (torch_adamw, our_adamw),
}


def speed(rounds: int) -> list[dict[str, Any]]:
    """Time one step of our and of torch's optimizers; torch's is timed twice, to show the noise."""
    rows: list[dict[str, Any]] = []
    for case, shapes in {**MANY_SMALL, "4 x 512^2, 2 x 2048x512, 2 x 512x2048": LAYERS}.items():
        for name, (theirs, ours) in PAIRS.items():
            steps = {
                "torch": theirs(make(shapes)).step,
                "muonfx": ours(make(shapes)).step,
                "torch again": theirs(make(shapes)).step,
            }
            rows.append(
                {
                    "case": case,
                    "optimizer": name,
                    **summary(interleaved(steps, rounds=rounds), "torch"),
                }
            )
    return rows


def memory() -> list[dict[str, Any]]:
    """Measure the peak bytes of one step in addition to parameters, gradients and state."""
    rows: list[dict[str, Any]] = []
    for case, shapes in {
        **MANY_SMALL,
        "4 x 512^2, 2 x 2048x512, 2 x 512x2048": LAYERS,
        "2 x 4096x1024": [(4096, 1024)] * 2,
    }.items():
        for name, (theirs, ours) in PAIRS.items():
            row: dict[str, Any] = {
                "case": case,
                "optimizer": name,
                "parameters": sum(4 * r * c for r, c in shapes),
            }
            for who, build in (("torch", theirs), ("muonfx", ours)):
                optimizer = build(make(shapes))
                optimizer.step()  # the first step creates the state
                with PeakBytes() as peak:
                    optimizer.step()
                row[who] = peak.most
            row["largest parameter"] = max(4 * r * c for r, c in shapes)
            rows.append(row)
    return rows
