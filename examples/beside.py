"""The same run in one process, beside one that is shared out: its losses, and what each process keeps."""

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
"""How many steps are done in one process too."""
ROWS = 10


class Beside:
    """The losses of the first steps in one process: the first of those there are does them alone, before all begin.

    Args:
        config: of the run.
        corpus: what it is trained on.
        tx: the optimizer, not sharded.
        path: the checkpoint from which the run goes on, if it does. One process reads what any number has written.
        shard: the way in which the run is shared out; None: it is not, and there is nothing to compare.
    """

    def __init__(self, config: Config, corpus: Corpus, tx: mfx.Transform, path: Path | None, shard: str | None) -> None:
        self.shard = shard
        self.begin = len(read_metrics(path)["train_losses"]) if path else 0
        self.losses: list[float] = []
        if shard is not None:
            said = [self._losses(config, corpus, tx, path) if rank() == 0 else []]
            dist.broadcast_object_list(said)  # for which the others wait
            self.losses = said[0]

    def _losses(self, config: Config, corpus: Corpus, tx: mfx.Transform, path: Path | None) -> list[float]:
        steps = range(self.begin, min(config.steps, self.begin + STEPS))
        model = GPT(width=config.width, depth=config.depth, context=config.context, seed=config.seed)
        way = OneProcess(model, DTYPES[config.dtype])
        params, state = way.params, tx.init(way.params)
        if path is not None:
            fill(path, tx, params, state)
        losses: list[float] = []
        for step in tqdm(steps, desc="one process", unit="step", dynamic_ncols=True, leave=False):
            batch = corpus.batch(config.seed, step, config.batch, config.context)
            grads, loss = way.grads(params, *batch)
            updates, state = tx.update(grads, state, params, donate=True)
            params = mfx.apply_updates(params, updates, donate=True)
            losses.append(loss)
        return losses

    def show(self, losses: list[float]) -> None:
        """Print both, of some of the steps, and the largest difference of all."""
        both = list(zip(losses[self.begin :], self.losses, strict=False))
        if not both or rank() > 0:
            return
        name = f"{self.shard}, {size()} processes"
        print(f"\n{'step':>6}{name:>22}{'one process':>16}{'difference':>14}")
        for place in sorted({round(row * (len(both) - 1) / (ROWS - 1)) for row in range(ROWS)}):
            here, alone = both[place]
            print(f"{self.begin + place + 1:>6}{here:>22.6f}{alone:>16.6f}{here - alone:>14.1e}")
        most = max(abs(here - alone) for here, alone in both)
        print(f"the largest difference in {len(both)} steps is {most:.1e}", flush=True)

    def metrics(self) -> dict[str, Any]:
        """For the JSON file."""
        if self.shard is None:
            return {}
        return {"shard": self.shard, "processes": size(), "one_process": {"begin": self.begin, "losses": self.losses}}


def describe(way: OneProcess, tx: mfx.Transform, state: Any, picture: Path) -> None:
    """Print what this process keeps, who computes the matrices, and what is sent for them; and draw who computes."""
    layout = way.layout
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
        f"  parameters, between steps  {kib(weights)} of {kib(all_weights)}\n"
        f"  the optimizer's state      {kib(states)} of {kib(all_states)}\n"
        f"  matrices to compute        {own} of {len(owners)}; the longest list costs {plan.balance:.2f} of the mean\n"
        f"  sent for that in a step    {kib(plan.sent[0])}\n"
        f"  who computes what          {picture}\n",
        flush=True,
    )
    plot_owners(plan, picture)


def nbytes(leaf: Any) -> int:
    """Bytes of a tensor; of a DTensor, those that are here."""
    if not isinstance(leaf, torch.Tensor):
        return 0
    return getattr(leaf, "_local_tensor", leaf).nbytes


def kib(count: int) -> str:
    """Bytes, to be read."""
    return f"{count / 1024:,.1f} KiB"
