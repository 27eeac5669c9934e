"""One rank of a loop under the real accelerate: every case in turn, and what came of it as JSON.

Called by `test_accelerate.py` as a process of its own. The loop is the one of accelerate's own documentation: prepare,
backward, clip, step, and save_state and load_state into new objects.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from tests.engines.deepspeed_worker import RATES, SAVED_AFTER, batches, loss_of, made
from tests.engines.processes import Rank, same, serve, values_of, worst

CLIPPED_AT = 0.05
FALLS_FOR = 20
"""Steps of the scheduler; accelerate takes as many at a time as there are processes."""
CASES: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DDP, model first": {"first": True},
    "DDP, matrices shared out": {"shared out": True},
    "FSDP2": {"files": "SHARDED_STATE_DICT"},
    "FSDP2, whole files": {"files": "FULL_STATE_DICT"},
    "FSDP2, model first": {"files": "SHARDED_STATE_DICT", "first": True},
}


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule that falls to zero."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / FALLS_FOR)


class Run:
    """A model, its optimizer and its scheduler, prepared by an Accelerator of their own."""

    def __init__(self, case: dict[str, Any], here: Rank) -> None:
        import accelerate
        from accelerate.state import AcceleratorState
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp_utils

        import muonfx as mfx

        os.environ.pop("ACCELERATE_USE_FSDP", None)  # an earlier Accelerator has set it
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = None
        if "files" in case:
            # accelerate has FSDP for several accelerators, and makes no other use of this word
            accelerate.PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, state_dict_type=case["files"], auto_wrap_policy="size_based_wrap", min_num_params=50
            )
        self.accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
        model: Any = made({})
        if case.get("first"):
            model = (
                fsdp_utils.fsdp2_prepare_model(self.accelerator, model) if plugin else self.accelerator.prepare(model)
            )
        layout = mfx.sharding.replicated if case.get("shared out") else None
        optimizer = mfx.Muon(model, **RATES, orthogonalize=mfx.orthogonalize(dtype=torch.float32), layout=layout)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, schedule(optimizer))
        self.here = here

    def step(self, words: Tensor) -> None:
        """One step on this rank's part of a batch."""
        self.optimizer.zero_grad()
        self.accelerator.backward(loss_of(self.model, words.chunk(self.here.size)[self.here.rank]))
        self.accelerator.clip_grad_norm_(self.model.parameters(), CLIPPED_AT)
        self.optimizer.step()
        self.scheduler.step()

    def params(self) -> dict[str, Tensor]:
        """The whole parameters."""
        return values_of(self.accelerator.unwrap_model(self.model))


class Alone:
    """The same without accelerate, in one process."""

    def __init__(self, size: int) -> None:
        import muonfx as mfx

        self.model, self.size = made({}), size
        self.optimizer = mfx.Muon(self.model, **RATES, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
        self.scheduler = schedule(self.optimizer)

    def step(self, words: Tensor) -> None:
        """One step on a batch."""
        self.optimizer.zero_grad()
        loss_of(self.model, words).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIPPED_AT)
        self.optimizer.step()
        for _ in range(self.size):
            self.scheduler.step()

    def params(self) -> dict[str, Tensor]:
        """The parameters."""
        return values_of(self.model)


def carried_out(name: str, case: dict[str, Any], here: Rank) -> dict[str, Any]:
    """A case: from the beginning to the end, again from a checkpoint with new objects, and to one process and back."""
    folder = here.folder / name.replace(" ", "_").replace(",", "")
    words = batches()
    run, alone = Run(case, here), Alone(here.size)
    continued(run, words[:SAVED_AFTER])
    continued(alone, words[:SAVED_AFTER])
    run.accelerator.save_state(str(folder))
    again, back = Run(case, here), Run(case, here)
    again.accelerator.load_state(str(folder))
    give(alone, back)
    whole, wanted = continued(run, words[SAVED_AFTER:]), continued(alone, words[SAVED_AFTER:])
    found = {
        "worst": worst(whole, wanted),
        "resumed": same(whole, continued(again, words[SAVED_AFTER:])),
        "from one process": worst(continued(back, words[SAVED_AFTER:]), wanted),
        "strategy": run.accelerator.distributed_type.value,
        "groups": [[group["label"], group["lr"]] for group in again.optimizer.param_groups],
    }
    if case.get("files") != "SHARDED_STATE_DICT":
        found["to one process"] = worst(continued(taken_from(folder, here.size), words[SAVED_AFTER:]), wanted)
    return found


def continued(run: Run | Alone, words: list[Tensor]) -> dict[str, Tensor]:
    """The parameters after some steps."""
    for batch in words:
        run.step(batch)
    return run.params()


def taken_from(folder: Path, size: int) -> Alone:
    """One process that loads the files that accelerate wrote for all ranks."""
    from safetensors.torch import load_file

    alone = Alone(size)
    state: dict[str, Any] = torch.load(folder / "optimizer.bin", weights_only=True)
    alone.scheduler.load_state_dict(torch.load(folder / "scheduler.bin", weights_only=False))
    if (folder / "model.safetensors").exists():
        saved = load_file(folder / "model.safetensors")
        alone.model.load_state_dict({name.removeprefix("module."): value for name, value in saved.items()})
        alone.optimizer.load_state_dict(state)
    else:
        alone.model.load_state_dict(torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True))
        set_optimizer_state_dict(alone.model, alone.optimizer, state)
    return alone


def give(alone: Alone, run: Run) -> None:
    """Load what one process has into a prepared model and its optimizer."""
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(run.accelerator.unwrap_model(run.model), alone.model.state_dict(), options=options)
    run.optimizer.load_state_dict(alone.optimizer.state_dict())
    run.scheduler.load_state_dict(alone.scheduler.state_dict())


def main() -> None:
    """Be one rank."""
    serve(CASES, carried_out)


if __name__ == "__main__":
    main()
