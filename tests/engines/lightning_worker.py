"""One rank of a run under Lightning, which runs every case and writes its results as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import muonfx as mfx
from tests.engines.deepspeed_worker import RATES, SAVED_AFTER, STEPS, batches, loss_of, made
from tests.engines.processes import Rank, same, serve, trained_alone, values_of, worst

CLIP = 0.05

CASES: dict[str, dict[str, Any]] = {
    "one process": {},
    "ddp": {"strategy": DDPStrategy},
    "ddp, replicated": {"strategy": DDPStrategy, "layout": mfx.sharding.replicated},
    "fsdp2": {"strategy": ModelParallelStrategy},
    "fsdp2, one file": {
        "strategy": ModelParallelStrategy,
        "options": {"save_distributed_checkpoint": False},
    },
    "ddp to fsdp2": {"strategy": DDPStrategy, "next": "fsdp2"},
    "fsdp2, one file, to ddp": {
        "strategy": ModelParallelStrategy,
        "options": {"save_distributed_checkpoint": False},
        "next": "ddp",
    },
    "ddp to one rank": {"saved": "ddp"},
    "fsdp2 to one rank": {"strategy": ModelParallelStrategy, "saved": "fsdp2"},
    "fsdp2, one file, to one rank": {"saved": "fsdp2, one file"},
}
RANKS_2 = "lightning_2"
"""The folder of the run on two ranks. One rank, whose folder is next to it, resumes the cases named in "saved"."""


def halving(step: int) -> float:
    return 0.5**step


class Batches:
    """This rank's part of all batches, resumable within an epoch, as Lightning requires."""

    def __init__(self, here: Rank) -> None:
        self.words = [words.chunk(here.size)[here.rank] for words in batches()]
        self.given = 0

    def __len__(self) -> int:
        return len(self.words)

    def __iter__(self) -> Iterator[Tensor]:
        while self.given < len(self.words):
            self.given += 1
            yield self.words[self.given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.given = state_dict["given"]


class Task(L.LightningModule):
    """A LightningModule as users write it."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.case = made({}), case

    def configure_model(self) -> None:
        if self.case.get("strategy") is ModelParallelStrategy:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net.children():
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = mfx.Muon(
            self,
            **RATES,
            orthogonalize=mfx.orthogonalize(dtype=torch.float32),
            layout=self.case.get("layout"),
        )
        for group in optimizer.param_groups:
            group["name"] = group["label"]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halving)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def training_step(self, words: Tensor) -> Tensor:
        return loss_of(self.net, words)


def trained(
    case: dict[str, Any], here: Rank, folder: Path, ckpt_path: str | None = None
) -> tuple[Task, dict[str, Any]]:
    strategy = "auto"
    if "strategy" in case:
        sizes = {"data_parallel_size": here.size, "tensor_parallel_size": 1}
        options = (sizes if case["strategy"] is ModelParallelStrategy else {}) | case.get(
            "options", {}
        )
        strategy = case["strategy"](process_group_backend="gloo", **options)
    monitor = LearningRateMonitor(logging_interval="step", log_momentum=True, log_weight_decay=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=here.size,
        strategy=strategy,
        max_steps=STEPS,
        gradient_clip_val=CLIP,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[monitor, ModelCheckpoint(folder, "saved", every_n_train_steps=SAVED_AFTER)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    task = Task(case)
    trainer.fit(task, Batches(here), ckpt_path=ckpt_path)
    return task, {**monitor.lrs, **monitor.last_momentum_values, **monitor.last_weight_decay_values}


def in_one_process() -> dict[str, Tensor]:
    model = made({})
    optimizer = mfx.Muon(model, **RATES, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halving)
    return trained_alone(model, optimizer, scheduler, batches(), loss_of, CLIP)


def write_with_names(path: Path, named_path: Path) -> None:
    """Write a checkpoint of one process or DDP with names of parameters in place of their numbers."""
    checkpoint = torch.load(path, weights_only=False)
    for optimizer_state in checkpoint["optimizer_states"]:
        name_of: dict[int, str] = {}
        for group in optimizer_state["param_groups"]:
            name_of.update(zip(group["params"], group["param_names"], strict=True))
            group["params"] = group["param_names"]
        optimizer_state["state"] = {
            name_of[number]: state for number, state in optimizer_state["state"].items()
        }
    torch.save(checkpoint, named_path)


def folder_of(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


def carried_out(name: str, case: dict[str, Any], here: Rank) -> dict[str, Any]:
    folder = here.folder / folder_of(name)
    if "saved" in case:
        saved = here.folder.parent / RANKS_2 / folder_of(case["saved"]) / "saved.ckpt"
        again, logged_again = trained(case, here, folder, str(saved))
        return {
            "worst again": worst(values_of(again.net), in_one_process()),
            "logged again": logged_again,
        }
    whole, logged = trained(case, here, folder)
    saved = folder / "saved.ckpt"
    next_case = case
    if "next" in case:
        next_case = CASES[case["next"]]
    if name == "ddp to fsdp2":
        if here.rank == 0:
            write_with_names(saved, folder / "named.ckpt")
        torch.distributed.barrier()
        saved = folder / "named.ckpt"
    again, logged_again = trained(next_case, here, folder / "again", str(saved))
    return {
        "worst": worst(values_of(whole.net), in_one_process()),
        "worst again": worst(values_of(again.net), in_one_process()),
        "resumed": same(values_of(again.net), values_of(whole.net)),
        "logged": logged,
        "logged again": logged_again,
    }


if __name__ == "__main__":
    serve(CASES, carried_out)
