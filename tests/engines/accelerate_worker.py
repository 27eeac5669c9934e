"""One rank of a training loop under accelerate, which runs each case and writes its results as JSON.

The loop follows accelerate's documentation: prepare, backward, clip, step, save_state, and load_state into new objects.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from tests.engines.deepspeed_worker import RATES, SAVED_AFTER, batches, loss_of, made
from tests.engines.processes import Rank, same, serve, trained_alone, values_of, worst

CLIPPED_AT = 0.05
FALLS_FOR = 20
"""Steps of the scheduler; accelerate takes one step per process at a time."""
CASES: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DDP, model first": {"first": True},
    "DDP, matrices shared out": {"shared out": True},
    "FSDP2": {"files": "SHARDED_STATE_DICT"},
    "FSDP2, whole files": {"files": "FULL_STATE_DICT"},
    "FSDP2, activation checkpointing": {"files": "SHARDED_STATE_DICT", "checkpointed": True},
    "FSDP2, model first": {"files": "SHARDED_STATE_DICT", "first": True},
}


def schedule(optimizer: torch.optim.Optimizer, times: int = 1) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - times * step / FALLS_FOR)


class Run:
    """A model, its optimizer and its scheduler, prepared by a new Accelerator."""

    def __init__(self, case: dict[str, Any], here: Rank) -> None:
        import accelerate
        from accelerate.state import AcceleratorState
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp_utils

        import muonfx as mfx

        os.environ.pop("ACCELERATE_USE_FSDP", None)  # set by an earlier Accelerator
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = None
        if "files" in case:
            # accelerate accepts FSDP only on several accelerators; this attribute is used nowhere else
            accelerate.PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                state_dict_type=case["files"],
                auto_wrap_policy="size_based_wrap",
                min_num_params=50,
                activation_checkpointing=case.get("checkpointed", False),
            )
        self.accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
        model: Any = made({})
        if case.get("first"):
            model = (
                fsdp_utils.fsdp2_prepare_model(self.accelerator, model)
                if plugin
                else self.accelerator.prepare(model)
            )
        layout = mfx.sharding.replicated if case.get("shared out") else None
        optimizer = mfx.Muon(
            model, **RATES, orthogonalize=mfx.orthogonalize(dtype=torch.float32), layout=layout
        )
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, schedule(optimizer)
        )
        self.here = here

    def train(self, words: list[Tensor]) -> None:
        for batch in words:
            self.optimizer.zero_grad()
            self.accelerator.backward(
                loss_of(self.model, batch.chunk(self.here.size)[self.here.rank])
            )
            self.accelerator.clip_grad_norm_(self.model.parameters(), CLIPPED_AT)
            self.optimizer.step()
            self.scheduler.step()

    def params(self) -> dict[str, Tensor]:
        values = values_of(self.accelerator.unwrap_model(self.model))
        return {
            name.replace("_checkpoint_wrapped_module.", ""): value for name, value in values.items()
        }


def in_one_process(size: int) -> dict[str, Tensor]:
    import muonfx as mfx

    model = made({})
    optimizer = mfx.Muon(model, **RATES, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
    return trained_alone(
        model, optimizer, schedule(optimizer, size), batches(), loss_of, CLIPPED_AT
    )


def carried_out(name: str, case: dict[str, Any], here: Rank) -> dict[str, Any]:
    folder = here.folder / name.replace(" ", "_").replace(",", "")
    run = Run(case, here)
    run.train(batches()[:SAVED_AFTER])
    run.accelerator.save_state(str(folder))
    again = Run(case, here)
    again.accelerator.load_state(str(folder))
    for one in (run, again):
        one.train(batches()[SAVED_AFTER:])
    return {
        "worst": worst(run.params(), in_one_process(here.size)),
        "resumed": same(run.params(), again.params()),
        "strategy": run.accelerator.distributed_type.value,
        "groups": [[group["label"], group["lr"]] for group in again.optimizer.param_groups],
    }


if __name__ == "__main__":
    serve(CASES, carried_out)
