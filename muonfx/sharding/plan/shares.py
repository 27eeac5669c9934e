"""Divide the matrices of each parameter among the ranks that orthogonalize them.

A `Part` is a set of matrices, with the ranks that may compute them. A `Share` is a part with the rank that computes it,
its owner. A `ShareTransfer` is the overlap of a share with one shard, which is sent to the owner and back.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from torch import Tensor

from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.cost import Run
from muonfx.sharding.shards.boxes import Box, boxes_of_interval
from muonfx.sharding.shards.cut import Cut
from muonfx.sharding.shards.position import Piece, Window


def nearest(ranks: Sequence[int], owner: int) -> int:
    """Return the rank in `ranks`, an ascending list, that is nearest to the rank `owner`. Prefer the lower in a tie."""
    if len(ranks) == 1:
        return ranks[0]
    place = bisect_left(ranks, owner)
    return min(ranks[max(place - 1, 0) : place + 1], key=lambda rank: (abs(rank - owner), rank))


class ShareTransfer(NamedTuple):
    """The elements that a shard has in common with a set of matrices (a share). They are sent to its owner and back."""

    ranks: tuple[int, ...]
    """The ranks that hold the shard, ascending."""
    sender: int
    """The rank that sends the overlap to the owner: the owner itself if it holds the shard, else the nearest holder."""
    boxes: tuple[Box, ...]
    """The overlap as boxes (offsets and sizes) of the whole parameter."""
    numel: int


class Moves(NamedTuple):
    """The elements that one rank sends and receives in a step for a share (some matrices and their owner)."""

    share: Share
    computes: bool
    """True if the rank computes the share."""
    is_all: bool
    """True if the rank's shard of the parameter has exactly the elements of the share."""
    held: tuple[Window, ...]
    """The positions, in the rank's local tensor, of the boxes in which its shard overlaps the share."""
    within: tuple[Window, ...]
    """The positions of the same boxes in the tensor of the share."""
    numel: int
    """The number of elements in these boxes."""
    sends: bool
    """True if the rank sends these elements to the owner; another rank may hold a replica and send it."""
    transfers: tuple[tuple[ShareTransfer, tuple[Window, ...]], ...]
    """On the owner, the overlap of each shard with the share and its positions in the share; empty on other ranks."""


@dataclass(frozen=True)
class Share:
    """Some whole matrices of one parameter, and the rank that computes them (the owner; None means every rank)."""

    name: str
    start: int
    """The index of the first element in the flattened parameter."""
    stop: int
    shape: tuple[int, ...]
    """The shape in which the owner computes: the parameter's own, or (count, rows, columns) for a stack of matrices."""
    whole: tuple[int, ...]
    """The shape of the whole parameter."""
    owner: int | None
    cost: float
    """The estimated cost, in floating-point operations of dense matrix products that take the same time."""
    cut: Cut = field(repr=False)
    """The partition of the parameter over the ranks."""

    @property
    def numel(self) -> int:
        """The number of elements in the matrices of this share."""
        return self.stop - self.start

    @cached_property
    def piece(self) -> Piece:
        """Which elements of the parameter belong to the matrices of this share, as a `Piece` (without values)."""
        return (
            Piece.whole(self.whole) if self.shape == self.whole else Piece.interval(self.whole, self.start, self.stop)
        )

    def local(self, tensor: Tensor) -> Tensor:
        """Reshape a tensor of this share's matrices like a shard: flat if they are only a part of the parameter."""
        return tensor if self.shape == self.whole else tensor.reshape(-1)

    @property
    def transfers(self) -> Iterator[ShareTransfer]:
        """An iterator over the shards that contain elements of these matrices, with these elements."""
        # Computed on request: a rank needs all transfers of the shares that it owns, and only its own of the others.
        for piece, ranks in self.cut.holders.items():
            if (transfer := self._transfer(piece, ranks)) is not None:
                yield transfer

    def transfer_of(self, rank: int) -> ShareTransfer | None:
        """Return which elements of these matrices are in the shard of `rank`, or None if there are none."""
        piece = self.cut[rank]
        return self._transfer(piece, self.cut.holders[piece]) if piece.numel else None

    def _transfer(self, piece: Piece, ranks: tuple[int, ...]) -> ShareTransfer | None:
        boxes = piece.boxes if self.numel == prod(self.whole) else tuple(piece.shared(self._boxes))
        sender = nearest(ranks, self.owner or 0)
        return ShareTransfer(ranks, sender, boxes, sum(box.numel for box in boxes)) if boxes else None

    @cached_property
    def _boxes(self) -> tuple[Box, ...]:
        return tuple(boxes_of_interval(self.whole, self.start, self.stop))

    def moves(self, rank: int) -> Moves:
        """Return which elements of these matrices a rank sends and receives in a step."""
        transfer, held = self.transfer_of(rank), self.cut[rank]
        boxes = () if transfer is None else transfer.boxes
        return Moves(
            self,
            self.owner in (None, rank),
            held.numel == self.numel,
            tuple(map(held.window, boxes)),
            tuple(map(self.piece.window, boxes)),
            0 if transfer is None else transfer.numel,
            transfer is not None and transfer.sender == rank,
            tuple((transfer, tuple(map(self.piece.window, transfer.boxes))) for transfer in self.transfers)
            if rank == self.owner
            else (),
        )

    @cached_property
    def _at_owner(self) -> ShareTransfer | None:
        return None if self.owner is None else self.transfer_of(self.owner)

    @cached_property
    def needs_gather(self) -> bool:
        """True if the owner (the rank that computes these matrices) must first receive elements of them."""
        return self.owner is not None and (0 if self._at_owner is None else self._at_owner.numel) < self.numel

    @cached_property
    def needs_send(self) -> bool:
        """True if the owner (the rank that computes these matrices) must send results to other ranks."""
        return self.needs_gather or (self._at_owner is not None and len(self._at_owner.ranks) > 1)

    @property
    def route(self) -> str:
        """How the matrices reach the rank that computes them (the owner), and how the results reach other ranks.

        "everyone": all ranks compute, and nothing is sent. "owner": the matrices are gathered on the owner. "split":
        the owner holds them and sends only the results. "local": only the owner holds them, and nothing is sent.
        """
        if self.owner is None:
            return "everyone"
        return "owner" if self.needs_gather else "split" if self.needs_send else "local"

    @property
    def reason(self) -> str:
        """A text that explains the share's `route`, for the tables of `Plan.explain`."""
        held = self._at_owner
        if self.owner is None:
            return f"every rank holds it; computing it ({self.cost:.1e} operations) is faster than sending it"
        if not self.needs_send:
            return "the owner alone holds it"
        if held is not None and not self.needs_gather:
            return f"{len(held.ranks)} ranks hold it; the owner sends the result to the others"
        shards, numel = sum(1 for _ in self.transfers), 0 if held is None else held.numel
        return f"cut into {shards} shards; the owner holds {numel / max(self.numel, 1):.0%}"


class Part(NamedTuple):
    """Some matrices of one parameter, and the ranks (`candidates`) of which one will compute them."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    candidates: tuple[int, ...]
    complete: bool
    """True if each candidate rank holds the whole part."""
    one_each: bool = False
    """True if a rank may compute at most one of the parameter's parts that have this flag."""

    @property
    def numel(self) -> int:
        """The number of elements in this part (some matrices of a parameter)."""
        return self.stop - self.start


def matrices_of(run: Run, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) by parameter name, for parameters that all transforms treat as a stack of matrices."""
    found = [tx.on_stacks(shapes)[1] for _, tx in run]
    return {
        name: matrix
        for name, matrix in found[0].items()
        if prod(shapes[name]) and all(other.get(name) == matrix for other in found)
    }


def on_stacks(run: Run, shapes: dict[str, tuple[int, ...]]) -> Run:
    """Return the same transforms in a form that treats leaves of the given shapes as stacks of matrices."""
    return tuple((name, tx.on_stacks(shapes)[0]) for name, tx in run)


def parts_of(matrix: tuple[int, int] | None, name: str, layout: Layout) -> Iterator[Part]:
    """Yield the parts of a parameter to assign to ranks: ranges of a stack of matrices, or the whole parameter."""
    shape, cut = layout.specs[name].shape, layout.pieces[name]
    if matrix is None:
        candidates = cut.complete or cut.taking_part or tuple(range(layout.size))
        yield Part(name, 0, prod(shape), shape, candidates, bool(cut.complete))
        return
    each = prod(matrix)
    ranges = cut.once(("ranges", each), lambda: _ranges(cut, shape, each))
    owners = [found.candidates[0] for found in ranges if len(found.candidates) == 1]
    if len(set(owners)) < len(owners):  # a rank's state of a stack must be one range
        candidates = tuple(sorted({rank for found in ranges for rank in found.candidates}))
        yield Part(name, 0, prod(shape), (prod(shape) // each, *matrix), candidates, False)
        return
    for first, last, candidates, complete in ranges:
        one_each = len(candidates) > 1
        yield Part(name, first * each, last * each, (last - first, *matrix), candidates, complete, one_each)


def apart(parts: Sequence[Part], costs: Sequence[float], size: int) -> list[Part]:
    """Return the parts, with one rank chosen for each part that needs a rank of its own (`one_each`)."""
    loads = [0.0] * size
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for i, part in enumerate(parts):
        if part.one_each:
            groups.setdefault((part.name, part.candidates), []).append(i)
        elif len(part.candidates) == 1:
            loads[part.candidates[0]] += costs[i]
    found = list(parts)
    for (_, candidates), places in sorted(groups.items(), key=lambda group: -costs[group[1][0]]):
        least = sorted(candidates, key=lambda rank: (loads[rank], rank))[: len(places)]
        for i, owner in zip(places, sorted(least), strict=True):
            found[i] = parts[i]._replace(candidates=(owner,), one_each=False)
            loads[owner] += costs[i]
    return found


class _Range(NamedTuple):
    """Consecutive matrices of a stack, and the ranks that may compute them."""

    first: int
    last: int
    """The exclusive end."""
    candidates: tuple[int, ...]
    """The rank that computes the range; or, for a single matrix, ranks that may each compute one of the stack."""
    complete: bool
    """True if each candidate holds the whole range."""


class _Held(NamedTuple):
    """The ranks that hold elements of one matrix of a stack, and whether each of them holds all of it."""

    ranks: tuple[int, ...]
    """The ranks that hold the whole matrix or, if there is no such rank, the ranks that hold some of it."""
    complete: bool
    most: tuple[int, ...]
    """The ranks that hold the largest part of the matrix."""


def _ranges(cut: Cut, shape: tuple[int, ...], each: int) -> list[_Range]:
    """Divide a stack of matrices, with `each` elements per matrix, among the ranks that hold elements of them."""
    holders = cut.holders
    found: list[_Range] = []

    def give(first: int, last: int, owner: int, complete: bool) -> None:
        if found and found[-1].last == first and found[-1].candidates == (owner,):
            found[-1] = found[-1]._replace(last=last, complete=found[-1].complete and complete)
        elif last > first:
            found.append(_Range(first, last, (owner,), complete))

    matrices = [
        _holders_of_matrix(holders, boxes_of_interval(shape, i * each, (i + 1) * each), each)
        for i in range(prod(shape) // each)
    ]
    times = Counter(rank for held in matrices for rank in held.ranks)
    for _, alike in itertools.groupby(range(len(matrices)), lambda i: matrices[i][:2]):
        first, *others = alike
        held, number, last = matrices[first], len(others) + 1, first + len(others) + 1
        most = set(held.most).intersection(*(matrices[i].most for i in others))
        # Divide the matrices evenly among their holders. If there are more holders than matrices, each matrix may have
        # any of the ranks that hold most of it, if these hold nothing else of the stack; a few matrices that cross a
        # boundary are assigned to the rank that holds most of each.
        if number >= len(held.ranks):
            for i, owner in enumerate(held.ranks):
                begin, end = (number * j // len(held.ranks) for j in (i, i + 1))
                give(first + begin, first + end, owner, held.complete)
        elif number <= len(most) > 1 and all(times[rank] == number for rank in most):
            found += [_Range(i, i + 1, tuple(sorted(most)), held.complete) for i in range(first, last)]
        else:
            for i in range(first, last):
                give(i, i + 1, matrices[i].most[0], held.complete)
    return found


def _holders_of_matrix(holders: Mapping[Piece, Sequence[int]], boxes: Sequence[Box], each: int) -> _Held:
    have = [(sum(box.numel for box in piece.shared(boxes)), rank) for piece, ranks in holders.items() for rank in ranks]
    whole = sorted(rank for numel, rank in have if numel == each)
    some = sorted(rank for numel, rank in have if numel)
    most = max(numel for numel, _ in have)
    return _Held(tuple(whole or some), bool(whole), tuple(sorted(rank for numel, rank in have if numel == most)))
