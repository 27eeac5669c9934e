"""The state of a transform in ``optimizer.state``, and the entries that a caller has assigned there or removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import is_
from typing import Any

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


@dataclass(eq=False)
class StateLeaf:
    """A leaf of the state, and its entry in ``optimizer.state``; of a step count, one entry for each parameter."""

    index: int
    """Its index among the leaves of the state."""
    names: tuple[str, ...]
    """The names of the parameters under which it is shown: its own, or all for a leaf such as a step count."""
    key: str
    """Its key there, such as "momentum.trace"."""
    value: Any = _NO_ENTRY
    """The leaf at the last `StateEntries.update`, such as this rank's part of a tensor."""
    shown: Any = _NO_ENTRY
    """The object that ``optimizer.state`` has for it, such as a DTensor. In one process, it is the leaf itself."""

    def values_in(self, entries_of: Mapping[str, Group]) -> dict[str, Any]:
        """Return the values that the entries of parameters have for this leaf, by the name of the parameter.

        A leaf of one parameter has one value. A step count, which all parameters share, has one for each of them.

        >>> count = StateLeaf(0, names=("w", "b"), key="count")
        >>> count.values_in({"w": {"trace": 0.5, "count": 3}, "b": {"count": 3}})
        {'w': 3, 'b': 3}
        """
        values: dict[str, Any] = {}
        for name in self.names:
            if name in entries_of and self.key in entries_of[name]:
                values[name] = entries_of[name][self.key]
        return values


class StateEntries:
    """Keeps ``optimizer.state`` up to date: a tensor is an entry of its parameter, a step count of every parameter.

    Args:
        state: the state of the transform.
        named: the parameters by name.
    """

    def __init__(self, state: PyTree, named: NamedTensors) -> None:
        """Find the key and the parameters of each tensor (leaf) of the state. `update` then fills ``optimizer.state``.

        >>> zeros, count = torch.zeros(2), torch.tensor(0)
        >>> entries = StateEntries(
        ...     {"trace": {"w": zeros}, "count": count}, {"w": zeros, "b": zeros}
        ... )
        >>> for leaf in entries.leaves:
        ...     print(leaf.index, leaf.names, leaf.key)
        0 ('w', 'b') count
        1 ('w',) trace
        """
        self.named = dict(named)
        self.leaves: list[StateLeaf] = []
        """The leaves of the state, in their order."""
        self.leaves_of: dict[str, dict[str, StateLeaf]] = {name: {} for name in named}
        """The same objects for each parameter, by key: ``{"bias": {"momentum.trace": leaf, "count": leaf}}``."""
        all_names = tuple(named)
        for index, (owner, path) in enumerate(ownership_of(state, named)):
            # A leaf such as a step count belongs to no single parameter: it is an entry of each of them.
            names = all_names if owner is None else (owner,)
            # The path ("momentum", "trace") becomes "momentum.trace".
            leaf = StateLeaf(index, names, path_of(path))
            self.leaves.append(leaf)
            for name in names:
                self.leaves_of[name][leaf.key] = leaf

    def update(
        self, entries: Mapping[Tensor, Group], state: PyTree, show: Callable[[int, Any], Any]
    ) -> None:
        """Put the tensors of a new state into ``optimizer.state``, where users look for them.

        >>> param = torch.ones(2)
        >>> state = {"trace": {"w": torch.zeros(2)}}
        >>> entries_of = {param: {}}
        >>> StateEntries(state, {"w": param}).update(
        ...     entries_of, state, show=lambda index, leaf: leaf
        ... )
        >>> entries_of[param]
        {'trace': tensor([0., 0.])}

        Args:
            entries: ``optimizer.state``, such as ``{parameter: {"momentum.trace": tensor}}``.
            state: the new state of the transform.
            show: converts ``(index, leaf)`` to the form for users: this rank's part of a tensor to a DTensor.
        """
        for leaf, value in zip(self.leaves, tree.leaves(state), strict=True):
            # Most steps write into the tensors of the state, so that the entries show the new values already.
            if value is leaf.value:
                continue
            # The state has a new tensor object: write it into the entries of its parameter, or of all for a step count.
            leaf.shown = show(leaf.index, value)
            for name in leaf.names:
                entries[self.named[name]][leaf.key] = leaf.shown
            leaf.value = value  # last, so that an error above leaves the leaf to the next call

    def with_dtensors(self, state: PyTree) -> PyTree:
        """Return a state with DTensors in place of this rank's parts of sharded tensors.

        They are the objects in ``optimizer.state``, so that `count_writes` finds all writes of a caller into them.
        """
        values, treedef = tree.flatten(state)
        for leaf in self.leaves:
            if is_dtensor(leaf.shown):
                values[leaf.index] = leaf.shown
        return tree.unflatten(treedef, values)

    def count_writes(self) -> None:
        """Count writes of a caller into DTensors of ``optimizer.state`` as writes into the tensors of the state.

        `InitialState` compares these counts, to find tensors that a caller has written, as by
        ``optimizer.state[param]["momentum.trace"].zero_()``. Torch counts this for the DTensor alone, not for its local
        tensor, which is in the state. One write may be counted several times, because only a change of a count matters.
        """
        for leaf in self.leaves:
            shown = leaf.shown
            is_wrapper = is_dtensor(shown) or isinstance(shown, FlatShardTensor)
            # Another rank may have the local tensor. Torch counts no writes into inference tensors.
            if not is_wrapper or leaf.value is None or shown.is_inference():
                continue
            has_writes = shown._version > 0
            if has_writes:
                increment_version(leaf.value)

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
        # A parameter was removed, and another one added at the end.
        if not all(map(is_, state, self.named.values())):
            return True
        # Without an edit, each parameter has the keys of its leaves, in their order.
        values: list[object] = []
        leaves: list[StateLeaf] = []
        for entries, leaf_of_key in zip(state.values(), self.leaves_of.values(), strict=True):
            if entries is None or list(entries) != list(leaf_of_key):
                return True
            values += entries.values()
            leaves += leaf_of_key.values()
        # Compare with the objects that `update` has put there, to find those that were assigned.
        return not all(map(is_, values, [leaf.shown for leaf in leaves]))


def entries_by_name(
    entries: StateEntries, state: Mapping[Tensor, Group], groups: Iterable[Group]
) -> dict[str, Group]:
    """Return ``optimizer.state``, which a user has edited, with names in place of tensors.

    Parameters whose entries were all removed are left out. Raise ValueError if a tensor is no parameter, if only some
    entries of a parameter were removed, or if others were added.

    >>> param, state = torch.ones(2), {"trace": {"w": torch.zeros(2)}}
    >>> entries_by_name(
    ...     StateEntries(state, {"w": param}), {param: {"trace": torch.ones(2)}}, groups=[]
    ... )
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
        _require_keys(name, entries_of_tensor.keys(), entries.leaves_of[name].keys())
        entries_of[name] = entries_of_tensor
    return entries_of


def _names_of_tensors(named: NamedTensors, groups: Iterable[Group]) -> dict[Tensor, str]:
    """Return the names of the parameters, and of tensors that a caller has put into param groups to replace them."""
    name_of = {param: name for name, param in named.items()}
    for group in groups:
        # A group that the caller has edited may have more tensors than names. It is checked later.
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False):
            # A known tensor keeps its name where the caller has put it.
            name_of.setdefault(param, name)
    return name_of


def read_assigned(
    entries: StateEntries, entries_of: Mapping[str, Group], stepping: Stepping
) -> list[Load]:
    """Return the values to copy into the state from tensors that a caller has assigned in ``optimizer.state``.

    For example, ``optimizer.state[param]["momentum.trace"] = tensor`` becomes the index of this trace among the leaves
    of the state, with the values of the tensor. Raise if a value does not fit, or if a leaf that all parameters share
    has several values.

    Args:
        entries: the leaves of the state, with the tensors that were last shown in ``optimizer.state``.
        entries_of: what it has now for each parameter, by name, such as ``{"bias": {"momentum.trace": tensor}}``.
        stepping: converts an assigned tensor to the values of this rank.
    """
    loads: list[Load] = []
    for leaf in entries.leaves:
        values = leaf.values_in(entries_of)
        assigned = {name: value for name, value in values.items() if value is not leaf.shown}
        if not assigned:  # the usual case
            continue
        for name, value in assigned.items():
            _require_like(name, leaf, value)
        common_value = _common_value(leaf.key, assigned, len(values))
        # Over ranks, the tensor may be a DTensor, of which this rank loads its own part.
        try:
            local_value = stepping.local_value(leaf.index, leaf.shown, common_value)
        except Misfit as misfit:
            raise ValueError(
                f"optimizer.state: {leaf.key!r} of {next(iter(values))!r} {misfit}"
            ) from None
        loads.append(Load(leaf.index, local_value))
    return loads


def warn_of_shared(entries: StateEntries, emptied: Sequence[str]) -> None:
    """Warn if the state of some parameters starts again, but not the step count that all parameters share.

    For example, Adam's moments of one layer were removed from ``optimizer.state``, and the count is 1000. The moments
    begin at zero, and the correction for the first steps, which depends on the count, is not applied again.

    Args:
        entries: the entries of all parameters.
        emptied: the names of the parameters whose entries were removed.
    """
    # A shared key is "scale_by_adam.count", for example.
    shared_keys = [leaf.key for leaf in entries.leaves if len(leaf.names) > 1]
    # If the entries of all parameters were removed, the count starts again, too, and there is nothing to warn of.
    if shared_keys and 0 < len(emptied) < len(entries.named):
        warn_caller(
            f"optimizer.state: the state of {emptied[0]!r} starts again, but {shared_keys[0]!r} continues, "
            "because all parameters share it, so the first updates may be larger than in a new optimizer; "
            "optimizer.state.clear() starts all again"
        )


def _require_keys(name: str, keys: Set[str], expected_keys: Set[str]) -> None:
    """Raise ValueError if a caller has removed or added some entries of a parameter in ``optimizer.state``.

    For example, the state of AdamW for "bias" has two moments, and the caller has deleted one.

    Args:
        name: the name of the parameter.
        keys: the keys that it has in ``optimizer.state``, such as ``{"momentum.trace"}``.
        expected_keys: the keys that it must have.
    """
    missing = sorted(expected_keys - keys)
    if missing:
        raise ValueError(
            f"optimizer.state: {name!r} has no {missing[0]!r}, expected {sorted(expected_keys)}: put it back, write "
            "zeros into it, or remove all entries of the parameter to start its state again"
        )
    unknown = sorted(map(str, keys - expected_keys))
    if unknown:
        raise ValueError(
            f"optimizer.state: {name!r} has an entry {unknown[0]!r} that no transform reads, expected only "
            f"{sorted(expected_keys)}: keep it in a dict of your own"
        )


def _require_like(name: str, leaf: StateLeaf, value: object) -> None:
    """Raise unless a value that was assigned for a leaf is a tensor with the shape, dtype and device of that leaf.

    Its values are copied into the leaf, and no conversion of them should be silent. ``name`` is the parameter.

    >>> leaf = StateLeaf(0, ("bias",), "momentum.trace", shown=torch.zeros(3))
    >>> _require_like("bias", leaf, torch.zeros(2))
    Traceback (most recent call last):
    ValueError: optimizer.state: 'momentum.trace' of 'bias' is (2,) torch.float32 cpu, expected (3,) ...
    """
    # The texts have shape, dtype and device, such as "(2, 3) torch.float32 cpu": compare all three at once.
    if _kind_text(value) == _kind_text(leaf.shown):
        return
    error = ValueError if isinstance(value, Tensor) else TypeError
    raise error(
        f"optimizer.state: {leaf.key!r} of {name!r} is {_kind_text(value)}, expected {_kind_text(leaf.shown)}: convert "
        "it, or write into the tensor that is there"
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
