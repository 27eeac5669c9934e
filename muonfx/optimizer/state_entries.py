"""The state of a transform in ``optimizer.state``, and the entries that a caller has assigned there or removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core.checks import warn_caller
from muonfx.optimizer.group_numbers import Group
from muonfx.optimizer.local_values import Load, Misfit
from muonfx.optimizer.stepping import Stepping
from muonfx.tree import PyTree
from muonfx.tree.members import ownership_of


def path_of(entries: tuple[object, ...]) -> str:
    """Join the path of a tensor in the state to a key for ``optimizer.state``, such as "momentum.trace"."""
    # Dots, because tools that write a state dict to flat files separate its levels by slashes.
    return ".".join(map(str, entries))


class StateSlot(NamedTuple):
    """The position of a leaf of the state in ``optimizer.state``."""

    params: tuple[Tensor, ...]
    """The parameters under which it is shown: its own, or all for a leaf such as a step count."""
    key: str
    """Its key there, such as "momentum.trace"."""
    is_shared: bool
    """True if it belongs to no single parameter."""


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
        for index, (owner, path) in enumerate(ownership_of(state, named)):
            names = list(named) if owner is None else [owner]
            key = path_of(path)
            self.slots.append(StateSlot(tuple([named[name] for name in names]), key, owner is None))
            for name in names:
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
            self.shown[index] = show(index, leaf)
            for param in self.slots[index].params:
                entries[param][self.slots[index].key] = self.shown[index]
        self._leaves = leaves

    def is_edited(self, entries: Mapping[Tensor, Group]) -> bool:
        """Return True if a caller has assigned, added or removed an entry of ``entries`` (``optimizer.state``)."""
        if len(entries) != len(self.indices):
            return True
        number_shown = 0  # if ``entries`` has more, some were added
        for slot, leaf in zip(self.slots, self.shown, strict=True):
            for param in slot.params:
                if param not in entries or entries[param].get(slot.key, ...) is not leaf:
                    return True
            number_shown += len(slot.params)
        return number_shown != sum(map(len, entries.values()))


class Edits(NamedTuple):
    """The changes that a caller has made in ``optimizer.state``."""

    loads: list[Load]
    """The assigned tensors."""
    emptied: list[str]
    """The names of the parameters without entries, whose state starts again."""
    shared: list[str]
    """The keys of the tensors that all parameters share, such as a count."""


def read_edits(
    entries: StateEntries,
    state: Mapping[Tensor, Group],
    params: Mapping[str, tuple[Tensor, Tensor]],
    stepping: Stepping,
) -> Edits:
    """Return the changes in ``state`` (``optimizer.state``), or raise ValueError.

    Args:
        entries: the tensors that were last shown in ``state``.
        state: ``optimizer.state``.
        params: a dict from name to two tensors: the parameter for which the state was shown, and the one that has
            replaced it in the groups. Usually both are the same.
        stepping: converts an assigned tensor to the values of this rank.
    """
    _require_known(state, params)
    edits = Edits([], [], [slot.key for slot in entries.slots if slot.is_shared])
    assigned: dict[int, dict[str, Tensor]] = {}  # for a leaf of the state, the tensors by the name of the parameter
    for name, (param, replaced_by) in params.items():
        indices = entries.indices[name]
        entry = state.get(replaced_by) or state.get(param)
        if not entry:
            if indices:
                edits.emptied.append(name)
            continue
        _require_keys(name, entry, indices)
        for key, index in indices.items():
            value = entry[key]
            leaf = entries.shown[index]
            if value is not leaf:
                _require_like(name, key, value, leaf)
                assigned.setdefault(index, {})[name] = value
    number_with_entries = len(params) - len(edits.emptied)
    for index, value_of in assigned.items():
        slot = entries.slots[index]
        if slot.is_shared:
            value = _common_value(slot.key, value_of, number_with_entries)
            edits.loads.append(Load(slot.key, index, value))
            continue
        for name, value in value_of.items():  # the parameter alone
            title = f"{slot.key!r} of {name!r}"
            try:
                local_value = stepping.local_value(index, entries.shown[index], value)
            except Misfit as misfit:
                raise ValueError(f"optimizer.state: {title} {misfit}") from None
            edits.loads.append(Load(title, index, local_value))
    return edits


def warn_of_shared(edits: Edits, number: int) -> None:
    """Warn if the state of some parameters starts again, but not the count that all parameters share."""
    if edits.shared and edits.emptied and len(edits.emptied) < number:
        warn_caller(
            f"optimizer.state: the state of {edits.emptied[0]!r} starts again, but {edits.shared[0]!r} continues, "
            "because all parameters share it, so the first updates may be larger than in a new optimizer; "
            "optimizer.state.clear() starts all again"
        )


def _require_known(state: Mapping[Tensor, Group], params: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise ValueError if ``state`` (``optimizer.state``) has entries for a tensor that is no parameter."""
    known = {id(tensor) for pair in params.values() for tensor in pair}
    for tensor, entry in state.items():
        if entry and id(tensor) not in known:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else repr(tensor)
            raise ValueError(
                f"optimizer.state: found entries for {shape}, which is no parameter of this optimizer: put a tensor "
                "that replaces a parameter at its position in param_groups, too"
            )


def _require_keys(name: str, entry: Group, indices: Mapping[str, int]) -> None:
    """Raise ValueError unless the entries of a parameter have exactly the keys of ``indices``."""
    if missing := sorted(indices.keys() - entry.keys()):
        raise ValueError(
            f"optimizer.state: {name!r} has no {missing[0]!r}, expected {sorted(indices)}: put it back, write zeros "
            "into it, or remove all entries of the parameter to start its state again"
        )
    if unknown := sorted(map(str, entry.keys() - indices.keys())):
        raise ValueError(
            f"optimizer.state: {name!r} has an entry {unknown[0]!r} that no transform reads, expected only "
            f"{sorted(indices)}: keep it in a dict of your own"
        )


def _require_like(name: str, key: str, value: object, leaf: object) -> None:
    """Raise unless an assigned value is a tensor with the shape, dtype and device of the ``leaf`` that was there."""
    if not isinstance(value, Tensor) or not isinstance(leaf, Tensor):
        found = type(value).__name__
        raise TypeError(
            f"optimizer.state: {key!r} of {name!r} must be a tensor, found {found}: write into the tensor that is "
            "there, as in optimizer.state[param][key].fill_(0)"
        )
    if value.shape != leaf.shape or value.dtype != leaf.dtype or value.device != leaf.device:
        raise ValueError(
            f"optimizer.state: {key!r} of {name!r} is {_kind_text(value)}, expected {_kind_text(leaf)}: convert it, or "
            "write into the tensor that is there"
        )


def _kind_text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device}"


def _common_value(key: str, values: Mapping[str, Tensor], number: int) -> Tensor:
    """Return the value that was assigned to a shared tensor for every parameter; raise if only some have it."""
    first = next(iter(values.values()))
    if len(values) < number or not all(torch.equal(first, value) for value in values.values()):
        raise ValueError(
            f"optimizer.state: {key!r} is one tensor of all {number} parameters, and was assigned for "
            f"{len(values)} of them, such as {next(iter(values))!r}: assign one value for all, or write into the tensor"
        )
    return first
