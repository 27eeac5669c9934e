"""Processor time of a step of 10, 100 and 1,000 leaves of 8 x 8, on one thread.

The leaves are so small that Python and the dispatch of operators take nearly all the time. Gradients are the same at
every step. Updates of functional transforms are added to the parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import muonfx as mfx
from benchmarks.measure import summary

AIMS: dict[str, tuple[float, ...]] = {
    "mfx.Muon": (0.6, 2.5, 20),
    "adamw as an optimizer": (0.3, 1.5, 19),
    "adamw, functional": (0.3, 2, 20),
    "muon, functional": (0.6, 3, 25),
    "normuon, functional": (1, 4, 35),
}
"""Milliseconds that version 0.2 aimed at for each number of leaves."""
COUNTS = (10, 100, 1000)


def candidates(count: int) -> dict[str, Callable[[], object]]:
    """Return steps of torch's and our optimizers, each on its own parameters."""
    fp32 = mfx.orthogonalize(dtype=torch.float32)

    def parameters() -> dict[str, Parameter]:
        made = {f"{index}.weight": Parameter(torch.randn(8, 8)) for index in range(count)}
        for param in made.values():
            param.grad = torch.randn(8, 8)
        return made

    def functional(tx: mfx.Transform) -> Callable[[], None]:
        named = parameters()
        params: dict[str, Tensor] = {name: param.detach() for name, param in named.items()}
        grads = {name: param.grad for name, param in named.items()}
        state = tx.init(params)

        def step() -> None:
            nonlocal state
            updates, state = tx.update(grads, state, params)
            torch._foreach_add_(list(params.values()), list(updates.values()))

        return step

    plain = parameters()
    return {
        "torch AdamW, foreach": torch.optim.AdamW(list(parameters().values()), foreach=True).step,
        "torch Muon": torch.optim.Muon(list(parameters().values())).step,
        "mfx.Muon": mfx.Muon(plain, labels=dict.fromkeys(plain, "muon"), orthogonalize=fp32).step,
        "adamw as an optimizer": mfx.TransformOptimizer(parameters(), mfx.adamw(1e-3)).step,
        "adamw, functional": functional(mfx.adamw(1e-3)),
        "muon, functional": functional(mfx.muon(1e-3, orthogonalize=fp32)),
        "normuon, functional": functional(mfx.normuon(1e-3, orthogonalize=fp32)),
    }


def speed(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each number of leaves and candidate; each round runs every candidate once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for count in COUNTS for row in _rows(count, rounds)]
    finally:
        torch.set_num_threads(threads)


def _rows(count: int, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    calls = candidates(count)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            if turn >= 3:
                times[name].append(time.thread_time() - start)
    found = summary(times, "torch AdamW, foreach")
    return [{"leaves": count, "candidate": name, **found[name]} for name in calls]
