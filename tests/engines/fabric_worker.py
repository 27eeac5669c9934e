"""One rank of a loop under Lightning's Fabric, which runs every case and writes its results as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import muonfx as mfx
from tests.engines.deepspeed_worker import RATES, SAVED_AFTER, STEPS, batches, loss_of, made
from tests.engines.lightning_worker import CLIP, halving, in_one_process
from tests.engines.processes import Rank, same, serve, values_of, worst

CASES: dict[str, dict[str, Any]] = {
    "one process": {},
    "ddp": {"strategy": DDPStrategy},
    "ddp, replicated": {"strategy": DDPStrategy, "layout": mfx.sharding.replicated},
    "fsdp2": {"strategy": ModelParallelStrategy},
}


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard a model as users of ModelParallelStrategy do."""
    for layer in model.children():
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def strategy_of(case: dict[str, Any], here: Rank) -> Any:
    """Return the strategy object of a case."""
    if "strategy" not in case:
        return "auto"
    if case["strategy"] is DDPStrategy:
        return DDPStrategy(process_group_backend="gloo")
    return ModelParallelStrategy(
        sharded, data_parallel_size=here.size, tensor_parallel_size=1, process_group_backend="gloo"
    )


def trained(case: dict[str, Any], here: Rank, saved: Path, *, resume: bool) -> dict[str, Tensor]:
    """Run the loop of the page, from its beginning or from the checkpoint, and return the parameters."""
    fabric = L.Fabric(accelerator="cpu", devices=here.size, strategy=strategy_of(case, here))
    fabric.launch()
    net = made({})
    options = {
        **RATES,
        "orthogonalize": mfx.orthogonalize(dtype=torch.float32),
        "layout": case.get("layout"),
    }
    if case.get("strategy") is ModelParallelStrategy:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(mfx.Muon(model, **options))
    else:
        model, optimizer = fabric.setup(net, mfx.Muon(net, **options))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halving)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": 0,
    }
    if resume:
        fabric.load(saved, state)
        # ModelParallelStrategy returns the state and does not load it.
        if isinstance(state["scheduler"], dict):
            scheduler.load_state_dict(state["scheduler"])
    parts = [words.chunk(here.size)[here.rank] for words in batches()]
    for step in range(state["step"], STEPS):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, parts[step]))
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        scheduler.step()
        if step + 1 == SAVED_AFTER and not resume:
            fabric.save(saved, {**state, "step": SAVED_AFTER})
    values = values_of(model)
    return {
        name.replace("_forward_module.", "").removeprefix("module."): value
        for name, value in values.items()
    }


def carried_out(name: str, case: dict[str, Any], here: Rank) -> dict[str, Any]:
    """Return the distance from one process, and whether the resumed run has the same bits."""
    saved = here.folder / f"{name.replace(' ', '_').replace(',', '')}.ckpt"
    whole = trained(case, here, saved, resume=False)
    again = trained(case, here, saved, resume=True)
    return {"worst": worst(whole, in_one_process()), "resumed": same(again, whole)}


if __name__ == "__main__":
    serve(CASES, carried_out)
