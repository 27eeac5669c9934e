"""Groups that only their own optimizer may step on: an engine that exchanges the optimizer is noticed."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["GroupOwner", "OwnedGroup"]

_owners: WeakSet[Optimizer] = WeakSet()


class OwnedGroup(dict[str, Any]):
    """A group that is known as ours also after its optimizer is gone; torch.compile cannot trace it."""


class GroupOwner(Optimizer):
    """Base of optimizers whose groups no other optimizer may step on.

    accelerate replaces an optimizer by ``DeepSpeedCPUAdam(optimizer.param_groups)`` when DeepSpeed offloads. The groups
    still have our labels then, but our step never runs.

    Raises:
        RuntimeError: at the step of another optimizer with these groups, before anything changes. An optimizer that
            has this one as an attribute wraps it, and may step.
    """

    group_type: ClassVar[type[dict[str, Any]]] = dict
    """`OwnedGroup` if the groups must be known after this optimizer is gone."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        _register()
        _owners.add(self)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, of the type by which it is known."""
        super().add_param_group(self.group_type(param_group))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a copy or a load has, with groups of the type by which they are known."""
        super().__setstate__(state)
        _owners.add(self)
        if "param_groups" in state:
            self.param_groups = [self.group_type(group) for group in self.param_groups]


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_refuse_exchanged)


def _refuse_exchanged(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or isinstance(optimizer, GroupOwner):
        return
    ours = {id(group) for owner in _owners for group in owner.param_groups}
    owned = [group for group in optimizer.param_groups if id(group) in ours or isinstance(group, OwnedGroup)]
    if owned and not any(isinstance(value, GroupOwner) for value in vars(optimizer).values()):
        labels = ", ".join(repr(group.get("label")) for group in owned)
        raise RuntimeError(
            f"{type(optimizer).__name__} steps on groups of a muonfx optimizer ({labels}), which itself never steps: "
            "an engine has exchanged it. If DeepSpeed offloads the optimizer, accelerate and the Trainer do so "
            'unless the configuration has "zero_force_ds_cpu_optimizer": false. To use another optimizer on purpose, '
            "give it plain copies: [dict(group) for group in optimizer.param_groups]"
        )
