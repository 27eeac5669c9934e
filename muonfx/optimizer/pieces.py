"""What of a transform runs on which leaves at once: segments, pieces, and the bytes that a piece may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from muonfx.core import Locality, Transform, chain, chain_entries
from muonfx.tree import PyTree

__all__ = ["Piece", "Segment", "buckets", "bytes_of", "segments"]


class Piece(NamedTuple):
    """A transform and the leaves to run it on at once; None: all of them."""

    tx: Transform
    names: list[str] | None

    def members(self, updates: Mapping[str, Tensor | None]) -> Iterable[str]:
        """The names of its leaves, among those of all updates."""
        return updates if self.names is None else self.names


class Segment(NamedTuple):
    """Neighbouring transforms of a chain that run together; ``names`` is None where the transform is no chain."""

    tx: Transform
    names: list[str] | None

    def state_of(self, state: PyTree) -> PyTree:
        """Take this segment's part out of the whole state."""
        return state if self.names is None else {name: state[name] for name in self.names}

    def with_state(self, state: PyTree, part: PyTree) -> PyTree:
        """Put this segment's part into the whole state."""
        return part if self.names is None else {**state, **part}


def segments(tx: Transform) -> list[Segment]:
    """Cut a chain into runs of transforms that look at one leaf at a time, and those that look at the whole tree."""
    entries = chain_entries(tx)
    if tx.locality is not Locality.TREE or entries is None:
        return [Segment(tx, None)]
    runs: list[list[tuple[str, Transform]]] = []
    for name, part in entries.items():
        local = part.locality is not Locality.TREE
        if local and runs and runs[-1][0][1].locality is not Locality.TREE:
            runs[-1].append((name, part))
        else:
            runs.append([(name, part)])
    return [Segment(chain(*run), [name for name, _ in run]) for run in runs]


SMALL_BUCKET = 1 << 22
"""The bytes that a bucket may have even where every parameter is smaller: calls cost more than room there."""


def bytes_of(param: Tensor) -> int:
    """The bytes of a parameter's elements."""
    return param.numel() * param.element_size()


def buckets(names: list[str], named: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Cut names, in order, into lists of at most so many bytes of parameters; a single larger one stands alone."""
    found: list[list[str]] = []
    room = 0
    for name in names:
        size = bytes_of(named[name])
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(name)
        room -= size
    return found or [[]]
