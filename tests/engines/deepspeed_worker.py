"""One rank of a run under DeepSpeed, which runs every case and writes its results as JSON.

`test_deepspeed.py` runs it in a separate process, because importing DeepSpeed takes seconds and changes global state.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engines.processes import Rank, same, serve, trained_alone, worst

STEPS, SAVED_AFTER = 5, 3
BATCH, WORDS = 12, 11
RATES = {"lr": 0.02, "adamw_lr": 0.003}


class Net(nn.Module):
    """A model whose dims are not divisible by any number of ranks, with a matrix across every shard boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, 7)
        self.up = nn.Linear(7, 23)
        self.down = nn.Linear(23, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, WORDS)
        self.is_short = False
        """True to skip `up` and `down`, which then have no gradients."""
        self.register_parameter("gain", None)

    def forward(self, words: Tensor) -> Tensor:
        h = self.emb(words)
        normed = self.norm(h if self.is_short else h + self.down(torch.relu(self.up(h))))
        return self.head(normed if self.gain is None else normed * self.gain.mean())


OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
ZERO: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "reduce_scatter": True},
    "stage 2, small buckets": {"stage": 2, "reduce_bucket_size": 50, "allgather_bucket_size": 50},
    "stage 2, offload": {"stage": 2, **OFFLOAD},
    "stage 3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "stage 3, persistent": {"stage": 3},
    "stage 3, sub-groups": {
        "stage": 3,
        "sub_group_size": 20,
        "stage3_param_persistence_threshold": 0,
    },
    "stage 3, offload": {"stage": 3, **OFFLOAD},
    "stage 3, zero.Init": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
SCATTERED: dict[str, Any] = {"stage": 2, "reduce_scatter": True}
FUSED = {"*up.weight": "(a=10 + b=13) in -> a in, b in"}
NO_MATRICES = ("emb.weight", "bias", "norm.weight", "head.weight")
"""All parameters except the matrices of Muon."""
ONLY_GAIN: dict[str, Any] = {"frozen": ("weight", "bias"), "labels": ["adamw"]}
CASES: dict[str, dict[str, Any]] = {name: {"zero": zero} for name, zero in ZERO.items()} | {
    "no options of ZeRO": {"zero": {}},
    "stage 1, offload": {"zero": {"stage": 1, **OFFLOAD}},
    "stage 1, scattered": {"zero": {"stage": 1, "reduce_scatter": True}},
    "stage 1, whole gradients, offload": {
        "zero": {"stage": 1, "reduce_scatter": False, **OFFLOAD},
        "accumulate": 2,
    },
    "stage 1, whole gradients": {
        "zero": {"stage": 1, "reduce_scatter": False},
        "method": "standard",
    },
    "stage 2, whole gradients": {"zero": {"stage": 2, "reduce_scatter": False}, "method": "gram"},
    "stage 2, overlap": {"zero": {**SCATTERED, "overlap_comm": True}, "accumulate": 2},
    "stage 2, buckets of a rank": {
        "zero": {**SCATTERED, "use_multi_rank_bucket_allreduce": False},
        "accumulate": 2,
    },
    "stage 2, gradients apart": {"zero": {**SCATTERED, "contiguous_gradients": False}},
    "stage 3, gram": {"zero": ZERO["stage 3"], "method": "gram"},
    "stage 1, blocks": {"zero": ZERO["stage 1"], "view": FUSED},
    "stage 2, blocks": {"zero": ZERO["stage 2"], "view": FUSED},
    "stage 3, blocks": {"zero": ZERO["stage 3"], "view": FUSED},
    "bf16, stage 0": {"zero": ZERO["stage 0"], **BF16},
    "bf16, stage 1": {"zero": ZERO["stage 1"], **BF16, "clip": 1.0},
    "bf16, stage 2": {"zero": ZERO["stage 2"], **BF16},
    "bf16, stage 3": {"zero": ZERO["stage 3"], **BF16},
    "bf16, stage 3, offload": {"zero": ZERO["stage 3, offload"], **BF16},
    "bf16, sums in fp32": {
        "zero": ZERO["stage 2"],
        **BF16,
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "accumulation, stage 3": {"zero": ZERO["stage 3"], "accumulate": 2},
    "frozen, stage 2": {"zero": ZERO["stage 2"], "frozen": ("emb.weight",)},
    "frozen but for matrices": {"zero": ZERO["stage 2"], "frozen": NO_MATRICES, "labels": ["muon"]},
    "frozen matrices": {
        "zero": ZERO["stage 2"],
        "frozen": ("up.weight", "down.weight"),
        "labels": ["adamw"],
    },
    # On each of 2 ranks, the flat tensor of this vector has as many elements as the vector.
    "one short vector, stage 1": {"zero": ZERO["stage 1"], "gains": 2, **ONLY_GAIN},
    "one short vector, stage 3": {"zero": ZERO["stage 3"], "gains": 1, **ONLY_GAIN},
    "normuon, stage 2": {"zero": ZERO["stage 2"], "matrices": "normuon"},
    "soap, stage 2": {"zero": ZERO["stage 2"], "matrices": "soap", "equal": True},
    "soap, stage 3": {"zero": ZERO["stage 3"], "matrices": "soap", "equal": True},
    "from a file, stage 0": {"zero": ZERO["stage 0"], "warmup": True},
    "from a file, stage 2": {"zero": ZERO["stage 2"], **BF16, "warmup": True},
    "clipping, stage 1": {"zero": ZERO["stage 1"], "clip": 0.05},
    "unused, stage 2": {"zero": ZERO["stage 2"], "unused": True},
}
WRITTEN = ("bf16, stage 0", "stage 1", "stage 2", "bf16, stage 2", "stage 3", "bf16, stage 3")
"""The cases in which DeepSpeed steps on copies in fp32."""
COUNT = "adamw.scale_by_adam.count"
ROUND_ROBIN = {"zero": {"stage": 2, "round_robin_gradients": True}}
OVERFLOWS: dict[str, dict[str, Any]] = {
    "overflow, stage 1": {"zero": ZERO["stage 1"]},
    "overflow, stage 2": {"zero": ZERO["stage 2"]},
    "overflow, bf16, stage 0": {"zero": ZERO["stage 0"], **BF16},
    "overflow, bf16, stage 3": {"zero": ZERO["stage 3"], **BF16},
}
OVERFLOWN = 2
"""The batch with an infinite loss on rank 1."""
WARMUP = [0.0, 0.0, 0.5, 1.0, 1.0]
"""The factor on the learning rate of each group in each step, from DeepSpeed's scheduler."""


def warmup(step: int) -> float:
    """Return the factor on the learning rates in a step; a function, because a scheduler saves no other callable."""
    return WARMUP[step]


def made(case: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    model.is_short = case.get("unused", False)
    if "gains" in case:
        model.gain = nn.Parameter(torch.full((case["gains"],), 0.9))
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith(case.get("frozen", ())))
    return model


def transform_for(model: nn.Module, case: dict[str, Any]) -> Any:
    """Return the transform of a case, in fp32, because bf16 would amplify differences in the order of summation."""
    import muonfx as mfx

    labels = mfx.default_labels(model)
    if "matrices" in case:
        matrices = {
            "normuon": mfx.normuon(
                RATES["lr"], weight_decay=0.1, orthogonalize=mfx.orthogonalize(dtype=torch.float32)
            ),
            "soap": mfx.chain(mfx.contrib.scale_by_soap(), mfx.scale_by_learning_rate(RATES["lr"])),
        }[case["matrices"]]
        return mfx.partition(
            {"muon": matrices, "adamw": mfx.adamw(RATES["adamw_lr"], weight_decay=0.1)}, labels
        )
    view = mfx.MatrixView(case.get("view"))
    part = mfx.orthogonalize(dtype=torch.float32, method=case.get("method", "auto"), view=view)
    return mfx.muon_with_adamw(RATES["lr"], RATES["adamw_lr"], labels=labels, orthogonalize=part)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (BATCH, 4), generator=generator) for _ in range(STEPS)]


def first_halves() -> list[Tensor]:
    """The batches of one process in an "equal" case, where each of 2 ranks has them: their mean gradients are the same.

    SOAP amplifies rounding, so only gradients with the same bits show that it updates as in one process.
    """
    return [words.chunk(2)[0] for words in batches()]


def loss_of(model: Callable[[Tensor], Tensor], words: Tensor) -> Tensor:
    return functional.cross_entropy(
        model(words).reshape(-1, WORDS).float(), (words.reshape(-1) * 3 + 1) % WORDS
    )


def in_one_process(case: dict[str, Any]) -> dict[str, Tensor]:
    import muonfx as mfx

    model = made(case)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = mfx.TransformOptimizer(list(params.items()), transform_for(model, case))
    shares = [*(WARMUP if case.get("warmup") else [1.0] * STEPS), 1.0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shares.__getitem__)

    def loss(model: nn.Module, words: Tensor) -> Tensor:
        # DeepSpeed's flat gradients are zero for unused parameters.
        return loss_of(model, words) + 0.0 * sum(param.sum() for param in params.values())

    words = first_halves() if case.get("equal") else batches()
    return trained_alone(model, optimizer, scheduler, words, loss, case.get("clip", torch.inf))


class Run:
    """An engine with a new model."""

    def __init__(self, name: str, case: dict[str, Any], rank: int, size: int, folder: Path) -> None:
        import deepspeed

        from muonfx.engines import deepspeed as ours

        self.deepspeed, self.rank, self.size, self.folder = deepspeed, rank, size, folder
        self.accumulate = case.get("accumulate", 1)
        self.stage = case["zero"].get("stage", 0)
        config = {
            "train_micro_batch_size_per_gpu": BATCH // size // self.accumulate,
            "gradient_accumulation_steps": self.accumulate,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": case.get("clip", 0.0),
            "zero_optimization": case["zero"],
            **{key: case[key] for key in ("bf16", "data_types") if key in case},
        }
        if "zero.Init" in name:
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = made(case)
        else:
            model = made(case)
        if "from a file" in name:
            path = folder / f"config_{rank}.json"
            warmup = {
                "type": "WarmupLR",
                "params": {"warmup_num_steps": 2, "warmup_type": "linear"},
            }
            # As in `transform_for`, on every kind of CPU.
            options = RATES | {"orthogonalize": {"dtype": "float32"}}
            entries = {"optimizer": {"type": "muonfx.Muon", "params": options}, "scheduler": warmup}
            path.write_text(json.dumps(config | entries))
            self.engine, wrapper, *_ = ours.initialize(model, path)
            self.optimizer = wrapper.optimizer if self.stage else wrapper
            return
        self.optimizer = ours.optimizer(model, transform_for(model, case))
        self.engine = deepspeed.initialize(model=model, optimizer=self.optimizer, config=config)[0]

    def step(self, words: Tensor, factor: float = 1.0) -> None:
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        for micro in words.chunk(self.size)[self.rank].chunk(self.accumulate):
            self.engine.backward(loss_of(self.engine, micro) * factor)
            self.engine.step()

    def params(self) -> dict[str, Tensor]:
        params = dict(self.engine.module.named_parameters())
        with self.deepspeed.zero.GatheredParameters(list(params.values()), enabled=self.stage == 3):
            return {name: param.detach().float().clone() for name, param in params.items()}

    def full_state(self, name: str, key: str) -> Tensor | None:
        from deepspeed.utils import safe_get_full_optimizer_state

        params = dict(self.engine.module.named_parameters())
        return safe_get_full_optimizer_state(params[name], key)


def carried_out(name: str, case: dict[str, Any], here: Rank) -> dict[str, Any]:
    if name in OVERFLOWS:
        return overflown(name, case, here)
    if name in OTHERS:
        return OTHERS[name](here)
    from muonfx.engines import deepspeed as ours

    rank, size, folder = here
    words = batches()
    if case.get("equal"):
        words = [half.repeat(2, 1) for half in first_halves()]
    run = Run(name, case, rank, size, folder)
    for batch in words[:SAVED_AFTER]:
        run.step(batch)
    tag = tag_of(name)
    run.engine.save_checkpoint(str(folder), tag=tag)
    exported = is_exported(run, tag) if name in EXPORTED else None
    if name in PORTABLE:
        ours.save(run.engine, folder / f"portable_{tag}", step=SAVED_AFTER)
        torch.save(run.params(), folder / f"portable_{tag}_{rank}.pt")
    rates: list[list[float]] = []
    for batch in words[SAVED_AFTER:]:
        run.step(batch)
        rates.append(run.rates)
    whole = run.params()
    is_kept = run.stage and "matrices" not in case and "muon" in case.get("labels", ["muon"])
    state = run.full_state("up.weight", "muon.momentum.trace") if is_kept else None
    start = {name: (param, param.requires_grad) for name, param in made(case).named_parameters()}
    again = Run(name, case, rank, size, folder)
    again.engine.load_checkpoint(str(folder), tag=tag)
    for batch in words[SAVED_AFTER:]:
        again.step(batch)
        rates.append(again.rates)
    resumed = again.params()
    return {
        "worst": worst(whole, in_one_process(case)),
        "resumed": same(whole, resumed),
        "exported": exported,
        "state": None if state is None else list(state.shape),
        "wrong": [
            name
            for name, (value, moves) in start.items()
            if torch.equal(whole[name], value) == moves
        ],
        "labels": [group["label"] for group in run.optimizer.param_groups],
        "rates": rates,
    }


def tag_of(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


def is_exported(run: Run, tag: str) -> bool:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(run.folder), tag=tag)
    dtype = next(run.engine.module.parameters()).dtype
    return same(
        {name: value.detach().to(dtype).float() for name, value in found.items()}, run.params()
    )


def overflown(name: str, case: dict[str, Any], here: Rank) -> dict[str, Any]:
    """Compare a run with an infinite loss on one rank in one step with a run without that batch."""
    run, without = (Run(name, case, *here) for _ in range(2))
    for place, batch in enumerate(batches()):
        run.step(batch, factor=torch.inf if place == OVERFLOWN and here.rank == 1 else 1.0)
        if place != OVERFLOWN:
            without.step(batch)
    found = run.params()
    # `result_of` compares them between ranks
    sums = [found[key].double().sum().item() for key in sorted(found)]
    return {
        "skipped": run.engine.skipped_steps,
        "same": same(found, without.params()),
        "sums": sums,
    }


def refused(here: Rank) -> dict[str, Any]:
    run = Run("round robin", ROUND_ROBIN, *here)
    try:
        run.step(batches()[0])
    except ValueError as error:
        return {"refused": str(error)}
    return {}


def loaded_into_the_model_alone(here: Rank) -> dict[str, Any]:
    """Load other weights into an engine in bf16 before its first step.

    Return the error of that step, and whether the average of the weights begins at them after a refresh.
    """
    import deepspeed

    import muonfx as mfx
    from muonfx.engines import deepspeed as ours

    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // here.size,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": ZERO["stage 0"],
        **BF16,
    }
    tx = mfx.chain(mfx.adamw(0.0), mfx.ema_params(0.9))  # the rate 0 keeps the weights
    optimizer = ours.optimizer(model, tx)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    words = batches()[0].chunk(here.size)[here.rank]
    engine.backward(loss_of(engine, words))
    try:
        engine.step()
    except ValueError as error:
        refused = str(error)
    engine.optimizer.refresh_fp32_params()
    engine.backward(loss_of(engine, words))
    engine.step()
    averages = [entries["ema_params.average"] for entries in optimizer.state.values()]
    return {
        "refused": refused,
        "from loaded": all((average == 0.5).all().item() for average in averages),
    }


def under_another_layout(here: Rank) -> dict[str, Any]:
    """Continue runs of two ranks on another number of ranks at another stage, and return the errors."""
    from muonfx.engines import deepspeed as ours

    saved, found = here.folder.parent / "ranks_2", {}
    for source, goals in PORTABLE.items():
        for goal in goals:
            case = {**CASES[source], "zero": ZERO[goal]}
            run = Run(goal, case, *here)
            ours.load(run.engine, saved / f"portable_{tag_of(source)}")
            is_loaded = same(run.params(), torch.load(saved / f"portable_{tag_of(source)}_0.pt"))
            for batch in batches()[SAVED_AFTER:]:
                run.step(batch)
            found[f"{source}: {goal}"] = {
                "loaded": is_loaded,
                "worst": worst(run.params(), in_one_process(case)),
            }
    return found


def saved_and_loaded(here: Rank) -> dict[str, Any]:
    """Continue runs in a new engine, as the page shows it, with a scheduler that begins at 0.

    Return whether its state begins at zero and the bits are equal after the load.
    """
    from torch.optim.lr_scheduler import LambdaLR

    from muonfx import checkpoint
    from muonfx.engines import deepspeed as ours

    words, found = batches(), {}
    for dtype in ("fp32", "bf16"):
        for name, stage in ZERO.items():
            case = {"zero": stage, **(BF16 if dtype == "bf16" else {})}
            run, other = (Run(name, case, *here) for _ in range(2))
            is_untouched = not any(
                value.any()
                for entries in run.optimizer.state.values()
                for value in entries.values()
            )
            scheduler, other_scheduler = (LambdaLR(one.optimizer, warmup) for one in (run, other))
            for batch in words[:SAVED_AFTER]:
                run.step(batch)
                scheduler.step()
            path = here.folder / f"loaded_{tag_of(name)}_{dtype}"
            groups = [{"lr": group["lr"]} for group in run.engine.optimizer.param_groups]
            ours.save(
                run.engine, path, extra={"scheduler": scheduler.state_dict(), "groups": groups}
            )
            ours.load(other.engine, path)
            extra = checkpoint.inspect(path).extra
            other_scheduler.load_state_dict(extra["scheduler"])
            for group, saved in zip(
                other.engine.optimizer.param_groups, extra["groups"], strict=True
            ):
                group["lr"] = saved["lr"]
            is_loaded = same(other.params(), run.params())
            for one in (run, other):
                one.step(words[SAVED_AFTER])
            found[f"{dtype}, {name}"] = [
                is_untouched,
                is_loaded,
                same(other.params(), run.params()),
            ]
    return found


def unequal_steps(here: Rank) -> dict[str, Any]:
    """Change one number or the step count of rank 1 at stage 0, and return the errors of the steps by change."""
    found: dict[str, Any] = {}
    for dtype in ("fp32", "bf16"):
        case = {"zero": ZERO["stage 0"], **(BF16 if dtype == "bf16" else {})}
        run = Run(dtype, case, *here)
        run.step(batches()[0])
        before = run.params()
        muon, adamw = run.optimizer.param_groups
        changes = {
            "lr": (adamw, 0.5),
            "betas": (adamw, (0.5, 0.95)),
            "weight_decay": (muon, 0.5),
            "momentum": (muon, "x"),
        }
        for key, (group, value) in changes.items():
            equal_value = group[key]
            if here.rank == 1:
                group[key] = value
            found[f"{dtype}, {key}"] = error_of_step(run)
            group[key] = equal_value
        if here.rank == 1:
            for entries in run.optimizer.state.values():
                entries[COUNT] = entries[COUNT] + 1
        found[f"{dtype}, count"] = error_of_step(run)
        found[f"{dtype}, unchanged"] = same(before, run.params())
    return found


def written_weights(name: str, here: Rank) -> dict[str, Any]:
    """Write weights into the model between steps; return of each step whether they are kept, and its warnings."""
    case = {"zero": ZERO[name.removeprefix("bf16, ")], **(BF16 if name.startswith("bf16") else {})}
    run = Run(name, case, *here)
    run.step(batches()[0])
    trained = run.params()
    quarters = {name: torch.full_like(param, 0.25) for name, param in trained.items()}
    threes = {name: torch.full_like(param, 3.0) for name, param in trained.items()}

    def write(values: dict[str, Tensor]) -> None:
        params = dict(run.engine.module.named_parameters())
        with run.deepspeed.zero.GatheredParameters(
            [*params.values()], modifier_rank=0, enabled=run.stage == 3
        ):
            run.engine.module.load_state_dict(values)

    def step(written: dict[str, Tensor]) -> tuple[bool, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.step(batches()[1])
        texts = [str(warning.message) for warning in caught]
        return worst(run.params(), written) < 0.1, [text for text in texts if "fp32 copy" in text]

    write(quarters)
    write(trained)  # as after an evaluation of an average
    found = {"exchanged and back": step(trained)}
    write(quarters)
    run.engine.optimizer.refresh_fp32_params()
    found["refreshed"] = step(quarters)
    write(threes)
    found["not refreshed"] = step(threes)
    write(threes)
    found["again"] = step(threes)
    return found


def error_of_step(run: Run) -> str:
    try:
        run.step(batches()[1])
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


OTHERS: dict[str, Callable[[Rank], dict[str, Any]]] = {
    "unequal steps": unequal_steps,
    "written weights": lambda here: {name: written_weights(name, here) for name in WRITTEN},
    "round robin": refused,
    "loaded into the model alone": loaded_into_the_model_alone,
    "under another layout": under_another_layout,
    "saved and loaded": saved_and_loaded,
}
PORTABLE = {
    "normuon, stage 2": (
        "stage 0",
        "stage 1",
        "stage 2, offload",
        "stage 3",
        "stage 3, sub-groups",
    ),
    "stage 3, sub-groups": ("stage 2", "stage 3, persistent"),
    "bf16, stage 3": ("stage 2", "stage 3, persistent"),
}
"""Saved cases, and the stages at which other cases continue them."""
EXPORTED = ("stage 2", "stage 3", "bf16, stage 3")


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    serve(CASES | OVERFLOWS | {name: {} for name in OTHERS}, carried_out)
