"""Steps of an optimizer in one process: create a state, run the placed transform on it, and show and load its leaves.

A `Stepping` has the transform and its current numbers, and no state: `TransformOptimizer` owns the state, and passes it
to each method. `SteppingOverRanks` has the same methods for sharded parameters. If groups have different numbers for a
transform, the transform runs once for each set of numbers (`by_groups`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.checks import check_params, check_updates_fit
from muonfx.core.donation import Donation, unshared
from muonfx.core.extras import check_values_of_extras
from muonfx.core.hyperparams import as_tensors, hyperparams
from muonfx.core.patterns import warn_of_unmatched
from muonfx.core.transform import Arguments, check_extras, patterns_in
from muonfx.core.value import numbers_of, prepared, with_numbers
from muonfx.core.visit import Visit, visit
from muonfx.optimizer.by_groups import (
    GroupMembers,
    common_numbers,
    different_values,
    for_groups,
    runs_once,
)
from muonfx.optimizer.group_numbers import (
    CallersTensors,
    Number,
    TrackedGroup,
    fitted,
    read_numbers,
    require_in_range,
    separate_tensors,
    tensors_in,
)
from muonfx.optimizer.local_values import Load, apart_from, on_this_rank
from muonfx.optimizer.named_parameters import Gradients, NamedTensors
from muonfx.optimizer.update_rules import update_rules_of
from muonfx.placement.bucketed import require_room
from muonfx.placement.offload import inner_of, store_of
from muonfx.placement.placed import PlacedTransforms, Where
from muonfx.placement.store import IN_MEMORY
from muonfx.transforms.accumulate import accumulate
from muonfx.tree import PyTree


class FormerState(NamedTuple):
    """The state of an optimizer before its parameters were replaced or added, and the object that created it."""

    stepping: Stepping
    state: PyTree


class _CommonNumber(NamedTuple):
    """A number that one transform reads for several groups, each of which has a tensor for it."""

    visited: Visit
    """The visit of the transform."""
    name: str
    """The dotted name of the number, such as "scale_by_learning_rate.learning_rate"."""
    tensors: list[Tensor]
    """The tensor of each group. All must have one value."""


def _common_numbers_of(
    visits: Sequence[Visit], groups: Sequence[TrackedGroup]
) -> list[_CommonNumber]:
    """Return the numbers that are a tensor in several groups, and of which a transform reads one value for all groups.

    For example, a clip by the norm of all parameters reads one "max_norm". ``visits`` has each transform, with the
    dotted names of its numbers.
    """
    common: list[_CommonNumber] = []
    for visited in visits:
        for name in visited.numbers.names:
            tensors: list[Tensor] = []
            for tracked in groups:
                number = tracked.numbers.last_numbers.get(name)
                if isinstance(number, Tensor):
                    tensors.append(number)
            # Other transforms, such as momentum, run once for each group, with the number of the group.
            if len(tensors) > 1 and runs_once(visited):
                common.append(_CommonNumber(visited, name, tensors))
    return common


def _has_tensors(numbers_per_group: Sequence[Mapping[str, Number]]) -> bool:
    """Return True if a number of a param group is a tensor. Usually all are floats."""
    for numbers in numbers_per_group:
        for number in numbers.values():
            if isinstance(number, Tensor):
                return True
    return False


def _require_values_of_numbers(groups: Sequence[TrackedGroup]) -> None:
    """Raise ValueError if a number of a group, such as "lr", is a tensor on the meta device, which has no value."""
    for tracked in groups:
        for key in tracked.numbers.keys:
            if any(tensor.is_meta for tensor in tensors_in(tracked.group[key])):
                raise ValueError(
                    f"{key!r} in a group is a tensor on the meta device, which has no value: create it "
                    'outside of torch.device("meta"), or use a float'
                )


class CommonTensors:
    """Compares the tensors of several groups that must have the same value, because one transform reads them.

    Args:
        visits: the visits of all transforms in the optimizer's transform.
        groups: the param groups, whose numbers were just read.
    """

    def __init__(self, visits: Sequence[Visit], groups: Sequence[TrackedGroup]) -> None:
        """Find the tensors. `check` compares them."""
        self._common_numbers = _common_numbers_of(visits, groups)
        self._write_counts: list[int] = []
        """How often each of the tensors had been written to when `check` last compared them."""

    def check(self) -> None:
        """Raise ValueError if two groups have tensors of different values, where one transform reads both.

        For example, a scheduler has written into the rate of one group only. A comparison waits for the device, so the
        tensors are compared only if one of them was written to.
        """
        if torch.compiler.is_compiling() or not self._common_numbers:
            return
        write_counts: list[int] = []
        for common in self._common_numbers:
            # Torch increases it with every write.
            write_counts += [tensor._version for tensor in common.tensors]
        if write_counts == self._write_counts:  # no write since they were last equal
            return
        for visited, name, tensors in self._common_numbers:
            if not all(torch.equal(tensors[0], tensor) for tensor in tensors):
                raise different_values(visited, name)
        self._write_counts = write_counts


class _LastRead(NamedTuple):
    """The param groups that `Stepping.refresh` has read last. If they have changed since, it rebuilds the transform."""

    groups: Sequence[TrackedGroup]
    numbers: list[dict[str, Number]]
    """The numbers of each group by dotted name: the dict objects that `read_numbers` has returned."""
    common_tensors: CommonTensors
    """The tensors in several groups that must have one value."""


class Stepping:
    """Creates the optimizer state and runs steps in one process. ``index`` counts the leaves of the state.

    Args:
        tx: the transform, with the hyperparameters from construction.
        meta_params: the parameters in full by name, as meta tensors.
        bucket_bytes: how many bytes of parameters are updated at a time; None for all.
        callers_tensors: records tensors that were put into several groups, of which each has a copy.
    """

    is_over_ranks = False

    @property
    def has_lacked_gradients(self) -> bool:
        """True if no rank had a gradient in the last step; in one process, `GradientCheck` finds it before the step."""
        return False

    def __init__(
        self,
        tx: Transform,
        meta_params: PyTree,
        bucket_bytes: int | None,
        callers_tensors: CallersTensors,
    ) -> None:
        """Find the transforms within ``tx``, with their parameters and numbers. `init` creates the state later."""
        self.tx = tx
        self.inner = inner_of(tx)
        """``tx`` without `offload` around it."""
        self.visits = tuple(visit(self.inner, meta_params))
        """One visit for each transform in ``tx``: its parameters, and the names of its hyperparameters."""
        self.root = self.visits[0]
        """The visit of the whole transform. The others are of the transforms that it calls."""
        self.rules = update_rules_of(self.visits)
        """For each parameter name, its label and the transforms that update it."""
        self.defaults = hyperparams(tx)
        """The numbers in ``tx`` by dotted name, such as ``{"momentum.decay": 0.95}``."""
        self._placed_transforms = PlacedTransforms(Where(None, store_of(tx), bucket_bytes))
        """Places transforms in buckets and in the memory of the state, such as host memory under `offload`."""
        self._callers_tensors = callers_tensors
        # `refresh` replaces the following attributes if the numbers in the param groups have changed.
        self._last_read: _LastRead | None = None
        self._current = self.inner
        """The transform that `step` runs: ``tx`` with the current numbers, in buckets and in the store.

        Over ranks it is not placed, because `step_sharded` places it.
        """
        self._placed_structure: object = None
        """The structure of the transform from which `_current` was made: the transform without its numbers.

        It is another object for each result of `by_groups`, which is needed if groups have different numbers.
        """

    def sharded_if_over_ranks(self, tx: Transform) -> Transform:
        """Return ``tx`` in one process, and over several ranks a sharded transform."""
        return tx

    def init(
        self,
        params: NamedTensors,
        groups: Sequence[TrackedGroup],
        former: FormerState | None = None,
    ) -> PyTree:
        """Return the optimizer state of named parameters, and read the hyperparameters in the param groups.

        ``former`` is the state before parameters were replaced or added, or None. A tensor that it has, such as the
        momentum of "weight", keeps its value. Others have their initial values.
        """
        check_params(params)
        # Patterns of views, such as "*.qkv", without a parameter.
        warn_of_unmatched(patterns_in(self.tx), params)
        # The state does not depend on the numbers in the groups, so the transform from construction creates it.
        state = self._placed_transforms(self.inner, params, self.root).functions.init(params)
        self.refresh(params, groups)  # also raises if a number in the groups is out of range
        return self._with_former_values(state, former)

    def _with_former_values(self, state: PyTree, former: FormerState | None) -> PyTree:
        """Return a new state in which each tensor that a former state also has keeps its value.

        For example, after a parameter was added, the momenta of all others keep their values. The former state may be
        sharded in another way, as before ``fully_shard``: each tensor is gathered, and this rank's part is cut from it.
        """
        if former is None:
            return state
        # A path names a leaf in both states, such as ("momentum", "trace", "0.weight"). Its index may differ.
        former_leaves = tree.leaves(former.state)
        former_index_of = {path: index for index, path in enumerate(tree.paths(former.state))}
        leaves, treedef = tree.flatten(state)
        for index, path in enumerate(tree.paths(state)):
            if path not in former_index_of:  # of a parameter that was added
                continue
            former_index = former_index_of[path]
            full_value = former.stepping.full_leaf(former_index, former_leaves[former_index])
            if full_value is not None:  # else there was no tensor
                leaves[index] = self._local_part(index, leaves[index], full_value)
        return tree.unflatten(treedef, leaves)

    def _local_part(self, index: int, leaf: Any, full_value: Tensor) -> Any:
        """Return this rank's part of a full state tensor to replace ``leaf``, or ``leaf`` if the shapes differ."""
        if full_value.shape != leaf.shape:
            return leaf
        return full_value.to(leaf.device, leaf.dtype)

    def full_leaf(self, index: int, leaf: Any) -> Any:
        """Return a leaf of the state in full. Over several ranks, all of them gather it together."""
        return leaf

    def show(self, index: int, leaf: Any) -> Any:
        """Convert a leaf of the state to its form in ``optimizer.state``, such as a DTensor."""
        return leaf

    def exported(self, state: PyTree) -> Mapping[int, Any]:
        """Return the leaves, by index, that ``state_dict`` needs in another form than ``optimizer.state``."""
        return {}

    def local_value(self, index: int, leaf: Any, value: Any) -> Tensor:
        """Return the part of a saved tensor to load on this rank. ``leaf`` is what ``optimizer.state`` has for it.

        Raise `Misfit` if the saved tensor is sharded in another way.
        """
        return on_this_rank(leaf, value)

    def errors_on_all_ranks(self) -> AbstractContextManager[None]:
        """Return a context for the checks before a step. Over ranks, its errors are raised on all of them."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        """Return a context to read a state dict in. Over ranks, its errors are raised on all of them."""
        return nullcontext()

    def require_same_on_all_ranks(self, without_state: Sequence[str]) -> None:
        """Over ranks, raise on all of them if they found different parameters without saved state, by name."""

    def load(self, loads: Sequence[Load], state: PyTree) -> None:
        """Copy saved values into the state."""
        self.assign(loads, state)

    def assign(self, loads: Sequence[Load], state: PyTree) -> None:
        """Copy values into the state on this rank alone."""
        leaves = tree.leaves(state)
        # `apart_from` clones values that share memory with the state, because a copy may overwrite them.
        for load in apart_from(leaves, loads):
            leaves[load.leaf_index].copy_(load.value)

    def note_loaded(self, state: PyTree) -> None:
        """Update what this object derives from the state, after all ranks have copied values into their state."""

    def is_true_on_any_rank(self, is_true_here: bool) -> bool:
        """Return True if a fact is true on any rank."""
        return is_true_here

    def initial_state(self, params: NamedTensors) -> PyTree:
        """Return the initial state for named parameters. Over ranks, all of them call this together."""
        return self._current.functions.init(params)

    def refresh(self, params: NamedTensors, groups: Sequence[TrackedGroup]) -> None:
        """Read the hyperparameters in the param groups. If they have changed, rebuild the transform with them.

        For example, after a scheduler has changed "lr", the following steps use the new rate. Raise ValueError if a
        number is out of range, or if groups have different tensors for a number that one transform reads for all.
        """
        numbers = read_numbers(groups)
        last = self._last_read
        # Identities suffice: `read_numbers` returns the dict objects of its last call if no number has changed.
        if last is not None and last.groups is groups and all(map(is_, numbers, last.numbers)):
            last.common_tensors.check()  # a caller may have written into a tensor
            return
        if not torch.compiler.is_compiling() and _has_tensors(numbers):
            if tree.device_of(params).type != "meta":
                _require_values_of_numbers(groups)
            separate_tensors(groups, self._callers_tensors)  # each group gets its own tensors
        common_tensors = CommonTensors(self.visits, groups)
        common_tensors.check()
        self._rebuild(params, groups)
        # Last: if a line above raises an error, the next step reads the groups again.
        numbers = [tracked.numbers.last_numbers for tracked in groups]
        self._last_read = _LastRead(groups, numbers, common_tensors)

    def _rebuild(self, params: NamedTensors, groups: Sequence[TrackedGroup]) -> None:
        """Rebuild the transform with the numbers of the param groups. It raises ValueError for a bad number.

        Its error has the name of an argument, such as "learning_rate". It is replaced by one with the key of a group,
        such as "lr".
        """
        try:
            self._set_current(self._with_numbers(groups), params)
        except ValueError:
            for tracked in groups:
                require_in_range(
                    self.tx,
                    tracked.numbers.hyperparams,
                    tracked.numbers.last_numbers,
                    self.defaults,
                )
            raise  # no single number is the cause

    def _with_numbers(self, groups: Sequence[TrackedGroup]) -> Transform:
        """Return the transform with the hyperparameters of the param groups, whose numbers were just read.

        If groups have different numbers for a transform, such as two rates, it is replaced by a `by_groups`, which runs
        it once for each set of numbers.
        """
        tx = for_groups(self.inner, self.root, self._members(groups))
        if torch.compiler.is_compiling() and self._accumulates():
            # torch.cond, which `accumulate` calls, accepts no float that changes between calls
            tx = as_tensors(tx)
        return prepared(tx)

    def _accumulates(self) -> bool:
        """Return True if the transform contains `accumulate`."""
        return any(visited.tx.factory is accumulate for visited in self.visits)

    def current_numbers(self, groups: Sequence[TrackedGroup]) -> dict[str, Number]:
        """Return the hyperparameters in the param groups by dotted name: ``{"muon.momentum.decay": 0.95}``.

        Where groups have different values, return the value of the first group.
        """
        read_numbers(groups)
        numbers, _names_that_differ = common_numbers(self._members(groups))
        return numbers

    def _members(self, groups: Sequence[TrackedGroup]) -> list[GroupMembers]:
        """Return the parameter names and the hyperparameters of each group, in an order that is equal on all ranks.

        The numbers are by dotted name, and have the types that the transform accepts.
        """
        members: list[GroupMembers] = []
        for tracked in groups:
            if tracked.names:  # a group without parameters has no effect
                numbers = fitted(self.defaults, tracked.numbers.last_numbers)
                members.append(GroupMembers(sorted(tracked.names), numbers))
        # The order of groups may differ between ranks, the order of versions in `by_groups` must not: sort by names.
        return sorted(members, key=lambda group: group.names)

    def snapshot(
        self,
        state: PyTree,
        params: dict[str, Tensor],
        grads: Gradients,
        groups: Sequence[TrackedGroup],
    ) -> tuple[Transform, PyTree, dict[str, Tensor], Gradients]:
        """Return the arguments of an update: the transform, the state in full, the parameters and the gradients.

        The transform has the current hyperparameters of the param groups. Over ranks, all of them call this together.
        """
        read_numbers(groups)
        tx = self._with_numbers(groups)
        is_offloaded = self.inner is not self.tx
        # `self.tx` is ``offload(self.inner)``: put `offload` around the transform again
        if is_offloaded:
            tx = self.tx.replace(tx=tx)
        leaves, treedef = tree.flatten(state)
        whole_leaves = [self.full_leaf(index, leaf) for index, leaf in enumerate(leaves)]
        return tx, tree.unflatten(treedef, whole_leaves), params, grads

    def _set_current(self, tx: Transform, params: NamedTensors) -> None:
        """Run ``tx``, which has the current hyperparameters, in the following steps.

        First it is *placed*: divided into buckets of parameters, and connected with the memory of the state. This takes
        long, so if only numbers have changed since the last call, they are put into the transform that is placed.
        """
        # Only numbers have changed, such as the learning rate.
        if tx.structure is self._placed_structure:
            current = with_numbers(self._current, iter(numbers_of(tx)))
        else:  # the first time, or `by_groups` has replaced a part
            current = self._placed_transforms(tx, params)
            self._placed_structure = tx.structure
        self._current = prepared(current)  # a bad number raises now, not in the step

    def step(self, call: Arguments) -> PyTree:
        """Run one step and return the next state. The parameters in ``call`` are updated in place."""
        # A transform must accept each extra argument, such as value=loss.
        check_extras(self.tx, call.extras)
        if call.extras:
            check_values_of_extras([visited.tx for visited in self.visits], call.extras)
        call = _with_separate_memory(call)
        store = self._placed_transforms.where.store
        if store != IN_MEMORY:
            require_room(store, call.state, call.params, call.donate)
        # The placed transform calls `add_in_place` as soon as the updates of a bucket of parameters are computed. This
        # saves memory.
        extras = {**call.extras, "apply_to_params": add_in_place}
        _, new_state = self._current.run(
            call.updates, call.state, call.params, donate=call.donate, **extras
        )
        return new_state


def _with_separate_memory(call: Arguments) -> Arguments:
    """Return the arguments of a step, in which donated tensors, which it may overwrite, share no memory with others."""
    # A trace cannot compare memory; only the optimizer holds the state.
    if torch.compiler.is_compiling():
        donate = Donation(updates=False, state=True)
        return Arguments(call.updates, call.state, call.params, donate, call.extras)
    # Copies each donated tensor that shares memory with another one.
    donate, updates, state = unshared(call.donate, call.updates, call.state, call.params)
    return Arguments(updates, state, call.params, donate, call.extras)


def add_in_place(params: NamedTensors, updates: Mapping[str, Tensor | None]) -> None:
    """Add updates to parameters of the same names, in place. An update of None changes nothing.

    >>> params = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    >>> add_in_place(params, {"w": torch.tensor([0.5, 0.5]), "b": None})
    >>> params
    {'w': tensor([1.5000, 2.5000]), 'b': tensor([3.])}
    """
    updated_params: list[Tensor] = []
    present_updates: list[Tensor] = []
    for name, update in updates.items():
        if update is not None:
            updated_params.append(params[name])
            present_updates.append(update)
    if not updated_params:
        return
    param_shapes = [param.shape for param in updated_params]
    update_shapes = [update.shape for update in present_updates]
    if update_shapes != param_shapes:  # the addition might broadcast an update
        check_updates_fit(params, updates)  # raises ValueError, with the name of the parameter
    torch._foreach_add_(updated_params, present_updates)
