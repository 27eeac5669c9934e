"""Make the client optimizer and pass it to DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from muonfx.core import Transform
from muonfx.engines.deepspeed.optimizer import ZeroOptimizer
from muonfx.engines.deepspeed.pieces import trained_parameters
from muonfx.engines.parts import with_parts
from muonfx.optimizer import muon

__all__ = ["Muon", "initialize", "optimizer"]

CONFIG_TYPE = "muonfx.Muon"
"""The "type" of the optimizer in a configuration for `initialize`."""


def optimizer(model: nn.Module, tx: Transform) -> ZeroOptimizer:
    """A transform as DeepSpeed's client optimizer: ``deepspeed.initialize(model=model, optimizer=...)``.

    The configuration must allow it: ``"zero_allow_untested_optimizer": true``, and with offload of the optimizer also
    ``"zero_force_ds_cpu_optimizer": false``. All else (stage, precision, accumulation, clipping, schedulers,
    sub-groups, ``zero.Init``) is DeepSpeed's own business.

    Args:
        model: as it is given to DeepSpeed, or made under ``deepspeed.zero.Init``; its parameters that require grad are
            trained.
        tx: the transform. It must not look at the whole tree (`clip_by_global_norm`): DeepSpeed steps one flat tensor
            at a time, and clips gradients itself.

    Returns:
        The optimizer, with the groups and keys of `muonfx.TransformOptimizer`.

    Raises:
        TypeError: ``model`` is no module, or ``tx`` no transform.
        ValueError: ``tx`` looks at the whole tree, or leaves out a parameter that requires grad; the message names it.

    >>> import muonfx as mfx
    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    >>> made = optimizer(model, mfx.muon_with_adamw(0.02, 1e-3, labels=mfx.default_labels(model)))
    >>> [(group["label"], group["lr"]) for group in made.param_groups]
    [('muon', 0.02), ('adamw', 0.001)]
    """
    return ZeroOptimizer(model, tx)


def Muon(model: nn.Module, lr: float = 2e-3, **options: Any) -> ZeroOptimizer:
    """Muon for the hidden matrices of a model and AdamW for the rest, as DeepSpeed's client optimizer.

    Args:
        model: as for `optimizer`.
        lr: the learning rate of Muon.
        options: further arguments of `muonfx.Muon` that concern the update, not the layout or memory. In a JSON file
            for `initialize` a part is a mapping of its arguments, as in `muonfx.engines.parts`.

    Raises:
        TypeError, ValueError: as `optimizer` and `muonfx.Muon`.

    >>> [group["label"] for group in Muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).param_groups]
    ['muon', 'adamw']
    """
    trained = trained_parameters(model)
    return ZeroOptimizer(model, muon.Muon.transform_for(trained, lr, model=model, **with_parts(options)))


def require_own_step(config: Mapping[str, Any]) -> None:
    """Require a DeepSpeed configuration under which the engine steps with the client optimizer."""
    if "optimizer" in config:
        raise ValueError(
            f'DeepSpeed\'s config: found an "optimizer" of the type {config["optimizer"].get("type")!r}, which would '
            'step in place of Muon: leave "optimizer" out of the config'
        )
    device = (config.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device", "none")
    is_forced = config.get("zero_force_ds_cpu_optimizer", True)
    if device not in (None, "none") and is_forced:
        raise ValueError(
            f'DeepSpeed\'s config: found "offload_optimizer" with the device {device!r} and '
            f'"zero_force_ds_cpu_optimizer" true (its default), so that DeepSpeedCPUAdam would step in place of Muon: '
            'write "zero_force_ds_cpu_optimizer": false into the config'
        )


def initialize(model: nn.Module, config: Mapping[str, Any] | str | Path, **rest: Any) -> tuple[Any, ...]:
    """``deepspeed.initialize`` for a configuration whose optimizer is Muon.

    DeepSpeed accepts its own optimizers and torch's by name, and no others. Here the entry ``"optimizer": {"type":
    "muonfx.Muon", "params": {...}}`` is taken out and made with `Muon`; "params" has the names of `muonfx.Muon`, with
    parts as mappings (`muonfx.engines.parts`). The two options that client optimizers need are set unless the
    configuration has them. All else is passed on.

    Args:
        model: as for `optimizer`.
        config: a configuration, or the path of a JSON file with one; it stays as it is.
        rest: further arguments of ``deepspeed.initialize``.

    Returns:
        What ``deepspeed.initialize`` returns: engine, optimizer, data loader, scheduler.

    Raises:
        ValueError: the configuration has no optimizer of that type, or ``"zero_force_ds_cpu_optimizer": true`` with
            offload of the optimizer.
        TypeError: "params" has a name that `muonfx.Muon` does not have; the message lists the names.
        ModuleNotFoundError: DeepSpeed is not installed.

    >>> initialize(nn.Linear(2, 2), {"optimizer": {"type": "Adam"}})
    Traceback (most recent call last):
    ValueError: config: its optimizer has the type 'Adam', expected 'muonfx.Muon'; any other is DeepSpeed's own business
    """
    given: dict[str, Any] = dict(config) if isinstance(config, Mapping) else json.loads(Path(config).read_text())
    entry = given.pop("optimizer", {})
    if entry.get("type") != CONFIG_TYPE:
        raise ValueError(
            f"config: its optimizer has the type {entry.get('type')!r}, expected {CONFIG_TYPE!r}; any other is "
            "DeepSpeed's own business"
        )
    given = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **given}
    require_own_step(given)
    made = Muon(model, **entry.get("params", {}))
    import deepspeed

    return deepspeed.initialize(model=model, optimizer=made, config=given, **rest)
