"""Hugging Face's Trainer: Muon through the argument that it has for optimizers which need the model."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from muonfx.engines import deepspeed
from muonfx.optimizer.muon import Muon

__all__ = ["MuonFactory", "TrainingArguments", "muon"]


class TrainingArguments(Protocol):
    """The fields of ``transformers.TrainingArguments`` that are read.

    >>> from types import SimpleNamespace
    >>> args: TrainingArguments = SimpleNamespace(
    ...     learning_rate=0.01, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, deepspeed=None
    ... )
    """

    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    deepspeed: Any


class MuonFactory:
    """Makes the optimizer of a model, as the Trainer calls it: first without arguments, then with the model.

    >>> optimizer = MuonFactory()(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lr=0.01)
    >>> [(group["label"], group["lr"]) for group in optimizer.param_groups]
    [('muon', 0.01), ('adamw', 0.01)]
    """

    def __call__(self, model: nn.Module, *, zero: bool = False, **options: Any) -> torch.optim.Optimizer:
        """Make the optimizer.

        Args:
            model: with all its modules, so that parameters are routed by their types.
            zero: whether DeepSpeed will hold the parameters.
            options: of `muonfx.Muon`.
        """
        if not zero:
            return Muon(model, **options)
        b1, b2 = options.pop("betas", (0.9, 0.95))
        if "momentum" in options:
            options["decay"] = options.pop("momentum")
        return deepspeed.Muon(model, b1=b1, b2=b2, **options)


def muon(args: TrainingArguments, **options: Any) -> tuple[type[MuonFactory], dict[str, Any]]:
    """Muon for a Trainer: ``Trainer(model, args, optimizer_cls_and_kwargs=muon(args))``.

    The learning rate, the weight decay and AdamW's betas are those of the training arguments, and the Trainer's
    scheduler drives both rates from there. The logged learning rate is that of the first group, Muon's. Under DeepSpeed
    (``args.deepspeed``) the optimizer is `muonfx.engines.deepspeed.Muon`.

    Args:
        args: ``transformers.TrainingArguments``.
        options: further arguments of `muonfx.Muon`, which come before those of ``args``: ``adamw_lr``, ``rules``.

    Returns:
        A factory, and what it is called with beside the model.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(learning_rate=0.01, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, deepspeed=None)
    >>> muon(args, adamw_lr=1e-3)[1]
    {'lr': 0.01, 'weight_decay': 0.1, 'betas': (0.9, 0.95), 'zero': False, 'adamw_lr': 0.001}
    """
    said = {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "betas": (args.adam_beta1, args.adam_beta2),
        "zero": args.deepspeed is not None,
    }
    return MuonFactory, {**said, **options}
