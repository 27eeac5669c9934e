"""Read and write the hyperparameters in a param group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

Number = float | Tensor


Group = dict[str, Any]


"""A param group of a torch optimizer: a dict with "params", hyperparameters, and entries that schedulers add."""


class Hyperparam(NamedTuple):
    """An entry of a param group, such as "lr" or "betas", and the transform's numbers that the entry sets."""

    key: str
    """The key in the group, such as "betas"."""
    names: tuple[str, ...]
    """The dotted names of the numbers in the transform, as in `muonfx.hyperparams`."""
    is_tuple: bool = False
    """True if the value in the group is a tuple."""
    is_mirror: bool = False
    """True if other keys have the same numbers, as "momentum" repeats the first of "betas" for schedulers."""
    copies: int = 1
    """How many transforms the value sets: with 2, ``names`` are the numbers of one transform, then of the other."""

    @property
    def length(self) -> int:
        """The count of numbers in the group's value: 2 for "betas", else 1."""
        return len(self.names) // self.copies

    def numbers_in(self, value: Number | Sequence[Number]) -> Sequence[Number]:
        """Return one number for each of ``names``, from a param group's value. Raise if its count or type is wrong."""
        values = value if isinstance(value, Sequence) else (value,)
        if self.is_tuple != isinstance(value, Sequence) or len(values) != self.length:
            expected = f"{self.length} numbers" if self.is_tuple else "a number"
            raise ValueError(f"{self.key!r} in a group must be {expected}, found {value!r}")
        for number in values:
            if not isinstance(number, int | float | Tensor | Real) or isinstance(number, bool):
                raise TypeError(
                    f"{self.key!r} in a group must be a number or a tensor of one element, found {number!r}"
                )
        return [*values] * self.copies

    def value_of(self, numbers: Mapping[str, Number]) -> Any:
        """Return the value for a param group, such as ``(0.9, 0.95)``, from numbers by dotted name."""
        values = tuple([numbers[name] for name in self.names[: self.length]])
        return values if self.is_tuple else values[0]


class GroupNumbers:
    """Reads and writes the hyperparameters of one param group, in which two keys may hold the same number."""

    def __init__(self, hyperparams: Sequence[Hyperparam]) -> None:
        self.hyperparams = tuple(hyperparams)
        self.keys = frozenset({one.key for one in hyperparams})
        self._last: dict[str, Number] = {}
        self._entries: Group = {}

    @property
    def names(self) -> list[str]:
        """The dotted names of the hyperparameters in the transform, such as "momentum.decay"."""
        return [name for one in self.hyperparams if not one.is_mirror for name in one.names]

    def parse(self, values: Group, *, mirrors: bool = True) -> dict[str, Number]:
        """Return a group's hyperparameters by dotted name. If two keys set the same one, the changed value counts."""
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
        """Return a new group's hyperparameters by dotted name, from ``defaults`` if ``given`` lacks them."""
        return {name: defaults[name] for name in self.names} | self.parse(given, mirrors=False)

    def entries(self, numbers: Mapping[str, Number]) -> Group:
        """Return the entries of a param group, such as ``lr`` and ``betas``, for numbers given by dotted name."""
        return {hyperparam.key: hyperparam.value_of(numbers) for hyperparam in self.hyperparams}

    def read(self, group: Group) -> dict[str, Number]:
        """Return a group's current hyperparameters by dotted name, and synchronize keys that hold the same number.

        If no number has changed, return the same dict object as in the last call.
        """
        # torch.compile with dynamic=True cannot trace identities of tuples such as betas.
        may_skip = self._entries and not torch.compiler.is_compiling()
        if may_skip and all(map(is_, map(group.get, self._entries), self._entries.values())):
            return self._last
        numbers = self.parse(group)
        # torch.compile with dynamic=True cannot trace a comparison of sets.
        missing = [one for one in self.hyperparams if any(name not in numbers for name in one.names)]
        if missing:
            last = self._entries.get(missing[0].key)
            was = "" if last is None else f" (it was {last!r})"
            raise ValueError(
                f"param_groups: the group of {next(iter(group.get('param_names', ())), 'no parameter')!r} (label "
                f"{group.get('label')!r}) has no {missing[0].key!r}, which its transforms read: set it{was}"
            )
        for one in self.hyperparams:
            current = [numbers[name] for name in one.names]
            if one.key not in group or not all(map(equal, one.numbers_in(group[one.key]), current)):
                group[one.key] = one.value_of(numbers)
        last = self._last
        if last.keys() != numbers.keys() or not all(equal(last[name], value) for name, value in numbers.items()):
            self._last = numbers
        self._entries = {one.key: group[one.key] for one in self.hyperparams}
        return self._last


class BoundGroup(NamedTuple):
    """A param group, its parameter names at the last step, and the object that reads its hyperparameters."""

    group: Group
    names: list[str]
    numbers: GroupNumbers


def own_copy(value: Any) -> Any:
    """Return a copy of a tensor, so that a scheduler that writes into it changes one group; return others unchanged."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def separate_tensors(groups: Iterable[BoundGroup]) -> None:
    """Replace a tensor that several groups or several hyperparameters have in common by a copy for each of them."""
    owned = set[int]()
    for bound in groups:
        numbers = dict(bound.numbers.read(bound.group))
        has_changed = False
        for name, value in numbers.items():
            if not isinstance(value, Tensor):
                continue
            if id(value) in owned:
                numbers[name] = own_copy(value)
                has_changed = True
            owned.add(id(numbers[name]))
        if has_changed:
            bound.group.update(bound.numbers.entries(numbers))


def scalar(name: str, value: Any) -> Any:
    """Return a hyperparameter. A tensor of one element becomes a 0-d view, and a larger one raises ValueError."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name} must be a number or a tensor of one element, found shape {tuple(value.shape)}")
    return value.reshape(()) if value.ndim else value


def fitted(defaults: Mapping[str, Number], values: Sequence[Mapping[str, Number]]) -> list[dict[str, Number]]:
    """Convert the numbers of each group to the types and shapes of the transform's own numbers, ``defaults``."""
    # One 0-d view of each tensor, because a scheduler may write into it.
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
    """Return True if two numbers are equal, or if both are one tensor object. Tensor values are not compared."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
