"""Checks of a saved ``state_dict`` against an optimizer, and the choice of the tensors to copy from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from muonfx.core import Transform
from muonfx.internal.display import format_list
from muonfx.internal.renaming import Rename
from muonfx.optimizer.group_numbers import BoundGroup, Group
from muonfx.optimizer.local_values import Load, Misfit, require_fit
from muonfx.optimizer.resuming import keys_of_schedules
from muonfx.optimizer.saved_groups import groups_with_names, match_groups
from muonfx.optimizer.state_entries import StateEntries
from muonfx.optimizer.stepping import Stepping

_LISTED = 20
"""The largest number of differences that an error lists."""


class StateToLoad(NamedTuple):
    """The values to load from a state dict into an optimizer."""

    groups: list[Group | None]
    """For each group of the optimizer, the saved group, or None if no parameter of it was saved."""
    loads: list[Load]
    without_state: list[str]
    """The names of trained parameters of which no state was saved."""
    warnings: list[str]


def read_state_dict(
    state_dict: Mapping[str, Any],
    stepping: Stepping,
    groups: Sequence[BoundGroup],
    entries: StateEntries,
    rename: Rename | None,
    not_trained: Set[str],
) -> StateToLoad:
    """Check a saved state dict against an optimizer, and return what to load. Raise ValueError with all differences.

    Args:
        state_dict: the saved state and groups.
        stepping: converts a saved tensor to the values of this rank.
        groups: the optimizer's groups.
        entries: the tensors that ``optimizer.state`` shows.
        rename: how saved parameter names map to this optimizer's names.
        not_trained: names of parameters whose saved state is not needed, because they are frozen now.
    """
    saved_groups = groups_with_names(state_dict, groups, rename or {})
    matched_groups = match_groups(saved_groups, groups, not_trained)
    problems: list[str] = []
    loads: list[Load] = []
    without_state: list[str] = []
    for bound, saved in zip(groups, matched_groups, strict=True):
        saved_entries_of: dict[str, Group] = {}  # the saved state of each parameter, by name
        if saved is not None:
            problems += _missing_hyperparams(stepping.tx, bound, saved)
            saved_entries_of = _saved_entries(saved, state_dict["state"])
        for name, param in zip(bound.names, bound.group["params"], strict=True):
            if name in saved_entries_of:
                loads_of_param, problems_of_param = _read_entries(name, saved_entries_of[name], entries, stepping)
                loads += loads_of_param
                problems += problems_of_param
            elif entries.indices[name] and param.requires_grad:
                # torch.distributed.checkpoint.state_dict leaves out parameters that are frozen now.
                without_state.append(name)
    if problems:
        raise _does_not_fit(problems)
    loads.sort(key=lambda load: load.title)  # all ranks load in this order
    return StateToLoad(matched_groups, loads, without_state, _warnings(groups, saved_groups, without_state))


def _saved_entries(saved: Group, state: Mapping[Any, Group]) -> dict[str, Group]:
    """Return the saved state of each parameter of a group by name. ``state`` has it by index, usually a number."""
    entries_of: dict[str, Group] = {}
    for name, index in zip(saved["param_names"], saved["params"], strict=True):
        if index in state:
            entries_of[name] = state[index]
    return entries_of


def _read_entries(
    name: str, saved_entries: Group, entries: StateEntries, stepping: Stepping
) -> tuple[list[Load], list[str]]:
    """Return the values to load into the state of a parameter, and a line for each saved entry that does not fit."""
    indices = entries.indices[name]
    loads: list[Load] = []
    problems = [f"{name!r} has no {key!r}" for key in indices.keys() - saved_entries.keys()]
    problems += [f"{name!r} has an unexpected {key!r}" for key in saved_entries.keys() - indices.keys()]
    for key in indices.keys() & saved_entries.keys():
        leaf = entries.shown[indices[key]]
        value = saved_entries[key]
        if leaf is None and value is None:
            continue
        try:
            require_fit(leaf, value)
            local_value = stepping.local_value(indices[key], leaf, value)
        except Misfit as misfit:
            problems.append(f"{name!r}: {key!r} {misfit}")
        else:
            loads.append(Load(f"{key!r} of {name!r}", indices[key], local_value))
    return loads, problems


def _missing_hyperparams(tx: Transform, bound: BoundGroup, saved: Group) -> list[str]:
    """Return a line for each hyperparameter that a saved group lacks. Raise if a saved value is not a number."""
    bound.numbers.parse(saved)
    # Only hyperparameters are required: schedulers add other entries, and schedules come from the code.
    from_code = keys_of_schedules(tx, bound)
    required = [key for key in bound.numbers.keys if not key.startswith(from_code)]
    return [f"missing hyperparameter {key!r}" for key in required if key not in saved]


def _does_not_fit(problems: list[str]) -> ValueError:
    """Return an error that lists the first problems in alphabetical order, and the number of others."""
    shown = sorted(problems)[:_LISTED]
    if len(problems) > _LISTED:
        shown.append(f"and {len(problems) - _LISTED} more")
    return ValueError(
        f"the state does not fit this optimizer, nothing was loaded: {'; '.join(shown)}. Load it into an optimizer for "
        "the same model, with the same transform"
    )


def _warnings(groups: Sequence[BoundGroup], saved_groups: Sequence[Group], without_state: Sequence[str]) -> list[str]:
    """Return a warning if state was saved for parameters that are not trained now, or the other way round."""
    trained = {name for bound in groups for name in bound.names}
    saved_names = [name for saved in saved_groups for name in saved["param_names"]]
    not_loaded = [name for name in saved_names if name not in trained]
    warnings: list[str] = []
    if not_loaded:
        warnings.append(
            f"load_state_dict: the state of {format_list(not_loaded)} was not loaded, because this optimizer does not "
            "train them (frozen, or the label None). To train them again, call add_param_group before load_state_dict"
        )
    if without_state:
        warnings.append(
            f"load_state_dict: found no state of {format_list(without_state)}, as if they were frozen when it was "
            "saved. They keep the state that they have, which in a new optimizer is the initial one"
        )
    return warnings
