"""Match a saved ``state_dict`` to the groups and parameters of an optimizer, and choose the tensors to copy from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, cast

from torch import Tensor

from muonfx.core import Transform
from muonfx.internal.display import format_list
from muonfx.internal.renaming import Rename, new_names
from muonfx.internal.wrappers import unwrapped
from muonfx.optimizer.group_numbers import Group, TrackedGroup
from muonfx.optimizer.local_values import Load, Misfit, require_fit
from muonfx.optimizer.resuming import (
    first_lines,
    key_prefixes,
    require_numbers_to_load,
    schedules_of,
)
from muonfx.optimizer.saved_chains import chain_warning, with_new_names
from muonfx.optimizer.state_entries import StateEntries, StateLeaf
from muonfx.optimizer.stepping import Stepping

SavedGroups = Sequence[Mapping[str, Any]]
"""The groups in a state dict or a checkpoint."""

_IF_CHANGED = (
    "if the chain, labels or layers have changed: muonfx.checkpoint.load_changed(path, optimizer) loads what fits. It "
    "reads a checkpoint; load a file of torch.save into the old optimizer, and save that by muonfx.checkpoint.save"
)
"""Advice for a state dict of an optimizer with another chain, other labels or other layers."""


def groups_with_names(
    saved_groups: SavedGroups, groups: Sequence[TrackedGroup], rename: Rename
) -> list[Group]:
    """Return the groups of a state dict with this optimizer's names of the parameters as "param_names".

    Saved groups without names get the names of this optimizer in their order. ``rename`` is the argument of
    ``load_state_dict``.

    >>> tracked = TrackedGroup(group={}, names=["0.weight"], numbers=None)
    >>> saved = {
    ...     "params": [0],
    ...     "param_names": ["module.0.weight"],
    ... }  # saved under DistributedDataParallel
    >>> groups_with_names([saved], [tracked], rename={})
    [{'params': [0], 'param_names': ['0.weight']}]
    """
    saved_groups = _named_by_path(saved_groups, groups)
    if not all("param_names" in saved for saved in saved_groups):  # as torchtitan saves them
        return _named_by_order(saved_groups, groups, rename)
    new_name_of = _new_name_of(_saved_names_in(saved_groups), groups, rename)
    renamed_groups: list[Group] = []
    for number, saved in enumerate(saved_groups):
        _require_name_for_each(saved, number)
        names = [new_name_of[name] for name in saved["param_names"]]
        # The saved group also has the names of parameters in the record of its chains.
        renamed_groups.append({**with_new_names(saved, new_name_of), "param_names": names})
    return renamed_groups


def _require_name_for_each(saved: Mapping[str, Any], number: int) -> None:
    """Raise ValueError unless a saved group has a name for each parameter. ``number`` is its index, for the message."""
    names = saved["param_names"]
    count = len(saved.get("params", names))  # a checkpoint has only the names
    if count != len(names):
        raise ValueError(
            f"nothing was loaded: group {number} of the state dict has {count} 'params' and {len(names)} "
            "'param_names', expected a name for each parameter: load the state dict as state_dict() returned it"
        )


def _names_in(groups: Iterable[TrackedGroup]) -> list[str]:
    """Return the names of the parameters in all groups of an optimizer."""
    names: list[str] = []
    for tracked in groups:
        names += tracked.names
    return names


def _saved_names_in(saved_groups: SavedGroups) -> list[str]:
    """Return the names of the parameters in all groups of a state dict."""
    names: list[str] = []
    for saved in saved_groups:
        names += saved.get("param_names", ())
    return names


def _named_by_path(saved_groups: SavedGroups, groups: Sequence[TrackedGroup]) -> SavedGroups:
    """Correct the order of "param_names" in saved groups that torch.distributed.checkpoint has loaded.

    It puts names into "params", in the order of this optimizer, and leaves "param_names" in the order of the optimizer
    that saved. Other saved groups have numbers in "params", and are returned unchanged.

    >>> tracked = TrackedGroup(group={}, names=["bias", "weight"], numbers=None)
    >>> _named_by_path(
    ...     [{"params": ["bias", "weight"], "param_names": ["weight", "bias"]}], [tracked]
    ... )
    [{'params': ['bias', 'weight'], 'param_names': ['bias', 'weight']}]
    """
    paths: list[Any] = []
    for saved in saved_groups:
        paths += saved.get("params", ())
    has_paths = bool(paths) and all(isinstance(path, str) for path in paths)
    if not has_paths:  # numbers, as state_dict() returns them
        return saved_groups
    names = _names_in(groups)
    # Compare without the prefixes of wrappers, such as "module." of DistributedDataParallel.
    plain_paths = set(unwrapped(paths).values())
    plain_names = set(unwrapped(names).values())
    if not plain_names <= plain_paths:
        _require_same_order(_saved_names_in(saved_groups), names, paths[0])
        return saved_groups
    named_groups: list[Group] = []
    for saved in saved_groups:
        named_groups.append({**saved, "param_names": list(saved["params"])})
    return named_groups


def _require_same_order(saved_names: Sequence[str], names: Sequence[str], path: str) -> None:
    """Raise ValueError if a loaded state dict has the names of this optimizer, but in another order.

    torch.distributed.checkpoint has loaded the state in the order of this optimizer, and the names in the order of the
    optimizer that saved them. The wrong parameter would get the state.

    Args:
        saved_names: the loaded names, such as ``["w", "b"]``.
        names: the names of the parameters in this optimizer, such as ``["b", "w"]``.
        path: the path of a parameter in the model, such as "layers.0.weight", for the message.
    """
    if saved_names != names and sorted(saved_names) == sorted(names):
        raise ValueError(
            f"nothing was loaded: the state dict has paths such as {path!r}, and the optimizer has names such as "
            f"{names[0]!r} in another order: create both optimizers from the model or its named_parameters()"
        )


def _named_by_order(
    saved_groups: SavedGroups, groups: Sequence[TrackedGroup], rename: Rename
) -> list[Group]:
    """Return saved groups without names, as torchtitan saves them, with the names of this optimizer in their order.

    The first parameter of the first saved group gets the first name of the first group, and so on. Raise ValueError if
    the numbers of parameters differ.
    """
    if rename:
        raise _without_names("rename= needs names")
    saved_sizes = [len(saved["params"]) for saved in saved_groups]
    sizes = [len(tracked.names) for tracked in groups]
    if saved_sizes != sizes:  # only equal sizes suggest that the order is the same
        raise _without_names(
            f"its groups have {saved_sizes} parameters, expected {sizes}, as in this optimizer"
        )
    named_groups: list[Group] = []
    for tracked, saved in zip(groups, saved_groups, strict=True):
        named_groups.append({**saved, "param_names": list(tracked.names)})
    return named_groups


def _without_names(problem: str) -> ValueError:
    """Return an error for a state dict without names of parameters, which the order does not replace."""
    return ValueError(
        f"nothing was loaded: the state dict has no 'param_names' to find parameters by, and {problem}; if another "
        "optimizer saved it, such as AdamW, load the weights only, and start with a new state, or convert its state by "
        "muonfx.checkpoint.convert.read"
    )


def _new_name_of(
    saved_names: Sequence[str], groups: Sequence[TrackedGroup], rename: Rename
) -> dict[str, str]:
    """Return a dict from each saved parameter name to the name that this optimizer has for it.

    For example, "module.0.weight" was saved under DistributedDataParallel, and ``rename`` is ``{"0": "layers.0"}``. The
    name in a compiled model is then "_orig_mod.layers.0.weight". The record of chains in a saved group has names
    without the prefixes of wrappers, so the result has two keys for it: "module.0.weight" and "0.weight".
    """
    # 1. Remove the prefixes of wrappers, then rename.
    plain_name_of = unwrapped(saved_names)  # {"module.0.weight": "0.weight"}
    # ... : "layers.0.weight"
    renamed, problems = new_names(plain_name_of, rename, level=".", what="parameter")
    # 2. Add the prefixes of this optimizer. A parameter that it lacks gets none.
    prefixed_name_of = {
        plain_name: name for name, plain_name in unwrapped(_names_in(groups)).items()
    }
    new_name_of = {
        saved_name: prefixed_name_of.get(name, name) for saved_name, name in renamed.items()
    }
    problems += _collisions(new_name_of)
    if problems:
        raise ValueError("nothing was loaded: rename: " + "; ".join(problems[:10]))
    # 3. Add the names as the record of chains has them.
    new_name_of_plain = {
        plain_name: new_name_of[saved_name] for saved_name, plain_name in plain_name_of.items()
    }
    return {**new_name_of_plain, **new_name_of}


def _collisions(new_name_of: Mapping[str, str]) -> list[str]:
    """Return a line for each saved name that gets the new name of an earlier one: ``{"a": "w", "b": "w"}`` has one."""
    lines: list[str] = []
    first_saved_name_of: dict[str, str] = {}  # by the new name
    for saved_name, name in new_name_of.items():
        if name in first_saved_name_of:
            lines.append(f"{first_saved_name_of[name]!r} and {saved_name!r} would both be {name!r}")
        else:
            first_saved_name_of[name] = saved_name
    return lines


def match_groups(
    saved_groups: Sequence[Group], groups: Sequence[TrackedGroup], not_trained: Set[str]
) -> list[Group | None]:
    """Return the saved group of each group of this optimizer, or None if no parameter of the group was saved.

    For example, the group with the names "w" and "v" has the saved group with these names. The first group without
    parameters has the first saved group of which this optimizer has no parameter, the second one the next, and so on.

    Args:
        saved_groups: the groups of a state dict, with the names of this optimizer as "param_names".
        groups: the groups of this optimizer.
        not_trained: the names of parameters that have no state here, as they are frozen. They may be in saved groups.
    """
    names = set(_names_in(groups))
    saved_names = set(_saved_names_in(saved_groups))
    _require_known(names, saved_names, not_trained)
    if names == saved_names and len(saved_groups) != len(groups):
        raise ValueError(
            f"nothing was loaded: the state dict has {len(saved_groups)} groups, expected {len(groups)}: create this "
            "optimizer with the groups of the optimizer that was saved"
        )
    saved_group_of: dict[str, Group] = {}  # by the name of each parameter
    for saved in saved_groups:
        for name in saved["param_names"]:
            saved_group_of[name] = saved
    saved_for_empty = [saved for saved in saved_groups if names.isdisjoint(saved["param_names"])]
    matched: list[Group | None] = []
    for tracked in groups:
        if tracked.names:
            matched.append(_saved_group_with(tracked.names, saved_group_of, names))
        elif saved_for_empty:
            matched.append(saved_for_empty.pop(0))
        else:
            matched.append(None)
    return matched


def _saved_group_with(
    group_names: Iterable[str], saved_group_of: Mapping[str, Group], names: Set[str]
) -> Group | None:
    """Return the saved group of the parameters with these names; None if all of them were frozen, and so not saved.

    Args:
        group_names: the names of the parameters in a group of this optimizer.
        saved_group_of: the saved group of each saved parameter by name.
        names: the names of all parameters in this optimizer.
    """
    members = saved_group_of.keys() & set(group_names)  # the parameters that both runs train
    if not members:
        return None
    saved = saved_group_of[min(members)]  # any member will do, because the next line compares all
    _require_same_members(members, names & set(saved["param_names"]))
    return saved


def _require_known(names: Set[str], saved_names: Set[str], not_trained: Set[str]) -> None:
    """Raise ValueError if a state dict is of another model: it has names that are unknown here, or none that is known.

    >>> _require_known(
    ...     {"w", "b"}, {"w", "v"}, not_trained={"v"}
    ... )  # the two runs have frozen other parameters
    >>> _require_known({"w", "b"}, {"w", "v"}, not_trained=set())
    Traceback (most recent call last):
    ValueError: nothing was loaded: the state dict lacks 'b'; it also has 'v'; ...

    Args:
        names: the names of the parameters in this optimizer.
        saved_names: the names in the state dict.
        not_trained: the names of other parameters of the model, which were perhaps trained when it was saved.
    """
    # Compare without the prefixes of wrappers, such as "module." of DistributedDataParallel.
    plain_not_trained = set(unwrapped(not_trained).values())
    unknown: list[str] = []
    for name, plain_name in unwrapped(saved_names - names).items():
        if plain_name not in plain_not_trained:
            unknown.append(name)
    can_have_common_names = bool(names) and bool(saved_names)
    has_no_common_name = can_have_common_names and names.isdisjoint(saved_names)
    if unknown or has_no_common_name:
        raise _other_parameters(sorted(names - saved_names), sorted(unknown))


def _other_parameters(lacking: Sequence[str], unknown: Sequence[str]) -> ValueError:
    """Return an error for a state dict that lacks some names of parameters, and has some that are unknown."""
    differences: list[str] = []
    if lacking:
        differences.append(f"lacks {format_list(lacking)}")
    if unknown:
        differences.append(f"also has {format_list(unknown)}")
    return ValueError(
        f"nothing was loaded: the state dict {'; it '.join(differences)}; expected parameters of this optimizer, or of "
        "its model: load it into an optimizer for the model that was saved; if only names differ: rename={saved name: "
        f"name here}}; {_IF_CHANGED}"
    )


def _require_same_members(members: Set[str], saved_members: Set[str]) -> None:
    """Raise ValueError unless a group and its saved group have the same parameters, of those that both runs train.

    Otherwise one of two groups would lose its learning rate: for example, if "w" and "v" were in one group, and each
    has its own now.
    """
    if members == saved_members:
        return
    # The message shows one parameter, with the others in its group.
    name = min(members)
    saved_with_name = format_list(sorted(saved_members - {name})) or "no other"
    now_with_name = format_list(sorted(members - {name})) or "no other"
    raise ValueError(
        f"nothing was loaded: the state dict has {name!r} in a group with {saved_with_name}, expected with "
        f"{now_with_name}: create this optimizer with the labels and groups of the one that was saved; {_IF_CHANGED}"
    )


class StateToLoad(NamedTuple):
    """The values to load from a state dict into an optimizer."""

    groups: Sequence[Group | None]
    """For each group of the optimizer, the saved group, or None if no parameter of it was saved."""
    loads: Sequence[Load]
    """The values to copy into the state, in the order of its leaves."""
    without_state: Sequence[str]
    """The names of trained parameters of which no state was saved."""
    warnings: Sequence[str]


def read_state_dict(
    state_dict: Mapping[str, Any],
    stepping: Stepping,
    groups: Sequence[TrackedGroup],
    entries: StateEntries,
    rename: Rename | None,
    not_trained: Set[str],
) -> StateToLoad:
    """Check a saved state dict against an optimizer, and return what to load. Raise ValueError with all differences.

    Raise TypeError if a part of it has another type, such as None for its "state".

    Args:
        state_dict: the saved state and groups.
        stepping: converts a saved tensor to the values of this rank.
        groups: the optimizer's groups.
        entries: the tensors that ``optimizer.state`` shows.
        rename: how saved parameter names map to this optimizer's names.
        not_trained: names of parameters whose saved state is not needed, because they are frozen now.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"expected a state dict with 'state' and 'param_groups', found the keys {sorted(state_dict)}"
        )
    _require_dicts(state_dict)
    _require_own_keys(state_dict, entries)
    # 1. The saved group of each group.
    saved_groups = groups_with_names(state_dict["param_groups"], groups, rename or {})
    matched_groups = match_groups(saved_groups, groups, not_trained)
    # `problems` has a line for each difference.
    problems = _missing_hyperparams(stepping.tx, groups, matched_groups)
    # 2. The values to copy into the state.
    saved_state_of = _state_by_name(state_dict["state"], saved_groups)
    problems += _other_keys(entries, saved_state_of)
    loads: list[Load] = []
    for leaf in entries.leaves:
        values, misfits = _local_values(leaf, saved_state_of, stepping)
        problems += misfits
        if values:
            value = _first_nonzero(list(values.values()))
            problems += _other_values(leaf, values, value)
            loads.append(Load(leaf.index, value))
    # 3. All differences in one error, before any change; else the warnings.
    _raise_problems(problems)
    without_state = _names_without_state(groups, entries, saved_state_of)
    warnings = _warnings(groups, saved_groups, without_state)
    other_chain = chain_warning("load_state_dict: the state dict", stepping, groups, matched_groups)
    if other_chain is not None:
        warnings.append(other_chain)
    return StateToLoad(matched_groups, loads, without_state, warnings)


def read_groups(
    saved_groups: SavedGroups, tx: Transform, groups: Sequence[TrackedGroup], not_trained: Set[str]
) -> list[Group | None]:
    """Return the saved group of each group of an optimizer; None if no parameter of it was saved.

    Raise ValueError unless a saved group has the parameters and the hyperparameters of its group.

    Args:
        saved_groups: the groups of a state dict or a checkpoint.
        tx: the transform of the optimizer.
        groups: the groups of the optimizer.
        not_trained: the names of other parameters of the model, which may be in saved groups.
    """
    named_groups = groups_with_names(saved_groups, groups, {})  # with the names of this optimizer
    matched_groups = match_groups(named_groups, groups, not_trained)
    _raise_problems(_missing_hyperparams(tx, groups, matched_groups))
    return matched_groups


def _require_dicts(state_dict: Mapping[str, Any]) -> None:
    """Raise TypeError unless the state of a state dict is a dict of dicts, and its groups are dicts with "params".

    >>> _require_dicts({"state": {0: {}}, "param_groups": [{"params": [0]}]})
    >>> _require_dicts({"state": [{}], "param_groups": []})
    Traceback (most recent call last):
    TypeError: nothing was loaded: 'state' of the state dict is of type list, expected a dict: ...
    """
    state = state_dict["state"]
    if not isinstance(state, Mapping):
        raise _other_type("'state'", state, "a dict")
    for key, entries in cast("Mapping[Any, Any]", state).items():
        if not isinstance(entries, Mapping):
            raise _other_type(f"item {key!r} of 'state'", entries, "a dict")
    saved_groups = state_dict["param_groups"]
    if not isinstance(saved_groups, list | tuple):
        raise _other_type("'param_groups'", saved_groups, "a list of dicts")
    for number, saved in enumerate(cast("Sequence[Any]", saved_groups)):
        if not isinstance(saved, Mapping):
            raise _other_type(f"group {number}", saved, "a dict")
        params = cast("Mapping[str, Any]", saved).get("params")
        if not isinstance(params, list | tuple):
            raise _other_type(f"'params' of group {number}", params, "a list")


_KEYS_OF_TORCH = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer"})
"""The keys that optimizers of torch, and others like them, have in the state of a parameter."""

_CONVERTIBLE_KEYS = _KEYS_OF_TORCH | {"step", "max_exp_avg_sq"}
"""The keys that Adam, AdamW and Muon have in the state of a parameter. Others, such as NAdam, have more."""


def _require_own_keys(state_dict: Mapping[str, Any], entries: StateEntries) -> None:
    """Raise ValueError if another optimizer, such as torch.optim.AdamW, has saved a state dict.

    Its state has keys such as "exp_avg", which this optimizer's ``entries`` have not.
    """
    saved_keys: set[str] = set()
    for saved in state_dict["state"].values():
        saved_keys.update(saved)
    own_keys = {leaf.key for leaf in entries.leaves}
    keys_of_another = (saved_keys & _KEYS_OF_TORCH) - own_keys
    if keys_of_another:
        raise _of_another_optimizer(min(keys_of_another), saved_keys, state_dict["param_groups"])


def _of_another_optimizer(key: str, saved_keys: Set[str], saved_groups: SavedGroups) -> ValueError:
    """Return an error for a state dict that has a key such as "exp_avg", with the call that converts it.

    ``saved_keys`` are the keys of all parameters. No converter reads the state of NAdam, which has other keys than
    AdamW, or that of SGD, which has "dampening" in its groups.
    """
    is_of_sgd = any("dampening" in saved for saved in saved_groups)
    if is_of_sgd or not saved_keys <= _CONVERTIBLE_KEYS:
        advice = (
            "muonfx.checkpoint.convert reads no state of this optimizer: load the weights only, and start with a new "
            "state"
        )
    else:
        is_of_keller = any("use_muon" in saved for saved in saved_groups)
        format_name = "keller" if is_of_keller else "torch"
        advice = (
            f"convert it: state = muonfx.checkpoint.convert.read({format_name!r}, state_dict, optimizer.tx, "
            "dict(model.named_parameters()), names=[names of its parameters in their order]), then "
            "optimizer.load_transform_state(state)"
        )
    return ValueError(
        f"nothing was loaded: another optimizer saved the state dict, because its state has {key!r}; {advice}"
    )


def _other_type(part: str, value: object, expected: str) -> TypeError:
    """Return an error for a part of a state dict that has another type than expected."""
    return TypeError(
        f"nothing was loaded: {part} of the state dict is of type {type(value).__name__}, expected {expected}: load "
        "the state dict as state_dict() returned it"
    )


def _state_by_name(state: Mapping[Any, Group], saved_groups: Sequence[Group]) -> dict[str, Group]:
    """Return the "state" of a state dict with the names of the parameters as keys.

    JSON, YAML and safetensors turn the numbers of parameters into texts, so the numbers are compared as texts. Raise
    ValueError for keys that no group has.

    >>> _state_by_name({"0": {"momentum.trace": 0.5}}, [{"params": [0], "param_names": ["bias"]}])
    {'bias': {'momentum.trace': 0.5}}
    """
    name_of: dict[str, str] = {}  # {"0": "bias"}
    for saved in saved_groups:
        for item, name in zip(saved["params"], saved["param_names"], strict=True):
            name_of[str(item)] = name
    state_of: dict[str, Group] = {}
    unknown_keys: list[str] = []
    for key, entries in state.items():
        if str(key) in name_of:
            state_of[name_of[str(key)]] = _with_joined_keys(entries)
        else:
            unknown_keys.append(repr(key))
    if unknown_keys:
        raise ValueError(
            f"nothing was loaded: 'state' of the state dict has the keys {format_list(unknown_keys, str)}, expected "
            "only items of 'params' of its groups: load the state dict as state_dict() returned it"
        )
    return state_of


def _with_joined_keys(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved entries of a parameter, in which the keys of nested dicts are joined by slashes.

    lerobot joins all levels of a state dict by slashes in its files, and divides each key at its slashes in a load.

    >>> _with_joined_keys({"monitor.values.updates": {"norm": 2.0, "rms": 1.0}})
    {'monitor.values.updates/norm': 2.0, 'monitor.values.updates/rms': 1.0}
    """
    joined: dict[str, Any] = {}
    for key, value in entries.items():
        if isinstance(value, dict):
            for inner_key, inner_value in _with_joined_keys(cast("dict[str, Any]", value)).items():
                joined[f"{key}/{inner_key}"] = inner_value
        else:
            joined[key] = value
    return joined


def _other_keys(entries: StateEntries, saved_state_of: Mapping[str, Group]) -> list[str]:
    """Return a line for each key that only one of the state and the saved state has for a parameter.

    A line is such as ``"'bias' has no 'momentum.trace'"``. Parameters of which no state was saved are left out.

    Args:
        entries: the state of the optimizer, as ``optimizer.state`` shows it.
        saved_state_of: the saved state of each parameter by name: ``{"bias": {"momentum.trace": tensor}}``.
    """
    lines: list[str] = []
    for name, leaf_of_key in entries.leaves_of.items():
        if name not in saved_state_of:
            continue
        saved_entries = saved_state_of[name]
        for key in leaf_of_key:
            if key not in saved_entries:
                lines.append(f"{name!r} has no {key!r}")
        for key in saved_entries:
            if key not in leaf_of_key:
                lines.append(f"{name!r} has an unexpected {key!r}")
    return lines


def _local_values(
    leaf: StateLeaf, saved_state_of: Mapping[str, Group], stepping: Stepping
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the saved values of a leaf of the state by parameter name, and a line for each that does not fit.

    A leaf of one parameter has one value. A step count, which all parameters share, was saved for each of them.

    Args:
        leaf: the leaf, with the tensor that ``optimizer.state`` shows for it.
        saved_state_of: the saved state of each parameter by name: ``{"bias": {"momentum.trace": tensor}}``.
        stepping: converts a saved tensor to the values of this rank.
    """
    values: dict[str, Tensor] = {}
    misfits: list[str] = []
    for name, value in leaf.values_in(saved_state_of).items():
        if leaf.shown is None and value is None:  # only another rank has it
            continue
        try:
            require_fit(leaf.shown, value)
            values[name] = stepping.local_value(leaf.index, leaf.shown, value)
        except Misfit as misfit:
            misfits.append(f"{name!r}: {leaf.key!r} {misfit}")
    return values, misfits


def _first_nonzero(values: Sequence[Tensor]) -> Tensor:
    """Return the first value that is not zero, of those that were saved for the parameters that share a leaf.

    A zero is the count of a parameter that was not saved, to which ``set_optimizer_state_dict`` with strict=False and
    ``DefaultLoadPlanner(allow_partial_load=True)`` give the state of a new optimizer.

    >>> _first_nonzero([torch.tensor(0), torch.tensor(3)])
    tensor(3)
    """
    if len(values) > 1:  # the values of other leaves, which may be on a GPU, are not read
        for value in values:
            if value.any():
                return value
    return values[0]


def _other_values(leaf: StateLeaf, values: Mapping[str, Tensor], common_value: Tensor) -> list[str]:
    """Return a line if a value that was saved for a leaf is neither zero nor the one to load, ``common_value``.

    For example, a step count, which all parameters share, is 3 for one parameter and 5 for another. ``values`` are the
    saved values by parameter name.
    """
    for name, value in values.items():
        if value is common_value:
            continue
        is_same = value.eq(common_value) | (value.isnan() & common_value.isnan())
        if value.any() and not is_same.all():
            line = (
                f"{name!r}: {leaf.key!r} is {value.tolist()}, and {common_value.tolist()} for others, but all "
                "parameters share it"
            )
            return [line]
    return []


def _names_without_state(
    groups: Sequence[TrackedGroup], entries: StateEntries, saved_state_of: Mapping[str, Group]
) -> list[str]:
    """Return the names of the trained parameters that have state here, and of which no state was saved."""
    names: list[str] = []
    for tracked in groups:
        for name, param in zip(tracked.names, tracked.group["params"], strict=True):
            has_state = bool(entries.leaves_of[name])  # some transforms have none
            # torch.distributed.checkpoint.state_dict leaves out parameters that are frozen now.
            if has_state and param.requires_grad and name not in saved_state_of:
                names.append(name)
    return names


def _missing_hyperparams(
    tx: Transform, groups: Sequence[TrackedGroup], matched_groups: Sequence[Group | None]
) -> list[str]:
    """Return a line for each hyperparameter that a saved group lacks, such as "betas" if SGD has saved it.

    Raise TypeError or ValueError if a saved value is not a number, or is out of range.
    """
    lines: list[str] = []
    for tracked, saved in zip(groups, matched_groups, strict=True):
        if saved is None:
            continue
        require_numbers_to_load(tx, tracked, saved)
        from_code = key_prefixes(tracked, schedules_of(tx, tracked))
        for key in tracked.numbers.keys:
            # Entries that torch's schedulers add are not required, nor are numbers of schedules: the code has them.
            if key not in saved and not key.startswith(from_code):
                lines.append(
                    f"missing hyperparameter {key!r} of group {tracked.group.get('label')!r}"
                )
    return lines


def _raise_problems(problems: list[str]) -> None:
    """Raise if a state dict has problems; list the first in alphabetical order, and the number of others."""
    if problems:
        raise ValueError(
            f"the state does not fit this optimizer, nothing was loaded: {first_lines(sorted(problems), limit=20)}. "
            f"Load it into an optimizer for the same model, with the same transform; {_IF_CHANGED}"
        )


def _warnings(
    groups: Sequence[TrackedGroup], saved_groups: Sequence[Group], without_state: Sequence[str]
) -> list[str]:
    """Return a warning if state was saved for parameters that are not trained now, or the other way round.

    It is no error, because layers are often frozen or unfrozen between two runs. ``without_state`` are the names of
    trained parameters of which no state was saved.
    """
    trained = set(_names_in(groups))
    not_loaded = [name for name in _saved_names_in(saved_groups) if name not in trained]
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
