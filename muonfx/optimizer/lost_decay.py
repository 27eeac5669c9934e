"""A warning of weight decay that rounding to bfloat16 or float16 removes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from muonfx.core import Transform
from muonfx.core.checks import warn_caller
from muonfx.optimizer.group_numbers import TrackedGroup
from muonfx.optimizer.named_parameters import NamedTensors
from muonfx.optimizer.resuming import schedules_in, schedules_of
from muonfx.optimizer.stepping import Stepping
from muonfx.transforms.average import master_params

_COUNTS = (0, *[2**power for power in range(21)])
"""The steps at which a schedule is evaluated: 0, 1, 2, 4, ..., 2**20. One of them is near the end of any warmup."""


def warn_of_lost_decay(stepping: Stepping, groups: Sequence[TrackedGroup], params: NamedTensors) -> None:
    """Warn if no step of weight decay changes a parameter, because each is below half a unit in its last place.

    A step multiplies a parameter by ``1 - lr * weight_decay``. With lr 0.001 and weight_decay 0.1, this is 0.9999. In
    bfloat16, which has eight significant bits, the product is rounded to the parameter itself.

    Args:
        stepping: has the transform of the optimizer.
        groups: the param groups, which have the rates and decays.
        params: the parameters to check by name. Others in the groups are not checked.
    """
    # 1. Parameters in bfloat16 or float16, without those of which `master_params` decays a float32 copy.
    narrow_names = {name for name, param in params.items() if _is_narrow(param)}
    for visited in stepping.visits:  # each transform with the names of its parameters
        if visited.tx.factory is master_params:
            narrow_names.difference_update(visited.names)
    # 2. Those whose decay is rounded away.
    lost_changes: dict[str, float] = {}  # the relative change by a step that is rounded away: {"weight": 0.0001}
    for tracked in groups:
        names = [name for name in tracked.names if name in narrow_names]
        if not names:  # the rate and the decay of other groups are not read: tensors on the meta device have no values
            continue
        decay = float(tracked.group.get("weight_decay", 0.0))
        if decay == 0.0:
            continue
        # If the change at the largest rate is rounded away, so is the change at every other rate of the schedule.
        change = decay * _largest_rate(stepping.tx, tracked)
        for name in names:
            # A unit in the last place of x is between eps / 2 and eps times x. Less than half a unit is rounded away.
            if 0.0 < change < torch.finfo(params[name].dtype).eps / 4:
                lost_changes[name] = change
    if lost_changes:
        warn_caller(_no_effect(lost_changes, params))


def _is_narrow(param: Tensor) -> bool:
    """Return True for a parameter that is trained in bfloat16 or float16. Those on the meta device have no values."""
    return param.requires_grad and not param.is_meta and param.dtype in (torch.bfloat16, torch.float16)


def _no_effect(lost_changes: Mapping[str, float], params: NamedTensors) -> str:
    """Return the text of a warning of weight decay that rounding removes.

    ``lost_changes`` has the relative change by a step for each parameter that does not change: ``{"weight": 0.0001}``.
    """
    name = next(iter(lost_changes))
    return (
        f"weight decay has no effect on {len(lost_changes)} of {len(params)} parameters, such as {name!r}: a step "
        f"changes it by {max(lost_changes.values()):.2g} of its value, which is rounded away in {params[name].dtype}. "
        "Other updates of this size are lost, too. Load the model in float32 and train with autocast, or wrap the "
        "whole chain, muonfx.master_params(tx), which keeps a float32 copy (muonfx.Muon.transform_for(model, ...) is "
        "Muon's chain)"
    )


def _largest_rate(tx: Transform, tracked: TrackedGroup) -> float:
    """Return the learning rate of a param group, or the largest rate of its schedule; 0.0 without a learning rate.

    A schedule is a function of the step. It is evaluated at the steps ``_COUNTS`` only: 0, 1, 2, 4, ..., 2**20.
    """
    if "lr" in tracked.numbers.keys:  # a number, not a schedule
        return float(tracked.group["lr"])
    schedules = schedules_in(tx)  # by dotted name
    largest = 0.0
    for name in schedules_of(tx, tracked):  # such as "scale_by_learning_rate.learning_rate"
        argument = name.split(".")[-1]
        if argument != "learning_rate":  # a schedule of another number, such as the decay of a momentum
            continue
        for count in _COUNTS:
            largest = max(largest, float(schedules[name](count)))
    return largest
