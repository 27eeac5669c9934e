"""Record the param groups of an optimizer, which a user or an engine may edit, and find what was changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from muonfx.core.checks import warn_caller
from muonfx.optimizer import errors
from muonfx.optimizer.following import FollowedParameters
from muonfx.optimizer.group_numbers import BoundGroup, Group, GroupNumbers
from muonfx.optimizer.routes import Route, distinct_routes, group_hyperparams, keys_by_label, label_of
from muonfx.optimizer.unread_keys import unread_key_warning

Routes = Mapping[str, Route]

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
        self._named: dict[str, Tensor] = {}
        """The result of `named`, which is computed again if the two attributes below have changed."""
        self._named_in: list[BoundGroup] | None = None
        """The groups whose parameters are in `_named`."""
        self._named_version = -1
        self._key_counts: list[int] = []
        """How many keys each group had when the keys were last read."""
        self._reported = set[str]()
        """The keys and the lines of which a warning was given."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle, without parameters. A restored optimizer records its own."""
        return {**self.__dict__, "_named": {}, "_named_in": None}

    @property
    def named(self) -> dict[str, Tensor]:
        """A dict from name to parameter, for the parameters that have optimizer state, in the order of the groups."""
        if self._named_in is not self.groups or self._named_version != self._parameters.version:
            bound_parameters = self._parameters.bound
            self._named = {}
            for bound in self.groups:
                for name in bound.names:
                    self._named[name] = bound_parameters[name].param
            self._named_in = self.groups
            self._named_version = self._parameters.version
        return self._named

    def are_current(self, groups: Sequence[Group]) -> bool:
        """Return True if no parameter was replaced, resized or moved, in the param groups or in the models."""
        return self._have(groups) and self._parameters.are_current()

    def _have(self, groups: Sequence[Group]) -> bool:
        """Return True if these are the param groups that `note` recorded, with the same parameters and names."""
        if len(groups) != len(self.groups):
            return False
        named = self.named
        for group, bound in zip(groups, self.groups, strict=True):
            if group is not bound.group or group.get("param_names") != bound.names:
                return False
            params = group["params"]
            if len(params) != len(bound.names) or not all(map(is_, params, map(named.get, bound.names))):
                return False
        return True

    def note(self, groups: Iterable[Group], routes: Routes) -> None:
        """Record the param groups from which later steps read the hyperparameters."""
        numbers_of_group = {id(bound.group): bound.numbers for bound in self.groups}
        numbers_of_name = {name: bound.numbers for bound in self.groups for name in bound.names}
        bound_groups: list[BoundGroup] = []
        for group in groups:
            names: list[str] = list(group["param_names"])
            members = distinct_routes(names, routes)
            hyperparams = group_hyperparams(members, group) if members else ()
            # Where one key such as "weight_decay" sets a number of all labels, "adamw.weight_decay" has no effect.
            for key in keys_by_label(members) - {hyperparam.key for hyperparam in hyperparams}:
                group.pop(key, None)
            former_numbers = numbers_of_group.get(id(group))
            if former_numbers is None and names:
                former_numbers = numbers_of_name.get(names[0])
            if former_numbers is not None and former_numbers.hyperparams == hyperparams:
                # They show which of two keys of a number is changed next.
                numbers = copy.copy(former_numbers)
            else:
                numbers = GroupNumbers(hyperparams)
            bound_groups.append(BoundGroup(group, names, numbers))
        self.groups = bound_groups
        self._key_counts = []

    def follow(self, groups: Sequence[Group], routes: Routes, *, may_repeat: bool = False) -> None:
        """Record param groups that a user or engine has edited, and set "param_names". Raise if they do not fit."""
        if self._have(groups):
            return
        if may_repeat:  # as ``param_groups.extend(param_groups)`` makes them
            groups = list({id(group): group for group in groups}.values())
        names_per_group = self._parameters.names_of(list(groups))
        for group, names in zip(groups, names_per_group, strict=True):  # check all groups before any is changed
            _require_all_hyperparams(group, names, routes)
        for group, names in zip(groups, names_per_group, strict=True):
            group["params"] = list(group["params"])
            group["param_names"] = names
            group.setdefault("label", label_of(distinct_routes(names, routes)))
        self.note(groups, routes)

    def read_new_keys(self, routes: Routes) -> None:
        """Read keys that somebody has added to the groups. Warn once of a misspelt one, such as "weight_dacay"."""
        if self._count_keys() == self._key_counts:  # a step must not compare all keys
            return
        # A group of several labels may now have a key, such as "weight_decay", that sets the numbers of all.
        self.note([bound.group for bound in self.groups], routes)
        self._key_counts = self._count_keys()
        all_keys = set[str]().union(*[bound.numbers.keys for bound in self.groups])
        for bound in self.groups:
            group_keys = bound.numbers.keys
            first_name = bound.names[0] if bound.names else "no parameter"
            for key in bound.group.keys() - group_keys - all_keys - self._reported:
                message = unread_key_warning(key, bound.group[key], first_name, group_keys, all_keys)
                if message is not None:
                    self._reported.add(key)
                    warn_caller(message)

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


def _require_all_hyperparams(group: Group, names: Sequence[str], routes: Routes) -> None:
    """Raise if parameters of other transforms were moved into a group, which lacks the hyperparameters of these."""
    members = distinct_routes(names, routes)
    if len(members) < 2 or all(hyperparam.key in group for hyperparam in group_hyperparams(members, group)):
        return
    first = names[0]
    for name in names:
        if routes[name] != routes[first]:
            raise errors.without_hyperparams({first: routes[first].label, name: routes[name].label})
