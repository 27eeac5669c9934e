"""The numbers that a resumed run takes from a state dict, and those from the code that created the optimizer.

The numbers of schedules come from the code, like their step counts, warmup lengths and kinds. All other entries of the
groups come from the state dict, as in ``torch.optim``. Differences are reported.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

from torch import Tensor

from muonfx.core import Transform
from muonfx.core.hyperparams import hyperparams, with_hyperparams
from muonfx.core.schedules import Schedule
from muonfx.core.value import Recorded, dotted, part_names
from muonfx.optimizer.group_numbers import BoundGroup, Group, Hyperparam, fitted

SCHEDULES = "schedules"
"""The key in a saved group with a dict from the name of each schedule to the code that creates it."""

_NOT_TAKEN = ("params", "param_names", SCHEDULES)
"""The keys of a saved group that are not copied into the optimizer's group."""


def schedules_in(tx: Recorded, prefix: str = "") -> dict[str, Schedule]:
    """Return the schedules in a transform by dotted name, such as "scale_by_learning_rate.learning_rate"."""
    schedules: dict[str, Schedule] = {}
    for name, part in zip(part_names(tx), tx.parts, strict=True):
        if isinstance(part, Schedule):
            schedules[prefix + name] = part
        elif isinstance(part, Recorded):
            schedules |= schedules_in(part, prefix + dotted(name))
    return schedules


def schedule_texts(tx: Transform, bound: BoundGroup) -> dict[str, str]:
    """Return the code of each schedule of a group with the group's current numbers, by dotted name.

    An example is ``{"scale_by_learning_rate.learning_rate": "cosine(peak=0.1, steps=100)"}``.
    """
    names = schedules_of(tx, bound)
    if not names:
        return {}
    numbers = fitted(hyperparams(tx), bound.numbers.read(bound.group))
    current = schedules_in(with_hyperparams(tx, numbers))
    return {name: repr(current[name]) for name in names}


def schedules_of(tx: Transform, bound: BoundGroup) -> list[str]:
    """Return the dotted names of the schedules of which a group has numbers."""
    numbers = bound.numbers.names
    return [name for name in schedules_in(tx) if any(number.startswith(f"{name}.") for number in numbers)]


def keys_of_schedules(tx: Transform, bound: BoundGroup) -> tuple[str, ...]:
    """Return the first levels of the keys of schedules, such as "scale_by_learning_rate.learning_rate.".

    A key that begins with one of them, such as "scale_by_learning_rate.learning_rate.peak", is a schedule's number.
    """
    levels: list[str] = []
    for name in schedules_of(tx, bound):
        for hyperparam in bound.numbers.hyperparams:
            if hyperparam.names[0].startswith(f"{name}."):
                below = hyperparam.names[0].removeprefix(f"{name}.")  # such as "peak"
                levels.append(hyperparam.key.removesuffix(below))
    return tuple(levels)


def entries_to_load(tx: Transform, bound: BoundGroup, saved: Group) -> Group:
    """Return copies of the entries of a saved group that replace those of the optimizer's group."""
    from_code = keys_of_schedules(tx, bound)
    entries = {key: value for key, value in saved.items() if key not in _NOT_TAKEN and not _begins(key, from_code)}
    return copy.deepcopy(entries)


def _begins(key: object, levels: tuple[str, ...]) -> bool:
    return isinstance(key, str) and key.startswith(levels)


def differences(tx: Transform, bound: BoundGroup, saved: Group) -> list[str]:
    """Return a line for each number of a group that differs between the state dict and the code.

    ``saved`` is the saved group. A line is such as "group 'muon', lr: 0.1 in the file, 0.2 in the code; the file's is
    used". A schedule is compared as a whole, by its code. Its numbers are compared one by one only if the state dict
    has no code of schedules.
    """
    lines: list[str] = []
    label = f"group {bound.group.get('label')!r}"
    from_code = keys_of_schedules(tx, bound)
    saved_schedules: Mapping[str, str] = saved.get(SCHEDULES, {})
    for name, code in schedule_texts(tx, bound).items():
        saved_code = saved_schedules.get(name, code)
        if saved_code != code:
            lines.append(f"{label}, {name}: {saved_code} in the file, {code} in the code; the code's is used")
    for hyperparam in bound.numbers.hyperparams:
        key = hyperparam.key
        is_of_schedule = key.startswith(from_code)
        is_compared_above = is_of_schedule and saved_schedules
        if hyperparam.is_mirror or key not in saved or is_compared_above:
            continue
        values = _comparable(hyperparam, bound.group, saved)
        if values is None or _are_close(*values):
            continue
        file_value, code_value = values
        source = "code" if is_of_schedule else "file"
        lines.append(f"{label}, {key}: {file_value!r} in the file, {code_value!r} in the code; the {source}'s is used")
    return lines


def _comparable(hyperparam: Hyperparam, group: Group, saved: Group) -> tuple[object, object] | None:
    """Return the value of a hyperparameter in the file and in the code, as it was before torch's schedulers changed it.

    Return None if that value is unknown, because a scheduler cycles the momentum.
    """
    key = hyperparam.key
    file_value = saved[key]
    code_value = group[key]
    if key == "lr":  # torch's schedulers keep the base rate here
        file_value = saved.get("initial_lr", file_value)
        code_value = group.get("initial_lr", code_value)
    all_keys = group.keys() | saved.keys()
    # OneCycleLR and CyclicLR add these keys, and change "momentum" or "betas" at every step.
    is_cycled = "base_momentum" in all_keys or "max_momentum" in all_keys
    if is_cycled and key in ("momentum", "betas"):
        return None
    return file_value, code_value


def _are_close(first: object, second: object) -> bool:
    """Return True if two values of a group are equal, or are numbers that differ by rounding only."""
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_are_close, first, second))
    if isinstance(first, int | float | Tensor) and isinstance(second, int | float | Tensor):
        return math.isclose(float(first), float(second), rel_tol=1e-6)
    return first == second
