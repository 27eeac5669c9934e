"""The ways to make the client optimizer and to hand it to DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from muonfx.core import Transform
from muonfx.engines.deepspeed.optimizer import ZeroOptimizer
from muonfx.recipes import muon_with_adamw
from muonfx.select import default_labels

__all__ = ["Muon", "initialize", "optimizer"]

CONFIG_TYPE = "muonfx.Muon"
"""The "type" of an optimizer in a configuration that `initialize` takes."""


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
        The optimizer: groups by route as those of `muonfx.TransformOptimizer`, with torch's keys.

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


def Muon(
    model: nn.Module,
    lr: float = 2e-3,
    *,
    weight_decay: float = 0.1,
    adamw_lr: float | None = None,
    rules: Iterable[tuple[Any, str | None]] = (),
    **options: Any,
) -> ZeroOptimizer:
    """Muon for the hidden matrices of a model and AdamW for the rest, as DeepSpeed's client optimizer.

    Args:
        model: as for `optimizer`.
        lr: the learning rate of Muon.
        weight_decay: decoupled, of both.
        adamw_lr: the learning rate of AdamW; None: ``lr``.
        rules: (predicate, label) pairs that come before the default routing, as for `muonfx.Muon`.
        options: further arguments of `muonfx.muon_with_adamw`.

    Raises:
        TypeError, ValueError: as `optimizer` and `muonfx.muon_with_adamw`.

    >>> [group["label"] for group in Muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).param_groups]
    ['muon', 'adamw']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {type(model).__name__}")
    options.setdefault("adamw_weight_decay", weight_decay)
    labels = default_labels(model, list(rules))
    return ZeroOptimizer(model, muon_with_adamw(lr, adamw_lr, weight_decay=weight_decay, labels=labels, **options))


def initialize(model: nn.Module, config: Mapping[str, Any] | str | Path, **rest: Any) -> tuple[Any, ...]:
    """``deepspeed.initialize`` for a configuration whose optimizer is Muon.

    DeepSpeed knows its own optimizers and torch's by name, and no others. Here the entry ``"optimizer": {"type":
    "muonfx.Muon", "params": {...}}`` is taken out and made with `Muon`, and the two options that client optimizers need
    are set where the configuration does not say otherwise. All else is handed on.

    Args:
        model: as for `optimizer`.
        config: a configuration, or the path of a JSON file with one; it stays as it is.
        rest: further arguments of ``deepspeed.initialize``.

    Returns:
        What ``deepspeed.initialize`` returns: engine, optimizer, data loader, scheduler.

    Raises:
        ValueError: the configuration has no optimizer of that type.
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
    import deepspeed

    options = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    made = Muon(model, **entry.get("params", {}))
    return deepspeed.initialize(model=model, optimizer=made, config={**options, **given}, **rest)
