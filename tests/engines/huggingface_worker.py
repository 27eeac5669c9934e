"""One rank of a Trainer of Hugging Face, which runs every case and writes its results as JSON.

`test_huggingface.py` runs it in a separate process. The package is imported in functions only, so that the test can
read the cases without it.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.engines.processes import (
    ROOT,
    Rank,
    same,
    serve,
    small_llama,
    trained_alone,
    values_of,
    worst,
)

STEPS, SAVED_AFTER = 5, 3
UNFROZEN_AT = 2
BATCH, WORDS, LENGTH = 4, 17, 6
RATES = {"adamw_lr": 0.004}
CLIPPED_AT = 0.5

FSDP2 = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
SHARDED_FILES = {
    "fsdp": True,
    "fsdp_config": {**FSDP2["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"},
}


def zero(stage: int) -> dict[str, Any]:
    auto = dict.fromkeys(
        (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        ),
        "auto",
    )
    return {
        "deepspeed": {
            **auto,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
    }


CASES: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DDP, matrices shared out": {},
    "DDP, unfrozen": {},
    "DDP, unfrozen, matrices shared out": {},
    "from one process to DDP": {},
    "from one process to FSDP2": FSDP2,
    "FSDP2": FSDP2,
    "FSDP2, sharded files": SHARDED_FILES,
    "FSDP2, accumulation": {**FSDP2, "gradient_accumulation_steps": 2},
    "FSDP2, bf16": {**FSDP2, "bf16": True},
    "FSDP2, LoRA": FSDP2,
    "FSDP2, another chain": FSDP2,
    "ZeRO 1": zero(1),
    "ZeRO 2": zero(2),
    "ZeRO 3": zero(3),
    "ZeRO 3, LoRA": zero(3),
}


def model_for(folder: Path | None = None) -> Any:
    if folder is None:
        return small_llama(WORDS)
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(folder)


def adapted(model: Any) -> Any:
    import peft

    found = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    generator = torch.Generator().manual_seed(2)
    for name, param in found.named_parameters():  # with B = 0, the gradient of A would be zero
        if "lora_" in name:
            param.data = torch.randn(param.shape, generator=generator) / 4
    return found


def data() -> Tensor:
    return torch.randint(WORDS, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def arguments_for(folder: Path, size: int = 1, **more: Any) -> Any:
    """Return training arguments that use the sequences in order, with `BATCH` per step over all processes."""
    import transformers

    return transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // size // more.get("gradient_accumulation_steps", 1),
        train_sampling_strategy="sequential",
        learning_rate=0.02,
        weight_decay=0.1,
        adam_beta2=0.95,
        adam_epsilon=1e-7,
        lr_scheduler_type="linear",
        max_grad_norm=CLIPPED_AT,
        logging_steps=1,
        save_steps=SAVED_AFTER,
        report_to=[],
        use_cpu="deepspeed" not in more,
        disable_tqdm=True,
        seed=0,
        accelerator_config={"use_configured_state": is_configured(more)},
        **more,
    )


def is_configured(case: Mapping[str, Any]) -> bool:
    """Create accelerate's state in advance if it does not support this strategy on CPUs."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(name, None)  # set by an earlier run of accelerate
    AcceleratorState._reset_state(reset_partial_state=True)
    if "deepspeed" in case:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    elif "fsdp" in case:
        # Accelerate accepts it only on several accelerators; this attribute is used nowhere else.
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    else:
        return False
    return True


def trainer_for(args: Any, model: nn.Module, kind: Any = None, **more: Any) -> Any:
    import transformers

    import muonfx as mfx
    from muonfx.engines import huggingface

    rows = [{"input_ids": row, "labels": row} for row in data()]
    chosen = more or {
        "optimizer_cls_and_kwargs": huggingface.muon(
            args, **RATES, orthogonalize=mfx.orthogonalize(dtype=torch.float32)
        )
    }
    return (kind or transformers.Trainer)(model, args, train_dataset=rows, **chosen)


def optimizer_for(model: nn.Module) -> Any:
    import muonfx as mfx

    optimizer = mfx.Muon(
        model,
        0.02,
        weight_decay=0.1,
        **RATES,
        betas=(0.9, 0.95),
        orthogonalize=mfx.orthogonalize(dtype=torch.float32),
    )
    for group in optimizer.param_groups:
        if group["label"] == "adamw":
            group["eps"] = 1e-7
    return optimizer


def chain_for(model: nn.Module) -> Any:
    """The transform of `optimizer_for`, made by hand."""
    import muonfx as mfx

    return mfx.muon_with_adamw(
        0.02,
        RATES["adamw_lr"],
        orthogonalize=mfx.orthogonalize(dtype=torch.float32),
        adam=mfx.scale_by_adam(0.9, 0.95, eps=1e-7),
        labels=mfx.default_labels(model),
    )


def callback_of_page() -> Any:
    """Return the callback of the page on Hugging Face that unfreezes a layer, at another step."""
    import transformers

    text = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(class Unfreeze.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"TrainerCallback": transformers.TrainerCallback}
    exec(code.replace("1000", str(UNFROZEN_AT)), names)
    return names["Unfreeze"]()


def by_hand(model: Any = None, *, unfrozen_at: int = 0) -> dict[str, Tensor]:
    model = model_for() if model is None else model
    steps = iter(range(STEPS))

    def loss_of(net: Any, words: Tensor) -> Tensor:
        if unfrozen_at:
            net.get_submodule("model.layers.0").requires_grad_(next(steps) >= unfrozen_at)
        return net(input_ids=words, labels=words).loss

    optimizer = optimizer_for(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    return trained_alone(
        model,
        optimizer,
        scheduler,
        data().split(BATCH),
        loss_of,
        CLIPPED_AT,
    )


def params_of(trainer: Any) -> dict[str, Tensor]:
    if not trainer.is_deepspeed_enabled:
        return values_of(trainer.accelerator.unwrap_model(trainer.model))
    import deepspeed

    params = dict(trainer.model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return {name: param.detach().float().clone() for name, param in params.items()}


def rates_of(trainer: Any) -> dict[str, Any]:
    logged = [
        entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry
    ]
    groups = [[group["label"], group["initial_lr"]] for group in trainer.optimizer.param_groups]
    return {"logged": [round(rate, 9) for rate in logged], "groups": groups}


def trained(
    case: Mapping[str, Any], folder: Path, here: Rank, source: Path | None = None, **options: Any
) -> Any:
    import muonfx as mfx
    from muonfx.engines import huggingface

    args = arguments_for(folder, here.size, **case)
    model = model_for(here.folder / "model")
    is_partitioned = all(hasattr(param, "ds_id") for param in model.parameters())
    assert is_partitioned is (case == CASES["ZeRO 3"])  # already before training
    model = adapted(model) if "LoRA" in folder.name else model
    chosen = huggingface.muon(
        args, **RATES, orthogonalize=mfx.orthogonalize(dtype=torch.float32), **options
    )
    # As on the page; the Trainer refuses `optimizers` under FSDP2.
    if "another_chain" in folder.name:
        chosen = (lambda: mfx.TransformOptimizer, {"tx": chain_for(model)})
    trainer = trainer_for(args, model, optimizer_cls_and_kwargs=chosen)
    if "unfrozen" in folder.name:
        trainer.add_callback(callback_of_page())
    trainer.train(resume_from_checkpoint=None if source is None else str(source))
    return trainer


def converted(checkpoint: Path, made: Path) -> Path:
    """Return a copy of a checkpoint, converted from FSDP2's files to those of DDP and one process, or back."""
    import muonfx as mfx

    shutil.copytree(
        checkpoint, made, ignore=shutil.ignore_patterns("optimizer.*", "pytorch_model_fsdp.bin")
    )
    model = model_for(checkpoint)
    optimizer = mfx.Muon(model, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
    # The file's rates are wanted here.
    warnings.filterwarnings(
        "ignore", "load_state_dict: the state dict was saved with other numbers"
    )
    if (checkpoint / "optimizer.pt").exists():
        optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
        torch.save(get_optimizer_state_dict(model, optimizer), made / "optimizer.bin")
        torch.save(model.state_dict(), made / "pytorch_model_fsdp.bin")
    else:
        set_optimizer_state_dict(
            model, optimizer, torch.load(checkpoint / "optimizer.bin", weights_only=True)
        )
        torch.save(optimizer.state_dict(), made / "optimizer.pt")
    return made


def carried_out(name: str, case: dict[str, Any], here: Rank) -> dict[str, Any]:
    import muonfx as mfx

    folder = here.folder / name.replace(" ", "_").replace(",", "")
    if here.rank == 0 and not (here.folder / "model").exists():
        model_for().save_pretrained(here.folder / "model")
    torch.distributed.barrier()
    options = {"layout": mfx.sharding.replicated} if "shared out" in name else {}
    model = adapted(model_for()) if "LoRA" in name else model_for()
    wanted = by_hand(model, unfrozen_at=UNFROZEN_AT if "unfrozen" in name else 0)
    if name.startswith("from one process"):
        source = here.folder / ("for FSDP2" if case else "one") / f"checkpoint-{SAVED_AFTER}"
        found = trained(case, folder, here, source)
        return {"worst": worst(params_of(found), wanted), **rates_of(found)}
    trainer = trained(case, folder, here, **options)
    whole = params_of(trainer)
    again = trained(case, folder, here, folder / f"checkpoint-{SAVED_AFTER}", **options)
    return {
        "worst": worst(whole, wanted),
        "resumed": same(whole, params_of(again)),
        "optimizer": type(trainer.optimizer.optimizer).__name__,
        "strategy": trainer.accelerator.distributed_type.value,
        **rates_of(trainer),
    }


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.distributed.init_process_group("gloo")
    serve(CASES, carried_out)
