"""The numbers that a resumed run takes from a state dict, and those from the code that created the optimizer.

A schedule that has changed in the code comes whole from there: its kind, its numbers and its count of steps. All other
entries of the groups come from the state dict, as in ``torch.optim``. Differences are reported.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

from torch import Tensor

from muonfx.core import Transform
from muonfx.core.chain_differences import CHAINS
from muonfx.core.hyperparams import hyperparams, with_hyperparams
from muonfx.core.schedules import Schedule
from muonfx.core.value import walk
from muonfx.optimizer.group_numbers import (
    Group,
    TrackedGroup,
    fitted,
    own_copies,
    require_in_range,
    tensors_in,
    with_python_numbers,
)

SCHEDULES = "schedules"
"""The key in a saved group with a dict from the name of each schedule to its code with the group's numbers."""

SCHEDULES_IN_CODE = "schedules_in_code"
"""The key in a saved group with a dict from the name of each schedule to the code that created it.

Its numbers differ from the group's numbers if the user wrote others into ``param_groups``.
"""

NUMBERS_IN_CODE = "numbers_in_code"
"""The key in a saved group with the hyperparameters with which the code created the group: ``{"lr": 0.1, ...}``.

The group has others if a scheduler or the user has changed them since.
"""

_NOT_TAKEN = ("params", "param_names", NUMBERS_IN_CODE, SCHEDULES, SCHEDULES_IN_CODE, CHAINS)
"""The keys of a saved group that are not copied into the optimizer's group."""


def schedules_in(tx: Transform) -> dict[str, Schedule]:
    """Return the schedules in a transform by dotted name: ``{"scale_by_learning_rate.learning_rate": cosine(...)}``.

    A schedule may be made from other schedules, such as a warmup and a decay. These parts are left out.
    """
    schedules: dict[str, Schedule] = {}
    # A schedule comes before its parts, whose names begin with its name.
    for name, value in walk(tx):
        is_part = any(name.startswith(f"{outer}.") for outer in schedules)
        if isinstance(value, Schedule) and not is_part:
            schedules[name] = value
    return schedules


def entries_of_code(tx: Transform, tracked: TrackedGroup) -> Group:
    """Return the entries of a saved group from which a load sees whether the code has changed since.

    They are the numbers and the schedules with which the code created the group, and the schedules as they are now.
    """
    numbers_in_code: Group = {}
    for key, value in tracked.numbers.requested_entries.items():
        # Copies, because torch.distributed.checkpoint loads into the tensors of a state dict.
        numbers_in_code[key] = with_python_numbers(own_copies(value))
    entries: Group = {NUMBERS_IN_CODE: numbers_in_code}
    texts = _schedule_texts(tx, tracked)
    if texts:
        entries[SCHEDULES] = texts
        entries[SCHEDULES_IN_CODE] = _texts_in_code(tx, texts)
    return entries


def _texts_in_code(tx: Transform, names: Iterable[str]) -> dict[str, str]:
    """Return the code that created each of the schedules with these dotted names."""
    schedules = schedules_in(tx)
    return {name: repr(schedules[name]) for name in names}


def _schedule_texts(tx: Transform, tracked: TrackedGroup) -> dict[str, str]:
    """Return the code of each schedule of a group with the group's current numbers, by dotted name.

    An example is ``{"scale_by_learning_rate.learning_rate": "cosine(peak=0.1, steps=100)"}``.
    """
    names = schedules_of(tx, tracked)
    if not names:  # the usual case: the rates are numbers, which the following lines need not read
        return {}
    # The numbers of the group, such as the peak, may have changed since construction.
    numbers = fitted(hyperparams(tx), tracked.numbers.read(tracked.group))
    current_schedules = schedules_in(with_hyperparams(tx, numbers))
    return {name: repr(current_schedules[name]) for name in names}


def schedules_of(tx: Transform, tracked: TrackedGroup) -> list[str]:
    """Return the dotted names of the schedules of which a group has numbers.

    For example, the key "scale_by_learning_rate.learning_rate.peak" is a number of the schedule
    "scale_by_learning_rate.learning_rate".
    """
    names: list[str] = []
    for name in schedules_in(tx):
        if any(number.startswith(f"{name}.") for number in tracked.numbers.names):
            names.append(name)
    return names


def _changed_schedules(tx: Transform, tracked: TrackedGroup, saved: Group) -> list[str]:
    """Return the dotted names of a group's schedules that the code created otherwise when the group was saved.

    A schedule whose code was not saved counts as changed.
    """
    saved_texts: Mapping[str, str] = saved.get(SCHEDULES_IN_CODE, {})
    texts = _texts_in_code(tx, schedules_of(tx, tracked))
    return [name for name, text in texts.items() if saved_texts.get(name) != text]


def key_prefixes(tracked: TrackedGroup, schedules: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of the keys that a group has for the numbers of these schedules, such as "scale.rate.".

    The keys of a saved group begin with them, too, even if its schedule was another one with other arguments.

    Args:
        tracked: the group. It may have the key "scale.rate.peak" for the number "muon.scale.rate.peak".
        schedules: the dotted names of the schedules, such as "muon.scale.rate".
    """
    prefixes: list[str] = []
    for schedule in schedules:
        for hyperparam in tracked.numbers.hyperparams:
            name = hyperparam.names[0]  # such as "muon.scale.rate.peak"
            if name.startswith(f"{schedule}."):
                argument = name.removeprefix(f"{schedule}.")  # such as "peak"
                prefixes.append(hyperparam.key.removesuffix(argument))
    return tuple(prefixes)


def entries_to_load(tx: Transform, tracked: TrackedGroup, saved: Group) -> Group:
    """Return copies of the entries of a saved group that a resumed run takes, such as "lr" and keys of the user.

    Numbers of schedules that have changed stay as in the code: a run may be resumed with a longer schedule. Numbers of
    other schedules are taken, because they may have been written into ``param_groups``.
    """
    from_code = key_prefixes(tracked, _changed_schedules(tx, tracked, saved))
    entries: Group = {}
    for key, value in saved.items():
        # False for all if no schedule has changed.
        is_from_code = isinstance(key, str) and key.startswith(from_code)
        if key not in _NOT_TAKEN and not is_from_code:
            entries[key] = value
    return copy.deepcopy(entries)  # no tensor or list in common with the state dict


def require_numbers_to_load(tx: Transform, tracked: TrackedGroup, saved: Group) -> None:
    """Raise unless the entries that a group would load are numbers in range. ``saved`` is its saved group.

    For example, the "lr" of a state dict that was read from YAML may be the text "1e-3".
    """
    entries = entries_to_load(tx, tracked, saved)
    for key, value in entries.items():
        if any(tensor.is_meta for tensor in tensors_in(value)):
            raise ValueError(
                f"nothing was loaded: {key!r} of group {tracked.group.get('label')!r} of the state dict is on the meta "
                "device, expected a tensor with values"
            )
    numbers = tracked.numbers.parse(entries)  # raises if one is no number
    require_in_range(tx, tracked.numbers.hyperparams, numbers, hyperparams(tx))


def differences(tx: Transform, tracked: TrackedGroup, saved: Group) -> list[str]:
    """Return a line for each number of a group that differs between the state dict and the code.

    ``saved`` is the saved group. A line is such as "group 'muon', lr: 0.1 in the file, 0.2 in the code; the file's is
    used". There is no line if the code has not changed: then the saved run has changed the number, as ReduceLROnPlateau
    lowers "lr". A schedule is compared as a whole, by its code. Its numbers are compared one by one only if the state
    dict has no code of schedules.
    """
    return [
        *_differences_of_schedules(tx, tracked, saved),
        *_differences_of_numbers(tx, tracked, saved),
    ]


def _differences_of_schedules(tx: Transform, tracked: TrackedGroup, saved: Group) -> list[str]:
    """Return a line for each schedule that has changed in the code, such as "cosine(peak=0.1, steps=100)".

    A number that the saved run has written into the group, such as another peak, is no change of the code.
    """
    label = tracked.group.get("label")
    saved_texts: Mapping[str, str] = saved.get(SCHEDULES, {})
    texts = _schedule_texts(tx, tracked)
    lines: list[str] = []
    for name in _changed_schedules(tx, tracked, saved):
        if name in saved_texts and saved_texts[name] != texts[name]:
            lines.append(
                _difference(f"group {label!r}, {name}", saved_texts[name], texts[name], "code")
            )
    return lines


def _differences_of_numbers(tx: Transform, tracked: TrackedGroup, saved: Group) -> list[str]:
    """Return a line for each number that has changed in the code, except in schedules whose code was saved.

    Groups of earlier versions were saved without the numbers of the code: there, all numbers that differ are reported.
    """
    label = tracked.group.get("label")
    compared_as_a_whole = key_prefixes(tracked, saved.get(SCHEDULES, {}))
    from_code = key_prefixes(tracked, _changed_schedules(tx, tracked, saved))
    saved_numbers_in_code: Mapping[str, object] = saved.get(NUMBERS_IN_CODE, {})
    lines: list[str] = []
    for key in _comparable_keys(tracked, saved):
        if key.startswith(compared_as_a_whole):
            continue
        file_value = _before_schedulers(key, saved)  # such as "initial_lr" for "lr"
        code_value = _before_schedulers(key, tracked.group)
        code_is_unchanged = key in saved_numbers_in_code and _are_close(
            saved_numbers_in_code[key], code_value
        )
        if not code_is_unchanged and not _are_close(file_value, code_value):
            source = "code" if key.startswith(from_code) else "file"
            lines.append(
                _difference(f"group {label!r}, {key}", repr(file_value), repr(code_value), source)
            )
    return lines


def numbers_warning(source: str, lines: Sequence[str]) -> str:
    """Return the warning for the lines of `differences`, which must not be empty.

    ``source`` begins it, such as "load_state_dict: the state dict".
    """
    return (
        f"{source} was saved with other numbers: {first_lines(lines)}. To use the other numbers, write them into "
        "param_groups after loading, and rates also into base_lrs of a scheduler, which sets the rates from there"
    )


def _difference(title: str, file_text: str, code_text: str, source: str) -> str:
    """Return a line for a number that differs. ``source``, "file" or "code", is the one whose number is used."""
    return f"{title}: {file_text} in the file, {code_text} in the code; the {source}'s is used"


def _comparable_keys(tracked: TrackedGroup, saved: Group) -> list[str]:
    """Return the hyperparameters, such as "lr", to compare between a group and the saved group ``saved``.

    A key is left out if only one of them has it, if it repeats another key, or if a scheduler changes it at every step,
    so that different values are no mistake.
    """
    keys: list[str] = []
    for key in tracked.numbers.keys:
        # "momentum" is a mirror of the first of "betas"
        if key not in saved or key in tracked.numbers.mirrors:
            continue
        if not _is_cycled(key, tracked.group, saved):
            keys.append(key)
    return keys


def _is_cycled(key: str, group: Group, saved: Group) -> bool:
    """Return True if OneCycleLR or CyclicLR changes this entry, "momentum" or "betas", at every step.

    These schedulers add the key "base_momentum" or "max_momentum" to each group.
    """
    all_keys = group.keys() | saved.keys()
    return key in ("momentum", "betas") and not all_keys.isdisjoint(
        ["base_momentum", "max_momentum"]
    )


def _before_schedulers(key: str, group: Group) -> object:
    """Return an entry of a group as it was before torch's schedulers changed it; they keep it as "initial_lr"."""
    if key == "lr":
        return group.get("initial_lr", group["lr"])
    return group[key]


def _are_close(first: object, second: object) -> bool:
    """Return True if two values of a group are equal, or are numbers that differ by rounding only.

    Tuples such as ``(0.9, 0.95)`` are compared number by number. A list may stand for a tuple, as in files of JSON.
    Another value, such as None, may be in "initial_lr", which is not checked before.

    >>> _are_close(0.1, 0.1 + 1e-9), _are_close((0.9, 0.95), [0.9, 0.95]), _are_close(0.1, None)
    (True, True, False)
    """
    first = _python_value(first)
    second = _python_value(second)
    if isinstance(first, Real) and isinstance(second, Real):
        return math.isclose(first, second, rel_tol=1e-6)  # a float32 has about seven digits
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_are_close, first, second))
    return first == second


def _python_value(value: object) -> object:
    """Return the number in a tensor of one element, and a list for a tuple or for another tensor, as a table of rates.

    >>> (
    ...     _python_value(torch.tensor([0.5])),
    ...     _python_value(torch.tensor([0.5, 0.25])),
    ...     _python_value((0.9, 0.95)),
    ... )
    (0.5, [0.5, 0.25], [0.9, 0.95])
    """
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, tuple):
        return list(value)
    return value


def first_lines(lines: Sequence[str], limit: int = 10) -> str:
    """Join the first lines of a message, with a count of the others: "a; b; and 3 more" for a limit of 2."""
    shown = list(lines[:limit])
    if len(lines) > limit:
        shown.append(f"and {len(lines) - limit} more")
    return "; ".join(shown)
