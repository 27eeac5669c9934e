"""Record the param groups that the steps read, and find groups that a user, a scheduler or an engine has edited.

Other optimizers are kept from stepping on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import is_
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from muonfx.core.checks import warn_caller
from muonfx.optimizer.group_numbers import Group, GroupNumbers, TrackedGroup, read_numbers
from muonfx.optimizer.named_parameters import NamedTensors
from muonfx.optimizer.param_groups import warn_if_unread
from muonfx.optimizer.tracked_parameters import TrackedParameters
from muonfx.optimizer.update_rules import (
    UpdateRules,
    common_keys,
    distinct_rules,
    group_hyperparams,
    keys_by_label,
    label_of,
)


class TrackedGroups:
    """Records the param groups from which the steps of an optimizer read the hyperparameters.

    Args:
        parameters: the parameters of the optimizer, from which the names of tensors in the groups are read.
    """

    def __init__(self, parameters: TrackedParameters) -> None:
        """Begin without groups. `record` sets them, each time the optimizer has created or changed groups."""
        self.groups: list[TrackedGroup] = []
        """The groups as `record` has recorded them."""
        self._parameters = parameters
        self._key_counts: list[int] = []
        """How many keys each group had when the keys were last read."""
        self._reported = set[str]()
        """The keys of which a warning was given."""
        self._has_warned_of_rate = False
        """True after the warning of an "lr" that no transform reads."""

    @property
    def named(self) -> NamedTensors:
        """A dict from name to parameter, for the parameters that have optimizer state, in the order of the groups."""
        tracked_parameters = self._parameters.tracked
        named: dict[str, Tensor] = {}
        for tracked in self.groups:
            for name in tracked.names:
                named[name] = tracked_parameters[name].param
        return named

    def are_current(self, groups: Sequence[Group]) -> bool:
        """Return True if no parameter was replaced, resized, moved or converted, in the groups or in the models."""
        return self._are_recorded(groups) and self._parameters.are_current()

    def _are_recorded(self, groups: Sequence[Group]) -> bool:
        """Return True if the param groups are as `record` recorded them: the same dicts, parameters and names."""
        if len(groups) != len(self.groups):  # a group was added or removed
            return False
        tracked_parameters = self._parameters.tracked
        for group, tracked in zip(groups, self.groups, strict=True):
            # The group is another dict, or its parameters were renamed.
            if group is not tracked.group or group.get("param_names") != tracked.names:
                return False
            params = [tracked_parameters[name].param for name in tracked.names]
            # The group has other tensors.
            if len(group["params"]) != len(params) or not all(map(is_, group["params"], params)):
                return False
        return True

    def record(self, groups: Iterable[Group], rules: UpdateRules) -> None:
        """Record the param groups from which later steps read the hyperparameters, such as "lr" and "momentum".

        Keys of one label that have no effect are removed from the groups: "weight_decay" replaces "adamw.weight_decay".
        ``rules`` has, for each parameter name, the transforms that update it and their hyperparameters.
        """
        self.groups = [self._tracked_group(group, rules) for group in groups]
        self._key_counts = []  # the next step reads the keys of all groups

    def _tracked_group(self, group: Group, rules: UpdateRules) -> TrackedGroup:
        """Return a param group with the names of its parameters and the object that reads its hyperparameters."""
        names: list[str] = list(group["param_names"])
        # Usually there is one rule. The parameters of a group with the labels "muon" and "adamw" have two.
        distinct = distinct_rules(names, rules)
        # The keys of the group, with the numbers that they set.
        hyperparams = group_hyperparams(distinct, group)
        # The former object remembers the numbers that it has read last: if "momentum" and "betas" differ in the next
        # step, the one that was changed since the last step counts. It is not changed: an error may bring it back.
        numbers = GroupNumbers(hyperparams, self._former_numbers(group, names))
        keys_without_effect = keys_by_label(distinct) - set(numbers.keys)
        # If the group has "weight_decay" for all labels, "adamw.weight_decay" is such a key.
        for key in keys_without_effect:
            group.pop(key, None)
        return TrackedGroup(group, names, numbers)

    def _former_numbers(self, group: Group, names: Sequence[str]) -> GroupNumbers | None:
        """Return the object that has read the hyperparameters of a group so far; None for a group of new parameters."""
        # Usually the dict in `param_groups` is the object that was recorded.
        for tracked in self.groups:
            if tracked.group is group:
                return tracked.numbers
        # An engine may have put new dicts into `param_groups`: find the group by its first parameter.
        for tracked in self.groups:
            if names and names[0] in tracked.names:
                return tracked.numbers
        return None

    def follow(self, groups: Sequence[Group], rules: UpdateRules) -> None:
        """Read the hyperparameters from param groups, if a user or an engine has edited them.

        For example, the user has moved a parameter from ``groups[0]["params"]`` to ``groups[1]["params"]``. Raise
        ValueError, before any change, if a tensor is no parameter of the optimizer, or if a group lacks
        hyperparameters. ``rules`` has the transforms of each parameter, by name.
        """
        if not self._are_recorded(groups):
            self.adopt(groups, self._parameters.names_of(groups, added={}), rules)

    def adopt(
        self, groups: Sequence[Group], names_per_group: Sequence[list[str]], rules: UpdateRules
    ) -> None:
        """Read the hyperparameters from edited param groups, which have the named parameters: ``[["w"], ["b"]]``.

        Raise ValueError, before any change, if a group lacks hyperparameters of its parameters.
        """
        # 1. Check all groups before any is changed.
        for group, names in zip(groups, names_per_group, strict=True):
            _require_all_hyperparams(group, names, rules)
        # 2. Add the entries that a group of an optimizer must have.
        for group, names in zip(groups, names_per_group, strict=True):
            group["params"] = list(group["params"])
            group["param_names"] = names
            group.setdefault("label", label_of(distinct_rules(names, rules)))
        # 3. Later steps read these groups.
        self.record(groups, rules)

    def adopt_new_keys(self, rules: UpdateRules) -> None:
        """Use keys that the user has added to the groups, as by ``group["weight_decay"] = 0.1``, from this step on.

        Warn once of a misspelt key, such as "weight_dacay". ``rules`` has the transforms and hyperparameters of each
        parameter, by name.
        """
        # This is called at every step, and counting keys is faster than comparing them.
        if self._count_keys() == self._key_counts:
            return
        # For example, "weight_decay" now replaces the keys "muon.weight_decay" and "adamw.weight_decay" of a group.
        self.record([tracked.group for tracked in self.groups], rules)
        self._key_counts = self._count_keys()  # last, because `record` may have removed keys
        self._warn_of_unread_keys()

    def warn_of_unread_entries(
        self, entries: Group, names: Sequence[str], rules: UpdateRules
    ) -> None:
        """Warn of entries for a new group that look like hyperparameters and set none, such as "weight_dacay".

        ``names`` are the parameters of the group, and ``rules`` has the transforms and hyperparameters of each
        parameter.
        """
        if not entries:  # usually
            return
        group_rules = distinct_rules(names, rules)
        keys = [hyperparam.key for hyperparam in group_hyperparams(group_rules, entries)]
        # A group of several labels may have the common key "weight_decay", and "adamw.weight_decay" for one label.
        group_keys = {*keys, *common_keys(group_rules)}
        all_keys = common_keys(set(rules.values())).keys()
        for key, value in entries.items():
            if warn_if_unread(key, value, names[0], group_keys, all_keys):
                # The next step, which reads the keys of all groups, does not warn again.
                self._reported.add(key)

    def _warn_of_unread_keys(self) -> None:
        """Warn once of each key of a group that looks like a hyperparameter and sets none, such as "weight_dacay"."""
        all_keys: set[str] = set()
        for tracked in self.groups:
            all_keys.update(tracked.numbers.keys)
        for tracked in self.groups:
            first_name = tracked.names[0] if tracked.names else "no parameter"
            group_keys = set(tracked.numbers.keys)
            for key, value in tracked.group.items():
                # A scheduler may write a hyperparameter of some groups into all groups, as OneCycleLR does: no warning.
                if key in all_keys or key in self._reported:
                    continue
                if warn_if_unread(key, value, first_name, group_keys, all_keys):
                    self._reported.add(key)

    def warn_of_unread_rate(self) -> None:
        """Warn once if a group has an "lr" that somebody has set, and no transform of any group reads it.

        For example, the rate is a schedule of the transform, and a scheduler of torch sets "lr" in vain.
        """
        # If a transform of one group reads "lr", a scheduler may write it into all groups.
        if self._has_warned_of_rate or any("lr" in tracked.numbers.keys for tracked in self.groups):
            return
        for index, tracked in enumerate(self.groups):
            rate = tracked.group["lr"]
            # 0.0 is the value for groups without a rate
            is_set = not isinstance(rate, Tensor) and rate != 0.0
            has_scheduler = "initial_lr" in tracked.group  # which a scheduler adds
            if is_set or has_scheduler:
                self._has_warned_of_rate = True
                warn_caller(
                    f"param_groups[{index}]: 'lr' is {rate!r}, expected no value, because the chain has a schedule or "
                    "no learning rate: a scheduler of torch, or a line that sets 'lr', has no effect on these "
                    "parameters; remove it. To set the rate in groups, create the chain with a number as learning rate"
                )
                return

    def rates(self) -> list[float]:
        """Return the learning rates that transforms read, such as ``[0.02, 0.001]`` for two groups.

        Groups without parameters are left out, and so are tensors on other devices than CPUs, which reading would sync.
        """
        rates: list[float] = []
        for tracked in self.groups:
            if "lr" not in tracked.numbers.keys or not tracked.names:
                continue
            rate = tracked.group.get("lr")
            if isinstance(rate, int | float) or (isinstance(rate, Tensor) and rate.is_cpu):
                rates.append(float(rate))
        return rates

    def synchronize(self) -> None:
        """Write current numbers into all keys of each group: if "momentum" was changed, "betas" follows."""
        read_numbers(self.groups)

    def _count_keys(self) -> list[int]:
        """Return the number of keys in each group."""
        return [len(tracked.group) for tracked in self.groups]


def _require_all_hyperparams(group: Group, names: Sequence[str], rules: UpdateRules) -> None:
    """Raise if parameters were moved into a group that lacks the hyperparameters of the transforms that update them.

    For example, a parameter of AdamW was moved into a group of Muon, which has "momentum" and no "betas".

    Args:
        group: the param group.
        names: the names of the parameters that it has now.
        rules: the transforms and hyperparameters of each parameter, by name.
    """
    # Each rule comes once, such as those of "muon" and "adamw".
    distinct = distinct_rules(names, rules)
    # Nothing was moved to other transforms; `GroupNumbers.read` raises for a key that is missing.
    if len(distinct) < 2:
        return
    required_keys = {hyperparam.key for hyperparam in group_hyperparams(distinct, group)}
    if not required_keys <= group.keys():
        raise _moved_between_transforms(names, rules)


def _moved_between_transforms(names: Sequence[str], rules: UpdateRules) -> ValueError:
    """Return an error for a group that lacks hyperparameters, with two of its parameters of different transforms.

    ``names`` are its parameters, and ``rules`` has the transforms and the label of each of them.
    """
    first_name = names[0]
    first_rule = rules[first_name]
    names_of_other_rules = [name for name in names if rules[name] != first_rule]
    other_name = names_of_other_rules[0]
    return ValueError(
        f"param_groups: {first_name!r} (label {first_rule.label!r}) and {other_name!r} (label "
        f"{rules[other_name].label!r}) are in one group, but different transforms update them, and the group lacks "
        "hyperparameters of one: recreate the optimizer to change a label, or add_param_group to add parameters"
    )


_LOW_STEPS = 10
"""After this many steps at one rate below all requested rates, it is no longer the first or last step of a schedule."""

_NEGLIGIBLE = 0.01
"""Rates below this part of the requested ones are minima, such as ``min_lr`` of ReduceLROnPlateau, and hardly train."""


class OneRateCheck:
    """Warns once if groups that were made with different learning rates have the same.

    For example, the rates were 0.02 and 0.001, and a scheduler has written 0.001 into both.
    """

    def __init__(self, requested_rates: Sequence[float]) -> None:
        """Record the learning rates of the groups at construction, such as ``[0.02, 0.001]``."""
        self._requested_rates = requested_rates
        self._is_needed = len(set(requested_rates)) > 1
        """False if all groups were made with one rate, and after the warning."""
        self._rates_have_differed = False
        """True after a step in which groups had different rates, or a load of such rates."""
        self._low_steps = 0
        """How many steps in succession had one rate in all groups, below all requested ones. `check` accepts some."""
        self._last_low_rate: float | None = None
        """The rate of all groups in the last of these steps, such as 1e-4."""

    def note_loaded(self, groups: TrackedGroups) -> None:
        """Record that a saved run was loaded: if its rates differ, it is past the first epoch of a warmup."""
        if len(set(groups.rates())) > 1:
            self._rates_have_differed = True

    def check(self, groups: TrackedGroups) -> None:
        """Warn once if all groups have one learning rate in this step, but were made with different rates.

        A rate below all requested ones, such as 1e-4 for 0.02 and 0.001, is accepted for some steps: a warmup may start
        there, and CosineAnnealingLR ends all groups at ``eta_min``.
        """
        if not self._is_needed:
            return
        rates = groups.rates()
        if len(rates) < 2:  # nothing to compare
            return
        if len(set(rates)) > 1:  # they differ, as they should
            self._rates_have_differed = True
            self._low_steps = 0
            return
        rate = rates[0]
        is_low = rate < min(self._requested_rates)
        if is_low:
            self._count_low_rate(rate)
            if self._low_steps < _LOW_STEPS:
                return
        self._is_needed = False
        warn_caller(_one_rate(rate, self._requested_rates))

    def _count_low_rate(self, rate: float) -> None:
        """Count a step in which all groups have one ``rate``, below all requested ones, if it may be a mistake.

        For example, SWALR brings all groups to one ``swa_lr``, and keeps them there. A rate near zero is no mistake,
        and neither is one rate in the whole first epoch of a warmup.

        >>> check = OneRateCheck([0.02, 0.001])
        >>> for rate in (1e-4, 1e-4, 2e-4, 1e-9):
        ...     check._count_low_rate(rate)
        >>> check._low_steps  # the first 1e-4 and 2e-4; 1e-9 is near zero
        2
        """
        if rate < _NEGLIGIBLE * min(self._requested_rates):
            return
        is_repeated = rate == self._last_low_rate
        self._last_low_rate = rate
        # After the first epoch of a warmup, the rates differ. Until then, a repeated rate may be of this epoch.
        if self._rates_have_differed or not is_repeated:
            self._low_steps += 1


def _one_rate(rate: float, requested_rates: Iterable[float]) -> str:
    """Return the warning that all groups have one learning rate, but were made with others, such as 0.02 and 0.001."""
    requested = ", ".join([f"{requested_rate:g}" for requested_rate in requested_rates])
    return (
        f"param_groups: all groups have the learning rate {rate:g}, expected different rates, because they were "
        f"made with {requested}. A scheduler, a callback or a search for a rate may have written one number into "
        "all groups: give it one number for each group, in the order of param_groups"
    )


# --------------------------------------------------------------------------------------- other optimizers on the groups

_owners: WeakSet[Optimizer] = WeakSet()


def own_groups(optimizer: Optimizer) -> None:
    """Make every other optimizer raise if it steps on this optimizer's param groups, unless it wraps this optimizer."""
    _register_refusal()
    _owners.add(optimizer)


class OwnedGroup(dict[str, Any]):
    """A param group (a dict) whose class marks it as created by a muonfx optimizer.

    Another optimizer that steps on it raises, even if the muonfx one is deleted. torch.compile cannot trace the class.
    """


@cache
def _register_refusal() -> None:
    register_optimizer_step_pre_hook(_refuse_exchanged)


def _refuse_exchanged(optimizer: Optimizer, *_: object) -> None:
    """Raise if an optimizer that was made from the groups of a muonfx optimizer steps in its place.

    For example, accelerate creates ``DeepSpeedCPUAdam(optimizer.param_groups)`` when DeepSpeed offloads. Without an
    error, the user would train with Adam instead of Muon. torch calls this before each step of any optimizer.
    """
    if torch.compiler.is_compiling() or optimizer in _owners:  # a muonfx optimizer
        return
    owned_groups = _owned_groups(optimizer.param_groups)
    if not owned_groups or _calls_owner(optimizer):
        return
    labels = [repr(group.get("label")) for group in owned_groups]
    raise RuntimeError(
        f"{type(optimizer).__name__} steps on groups of a muonfx optimizer ({', '.join(labels)}), which itself never "
        "steps: an engine has replaced it. If DeepSpeed offloads the optimizer, accelerate and the Trainer do so "
        'unless the configuration has "zero_force_ds_cpu_optimizer": false. To use another optimizer on purpose, '
        "pass plain copies: [dict(group) for group in optimizer.param_groups]"
    )


def _owned_groups(groups: Iterable[Group]) -> list[Group]:
    """Return those groups that a muonfx optimizer has now, or has had if it marks them by their class `OwnedGroup`."""
    # Compare groups as objects: a plain copy, ``dict(group)``, is another object, and may be used on purpose.
    ids_of_owned_groups: set[int] = set()
    for owner in _owners:
        ids_of_owned_groups.update(map(id, owner.param_groups))
    return [
        group
        for group in groups
        if isinstance(group, OwnedGroup) or id(group) in ids_of_owned_groups
    ]


def _calls_owner(optimizer: Optimizer) -> bool:
    """Return True if an optimizer wraps a muonfx optimizer: it has that, whose step it calls, in an attribute."""
    inner_optimizers = [
        attribute for attribute in vars(optimizer).values() if isinstance(attribute, Optimizer)
    ]
    return any(inner in _owners for inner in inner_optimizers)
