"""Load, update and store the state of an optimizer bucket by bucket.

A bucket is a list of parameters that are updated together. Each tensor of the state is stored under the name of its
parameter. It *moves*: it is loaded before the update and written back after it. 0-d tensors stay on the device. A
tensor without a parameter is a *counter*: every bucket starts from the same value, so that a step advances it once.

In this file, `parameters` has the name of the parameter, or None, for each leaf of the state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation
from muonfx.placement.arguments import device_of, meta_like
from muonfx.placement.store import IN_MEMORY, Store, release
from muonfx.placement.transfer import BucketTransfer
from muonfx.tree import PyTree
from muonfx.tree.members import parameters_of

K = TypeVar("K")


def cut_into_buckets(sizes: Mapping[K, int], limit: int) -> list[list[K]]:
    """Split the keys of a dict of sizes, in order, into lists of at most `limit` bytes. A larger item is alone."""
    found: list[list[K]] = []
    room = 0
    for name, size in sizes.items():
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(name)
        room -= size
    return found


def moves(leaf: object, parameter: str | None) -> bool:
    """Return True if a tensor of the state is offloaded between steps: it has elements and dims, and a parameter."""
    return parameter is not None and isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.numel() > 0


def can_be_shared_out(leaves: Sequence[object], parameters: Sequence[str | None]) -> bool:
    """Return True if each tensor of a state, 0-d tensors excepted, belongs to a parameter. Buckets require this."""
    return all(
        own is not None or not (isinstance(leaf, Tensor) and leaf.ndim)
        for leaf, own in zip(leaves, parameters, strict=True)
    )


def sizes_of(names: Iterable[str], state: PyTree, parameters: Sequence[str | None]) -> dict[str, int]:
    """Return a dict with the bytes of optimizer state that are offloaded for each of the named parameters."""
    sizes = dict.fromkeys(names, 0)
    for leaf, name in zip(tree.leaves(state), parameters, strict=True):
        if name in sizes and moves(leaf, name):
            sizes[name] += leaf.nbytes
    return sizes


def store_away(store: Store, device: torch.device, state: PyTree, parameters: Sequence[str | None]) -> PyTree:
    """Copy the tensors of a state to host memory or disk (the store). Return the state with these copies.

    0-d tensors, and tensors that belong to no parameter, stay on the device.
    """
    leaves, treedef = tree.flatten(state)
    places = [
        place
        for place, (leaf, name) in enumerate(zip(leaves, parameters, strict=True))
        if moves(leaf, name) and not leaf.is_meta and not store.has(leaf, device)
    ]
    return tree.unflatten(treedef, _copied(store, device, leaves, places))


def stored_again(store: Store, device: torch.device, old: PyTree, new: PyTree, donate: Donation) -> PyTree:
    """Return the new state, with copies in host memory or on disk where the old state was stored there.

    A wrapper, which is a transform that calls others, may return new tensors. These are copied to the store. If the
    wrapper returns a tensor of the old state, it is copied too, because the caller may keep the old state; a donated
    state is not copied.
    """
    leaves, treedef = tree.flatten(new)

    def is_to_copy(leaf: Any, was: Any) -> bool:
        if not isinstance(was, Tensor) or was.ndim == 0 or not store.has(was, device):
            return False
        return not donate.state if leaf is was else not store.has(leaf, device)

    pairs = zip(leaves, tree.leaves(old), strict=True)
    places = [place for place, pair in enumerate(pairs) if is_to_copy(*pair)]
    return tree.unflatten(treedef, _copied(store, device, leaves, places))


def _copied(store: Store, device: torch.device, leaves: list[Any], places: list[int]) -> list[Any]:
    rooms = store.allocate([tree.spec(leaves[place]) for place in places], device)
    for place, room in zip(places, rooms, strict=True):
        leaves[place] = room.copy_(leaves[place])
        release(room)
    return leaves


def init_in_store(store: Store, init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """Build the initial state of a transform bucket by bucket, in host memory or on disk. Return the state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shown = init(meta_like(params))
    sizes = sizes_of(tree.names(params), shown, parameters_of(shown, params))
    buckets = cut_into_buckets(sizes, store.bucket_bytes) or [[]]
    # Parameters of other buckets are meta tensors, so that decisions by names and shapes use the whole tree.
    return init_in_buckets(store, buckets, params, init, outside="meta")


def init_in_buckets(
    store: Store,
    buckets: Sequence[Sequence[str]],
    params: PyTree,
    init: Callable[[PyTree], PyTree],
    *,
    outside: str | None,
) -> PyTree:
    """Call ``init`` once for each bucket of parameters. Return the whole state, offloaded to the store.

    A call receives the parameters of other buckets as empty tensors on the device `outside`; None: as None.
    """
    leaves, treedef = tree.flatten(params)
    names = tree.names(params)
    device = device_of(params)
    found: list[Any] = []
    structure: Any = None

    def at(leaf: Any, name: str, bucket: Sequence[str]) -> Any:
        if leaf is None or name in bucket:
            return leaf
        return None if outside is None else torch.empty_like(leaf, device=outside)

    for turn, bucket in enumerate(buckets):
        some = [at(leaf, name, bucket) for name, leaf in zip(names, leaves, strict=True)]
        with warnings.catch_warnings():
            if turn:  # the first call has issued the warnings
                warnings.simplefilter("ignore")
            made = init(tree.unflatten(treedef, some))
        own, structure = tree.flatten(made)
        parameters = parameters_of(made, params)
        own = [leaf if name is None or name in bucket else None for leaf, name in zip(own, parameters, strict=True)]
        state = store_away(store, device, tree.unflatten(structure, own), parameters)
        del made, own  # free it before the next bucket
        new, structure = tree.flatten(state)
        found = [_real(a, b) for a, b in zip(found or [None] * len(new), new, strict=True)]
    return tree.unflatten(structure, found)


def _real(one: object, other: object) -> object:
    """Return ``other`` if ``one`` is None or a meta tensor, else ``one``."""
    return other if one is None or (isinstance(one, Tensor) and one.is_meta) else one


class BucketedState:
    """A context manager for a step with offloaded state: it loads, updates and writes back one bucket at a time.

    If the disk has too little space, the constructor raises OSError before anything is changed.
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
        self._store, self._device, self._donate = store, device, donate
        self._old, self._treedef = tree.flatten(state)
        self._new = list(self._old)
        of = {name: turn for turn, names in enumerate(buckets) for name in names}
        self._turn_of = [None if name is None else of.get(name, -1) for name in parameters]
        self._last = max(len(buckets), 1) - 1
        self._transfer: BucketTransfer | None = None
        self._places: list[list[int]] = [[] for _ in buckets]
        self._targets: dict[int, Tensor] = {}
        if store == IN_MEMORY or store.is_direct(device):
            return
        moving = [place for place, leaf in enumerate(self._old) if moves(leaf, parameters[place])]
        self._places = [[p for p in moving if self._turn_of[p] == turn] for turn in range(len(buckets))]
        self._make_room([place for places in self._places for place in places], moving)
        if any(self._places):
            leaves = [[self._old[p] for p in places] for places in self._places]
            self._transfer = BucketTransfer(device, leaves, filed=store.on_disk)

    def _make_room(self, taken: list[int], moving: list[int]) -> None:
        # Leaves loaded from a checkpoint are not in the store yet: allocate room for them too.
        needed = [p for p in moving if not (self._donate.state and self._store.has(self._old[p], self._device))]
        rooms = self._store.allocate([tree.spec(self._old[place]) for place in needed], self._device)
        self._targets = {place: self._old[place] for place in moving} | dict(zip(needed, rooms, strict=True))
        for place in set(needed) - set(taken):
            self._new[place] = self._targets[place].copy_(self._old[place])
            release(self._targets[place])

    def run(
        self,
        turn: int,
        run: Callable[..., tuple[PyTree, PyTree]],
        updates: PyTree,
        params: PyTree,
        extras: Mapping[str, Any],
        *,
        may_write: bool,
    ) -> PyTree:
        """Call `run` (a transform's update) with the state of bucket number `turn`. Return the bucket's updates."""
        own = self._donate.state if self._transfer is None else True
        out, after = run(
            updates,
            tree.unflatten(self._treedef, self._given(turn, own=own)),
            params,
            donate=Donation(may_write, own),
            **extras,
        )
        self._take(turn, tree.leaves(after))
        if (transfer := self._transfer) is None:
            return out
        # The next bucket overwrites the transfer buffers.
        return tree.map(lambda update: update.clone() if transfer.holds(update) else update, out)

    def end(self) -> PyTree:
        """Wait until all buckets are written back to host memory or disk, and return the whole next state."""
        if self._transfer is not None:
            self._transfer.finish()
        return tree.unflatten(self._treedef, self._new)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._transfer is not None:
            self._transfer.abandon()

    def _given(self, turn: int, *, own: bool) -> list[Any]:
        fetched: dict[int, Tensor] = {}
        if self._transfer is not None:
            fetched = dict(zip(self._places[turn], self._transfer.fetch(turn), strict=True))

        def at(place: int) -> Any:
            old, whose = self._old[place], self._turn_of[place]
            if place in fetched:
                return fetched[place]
            if whose not in (None, turn):
                return old  # not updated in this bucket; a wrapper may read its shape
            is_free = self._donate.state and (whose is not None or turn == self._last)
            return old.clone() if own and not is_free and isinstance(old, Tensor) else old

        return [at(place) for place in range(len(self._old))]

    def _take(self, turn: int, after: list[Any]) -> None:
        for place, leaf in enumerate(after):
            if self._turn_of[place] in (None, turn):
                self._new[place] = leaf
        if self._transfer is not None:
            places = self._places[turn]
            targets = [self._targets[place] for place in places]
            self._transfer.put(turn, [after[place] for place in places], targets)
            for place, target in zip(places, targets, strict=True):
                self._new[place] = target
