"""Record the param groups of an optimizer, which a user or an engine may edit, and find what was changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from operator import is_

from torch import Tensor

from muonfx.core.checks import warn_caller
from muonfx.optimizer import errors
from muonfx.optimizer.following import FollowedParameters
from muonfx.optimizer.group_numbers import BoundGroup, Group, GroupNumbers
from muonfx.optimizer.update_rules import UpdateRule, distinct_rules, group_hyperparams, keys_by_label, label_of
from muonfx.optimizer.unread_keys import unread_key_warning

UpdateRules = Mapping[str, UpdateRule]

_UNREAD_RATE = "lr that no transform reads"
"""The entry of `BoundGroups._reported` for this warning."""

_LISTED = 10
"""The largest number of lines that `BoundGroups.warn_once` lists."""


class BoundGroups:
    """Records the param groups from which the steps of an optimizer read the hyperparameters.

    Args:
        parameters: the parameters of the optimizer, from which the names of tensors in the groups are read.
    """

    def __init__(self, parameters: FollowedParameters) -> None:
        self.groups: list[BoundGroup] = []
        """The groups as `note` has recorded them."""
        self._parameters = parameters
        self._key_counts: list[int] = []
        """How many keys each group had when the keys were last read."""
        self._reported = set[str]()
        """The keys and the lines of which a warning was given."""

    @property
    def named(self) -> dict[str, Tensor]:
        """A dict from name to parameter, for the parameters that have optimizer state, in the order of the groups."""
        bound_parameters = self._parameters.bound
        named: dict[str, Tensor] = {}
        for bound in self.groups:
            for name in bound.names:
                named[name] = bound_parameters[name].param
        return named

    def are_current(self, groups: Sequence[Group]) -> bool:
        """Return True if no parameter was replaced, resized or moved, in the param groups or in the models."""
        return self._have(groups) and self._parameters.are_current()

    def _have(self, groups: Sequence[Group]) -> bool:
        """Return True if these are the param groups that `note` recorded, with the same parameters and names."""
        if len(groups) != len(self.groups):
            return False
        params: list[Tensor] = []
        for group, bound in zip(groups, self.groups, strict=True):
            if group is not bound.group or group.get("param_names") != bound.names:
                return False
            if len(group["params"]) != len(bound.names):
                return False
            params += group["params"]
        return all(map(is_, params, self.named.values()))

    def note(self, groups: Iterable[Group], rules: UpdateRules) -> None:
        """Record the param groups from which later steps read the hyperparameters."""
        bound_groups: list[BoundGroup] = []
        for group in groups:
            names: list[str] = list(group["param_names"])
            distinct = distinct_rules(names, rules)
            hyperparams = group_hyperparams(distinct, group) if distinct else ()
            # Where one key such as "weight_decay" sets a number of all labels, "adamw.weight_decay" has no effect.
            for key in keys_by_label(distinct) - {hyperparam.key for hyperparam in hyperparams}:
                group.pop(key, None)
            numbers = GroupNumbers(hyperparams)
            former_numbers = self._former_numbers(group, names)
            if former_numbers is not None and former_numbers.hyperparams == hyperparams:
                numbers = copy.copy(former_numbers)  # they show which of two keys of a number is changed next
            bound_groups.append(BoundGroup(group, names, numbers))
        self.groups = bound_groups
        self._key_counts = []

    def _former_numbers(self, group: Group, names: Sequence[str]) -> GroupNumbers | None:
        """Return the object that has read a group so far, or the group in which its first parameter was; else None."""
        for bound in self.groups:
            if bound.group is group:
                return bound.numbers
        for bound in self.groups:
            if names and names[0] in bound.names:
                return bound.numbers
        return None

    def follow(self, groups: Sequence[Group], rules: UpdateRules, *, may_list_twice: bool = False) -> None:
        """Record param groups that a user or engine has edited, and set "param_names". Raise if they do not fit."""
        if self._have(groups):
            return
        if may_list_twice:  # as ``param_groups.extend(param_groups)`` makes them
            groups = list({id(group): group for group in groups}.values())
        names_per_group = self._parameters.names_of(groups)
        for group, names in zip(groups, names_per_group, strict=True):  # check all groups before any is changed
            _require_all_hyperparams(group, names, rules)
        for group, names in zip(groups, names_per_group, strict=True):
            group["params"] = list(group["params"])
            group["param_names"] = names
            group.setdefault("label", label_of(distinct_rules(names, rules)))
        self.note(groups, rules)

    def read_new_keys(self, rules: UpdateRules) -> None:
        """Read keys that somebody has added to the groups. Warn once of a misspelt one, such as "weight_dacay"."""
        if self._count_keys() == self._key_counts:  # a step must not compare all keys
            return
        # A group of several labels may now have a key, such as "weight_decay", that sets the numbers of all.
        self.note([bound.group for bound in self.groups], rules)
        self._key_counts = self._count_keys()
        all_keys = set[str]().union(*[bound.numbers.keys for bound in self.groups])
        for bound in self.groups:
            first_name = bound.names[0] if bound.names else "no parameter"
            for key in bound.group.keys() - all_keys - self._reported:
                message = unread_key_warning(key, bound.group[key], first_name, set(bound.numbers.keys), all_keys)
                if message is not None:
                    self._reported.add(key)
                    warn_caller(message)

    def warn_of_unread_rate(self) -> None:
        """Warn once if a group has an "lr" that somebody has set, and no transform of any group reads it."""
        if _UNREAD_RATE in self._reported or any("lr" in bound.numbers.keys for bound in self.groups):
            return
        for index, bound in enumerate(self.groups):
            rate = bound.group["lr"]
            is_set = not isinstance(rate, Tensor) and rate != 0.0
            if is_set or "initial_lr" in bound.group:  # a scheduler adds the latter
                self._reported.add(_UNREAD_RATE)
                warn_caller(
                    f"param_groups[{index}]: 'lr' is {rate!r}, expected no value: the chain has a schedule or no "
                    "learning rate, and ignores it. To set the rate in groups, create the chain with a number as "
                    "learning rate"
                )
                return

    def _count_keys(self) -> list[int]:
        return [len(bound.group) for bound in self.groups]

    def warn_once(self, before: str, lines: list[str], after: str) -> None:
        """Warn of those lines that this optimizer has not reported, with the text before and after them."""
        new_lines = [line for line in lines if line not in self._reported]
        if not new_lines:
            return
        self._reported.update(new_lines)
        shown = new_lines[:_LISTED]
        if len(new_lines) > _LISTED:
            shown.append(f"and {len(new_lines) - _LISTED} more")
        warn_caller(before + "; ".join(shown) + after)


def _require_all_hyperparams(group: Group, names: Sequence[str], rules: UpdateRules) -> None:
    """Raise if parameters of other transforms were moved into a group, which lacks the hyperparameters of these."""
    distinct = distinct_rules(names, rules)
    if len(distinct) < 2 or all(hyperparam.key in group for hyperparam in group_hyperparams(distinct, group)):
        return
    first = names[0]
    for name in names:
        if rules[name] != rules[first]:
            raise errors.without_hyperparams({first: rules[first].label, name: rules[name].label})
