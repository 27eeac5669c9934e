"""Update rules: the list of transforms that update a parameter, and the hyperparameters of these transforms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from torch import Tensor

from muonfx.core.checks import warn_caller
from muonfx.core.order import combine_signs
from muonfx.core.visit import Visit
from muonfx.optimizer.group_numbers import Group, Hyperparam, Number, equal
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
    order: tuple[int, bool, tuple[int, ...]]
    """The sort key of the group: first Muon's, then Adam's, others, and those without hyperparameters."""


def update_rules_of(visits: Sequence[Visit]) -> dict[str, UpdateRule]:
    """Return the update rule of each parameter by name. Parameters with the same transforms have the same rule."""
    indices_of: dict[str, list[int]] = {}
    for index, visited in enumerate(visits):
        for name in visited.names:
            indices_of.setdefault(name, []).append(index)
    rule_of_indices: dict[tuple[int, ...], UpdateRule] = {}
    rules: dict[str, UpdateRule] = {}
    for name, index_list in indices_of.items():
        indices = tuple(index_list)
        if indices not in rule_of_indices:
            rule_of_indices[indices] = _update_rule(name, indices, [visits[index] for index in indices])
        rules[name] = rule_of_indices[indices]
    return rules


def _update_rule(name: str, indices: tuple[int, ...], visits: Sequence[Visit]) -> UpdateRule:
    """Return the update rule of a parameter.

    Args:
        name: the name of the parameter.
        indices: the indices, among all visits, of the transforms that update it.
        visits: the visits of these transforms.
    """
    labels: list[str] = []
    is_left_out = False
    has_matrices = False
    for visited in visits:
        if visited.label is not None:
            labels.append(visited.label)
        is_left_out = is_left_out or _leaves_out(visited, name)
        has_matrices = has_matrices or needs_matrices(visited.tx)
    hyperparams = tuple(hyperparams_of(visits))
    keys = {hyperparam.key for hyperparam in hyperparams}
    order = (_rank_of_group(keys), not has_matrices, indices)
    label = "/".join(labels) or None
    return UpdateRule(indices, label, is_left_out, hyperparams, order)


def _leaves_out(visited: Visit, name: str) -> bool:
    """Return True if a transform is a partition that gives a parameter the label None."""
    is_partition = False
    for call in visited.calls:
        if name in call.names:
            return False
        is_partition = is_partition or call.label is not None
    return is_partition


def _rank_of_group(keys: Set[str]) -> int:
    """Return the rank of a group with these hyperparameters: Muon's are first, then Adam's, and those without last."""
    if not keys:
        return 3
    if "betas" in keys:
        return 1
    return 0 if "momentum" in keys else 2


def warn_of_ascent(root: Visit, rules: Mapping[str, UpdateRule], params: Mapping[str, Tensor]) -> None:
    """Warn of trained parameters whose updates keep the sign of the gradient, so that a step increases the loss."""
    may_keep_sign: dict[UpdateRule, bool] = {}
    ascending: list[str] = []
    for name, param in params.items():
        if not param.requires_grad:
            continue
        rule = rules[name]
        if rule not in may_keep_sign:  # one parameter of a rule suffices: the same transforms update the others
            may_keep_sign[rule] = 1 in _signs(root, name)
        if may_keep_sign[rule]:
            ascending.append(name)
    if ascending:
        warn_caller(
            f"each step would increase the loss: the updates of {len(ascending)} of {len(params)} parameters, such as "
            f"{ascending[0]!r}, have the sign of the gradient. Put scale_by_learning_rate(...) at the end of their "
            'chain. If a transform of your own reverses the sign, declare position="learning_rate" for it'
        )


def _signs(visited: Visit, name: str) -> frozenset[int]:
    """Return the possible signs (1 same, -1 reversed, 0 unknown) of a parameter's update after a transform."""
    inner_signs = [_signs(call, name) for call in visited.calls if name in call.names]
    return combine_signs(visited.tx, inner_signs)


def hyperparams_of(visits: Sequence[Visit]) -> list[Hyperparam]:
    """Return the hyperparameters of several transforms, each with its own key for a param group.

    The key is the short name, such as "lr", if only one of the transforms declares it; else the name without labels,
    such as "momentum.decay", or the full name if two transforms have the same name without labels.
    """
    times_short = Counter(key for visited in visits for key in visited.numbers.short_names)
    times = Counter(key for visited in visits for key in visited.numbers.keys)
    hyperparams: list[Hyperparam] = []
    for visited in visits:
        with_short_key = set[str]()  # the numbers of this transform that have a short key
        for key, target in visited.numbers.short_names.items():
            if times_short[key] > 1:
                continue
            names = target if isinstance(target, tuple) else (target,)
            is_mirror = with_short_key.issuperset(names)
            hyperparams.append(Hyperparam(key, names, isinstance(target, tuple), is_mirror))
            with_short_key.update(names)
        for name, key in zip(visited.numbers.names, visited.numbers.keys, strict=True):
            if name in with_short_key:
                continue
            unique_key = key if times[key] == 1 else name
            hyperparams.append(Hyperparam(unique_key, (name,)))
    return hyperparams


def pairs_by_rule(
    pairs: Iterable[tuple[str, Tensor]], rules: Mapping[str, UpdateRule]
) -> dict[UpdateRule, list[tuple[str, Tensor]]]:
    """Divide (name, tensor) pairs by rule, in the order of groups: Muon's, Adam's, then others."""
    pairs_of: dict[UpdateRule, list[tuple[str, Tensor]]] = {}
    for name, param in pairs:
        pairs_of.setdefault(rules[name], []).append((name, param))
    return {rule: pairs_of[rule] for rule in sorted(pairs_of, key=lambda rule: rule.order)}


def distinct_rules(names: Iterable[str], rules: Mapping[str, UpdateRule]) -> list[UpdateRule]:
    """Return each rule of the named parameters once, in the order of groups: Muon's, Adam's, then others."""
    return sorted({rules[name] for name in names}, key=lambda rule: rule.order)


def group_hyperparams(rules: Sequence[UpdateRule], group: Group) -> tuple[Hyperparam, ...]:
    """Return the hyperparameters of a param group whose parameters have these rules.

    A key that several rules have, such as "lr", sets the numbers of all of them. If the group lacks the key, each
    rule has its own, with its label in front: "muon.weight_decay" and "adamw.weight_decay".
    """
    if len(rules) == 1:
        return rules[0].hyperparams
    hyperparams: list[Hyperparam] = []
    for key, holders in holders_of(rules).items():
        distinct = dict.fromkeys(holders.values())
        has_one_form = len({(hyperparam.is_tuple, len(hyperparam.names)) for hyperparam in distinct}) == 1
        sets_all = key in group and has_one_form
        if len(distinct) == 1 or sets_all:
            hyperparams += distinct
        else:
            hyperparams += [hyperparam._replace(key=f"{label}.{key}") for label, hyperparam in holders.items()]
    return tuple(hyperparams)


def keys_by_label(rules: Sequence[UpdateRule]) -> set[str]:
    """Return all keys such as "adamw.weight_decay" that a group of several labels may have."""
    if len(rules) < 2:
        return set()
    return {f"{label}.{key}" for key, holders in holders_of(rules).items() for label in holders}


def holders_of(rules: Iterable[UpdateRule]) -> dict[str, dict[str, Hyperparam]]:
    """Return, for each key such as "lr", a dict from label to the `Hyperparam` that the rule of the label has."""
    holders: dict[str, dict[str, Hyperparam]] = {}
    for rule in rules:
        for hyperparam in rule.hyperparams:
            # "momentum" would set Muon's momentum and repeat Adam's first beta: only the former.
            if hyperparam.is_mirror:
                continue
            by_label = holders.setdefault(hyperparam.key, {})
            label = str(rule.label)
            if label in by_label:  # two rules have one label if a mask selects some of its parameters
                label = hyperparam.names[0]
            by_label[label] = hyperparam
    return holders


def with_agreed(rules: Sequence[UpdateRule], group: Group, defaults: Mapping[str, Number]) -> Group:
    """Return a group with an entry for each key of several rules in whose numbers the rules agree."""
    if len(rules) < 2:
        return group
    agreed: Group = {}
    for key, by_label in holders_of(rules).items():
        first, *others = [hyperparam.value_of(defaults) for hyperparam in by_label.values()]
        if others and all(equal(first, value) for value in others):
            agreed[key] = first
    return {**agreed, **group}


def label_of(rules: Sequence[UpdateRule]) -> str | None:
    """Return the label of a group: the label of its parameters, or all of their labels, as in "muon+adamw"."""
    if len(rules) < 2:
        return rules[0].label if rules else None
    return "+".join(dict.fromkeys([str(rule.label) for rule in rules])) or None
