"""Create param groups with all hyperparameters of their transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from muonfx.core.hyperparams import with_hyperparams
from muonfx.core.value import prepared
from muonfx.optimizer.group_numbers import Group, GroupNumbers, fitted, own_copy
from muonfx.optimizer.update_rules import (
    UpdateRule,
    group_hyperparams,
    holders_of,
    label_of,
    pairs_by_rule,
    with_agreed,
)
from muonfx.optimizer.stepping import Stepping
from muonfx.optimizer.unread_keys import NOT_HYPERPARAMS, read_keys, warn_of_unread_keys


def defaults_for_schedulers(groups: Sequence[Group]) -> dict[str, Any]:
    """Return ``optimizer.defaults``, as OneCycleLR needs it: each key with the value of the first group that has it."""
    defaults: dict[str, Any] = {}
    for key in ("lr", "weight_decay", "momentum"):
        for group in groups:
            if key in group:
                defaults[key] = group[key]
                break
    return defaults


def new_groups(stepping: Stepping, entries: Group, pairs: list[tuple[str, Tensor]], *, as_one: bool) -> list[Group]:
    """Return the param groups for named parameters, with ``entries`` and all hyperparameters of their transforms.

    With ``as_one``, they are one group, unless the parameters have different rates and ``entries`` has none. Else they
    are split, so that the same transforms update all parameters of a group.
    """
    pairs_of = pairs_by_rule(pairs, stepping.rules)
    rules = list(pairs_of)
    warn_of_unread_keys(entries, pairs[0][0], rules, stepping.rules)
    if as_one:
        with_common_numbers = with_agreed(rules, entries, stepping.defaults)
        has_one_rate = "lr" in with_common_numbers or len(holders_of(rules).get("lr", ())) < 2
        if has_one_rate:
            return [_complete_group(stepping, rules, with_common_numbers, pairs)]
    groups: list[Group] = []
    all_keys = set[str]().union(*map(read_keys, rules))
    for rule, rule_pairs in pairs_of.items():
        keys_of_others = all_keys - read_keys(rule) - NOT_HYPERPARAMS
        rule_entries = {key: value for key, value in entries.items() if key not in keys_of_others}
        groups.append(_complete_group(stepping, [rule], rule_entries, rule_pairs))
    return groups


def _complete_group(
    stepping: Stepping, rules: Sequence[UpdateRule], entries: Group, pairs: list[tuple[str, Tensor]]
) -> Group:
    """Return a param group of named parameters with all hyperparameters: from ``entries``, else from the transform.

    ``rules`` are the different rules (labels and transforms) of the parameters.
    """
    group: Group = {"label": label_of(rules)}
    for key, value in entries.items():
        group[key] = own_copy(value)
    group["params"] = pairs
    complete_entries(stepping, rules, group)
    return {"label": group["label"], "lr": group["lr"], **group}  # the rate first, as it is what people look for


def complete_entries(stepping: Stepping, rules: Sequence[UpdateRule], group: Group) -> None:
    """Put the hyperparameters that a group lacks into it, from the transform. Raise if a number is out of range."""
    defaults = stepping.defaults
    entries = with_agreed(rules, group, defaults)
    numbers = GroupNumbers(group_hyperparams(rules, entries))
    values = {name: own_copy(value) for name, value in numbers.complete(entries, defaults).items()}
    if any(value is not defaults[name] for name, value in values.items()):
        # A transform checks its numbers when it is prepared.
        prepared(with_hyperparams(stepping.tx, fitted(defaults, values)))
    group.update(numbers.entries(values))
    group.setdefault("lr", 0.0)  # PyTorch's schedulers require it, even if no transform reads it
