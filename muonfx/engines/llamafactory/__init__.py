"""Muon for LLaMA-Factory v1, under the name ``muonfx`` in its registry of optimizers.

LLaMA-Factory does not import third-party plugins, so this module is also its launcher::

    python -m muonfx.engines.llamafactory sft config.yaml
    torchrun --nproc-per-node 8 -m muonfx.engines.llamafactory sft config.yaml

The configuration file contains ``optim_config: {name: muonfx, lr: 0.02, adamw_lr: 0.0003}``.
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
PLACES = ("optimizer", "optimizers.optimizer")
"""The modules of the registry, by version, in ``llamafactory.v1.plugins.trainer_plugins``."""


def muon(model: nn.Module, optim_config: Mapping[str, Any], **given: Any) -> Muon:
    """Make the optimizer, as LLaMA-Factory calls it.

    Args:
        model: as LLaMA-Factory has sharded it.
        optim_config: ``name``, ``lr``, and further arguments of `muonfx.Muon`, with parts as mappings
            (`muonfx.engines.parts`): ``orthogonalize: {coefficients: keller}``.
        given: what versions of LLaMA-Factory hand over beside; ``learning_rate`` counts where there is no ``lr``.

    Raises:
        ValueError: there is no learning rate.

    >>> config = {"name": "muonfx", "lr": 0.02, "adamw_lr": 3e-4}
    >>> optimizer = muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config)
    >>> [(group["label"], group["lr"]) for group in optimizer.param_groups]
    [('muon', 0.02), ('adamw', 0.0003)]
    """
    options = {key: value for key, value in optim_config.items() if key != "name"}
    if (lr := options.pop("lr", given.get("learning_rate"))) is None:
        raise ValueError("optim_config: found no lr; LLaMA-Factory does not hand on its learning_rate, so say it here")
    return Muon(model, lr, **with_parts(options))


def register() -> None:
    """Register `muon` in LLaMA-Factory.

    Raises:
        ModuleNotFoundError: no LLaMA-Factory with a v1 is installed.

    >>> register()  # doctest: +SKIP
    """
    for place in PLACES:
        try:
            module: Any = import_module(f"llamafactory.v1.plugins.trainer_plugins.{place}")
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("llamafactory"):
                raise  # a missing dependency of LLaMA-Factory
            continue
        module.OptimizerPlugin(NAME).register()(muon)
        return
    raise ModuleNotFoundError(
        "llamafactory: found no v1 with a registry of optimizers; pip install llamafactory>=0.9.5"
    )
