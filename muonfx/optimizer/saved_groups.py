"""Match the param groups of a state dict to those of an optimizer by parameter names, or raise for another model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from muonfx.internal.display import format_list
from muonfx.internal.renaming import Rename, new_names
from muonfx.internal.wrappers import unwrapped
from muonfx.optimizer.group_numbers import BoundGroup, Group


def groups_with_names(state_dict: Mapping[str, Any], groups: Sequence[BoundGroup], rename: Rename) -> list[Group]:
    """Return the groups of a state dict, in which "param_names" are this optimizer's names of the parameters.

    Names are translated by ``rename``, and the prefixes of wrappers are ignored. Saved groups without names are matched
    by order.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"expected a state dict with 'state' and 'param_groups', found the keys {sorted(state_dict)}")
    saved_groups = _named_by_path(list(state_dict["param_groups"]), groups)
    if not all("param_names" in saved for saved in saved_groups):
        return _named_by_order(saved_groups, groups, rename)
    new_name_of = _new_name_of(saved_groups, groups, rename)
    renamed_groups: list[Group] = []
    for saved in saved_groups:
        names = [new_name_of[name] for name in saved["param_names"]]
        renamed_groups.append({**saved, "param_names": names})
    return renamed_groups


def _named_by_path(saved_groups: list[Group], groups: Sequence[BoundGroup]) -> list[Group]:
    """Take "param_names" from "params", where torch.distributed.checkpoint saves names such as ``"0.weight"``."""
    # These paths are in the order of the loading optimizer, but "param_names" are in the order of the saving optimizer.
    paths = [path for saved in saved_groups for path in saved.get("params", ())]
    if not paths or not all(isinstance(path, str) for path in paths):
        return saved_groups
    plain_names = set(unwrapped(name for bound in groups for name in bound.names).values())
    if plain_names <= set(unwrapped(paths).values()):
        return [{**saved, "param_names": list(saved["params"])} for saved in saved_groups]
    names_per_group = [bound.names for bound in groups]
    saved_names_per_group = [saved.get("param_names", []) for saved in saved_groups]
    is_same_order = saved_names_per_group == names_per_group
    has_same_names = sorted(map(sorted, saved_names_per_group)) == sorted(map(sorted, names_per_group))
    if has_same_names and not is_same_order:
        raise ValueError(
            f"nothing was loaded: the state dict has paths such as {paths[0]!r}, and the optimizer has names such as "
            f"{names_per_group[0][0]!r} in another order: create both optimizers from the model or its "
            "named_parameters()"
        )
    return saved_groups


def _named_by_order(saved_groups: list[Group], groups: Sequence[BoundGroup], rename: Rename) -> list[Group]:
    """Give saved groups without names the names of this optimizer, whose order torchtitan and other engines keep."""
    problem = None
    if rename:
        problem = "rename= needs names"
    elif [len(saved["params"]) for saved in saved_groups] != [len(bound.names) for bound in groups]:
        problem = "its groups have other sizes than this optimizer's"
    if problem is not None:
        raise ValueError(
            f"nothing was loaded: the state dict has no 'param_names' to find parameters by, and {problem}"
        )
    return [{**saved, "param_names": list(bound.names)} for bound, saved in zip(groups, saved_groups, strict=True)]


def _new_name_of(saved_groups: list[Group], groups: Sequence[BoundGroup], rename: Rename) -> dict[str, str]:
    """Return a dict from each saved parameter name to the name that this optimizer has for it."""
    plain_saved_names = unwrapped(name for saved in saved_groups for name in saved["param_names"])
    new_name_of, problems = new_names(plain_saved_names, rename, level=".", what="parameter")
    plain_names = unwrapped(name for bound in groups for name in bound.names)
    wrapped_name_of = {plain_name: name for name, plain_name in plain_names.items()}
    saved_names_of: dict[str, list[str]] = {}
    for saved_name, plain_name in new_name_of.items():
        name = wrapped_name_of.get(plain_name, plain_name)
        new_name_of[saved_name] = name
        saved_names_of.setdefault(name, []).append(saved_name)
    for name, saved_names in saved_names_of.items():
        if len(saved_names) > 1:
            problems.append(f"{' and '.join(map(repr, saved_names))} would both be {name!r}")
    if problems:
        raise ValueError("nothing was loaded: rename: " + "; ".join(problems[:10]))
    return new_name_of


def match_groups(
    saved_groups: Sequence[Group], groups: Sequence[BoundGroup], not_trained: Set[str]
) -> list[Group | None]:
    """Return the saved group of each group of this optimizer, or None if no parameter of the group was saved.

    A parameter that is in the optimizer and was not saved, or that was saved and is not trained now, is ignored.
    """
    names = {name for bound in groups for name in bound.names}
    saved_names = {name for saved in saved_groups for name in saved["param_names"]}
    _require_known(names, saved_names, not_trained)
    common_names = names & saved_names
    saved_with: dict[frozenset[str], Group] = {}  # by those members of the group that this optimizer has, too
    saved_without_names: list[Group] = []  # groups of which this optimizer has no parameter
    for saved in saved_groups:
        members = common_names.intersection(saved["param_names"])
        if members:
            saved_with[frozenset(members)] = saved
        else:
            saved_without_names.append(saved)
    if names == saved_names and len(saved_groups) != len(groups):
        raise ValueError(
            f"nothing was loaded: the state dict has {len(saved_groups)} groups, expected {len(groups)}: create this "
            "optimizer with the groups of the optimizer that was saved"
        )
    matched: list[Group | None] = []
    empty_groups = iter(saved_without_names)
    for bound in groups:
        members = frozenset(common_names.intersection(bound.names))
        if members:
            _require_same_group(members, saved_with)
            matched.append(saved_with[members])
        elif bound.names:  # all of its parameters were frozen when the state was saved
            matched.append(None)
        else:  # an empty group, which has no names to match it by
            matched.append(next(empty_groups, None))
    return matched


def _require_known(names: Set[str], saved_names: Set[str], not_trained: Set[str]) -> None:
    """Raise if a state dict is of another model: it has names that are unknown here, or none that is known."""
    plain_not_trained = set(unwrapped(not_trained).values())
    plain_names = unwrapped(saved_names - names)
    unknown = sorted(name for name, plain_name in plain_names.items() if plain_name not in plain_not_trained)
    has_common_names = not names.isdisjoint(saved_names) or not names or not saved_names
    if unknown or not has_common_names:
        raise _other_model(lacking=sorted(names - saved_names), unknown=unknown)


def _other_model(*, lacking: list[str], unknown: list[str]) -> ValueError:
    """Return an error for a state dict that lacks names of this optimizer, or has names that are unknown here."""
    differences: list[str] = []
    advice = ""
    if lacking:
        differences.append(f"lacks {format_list(lacking)}")
    if unknown:
        differences.append(f"also has {format_list(unknown)}")
    if lacking and unknown:
        advice = "; if only names differ: rename={saved name: name here}"
    return ValueError(
        f"nothing was loaded: the state dict {'; it '.join(differences)}; expected parameters of this optimizer, or of "
        f"its model: load it into an optimizer for the model that was saved{advice}"
    )


def _require_same_group(names: frozenset[str], saved_with: Mapping[frozenset[str], Group]) -> None:
    """Raise if the parameters of one group of this optimizer were in several saved groups, or with others."""
    if names in saved_with:
        return
    name = min(names)
    for saved_names in saved_with:
        if name in saved_names:
            raise _other_groups(name, saved_names, names)


def _other_groups(name: str, saved_names: frozenset[str], names: frozenset[str]) -> ValueError:
    """Return an error for a parameter whose group had the members ``saved_names``, and has ``names`` now."""
    saved_with_name = format_list(sorted(saved_names - {name})) or "no other"
    now_with_name = format_list(sorted(names - {name})) or "no other"
    return ValueError(
        f"nothing was loaded: the state dict has {name!r} in a group with {saved_with_name}, expected with "
        f"{now_with_name}: create this optimizer with the labels and groups of the one that was saved; to change "
        "labels, save transform_state with muonfx.checkpoint and load it with allow_other_chain=True"
    )
