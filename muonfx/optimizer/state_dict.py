"""Checks of a saved ``state_dict`` against an optimizer, and the choice of the tensors to copy from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from muonfx.core import Transform
from muonfx.internal.display import format_list
from muonfx.internal.renaming import Rename
from muonfx.optimizer.group_numbers import BoundGroup, Group
from muonfx.optimizer.local_values import Load, Take, misfit
from muonfx.optimizer.resuming import keys_of_schedules
from muonfx.optimizer.saved_groups import groups_with_names, match_groups

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
    tx: Transform,
    groups: Sequence[BoundGroup],
    state: Mapping[Tensor, Group],
    places: Mapping[tuple[int, str], int],
    take: Take,
    rename: Rename | None,
    not_trained: Set[str],
) -> StateToLoad:
    """Check a saved state dict against an optimizer, and return what to load.

    ``groups`` are the optimizer's groups and ``state`` is ``optimizer.state``. ``not_trained`` are names of parameters
    whose saved state is not needed, because they are frozen now. Raise ValueError with all differences.
    """
    saved_groups = groups_with_names(state_dict, groups, rename or {})
    matched_groups = match_groups(saved_groups, groups, not_trained)
    problems: list[str] = []
    loads: list[Load] = []
    without_state: list[str] = []
    for bound, saved in zip(groups, matched_groups, strict=True):
        # The key of each parameter in state_dict["state"], by name: usually a number. Empty if no parameter was saved.
        index_of: dict[str, Any] = {}
        if saved is not None:
            problems += _missing_hyperparams(tx, bound, saved)
            index_of = dict(zip(saved["param_names"], saved["params"], strict=True))
        for name, param in zip(bound.names, bound.group["params"], strict=True):
            entries = state[param]
            saved_entries = state_dict["state"].get(index_of.get(name))
            if saved_entries is None:
                # torch.distributed.checkpoint.state_dict leaves out parameters that are frozen now.
                if entries and param.requires_grad:
                    without_state.append(name)
                continue
            problems += [f"{name!r} has no {key!r}" for key in entries.keys() - saved_entries.keys()]
            problems += [f"{name!r} has an unexpected {key!r}" for key in saved_entries.keys() - entries.keys()]
            for key in entries.keys() & saved_entries.keys():
                leaf = entries[key]
                value = saved_entries[key]
                if leaf is None and value is None:
                    continue
                place = places[id(param), key]
                local_value = misfit(leaf, value) or take(place, leaf, value)
                if isinstance(local_value, str):
                    problems.append(f"{name!r}: {key!r} {local_value}")
                else:
                    loads.append((f"{key!r} of {name!r}", place, local_value))
    if problems:
        raise _does_not_fit(problems)
    loads.sort(key=lambda load: load[0])  # all ranks load in this order
    return StateToLoad(matched_groups, loads, without_state, _warnings(groups, saved_groups, without_state))


def _missing_hyperparams(tx: Transform, bound: BoundGroup, saved: Group) -> list[str]:
    """Return a line for each hyperparameter that a saved group lacks. Raise if a saved value is not a number."""
    bound.numbers.parse(saved)
    # Only hyperparameters are required: schedulers add other entries, and schedules come from the code.
    from_code = keys_of_schedules(tx, bound)
    missing: list[str] = []
    for hyperparam in bound.numbers.hyperparams:
        if hyperparam.key not in saved and not hyperparam.key.startswith(from_code):
            missing.append(f"missing hyperparameter {hyperparam.key!r}")
    return missing


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
