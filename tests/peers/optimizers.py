"""Our optimizers as PyTorch's `OptimizerInfo` and timm's registry take them: made from tensors, with torch's keywords.

Ours need names: labels, masks and checkpoints go by them. Tensors without names are numbered here.
"""

from itertools import count
from typing import Any

import torch
from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput, optim_db

import muonfx as mfx

__all__ = ["INFOS", "AdamW", "Lion", "Muon", "inputs_of", "named"]


def named(params: Any) -> list[Any]:
    """Number the tensors that have no names, over all groups."""
    numbers = count()

    def numbered(items: Any) -> list[Any]:
        items = [items] if isinstance(items, torch.Tensor) else list(items)
        return [(str(next(numbers)), item) if isinstance(item, torch.Tensor) else item for item in items]

    items = [params] if isinstance(params, torch.Tensor) else list(params)
    is_groups = items and isinstance(items[0], dict)
    return [{**group, "params": numbered(group["params"])} for group in items] if is_groups else numbered(items)


def _by_dims(params: Any) -> dict[str, str]:
    return {name: "muon" if param.ndim > 1 else "adamw" for name, param in params.items()}


class Muon(mfx.Muon):
    def __init__(self, params: Any, lr: Any = 1e-3, **options: Any) -> None:
        super().__init__(named(params), lr, labels=_by_dims, **options)


class AdamW(mfx.TransformOptimizer):
    def __init__(self, params: Any, lr: Any = 1e-3, weight_decay: Any = 1e-2) -> None:
        super().__init__(named(params), mfx.adamw(lr, b2=0.999, weight_decay=weight_decay))


class Lion(mfx.TransformOptimizer):
    def __init__(self, params: Any, lr: Any = 1e-4, weight_decay: Any = 1e-2) -> None:
        super().__init__(named(params), mfx.lion(lr, weight_decay=weight_decay))


def _lion_inputs(device: Any, dtype: Any = None) -> list[OptimizerInput]:
    return [
        OptimizerInput(params=None, kwargs=options, desc=str(options))
        for options in ({}, {"lr": 1e-3}, {"lr": torch.tensor(1e-3)}, {"weight_decay": 0.1})
    ]


def _of_torch(name: str) -> OptimizerInfo:
    return next(info for info in optim_db if info.optim_cls.__name__ == name)


# Torch's own inputs for its optimizers of the same name, and the schedulers that torch tries with each.
INFOS = [
    OptimizerInfo(
        optim_cls,
        optim_inputs_func=inputs,
        scheduler_inputs=_of_torch(like).scheduler_inputs,
        supported_impls=(),
        not_og_supported_flags=(),
        supports_complex=False,
    )
    for optim_cls, inputs, like in (
        (Muon, _of_torch("Muon").optim_inputs_func, "Muon"),
        (AdamW, _of_torch("AdamW").optim_inputs_func, "AdamW"),
        (Lion, _lion_inputs, "SGD"),
    )
]

NOT_OURS = {
    "amsgrad": "no transform of that name",
    "maximize": "a chain has `scale(1.0)` in the place of the negative learning rate",
    "ns_coefficients": "`coefficients=`",
    "ns_steps": "`coefficients=` has as many triples as steps",
}
"""Keywords of torch's inputs that ours do not have, and what there is instead."""


def inputs_of(info: OptimizerInfo) -> list[dict[str, Any]]:
    """New keywords each time: a scheduler writes into a rate that is a tensor."""
    found = [one.kwargs for one in info.optim_inputs_func(device="cpu")]
    unknown = {key for options in found for key in options} - {"lr", "weight_decay", "momentum", "betas"}
    assert unknown <= NOT_OURS.keys(), f"torch has new keywords: {sorted(unknown - NOT_OURS.keys())}"
    return [options for options in found if NOT_OURS.keys().isdisjoint(options)]
