"""Detect a scheduler of DeepSpeed that replaces the learning rates of all groups by one number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from muonfx.core.checks import warn_caller

_RATE_KEYS = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
"""The parameters of DeepSpeed's schedulers that set a learning rate, as one number or as a list with one a group."""


class _RequestedRates(NamedTuple):
    """The learning rates with which the param groups were made."""

    labels: list[str]
    """The label of each group, such as ``["muon", "adamw"]``."""
    rates: list[float]
    """The learning rate of each group, such as ``[0.02, 0.0003]``."""

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]]) -> _RequestedRates:
        """Return the rates of new param groups."""
        return cls(
            [str(group["label"]) for group in groups], [float(group["lr"]) for group in groups]
        )

    @property
    def are_different(self) -> bool:
        """True if one rate for all groups would be a mistake, because they were made with different ones."""
        return len(set(self.rates)) > 1

    @property
    def text(self) -> str:
        """The labels with their rates, such as "muon 0.02, adamw 0.0003"."""
        return ", ".join(
            [f"{label} {rate:g}" for label, rate in zip(self.labels, self.rates, strict=True)]
        )


class GroupRates:
    """Compares the learning rates of the groups at each step with those from construction.

    DeepSpeed's schedulers write one number, such as ``warmup_max_lr``, into every group, so that AdamW would train with
    the rate of Muon. A scheduler that scales the rates, or has a list with one rate for each group, is accepted.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Record the rates at construction, before a scheduler writes others. `check` reads the rates of each step.

        ``groups`` are the param groups, such as ``[{"label": "muon", "lr": 0.02}, {"label": "adamw", "lr": 0.0003}]``.
        """
        self._requested = _RequestedRates.of(groups)
        """The rates from construction."""
        self._needs_checks = self._requested.are_different
        """True until the rates of a step differ; False from the beginning if all groups were made with one rate."""
        self._warned_rate: float | None = None
        """The rate of which a warning was given, because all groups had it in a step; None before that."""

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if a scheduler has given all groups the same learning rate.

        With the requested rates 0.02 and 0.0003, a common rate of 0.0001 may be the start of a warmup. It is reported
        as a warning. A common rate of 0.01 is above a requested rate, and raises. So does a second common rate, such as
        0.0002 after 0.0001: the scheduler then changes the rates of all groups to one.
        """
        if not self._needs_checks:
            return
        rates = {float(group["lr"]) for group in groups}
        # The scheduler has a rate for each group, and will have one in all steps.
        if len(rates) > 1:
            self._needs_checks = False
            return
        rate = rates.pop()
        is_before_warmup = rate == 0.0  # a warmup usually starts at 0
        has_warned = rate == self._warned_rate  # a warmup may keep its first rate for some steps
        if is_before_warmup or has_warned:
            return
        is_second_rate = self._warned_rate is not None
        is_above_requested = rate > min(self._requested.rates)
        if is_second_rate or is_above_requested:
            raise ValueError(_one_rate_in_a_step(self._requested, rate))
        warn_caller(_one_rate_in_a_step(self._requested, rate))
        self._warned_rate = rate


def require_rates_by_group(config: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the scheduler in a DeepSpeed configuration has one number for groups with different rates.

    >>> scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}}
    >>> groups = [{"label": "muon", "lr": 0.02}, {"label": "adamw", "lr": 3e-4}]
    >>> require_rates_by_group({"scheduler": scheduler}, groups)
    Traceback (most recent call last):
    ValueError: param_groups: found "warmup_max_lr": 0.02 in DeepSpeed's config, ... "warmup_max_lr": [0.02, 0.0003]...
    """
    requested = _RequestedRates.of(groups)
    if not requested.are_different:
        return
    scheduler: Mapping[str, Any] = config.get("scheduler") or {}
    params: dict[str, Any] = dict(scheduler.get("params") or {})
    # Without this entry, the scheduler has DeepSpeed's default, which also is one rate for all groups.
    if scheduler.get("type") == "WarmupDecayLR":
        params.setdefault("warmup_max_lr", 0.001)
    for key in _RATE_KEYS:
        value = params.get(key)
        # A list, with one rate for each group, is accepted.
        is_one_number = isinstance(value, int | float)
        # The Trainer replaces it by its learning_rate, one number.
        is_from_trainer = value == "auto"
        if is_one_number or is_from_trainer:
            raise ValueError(_one_rate_in_config(requested, key, value))


_OTHER_SCHEDULERS = (
    "Or use a scheduler that scales the rates: WarmupCosineLR, or, in the Trainer, its own: remove "
    '"scheduler" from the config. To train all groups at one rate, make the optimizer with this rate'
)
"""The end of both messages."""


def _one_rate_in_config(requested: _RequestedRates, key: str, value: object) -> str:
    """Return the message of a configuration in which a scheduler has one rate for all groups.

    ``key`` and ``value`` are the entry of the scheduler, such as "warmup_max_lr" and 0.02.
    """
    return (
        f'param_groups: found "{key}": {json.dumps(value)} in DeepSpeed\'s config, expected a rate for each group: the '
        f"optimizer was made with {requested.text}. A single number there replaces the rates of all groups. Write a "
        f'number for each group: "{key}": {requested.rates}. {_OTHER_SCHEDULERS}'
    )


def _one_rate_in_a_step(requested: _RequestedRates, rate: float) -> str:
    """Return the message of a step in which all groups have the same rate.

    The optimizer sees only the rate, not the scheduler or loop that has written it.
    """
    return (
        f"param_groups: found the learning rate {rate:g} in all groups, expected a rate for each group: the optimizer "
        f'was made with {requested.text}. A "scheduler" of DeepSpeed with a single number, or a loop or callback that '
        "writes one number into all groups, replaces their rates. Write a number for each group, in the order of "
        f'param_groups: "warmup_max_lr": {requested.rates} for WarmupLR, lists in "cycle_min_lr" and "cycle_max_lr" '
        f'for OneCycle, "lr_range_test_min_lr" for LRRangeTest. {_OTHER_SCHEDULERS}'
    )
