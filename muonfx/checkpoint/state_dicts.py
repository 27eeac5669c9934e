"""The state dict of an optimizer in a checkpoint that ``torch.distributed.checkpoint`` (DCP) has written by `Writer`.

`muonfx.checkpoint.save` and DCP give the same tensor other names. The state dict is under "optimizer" here:

==============================================  ================================
DCP                                             `muonfx.checkpoint.save`
==============================================  ================================
optimizer/state/fc.weight/muon.momentum.trace   muon/momentum/trace/fc.weight
optimizer/state/fc.bias/adamw.adam.count        adamw/adam/count
optimizer/param_groups/0/lr                     param_groups, a list of dicts
==============================================  ================================

A step count is stored once for each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from muonfx.checkpoint.errors import MismatchError
from muonfx.checkpoint.index import Index, Leaf
from muonfx.checkpoint.leaves import GROUPS, name_of, path_of
from muonfx.internal.wrappers import unwrapped

STATE = "state"
"""The key of the state in the state dict of an optimizer."""

_OTHER_WAY = (
    "create the optimizer as it was saved, load it by dcp.load and set_optimizer_state_dict, save it by "
    "mfx.checkpoint.save(path, optimizer), and load that"
)
"""The way to load a state dict that this module does not read."""

KeyPath = tuple[str | int, ...]
"""The keys from the root of a tree to a value in it, such as ``("optimizer", "param_groups", 0, "lr")``."""


def as_saved_optimizer(index: Index, names: Iterable[str], where: str) -> Index:
    """Return the index with the names that `muonfx.checkpoint.save` gives the state and the groups of an optimizer.

    An index without the state dict of an optimizer is returned unchanged. Otherwise the result has the leaves and the
    groups of the optimizer, and nothing else. For example, with a model in the checkpoint, too:

    - the leaf "optimizer/state/fc.weight/muon.trace" becomes "muon/trace/fc.weight";
    - the object "optimizer/param_groups/0/lr" becomes the entry "lr" of the first dict in the object "param_groups";
    - the leaf "model/fc.weight" is left out.

    Args:
        index: the index of the checkpoint.
        names: the names of the leaves of the optimizer to load. With "a.b/trace/fc.weight" among them, the key
            "a.b.trace" in a state dict is the label "a.b" and "trace"; else it is "a", "b" and "trace".
        where: the path of the checkpoint, for messages.

    Raises:
        MismatchError: there are several state dicts, or each key has the name of a parameter, as with
            ``flatten_optimizer_state_dict=True``.
    """
    if GROUPS in index.objects:  # `muonfx.checkpoint.save` has written it
        return index
    path = _path_of_state_dict(index.objects, where)  # such as ("optimizer",)
    if path is None:
        return index
    groups = _groups_below((*path, GROUPS), index.objects)
    # The key of a parameter in the state is its name, or a number for which the groups have the name.
    param_name_of = _take_param_names(groups)
    state: dict[str, Mapping[str, Any]] = {}
    for param_key, entries in _nested_below((*path, STATE), index.leaves).items():
        param_name = param_name_of.get(str(param_key), str(param_key))
        state[param_name] = entries
    return replace(index, leaves=_renamed_leaves(state, names), objects={GROUPS: groups})


def _path_of_state_dict(objects: Collection[str], where: str) -> KeyPath | None:
    """Return the path of the state dict of an optimizer in a checkpoint, such as ("optimizer",), or None without one.

    Raise if there are several. ``objects`` are the names of the values that are no tensors.
    """
    _require_not_flattened(objects, where)
    paths = paths_of_state_dicts(objects)
    if len(paths) > 1:
        texts = ", ".join([repr(name_of(path)) for path in paths])
        raise MismatchError(
            f"{where}: found the state dicts of several optimizers, {texts}, expected one; nothing was loaded: "
            f"{_OTHER_WAY}"
        )
    return paths[0] if paths else None


def _require_not_flattened(objects: Iterable[str], where: str) -> None:
    """Raise if a key is such as "param_groups.fc.weight.lr": nothing shows if the parameter is "fc.weight" or "fc".

    ``objects`` are the names of the values that are no tensors. An ordinary state dict has "param_groups" and the other
    levels as separate keys, as in "optimizer/param_groups/0/lr".
    """
    for name in objects:
        for key in path_of(name):
            if isinstance(key, str) and key.startswith(f"{GROUPS}."):
                raise MismatchError(
                    f"{where}: found the key {key!r} of a state dict that was made with flatten_optimizer_state_dict="
                    f"True, expected one without it; nothing was loaded: {_OTHER_WAY}"
                )


def paths_of_state_dicts(objects: Iterable[str]) -> list[KeyPath]:
    """Find the state dicts of optimizers by their groups: entries such as "optimizer/param_groups/0/lr".

    ``objects`` are the names of the values that are no tensors.

    >>> paths_of_state_dicts(
    ...     ["optimizer/param_groups/0/lr", "optimizer/param_groups/1/lr", "epoch"]
    ... )
    [('optimizer',)]
    """
    paths: dict[KeyPath, None] = {}  # each once, in order
    for name in objects:
        keys = path_of(name)  # ("optimizer", "param_groups", 0, "lr")
        if GROUPS not in keys:
            continue
        position = keys.index(GROUPS)
        # Below "param_groups" are the number of a group and the key of an entry.
        is_entry = len(keys) > position + 2 and isinstance(keys[position + 1], int)
        if is_entry:
            paths[keys[:position]] = None
    return list(paths)


def _groups_below(path: KeyPath, objects: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the param groups whose entries have names below a path, in the order of their numbers.

    >>> _groups_below(("optimizer", "param_groups"), {"optimizer/param_groups/0/lr": 0.1})
    [{'lr': 0.1}]
    """
    group_of_number = _nested_below(path, objects)
    groups: list[dict[str, Any]] = []
    for number in sorted(group_of_number):
        groups.append({str(key): value for key, value in group_of_number[number].items()})
    return groups


def _nested_below(path: KeyPath, values: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the values whose names begin with a path, and have at least two further levels, as nested dicts.

    >>> _nested_below(
    ...     ("optimizer", "param_groups"), {"optimizer/param_groups/0/lr": 0.1, "epoch": 3}
    ... )
    {0: {'lr': 0.1}}
    """
    nested: dict[Any, Any] = {}
    for name, value in values.items():
        value_path = path_of(name)
        # Skip a value that is not below the path, or that is not at least two levels below it.
        if value_path[: len(path)] != path or len(value_path) < len(path) + 2:
            continue
        # In the example, the further levels are 0 and "lr". All but the last are keys of dicts.
        *upper_keys, last_key = value_path[len(path) :]
        level = nested
        for key in upper_keys:
            level = level.setdefault(key, {})
        level[last_key] = value
    return nested


def _take_param_names(groups: list[dict[str, Any]]) -> dict[str, str]:
    """Remove the entry "params" of each group of a state dict, and return the name of each parameter in it.

    "params" has numbers in ``optimizer.state_dict()``, and names in torch's ``get_optimizer_state_dict``. The groups
    keep only "param_names", which is added if it is missing.

    >>> groups = [{"params": [0], "param_names": ["fc.weight"]}, {"params": ["fc.bias"]}]
    >>> _take_param_names(groups)
    {'0': 'fc.weight', 'fc.bias': 'fc.bias'}
    >>> groups
    [{'param_names': ['fc.weight']}, {'param_names': ['fc.bias']}]
    """
    param_name_of: dict[str, str] = {}
    for group in groups:
        params = [str(param) for param in group.pop("params", [])]
        param_names = group.setdefault("param_names", params)
        # Without "params", no number gets a name.
        param_name_of.update(zip(params, param_names, strict=False))
    return param_name_of


def _renamed_leaves(
    state: Mapping[str, Mapping[str, Any]], names: Iterable[str]
) -> dict[str, Leaf]:
    """Give the leaves of a state dict the names of `muonfx.checkpoint.save`.

    ``{"fc.weight": {"muon.momentum.trace": leaf}}`` becomes ``{"muon/momentum/trace/fc.weight": leaf}``.

    Args:
        state: the state of each parameter in the state dict, by the name of the parameter.
        names: the names of the leaves to load.
    """
    if not state:  # an optimizer before its first step
        return {}
    keys_of_all = set.intersection(*map(set, state.values()))  # such as the key of a step count
    # Names to load have no prefixes of wrappers, such as "_orig_mod.".
    plain_name_of = unwrapped(state)
    name_to_load = _names_by_key(names, plain_name_of.values())
    new_leaves: dict[str, Leaf] = {}
    for param_name, entries in state.items():
        for key, leaf in entries.items():
            if not isinstance(leaf, Leaf):  # a dict in the state of another optimizer
                continue
            # 1. A leaf to load, as the state of this parameter or as a step count, which has no parameter.
            name = name_to_load.get((key, plain_name_of[param_name]))
            if name is None:
                name = name_to_load.get((key, None))
            # 2. Another leaf, whose key is divided at each dot, although the dot may be in a label.
            if name is None:
                # A step count is stored for each parameter, and is one leaf here.
                is_step_count = key in keys_of_all and leaf.spec.shape == ()
                name = _name_by_levels(key, None if is_step_count else param_name)
            new_leaves[name] = leaf
    return new_leaves


def _name_by_levels(key: str, param_name: str | None) -> str:
    """Return the name of a leaf from its key in a state dict, of which each part is taken for a level.

    >>> _name_by_levels("muon.0.trace", "fc.weight"), _name_by_levels("muon.count", None)
    ('muon/0/trace/fc.weight', 'muon/count')
    """
    levels: list[str | int] = []
    for level in key.split("."):
        if level.isdecimal():  # an index in a list
            levels.append(int(level))
        else:
            levels.append(level)
    if param_name is not None:  # else it is a step count
        levels.append(param_name)
    return name_of(tuple(levels))


def _names_by_key(
    names: Iterable[str], param_names: Collection[str]
) -> dict[tuple[str, str | None], str]:
    """Return the names of leaves by the two keys under which the state dict of an optimizer has a leaf.

    It has "trace/fc.weight" of a momentum under the parameter "fc.weight", there under the key "trace". A step count,
    which has no parameter, is stored for all parameters, so it is found by its key alone, with None.

    >>> _names_by_key(["trace/fc.weight", "count"], ["fc.weight"])
    {('trace.fc.weight', None): 'trace/fc.weight', ('trace', 'fc.weight'): 'trace/fc.weight', ('count', None): 'count'}
    """
    name_of_key: dict[tuple[str, str | None], str] = {}
    params = set(param_names)
    for name in names:
        levels = [str(level) for level in path_of(name)]
        name_of_key[".".join(levels), None] = name
        # The parameter may be at any level, as in "trace/fc.weight/mean".
        for position, level in enumerate(levels):
            if level in params:
                other_levels = levels[:position] + levels[position + 1 :]
                name_of_key[".".join(other_levels), level] = name
    return name_of_key
