"""The state of a transform in ``optimizer.state``, and the entries that a caller has assigned there or removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from muonfx import tree
from muonfx.core.checks import warn_caller
from muonfx.optimizer.group_numbers import Group
from muonfx.optimizer.local_values import Load, Misfit
from muonfx.optimizer.named_parameters import NamedTensors
from muonfx.optimizer.stepping import Stepping
from muonfx.sharding.shards.dtensors import is_dtensor
from muonfx.sharding.shards.flat_shard import FlatShardTensor
from muonfx.tree import PyTree
from muonfx.tree.members import ownership_of


def path_of(entries: tuple[object, ...]) -> str:
    """Join the path of a tensor in the state to a key for ``optimizer.state``, such as "momentum.trace"."""
    # Dots, because tools that write a state dict to flat files separate its levels by slashes.
    return ".".join(map(str, entries))


_NO_ENTRY = object()
"""A value that is no leaf of a state: there is no entry in ``optimizer.state``."""


class StateSlot(NamedTuple):
    """The position of a leaf of the state in ``optimizer.state``."""

    names: tuple[str, ...]
    """The names of the parameters under which it is shown: its own, or all for a leaf such as a step count."""
    key: str
    """Its key there, such as "momentum.trace"."""


class StateEntries:
    """Keeps ``optimizer.state`` up to date: a tensor is an entry of its parameter, a step count of every parameter.

    Args:
        state: the state of the transform.
        named: the parameters by name.
    """

    def __init__(self, state: PyTree, named: NamedTensors) -> None:
        """Find the key and the parameters of each tensor (leaf) of the state. `update` then fills ``optimizer.state``.

        >>> zeros, count = torch.zeros(2), torch.tensor(0)
        >>> entries = StateEntries({"trace": {"w": zeros}, "count": count}, {"w": zeros, "b": zeros})
        >>> for slot in entries.slots:
        ...     print(slot.names, slot.key)
        ('w', 'b') count
        ('w',) trace
        """
        self.named = dict(named)
        self.slots: list[StateSlot] = []
        """The position of each leaf of the state."""
        self.indices: dict[str, dict[str, int]] = {name: {} for name in named}
        """For each parameter, the index of the leaf under each key: ``{"bias": {"momentum.trace": 0, "count": 1}}``."""
        all_names = tuple(named)
        for index, (owner, path) in enumerate(ownership_of(state, named)):
            key = path_of(path)  # ("momentum", "trace") becomes "momentum.trace"
            # A leaf such as a step count belongs to no single parameter: it is an entry of each of them.
            names = all_names if owner is None else (owner,)
            self.slots.append(StateSlot(names, key))
            for name in names:
                self.indices[name][key] = index
        # `update` sets the following lists. In one process they are equal.
        self._leaves: list[Any] = [_NO_ENTRY] * len(self.slots)
        """The leaves of the state at the last `update`, such as this rank's part of a tensor."""
        self.shown: list[Any] = [_NO_ENTRY] * len(self.slots)
        """For each leaf, the object that ``optimizer.state`` has for it, such as a DTensor."""

    def update(self, entries: Mapping[Tensor, Group], state: PyTree, show: Callable[[int, Any], Any]) -> None:
        """Put the tensors of a new state into ``optimizer.state``, where users look for them.

        >>> param = torch.ones(2)
        >>> state = {"trace": {"w": torch.zeros(2)}}
        >>> entries_of = {param: {}}
        >>> StateEntries(state, {"w": param}).update(entries_of, state, show=lambda index, leaf: leaf)
        >>> entries_of[param]
        {'trace': tensor([0., 0.])}

        Args:
            entries: ``optimizer.state``, such as ``{parameter: {"momentum.trace": tensor}}``.
            state: the new state of the transform.
            show: converts ``(index, leaf)`` to the form for users: this rank's part of a tensor to a DTensor.
        """
        leaves = tree.leaves(state)
        for index, (leaf, last_leaf) in enumerate(zip(leaves, self._leaves, strict=True)):
            # Most steps write into the tensors of the state, so that the entries show the new values already.
            if leaf is last_leaf:
                continue
            # This leaf is a new tensor object: write it into the entries of its parameter, or of all for a step count.
            self.shown[index] = show(index, leaf)
            slot = self.slots[index]  # the parameters that have this entry, and its key
            for name in slot.names:
                entries[self.named[name]][slot.key] = self.shown[index]
        self._leaves = leaves

    def with_dtensors(self, state: PyTree) -> PyTree:
        """Return a state with DTensors in place of this rank's parts of sharded tensors.

        They are the objects in ``optimizer.state``, so that `count_writes` finds all writes of a caller into them.
        """
        leaves, treedef = tree.flatten(state)
        for index, shown in enumerate(self.shown):  # what `optimizer.state` has for each leaf
            if is_dtensor(shown):
                leaves[index] = shown
        return tree.unflatten(treedef, leaves)

    def count_writes(self) -> None:
        """Count writes of a caller into DTensors of ``optimizer.state`` as writes into the tensors of the state.

        `InitialState` compares these counts, to find tensors that a caller has written, as by
        ``optimizer.state[param]["momentum.trace"].zero_()``. Torch counts this for the DTensor alone, not for its local
        tensor, which is in the state. One write may be counted several times, because only a change of a count matters.
        """
        for leaf, shown in zip(self._leaves, self.shown, strict=True):
            is_wrapper = is_dtensor(shown) or isinstance(shown, FlatShardTensor)
            if not is_wrapper or leaf is None or shown.is_inference():  # torch counts no writes into inference tensors
                continue
            has_writes = shown._version > 0
            if has_writes:
                increment_version(leaf)

    def is_edited(self, state: Mapping[Tensor, Group | None]) -> bool:
        """Return True if a caller has assigned, added or removed an entry of ``state`` (``optimizer.state``).

        For example, after ``optimizer.state[param]["momentum.trace"] = tensor``, or ``optimizer.state.clear()``.
        Values that were written into a tensor are no edit, because the state of the transform has the same tensor.

        >>> param, state = torch.ones(2), {"trace": {"w": torch.zeros(2)}}
        >>> entries, entries_of = StateEntries(state, {"w": param}), {param: {}}
        >>> entries.update(entries_of, state, show=lambda index, leaf: leaf)
        >>> entries.is_edited(entries_of)
        False
        >>> entries_of[param]["trace"] = torch.zeros(2)
        >>> entries.is_edited(entries_of)
        True
        """
        if len(state) != len(self.named):  # a parameter was added or removed
            return True
        # Without an edit, `state` has the parameters in their order, and for each one the keys in `index_of_key`.
        params, indices = self.named.values(), self.indices.values()
        for (tensor, entries), param, index_of_key in zip(state.items(), params, indices, strict=True):
            if tensor is not param:  # entries were removed, and others added at the end
                return True
            if entries is None or len(entries) != len(index_of_key):
                return True
            for key, index in index_of_key.items():
                if entries.get(key, _NO_ENTRY) is not self.shown[index]:  # another object than `update` has put there
                    return True
        return False


def entries_by_name(entries: StateEntries, state: Mapping[Tensor, Group], groups: Iterable[Group]) -> dict[str, Group]:
    """Return ``optimizer.state``, which a user has edited, with names in place of tensors.

    Parameters whose entries were all removed are left out. Raise ValueError if a tensor is no parameter, if only some
    entries of a parameter were removed, or if others were added.

    >>> param, state = torch.ones(2), {"trace": {"w": torch.zeros(2)}}
    >>> entries_by_name(StateEntries(state, {"w": param}), {param: {"trace": torch.ones(2)}}, groups=[])
    {'w': {'trace': tensor([1., 1.])}}

    Args:
        entries: the parameters and the keys that the optimizer has put into its state.
        state: ``optimizer.state``, which the caller has edited.
        groups: the param groups. The caller may have put a new tensor there, and assigned the state under it.
    """
    name_of = _names_of_tensors(entries.named, groups)
    entries_of: dict[str, Group] = {}
    for tensor, entries_of_tensor in state.items():
        if not entries_of_tensor:  # the caller has emptied them, or the transform keeps no state
            continue
        name = name_of.get(tensor)
        if name not in entries.named:
            raise ValueError(
                f"optimizer.state: found entries for {_kind_text(tensor)}, which is no parameter of this optimizer: "
                "put a tensor that replaces a parameter at its position in param_groups, too"
            )
        _require_keys(name, entries_of_tensor, entries.indices[name])
        entries_of[name] = entries_of_tensor
    return entries_of


def _names_of_tensors(named: NamedTensors, groups: Iterable[Group]) -> dict[Tensor, str]:
    """Return the names of the parameters, and of tensors that a caller has put into param groups to replace them."""
    name_of = {param: name for name, param in named.items()}
    for group in groups:
        # Not strict: a group that the caller has edited may have more tensors than names. It is checked later.
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False):
            name_of.setdefault(param, name)  # a known tensor keeps its name where the caller has put it
    return name_of


def read_assigned(entries: StateEntries, entries_of: Mapping[str, Group], stepping: Stepping) -> list[Load]:
    """Return the values to copy into the state from tensors that a caller has assigned in ``optimizer.state``.

    For example, ``optimizer.state[param]["momentum.trace"] = tensor`` becomes the index of this trace among the leaves
    of the state, with the values of the tensor. Raise if a value does not fit, or if a leaf that all parameters share
    has several values.

    Args:
        entries: the tensors that were last shown in ``optimizer.state``.
        entries_of: what it has now for each parameter, by name, such as ``{"bias": {"momentum.trace": tensor}}``.
        stepping: converts an assigned tensor to the values of this rank.
    """
    loads: list[Load] = []
    for index, slot in enumerate(entries.slots):  # for each leaf of the state
        # A leaf of one parameter has one value. A step count, which all parameters share, has one for each of them.
        values = {name: entries_of[name][slot.key] for name in slot.names if name in entries_of}
        assigned = _assigned_values(slot.key, values, entries.shown[index])
        if not assigned:  # the usual case
            continue
        common_value = _common_value(slot.key, assigned, len(values))
        # Over ranks, the tensor may be a DTensor, of which this rank loads its own part.
        try:
            local_value = stepping.local_value(index, entries.shown[index], common_value)
        except Misfit as misfit:
            raise ValueError(f"optimizer.state: {slot.key!r} of {next(iter(values))!r} {misfit}") from None
        loads.append(Load(index, local_value))
    return loads


def _assigned_values(key: str, values: Mapping[str, Any], shown: object) -> dict[str, Tensor]:
    """Return the tensors among ``values`` that a caller has assigned, by parameter name: others than the one shown.

    Raise if one has another shape, dtype or device. ``key`` is their key in ``optimizer.state``, for the message.
    """
    assigned: dict[str, Tensor] = {}
    for name, value in values.items():
        if value is not shown:
            _require_like(name, key, value, shown)
            assigned[name] = value
    return assigned


def warn_of_shared(entries: StateEntries, emptied: Sequence[str]) -> None:
    """Warn if the state of some parameters starts again, but not the step count that all parameters share.

    For example, Adam's moments of one layer were removed from ``optimizer.state``, and the count is 1000. The moments
    begin at zero, and the correction for the first steps, which depends on the count, is not applied again.

    Args:
        entries: the entries of all parameters.
        emptied: the names of the parameters whose entries were removed.
    """
    shared_keys = [slot.key for slot in entries.slots if len(slot.names) > 1]  # such as "scale_by_adam.count"
    # If the entries of all parameters were removed, the count starts again, too, and there is nothing to warn of.
    if shared_keys and 0 < len(emptied) < len(entries.indices):
        warn_caller(
            f"optimizer.state: the state of {emptied[0]!r} starts again, but {shared_keys[0]!r} continues, "
            "because all parameters share it, so the first updates may be larger than in a new optimizer; "
            "optimizer.state.clear() starts all again"
        )


def _require_keys(name: str, entry: Group, indices: Mapping[str, int]) -> None:
    """Raise ValueError if a caller has removed or added some entries of a parameter in ``optimizer.state``.

    For example, the state of AdamW for "bias" has two moments, and the caller has deleted one. ``entry`` is what the
    state has for the parameter, such as ``{"momentum.trace": tensor}``. The keys of ``indices`` are those that it must
    have.
    """
    missing = sorted(indices.keys() - entry.keys())
    if missing:
        raise ValueError(
            f"optimizer.state: {name!r} has no {missing[0]!r}, expected {sorted(indices)}: put it back, write zeros "
            "into it, or remove all entries of the parameter to start its state again"
        )
    unknown = sorted(map(str, entry.keys() - indices.keys()))
    if unknown:
        raise ValueError(
            f"optimizer.state: {name!r} has an entry {unknown[0]!r} that no transform reads, expected only "
            f"{sorted(indices)}: keep it in a dict of your own"
        )


def _require_like(name: str, key: str, value: object, leaf: object) -> None:
    """Raise unless an assigned value is a tensor with the shape, dtype and device of the ``leaf`` that was there.

    Its values are copied into the leaf, and no conversion of them should be silent.

    >>> _require_like("bias", "momentum.trace", torch.zeros(2), torch.zeros(3))
    Traceback (most recent call last):
    ValueError: optimizer.state: 'momentum.trace' of 'bias' is (2,) torch.float32 cpu, expected (3,) ...
    """
    # The texts have shape, dtype and device, such as "(2, 3) torch.float32 cpu": compare all three at once.
    if _kind_text(value) == _kind_text(leaf):
        return
    error = ValueError if isinstance(value, Tensor) else TypeError
    raise error(
        f"optimizer.state: {key!r} of {name!r} is {_kind_text(value)}, expected {_kind_text(leaf)}: convert it, or "
        "write into the tensor that is there"
    )


def _kind_text(value: object) -> str:
    """Describe a value for a message: "(2, 3) torch.float32 cpu" for a tensor, else its type, such as "float"."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {value.dtype} {value.device}"


def _common_value(key: str, values: NamedTensors, number: int) -> Tensor:
    """Return the one value that a user has assigned to a tensor of the state, which all parameters may share.

    A step count is such a tensor: ``optimizer.state`` has it for each parameter. Raise ValueError if different values
    were assigned, or a value for only some parameters.

    >>> _common_value("count", {"w": torch.tensor(5), "b": torch.tensor(5)}, 2)
    tensor(5)

    Args:
        key: the key of the leaf, such as "scale_by_adam.count".
        values: the assigned values by parameter name.
        number: how many parameters have the leaf; 1 for a leaf such as a momentum.
    """
    first_value, *other_values = values.values()
    # Fewer values than parameters: some still have the former tensor.
    if len(values) < number or not all(torch.equal(first_value, value) for value in other_values):
        raise ValueError(
            f"optimizer.state: {key!r} is one tensor of all {number} parameters, and was assigned for "
            f"{len(values)} of them, such as {next(iter(values))!r}: assign one value for all, or write into the tensor"
        )
    return first_value
