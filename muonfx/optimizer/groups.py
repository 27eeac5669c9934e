"""Create param groups with all hyperparameters of their transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from muonfx.core import Transform
from muonfx.core.hyperparams import hyperparams, with_hyperparams
from muonfx.optimizer.group_numbers import Group, GroupNumbers, fitted, own_copy
from muonfx.optimizer.routes import (
    Route,
    distinct_routes,
    group_hyperparams,
    holders_of,
    label_of,
    split_by_route,
    with_agreed,
)
from muonfx.optimizer.unread_keys import NOT_HYPERPARAMS, read_keys, warn_of_unread_keys


def defaults_for_schedulers(groups: Sequence[Group]) -> dict[str, Any]:
    """Return ``optimizer.defaults``, as OneCycleLR needs it: each key with the value of the first group that has it."""
    usual = ("lr", "weight_decay", "momentum")
    return {key: group[key] for key in usual for group in reversed(groups) if key in group}


def new_groups(
    tx: Transform, routes: Mapping[str, Route], given: Group, pairs: list[tuple[str, Tensor]], *, as_one: bool
) -> list[Group]:
    """Return the param groups for a list of parameters, with all hyperparameters of their transforms.

    With ``as_one``, the list is one group, unless its parameters have different rates and ``given`` has none. Else
    it is split, so that the same transforms update all parameters of a group.
    """
    parts = split_by_route(pairs, routes)
    members = distinct_routes([name for name, _ in pairs], routes)
    warn_of_unread_keys(given, pairs[0][0], members, routes)
    whole = with_agreed(members, given, hyperparams(tx))
    if as_one and ("lr" in whole or len(holders_of(members).get("lr", ())) < 2):
        return [_complete_group(tx, members, whole, pairs)]
    groups: list[Group] = []
    all_keys = set[str]().union(*map(read_keys, members))
    for part in parts:
        route = routes[part[0][0]]
        of_other_parts = all_keys - read_keys(route) - NOT_HYPERPARAMS
        own_entries = {key: value for key, value in given.items() if key not in of_other_parts}
        groups.append(_complete_group(tx, [route], own_entries, part))
    return groups


def _complete_group(tx: Transform, members: Sequence[Route], given: Group, pairs: list[tuple[str, Tensor]]) -> Group:
    entries = {key: own_copy(value) for key, value in given.items()}
    group = {"label": label_of(members), **entries, "params": pairs}
    complete_entries(tx, members, group)
    return {"label": group["label"], "lr": group["lr"], **group}  # the rate first, as it is what people look for


def complete_entries(tx: Transform, members: Sequence[Route], group: Group) -> None:
    """Put the hyperparameters that a group lacks into it, from the transform. Raise if a number is out of range."""
    defaults = hyperparams(tx)
    whole = with_agreed(members, group, defaults)
    numbers = GroupNumbers(group_hyperparams(members, whole))
    values = {name: own_copy(value) for name, value in numbers.complete(whole, defaults).items()}
    with_hyperparams(tx, fitted(defaults, [values])[0]).prepare_all()
    group.update(numbers.entries(values))
    group.setdefault("lr", 0.0)  # PyTorch's schedulers require it, even if no transform reads it
