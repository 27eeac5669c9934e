"""Show the state of a transform in ``optimizer.state``, one dict of tensors for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from muonfx import tree
from muonfx.optimizer.group_numbers import Group
from muonfx.tree import PyTree
from muonfx.tree.members import ownership_of

Holder = TypeVar("Holder", Tensor, str)


def path_of(entries: tuple[object, ...]) -> str:
    """Join the path of a tensor in the state to a key for ``optimizer.state``, such as "momentum.trace"."""
    # Dots, because tools that write a state dict to flat files separate its levels by slashes.
    return ".".join(map(str, entries))


class StateSlot(NamedTuple):
    """The position of a leaf of the state in ``optimizer.state``."""

    owner: Tensor | None
    """The parameter under which it is shown; None if it is shown under every parameter, such as a step count."""
    key: str
    """Its key there, such as "momentum.trace"."""


class StateEntries:
    """Keeps ``optimizer.state`` up to date: a tensor is an entry of its parameter, a step count of every parameter.

    Args:
        state: the state of the transform.
        named: the parameters by name.
    """

    def __init__(self, state: PyTree, named: Mapping[str, Tensor]) -> None:
        self.slots: list[StateSlot] = []
        """The position of each leaf of the state."""
        self.indices: dict[str, dict[str, int]] = {name: {} for name in named}
        """For each parameter, the index of the leaf under each key: ``{"bias": {"momentum.trace": 0, "count": 1}}``."""
        for index, (parameter, path) in enumerate(ownership_of(state, named)):
            key = path_of(path)
            self.slots.append(StateSlot(None if parameter is None else named[parameter], key))
            for name in _holders(parameter, named):
                self.indices[name][key] = index
        self._leaves: list[Any] = [...] * len(self.slots)  # the leaves as last shown: none so far
        self.shown: list[Any] = list(self._leaves)
        """For each leaf, its form in ``optimizer.state``."""

    def update(self, entries: Mapping[Tensor, Group], state: PyTree, show: Callable[[int, Any], Any]) -> None:
        """Put the changed tensors, converted by ``show(index, tensor)``, into ``entries`` (``optimizer.state``)."""
        leaves = tree.leaves(state)
        for index, (leaf, last_leaf) in enumerate(zip(leaves, self._leaves, strict=True)):
            if leaf is last_leaf:
                continue
            owner, key = self.slots[index]
            self.shown[index] = show(index, leaf)
            for param in _holders(owner, entries):
                entries[param][key] = self.shown[index]
        self._leaves = leaves

    def is_edited(self, entries: Mapping[Tensor, Group], named: Mapping[str, Tensor]) -> bool:
        """Return True if a caller has assigned, added or removed an entry of ``entries`` (``optimizer.state``)."""
        if len(entries) != len(named):
            return True
        number_shown = 0  # if ``entries`` has more, some were added
        for (owner, key), leaf in zip(self.slots, self.shown, strict=True):
            for param in _holders(owner, named.values()):
                entry = entries.get(param)
                if entry is None or entry.get(key, ...) is not leaf:
                    return True
                number_shown += 1
        return number_shown != sum(map(len, entries.values()))


def _holders(owner: Holder | None, params: Iterable[Holder]) -> Iterable[Holder]:
    """Return the parameters under which a tensor of the state is shown: its owner, or all if it has none."""
    return params if owner is None else (owner,)
