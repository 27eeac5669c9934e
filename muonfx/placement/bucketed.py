"""Transforms that run another one bucket by bucket, or with its state in a store.

Each takes the place of a transform in `placed`: it has the numbers and the state of the transform that it runs.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.core.donation import NOTHING
from muonfx.core.transform import Arguments, EmptyState
from muonfx.core.visit import Placeholder, record_calls, stand_in
from muonfx.placement.buckets import (
    BucketedState,
    can_be_divided,
    init_in_store,
    moves,
    sizes_of,
    split_into_buckets,
    store_away,
    stored_again,
)
from muonfx.placement.devices import device_of
from muonfx.placement.store import IN_MEMORY, Store
from muonfx.tree import PyTree, Structure
from muonfx.tree.members import parameters_of


def require_room(store: Store, state: PyTree, params: PyTree, donate: Donation) -> None:
    """Raise OSError if the state is on a disk that has too little free space for the next state.

    It is called before a step, so that a full disk is found before the step changes anything. A state of 1 GiB needs
    1 GiB for the next state, or nothing if the caller donates the state, which the next one then overwrites.
    """
    if not store.on_disk:
        return
    device = device_of(params)
    specs: list[Any] = []  # the shapes and dtypes of the tensors to be written to new files
    for leaf, parameter in zip(tree.leaves(state), parameters_of(state, params), strict=True):
        if not moves(leaf, parameter):  # it stays on the device, as a step count does
            continue
        # A tensor that was loaded from a checkpoint is not in the store before its first step.
        is_overwritten = donate.state and store.has(leaf, device)
        if not is_overwritten:
            specs.append(tree.spec(leaf))
    store.require(specs)


class StateParameters:
    """Finds the parameter of each leaf of a transform's state, once for all steps.

    It is an argument of the transform, so copies with other numbers or inner transforms share it.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[tuple[str, ...], int], list[str | None]] = {}

    def of(self, state: PyTree, updates: PyTree) -> list[str | None]:
        """Return the name of the parameter to which each leaf of the state belongs, or None.

        It is found once for the names of the updates and a number of leaves.

        >>> StateParameters().of({"count": 1, "trace": {"w": torch.zeros(2)}}, {"w": torch.ones(2)})
        [None, 'w']
        """
        key = tuple(tree.names(updates)), len(tree.leaves(state))
        if key not in self._results:
            self._results[key] = parameters_of(state, updates)
        return self._results[key]


@stand_in
def in_buckets(
    tx: Transform, bucket_bytes: int, buckets: list[list[str]], state_parameters: StateParameters
):
    """Return a transform that runs ``tx`` on a bucket of parameters at a time, to bound its temporary memory.

    ``tx`` must work leaf by leaf. The state stays in memory as a whole. The decorator `stand_in` makes a transform like
    ``tx`` of the returned functions.

    Args:
        tx: the transform to run.
        bucket_bytes: the bytes of parameters in a bucket.
        buckets: the names of the parameters in each bucket, such as ``[["q", "k"], ["mlp"]]``, for the usual step. A
            step with other parameters, or without some of them, divides its parameters into buckets again.
        state_parameters: finds the parameter of each leaf of the state.
    """
    names_in_buckets = sorted(itertools.chain.from_iterable(buckets))

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Run ``tx`` on one bucket of parameters after another, such as first on "q" and "k", then on "mlp"."""
        current_buckets = buckets  # of the usual parameters
        has_other_params = sorted(_leaves_by_name(params)) != names_in_buckets
        if has_other_params:
            current_buckets = buckets_by_shape(params, bucket_bytes)
        # 1. All parameters are one bucket. This is before `state_parameters` stores a result, because `torch.cond` may
        # trace such a step in a branch, where nothing may be changed.
        if len(current_buckets) <= 1:
            return tx.run(updates, state, params, donate=donate, **extras)
        # 2. A tensor of the state has no parameter, so it is in no bucket.
        # For each leaf of the state, the parameter's name.
        parameters = state_parameters.of(state, updates)
        if not can_be_divided(state, parameters):
            return tx.run(updates, state, params, donate=donate, **extras)
        # 3. Several buckets.
        call = Arguments(updates, state, params, donate, extras)
        return _run_in_buckets(tx, call, IN_MEMORY, parameters, current_buckets)

    return tx.functions.init, update


def _leaves_by_name(values: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree that are not None, by name."""
    return {name: leaf for name, leaf in tree.named_leaves(values) if leaf is not None}


def buckets_by_shape(params: PyTree, limit: int) -> list[list[str]]:
    """Split parameter names into lists of at most `limit` bytes. Equal shapes are neighbours, to form batches."""
    # The sort is stable: parameters of one shape stay in their order.
    leaf_of = _leaves_by_name(params)
    names = sorted(leaf_of, key=lambda name: tuple(leaf_of[name].shape))
    return split_into_buckets({name: leaf_of[name].nbytes for name in names}, limit)


@stand_in
def in_store(tx: Transform, store: Store, state_parameters: StateParameters):
    """Run a transform that works leaf by leaf, and load its state from a store before each step, bucket by bucket.

    The store is host memory or a disk, where the state is between steps. Only the state of one bucket of parameters,
    and of the next, is on the device at a time. ``tx`` receives and returns it as tensors on the device. For AdamW with
    a bucket of 64 MiB, these are 128 MiB of moments instead of all.
    """

    def init(params: PyTree) -> PyTree:
        """Return the initial state, with its tensors in the store. Nothing is stored for meta tensors."""
        if device_of(params).type == "meta":
            return tx.functions.init(params)
        return init_in_store(store, tx.functions.init, params)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Run ``tx`` bucket by bucket. The next state is in the store again."""
        # For each leaf of the state, the parameter's name.
        parameters = state_parameters.of(state, updates)
        buckets = [tree.names(updates)]
        if can_be_divided(state, parameters):  # a sum over all leaves, for example, is in no bucket
            sizes = sizes_of(_leaves_by_name(updates), state, parameters)
            # `tx` runs once without updates
            buckets = split_into_buckets(sizes, store.bucket_bytes) or [[]]
        call = Arguments(updates, state, params, donate, extras)
        return _run_in_buckets(tx, call, store, parameters, buckets)

    return init, update


@stand_in
def whole_in_store(tx: Transform, store: Store, state_parameters: StateParameters):
    """Run a transform that needs all leaves at once, and load its whole state from a store before each step.

    The store is host memory or a disk, where the state is between steps. `in_store` is for any other transform.
    """

    def init(params: PyTree) -> PyTree:
        """Return the initial state, with its tensors in the store. Nothing is stored for meta tensors."""
        state = tx.functions.init(params)
        device = device_of(params)
        if device.type == "meta":
            return state
        parameters = parameters_of(state, params)
        nbytes = sum(sizes_of(tree.names(params), state, parameters).values())
        if nbytes and not store.is_direct(device):  # a direct store needs no copy on the device
            _warn_of_whole_state(tx, nbytes)
        return store_away(store, device, state, parameters)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Run ``tx`` with all parameters in one bucket. The next state is in the store again."""
        # For each leaf of the state, the parameter's name.
        parameters = state_parameters.of(state, updates)
        call = Arguments(updates, state, params, donate, extras)
        return _run_in_buckets(tx, call, store, parameters, [tree.names(updates)])

    return init, update


@stand_in
def skippable(tx: Transform):
    """Run an offloaded transform only if the extra argument ``only_if`` is true or None.

    A wrapper such as `accumulate` calls its inner transform in each step, and ignores the result in all but every
    fourth, for example. It then passes ``only_if=tensor(False)``, so that the state of ``tx`` is not loaded for
    nothing.
    """

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        only_if: Tensor | None = None,
        **extras: Any,
    ) -> tuple[PyTree, PyTree]:
        """Run ``tx``, or return the updates and the state unchanged if ``only_if`` is false."""
        # `bool` waits for a tensor on a GPU. To load the state for nothing would take longer.
        if only_if is not None and not bool(only_if):
            return updates, state
        return tx.run(updates, state, params, donate=donate, **extras)

    return tx.functions.init, update


@stand_in
def with_own_state_in_store(
    tx: Transform, division: StateDivision, store: Store, state_parameters: StateParameters
):
    """Run a wrapper, a transform that calls others, such as `accumulate`. Its own state is in a store between steps.

    Its own state is the part of its state that belongs to none of its inner transforms, such as a sum of gradients. It
    is loaded whole in each step. The inner transforms load and store theirs themselves. ``division`` separates these
    parts. The store is host memory or a disk.
    """

    def init(params: PyTree) -> PyTree:
        """Return the initial state. The inner transforms have stored theirs; this stores the wrapper's own."""
        state = tx.functions.init(params)
        device = device_of(params)
        if device.type == "meta":
            return state
        # `accumulate` has a sum of gradients of its own, and the state of an inner transform such as Muon.
        own_state, inner_states = division.split(state)
        stored_own_state = store_away(store, device, own_state, parameters_of(own_state, params))
        return division.merge(stored_own_state, inner_states)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Load the wrapper's own state, run ``tx``, and write this state back to the store."""
        # `accumulate` has a sum of gradients of its own, and the state of an inner transform such as Muon.
        own_state, inner_states = division.split(state)
        device = device_of(updates, params)
        parameters = state_parameters.of(own_state, updates)  # for each leaf, the parameter's name
        all_names = tree.names(updates)
        with BucketedState(store, device, own_state, parameters, [all_names], donate) as one_bucket:
            # 1. Load the own state from the store.
            loaded_state = division.merge(one_bucket.load(0), inner_states)
            # 2. Run the wrapper. The inner transforms load their own states, and store them again.
            new_updates, new_state = tx.run(updates, loaded_state, params, donate=donate, **extras)
            new_own_state, new_inner_states = division.split(new_state)
            # 3. Store the own state. Updates in the memory into which states are loaded are copied.
            one_bucket.write_back(0, new_own_state)
            new_updates = one_bucket.copied_from_buffers(new_updates)
            stored_own_state = one_bucket.end()
        # 4. A wrapper may have replaced an inner state by tensors that are not in the store, as `torch.where` of the
        # old and the new one does.
        new_inner_states = stored_again(store, device, inner_states, new_inner_states)
        return new_updates, division.merge(stored_own_state, new_inner_states)

    return init, update


def _warn_of_whole_state(tx: Transform, nbytes: int) -> None:
    """Warn that the state of a TREE transform, of ``nbytes`` bytes, is loaded as a whole in each step."""
    warnings.warn(
        f"offload: {tx.name} has the locality TREE and a state of the size of the parameters, so its whole "
        f"state ({nbytes / 2**20:.1f} MiB) is loaded in each step instead of bucket by bucket: declare a "
        f"smaller locality, or do not offload {tx.name}",
        stacklevel=2,
    )


class StateDivision(NamedTuple):
    """Separates the own state of a wrapper from the states of the transforms that it calls (inner transforms)."""

    structure: Structure
    inner_indices: tuple[int, ...]
    """The indices of the leaves of the structure that represent the states of inner transforms."""

    @classmethod
    def of(cls, tx: Transform, params: PyTree) -> StateDivision:
        """Find out which parts of a wrapper's state belong to inner transforms. Meta tensors suffice as `params`."""
        leaves, treedef = tree.flatten(record_calls(tx, params).state)
        return cls(
            treedef,
            tuple([index for index, leaf in enumerate(leaves) if isinstance(leaf, Placeholder)]),
        )

    def split(self, state: PyTree) -> tuple[PyTree, list[PyTree]]:
        """Split a wrapper's state. Return its own part, and a list with the state of each inner transform.

        `accumulate` has a sum of gradients, its own, and the state of one inner transform, for which its own part has
        an `EmptyState`.
        """
        # The structure has one leaf in the place of each inner state.
        wrapper_state = tree.subtrees(self.structure, state)
        inner_states: list[PyTree] = []
        for index in self.inner_indices:
            inner_states.append(wrapper_state[index])
            wrapper_state[index] = EmptyState()
        return tree.unflatten(self.structure, wrapper_state), inner_states

    def merge(self, wrapper_state: PyTree, inner_states: Sequence[PyTree]) -> PyTree:
        """Build a wrapper's state from its own part and the states of its inner transforms; it undoes `split`."""
        subtrees = tree.subtrees(self.structure, wrapper_state)
        for index, inner_state in zip(self.inner_indices, inner_states, strict=True):
            subtrees[index] = inner_state
        return tree.unflatten(self.structure, subtrees)


def _run_in_buckets(
    tx: Transform,
    call: Arguments,
    store: Store,
    parameters: Sequence[str | None],
    buckets: Sequence[Sequence[str]],
) -> tuple[PyTree, PyTree]:
    """Run a transform for each bucket of parameters in turn. Return all updates and the whole next state.

    In the run for the bucket ``["w"]``, the updates are ``{"w": update, "b": None}``. Its state is loaded from the
    store before the run, and stored again after it; the store is host memory, a disk or `IN_MEMORY`, which does
    neither. ``parameters`` has the name of the parameter of each leaf of the state.
    """
    leaves, treedef = tree.flatten(call.updates)
    # This is the index of each update among the leaves.
    index_of = {name: index for index, name in enumerate(tree.names(call.updates))}
    new_leaves: list[Any] = [None] * len(leaves)
    device = device_of(call.updates, call.params)
    may_write = call.donate.updates
    with BucketedState(store, device, call.state, parameters, buckets, call.donate) as bucketed:
        for bucket_index, bucket in enumerate(buckets):
            indices = [index_of[name] for name in bucket]
            bucket_updates = tree.unflatten(treedef, _only(leaves, indices))
            results = bucketed.run(
                bucket_index, tx.run, bucket_updates, call.params, call.extras, may_write=may_write
            )
            result_leaves = tree.leaves(results)
            for index in indices:
                new_leaves[index] = result_leaves[index]
            del bucket_updates, results, result_leaves  # free them before the next bucket
    return tree.unflatten(treedef, new_leaves), bucketed.end()


def _only(leaves: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    """Return the leaves with the given indices, and None in place of all others."""
    selected: list[Any] = [None] * len(leaves)
    for index in indices:
        selected[index] = leaves[index]
    return selected
