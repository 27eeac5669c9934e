"""Hyperparameters as they stand in groups: whether they are valid, have changed, and agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from muonfx.core import Transform
from muonfx.hyperparams import hyperparams

__all__ = ["agreement", "check_shapes", "distinct", "current_values", "unchanged"]


def current_values(groups: Sequence[Mapping[str, Any]], keys: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """The hyperparameters of each group by dotted name."""
    return [{name: group[key] for key, name in own.items()} for group, own in zip(groups, keys, strict=True)]


def check_shapes(tx: Transform, values: Mapping[str, Any]) -> None:
    """Refuse a tensor of other shape than the number that it stands for."""
    defaults = hyperparams(tx)
    for name, value in values.items():
        default = defaults[name]
        wanted = tuple(default.shape) if isinstance(default, Tensor) else ()
        if isinstance(value, Tensor) and tuple(value.shape) != wanted:
            raise ValueError(f"{name} must be a number or a tensor of shape {wanted}, found {tuple(value.shape)}")


def agreement(values: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The value of each name in the first group that has it, and the names about which groups disagree."""
    agreed: dict[str, Any] = {}
    conflicts: list[str] = []
    for group in values:
        for name, value in group.items():
            if name in agreed and not _equal(agreed[name], value):
                conflicts.append(name)
            agreed.setdefault(name, value)
    return agreed, conflicts


def distinct(
    values: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]]
) -> list[tuple[Mapping[str, Any], list[str]]]:
    """Different values, each with the members of all groups that have them."""
    found: list[tuple[Mapping[str, Any], list[str]]] = []
    for own, names in zip(values, members, strict=True):
        same = next((run for run in found if _all_equal(run[0], own)), None)
        if same is None:
            found.append((own, list(names)))
        else:
            same[1].extend(names)
    return found


def unchanged(new: list[dict[str, Any]], old: list[dict[str, Any]]) -> bool:
    """True if all groups have the values that they had."""
    return len(new) == len(old) and all(_all_equal(a, b) for a, b in zip(new, old, strict=True))


def _equal(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def _all_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
