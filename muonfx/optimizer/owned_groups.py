"""Param groups that belong to a muonfx optimizer: no other optimizer may step on them."""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_owners: WeakSet[Optimizer] = WeakSet()


def own_groups(optimizer: Optimizer) -> None:
    """Make every other optimizer raise if it steps on this optimizer's param groups, unless it wraps this optimizer."""
    _register_refusal()
    _owners.add(optimizer)


class OwnedGroup(dict[str, Any]):
    """A param group (a dict) whose class marks it as created by a muonfx optimizer.

    Another optimizer that steps on it raises, even if the muonfx one is deleted. torch.compile cannot trace the class.
    """


@cache
def _register_refusal() -> None:
    register_optimizer_step_pre_hook(_refuse_exchanged)


def _refuse_exchanged(optimizer: Optimizer, *_: object) -> None:
    """Raise if an optimizer steps on groups of a muonfx optimizer, and neither is one nor has one in an attribute."""
    if torch.compiler.is_compiling() or optimizer in _owners:
        return
    group_ids = {id(group) for owner in _owners for group in owner.param_groups}
    labels: list[str] = []
    for group in optimizer.param_groups:
        if id(group) in group_ids or isinstance(group, OwnedGroup):
            labels.append(repr(group.get("label")))
    if not labels:
        return
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value in _owners:  # a wrapper, which calls our step
            return
    # accelerate replaces an optimizer by DeepSpeedCPUAdam(optimizer.param_groups) when DeepSpeed offloads: the groups
    # still have our labels, but our step never runs.
    raise RuntimeError(
        f"{type(optimizer).__name__} steps on groups of a muonfx optimizer ({', '.join(labels)}), which itself never "
        "steps: an engine has replaced it. If DeepSpeed offloads the optimizer, accelerate and the Trainer do so "
        'unless the configuration has "zero_force_ds_cpu_optimizer": false. To use another optimizer on purpose, '
        "pass plain copies: [dict(group) for group in optimizer.param_groups]"
    )
