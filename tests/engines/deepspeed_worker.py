"""One rank of a run under the real DeepSpeed: every case in turn, and what came of it as JSON.

Called by `test_deepspeed.py` as a process of its own: importing DeepSpeed takes seconds and changes the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engines.processes import Rank, same, serve, worst

STEPS, SAVED_AFTER = 5, 3
BATCH, WORDS = 12, 11
RATES = {"lr": 0.02, "adamw_lr": 0.003}


class Net(nn.Module):
    """Sides that no number of ranks divides, and a matrix that crosses every boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, 7)
        self.up = nn.Linear(7, 23)
        self.down = nn.Linear(23, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Logits."""
        h = self.emb(words)
        return self.head(self.norm(h + self.down(torch.relu(self.up(h)))))


ZERO: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "reduce_scatter": True},
    "stage 2, all-reduce": {"stage": 2, "reduce_scatter": False},
    "stage 2, small buckets": {"stage": 2, "reduce_bucket_size": 50, "allgather_bucket_size": 50},
    "stage 2, offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "stage 3, persistent": {"stage": 3},
    "stage 3, sub-groups": {"stage": 3, "sub_group_size": 20, "stage3_param_persistence_threshold": 0},
    "stage 3, offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "stage 3, zero.Init": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
CASES: dict[str, dict[str, Any]] = {name: {"zero": zero} for name, zero in ZERO.items()} | {
    "bf16, stage 1": {"zero": ZERO["stage 1"], "bf16": {"enabled": True}},
    "bf16, stage 2": {"zero": ZERO["stage 2"], "bf16": {"enabled": True}},
    "bf16, stage 3": {"zero": ZERO["stage 3"], "bf16": {"enabled": True}},
    "accumulation, stage 2": {"zero": ZERO["stage 2"], "accumulate": 2},
    "accumulation, stage 3": {"zero": ZERO["stage 3"], "accumulate": 2},
    "frozen, stage 2": {"zero": ZERO["stage 2"], "frozen": True},
    "frozen, stage 3": {"zero": ZERO["stage 3"], "frozen": True},
    "normuon, stage 2": {"zero": ZERO["stage 2"], "normuon": True},
    "from a file, stage 2": {"zero": ZERO["stage 2"], "bf16": {"enabled": True}},
    "clipping, stage 1": {"zero": ZERO["stage 1"], "clip": 0.05},
}
REFUSED = {"round robin": {"zero": {"stage": 2, "round_robin_gradients": True}}}


def made(case: dict[str, Any]) -> nn.Module:
    """The model of a case, the same in every process."""
    torch.manual_seed(0)
    model = Net()
    if case.get("frozen"):
        model.emb.weight.requires_grad_(requires_grad=False)
    return model


def transform_for(model: nn.Module, case: dict[str, Any]) -> Any:
    """The transform of a case; in fp32, as rounding to bf16 makes much of a sum in another order."""
    import muonfx as mfx

    labels = mfx.default_labels(model)
    if case.get("normuon"):
        matrices = mfx.normuon(RATES["lr"], weight_decay=0.1, dtype=torch.float32)
        return mfx.partition({"muon": matrices, "adamw": mfx.adamw(RATES["adamw_lr"], weight_decay=0.1)}, labels)
    return mfx.muon_with_adamw(RATES["lr"], RATES["adamw_lr"], labels=labels, dtype=torch.float32)


def batches() -> list[Tensor]:
    """The batches of all steps."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (BATCH, 4), generator=generator) for _ in range(STEPS)]


def loss_of(model: Callable[[Tensor], Tensor], words: Tensor) -> Tensor:
    """A task that can be learned."""
    return functional.cross_entropy(model(words).reshape(-1, WORDS).float(), (words.reshape(-1) * 3 + 1) % WORDS)


def in_one_process(case: dict[str, Any]) -> dict[str, Tensor]:
    """The parameters that one process gets without DeepSpeed."""
    import muonfx as mfx

    model = made(case)
    optimizer = mfx.TransformOptimizer(
        [(n, p) for n, p in model.named_parameters() if p.requires_grad], transform_for(model, case)
    )
    for words in batches():
        optimizer.zero_grad()
        loss_of(model, words).backward()
        if case.get("clip"):
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], case["clip"])
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


class Run:
    """An engine on a model of its own."""

    def __init__(self, name: str, case: dict[str, Any], rank: int, size: int, folder: Path) -> None:
        import deepspeed

        from muonfx.engines import deepspeed as ours

        self.deepspeed, self.rank, self.size = deepspeed, rank, size
        self.accumulate = case.get("accumulate", 1)
        self.stage = case["zero"]["stage"]
        config = {
            "train_micro_batch_size_per_gpu": BATCH // size // self.accumulate,
            "gradient_accumulation_steps": self.accumulate,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": case.get("clip", 0.0),
            "zero_optimization": case["zero"],
            **({"bf16": case["bf16"]} if "bf16" in case else {}),
        }
        if "zero.Init" in name:
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = made(case)
        else:
            model = made(case)
        if "from a file" in name:
            path = folder / f"config_{rank}.json"
            path.write_text(json.dumps({**config, "optimizer": {"type": "muonfx.Muon", "params": RATES}}))
            self.engine, wrapper, *_ = ours.initialize(model, path)
            self.optimizer = wrapper.optimizer
            return
        self.optimizer = ours.optimizer(model, transform_for(model, case))
        self.engine = deepspeed.initialize(model=model, optimizer=self.optimizer, config=config)[0]

    def step(self, words: Tensor) -> None:
        """One step on this rank's part of a batch."""
        for micro in words.chunk(self.size)[self.rank].chunk(self.accumulate):
            self.engine.backward(loss_of(self.engine, micro))
            self.engine.step()

    def params(self) -> dict[str, Tensor]:
        """The whole parameters."""
        params = dict(self.engine.module.named_parameters())
        with self.deepspeed.zero.GatheredParameters(list(params.values()), enabled=self.stage == 3):
            return {name: param.detach().float().clone() for name, param in params.items()}

    def full_state(self, name: str, key: str) -> Tensor | None:
        """A state as DeepSpeed's own tool gathers it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        params = dict(self.engine.module.named_parameters())
        return safe_get_full_optimizer_state(params[name], key)


def carried_out(name: str, case: dict[str, Any], here: Rank) -> dict[str, Any]:
    """A case: from the beginning to the end, and again from a checkpoint, with new objects."""
    rank, size, folder = here
    if name in REFUSED:
        return {"refused": refused(rank, size)}
    words = batches()
    run = Run(name, case, rank, size, folder)
    for batch in words[:SAVED_AFTER]:
        run.step(batch)
    tag = name.replace(" ", "_").replace(",", "")
    run.engine.save_checkpoint(str(folder), tag=tag)
    for batch in words[SAVED_AFTER:]:
        run.step(batch)
    whole = run.params()
    state = run.full_state("up.weight", "muon/momentum/trace") if run.stage and not case.get("normuon") else None
    again = Run(name, case, rank, size, folder)
    again.engine.load_checkpoint(str(folder), tag=tag)
    for batch in words[SAVED_AFTER:]:
        again.step(batch)
    resumed = again.params()
    return {
        "worst": worst(whole, in_one_process(case)),
        "resumed": same(whole, resumed),
        "state": None if state is None else list(state.shape),
        "frozen moved": not torch.equal(whole["emb.weight"], made(case).get_parameter("emb.weight").detach()),
        "groups": [[group["label"], group["lr"]] for group in run.optimizer.param_groups],
    }


def refused(rank: int, size: int) -> str:
    """The error that a wrong mapping of DeepSpeed's own gives."""
    run = Run("round robin", REFUSED["round robin"], rank, size, Path())
    try:
        run.step(batches()[0])
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    """Be one rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    serve(CASES | REFUSED, carried_out)


if __name__ == "__main__":
    main()
