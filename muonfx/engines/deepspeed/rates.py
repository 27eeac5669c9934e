"""Detect a scheduler of DeepSpeed that replaces the learning rates of all groups by one number."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

_RATE_KEYS = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
"""The parameters of DeepSpeed's schedulers that set a learning rate, as one number or as a list with one a group."""


class GroupRates:
    """Compares the learning rates of the groups at each step with those from construction.

    DeepSpeed's schedulers write one number, such as ``warmup_max_lr``, into every group, so that AdamW would train with
    the rate of Muon. A scheduler that scales the rates, or has a list with one rate for each group, is accepted.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Record the rates at construction, before a scheduler writes others. `check` reads the rates of each step.

        ``groups`` are the param groups, such as ``[{"label": "muon", "lr": 0.02}, {"label": "adamw", "lr": 0.0003}]``.
        """
        self._requested = _labels_and_rates(groups)
        """The label and the rate of each group at construction, such as ``("muon", 0.02)``."""
        self._needs_checks = _have_different_rates(self._requested)
        """True until the rates of a step differ; False from the beginning if all groups were made with one rate."""
        self._rate_of_group: dict[tuple[str, ...], float] = {}
        """The rates of the groups that `check` has received in this step, by the names of their parameters."""
        self._warned_rate: float | None = None
        """The rate of which a warning was given, because all groups had it in a step; None before that."""

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if a scheduler has given all groups the same learning rate.

        A rate that is equal in all groups, and not above any requested rate, may be the start of a warmup. It is
        reported as a warning; the error is raised if a later rate is equal in all groups, too.
        """
        if not self._needs_checks:
            return
        # 1. Collect the rates of all groups, since DeepSpeed may pass one group in each call.
        for group in groups:
            self._rate_of_group[tuple(group["param_names"])] = float(group["lr"])
        if len(self._rate_of_group) < len(self._requested):
            return
        rates = set(self._rate_of_group.values())
        self._rate_of_group.clear()
        # 2. Check them.
        if len(rates) > 1:  # the scheduler has a rate for each group, and will have one in all steps
            self._needs_checks = False
        else:
            self._check_common_rate(rates.pop())

    def _check_common_rate(self, rate: float) -> None:
        """Warn of the first rate that all groups have, if it may be of a warmup; raise ValueError otherwise.

        With the requested rates 0.02 and 0.0003, a common rate of 0.0001 may be of a warmup, but not one of 0.01. A
        second common rate, such as 0.0002, is not accepted either: the scheduler then changes the rates of all groups
        to one.
        """
        is_before_warmup = rate == 0.0  # a warmup usually starts at 0
        has_warned = rate == self._warned_rate  # a warmup may keep its first rate for some steps
        if is_before_warmup or has_warned:
            return
        message = _message(self._requested, f"the learning rate {rate:g} in all groups", self._advice())
        is_second_rate = self._warned_rate is not None
        is_above_requested = rate > min(_rates_of(self._requested))
        if is_second_rate or is_above_requested:
            raise ValueError(message)
        warnings.warn(message, stacklevel=6)  # at the caller of `ZeroOptimizer.step`
        self._warned_rate = rate

    def _advice(self) -> str:
        """Return what to correct in a scheduler or loop that is not known here, only the rates that it has written."""
        rates = _rates_of(self._requested)
        return (
            'A "scheduler" of DeepSpeed with a single number, or a loop or callback that writes one number into all '
            "groups, replaces their rates. Write a number for each group, in the order of param_groups: "
            f'"warmup_max_lr": {rates} for WarmupLR, lists in "cycle_min_lr" and "cycle_max_lr" for OneCycle, '
            '"lr_range_test_min_lr" for LRRangeTest'
        )


def require_rates_by_group(config: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the scheduler in a DeepSpeed configuration has one number for groups with different rates.

    >>> scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}}
    >>> groups = [{"label": "muon", "lr": 0.02}, {"label": "adamw", "lr": 3e-4}]
    >>> require_rates_by_group({"scheduler": scheduler}, groups)
    Traceback (most recent call last):
    ValueError: param_groups: found "warmup_max_lr": 0.02 in DeepSpeed's config, ... "warmup_max_lr": [0.02, 0.0003]...
    """
    requested = _labels_and_rates(groups)
    if not _have_different_rates(requested):
        return
    scheduler: Mapping[str, Any] = config.get("scheduler") or {}
    params: dict[str, Any] = dict(scheduler.get("params") or {})
    # Without this entry, the scheduler has DeepSpeed's default, which also is one rate for all groups.
    if scheduler.get("type") == "WarmupDecayLR":
        params.setdefault("warmup_max_lr", 0.001)
    # A list, with one rate for each group, is accepted.
    for key in _RATE_KEYS:
        value = params.get(key)
        is_one_number = isinstance(value, int | float)
        is_from_trainer = value == "auto"  # the Trainer replaces it by its learning_rate, one number
        if is_one_number or is_from_trainer:
            problem = f'"{key}": {json.dumps(value)} in DeepSpeed\'s config'
            advice = (
                "A single number there replaces the rates of all groups. Write a number for each group: "
                f'"{key}": {_rates_of(requested)}'
            )
            raise ValueError(_message(requested, problem, advice))


def _labels_and_rates(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return the label and the learning rate of each group, such as ``[("muon", 0.02), ("adamw", 0.0003)]``."""
    return [(str(group["label"]), float(group["lr"])) for group in groups]


def _have_different_rates(labels_and_rates: Sequence[tuple[str, float]]) -> bool:
    """Return True if groups, given as pairs of a label and a learning rate, have more than one rate.

    >>> _have_different_rates([("muon", 0.02), ("adamw", 0.0003)])
    True
    """
    distinct_rates = {rate for _, rate in labels_and_rates}
    return len(distinct_rates) > 1


def _rates_of(labels_and_rates: Sequence[tuple[str, float]]) -> list[float]:
    """Return the rates of groups, given as pairs of a label and a learning rate."""
    return [rate for _, rate in labels_and_rates]


def _message(requested: Sequence[tuple[str, float]], problem: str, advice: str) -> str:
    """Return the error message for one rate in all groups.

    Args:
        requested: the labels and rates at construction, such as ``[("muon", 0.02), ("adamw", 0.0003)]``.
        problem: what was found, such as "the learning rate 0.001 in all groups".
        advice: what to write instead.
    """
    labelled_rates = [f"{label} {rate:g}" for label, rate in requested]
    return (
        f"param_groups: found {problem}, expected a rate for each group: the optimizer was made with "
        f"{', '.join(labelled_rates)}. {advice}. Or use a scheduler that scales the rates: WarmupCosineLR, or, in the "
        'Trainer, its own: remove "scheduler" from the config. To train all groups at one rate, make the optimizer '
        "with this rate"
    )
