"""Time of an iteration of DeepSpeed with our client optimizer, with DeepSpeed's own Muon, and with its AdamW.

The model is a small GPT on gloo with one thread per process, under ZeRO stages 1, 2 and 3, in float32 and in bf16 with
fp32 copies. All three candidates have the same engine, configuration, model and micro-batches. Both Muons are the same
optimizer: five steps of `keller` in bf16, AdamW for other parameters, no clipping. The time covers a whole iteration,
because DeepSpeed's Muon orthogonalizes in ``backward`` at stages 1 and 2.

Each candidate runs in separate processes. A round starts each candidate once and takes the median of several
iterations; the time of an iteration is that of the slowest rank.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import sharding_peers as peers
from benchmarks import world
from benchmarks.measure import summary
from benchmarks.peers import versioned
from benchmarks.sharding import ITERATIONS, Size, chain, distance, make, tokens, trained
from muonfx.engines import deepspeed as ours

STAGES, DTYPES = (1, 2, 3), ("float32", "bfloat16")
SIZE = Size(width=256, blocks=4, vocabulary=512, tokens=32)
BASELINE, OURS, ADAMW = "DeepSpeed's Muon", "muonfx", "DeepSpeed's AdamW"


def client(model: nn.Module) -> torch.optim.Optimizer:
    """Return our optimizer as users create it."""
    return ours.optimizer(model, chain(model))


CANDIDATES = {BASELINE: peers.DEEPSPEED_MUON, OURS: client, ADAMW: peers.DEEPSPEED_ADAMW}


def measure(
    candidate: str, size: Size, cases: list[tuple[int, str]], iterations: int
) -> list[tuple[float, Any]]:
    """Return the seconds per iteration and the float32 error of the parameters of each case; a collective."""
    found: list[tuple[float, Any]] = []
    start, wanted = trained(size, dist.get_world_size())
    for stage, dtype in cases:
        model, batch, bf16 = make(size), tokens(size, dist.get_rank()), dtype == "bfloat16"
        iterate, whole = peers.deepspeed(
            model, batch, stage, optimizer=CANDIDATES[candidate], bf16=bf16
        )
        for _ in range(ITERATIONS):
            iterate()
        apart = (
            None
            if bf16 or candidate == ADAMW
            else distance(whole(), wanted) / distance(start, wanted)
        )
        times = world.interleaved({candidate: iterate}, rounds=iterations)
        found.append((statistics.median(times[candidate]), apart))
    return found


def speed(
    rounds: int,
    *,
    processes: int = 2,
    size: Size = SIZE,
    stages: tuple[int, ...] = STAGES,
    dtypes: tuple[str, ...] = DTYPES,
    iterations: int = 8,
) -> list[dict[str, Any]]:
    """Return milliseconds for each stage, dtype and candidate; empty if DeepSpeed cannot run."""
    if not peers.deepspeed_runs():
        return []
    cases = [(stage, dtype) for dtype in dtypes for stage in stages]
    found: dict[str, list[list[tuple[float, Any]]]] = {candidate: [] for candidate in CANDIDATES}
    for _ in range(rounds):
        for candidate, turns in found.items():
            turns.append(world.run(processes, measure, candidate, size, cases, iterations))
    rows: list[dict[str, Any]] = []
    for place, (stage, dtype) in enumerate(cases):
        times = {name: [turn[place][0] for turn in turns] for name, turns in found.items()}
        for name, values in summary(times, BASELINE).items():
            about = {
                "case": f"ZeRO-{stage}",
                "dtype": dtype,
                "processes": processes,
                "candidate": name,
            }
            package = versioned("muonfx" if name == OURS else "deepspeed")
            rows.append({**about, "package": package, "apart": found[name][0][place][1], **values})
    return rows
