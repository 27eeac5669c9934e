"""Muon for LLaMA-Factory v1, under the name ``muonfx`` in its registry of optimizers.

LLaMA-Factory does not import third-party plugins, so this module is also its launcher::

    python -m muonfx.engines.llamafactory sft config.yaml
    torchrun --nproc-per-node 8 -m muonfx.engines.llamafactory sft config.yaml

The configuration file contains ``optim_config: {name: muonfx, lr: 8.0e-5, adamw_lr: 4.0e-5}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from muonfx.engines.parts import with_parts
from muonfx.optimizer.muon import Muon

__all__ = ["muon", "register"]

NAME = "muonfx"


def muon(model: nn.Module, optim_config: Mapping[str, Any], **more: Any) -> Muon:
    """Return `muonfx.Muon` for a model; LLaMA-Factory calls this function if ``optim_config`` names ``muonfx``.

    Args:
        model: the model, sharded by LLaMA-Factory.
        optim_config: ``name``, ``lr``, and further arguments of `muonfx.Muon` as values of a YAML file, such as
            ``orthogonalize: {coefficients: keller}``; see `muonfx.engines.parts`.
        more: further arguments of LLaMA-Factory; ``learning_rate`` is used if ``optim_config`` has no ``lr``.

    Raises:
        ValueError: the learning rate is missing.

    >>> config = {"name": "muonfx", "lr": 8e-5, "adamw_lr": 4e-5}
    >>> optimizer = muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config)
    >>> [(group["label"], group["lr"]) for group in optimizer.param_groups]
    [('muon', 8e-05), ('adamw', 4e-05)]
    """
    options = dict(optim_config)
    options.pop("name", None)  # it selected this function, and is no argument of `Muon`
    lr = options.pop("lr", more.get("learning_rate"))
    if lr is None:
        raise ValueError(
            "optim_config: found no lr; set it there: LLaMA-Factory does not pass its learning_rate"
        )
    return Muon(model, lr, **with_parts(options))


def register() -> None:
    """Register `muon` in LLaMA-Factory's optimizers, under the name ``muonfx``.

    Raises:
        ModuleNotFoundError: LLaMA-Factory 0.9.5 or later is not installed.

    >>> register()  # doctest: +SKIP
    """
    plugins: Any = import_module("llamafactory.v1.plugins.trainer_plugins.optimizer")
    plugins.OptimizerPlugin(NAME).register()(muon)
