"""A state that is brought in bucket by bucket: what of it belongs to which parameter, and where it goes afterwards.

A leaf of a state belongs to the parameter whose path, or dotted name, ends its own path. It *moves* if it has a dim;
0-d leaves, such as the keys of stochastic rounding, stay where they are. A leaf of no parameter is a *counter*: every
bucket starts from the same one, so that it advances once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation
from muonfx.sharding.belonging import owners_of
from muonfx.sharding.offload.files import nbytes_of, release
from muonfx.sharding.offload.home import Home
from muonfx.sharding.offload.lane import Lane
from muonfx.tree import PyTree, Spec

__all__ = ["Turns", "cut", "moves", "owners_of", "settled", "sizes_of", "spec_of"]


def moves(leaf: Any, owner: str | None) -> bool:
    """Whether a leaf is brought in and put back."""
    return owner is not None and isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.numel() > 0


def cut(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Cut names, in order, into lists of at most so many bytes; a single larger one stands alone.

    >>> cut({"a": 3, "b": 3, "c": 9, "d": 1}, 6)
    [['a', 'b'], ['c'], ['d']]
    """
    found: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(name)
        room -= size
    return found or [[]]


def spec_of(leaf: Tensor) -> Spec:
    """Shape and dtype of a leaf."""
    return Spec(tuple(leaf.shape), leaf.dtype)


def settled(home: Home, device: torch.device, state: PyTree, owners: Sequence[str | None], *, copy: bool) -> PyTree:
    """A state with the leaves that move at home; with ``copy`` none of them is one of the given."""
    leaves, treedef = tree.flatten(state)
    places = [
        place
        for place, (leaf, owner) in enumerate(zip(leaves, owners, strict=True))
        if moves(leaf, owner) and not leaf.is_meta and (copy or not home.has(leaf, device))
    ]
    rooms = home.rooms([spec_of(leaves[place]) for place in places], device)
    for place, room in zip(places, rooms, strict=True):
        leaves[place] = room.copy_(leaves[place])
        release(room)
    return tree.unflatten(treedef, leaves)


class Turns:
    """One step of a transform over the state's buckets.

    Args:
        home: where the state lies.
        given: the device of the updates.
        state: the whole state.
        owners: for each of its leaves, whose it is.
        buckets: names of parameters, for each turn; those that are in none keep their state.
        donate: what the caller has given.

    Raises:
        OSError: there is no room for the next state, where the old one is not donated. Nothing has been changed then.
    """

    def __init__(
        self,
        home: Home,
        given: torch.device,
        state: PyTree,
        owners: Sequence[str | None],
        buckets: Sequence[Sequence[str]],
        donate: Donation,
    ) -> None:
        self._home, self._from, self._donate = home, given, donate
        self._device = device = home.device(given)
        self._old, self._treedef = tree.flatten(state)
        self._new = list(self._old)
        of = {name: turn for turn, names in enumerate(buckets) for name in names}
        self._turn_of = [None if owner is None else of.get(owner, -1) for owner in owners]
        self._last = max(len(buckets), 1) - 1
        moving = [place for place, leaf in enumerate(self._old) if moves(leaf, owners[place])]
        self._places = [[p for p in moving if self._turn_of[p] == turn] for turn in range(len(buckets))]
        self._lane: Lane | None = None
        self._targets: dict[int, Tensor] = {}
        if home.is_direct(device):
            for place in moving:
                self._old[place] = self._new[place] = self._old[place].to(device)
        else:
            self._make_room([place for places in self._places for place in places], moving)
            if any(self._places):
                fetched = [[self._old[place] for place in places] for places in self._places]
                self._lane = Lane(device, fetched, filed=home.folder is not None)

    def _make_room(self, taken: list[int], moving: list[int]) -> None:
        given = self._donate.state
        # What is not at home comes home: leaves that were loaded from a checkpoint.
        strange = {p for p in moving if not self._home.has(self._old[p], self._device)}
        needed = [p for p in moving if (p in strange if given else True)]
        rooms = self._home.rooms([spec_of(self._old[place]) for place in needed], self._device)
        self._targets = {place: self._old[place] for place in moving} | dict(zip(needed, rooms, strict=True))
        for place in set(needed) - set(taken):
            self._new[place] = self._targets[place].copy_(self._old[place])
            release(self._targets[place])

    def run(
        self, turn: int, tx: Any, updates: PyTree, params: PyTree, extras: Mapping[str, Any], *, may_write: bool
    ) -> PyTree:
        """Update one bucket.

        Args:
            turn: which; they must come in order.
            tx: a function like `Transform.run`.
            updates: of this bucket, None elsewhere.
            params: those that the transform reads must be where it computes: see `near`.
            extras: named values.
            may_write: whether the updates are donated.
        """
        own = self._donate.state if self._lane is None else True
        leaves = self._given(turn, own=own)
        out, after = tx(
            self.near(updates),
            tree.unflatten(self._treedef, leaves),
            params,
            donate=Donation(may_write or self._device != self._from, own),
            **extras,
        )
        self._take(turn, tree.leaves(after))
        return tree.map(self._away, out)

    def near(self, values: PyTree) -> PyTree:
        """Values where the transform computes."""
        return values if values is None else tree.map(lambda leaf: leaf.to(self._device), values)

    def _away(self, update: Tensor) -> Tensor:
        """An update where the others are, and not in a room that is used again."""
        if self._device != self._from:
            return update.to(self._from)
        return update.clone() if self._lane is not None and self._lane.holds(update) else update

    def end(self) -> PyTree:
        """The next state, when all of it is at home."""
        if self._lane is not None:
            self._lane.finish()
        return tree.unflatten(self._treedef, self._new)

    def abandon(self) -> None:
        """After an error: let what is under way come to its end."""
        if self._lane is not None:
            self._lane.abandon()

    def _given(self, turn: int, *, own: bool) -> list[Any]:
        """The state for a bucket; copies of what may be overwritten, but is the caller's or is needed again."""

        def at(old: Any, whose: int | None) -> Any:
            if whose not in (None, turn):
                return None
            free = self._donate.state and (whose is not None or turn == self._last)
            return old.clone() if own and not free and isinstance(old, Tensor) else old

        moving = set(self._places[turn]) if self._lane is not None else set[int]()
        leaves = [
            None if place in moving else at(old, whose)
            for place, (old, whose) in enumerate(zip(self._old, self._turn_of, strict=True))
        ]
        if self._lane is not None:
            for place, leaf in zip(self._places[turn], self._lane.fetched(turn), strict=True):
                leaves[place] = leaf
        return leaves

    def _take(self, turn: int, after: list[Any]) -> None:
        mine = set(self._places[turn]) if self._lane is not None else set[int]()
        for place, (leaf, whose) in enumerate(zip(after, self._turn_of, strict=True)):
            if (whose is None or whose == turn) and place not in mine:
                self._new[place] = leaf
        if self._lane is not None:
            places = self._places[turn]
            targets = [self._targets[place] for place in places]
            self._lane.put(turn, [after[place] for place in places], targets)
            for place, target in zip(places, targets, strict=True):
                self._new[place] = target


def sizes_of(names: Sequence[str], state: PyTree, owners: Sequence[str | None]) -> dict[str, int]:
    """The bytes of the state that moves, for each of some parameters."""
    sizes = dict.fromkeys(names, 0)
    for leaf, owner in zip(tree.leaves(state), owners, strict=True):
        if owner in sizes and moves(leaf, owner):
            sizes[owner] += nbytes_of(spec_of(leaf))
    return sizes
