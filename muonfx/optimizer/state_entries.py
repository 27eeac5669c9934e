"""Show the state of a transform in ``optimizer.state``, one dict of tensors for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from muonfx import tree
from muonfx.optimizer.group_numbers import Group
from muonfx.tree import PyTree
from muonfx.tree.members import ownership_of


def path_of(entries: tuple[object, ...]) -> str:
    """Join the path of a tensor in the state to a key for ``optimizer.state``, such as "momentum.trace"."""
    # Dots, because tools that write a state dict to flat files separate its levels by slashes.
    return ".".join(map(str, entries))


class StateEntries:
    """Keeps ``optimizer.state`` up to date: a tensor is an entry of its parameter, a step count of every parameter.

    Args:
        state: the state of the transform.
        named: the parameters by name.
    """

    def __init__(self, state: PyTree, named: Mapping[str, Tensor]) -> None:
        self.slots: list[tuple[Tensor | None, str]] = []
        """For each leaf, its parameter, or None if it is shown under each, and its key in ``optimizer.state``."""
        for ownership in ownership_of(state, named):
            param = None if ownership.parameter is None else named[ownership.parameter]
            self.slots.append((param, path_of(ownership.path)))
        self._leaves: list[Any] = [...] * len(self.slots)  # the leaves as last shown: none so far
        self.shown: list[Any] = list(self._leaves)
        """For each leaf, its form in ``optimizer.state``."""

    def update(self, entries: Mapping[Tensor, Group], state: PyTree, show: Callable[[int, Any], Any]) -> None:
        """Put the changed tensors, converted by ``show(index, tensor)``, into ``entries`` (``optimizer.state``)."""
        leaves = tree.leaves(state)
        for place, (new, shown) in enumerate(zip(leaves, self._leaves, strict=True)):
            if new is not shown:
                owner, key = self.slots[place]
                leaf = show(place, new)
                self.shown[place] = leaf
                for param in _holders(owner, entries):
                    entries[param][key] = leaf
        self._leaves = leaves

    def is_edited(self, entries: Mapping[Tensor, Group], named: Mapping[str, Tensor]) -> bool:
        """Return True if a caller has assigned, added or removed an entry of ``entries`` (``optimizer.state``)."""
        if len(entries) != len(named):
            return True
        number = 0  # of the entries that were shown: if ``entries`` has more, some were added
        for (owner, key), leaf in zip(self.slots, self.shown, strict=True):
            for param in _holders(owner, named.values()):
                entry = entries.get(param)
                if entry is None or entry.get(key, ...) is not leaf:
                    return True
                number += 1
        return number != sum(map(len, entries.values()))

    def places(self, entries: Mapping[Tensor, Group]) -> dict[tuple[int, str], int]:
        """Map (id of a parameter, key in ``optimizer.state``) to the index of a tensor in the state."""
        return {
            (id(param), key): place
            for place, (owner, key) in enumerate(self.slots)
            for param in _holders(owner, entries)
        }


def _holders(owner: Tensor | None, params: Iterable[Tensor]) -> Iterable[Tensor]:
    """Return the parameters under which a tensor of the state is shown: its owner, or all if it has none."""
    return params if owner is None else (owner,)
