"""One bucket on its way through a route: elementwise work by pieces, in kept memory, applied as soon as it is final."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.core.combine import is_new
from muonfx.polar import Workspace
from muonfx.program.placement import Arguments
from muonfx.tree import PyTree, Structure

__all__ = ["PLAIN", "Bucket", "Passage", "Share", "State", "Step", "Surroundings"]

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""The types of which a piece is a view."""

LARGE = 1 << 16
"""Elements from which a leaf is rounded in kept memory: smaller ones are copied into a batch anyway."""

Leaves = dict[str, Any]
"""Tensors by name; None is absent."""


class Step(NamedTuple):
    """One transform of a route."""

    place: tuple[int, ...]
    """The numbers of the children that lead to it."""
    state: tuple[Any, ...]
    """The path of its state in that of the whole."""
    is_elementwise: bool


class Share(NamedTuple):
    """Of a transform's state, as much as belongs to some leaves."""

    treedef: Structure
    places: list[int]
    """Among the leaves of the whole state."""
    parameters: list[str | None]
    """The leaf that each belongs to; None for one that belongs to all, such as a count."""

    @property
    def has_leaves(self) -> bool:
        """True if anything in it belongs to a leaf, and not only counts."""
        return any(own is not None for own in self.parameters)


class Part(NamedTuple):
    """Some leaves, or a piece of one."""

    names: tuple[str, ...]
    piece: slice | None = None

    def of(self, leaf: Tensor) -> Tensor:
        """The same part of a tensor, which is one of the leaf's own shape where this is a piece."""
        return leaf if self.piece is None else leaf.detach().view(-1)[self.piece]


class Bucket(NamedTuple):
    """Leaves that go through their route together."""

    names: tuple[str, ...]
    lists: list[tuple[str, ...]]
    """The same, as many at a time as elementwise transforms take."""


class State:
    """A transform's state during a step."""

    def __init__(self, state: PyTree) -> None:
        self.old, self._treedef = tree.flatten(state)
        self.new = list(self.old)

    def tree(self) -> PyTree:
        """The next state."""
        return tree.unflatten(self._treedef, self.new)


class Surroundings(NamedTuple):
    """All that the passages of a step have in common."""

    call: Arguments
    parts: Mapping[Step, Transform]
    states: Mapping[Step, State]
    shares: Mapping[tuple[Step, tuple[str, ...]], Share]
    """By transform and leaves."""
    piece_bytes: int
    """The bytes of a leaf that elementwise transforms take at a time, in the dtype to compute in."""
    rounded: Workspace
    """Kept memory for what is rounded for a matrix transform."""
    widened: Workspace
    """Kept memory for what is widened behind one and applied at once."""


class Passage:
    """One bucket on its way."""

    def __init__(self, bucket: Bucket, surroundings: Surroundings) -> None:
        self._bucket, (self._call, self._parts, self._states, *_) = bucket, surroundings
        self._shares, self._piece_bytes = surroundings.shares, surroundings.piece_bytes
        self._memory, self._widening = surroundings.rounded, surroundings.widened
        self._rounded: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """The dtype to which a leaf was rounded for a transform, and its own. Such values lie in kept memory."""

    def go(self, stretches: Sequence[tuple[Step, ...]]) -> None:
        """Run all transforms, and apply what comes out."""
        values: Leaves = {name: self._call.updates[name] for name in self._bucket.names}
        may_write = self._call.donate.updates
        for stretch, following in itertools.zip_longest(stretches, stretches[1:]):
            if stretch[0].is_elementwise:
                values, may_write = self._by_parts(stretch, values, may_write, following)
            else:
                if not self._takes_rounded(stretch[0]):
                    values, all_new = self._widened(values)
                    may_write = may_write or all_new
                values, may_write = self._run(stretch[0], Part(self._bucket.names), values, may_write)
        if not stretches or not stretches[-1][0].is_elementwise:
            self._apply(Part(self._bucket.names), self._widened(values)[0])

    def _takes_rounded(self, step: Step) -> bool:
        """True if a transform would itself round to what values have been rounded to, and keeps none of them."""
        rounds_to = self._parts[step].declaration.rounds_to
        if rounds_to is None or self._shares[step, self._bucket.names].has_leaves:
            return False
        device = torch.device("cpu")
        return all(rounds_to(self._parts[step], own, device) == narrow for narrow, own in self._rounded.values())

    def _by_parts(
        self, stretch: Sequence[Step], values: Leaves, may_write: bool, following: tuple[Step, ...] | None
    ) -> tuple[Leaves, bool]:
        """Elementwise transforms, part by part; what comes out is applied at once where nothing follows."""
        rooms, rounded = ({}, {}) if following is None else self._rooms(values, following[0])
        results: Leaves = {}
        may_write_all = True
        # Kept memory is for transforms that have no state to keep it in, and for updates that are applied at once.
        is_let_go = following is None and not any(
            self._shares[step, names].has_leaves for step in stretch for names in self._bucket.lists
        )
        room = self._widening if is_let_go else None
        for part in self._parts_of(stretch, values):
            given: Leaves = {name: None if (x := values[name]) is None else part.of(x) for name in part.names}
            out, all_new = self._widened(given, room)
            may_write_out = may_write or all_new
            for step in stretch:
                out, may_write_out = self._run(step, part, out, may_write_out)
            if following is None:
                self._apply(part, out)
                continue
            copied: list[str] = []
            for name, x in out.items():
                if name in rounded and x.dtype != rounded[name][1]:  # a transform has changed the dtype
                    del rooms[name], rounded[name]
                if x is not None and part.piece is not None and name not in rooms:
                    rooms[name] = torch.empty(self._call.params[name].shape, dtype=x.dtype)
                if x is not None and name in rooms:
                    copied.append(name)
            if copied:
                torch._foreach_copy_([part.of(rooms[name]) for name in copied], [out[name] for name in copied])
            results |= out | {name: rooms[name] for name in copied}
            may_write_all = may_write_all and (may_write_out or len(copied) == len(out))
        self._rounded = rounded
        return results, may_write_all

    def _rooms(self, values: Leaves, following: Step) -> tuple[Leaves, dict[str, tuple[torch.dtype, torch.dtype]]]:
        """Kept memory for large leaves that the next transform rounds, and to what; one shape as one batch."""
        rooms: Leaves = {}
        rounded: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        rounds_to = self._parts[following].declaration.rounds_to
        if rounds_to is None or self._shares[following, self._bucket.names].has_leaves:
            return rooms, rounded
        kinds: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
        for name, x in values.items():
            if x is not None and x.numel() >= LARGE:
                own = self._rounded[name][1] if name in self._rounded else x.dtype
                kinds.setdefault((x.shape, own), []).append(name)
        device = torch.device("cpu")
        for (shape, own), names in kinds.items():
            narrow = rounds_to(self._parts[following], own, device)
            if narrow.itemsize <= own.itemsize:  # in their own dtype too, for the batch
                room = self._memory.empty((len(names), *shape), narrow, device)
                rooms |= dict(zip(names, room.unbind(), strict=True))
                rounded |= dict.fromkeys(names, (narrow, own))
        return rooms, rounded

    def _parts_of(self, stretch: Sequence[Step], values: Leaves) -> Iterator[Part]:
        """The bucket's leaves, a few at a time; large ones by pieces."""
        for names in self._bucket.lists:
            x: Tensor | None = values[names[0]] if len(names) == 1 else None
            most = 0 if x is None else self._piece_bytes // max(4, x.element_size())
            if x is None or x.numel() <= most or not self._can_be_cut(stretch, names[0], x):
                yield Part(names)
            else:
                for start in range(0, x.numel(), most):
                    yield Part(names, slice(start, min(start + most, x.numel())))

    def _can_be_cut(self, stretch: Sequence[Step], name: str, update: Tensor) -> bool:
        """True if all that transforms see of a leaf lies in one order of memory, so that pieces are views."""
        seen: list[Any] = [update, self._call.params[name]]
        for step in stretch:
            share, old = self._shares[step, (name,)], self._states[step].old
            seen += [old[place] for place, own in zip(share.places, share.parameters, strict=True) if own is not None]
        return all(type(x) in PLAIN and x.shape == update.shape and x.is_contiguous() for x in seen)

    def _widened(self, values: Leaves, room: Workspace | None = None) -> tuple[Leaves, bool]:
        """Values with those that were rounded in their own dtype again, out of kept memory; whether these are all."""
        narrow = {
            name: x
            for name, x in values.items()
            if x is not None and name in self._rounded and x.dtype == self._rounded[name][0]
            if room is None or x.dtype != self._rounded[name][1]  # already in kept memory, and of its own dtype
        }
        if not narrow:
            return values, False
        room = room or Workspace()
        room.clear()
        wide = {name: room.empty(x.shape, self._rounded[name][1], x.device) for name, x in narrow.items()}
        torch._foreach_copy_(list(wide.values()), list(narrow.values()))
        return values | wide, len(wide) == sum(x is not None for x in values.values())

    def _run(self, step: Step, part: Part, values: Leaves, may_write: bool) -> tuple[Leaves, bool]:
        """One transform on a part; whether what comes out may be written to."""
        tx, share, state = self._parts[step], self._shares[step, part.names], self._states[step]
        given: list[Any] = []
        for place, own in zip(share.places, share.parameters, strict=True):
            leaf = state.old[place]
            if isinstance(leaf, Tensor):  # every part starts from the same count
                leaf = leaf.clone() if own is None else part.of(leaf)
            given.append(leaf)
        params = {name: part.of(self._call.params[name]) for name in part.names}
        donate = Donation(may_write, True)
        out, after = tx.run(values, tree.unflatten(share.treedef, given), params, donate=donate, **self._call.extras)
        changed: list[tuple[Tensor, Tensor]] = []
        for place, own, old, new in zip(share.places, share.parameters, given, tree.leaves(after), strict=True):
            if own is None or part.piece is None:
                state.new[place] = new
            elif new is not old:
                changed.append((old, new.clone()))  # lest it be another's old one, which is written to first
        for old, new in changed:
            old.copy_(new)
        return out, tx.keeps_donation_promise and (may_write or is_new(out, values))

    def _apply(self, part: Part, updates: Leaves) -> None:
        assert self._call.apply is not None
        self._call.apply({name: part.of(self._call.params[name]) for name in part.names}, updates)
