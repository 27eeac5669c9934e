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

from collections import Counter
from collections.abc import Iterable, Mapping
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

Path = tuple[str | int, ...]


def as_saved_optimizer(index: Index, names: Iterable[str], where: str) -> Index:
    """Return the index with the names that `muonfx.checkpoint.save` gives the state and the groups of an optimizer.

    An index without the state dict of an optimizer is returned unchanged. Otherwise the result has nothing else.

    Args:
        index: the index of the checkpoint.
        names: the names of the leaves of the optimizer to load. They decide where a name in a state dict has two
            readings, as for a label with a dot.
        where: the path of the checkpoint, for messages.

    Raises:
        MismatchError: there are several state dicts, or each key has the name of a parameter, as with
            ``flatten_optimizer_state_dict=True``.
    """
    if GROUPS in index.objects:  # `muonfx.checkpoint.save` has written it
        return index
    _require_not_flattened(index.objects, where)
    roots = _roots_of(index.objects)
    if not roots:
        return index
    if len(roots) > 1:
        texts = ", ".join([repr(name_of(root)) for root in roots])
        raise MismatchError(
            f"{where}: found the state dicts of several optimizers, {texts}, expected one; nothing was loaded: "
            f"{_OTHER_WAY}"
        )
    groups_by_number = _nested_below((*roots[0], GROUPS), index.objects)
    groups: list[dict[str, Any]] = []
    for number in sorted(groups_by_number):
        groups.append({str(key): value for key, value in groups_by_number[number].items()})
    state = _nested_below((*roots[0], STATE), index.leaves)
    leaves = _renamed_leaves(state, _names_of_params(groups), names)
    return replace(index, leaves=leaves, objects={GROUPS: groups})


def _require_not_flattened(objects: Iterable[str], where: str) -> None:
    """Raise if a key is such as "param_groups.fc.weight.lr", which may be divided in several ways."""
    for name in objects:
        for key in path_of(name):
            if isinstance(key, str) and key.startswith(f"{GROUPS}."):
                raise MismatchError(
                    f"{where}: found the key {key!r} of a state dict that was made with flatten_optimizer_state_dict="
                    f"True, expected one without it; nothing was loaded: {_OTHER_WAY}"
                )


def has_state_dict(objects: Iterable[str]) -> bool:
    """Return whether one of the values that are no tensors is an entry of a group in a state dict."""
    return bool(_roots_of(objects))


def _roots_of(objects: Iterable[str]) -> list[Path]:
    """Return the paths of the state dicts of optimizers, such as ("optimizer",).

    ``objects`` are the names of the values that are no tensors, such as "optimizer/param_groups/0/lr".
    """
    roots: dict[Path, None] = {}  # each once, in order
    for name in objects:
        path = path_of(name)
        if GROUPS in path:
            position = path.index(GROUPS)
            if len(path) > position + 2 and isinstance(path[position + 1], int):
                roots[path[:position]] = None
    return list(roots)


def _nested_below(path: Path, values: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the values whose names begin with a path, and have at least two further levels, as nested dicts.

    >>> _nested_below(("optimizer", "param_groups"), {"optimizer/param_groups/0/lr": 0.1, "epoch": 3})
    {0: {'lr': 0.1}}
    """
    nested: dict[Any, Any] = {}
    for name, value in values.items():
        value_path = path_of(name)
        if value_path[: len(path)] != path or len(value_path) < len(path) + 2:
            continue
        *upper_keys, last_key = value_path[len(path) :]
        level = nested
        for key in upper_keys:
            level = level.setdefault(key, {})
        level[last_key] = value
    return nested


def _names_of_params(groups: list[dict[str, Any]]) -> dict[str, str]:
    """Return the names that the saved optimizer has for its parameters, by their keys in the state; remove the keys.

    ``get_optimizer_state_dict`` of torch has names of the model as keys, and ``optimizer.state_dict()`` has numbers.

    >>> _names_of_params([{"params": [0, 1], "param_names": ["fc.weight", "fc.bias"]}])
    {'0': 'fc.weight', '1': 'fc.bias'}
    """
    param_name_of: dict[str, str] = {}
    for group in groups:
        keys = [str(key) for key in group.pop("params", [])]
        param_names = group.setdefault("param_names", keys)
        param_name_of.update(zip(keys, param_names, strict=False))  # a key without a name is the name
    return param_name_of


def _renamed_leaves(
    state: Mapping[Any, Mapping[Any, Any]], param_name_of: Mapping[str, str], names: Iterable[str]
) -> dict[str, Leaf]:
    """Return the leaves of a state, such as ``{"fc.weight": {"muon.momentum.trace": leaf}}``, by their new names."""
    entries_of = {param_name_of.get(str(key), str(key)): entries for key, entries in state.items()}
    plain_name_of = unwrapped(entries_of)
    number_of_params = Counter([key for entries in entries_of.values() for key in entries])  # by key
    expected_name_of = _expected_names(names)
    new_leaves: dict[str, Leaf] = {}
    for param_name, entries in entries_of.items():
        plain_name = plain_name_of[param_name]
        for key, leaf in entries.items():
            if not isinstance(leaf, Leaf):  # a dict in the state of another optimizer
                continue
            is_in_all = number_of_params[key] == len(entries_of)
            if (key, plain_name) in expected_name_of:
                new_name = expected_name_of[key, plain_name]
            elif (key, None) in expected_name_of:
                new_name = expected_name_of[key, None]
            elif is_in_all and not leaf.spec.shape:  # a step count
                new_name = name_of(_levels_of_key(key))
            else:
                new_name = name_of((*_levels_of_key(key), param_name))
            new_leaves[new_name] = leaf
    return new_leaves


def _levels_of_key(key: str) -> Path:
    """Return the path in the state of a key of ``optimizer.state``.

    >>> _levels_of_key("muon.0.trace")
    ('muon', 0, 'trace')
    """
    levels: list[str | int] = []
    for level in key.split("."):
        if level.isdecimal():  # an index in a list
            levels.append(int(level))
        else:
            levels.append(level)
    return tuple(levels)


def _expected_names(names: Iterable[str]) -> dict[tuple[str, str | None], str]:
    """Return names of leaves by their keys in a state dict and the names of the parameters, None for a step count.

    Any level of a name may be the parameter: the state of a transform may have a dict for each, as in "trace/w/mean".

    >>> _expected_names(["trace/w"])
    {('trace.w', None): 'trace/w', ('w', 'trace'): 'trace/w', ('trace', 'w'): 'trace/w'}
    """
    expected_name_of: dict[tuple[str, str | None], str] = {}
    for name in names:
        keys = [str(level) for level in path_of(name)]
        expected_name_of[".".join(keys), None] = name
        for position, key in enumerate(keys):
            other_keys = keys[:position] + keys[position + 1 :]
            expected_name_of[".".join(other_keys), key] = name
    return expected_name_of
