"""Frozen layers, groups and files of other packages, unmodified: every case writes its results as JSON."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

import muonfx as mfx
from tests.engines.processes import Rank, same, serve, small_llama

UNFROZEN_AT = 2
EPOCHS = 4


# ------------------------------------------------------------------------------------------------------------ Lightning


def lightning_task(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Any:
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.backbone = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
            self.neck = nn.Linear(8, 8)
            self.head = nn.Linear(8, 2)

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return self.head(self.neck(self.backbone(batch[0])).relu()).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make(self)

    return Task()


def finetuned(
    make: Callable[[nn.Module], torch.optim.Optimizer], folder: Path, resumed: str | None = None
) -> Any:
    """Run Lightning's own callback. Return the task, and after each epoch the norm of the backbone and the rates."""
    import lightning
    from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint

    seen: list[Any] = []

    class Watch(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
            seen.append([pl_module.backbone[0].weight.norm().item(), rates])

    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(16, 8))
    task = lightning_task(make)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        callbacks=[
            BackboneFinetuning(unfreeze_backbone_at_epoch=UNFROZEN_AT, backbone_initial_lr=1e-3),
            ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1),
            Watch(),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=resumed)
    return task, trainer.optimizers[0], seen


def backbone_finetuning(
    folder: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> dict[str, Any]:
    task, _, seen = finetuned(make, folder)
    again, _, seen_again = finetuned(make, folder, f"{folder}/epoch=0.ckpt")
    # Lightning leaves the backbone frozen in a run that resumes after the unfreezing, also under torch's optimizers.
    later, optimizer, _ = finetuned(make, folder, f"{folder}/epoch=2.ckpt")
    saved = torch.load(f"{folder}/epoch=2.ckpt", weights_only=False)
    weights = {
        name: saved["state_dict"][name]
        for name in saved["state_dict"]
        if name.startswith("backbone")
    }
    entries = optimizer.state[later.backbone[0].weight]
    return {
        "seen": seen,
        "resumed before": same(dict(again.named_parameters()), dict(task.named_parameters())),
        "seen again": seen_again,
        "kept after": same(
            {f"backbone.{n}": p for n, p in later.backbone.named_parameters()}, weights
        ),
        "state after": any(leaf.any().item() for leaf in entries.values() if leaf.ndim),
        "rates after": [group["lr"] for group in optimizer.param_groups],
    }


def equal_values(folder: Path) -> dict[str, Any]:
    """Unfreeze a norm that equals another one by value, which Lightning's own callback does not add."""
    import lightning
    from lightning.pytorch.callbacks import BackboneFinetuning

    added: list[str] = []

    class Finetuning(BackboneFinetuning):
        """Adds the parameters that Lightning leaves out."""

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            super().finetune_function(pl_module, epoch, optimizer)
            trained = {param for group in optimizer.param_groups for param in group["params"]}
            left_out = {
                name: param for name, param in pl_module.named_parameters() if param not in trained
            }
            if left_out:
                optimizer.add_param_group({"params": list(left_out.values()), "lr": 1e-3})
                added.extend(left_out)

    def fitted(callback: Any) -> nn.Module:
        task = lightning_task(lambda model: mfx.Muon(model, lr=1e-2))
        task.backbone[1] = nn.LayerNorm(8)
        task.neck = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
        options = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accelerator": "cpu",
        }
        trainer = lightning.Trainer(
            max_epochs=2, callbacks=[callback], enable_checkpointing=False, **options
        )
        data = torch.utils.data.TensorDataset(torch.randn(16, 8))
        trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=8))
        return task

    try:
        fitted(BackboneFinetuning(unfreeze_backbone_at_epoch=0, backbone_initial_lr=1e-3))
    except ValueError as error:
        refused = str(error)
    task = fitted(Finetuning(unfreeze_backbone_at_epoch=0, backbone_initial_lr=1e-3))
    trained = not torch.equal(task.backbone[1].weight, torch.ones(8))
    return {"refused": refused, "added": sorted(added), "trained": trained}


# -------------------------------------------------------------------------------------------------------------- QLoRA


def qlora(folder: Path, kind: str) -> dict[str, Any]:
    """A Llama with quantized weights and LoRA in the Trainer, as the page on Hugging Face writes it."""
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name, None)  # the Trainer of one process, without a process group
    import bitsandbytes
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    from muonfx.engines import huggingface

    model = small_llama(words=16)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and "lm_head" not in name:
            model.set_submodule(name, _quantized(bitsandbytes, layer, kind))
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    args = TrainingArguments(
        str(folder), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_steps=1
    )
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
    factory = huggingface.muon(args, labels=mfx.contrib.lora_labels)
    trainer = Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=factory)
    trainer.train()
    moved = [
        name for name, param in model.named_parameters() if not torch.equal(param, before[name])
    ]
    optimizer = trainer.optimizer.optimizer
    path = mfx.checkpoint.save(folder / "state", optimizer.transform_state, tx=optimizer.transform)
    mfx.checkpoint.load(path, like=optimizer.transform_state, tx=optimizer.transform)
    return {
        "dtypes": sorted({str(param.dtype) for param in model.parameters()}),
        "moved": sorted({name.split(".")[-3] for name in moved}),
        "labels": [group["label"] for group in optimizer.param_groups],
        "members": sorted(
            {
                name.split(".")[-3]
                for group in optimizer.param_groups
                for name in group["param_names"]
            }
        ),
        "summary": "lora_B" in str(mfx.summary(optimizer)),
        "described": "frozen" in str(mfx.describe(mfx.contrib.lora_labels(model), model)),
        "files": (folder / "checkpoint-2" / "optimizer.pt").exists(),
    }


def _quantized(bitsandbytes: Any, layer: nn.Linear, kind: str) -> nn.Module:
    weight = layer.weight.data
    if kind == "4 bits":
        made = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, False, torch.float32
        )
        made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False)
    else:
        made = bitsandbytes.nn.Linear8bitLt(
            layer.in_features, layer.out_features, False, has_fp16_weights=False
        )
        made.weight = bitsandbytes.nn.Int8Params(
            weight, requires_grad=False, has_fp16_weights=False
        )
    return made.to("cpu")


# -------------------------------------------------------------------------------------------------------- timm, lerobot


class Layers(nn.Module):
    """A model with the method by which timm finds the depth of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^stem", "blocks": [(r"^blocks\.(\d+)", None)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


def layer_decay(folder: Path) -> dict[str, Any]:
    """The groups of timm's layer decay, under timm's own scheduler, which multiplies each rate by ``lr_scale``."""
    sys.meta_path.append(Absent())  # type: ignore[arg-type]
    from timm.optim import param_groups_layer_decay
    from timm.scheduler import CosineLRScheduler

    torch.manual_seed(0)
    model = Layers()
    given = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
    scales = {
        id(param): (group["lr_scale"], group["weight_decay"])
        for group in given
        for param in group["params"]
    }
    optimizer = mfx.Muon(given, lr=0.1, model=model)
    scheduler = CosineLRScheduler(optimizer, t_initial=10)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step(step + 1)
    groups = optimizer.param_groups
    base = max(group["lr"] for group in groups)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return {
        "scales": len({scale for scale, _ in scales.values()}),
        "kept": all(
            scales[id(p)] == (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]
        ),
        "scaled": all(abs(group["lr"] - base * group["lr_scale"]) < 1e-9 for group in groups),
        "saved": all("lr_scale" in group for group in saved["param_groups"]),
    }


class Absent:
    """A finder of packages that lerobot and timm import, and that their optimizers do not use."""

    PACKAGES = frozenset(
        {
            "datasets",
            "draccus",
            "imageio",
            "jsonlines",
            "pandas",
            "pyarrow",
            "torchvision",
            "torchcodec",
        }
    )

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        module.ChoiceRegistry = ChoiceRegistry
        return module

    def exec_module(self, module: Any) -> None:
        pass


class ChoiceRegistry:
    """Stands for the base class of lerobot's settings in draccus, a package that installs a folder ``tests``."""

    @classmethod
    def register_subclass(cls, name: str) -> Callable[[type], type]:
        return lambda subclass: subclass


def lerobot_checkpoint(
    folder: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> dict[str, Any]:
    """lerobot writes the state as safetensors, with its levels joined by slashes, and the groups as JSON."""
    sys.meta_path.append(Absent())  # type: ignore[arg-type]
    from lerobot.optim.optimizers import load_optimizer_state, save_optimizer_state

    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizer, resumed = map(make, models)
    _step(models[0], optimizer)
    models[1].load_state_dict(models[0].state_dict())
    save_optimizer_state(optimizer, folder)
    load_optimizer_state(resumed, folder)
    for model, one in zip(models, (optimizer, resumed), strict=True):
        _step(model, one)
    return {"resumed": same(*[dict(model.named_parameters()) for model in models])}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


def of_trained(model: nn.Module) -> mfx.Muon:
    return mfx.Muon(
        [param for param in model.parameters() if param.requires_grad], lr=1e-2, model=model
    )


def of_torch(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=1e-2
    )


def of_matrices(model: nn.Module) -> mfx.TransformOptimizer:
    return mfx.TransformOptimizer(
        {n: p for n, p in model.named_parameters() if p.ndim == 2}, mfx.muon(1e-2)
    )


def of_monitored(model: nn.Module) -> mfx.TransformOptimizer:
    return mfx.TransformOptimizer(model, mfx.chain(mfx.monitor(), mfx.adamw(1e-2)))


CASES: dict[str, tuple[Callable[..., dict[str, Any]], list[Any]]] = {
    "Lightning, the model": (backbone_finetuning, [lambda model: mfx.Muon(model, lr=1e-2)]),
    "Lightning, a list": (backbone_finetuning, [of_trained]),
    "Lightning, torch": (backbone_finetuning, [of_torch]),
    "Lightning, equal values": (equal_values, []),
    "QLoRA, 4 bits": (qlora, ["4 bits"]),
    "QLoRA, 8 bits": (qlora, ["8 bits"]),
    "timm": (layer_decay, []),
    "lerobot, Muon": (lerobot_checkpoint, [mfx.Muon]),
    "lerobot, matrices": (lerobot_checkpoint, [of_matrices]),
    "lerobot, a slash in keys": (lerobot_checkpoint, [of_monitored]),
}


def carried_out(
    name: str, case: tuple[Callable[..., dict[str, Any]], list[Any]], here: Rank
) -> dict[str, Any]:
    function, arguments = case
    folder = here.folder / name.replace(" ", "_").replace(",", "")
    folder.mkdir()
    return function(folder, *arguments)


if __name__ == "__main__":
    serve(CASES, carried_out)
