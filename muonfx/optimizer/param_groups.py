"""Create param groups, and warn of keys that no transform reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence, Set
from typing import Any

from muonfx.core.checks import warn_caller
from muonfx.optimizer.group_numbers import (
    Group,
    GroupNumbers,
    own_copy,
    require_in_range,
)
from muonfx.optimizer.named_parameters import NamedPairs
from muonfx.optimizer.stepping import Stepping
from muonfx.optimizer.update_rules import (
    UpdateRule,
    common_keys,
    group_hyperparams,
    keys_by_label,
    label_of,
    pairs_by_rule,
    with_common_defaults,
)

NOT_HYPERPARAMS = {"params", "label", "param_names", "lr", "initial_lr"}
"""The keys that a group may have even if they are not hyperparameters of its transforms."""


_SYNONYMS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "beta": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "b1": "betas",
    "b2": "betas",
    "epsilon": "eps",
    "mu": "momentum",
}
"""The names of torch's keys in other libraries."""


_SIMILAR = 0.85
"""From this ratio of `difflib` on, a key is a misspelling: "weight_dacay" has 0.92, "max_momentum" 0.8."""


def intended_hyperparam(key: str, hyperparams: Iterable[str]) -> str | None:
    """Return the hyperparameter that a key of a group is probably meant to be, or None if it is a key of the user's.

    >>> (
    ...     intended_hyperparam("weight_dacay", ["lr", "weight_decay"]),
    ...     intended_hyperparam("lr_scale", ["lr"]),
    ... )
    ('weight_decay', None)
    """
    # Compare last components, because "eps_root" is written for "scale_by_adam.eps_root".
    full_name_of = {name.rpartition(".")[2]: name for name in hyperparams}
    # 1. Another spelling or a synonym.
    plain_key = key.lower().replace("-", "_")
    plain_key = _SYNONYMS.get(plain_key, plain_key)  # "wd" is "weight_decay"
    if plain_key in full_name_of:
        return full_name_of[plain_key]
    # 2. A misspelling.
    close_names = difflib.get_close_matches(plain_key, full_name_of, n=1, cutoff=_SIMILAR)
    return full_name_of[close_names[0]] if close_names else None


_KEYS_OF_OTHERS = frozenset(
    # of Keller Jordan's Muon and torch.optim
    {"use_muon", "ns_steps", "nesterov", "maximize", "amsgrad", "dampening", "adjust_lr_fn"}
    # of Dion
    | {
        "algorithm",
        "adjust_lr",
        "flatten",
        "num_heads",
        "split_sizes",
        "cautious_wd",
        "rank_fraction",
    }
)
"""Keys with which other optimizers change their updates. They have no effect here."""

_ARGUMENTS_OF_MUON = {"adamw_lr": "lr", "adamw_weight_decay": "weight_decay"}
"""Arguments of `Muon` for the parameters of AdamW, and their keys in the groups of these parameters."""


def warn_if_unread(
    key: str, value: Any, name: str, group_keys: Set[str], all_keys: Set[str]
) -> bool:
    """Warn of a key of a param group that looks like a hyperparameter and sets none, such as "weight_dacay".

    Return True if it was reported. Another unknown key is the user's own, such as "lr_scale", and gets no warning.

    Args:
        key: the key.
        value: its value in the group.
        name: a parameter of the group, for the message.
        group_keys: the hyperparameters of the group.
        all_keys: the hyperparameters of all groups.
    """
    problem = _problem_of_key(key, value, group_keys, all_keys)
    if problem is None:
        return False
    warn_caller(f"param_groups: {key!r} in the group of {name!r} is kept, but {problem}")
    return True


def _problem_of_key(key: str, value: Any, group_keys: Set[str], all_keys: Set[str]) -> str | None:
    """Return the end of a warning if a key of a param group looks like a hyperparameter and sets none, else None.

    Args:
        key: the key, such as "weight_dacay".
        value: its value in the group.
        group_keys: the hyperparameters of the group.
        all_keys: the hyperparameters of all groups.

    >>> _problem_of_key("betas", (0.9, 0.95), {"lr", "momentum"}, {"lr", "momentum", "betas"})
    'it is no hyperparameter of the group: the group has lr, momentum'
    """
    if key in group_keys or key in NOT_HYPERPARAMS:
        return None
    # 1. An argument of `Muon`, such as "adamw_lr".
    if key in _ARGUMENTS_OF_MUON:
        return (
            "has no effect, because it is an argument of Muon: make a group of the parameters of AdamW, and "
            f"give it {_ARGUMENTS_OF_MUON[key]!r}"
        )
    # 2. A misspelt hyperparameter of the group.
    group_key = intended_hyperparam(key, group_keys)
    if group_key is not None:
        return f"it is no hyperparameter of the group: did you mean {group_key!r}?"
    # 3. A hyperparameter of other groups, such as "betas" in a group of Muon.
    if intended_hyperparam(key, all_keys) is not None:
        expected = ", ".join(sorted(group_keys)) or "none"
        return f"it is no hyperparameter of the group: the group has {expected}"
    # 4. A key of another optimizer that is switched on, such as "amsgrad": True.
    if key in _KEYS_OF_OTHERS and value:
        return (
            "has no effect: the labels choose the transform of a parameter, and the arguments of the transform choose "
            "its update"
        )
    return None


def defaults_for_schedulers(groups: Sequence[Group]) -> dict[str, Any]:
    """Return ``optimizer.defaults``, as OneCycleLR needs it: each key with the value of the first group that has it.

    >>> defaults_for_schedulers(
    ...     [{"lr": 0.02, "momentum": 0.95}, {"lr": 0.001, "weight_decay": 0.1}]
    ... )
    {'lr': 0.02, 'momentum': 0.95, 'weight_decay': 0.1}
    """
    defaults: dict[str, Any] = {}
    for group in groups:
        for key in ("lr", "weight_decay", "momentum"):
            if key in group:
                defaults.setdefault(key, group[key])
    return defaults


def new_groups(
    stepping: Stepping, entries: Group, pairs: NamedPairs, *, as_one: bool
) -> list[Group]:
    """Return the param groups for named parameters, with all hyperparameters of the transforms that update them.

    For example, parameters of the labels "muon" and "adamw" with ``{"weight_decay": 0.1}`` become two groups: one with
    "lr", "weight_decay" and "momentum", and one with "lr", "weight_decay" and "betas".

    Args:
        stepping: has the transforms of each parameter, and their numbers.
        entries: the entries that the caller has given for the group.
        pairs: the names and the parameters.
        as_one: True for one group, unless the labels have different rates and ``entries`` has none. False to split
            them, so that the same transforms update all parameters of a group.
    """
    # A rule: the transforms of a parameter, and its label.
    pairs_of = pairs_by_rule(pairs, stepping.rules)
    rules = list(pairs_of)
    if as_one:
        common_entries = with_common_defaults(rules, entries, stepping.defaults)
        labels_with_rate = common_keys(rules).get("lr", {})
        # The rate is given, equal for all labels, or of a single label.
        has_one_rate = "lr" in common_entries or len(labels_with_rate) < 2
        if has_one_rate:
            return [_complete_group(stepping, rules, common_entries, pairs)]
    # Otherwise make a group for each rule, with the entries that its transforms read.
    groups: list[Group] = []
    for rule, rule_pairs in pairs_of.items():
        rule_entries = _entries_for(rule, rules, entries)
        groups.append(_complete_group(stepping, [rule], rule_entries, rule_pairs))
    return groups


def _entries_for(rule: UpdateRule, rules: Sequence[UpdateRule], entries: Group) -> Group:
    """Return the entries for the group of one label, from the entries for a group that is split by labels.

    For example, ``{"muon.lr": 0.1, "adamw.lr": 0.2, "momentum": 0.9, "my_key": 1}`` becomes
    ``{"lr": 0.2, "my_key": 1}`` for "adamw". ``rule`` has the label and its hyperparameters, and ``rules`` those of all
    labels.
    """
    if len(rules) == 1:  # the group is not split
        return entries
    keys_of_rule = common_keys([rule]).keys()
    # For the label "adamw", "momentum" is such a key.
    keys_of_others = common_keys(rules).keys() - keys_of_rule - NOT_HYPERPARAMS
    left_out = keys_of_others | keys_by_label(rules)  # also "muon.lr" and "adamw.lr"
    entries_of_rule = {key: value for key, value in entries.items() if key not in left_out}
    # A value for this label alone, such as "adamw.lr", replaces a value for all labels.
    for key in keys_of_rule:
        label_key = f"{rule.label}.{key}"
        if label_key in entries:
            entries_of_rule[key] = entries[label_key]
    return entries_of_rule


def _complete_group(
    stepping: Stepping, rules: Sequence[UpdateRule], entries: Group, pairs: NamedPairs
) -> Group:
    """Return a param group of named parameters with all hyperparameters: from ``entries``, else from the transform.

    For example, with the entries ``{"lr": 0.1}``, it is ``{"label": "muon", "lr": 0.1, "params": pairs, "momentum":
    0.95, ...}``.

    Args:
        stepping: has the transform and its numbers.
        rules: the label and the transforms of the parameters; two if they have two labels.
        entries: the numbers of the caller for the group, and other keys of the caller.
        pairs: the names and the parameters.
    """
    # Copies of tensors, because the entries may be used for several groups, which would have a tensor in common.
    group: Group = {key: own_copy(value) for key, value in entries.items()}
    group["params"] = pairs
    complete_entries(stepping, rules, group)
    # "label" and "lr" come first in the dict, where people look for them.
    return {"label": label_of(rules), "lr": group["lr"], **group}


def complete_entries(stepping: Stepping, rules: Sequence[UpdateRule], group: Group) -> None:
    """Add the hyperparameters that a group lacks: ``{"lr": 0.1}`` becomes ``{"lr": 0.1, "momentum": 0.95}``.

    The numbers come from the transform. Raise ValueError if a number in the group is out of range. ``rules`` has the
    transforms that update the group's parameters; two rules if the parameters have two labels, such as "muon" and
    "adamw".

    Transforms have dotted names for their numbers. So the entries, such as "momentum", are converted to numbers by
    dotted name, "muon.momentum.decay", and back.
    """
    # The transform's numbers by dotted name: {"muon.momentum.decay": 0.95}.
    defaults = stepping.defaults
    # The entries have a key such as "weight_decay" if the numbers of all labels are equal.
    entries = with_common_defaults(rules, group, defaults)
    converter = GroupNumbers(group_hyperparams(rules, entries))
    completed = converter.complete(entries, defaults)
    # The copies keep other groups from having the same tensors.
    numbers = {name: own_copy(number) for name, number in completed.items()}
    has_numbers = any(key in group for key in converter.keys)
    if has_numbers:  # else they come from the transform, which has checked them
        require_in_range(stepping.tx, converter.hyperparams, numbers, defaults)
    group.update(converter.entries(numbers))
    group.setdefault("lr", 0.0)  # PyTorch's schedulers require it, even if no transform reads it
