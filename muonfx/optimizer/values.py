"""Hyperparameters in groups: their keys, their validation, their changes, and agreement between groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["BoundGroup", "Group", "GroupNumbers", "Hyperparam", "Number", "equal", "fitted", "scalar"]

Number = float | Tensor

Group = dict[str, Any]
"""A parameter group of torch, with entries of any kind, also entries that others add."""


class Hyperparam(NamedTuple):
    """An entry of a group: one number of the transform, or a tuple of several."""

    key: str
    """Its key in the group."""
    names: tuple[str, ...]
    """The dotted names of its numbers."""
    is_tuple: bool = False
    is_mirror: bool = False
    """True if other entries have its numbers too: for schedulers that write one key into all groups."""

    def numbers_in(self, value: Number | Sequence[Number]) -> Sequence[Number]:
        """Return the numbers in an entry's value, or raise if it has another length or type."""
        values = value if isinstance(value, Sequence) else (value,)
        if self.is_tuple != isinstance(value, Sequence) or len(values) != len(self.names):
            wanted = f"{len(self.names)} numbers" if self.is_tuple else "a number"
            raise ValueError(f"{self.key!r} in a group must be {wanted}, found {value!r}")
        for one in values:
            if not isinstance(one, int | float | Tensor | Real) or isinstance(one, bool):
                raise TypeError(f"{self.key!r} in a group must be a number or a tensor of one element, found {one!r}")
        return values


class GroupNumbers:
    """Reads and writes the numbers of a group under all of their keys."""

    def __init__(self, hyperparams: Sequence[Hyperparam]) -> None:
        self.hyperparams = tuple(hyperparams)
        self.keys = frozenset({one.key for one in hyperparams})
        self._last: dict[str, Number] = {}
        self._entries: Group = {}

    @property
    def names(self) -> list[str]:
        """The dotted names of the numbers."""
        return [name for one in self.hyperparams if not one.is_mirror for name in one.names]

    def parse(self, values: Group, *, mirrors: bool = True) -> dict[str, Number]:
        """Return a group's numbers by dotted name; if two keys of a number differ, the changed key is used."""
        found: dict[str, Number] = {}
        said: dict[str, str] = {}
        for one in self.hyperparams:
            if one.key not in values or (one.is_mirror and not mirrors):
                continue
            for name, value in zip(one.names, one.numbers_in(values[one.key]), strict=True):
                if name in found and not equal(found[name], value):
                    if name in self._last and equal(value, self._last[name]):
                        continue
                    if name not in self._last or not equal(found[name], self._last[name]):
                        raise ValueError(
                            f"{said[name]!r} and {one.key!r} in a group both set {name}, to {found[name]!r} and "
                            f"{value!r}: set one of them"
                        )
                found[name], said[name] = value, one.key
        return found

    def complete(self, given: Group, defaults: Mapping[str, Number]) -> dict[str, Number]:
        """Return a new group's numbers by dotted name: given ones, and the transform's own for the others."""
        return {name: defaults[name] for name in self.names} | self.parse(given, mirrors=False)

    def entries(self, numbers: Mapping[str, Number]) -> Group:
        """Return the entries of a group for all of its numbers."""
        return {
            one.key: tuple(numbers[name] for name in one.names) if one.is_tuple else numbers[one.names[0]]
            for one in self.hyperparams
        }

    def read(self, group: Group) -> dict[str, Number]:
        """Return a group's current numbers and make the keys of each number agree; an error leaves it unchanged.

        The result is the same dict as before if no number has changed.
        """
        if self._entries and all(map(is_, map(group.get, self._entries), self._entries.values())):
            return self._last
        numbers = self.parse(group)
        if missing := [one for one in self.hyperparams if not numbers.keys() >= set(one.names)]:
            last = self._entries.get(missing[0].key)
            was = "" if last is None else f" (it was {last!r})"
            raise ValueError(
                f"param_groups: the group of {next(iter(group.get('param_names', ())), 'no parameter')!r} (label "
                f"{group.get('label')!r}) has no {missing[0].key!r}, which its transforms read: set it{was}"
            )
        for one in self.hyperparams:
            wanted = [numbers[name] for name in one.names]
            if one.key not in group or not all(map(equal, one.numbers_in(group[one.key]), wanted)):
                group[one.key] = tuple(wanted) if one.is_tuple else wanted[0]
        last = self._last
        if last.keys() != numbers.keys() or not all(equal(last[name], value) for name, value in numbers.items()):
            self._last = numbers
        self._entries = {one.key: group[one.key] for one in self.hyperparams}
        return self._last


class BoundGroup(NamedTuple):
    """A group of an optimizer, as the optimizer last found it."""

    group: Group
    names: list[str]
    numbers: GroupNumbers


def scalar(name: str, value: Any) -> Any:
    """Return a tensor of one element as a 0-d view and other values unchanged; larger tensors raise ValueError."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name} must be a number or a tensor of one element, found shape {tuple(value.shape)}")
    return value.reshape(()) if value.ndim else value


def fitted(defaults: Mapping[str, Number], values: Sequence[Mapping[str, Number]]) -> list[dict[str, Number]]:
    """Convert the numbers of groups to the types and shapes of a transform's own numbers, given as `defaults`."""
    # One 0-d view of each tensor: groups that share a tensor agree, and a scheduler may write into it.
    views: dict[int, Number] = {}

    def fit(name: str, value: Number) -> Number:
        if not isinstance(value, Tensor):
            return value if isinstance(value, int | float) else float(value)
        default = defaults[name]
        if not isinstance(default, Tensor) or not default.ndim:
            return views.setdefault(id(value), scalar(name, value))
        if value.shape != default.shape:
            shapes = f"{tuple(default.shape)}, found {tuple(value.shape)}"
            raise ValueError(f"{name} must be a number or a tensor of shape {shapes}")
        return value

    return [{name: fit(name, value) for name, value in own.items()} for own in values]


def equal(a: object, b: object) -> bool:
    """Return True for equal numbers and for the same tensor; values of tensors are not read."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
