"""One rank of runs under DeepSpeed's AutoTP, pipeline stages, experts and schedulers; writes its results as JSON.

`test_deepspeed_parallel.py` runs it in separate processes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.engines.processes import Rank, same, serve, values_of, worst

STEPS = 2
WORDS = 19
"""An odd number, so that AutoTP splits the output layer unevenly."""
RATES: dict[str, Any] = {"lr": 0.02, "adamw_lr": 0.003}
FP32_PRODUCTS = {"dtype": "float32"}
TENSOR_CASES = {f"AutoTP, stage {stage}": stage for stage in (0, 1, 2, 3)}
PIPELINE_CASES = {f"pipeline, stage {stage}": stage for stage in (0, 1)}
EXPERT_CASES = {f"experts, stage {stage}": stage for stage in (0, 1, 2)}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 0.02, "warmup_num_steps": 2},
    "WarmupDecayLR": {"warmup_max_lr": 0.02, "warmup_num_steps": 2, "total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02},
    "LRRangeTest": {"lr_range_test_min_lr": 0.02},
}
"""Schedulers with one rate for all groups."""
SCHEDULERS_BY_GROUP: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": [0.02, 0.003], "warmup_num_steps": 2, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 2},
    "OneCycle": {"cycle_min_lr": [0.002, 0.0003], "cycle_max_lr": [0.02, 0.003]},
}
"""Schedulers that keep a rate for each group."""


class Run(NamedTuple):
    """An engine with its model, and the function that takes a step."""

    engine: Any
    model: nn.Module
    step: Callable[[], object]


def config_of(stage: int, batch: int, **entries: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    common = {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    return {"train_micro_batch_size_per_gpu": batch, "zero_optimization": zero, **common, **entries}


# -------------------------------------------------------------------------------------------------- tensor parallelism


def llama(key_heads: int = 2) -> Any:
    """Return a Llama with fewer heads for keys and values than for queries, and with biases."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
    )
    return transformers.LlamaForCausalLM(config)


def words() -> Tensor:
    return torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(1))


def llama_in_one_process() -> dict[str, Tensor]:
    import muonfx as mfx

    model = llama()
    optimizer = mfx.Muon(model, **RATES, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=words(), labels=words()).loss.backward()
        optimizer.step()
    return values_of(model)


def tensor_parallel(stage: int, here: Rank) -> Run:
    import deepspeed

    from muonfx.engines import deepspeed as ours

    model = llama()
    optimizer = ours.Muon(model, **RATES, orthogonalize=FP32_PRODUCTS)
    copies = here.size // 2
    config = config_of(stage, 4 // copies, tensor_parallel={"autotp_size": 2})
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    batch = words().chunk(copies)[here.rank // 2]

    def step() -> None:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()

    return Run(engine, model, step)


# ------------------------------------------------------------------------------------- pipeline stages, and experts


def pipeline(stage: int, here: Rank, stages: int = 2) -> Run:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from muonfx.engines import deepspeed as ours

    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    data = torch.randn(4, 8)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    model = PipelineModule(
        layers=layers, num_stages=stages, loss_fn=loss, partition_method="uniform"
    )
    labels: dict[str, str] = {}
    for name, param in model.named_parameters():
        labels[name] = "muon" if param.ndim == 2 else "adamw"
    optimizer = ours.Muon(model, **RATES, labels=labels, orthogonalize=FP32_PRODUCTS)
    copies = here.size // stages
    config = config_of(stage, 2 // copies, gradient_accumulation_steps=2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    parts = [half.chunk(copies)[here.rank % copies] for half in data.chunk(2)]
    return Run(
        engine, model, lambda: engine.train_batch(data_iter=iter([(part, part) for part in parts]))
    )


class ExpertNet(nn.Module):
    """A model with four experts, which are divided among groups of ``ep_size`` ranks."""

    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.up = nn.Linear(8, 8)
        expert = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        options = {"k": 1, "min_capacity": 0, "use_rts": False, "drop_tokens": False}
        self.moe: Any = MoE(8, expert, num_experts=4, ep_size=ep_size, **options)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.moe(self.up(x))[0]).square().mean()


def expert_net(rank: int, ep_size: int) -> ExpertNet:
    """Return the model with the experts of a rank, which have the same initial values for all ``ep_size``."""
    torch.manual_seed(0)
    model = ExpertNet(ep_size)
    experts = model.moe.deepspeed_moe.experts.deepspeed_experts
    for index, expert in enumerate(experts):
        generator = torch.Generator().manual_seed(rank % ep_size * len(experts) + index)
        for param in expert.parameters():
            nn.init.normal_(param, generator=generator)
    return model


def expert_data() -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def experts(stage: int, here: Rank) -> Run:
    import deepspeed

    from muonfx.engines import deepspeed as ours

    model = expert_net(here.rank, ep_size=2)
    optimizer = ours.Muon(model, **RATES, orthogonalize=FP32_PRODUCTS)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(stage, 8))[0]
    batch = expert_data().chunk(here.size)[here.rank]

    def step() -> None:
        engine.backward(engine(batch))
        engine.step()

    return Run(engine, model, step)


def experts_in_one_process() -> dict[str, Tensor]:
    """Train all experts on the whole batch, on each rank alone."""
    import muonfx as mfx

    model = expert_net(rank=0, ep_size=1)
    model.moe.set_deepspeed_parallelism()
    optimizer = mfx.Muon(model, **RATES, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(expert_data()).backward()
        optimizer.step()
    return values_of(model)


# ------------------------------------------------------------------------------------------------------------- results


def run_of(name: str, here: Rank) -> Run:
    if name in TENSOR_CASES:
        return tensor_parallel(TENSOR_CASES[name], here)
    if name in PIPELINE_CASES:
        return pipeline(PIPELINE_CASES[name], here)
    return experts(EXPERT_CASES[name], here)


def local_values(run: Run) -> dict[str, Tensor]:
    """Return copies of the parameters that this rank holds: whole layers, or its rows and columns of them."""
    import deepspeed

    params = dict(run.model.named_parameters())
    is_partitioned = any(hasattr(param, "ds_id") for param in params.values())
    with deepspeed.zero.GatheredParameters(list(params.values()), enabled=is_partitioned):
        return {name: param.detach().float().clone() for name, param in params.items()}


def saved_and_resumed(name: str, here: Rank) -> dict[str, Any]:
    """Train, save, load into a new engine, and continue both; return facts about the checkpoint too."""
    import muonfx as mfx
    from muonfx.engines import deepspeed as ours

    run = run_of(name, here)
    for _ in range(STEPS):
        run.step()
    path = here.folder / name.replace(", ", "_").replace(" ", "_")
    ours.save(run.engine, path, step=STEPS)
    before = local_values(run)
    ours.load(run.engine, path)
    is_unchanged = same(before, local_values(run))
    again = run_of(name, here)
    ours.load(again.engine, path)
    is_loaded = same(before, local_values(again))
    run.step()
    again.step()
    is_resumed = same(local_values(run), local_values(again))
    saved = mfx.checkpoint.read(path)
    saved_params = {
        key.removeprefix("params/"): value
        for key, value in saved.items()
        if key.startswith("params/")
    }
    difference: float | None = None
    if name in TENSOR_CASES:
        difference = worst(saved_params, llama_in_one_process())
    if name in EXPERT_CASES:
        difference = worst(saved_params, experts_in_one_process())
    return {
        "unchanged": is_unchanged,
        "loaded": is_loaded,
        "resumed": is_resumed,
        "worst": difference,
        "saved": sorted(saved),
    }


def on_other_ranks(here: Rank) -> dict[str, Any]:
    """Load the checkpoint of two pipeline stages into one stage on as many ranks, and take the same step in both."""
    from muonfx.engines import deepspeed as ours

    two_stages = pipeline(1, here)
    path = here.folder / "two_stages"
    two_stages.step()
    ours.save(two_stages.engine, path)
    one_stage = pipeline(1, here, stages=1)
    ours.load(one_stage.engine, path)
    loaded = local_values(one_stage)
    own = local_values(two_stages)
    is_loaded = same(own, {name: loaded[name] for name in own})
    two_stages.step()
    one_stage.step()
    stepped = local_values(one_stage)
    own = local_values(two_stages)
    difference = max((stepped[name] - value).abs().max().item() for name, value in own.items())
    ours.save(one_stage.engine, here.folder / "one_stage")
    ours.load(two_stages.engine, here.folder / "one_stage")
    own = local_values(two_stages)
    is_loaded_back = same(own, {name: stepped[name] for name in own})
    return {"loaded": is_loaded, "close": difference < 2e-6, "loaded back": is_loaded_back}


def unequal_values(here: Rank) -> dict[str, Any]:
    """Change one replicated parameter on one rank, and return the error of `save`."""
    from muonfx.engines import deepspeed as ours

    run = pipeline(0, here, stages=1)
    if here.rank == 1:
        with torch.no_grad():
            dict(run.model.named_parameters())["0.weight"].add_(1.0)
    try:
        ours.save(run.engine, here.folder / "unequal")
    except RuntimeError as error:
        return {
            "error_text": str(error),
            "written": (here.folder / "unequal" / "index.json").exists(),
        }
    return {}


def wrong_rate(stage: int, here: Rank) -> dict[str, Any]:
    """Give the last group of rank 1 a rate that is no number, before a first and a later step; return the errors."""
    found: dict[str, Any] = {}
    for when, steps in {"first": 0, "later": 1}.items():
        run = pipeline(stage, here, stages=1)
        for _ in range(steps):
            run.step()
        optimizer = getattr(run.engine.optimizer, "optimizer", run.engine.optimizer)
        group = optimizer.param_groups[-1]
        rate = group["lr"]
        before = local_values(run)
        if here.rank == 1:
            group["lr"] = "fast"
        text = ""
        try:
            run.step()
        except (ValueError, RuntimeError) as error:
            text = f"{type(error).__name__}: {error}"
        group["lr"] = rate
        found[when] = {"error_text": text, "unchanged": same(before, local_values(run))}
    return found


def scheduled(type_name: str, params: dict[str, Any], steps: int = 4) -> dict[str, Any]:
    """Take steps with a scheduler of DeepSpeed; return the rates of the last step, or the error."""
    import deepspeed

    from muonfx.engines import deepspeed as ours

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = ours.Muon(model, **RATES)
    config = config_of(2, 8, scheduler={"type": type_name, "params": params})
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    try:
        for _ in range(steps):
            engine.backward(engine(torch.arange(8)).square().mean())
            engine.step()
    except ValueError as error:
        return {"refused": str(error)}
    rates = [group["lr"] for group in optimizer.param_groups]
    return {"ratio": rates[0] / rates[1] if rates[1] else None}


def scheduled_cases() -> dict[str, Any]:
    return {
        "one rate": {name: scheduled(name, params) for name, params in SCHEDULERS.items()},
        "a rate for each group": {
            name: scheduled(name, params) for name, params in SCHEDULERS_BY_GROUP.items()
        },
    }


def unequal_stages(here: Rank) -> dict[str, Any]:
    """Return the warning about two pipeline stages, of which one has no matrix."""
    from deepspeed.pipe import PipelineModule

    from muonfx.engines import deepspeed as ours

    model = PipelineModule(
        layers=[nn.Linear(8, 8), nn.LayerNorm(8)], num_stages=2, partition_method="uniform"
    )
    labels: dict[str, str] = {}
    for name, param in model.named_parameters():
        labels[name] = "muon" if param.ndim == 2 else "adamw"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.Muon(model, labels=labels)
    texts = [str(warning.message) for warning in caught]
    return {"warnings": [text for text in texts if text.startswith("param_groups")]}


OTHERS: dict[str, Callable[[Rank], dict[str, Any]]] = {
    "on other ranks": on_other_ranks,
    "unequal values": unequal_values,
    "unequal stages": unequal_stages,
    "wrong rate, stage 0": lambda here: wrong_rate(0, here),
    "wrong rate, stage 1": lambda here: wrong_rate(1, here),
    "schedulers": lambda here: scheduled_cases(),
}
# In this order: a pipeline leaves groups in DeepSpeed's global state, with which experts cannot be made.
NAMES = (
    *EXPERT_CASES,
    "schedulers",
    *TENSOR_CASES,
    *PIPELINE_CASES,
    "on other ranks",
    "unequal values",
    "wrong rate, stage 0",
    "wrong rate, stage 1",
    "unequal stages",
)
CASES: dict[str, Any] = {name: {} for name in NAMES}


def carried_out(name: str, case: dict[str, Any], here: Rank) -> dict[str, Any]:
    if name in OTHERS:
        return OTHERS[name](here)
    return saved_and_resumed(name, here)


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    serve(CASES, carried_out)
