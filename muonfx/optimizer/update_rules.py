"""Update rules: the list of transforms that update a parameter, and the hyperparameters of these transforms."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from torch import Tensor

from muonfx.core.checks import warn_caller
from muonfx.core.order import combine_signs
from muonfx.core.visit import OwnNumbers, Visit
from muonfx.optimizer.group_numbers import Group, Hyperparam, Numbers, equal
from muonfx.optimizer.named_parameters import NamedPairs, NamedTensors
from muonfx.placement.placed import needs_matrices


class UpdateRule(NamedTuple):
    """The list of transforms that update a parameter. All parameters of one param group have the same list."""

    indices: tuple[int, ...]
    """The indices of these transforms among all visits of the optimizer's transform."""
    label: str | None
    """The labels by which partitions select the parameter, joined by "/", or None without labels."""
    is_left_out: bool
    """True if a partition gives the parameter the label None, so that it is not trained."""
    hyperparams: tuple[Hyperparam, ...]
    """The hyperparameters of these transforms."""
    has_matrices: bool
    """True if one of these transforms needs whole matrices."""


UpdateRules = Mapping[str, UpdateRule]
"""The update rule of each parameter by name."""


def update_rules_of(visits: Sequence[Visit]) -> dict[str, UpdateRule]:
    """Return the update rule of each parameter by name: the transforms that update it, with their hyperparameters.

    Parameters that the same transforms update have one rule object, and form a param group. ``visits`` has each
    transform within the optimizer's transform, such as `momentum` in a chain, with the names of its parameters.
    """
    # Per parameter name, the indices of its transforms: {"w": [0, 1, 3], "b": [0, 2]}.
    indices_of: dict[str, list[int]] = {}
    for index, visited in enumerate(visits):
        for name in visited.param_names:
            indices_of.setdefault(name, []).append(index)
    rules: dict[str, UpdateRule] = {}
    # Many parameters have the same indices, and so one rule.
    rule_of_indices: dict[tuple[int, ...], UpdateRule] = {}
    for name, index_list in indices_of.items():
        indices = tuple(index_list)
        if indices not in rule_of_indices:
            rule_of_indices[indices] = _update_rule(
                name, indices, [visits[index] for index in indices]
            )
        rules[name] = rule_of_indices[indices]
    return rules


def _update_rule(name: str, indices: tuple[int, ...], visits: Sequence[Visit]) -> UpdateRule:
    """Return the update rule of a parameter: its transforms, its label such as "muon", and the hyperparameters.

    Args:
        name: the name of the parameter.
        indices: the indices of the transforms that update it, among all transforms of the optimizer: ``(0, 1, 3)``.
        visits: these transforms, each with its numbers, and with the label for which a partition calls it, or None.
    """
    labels = [visited.label for visited in visits if visited.label is not None]
    label = None
    # "muon" for a partition; "muon/large" for a partition within the transform of the label "muon"
    if labels:
        label = "/".join(labels)
    is_left_out = any(_leaves_out(visited, name) for visited in visits)
    has_matrices = any(needs_matrices(visited.tx) for visited in visits)
    return UpdateRule(indices, label, is_left_out, tuple(hyperparams_of(visits)), has_matrices)


def _leaves_out(visited: Visit, name: str) -> bool:
    """Return True if a transform is a partition that gives a parameter the label None, so that it is not trained.

    ``visited`` is the visit of the transform. Its ``calls`` are the visits of the transforms that it calls, for example
    those of the labels "muon" and "adamw". A parameter with the label None is given to none of them.
    """
    is_partition = False
    for call in visited.calls:
        if name in call.param_names:  # this inner transform updates the parameter
            return False
        # Only a partition calls transforms by label.
        is_partition = is_partition or call.label is not None
    return is_partition  # a partition that gives the parameter to none of its transforms


def _order_of(rule: UpdateRule) -> tuple[int, bool, tuple[int, ...]]:
    """Return the sort key of the param group of a rule: first Muon's groups, then Adam's, then others.

    Of two groups of one kind, a group with a transform of whole matrices is first.
    """
    has_no_matrices = not rule.has_matrices  # False is less than True
    return (_kind_of_group(rule), has_no_matrices, rule.indices)


def _kind_of_group(rule: UpdateRule) -> int:
    """Return the kind of the group of a rule: 0 for Muon's, 1 for Adam's, 2 for others, 3 without hyperparameters."""
    keys = {hyperparam.key for hyperparam in rule.hyperparams}
    if not keys:
        return 3
    if "betas" in keys:
        return 1
    return 0 if "momentum" in keys else 2


def warn_of_ascent(root: Visit, rules: UpdateRules, params: NamedTensors) -> None:
    """Warn of trained parameters whose updates keep the sign of the gradient, so that a step increases the loss.

    For example, ``chain(momentum())`` lacks ``scale_by_learning_rate(0.1)``, which multiplies by -0.1.

    Args:
        root: the visit of the optimizer's transform, with the visits of the transforms that it calls.
        rules: the transforms of each parameter, by name.
        params: the parameters by name.
    """
    ascending: list[str] = []  # their names
    for pairs in pairs_by_rule(params.items(), rules).values():
        names = [name for name, param in pairs if param.requires_grad]
        if not names:  # all are frozen
            continue
        # The signs of one parameter suffice, because the same transforms update all parameters in `pairs`.
        signs = _signs(root, names[0])
        if 1 in signs:  # the sign of the gradient; -1 is the opposite
            ascending += names
    if ascending:
        warn_caller(
            f"each step would increase the loss: the updates of {len(ascending)} of {len(params)} parameters, such as "
            f"{ascending[0]!r}, have the sign of the gradient. Put scale_by_learning_rate(...) at the end of their "
            'chain. If a transform of your own reverses the sign, declare position="learning_rate" for it'
        )


def _signs(visited: Visit, name: str) -> frozenset[int]:
    """Return the possible signs (1 same, -1 reversed, 0 unknown) of a parameter's update after a transform.

    For example, ``{-1}`` after ``chain(momentum(), scale_by_learning_rate(0.1))``, which multiplies by -0.1.
    """
    inner_signs: list[frozenset[int]] = []
    for call in visited.calls:
        if name in call.param_names:  # the inner transform updates the parameter
            inner_signs.append(_signs(call, name))
    return combine_signs(visited.tx, inner_signs)


def hyperparams_of(visits: Sequence[Visit]) -> list[Hyperparam]:
    """Return the hyperparameters of several transforms, each with a key of its own for a param group.

    The key is the shortest of three names that no other of the transforms has:

    1. the short name, as in torch: "lr"
    2. the name without labels: "scale_by_learning_rate.learning_rate"
    3. the full name: "muon.scale_by_learning_rate.learning_rate"

    ``visits`` has these names for each transform. If two transforms have the short name "lr", neither gets it.
    """
    repeated_short_names = _repeated([visited.numbers.short_names for visited in visits])
    repeated_keys = _repeated([visited.numbers.keys for visited in visits])  # names without labels
    hyperparams: list[Hyperparam] = []
    for visited in visits:
        hyperparams += _hyperparams_of_transform(
            visited.numbers, repeated_short_names, repeated_keys
        )
    return hyperparams


def _repeated(names_of_transforms: Iterable[Iterable[str]]) -> set[str]:
    """Return the names that are there several times, such as the short name "lr" of two transforms."""
    counts = Counter(itertools.chain.from_iterable(names_of_transforms))
    return {name for name, count in counts.items() if count > 1}


def _hyperparams_of_transform(
    numbers: OwnNumbers, repeated_short_names: Set[str], repeated_keys: Set[str]
) -> list[Hyperparam]:
    """Return the hyperparameters of one transform, each with the shortest key that no other transform has.

    For Adam, the short name "betas" sets two numbers: "scale_by_adam.b1" and "scale_by_adam.b2". The short name
    "momentum" sets the first of them again, for schedulers: it is a mirror.

    Args:
        numbers: the names of the transform's hyperparameters.
        repeated_short_names: short names that several transforms have.
        repeated_keys: names without labels that several transforms have.
    """
    hyperparams: list[Hyperparam] = []
    names_with_key: set[str] = set()  # the full names of the numbers that the keys so far set
    # 1. Short names, in their order, because a mirror repeats earlier keys.
    for short_name, name_or_names in numbers.short_names.items():
        if short_name in repeated_short_names:
            continue
        is_tuple = isinstance(name_or_names, tuple)
        full_names = name_or_names if is_tuple else (name_or_names,)
        is_mirror = names_with_key.issuperset(full_names)
        hyperparams.append(Hyperparam(short_name, full_names, is_tuple, is_mirror))
        names_with_key.update(full_names)
    # 2. For all other numbers, the name without labels, or else the full name.
    for full_name, key in zip(numbers.names, numbers.keys, strict=True):
        if full_name not in names_with_key:
            unique_key = full_name if key in repeated_keys else key
            hyperparams.append(Hyperparam(unique_key, (full_name,)))
    return hyperparams


def pairs_by_rule(
    pairs: Iterable[tuple[str, Tensor]], rules: UpdateRules
) -> dict[UpdateRule, NamedPairs]:
    """Divide (name, tensor) pairs by rule, in the order of groups: Muon's, Adam's, then others."""
    pairs_of: dict[UpdateRule, NamedPairs] = {}
    for name, param in pairs:
        pairs_of.setdefault(rules[name], []).append((name, param))
    return {rule: pairs_of[rule] for rule in sorted(pairs_of, key=_order_of)}


def distinct_rules(names: Iterable[str], rules: UpdateRules) -> list[UpdateRule]:
    """Return each rule of the named parameters once, in the order of groups: Muon's, Adam's, then others."""
    return sorted({rules[name] for name in names}, key=_order_of)


def group_hyperparams(rules: Sequence[UpdateRule], group: Group) -> tuple[Hyperparam, ...]:
    """Return the hyperparameters of a param group, which may have parameters of several labels, each with its rule.

    For the labels "muon" and "adamw", one key "weight_decay" sets the decay of both if the group has this key. It also
    suffices if they have the transform in common. Otherwise the keys are "muon.weight_decay" and "adamw.weight_decay".
    """
    if len(rules) == 1:  # usually
        return rules[0].hyperparams
    hyperparams: list[Hyperparam] = []
    for key, hyperparam_of_label_key in common_keys(rules).items():
        # For "weight_decay": {"muon.weight_decay": decay_of_muon, "adamw.weight_decay": decay_of_adamw}. A transform
        # that rules have in common counts once.
        hyperparams_of_key = list(dict.fromkeys(hyperparam_of_label_key.values()))
        is_one_transform = len(hyperparams_of_key) == 1
        has_common_value = key in group and _have_one_form(hyperparams_of_key)
        if is_one_transform or has_common_value:
            hyperparams += hyperparams_of_key  # "weight_decay" sets them all
            continue
        for label_key, hyperparam in hyperparam_of_label_key.items():
            hyperparams.append(hyperparam._replace(key=label_key))
    return tuple(hyperparams)


def _have_one_form(hyperparams: Iterable[Hyperparam]) -> bool:
    """Return True if one value can set all of these hyperparameters: a number, or a tuple of one length."""
    forms = {(hyperparam.is_tuple, len(hyperparam.names)) for hyperparam in hyperparams}
    return len(forms) == 1


def keys_by_label(rules: Sequence[UpdateRule]) -> set[str]:
    """Return all keys such as "adamw.weight_decay" that a group of several labels may have."""
    if len(rules) < 2:
        return set()
    keys: set[str] = set()
    for hyperparam_of_label_key in common_keys(rules).values():
        keys.update(hyperparam_of_label_key)
    return keys


def common_keys(rules: Iterable[UpdateRule]) -> dict[str, dict[str, Hyperparam]]:
    """Return the keys, such as "lr", that a param group with parameters of several labels may have.

    Each key has the hyperparameters that it sets, one for each label that reads the key, under the key that sets it for
    this label alone: ``{"lr": {"muon.lr": muon_rate, "adamw.lr": adamw_rate}, "betas": {"adamw.betas": betas}}``.
    ``rules`` are the different rules of the group's parameters: the label of a parameter, and the hyperparameters of
    its transforms.
    """
    common: dict[str, dict[str, Hyperparam]] = {}
    for rule in rules:
        for hyperparam in rule.hyperparams:
            # A mirror such as Adam's "momentum" repeats the first of "betas".
            if hyperparam.is_mirror:
                continue
            key = hyperparam.key
            hyperparam_of_label_key = common.setdefault(key, {})
            label_key = f"{rule.label}.{key}"
            # Two rules have one label if a mask selects some of its parameters.
            if label_key in hyperparam_of_label_key:
                label_key = f"{hyperparam.names[0]}.{key}"  # "muon.momentum.decay.momentum"
            hyperparam_of_label_key[label_key] = hyperparam
    return common


def with_common_defaults(rules: Sequence[UpdateRule], group: Group, defaults: Numbers) -> Group:
    """Return the entries of a group of several labels, and an entry for each number that is equal for these labels.

    For example, ``{"lr": 0.1}`` becomes ``{"weight_decay": 0.1, "lr": 0.1}`` if the weight decay of "muon" and of
    "adamw" is 0.1 in ``defaults``. If it differs, nothing is added: each label needs a key of its own then, such as
    "adamw.weight_decay".

    Args:
        rules: each label of the group's parameters with its hyperparameters.
        group: the entries that the caller has given for the group. They replace the defaults.
        defaults: the numbers of the transform by dotted name.
    """
    common_defaults: Group = {}
    for key, hyperparam_of_label_key in common_keys(rules).items():
        values = [hyperparam.value_of(defaults) for hyperparam in hyperparam_of_label_key.values()]
        first_value, *other_values = values
        if other_values and all(equal(first_value, value) for value in other_values):
            common_defaults[key] = first_value
    return {**common_defaults, **group}


def label_of(rules: Sequence[UpdateRule]) -> str | None:
    """Return the label of a group: the label of its parameters, or all of their labels, as in "muon+adamw"."""
    if len(rules) < 2:
        return rules[0].label if rules else None
    return "+".join(dict.fromkeys([str(rule.label) for rule in rules])) or None
