"""Warnings of weight decay and of updates that rounding to bfloat16 or float16 removes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from muonfx.core import Transform, chain, partition
from muonfx.core.checks import warn_caller
from muonfx.optimizer.group_numbers import TrackedGroup
from muonfx.optimizer.named_parameters import NamedTensors
from muonfx.optimizer.resuming import schedules_in, schedules_of
from muonfx.optimizer.stepping import Stepping
from muonfx.sharding.shards.dtensors import local_of
from muonfx.transforms import (
    add_decayed_weights,
    clip_by_global_norm,
    momentum,
    orthogonalize,
    scale_by_adam,
    scale_by_learning_rate,
)
from muonfx.transforms.average import master_params
from muonfx.transforms.scale import scale_each

_COUNTS = (0, *[2**power for power in range(21)])
"""The steps at which a schedule is evaluated: 0, 1, 2, 4, ..., 2**20. One of them is near the end of any warmup."""

NARROW_DTYPES = frozenset({torch.bfloat16, torch.float16})
"""The dtypes of parameters in which small changes are rounded away."""

_LARGEST_RMS = 1000.0
"""Parameters have smaller values; memory that was allocated and not yet written may have any."""

_SIZES_KNOWN = (
    partition,
    chain,
    clip_by_global_norm,
    momentum,
    orthogonalize,
    scale_each,
    scale_by_adam,
    add_decayed_weights,
    scale_by_learning_rate,
)
"""The transforms of which `_update_sizes` computes the effect on the size of an update."""

_CURE = (
    "Load the model in float32 and train with autocast, or wrap the whole chain, muonfx.master_params(tx), which keeps "
    "a float32 copy (muonfx.Muon.transform_for(model, ...) is Muon's chain)"
)


class RoundingCheck:
    """Warns if rounding removes the weight decay of parameters in bfloat16 or float16, or else most of their updates.

    Each parameter is checked once.
    """

    def __init__(self) -> None:
        """Create the check. It has checked no parameter yet."""
        self._checked = set[str]()
        """The names of the parameters in bfloat16 or float16 that `check` has checked."""

    def check(
        self, stepping: Stepping, groups: Sequence[TrackedGroup], params: NamedTensors
    ) -> None:
        """Check the parameters in bfloat16 or float16 that no earlier call has checked, and warn of lost updates.

        Args:
            stepping: has the transform of the optimizer.
            groups: the param groups, which have the rates and decays.
            params: the parameters to check by name. Others in the groups are not checked.
        """
        unchecked: dict[str, Tensor] = {}
        for name, param in params.items():
            if param.dtype in NARROW_DTYPES and name not in self._checked and _is_rounded(param):
                unchecked[name] = param
        if not unchecked:
            return
        self._checked.update(unchecked)
        rounded = _without_master_copies(unchecked, stepping)
        # The warning of lost decay says that other updates of this size are lost, too, so that one warning suffices.
        lost_changes = _lost_decays(stepping, groups, rounded)
        if lost_changes:
            warn_caller(_no_effect(lost_changes, params))
            return
        lost_updates = _lost_updates(stepping, groups, rounded)
        lost_size = sum([params[name].numel() for name in lost_updates])
        size = sum([param.numel() for param in rounded.values()])
        if lost_updates and lost_size >= size / 2:  # not norms alone, whose weights are large
            warn_caller(_updates_lost(lost_updates, params))


def _is_rounded(param: Tensor) -> bool:
    """Return True if steps round a parameter: not a frozen one, and none without values, on meta or a fake tensor."""
    return param.requires_grad and not param.is_meta and not isinstance(param, FakeTensor)


def _without_master_copies(params: NamedTensors, stepping: Stepping) -> NamedTensors:
    """Return the parameters of which `master_params` has no float32 copies, by name."""
    without_copies = dict(params)
    for visited in stepping.visits:  # each transform with the names of its parameters
        if visited.tx.factory is master_params:
            for name in visited.param_names:
                without_copies.pop(name, None)
    return without_copies


def _lost_decays(
    stepping: Stepping, groups: Sequence[TrackedGroup], params: NamedTensors
) -> dict[str, float]:
    """Return the parameters in which weight decay is rounded away, each with its relative change by a step.

    A step multiplies a parameter by ``1 - lr * weight_decay``. With lr 0.001 and weight_decay 0.1, this is 0.9999. In
    bfloat16, which has eight significant bits, the product is rounded to the parameter itself. The result is then
    ``{"weight": 0.0001}``.

    Args:
        stepping: has the transform of the optimizer, whose schedules have the rates of groups without "lr".
        groups: the param groups, which have the rates and decays.
        params: the parameters to check by name.
    """
    lost_changes: dict[str, float] = {}
    for tracked in groups:
        names = [name for name in tracked.names if name in params]
        # The rate and the decay of other groups are not read: tensors on the meta device have no values.
        if not names:
            continue
        # Otherwise no transform of the group reads the entry, which the user may have for another purpose.
        if "weight_decay" not in tracked.numbers.keys:
            continue
        decay = float(tracked.group["weight_decay"])
        if decay == 0.0:
            continue
        # If the change at the largest rate is rounded away, so is the change at every other rate of the schedule.
        change = decay * _largest_rate(stepping.tx, tracked)
        for name in names:
            if 0.0 < change < _smallest_change(params[name].dtype):
                lost_changes[name] = change
    return lost_changes


def _lost_updates(
    stepping: Stepping, groups: Sequence[TrackedGroup], params: NamedTensors
) -> dict[str, float]:
    """Return the parameters of which rounding removes most of each update, with the relative size of the update.

    For example, Muon with lr 2e-5 has updates with a root mean square (rms) of 4e-6. Where the weights have an rms of
    0.02, the result is ``{"weight": 0.0002}``: in bfloat16, most elements keep their values.
    """
    # The rms of updates at the rate 1; without those that are unknown.
    size_of = _update_sizes(stepping, params)
    lost_updates: dict[str, float] = {}
    for tracked in groups:
        names = [name for name in tracked.names if name in size_of]
        if not names:
            continue
        rate = _largest_rate(stepping.tx, tracked)
        for name in names:
            rms = _rms(params[name])
            if not 0.0 < rms < _LARGEST_RMS:  # zeros, or memory without values yet
                continue
            change = rate * size_of[name] / rms
            if 0.0 < change < _smallest_change(params[name].dtype):
                lost_updates[name] = change
    return lost_updates


def _update_sizes(stepping: Stepping, params: NamedTensors) -> dict[str, float]:
    """Return the rms of each parameter's update at the learning rate 1, as far as it is known from the transforms.

    For example, ``{"weight": 0.2, "bias": 1.0}``: 0.2 for Muon with "match_rms_adamw", and 1 for Adam, which has at
    most about this size, and usually less.
    """
    size_of: dict[str, float] = {}
    # The names of parameters that a transform of another kind updates, too.
    unknown: set[str] = set()
    # Each transform with the names of its parameters, in the order of the chain.
    for visited in stepping.visits:
        names = [name for name in visited.param_names if name in params]
        if visited.tx.factory not in _SIZES_KNOWN:
            unknown.update(names)
            continue
        for name in names:
            size = _size_after(visited.tx, name, params[name], size_of.get(name))
            if size is not None:
                size_of[name] = size
    return {name: size for name, size in size_of.items() if name not in unknown}


def _size_after(tx: Transform, name: str, param: Tensor, size: float | None) -> float | None:
    """Return the rms (root mean square) of a parameter's update after the transform ``tx``; None if it is not known.

    ``size`` is the rms before the transform, or None. ``tx`` is one of `_SIZES_KNOWN`.

    >>> weight = torch.ones(4, 16)
    >>> (
    ...     _size_after(scale_by_adam(), "weight", weight, None),
    ...     _size_after(orthogonalize(), "weight", weight, None),
    ... )
    (1.0, 0.25)
    """
    if tx.factory is scale_by_adam:
        return 1.0
    is_matrix = param.ndim >= 2 and param.numel() > 0
    if tx.factory is orthogonalize and is_matrix:
        # The rms of an orthogonal matrix. If the parameter has several matrices, they are smaller.
        return 1.0 / max(param.shape[-2:]) ** 0.5
    # This is `scale_by_shape`, which has a factor for each parameter.
    if tx.factory is scale_each and size is not None:
        factor_of: Mapping[str, float] = tx.arguments["factors"]
        return size * factor_of.get(name, 1.0)
    return size  # the others do not change it


def _rms(param: Tensor) -> float:
    """Return the root mean square of a parameter; of a DTensor, of this rank's shard, without communication."""
    local_param = local_of(param.detach())
    if local_param.numel() == 0:
        return 0.0
    norm = torch.linalg.vector_norm(local_param, dtype=torch.float32)
    return float(norm) / local_param.numel() ** 0.5


def _smallest_change(dtype: torch.dtype) -> float:
    """Return a relative change below which every change is rounded away: 2**-9 for bfloat16.

    A unit in the last place of x is between eps / 2 and eps times x. Less than half a unit is rounded away.
    """
    return torch.finfo(dtype).eps / 4


def _no_effect(lost_changes: Mapping[str, float], params: NamedTensors) -> str:
    """Return the text of a warning of weight decay that rounding removes.

    ``lost_changes`` has the relative change by a step for each parameter that does not change: ``{"weight": 0.0001}``.
    """
    name = next(iter(lost_changes))
    return (
        f"weight decay has no effect on {len(lost_changes)} of {len(params)} parameters, such as {name!r}: a step "
        f"changes it by {max(lost_changes.values()):.2g} of its value, which is rounded away in {params[name].dtype}. "
        f"Other updates of this size are lost, too. {_CURE}"
    )


def _updates_lost(lost_updates: Mapping[str, float], params: NamedTensors) -> str:
    """Return the text of a warning of updates that rounding removes, as `_lost_updates` has returned them."""
    name = next(iter(lost_updates))
    return (
        f"most updates have no effect on {len(lost_updates)} of {len(params)} parameters, such as {name!r}: a step "
        f"changes it by about {lost_updates[name]:.2g} of its value, which is rounded away in {params[name].dtype} for "
        f"most elements. {_CURE}"
    )


def _largest_rate(tx: Transform, tracked: TrackedGroup) -> float:
    """Return the current or the first learning rate of a param group, whichever is larger; 0.0 without a rate.

    If the rate is a schedule, return its largest value.

    A schedule is a function of the step in the transform ``tx``. It is evaluated at the steps 0, 1, 2, 4, ..., 2**20.
    """
    if "lr" in tracked.numbers.keys:  # the rate is a number in the group, not a schedule
        first_rate = tracked.numbers.requested_entries.get("lr", 0.0)
        largest = 0.0
        # A scheduler may have begun a warmup at a low rate.
        for rate in (tracked.group["lr"], first_rate):
            is_without_value = isinstance(rate, Tensor) and rate.is_meta
            if not is_without_value:
                largest = max(largest, float(rate))
        return largest
    schedules = schedules_in(tx)  # by dotted name
    largest = 0.0
    # A schedule of this group is "scale_by_learning_rate.learning_rate", for example.
    for name in schedules_of(tx, tracked):
        argument = name.split(".")[-1]
        # A schedule of another number, such as the decay of a momentum.
        if argument != "learning_rate":
            continue
        rate_at = schedules[name]
        for count in _COUNTS:
            largest = max(largest, float(rate_at(count)))
    return largest
