"""Construct Muon as the client optimizer of DeepSpeed, the optimizer that a script passes to ``initialize``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from muonfx.core import Transform
from muonfx.engines.deepspeed.flat_params import trained_parameters
from muonfx.engines.deepspeed.optimizer import ZeroOptimizer
from muonfx.engines.deepspeed.rates import require_rates_by_group
from muonfx.engines.parts import with_parts
from muonfx.optimizer import muon

CONFIG_TYPE = "muonfx.Muon"
"""The "type" of the optimizer in a configuration that `initialize` accepts."""


def optimizer(model: nn.Module, tx: Transform) -> ZeroOptimizer:
    """Return an optimizer that applies a transform, for ``deepspeed.initialize(model=model, optimizer=...)``.

    The configuration of DeepSpeed must contain ``"zero_allow_untested_optimizer": true`` and, if the optimizer is
    offloaded, ``"zero_force_ds_cpu_optimizer": false``. Stage, precision, accumulation, clipping, schedulers,
    sub-groups and ``zero.Init`` are configured as for any other optimizer.

    Args:
        model: the model that DeepSpeed gets; it may be made under ``deepspeed.zero.Init``. Its parameters that require
            grad are trained.
        tx: the transform. It must not read the whole tree, as `clip_by_global_norm` does, because DeepSpeed steps one
            flat tensor at a time; DeepSpeed clips gradients itself. It must not require an extra argument, as
            `reduce_on_plateau` does, because DeepSpeed passes none.

    Returns:
        The optimizer, with one parameter group for each label, such as "muon" and "adamw".

    Raises:
        TypeError: ``model`` is not a module, or ``tx`` is not a transform.
        ValueError: ``tx`` reads the whole tree or requires an extra argument, or a parameter that requires grad has no
            label (the name of its group); the message names the parameter.

    >>> import muonfx as mfx
    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    >>> made = optimizer(model, mfx.muon_with_adamw(1e-3, 4e-3, labels=mfx.default_labels(model)))
    >>> [(group["label"], group["lr"]) for group in made.param_groups]
    [('muon', 0.001), ('adamw', 0.004)]
    """
    return ZeroOptimizer(model, tx)


def Muon(model: nn.Module, lr: float = 2e-3, **options: Any) -> ZeroOptimizer:
    """Return an optimizer for ``deepspeed.initialize``: Muon for hidden matrices, AdamW for the other parameters.

    Args:
        model: as for `optimizer`.
        lr: the learning rate of Muon.
        options: further arguments of `muonfx.Muon` that define the update, not the layout or the use of memory. Values
            read from a JSON file are accepted; see `muonfx.engines.parts`.

    Raises:
        TypeError, ValueError: an argument is not valid; see `optimizer` and `muonfx.Muon`.

    >>> [
    ...     group["label"]
    ...     for group in Muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).param_groups
    ... ]
    ['muon', 'adamw']
    """
    # Frozen parameters are left out. ``model`` is passed as well, for the types of modules.
    trained = trained_parameters(model)
    return ZeroOptimizer(
        model, muon.Muon.transform_for(trained, lr, model=model, **with_parts(options))
    )


def require_own_step(config: Mapping[str, Any]) -> None:
    """Raise if DeepSpeed, under this configuration, would replace the optimizer that is passed to it.

    It does so for ``{"optimizer": {"type": "Adam"}}``, and for an optimizer that is offloaded to the CPU, unless
    ``"zero_force_ds_cpu_optimizer"`` is false.
    """
    # 1. An optimizer in the configuration.
    if "optimizer" in config:
        raise ValueError(
            f'DeepSpeed\'s config: found an "optimizer" of the type {config["optimizer"].get("type")!r}, which would '
            'step in place of Muon: leave "optimizer" out of the config'
        )
    # 2. Offload, for which DeepSpeed has its own Adam.
    offload_config = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    device = offload_config.get("device", "none")
    is_offloaded = device not in (None, "none")
    is_forced = config.get("zero_force_ds_cpu_optimizer", True)
    if is_offloaded and is_forced:
        raise ValueError(
            f'DeepSpeed\'s config: found "offload_optimizer" with the device {device!r} and '
            f'"zero_force_ds_cpu_optimizer" true (its default), so that DeepSpeedCPUAdam would step in place of Muon: '
            'write "zero_force_ds_cpu_optimizer": false into the config'
        )


def initialize(
    model: nn.Module, config: Mapping[str, Any] | str | Path, **more: Any
) -> tuple[Any, ...]:
    """Call ``deepspeed.initialize`` with a configuration whose optimizer is Muon.

    DeepSpeed accepts by name only its own optimizers and those of torch. This function removes the entry
    ``"optimizer": {"type": "muonfx.Muon", "params": {...}}`` from a copy of the configuration, makes the optimizer with
    `Muon`, and passes it to DeepSpeed. "params" contains arguments of `muonfx.Muon`. The two options that such an
    optimizer requires (see `optimizer`) are set unless the configuration has them.

    Args:
        model: as for `optimizer`.
        config: a configuration, which is not modified, or the path of a JSON file.
        more: further arguments of ``deepspeed.initialize``.

    Returns:
        The result of ``deepspeed.initialize``: engine, optimizer, data loader, scheduler.

    Raises:
        ValueError: the optimizer in the configuration has another type, or the optimizer is offloaded and
            ``"zero_force_ds_cpu_optimizer"`` is true, or the scheduler has one rate for groups with different rates.
        TypeError: "params" has an argument that `muonfx.Muon` does not have; the message lists its arguments.
        ModuleNotFoundError: DeepSpeed is not installed.

    >>> initialize(nn.Linear(2, 2), {"optimizer": {"type": "Adam"}})
    Traceback (most recent call last):
    ValueError: config: its optimizer has the type 'Adam', expected 'muonfx.Muon'; for others call deepspeed.initialize
    """
    if not isinstance(config, Mapping):  # the path of a file: the same call with its contents
        return initialize(model, json.loads(Path(config).read_text()), **more)
    # 1. The entry "optimizer" is for this function; DeepSpeed gets the other entries.
    options: dict[str, Any] = dict(config)
    entry: dict[str, Any] = options.pop("optimizer", {})
    if entry.get("type") != CONFIG_TYPE:
        raise ValueError(
            f"config: its optimizer has the type {entry.get('type')!r}, expected {CONFIG_TYPE!r}; for others "
            "call deepspeed.initialize"
        )
    # 2. DeepSpeed must accept an optimizer that it does not know, and must not replace it by its own Adam.
    options.setdefault("zero_allow_untested_optimizer", True)
    options.setdefault("zero_force_ds_cpu_optimizer", False)
    require_own_step(options)
    # 3. The optimizer. A wrong argument raises here, before DeepSpeed starts.
    muon_optimizer = Muon(model, **entry.get("params", {}))
    require_rates_by_group(options, muon_optimizer.param_groups)
    import deepspeed

    return deepspeed.initialize(model=model, optimizer=muon_optimizer, config=options, **more)
