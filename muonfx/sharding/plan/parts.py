"""Parts: how the matrices of one parameter may be shared out among the ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from muonfx.boxes import Box, boxes_of_interval
from muonfx.sharding.cut import Cut
from muonfx.sharding.layout import Layout
from muonfx.sharding.pieces import Piece
from muonfx.sharding.plan.cost import Run

__all__ = ["Part", "matrices_of", "on_stacks", "parts_of"]


class Part(NamedTuple):
    """Matrices of one parameter that may go to one owner, and the ranks that may be it."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    candidates: tuple[int, ...]
    complete: bool
    """Whether each candidate holds all of it."""

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.stop - self.start


def matrices_of(run: Run, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """The leaves that are stacks of the same matrices to all transforms of a run, and the shape of one."""
    found = [tx.on_stacks(shapes)[1] for _, tx in run]
    return {
        name: matrix
        for name, matrix in found[0].items()
        if prod(shapes[name]) and all(other.get(name) == matrix for other in found)
    }


def on_stacks(run: Run, shapes: dict[str, tuple[int, ...]]) -> Run:
    """The same transforms, for some leaves as stacks of matrices."""
    return tuple((name, tx.on_stacks(shapes)[0]) for name, tx in run)


def parts_of(matrix: tuple[int, int] | None, name: str, layout: Layout) -> Iterator[Part]:
    """Cut a parameter where its matrices allow it: a stack between ranks, or into as many ranges as ranks may own."""
    shape, cut = layout._specs[name].shape, layout.pieces[name]
    if matrix is None:
        candidates = cut.complete or cut.taking_part or tuple(range(layout.size))
        yield Part(name, 0, prod(shape), shape, candidates, bool(cut.complete))
        return
    each = prod(matrix)
    ranges: list[tuple[int, int, int, bool]] | None = cut.derived.get(each)
    if ranges is None:
        ranges = cut.derived[each] = _ranges(cut, shape, each)
    owners = [owner for _, _, owner, _ in ranges]
    if len(set(owners)) < len(owners):  # the state of a rank's part of a stack must be one range
        number = prod(shape) // each
        yield Part(name, 0, prod(shape), (number, *matrix), tuple(sorted(set(owners))), False)
        return
    for first, last, owner, complete in ranges:
        yield Part(name, first * each, last * each, (last - first, *matrix), (owner,), complete)


class _Held(NamedTuple):
    """Who holds one matrix of a stack."""

    ranks: tuple[int, ...]
    """Those that hold all of it, or else those that hold some."""
    complete: bool
    most: int
    """The rank that holds most of it."""


def _ranges(cut: Cut, shape: tuple[int, ...], each: int) -> list[tuple[int, int, int, bool]]:
    """Share out the matrices of a stack: first, last + 1, owner, whether the owner holds them already.

    What one rank holds alone it keeps. What several hold is divided evenly among them, in ranges; a few that cross a
    boundary go to the rank that has most of each.
    """
    holders = cut.holders
    found: list[tuple[int, int, int, bool]] = []

    def give(first: int, last: int, owner: int, complete: bool) -> None:
        if found and found[-1][1] == first and found[-1][2] == owner:
            found[-1] = (found[-1][0], last, owner, found[-1][3] and complete)
        elif last > first:
            found.append((first, last, owner, complete))

    matrices = [
        _held(holders, boxes_of_interval(shape, i * each, (i + 1) * each), each) for i in range(prod(shape) // each)
    ]
    first = 0
    while first < len(matrices):
        held = matrices[first]
        last = first + 1
        while last < len(matrices) and matrices[last][:2] == held[:2]:
            last += 1
        if last - first < len(held.ranks):
            for i in range(first, last):
                give(i, i + 1, matrices[i].most, held.complete)
        else:
            for i, owner in enumerate(held.ranks):
                begin, end = ((last - first) * j // len(held.ranks) for j in (i, i + 1))
                give(first + begin, first + end, owner, held.complete)
        first = last
    return found


def _held(holders: Mapping[Piece, Sequence[int]], boxes: Sequence[Box], each: int) -> _Held:
    have = [(sum(box.numel for box in piece.shared(boxes)), rank) for piece, ranks in holders.items() for rank in ranks]
    whole = sorted(rank for numel, rank in have if numel == each)
    some = sorted(rank for numel, rank in have if numel)
    return _Held(tuple(whole or some), bool(whole), min((-numel, rank) for numel, rank in have)[1])
