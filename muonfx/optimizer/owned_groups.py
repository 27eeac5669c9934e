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
    _register()
    _owners.add(optimizer)


class OwnedGroup(dict[str, Any]):
    """A param group (a dict) whose class marks it as created by a muonfx optimizer.

    Another optimizer that steps on it raises, even if the muonfx one is deleted. torch.compile cannot trace the class.
    """


class GroupOwner(Optimizer):
    """Base class of optimizers whose param groups no other optimizer may step on, except a wrapper of this one."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        own_groups(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, marked so that another optimizer that steps on it raises."""
        super().add_param_group(OwnedGroup(param_group))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer, and mark its param groups as its own."""
        super().__setstate__(state)
        self.param_groups = [OwnedGroup(group) for group in self.param_groups]
        own_groups(self)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_refuse_exchanged)


def _refuse_exchanged(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling() or optimizer in _owners:
        return
    # accelerate replaces an optimizer by DeepSpeedCPUAdam(optimizer.param_groups) when DeepSpeed offloads: the groups
    # still have our labels, but our step never runs.
    ours = {id(group) for owner in _owners for group in owner.param_groups}
    owned = [group for group in optimizer.param_groups if id(group) in ours or isinstance(group, OwnedGroup)]
    if owned and not any(isinstance(value, Optimizer) and value in _owners for value in vars(optimizer).values()):
        labels = ", ".join(repr(group.get("label")) for group in owned)
        raise RuntimeError(
            f"{type(optimizer).__name__} steps on groups of a muonfx optimizer ({labels}), which itself never steps: "
            "an engine has replaced it. If DeepSpeed offloads the optimizer, accelerate and the Trainer do so "
            'unless the configuration has "zero_force_ds_cpu_optimizer": false. To use another optimizer on purpose, '
            "pass plain copies: [dict(group) for group in optimizer.param_groups]"
        )
