"""A sharded run compared with the same run in one process: their losses, and the memory of each process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT
from options import DTYPES, Config
from plots import plot_owners
from processes import rank, size
from runs import fill, read_metrics
from sharded import OneProcess
from text import Corpus
from tqdm import tqdm

import muonfx as mfx
from muonfx import sharding

STEPS = 40
"""Number of steps that are also run in one process."""
ROWS = 10
"""Rows of the printed table."""


class Reference:
    """The losses of the first steps in one process. Rank 0 computes them before the sharded run begins.

    Args:
        config: configuration of the run.
        corpus: the training text.
        tx: the optimizer, not sharded.
        path: the checkpoint from which the run is resumed, or None. Any number of processes may have written it.
        shard: the sharding strategy of the run. If it is None, there is nothing to compare.
    """

    def __init__(self, config: Config, corpus: Corpus, tx: mfx.Transform, path: Path | None, shard: str | None) -> None:
        self.shard = shard
        self.begin = len(read_metrics(path)["train_losses"]) if path else 0
        self.losses: list[float] = []
        if shard is not None:
            losses = [self._losses(config, corpus, tx, path) if rank() == 0 else []]
            dist.broadcast_object_list(losses)  # the other ranks wait here
            self.losses = losses[0]

    def _losses(self, config: Config, corpus: Corpus, tx: mfx.Transform, path: Path | None) -> list[float]:
        steps = range(self.begin, min(config.steps, self.begin + STEPS))
        model = GPT(width=config.width, depth=config.depth, context=config.context, seed=config.seed)
        strategy = OneProcess(model, DTYPES[config.dtype])
        params, state = strategy.params, tx.init(strategy.params)
        if path is not None:
            fill(path, tx, params, state)
        losses: list[float] = []
        for step in tqdm(steps, desc="one process", unit="step", dynamic_ncols=True, leave=False):
            batch = corpus.batch(config.seed, step, config.batch, config.context)
            grads, loss = strategy.grads(params, *batch)
            updates, state = tx.update(grads, state, params, donate=True)
            params = mfx.apply_updates(params, updates, donate=True)
            losses.append(loss)
        return losses

    def show(self, losses: list[float]) -> None:
        """Print both losses of some steps, and the largest difference of all steps."""
        both = list(zip(losses[self.begin :], self.losses, strict=False))
        if not both or rank() > 0:
            return
        name = f"{self.shard}, {size()} processes"
        print(f"\n{'step':>6}{name:>22}{'one process':>16}{'difference':>14}")
        for place in sorted({round(row * (len(both) - 1) / (ROWS - 1)) for row in range(ROWS)}):
            sharded, single = both[place]
            print(f"{self.begin + place + 1:>6}{sharded:>22.6f}{single:>16.6f}{sharded - single:>14.1e}")
        most = max(abs(sharded - single) for sharded, single in both)
        print(f"the largest difference in {len(both)} steps is {most:.1e}", flush=True)

    def metrics(self) -> dict[str, Any]:
        """Return the entries for metrics.json."""
        if self.shard is None:
            return {}
        return {"shard": self.shard, "processes": size(), "one_process": {"begin": self.begin, "losses": self.losses}}


def describe(strategy: OneProcess, tx: mfx.Transform, state: Any, picture: Path) -> None:
    """Print the memory, the matrices and the communication of this process, and draw the owners of the matrices."""
    layout = strategy.layout
    if layout is None or rank() > 0:
        return
    plan = sharding.plan_for(tx, layout)
    owners = [owner for owners in plan.owners().values() for owner in owners]
    own = sum(owner in (0, None) for owner in owners)
    weights, all_weights = layout.nbytes(), sum(map(nbytes, layout.meta().values()))
    states = sum(map(nbytes, mfx.tree.leaves(state)))
    all_states = mfx.spec(tx.arguments["tx"], layout.meta()).nbytes
    print(
        f"{layout}; this process, one of {size()}:\n"
        f"  parameters between steps   {kib(weights)} of {kib(all_weights)}\n"
        f"  optimizer state            {kib(states)} of {kib(all_states)}\n"
        f"  orthogonalized matrices    {own} of {len(owners)}; largest cost per rank / mean: {plan.balance:.2f}\n"
        f"  sent in a step for these   {kib(plan.sent[0])}\n"
        f"  owners of the matrices     {picture}\n",
        flush=True,
    )
    plot_owners(plan, picture)


def nbytes(leaf: Any) -> int:
    """Return the bytes of a tensor, or of this rank's shard of a DTensor; 0 for anything else."""
    if not isinstance(leaf, torch.Tensor):
        return 0
    return getattr(leaf, "_local_tensor", leaf).nbytes


def kib(count: int) -> str:
    """Format a number of bytes in KiB."""
    return f"{count / 1024:,.1f} KiB"
