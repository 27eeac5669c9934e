"""One bucket of a route: elementwise transforms run in chunks, and updates are applied as soon as they are final."""

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
"""The tensor types whose slices are views."""

LARGE = 1 << 16
"""Elements from which a leaf is rounded into a reused buffer: smaller leaves are copied into a batch anyway."""

Leaves = dict[str, Any]
"""Tensors by name; None is an absent leaf."""


class Step(NamedTuple):
    """One transform of a route."""

    place: tuple[int, ...]
    """The child indices that lead to the transform."""
    state: tuple[Any, ...]
    """The path of its state within the whole state."""
    is_elementwise: bool


class Share(NamedTuple):
    """The part of a transform's state that belongs to some leaves."""

    treedef: Structure
    places: list[int]
    """Indices among the leaves of the whole state."""
    parameters: list[str | None]
    """The parameter of each leaf; None for a leaf that all share, such as a count."""

    @property
    def has_leaves(self) -> bool:
        """True if the share has more than counts."""
        return any(own is not None for own in self.parameters)


class Part(NamedTuple):
    """Some leaves, or a chunk of one leaf."""

    names: tuple[str, ...]
    piece: slice | None = None

    def of(self, leaf: Tensor) -> Tensor:
        """Return the same part of a tensor; for a chunk, the tensor must have the leaf's own shape."""
        return leaf if self.piece is None else leaf.detach().view(-1)[self.piece]


class Bucket(NamedTuple):
    """Leaves that pass through their route together."""

    names: tuple[str, ...]
    lists: list[tuple[str, ...]]
    """The same names, grouped as elementwise transforms take them at a time."""


class State:
    """A transform's state during a step."""

    def __init__(self, state: PyTree) -> None:
        self.old, self._treedef = tree.flatten(state)
        self.new = list(self.old)

    def tree(self) -> PyTree:
        """Return the next state."""
        return tree.unflatten(self._treedef, self.new)


class Surroundings(NamedTuple):
    """The values that all buckets of a step share."""

    call: Arguments
    parts: Mapping[Step, Transform]
    states: Mapping[Step, State]
    shares: Mapping[tuple[Step, tuple[str, ...]], Share]
    """Shares by transform and leaf names."""
    piece_bytes: int
    """Bytes of a chunk, counted in the compute dtype."""
    rounded: Workspace
    """Reused buffers for values rounded for a matrix transform."""
    widened: Workspace
    """Reused buffers for values converted back after a matrix transform and applied at once."""


class Passage:
    """Runs one bucket through its route."""

    def __init__(self, bucket: Bucket, surroundings: Surroundings) -> None:
        self._bucket, (self._call, self._parts, self._states, *_) = bucket, surroundings
        self._shares, self._piece_bytes = surroundings.shares, surroundings.piece_bytes
        self._memory, self._widening = surroundings.rounded, surroundings.widened
        self._rounded: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """By name, the dtype to which a leaf was rounded and its own dtype; such values are in reused buffers."""

    def go(self, stretches: Sequence[tuple[Step, ...]]) -> None:
        """Run all transforms and apply the final updates."""
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
        """Return True if a transform itself rounds to the dtypes of the rounded values, and stores no leaves."""
        rounds_to = self._parts[step].declaration.rounds_to
        if rounds_to is None or self._shares[step, self._bucket.names].has_leaves:
            return False
        device = torch.device("cpu")
        return all(rounds_to(self._parts[step], own, device) == narrow for narrow, own in self._rounded.values())

    def _by_parts(
        self, stretch: Sequence[Step], values: Leaves, may_write: bool, following: tuple[Step, ...] | None
    ) -> tuple[Leaves, bool]:
        """Run elementwise transforms part by part; if nothing follows, apply each part's updates at once."""
        rooms, rounded = ({}, {}) if following is None else self._rooms(values, following[0])
        results: Leaves = {}
        may_write_all = True
        # Use reused buffers only for updates that are applied at once, by transforms that cannot keep them in a state.
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
        """Return buffers for large leaves that the next transform rounds (one batch per shape), and their dtypes."""
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
            if narrow.itemsize <= own.itemsize:  # in their own dtype too, to form a batch
                room = self._memory.empty((len(names), *shape), narrow, device)
                rooms |= dict(zip(names, room.unbind(), strict=True))
                rounded |= dict.fromkeys(names, (narrow, own))
        return rooms, rounded

    def _parts_of(self, stretch: Sequence[Step], values: Leaves) -> Iterator[Part]:
        """Yield the bucket's leaves in groups, and large leaves in chunks."""
        for names in self._bucket.lists:
            x: Tensor | None = values[names[0]] if len(names) == 1 else None
            most = 0 if x is None else self._piece_bytes // max(4, x.element_size())
            if x is None or x.numel() <= most or not self._can_be_cut(stretch, names[0], x):
                yield Part(names)
            else:
                for start in range(0, x.numel(), most):
                    yield Part(names, slice(start, min(start + most, x.numel())))

    def _can_be_cut(self, stretch: Sequence[Step], name: str, update: Tensor) -> bool:
        """Return True if a leaf's update, parameter and states are contiguous, so that chunks are views."""
        seen: list[Any] = [update, self._call.params[name]]
        for step in stretch:
            share, old = self._shares[step, (name,)], self._states[step].old
            seen += [old[place] for place, own in zip(share.places, share.parameters, strict=True) if own is not None]
        return all(type(x) in PLAIN and x.shape == update.shape and x.is_contiguous() for x in seen)

    def _widened(self, values: Leaves, room: Workspace | None = None) -> tuple[Leaves, bool]:
        """Convert rounded values back to their own dtype in a buffer; return also whether all values are new."""
        narrow = {
            name: x
            for name, x in values.items()
            if x is not None and name in self._rounded and x.dtype == self._rounded[name][0]
            if room is None or x.dtype != self._rounded[name][1]  # already in a buffer, in its own dtype
        }
        if not narrow:
            return values, False
        room = room or Workspace()
        room.clear()
        wide = {name: room.empty(x.shape, self._rounded[name][1], x.device) for name, x in narrow.items()}
        torch._foreach_copy_(list(wide.values()), list(narrow.values()))
        return values | wide, len(wide) == sum(x is not None for x in values.values())

    def _run(self, step: Step, part: Part, values: Leaves, may_write: bool) -> tuple[Leaves, bool]:
        """Run one transform on a part; return also whether its output may be overwritten."""
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
        # New values are cloned: one may be the old tensor of another leaf, which is overwritten first.
        changed: list[tuple[Tensor, Tensor]] = []
        for place, own, old, new in zip(share.places, share.parameters, given, tree.leaves(after), strict=True):
            if own is None or part.piece is None:
                state.new[place] = new
            elif new is not old:
                changed.append((old, new.clone()))
        for old, new in changed:
            old.copy_(new)
        return out, tx.keeps_donation_promise and (may_write or is_new(out, values))

    def _apply(self, part: Part, updates: Leaves) -> None:
        assert self._call.apply is not None
        self._call.apply({name: part.of(self._call.params[name]) for name in part.names}, updates)
