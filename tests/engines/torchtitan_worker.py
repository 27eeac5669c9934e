"""One rank of a run with torchtitan's optimizers container, schedulers and checkpoints, with its results as JSON."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer

import muonfx as mfx
from muonfx.engines import torchtitan as ours
from tests.engines.deepspeed_worker import RATES, SAVED_AFTER, STEPS, WORDS, batches, loss_of
from tests.engines.processes import Rank, same, serve, trained_alone, values_of, worst

CLIP = 0.05
SCHEDULE = {"warmup_steps": 2, "decay_ratio": 0.6, "decay_type": "linear"}


def layers() -> OrderedDict[str, nn.Module]:
    """Return the same layers in every process, with dims that are not divisible by any number of ranks."""
    torch.manual_seed(0)
    found: OrderedDict[str, nn.Module] = OrderedDict(
        tok_embeddings=nn.Embedding(WORDS, 7),
        up=nn.Linear(7, 23),
        down=nn.Sequential(nn.ReLU(), nn.Linear(23, 7, bias=False)),
        norm=nn.RMSNorm(7),
        lm_head=nn.Linear(7, WORDS),
    )
    found["norm"].requires_grad_(requires_grad=False)
    return found


class Run:
    """Model parts of a pipeline, run in sequence, wrapped and sharded over the ranks."""

    def __init__(self, here: Rank, folder: Path, *, recompute: bool) -> None:
        whole = layers()
        if recompute:
            whole["up"] = checkpoint_wrapper(whole["up"])  # adds a level to parameter names
        mesh = init_device_mesh("cpu", (here.size,))
        for layer in whole.values():
            fully_shard(layer, mesh=mesh)
        split = list(whole.items())
        self.parts = [nn.Sequential(OrderedDict(part)) for part in (split[:2], split[2:])]
        self.model = nn.Sequential(*self.parts)
        self.optimizers = ours.muon(
            **RATES, orthogonalize=mfx.orthogonalize(dtype=torch.float32)
        ).build(model_parts=self.parts)
        self.schedulers = LRSchedulersContainer.Config(**SCHEDULE).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.checkpoints = CheckpointManager.Config(enable=True, interval=SAVED_AFTER).build(
            dataloader=None,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
            base_folder=str(folder),
        )
        self.here = here

    def train(self, words: Iterable[Tensor]) -> None:
        part = (batch.chunk(self.here.size)[self.here.rank] for batch in words)
        trained_alone(self.model, self.optimizers, self.schedulers, part, loss_of, CLIP)

    def params(self) -> dict[str, Tensor]:
        found = {name: value for part in self.parts for name, value in values_of(part).items()}
        return {
            name.replace("._checkpoint_wrapped_module", ""): value for name, value in found.items()
        }


def in_one_process() -> dict[str, Tensor]:
    model = nn.Sequential(layers())
    optimizer = mfx.Muon(model, **RATES, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
    schedulers = LRSchedulersContainer.Config(**SCHEDULE).build(
        optimizers=[optimizer], training_steps=STEPS
    )
    return trained_alone(model, optimizer, schedulers, batches(), loss_of, CLIP)


def carried_out(_name: str, _case: Any, here: Rank) -> dict[str, Any]:
    words = batches()
    run = Run(here, here.folder, recompute=True)
    logged = [run.schedulers.get_metrics()]
    run.train(words[:SAVED_AFTER])
    run.checkpoints.save(SAVED_AFTER)
    run.train(words[SAVED_AFTER:])
    resumed: list[bool] = []
    for recompute in (True, False):
        again = Run(here, here.folder, recompute=recompute)
        again.checkpoints.load(SAVED_AFTER)
        logged.append(again.schedulers.get_metrics())
        again.train(words[SAVED_AFTER:])
        resumed.append(same(again.params(), run.params()))
    return {
        "worst": worst(run.params(), in_one_process()),
        "resumed": resumed,
        "logged": logged,
        "up": sorted(
            key for key in run.optimizers.state_dict() if key.startswith("state.up.weight")
        ),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    serve({"container": None}, carried_out)
