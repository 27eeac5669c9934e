"""Load, update and store the state of an optimizer bucket by bucket.

A bucket is a list of parameters that are updated together. Each tensor of the state is stored under the name of its
parameter. It *moves*: it is loaded before the update and written back after it. 0-d tensors stay on the device. A
tensor without a parameter is a *counter*: every bucket starts from the same value, so that a step advances it once.

In this file, `parameters` has the name of the parameter, or None, for each leaf of the state.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation
from muonfx.placement.devices import device_of, meta_like
from muonfx.placement.store import IN_MEMORY, Store, release
from muonfx.placement.transfer import BucketTransfer
from muonfx.tree import PyTree
from muonfx.tree.members import parameters_of

K = TypeVar("K")


def split_into_buckets(sizes: Mapping[K, int], limit: int) -> list[list[K]]:
    """Split the keys of a dict of sizes, in order, into lists of at most `limit` bytes. A larger item is alone.

    >>> split_into_buckets({"q": 4, "k": 4, "mlp": 20, "norm": 1}, limit=10)
    [['q', 'k'], ['mlp'], ['norm']]
    """
    buckets: list[list[K]] = []
    free_bytes = 0  # in the last bucket
    for name, size in sizes.items():
        # An item that does not fit into the last bucket begins a new one, which it may exceed.
        if not buckets or size > free_bytes:
            buckets.append([])
            free_bytes = limit
        buckets[-1].append(name)
        # Negative after an item above the limit, so that the next item is not added.
        free_bytes -= size
    return buckets


def moves(leaf: object, parameter: str | None) -> bool:
    """Return True if a tensor of the state is offloaded between steps: it has elements and dims, and a parameter."""
    return parameter is not None and isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.numel() > 0


def can_be_divided(state: PyTree, parameters: Sequence[str | None]) -> bool:
    """Return True if each tensor of a state, 0-d tensors excepted, belongs to a parameter. Buckets require this."""
    for leaf, parameter in zip(tree.leaves(state), parameters, strict=True):
        if parameter is None and isinstance(leaf, Tensor) and leaf.ndim > 0:
            return False
    return True


def sizes_of(
    names: Iterable[str], state: PyTree, parameters: Sequence[str | None]
) -> dict[str, int]:
    """Return a dict with the bytes of optimizer state that are offloaded for each of the named parameters.

    `parameters` has the name of each leaf's parameter. For a parameter "w" with two moments of 4 KiB and a 0-d step
    count, this is ``{"w": 8192}``: the step count is not offloaded.
    """
    sizes = dict.fromkeys(names, 0)
    for leaf, name in zip(tree.leaves(state), parameters, strict=True):
        if name in sizes and moves(leaf, name):
            sizes[name] += leaf.nbytes
    return sizes


def store_away(
    store: Store, device: torch.device, state: PyTree, parameters: Sequence[str | None]
) -> PyTree:
    """Copy the tensors of a state to host memory or disk (the store). Return the state with these copies.

    In the state ``{"count": tensor(3), "trace": {"w": tensor}}`` of the parameter "w", the trace is copied. 0-d tensors
    and tensors that belong to no parameter stay on the device. `parameters` has the name of the parameter of each leaf,
    here ``[None, "w"]``.
    """
    leaves, treedef = tree.flatten(state)
    indices: list[int] = []  # of the leaves to copy
    for index, (leaf, parameter) in enumerate(zip(leaves, parameters, strict=True)):
        # A meta tensor has no values to copy, and a tensor that is already in the store needs no copy.
        if moves(leaf, parameter) and not leaf.is_meta and not store.has(leaf, device):
            indices.append(index)
    _store_leaves(store, device, leaves, indices)
    return tree.unflatten(treedef, leaves)


def stored_again(
    store: Store, device: torch.device, old_state: PyTree, new_state: PyTree
) -> PyTree:
    """Return a new state, with each tensor in the store (host memory or a disk) that was there in the old state.

    A step may replace a tensor of the store by one on the device, such as the result of `torch.where` of the old and
    the new value. Only such tensors are copied.
    """
    old_leaves = tree.leaves(old_state)
    new_leaves, treedef = tree.flatten(new_state)
    indices: list[int] = []  # of the leaves to copy
    for index, (old_leaf, new_leaf) in enumerate(zip(old_leaves, new_leaves, strict=True)):
        # A tensor that was on the device before, such as a step count, stays there.
        was_stored = (
            isinstance(old_leaf, Tensor) and old_leaf.ndim > 0 and store.has(old_leaf, device)
        )
        if was_stored and not store.has(new_leaf, device):
            indices.append(index)
    _store_leaves(store, device, new_leaves, indices)
    return tree.unflatten(treedef, new_leaves)


def _store_leaves(
    store: Store, device: torch.device, leaves: list[Any], indices: Sequence[int]
) -> None:
    """Replace the leaves with the given indices, in the list, by copies in the store."""
    # All are allocated in one call, because on a disk they share one file.
    targets = store.allocate([tree.spec(leaves[index]) for index in indices], device)
    for index, target in zip(indices, targets, strict=True):
        leaves[index] = target.copy_(leaves[index])
        release(target)  # a tensor in a file needs no host memory until it is read again


def init_in_store(store: Store, init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """Build the initial state of a transform in host memory or on disk (the store), and return it.

    It is built for some parameters (a bucket) at a time. So the state of all parameters is never on the device.
    """
    # 1. The sizes of the state, from meta tensors, which have no values. The `init` below gives the warnings.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meta_state = init(meta_like(params))
    sizes = sizes_of(tree.names(params), meta_state, parameters_of(meta_state, params))
    # 2. The state. Without parameters, there is one bucket without names, so that `init` is called once.
    buckets = split_into_buckets(sizes, store.bucket_bytes) or [[]]
    return init_in_buckets(
        store, buckets, params, lambda bucket: init(_on_meta_outside(bucket, params))
    )


def _on_meta_outside(bucket: Sequence[str], params: PyTree) -> PyTree:
    """Return the parameters, with a meta tensor in place of each one that is not in a bucket, a list of names.

    So an ``init`` of the bucket can still decide by the names and shapes of all parameters.
    """
    leaves, treedef = tree.flatten(params)
    for index, name in enumerate(tree.names(params)):
        if name not in bucket and leaves[index] is not None:
            leaves[index] = torch.empty_like(leaves[index], device="meta")
    return tree.unflatten(treedef, leaves)


def init_in_buckets(
    store: Store,
    buckets: Sequence[Sequence[str]],
    params: PyTree,
    init: Callable[[Sequence[str]], PyTree],
) -> PyTree:
    """Call ``init`` once for each bucket of parameters. Return the whole state, in host memory or on disk (the store).

    For the buckets ``[["q", "k"], ["mlp"]]``, the first call gives the state of "q" and "k", and the second adds the
    state of "mlp".
    """
    first_bucket, *other_buckets = buckets
    whole_state = _init_bucket(store, first_bucket, params, init)
    for bucket in other_buckets:
        with warnings.catch_warnings():  # the first call has issued the warnings
            warnings.simplefilter("ignore")
            bucket_state = _init_bucket(store, bucket, params, init)
        whole_state = _add_bucket_state(whole_state, bucket_state)
    return whole_state


def _init_bucket(
    store: Store, bucket: Sequence[str], params: PyTree, init: Callable[[Sequence[str]], PyTree]
) -> PyTree:
    """Return the initial state for the parameters of one bucket, in host memory or on disk (the store).

    The state of all other parameters is None: for the bucket ``["w"]`` of parameters "w" and "b", it is
    ``{"w": tensor, "b": None}``.
    """
    state = init(bucket)  # which may have state for other parameters, too
    parameters = parameters_of(state, params)  # for each leaf of the state, the parameter's name
    leaves, treedef = tree.flatten(state)
    for index, parameter in enumerate(parameters):
        if parameter is not None and parameter not in bucket:
            leaves[index] = None
    return store_away(store, device_of(params), tree.unflatten(treedef, leaves), parameters)


def _add_bucket_state(state: PyTree, bucket_state: PyTree) -> PyTree:
    """Return the state of several buckets, with the leaves of a further bucket where it has None or meta tensors.

    The states ``{"w": m, "b": None}`` of one bucket and ``{"w": None, "b": n}`` of the next become
    ``{"w": m, "b": n}``.
    """
    leaves = tree.leaves(state)
    bucket_leaves, treedef = tree.flatten(bucket_state)
    for index, leaf in enumerate(leaves):
        if leaf is None or (isinstance(leaf, Tensor) and leaf.is_meta):
            leaves[index] = bucket_leaves[index]
    return tree.unflatten(treedef, leaves)


class BucketedState:
    """A context manager for a step with offloaded state: it loads, updates and writes back one bucket at a time.

    For each bucket, in order, call `run`; or `load` its state, run the update, and `write_back` its new state. Then
    `end` returns the whole next state. If the disk has too little space, the constructor raises OSError before anything
    is changed.

    Args:
        store: where the state is between steps. With `IN_MEMORY`, nothing is loaded or written back.
        device: the device of the parameters, to which state is loaded.
        state: the state before the step.
        parameters: the name of the parameter of each leaf of the state, or None.
        buckets: the names of the parameters of each bucket, such as ``[["q", "k"], ["mlp"]]``.
        donate: the caller's promise about the updates and the state.
    """

    def __init__(
        self,
        store: Store,
        device: torch.device,
        state: PyTree,
        parameters: Sequence[str | None],
        buckets: Sequence[Sequence[str]],
        donate: Donation,
    ) -> None:
        """Find the leaves of each bucket, and start to load the first. The arguments are described in the class.

        With the buckets ``[["w"], ["b"]]``, the state ``{"count": tensor, "mu": {"w": tensor, "b": tensor}}`` has one
        leaf for each bucket, and "count" is a counter.
        """
        self._donate = donate
        self._leaves, self._treedef = tree.flatten(state)
        # A leaf whose parameter is in no bucket stays as it is.
        self._new_leaves = list(self._leaves)
        # The indices of the leaves without a parameter, which every bucket updates.
        self._counters = [index for index, parameter in enumerate(parameters) if parameter is None]
        # For each bucket, the indices of its leaves that move, and of those that stay on the device.
        self._moving: list[list[int]] = []
        self._staying: list[list[int]] = []
        has_loads = store != IN_MEMORY and not store.is_direct(device)
        for indices in _leaves_of_buckets(parameters, buckets):
            moving: list[int] = []
            staying: list[int] = []
            for index in indices:
                if has_loads and moves(self._leaves[index], parameters[index]):
                    moving.append(index)
                else:
                    staying.append(index)
            self._moving.append(moving)
            self._staying.append(staying)
        # For each leaf that moves, the tensor in the store to which its new value is written. The first load starts.
        self._target_of: dict[int, Tensor] = {}
        self._transfer: BucketTransfer | None = None
        if any(self._moving):
            all_moving = sorted(itertools.chain.from_iterable(self._moving))
            self._target_of = self._allocate_targets(store, device, all_moving)
            stored_buckets: list[list[Tensor]] = []
            for moving in self._moving:
                stored_buckets.append([self._leaves[index] for index in moving])
            self._transfer = BucketTransfer(device, stored_buckets, on_disk=store.on_disk)

    def _allocate_targets(
        self, store: Store, device: torch.device, indices: Sequence[int]
    ) -> dict[int, Tensor]:
        """Return, by index, the tensor in the store to which the new value of each of these leaves is written.

        A donated leaf in the store is overwritten. One that is not donated, or was loaded from a checkpoint and is not
        in the store yet, gets a new tensor.
        """
        targets: dict[int, Tensor] = {}
        without_target: list[int] = []
        for index in indices:
            leaf = self._leaves[index]
            if self._donate.state and store.has(leaf, device):
                targets[index] = leaf
            else:
                without_target.append(index)
        # All are allocated in one call, because on a disk they share one file.
        specs = [tree.spec(self._leaves[index]) for index in without_target]
        targets.update(zip(without_target, store.allocate(specs, device), strict=True))
        return targets

    @property
    def may_write_state(self) -> bool:
        """True if an update may overwrite the state that `load` returns: it is donated, or loaded, so a copy."""
        return self._donate.state or self._transfer is not None

    def load(self, bucket_index: int) -> PyTree:
        """Return the state for the update of one bucket, on the device.

        The update may overwrite it if `may_write_state`. Leaves that are needed afterwards are then copies.
        """
        leaves = list(self._leaves)
        # 1. Copies of the leaves that the update may overwrite, and that the caller or a later bucket reads.
        caller_keeps_state = not self._donate.state
        is_last_bucket = bucket_index == len(self._moving) - 1
        if self.may_write_state and caller_keeps_state:
            _copy_tensors(leaves, self._staying[bucket_index])
        if self.may_write_state and (caller_keeps_state or not is_last_bucket):
            # Each bucket advances a counter, such as the step count, from the same value.
            _copy_tensors(leaves, self._counters)
        # 2. The leaves that move are loaded, so they are copies already.
        if self._transfer is not None:
            loaded = self._transfer.fetch(bucket_index)
            for index, leaf in zip(self._moving[bucket_index], loaded, strict=True):
                leaves[index] = leaf
        return tree.unflatten(self._treedef, leaves)

    def write_back(self, bucket_index: int, new_state: PyTree) -> None:
        """Take over the new state of one bucket, and start to copy the leaves that move into the store.

        The store is host memory or a disk. `end` waits for the copies.
        """
        new_leaves = tree.leaves(new_state)
        # A counter has the same new value in every bucket.
        for index in (*self._staying[bucket_index], *self._counters):
            self._new_leaves[index] = new_leaves[index]
        if self._transfer is None:
            return
        # The next state has the tensors of the store in place of those on the device.
        moving = self._moving[bucket_index]
        for index in moving:
            self._new_leaves[index] = self._target_of[index]
        new_values = [new_leaves[index] for index in moving]
        targets = [self._target_of[index] for index in moving]
        self._transfer.put(bucket_index, new_values, targets)

    def copied_from_buffers(self, updates: PyTree) -> PyTree:
        """Return updates, with copies of those in a transfer buffer, which the next bucket overwrites."""
        transfer = self._transfer
        if transfer is None:  # nothing was loaded, so there are no buffers
            return updates
        return tree.map(
            lambda update: update.clone() if transfer.holds(update) else update, updates
        )

    def run(
        self,
        bucket_index: int,
        update: Callable[..., tuple[PyTree, PyTree]],
        updates: PyTree,
        params: PyTree,
        extras: Mapping[str, Any],
        *,
        may_write: bool,
    ) -> PyTree:
        """Load the state of one bucket, call a transform's `update` with it, and store the new state.

        Return the bucket's new updates. With `may_write`, `update` may overwrite the `updates` that it receives.
        """
        donate = Donation(updates=may_write, state=self.may_write_state)
        new_updates, new_state = update(
            updates, self.load(bucket_index), params, donate=donate, **extras
        )
        self.write_back(bucket_index, new_state)
        # An update may be a part of the state, in a buffer that a later bucket overwrites. It is copied.
        return self.copied_from_buffers(new_updates)

    def end(self) -> PyTree:
        """Wait until all buckets are written back to host memory or disk, and return the whole next state."""
        if self._transfer is not None:
            self._transfer.finish()
        return tree.unflatten(self._treedef, self._new_leaves)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None and self._transfer is not None:
            self._transfer.abandon()


def _copy_tensors(leaves: list[Any], indices: Sequence[int]) -> None:
    """Replace the tensors with the given indices, in the list, by copies."""
    for index in indices:
        if isinstance(leaves[index], Tensor):
            leaves[index] = leaves[index].clone()


def _leaves_of_buckets(
    parameters: Sequence[str | None], buckets: Sequence[Sequence[str]]
) -> list[list[int]]:
    """Return, for each bucket, the indices of the leaves of a state that belong to its parameters.

    `parameters` has the name of each leaf's parameter. Here the leaf of "frozen", and one without a parameter, are in
    no bucket:

    >>> _leaves_of_buckets(["w", None, "b", "frozen"], [["w"], ["b"]])
    [[0], [2]]
    """
    bucket_of_name: dict[str | None, int] = {}
    for bucket_index, names in enumerate(buckets):
        for name in names:
            bucket_of_name[name] = bucket_index
    leaves_of_buckets: list[list[int]] = [[] for _ in buckets]
    for index, name in enumerate(parameters):
        if name in bucket_of_name:
            leaves_of_buckets[bucket_of_name[name]].append(index)
    return leaves_of_buckets
