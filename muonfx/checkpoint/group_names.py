"""The names of the parameters in the param groups of a checkpoint, after its leaves were renamed by ``rename=``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from muonfx.checkpoint.leaves import plain_names
from muonfx.internal.renaming import Rename, new_names
from muonfx.internal.wrappers import unwrapped

Group = dict[str, Any]


def renamed_groups(
    saved_groups: Sequence[Group],
    leaf_names: Iterable[str],
    rename: Rename | None,
    groups: Sequence[Group],
) -> list[Group]:
    """Return saved param groups with the names that ``rename`` gives to the leaves of their parameters.

    The numbers of a group then stay with the state of its parameters. Prefixes of wrappers are removed.

    Args:
        saved_groups: the groups in the checkpoint.
        leaf_names: the names of all leaves in the checkpoint.
        rename: the argument of `load`, which renames leaves.
        groups: the groups of the optimizer. A parameter that has no new name among theirs keeps its name.

    >>> saved_groups = [{"lr": 0.1, "param_names": ["a"]}, {"lr": 0.2, "param_names": ["b"]}]
    >>> groups = [{"param_names": ["b"]}, {"param_names": ["c"]}]
    >>> renamed_groups(saved_groups, ["trace/a", "trace/b"], {"*/a": "*/b", "*/b": "*/c"}, groups)
    [{'lr': 0.1, 'param_names': ['b']}, {'lr': 0.2, 'param_names': ['c']}]
    """
    new_name_of = new_params(leaf_names, rename or {})
    new_names_of_params = set(new_name_of.values())
    names_of_optimizer = _plain_params_of(groups)
    plain_name_of = unwrapped(
        name for saved_group in saved_groups for name in saved_group["param_names"]
    )
    groups_with_new_names: list[Group] = []
    for saved_group in saved_groups:
        param_names: list[str] = []
        for saved_name in saved_group["param_names"]:
            old_name = plain_name_of[saved_name]
            new_name = new_name_of.get(old_name, old_name)
            # To start its state again, a parameter is renamed to a name that no parameter has. It keeps its old name
            # here, unless ``rename`` gives that name to another parameter.
            starts_again = new_name not in names_of_optimizer
            if starts_again and old_name not in new_names_of_params:
                new_name = old_name
            param_names.append(new_name)
        groups_with_new_names.append({**saved_group, "param_names": param_names})
    return groups_with_new_names


def without_removed_params(saved_groups: Sequence[Group], groups: Sequence[Group]) -> list[Group]:
    """Leave out the saved parameters that an optimizer no longer has, and the groups of which none remains.

    ``saved_groups`` are the parameter groups in a checkpoint, and ``groups`` the groups of the optimizer.

    >>> saved_groups = [{"param_names": ["a", "b"]}, {"param_names": ["c"]}]
    >>> without_removed_params(saved_groups, [{"param_names": ["a", "d"]}])
    [{'param_names': ['a']}]
    """
    params = _plain_params_of(groups)
    # An optimizer has a group without parameters if all are frozen. It may continue any saved group.
    has_empty_group = not all(group["param_names"] for group in groups)
    remaining: list[Group] = []
    for saved_group in saved_groups:
        param_names = [name for name in saved_group["param_names"] if name in params]
        if param_names or has_empty_group:
            remaining.append({**saved_group, "param_names": param_names})
    return remaining


def _plain_params_of(groups: Iterable[Group]) -> set[str]:
    """Return the names of all parameters of param groups, without the prefixes of wrappers."""
    return set(unwrapped(name for group in groups for name in group["param_names"]).values())


def new_params(leaf_names: Iterable[str], rename: Rename) -> Mapping[str, str]:
    """Return the new name of each parameter in a checkpoint, which is the new name of its leaves.

    Param groups have the names of parameters, such as "a", but the patterns of ``rename`` are for leaves, such as
    "adam/mu/a". So the leaves are renamed, and the last level of a new name is the name of the parameter. A parameter
    is left out if its leaves get several names.

    >>> new_params(["adam/mu/a", "adam/nu/a", "adam/mu/b"], {"*/a": "inner/*/x"})
    {'a': 'x', 'b': 'b'}
    """
    plain_name_of = plain_names(leaf_names)
    new_name_of, _ = new_names(plain_name_of, rename)  # `match` reports mistakes in `rename`
    candidates: dict[str, set[str]] = {}
    for leaf_name, new_name in new_name_of.items():
        param = plain_name_of[leaf_name].rpartition("/")[2]
        candidates.setdefault(param, set()).add(new_name.rpartition("/")[2])
    return {param: names.pop() for param, names in candidates.items() if len(names) == 1}
