"""Parts, shares and transfers: the candidates for matrices, an owner's matrices, and their parts in each shard."""

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

from muonfx.sharding.boxes import Box, boxes_of_interval
from muonfx.sharding.cut import Cut
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.cost import Run
from muonfx.sharding.shards import Piece, Window

__all__ = ["ShareTransfer", "Moves", "Part", "Share", "apart", "matrices_of", "on_stacks", "parts_of"]


def nearest(ranks: Sequence[int], owner: int) -> int:
    """Return the rank of an ascending list that is nearest to the owner, the lower one in a tie."""
    if len(ranks) == 1:
        return ranks[0]
    place = bisect_left(ranks, owner)
    return min(ranks[max(place - 1, 0) : place + 1], key=lambda rank: (abs(rank - owner), rank))


class ShareTransfer(NamedTuple):
    """The part of a share in one shard."""

    ranks: tuple[int, ...]
    """The ranks that hold the shard, ascending."""
    sender: int
    """The rank that sends the part to the owner: the owner itself, or the nearest holder."""
    boxes: tuple[Box, ...]
    """Boxes of the whole parameter."""
    numel: int


class Moves(NamedTuple):
    """One rank's transfers of a share, to the owner and back; the same at every step."""

    share: Share
    computes: bool
    """True if the rank computes the share."""
    is_all: bool
    """True if the rank's shard of the parameter and the share have the same elements."""
    held: tuple[Window, ...]
    """The windows, in the rank's own shard, of its part of the share."""
    within: tuple[Window, ...]
    """The windows of the same part in the share."""
    numel: int
    """The number of elements."""
    sends: bool
    """True if the rank sends them to the owner."""
    transfers: tuple[tuple[ShareTransfer, tuple[Window, ...]], ...]
    """On the owner, the transfers of all shards with their windows in the share; empty on other ranks."""


@dataclass(frozen=True)
class Share:
    """Whole matrices of one parameter, computed by one rank or, if the owner is None, by every rank."""

    name: str
    start: int
    """The first element, in the flattened parameter."""
    stop: int
    shape: tuple[int, ...]
    """The shape in which the owner computes: the parameter's own, or (count, rows, columns) for a stack."""
    whole: tuple[int, ...]
    """The parameter's shape."""
    owner: int | None
    cost: float
    """The load, in operations of full products that take the same time."""
    cut: Cut = field(repr=False)
    """The partition of the parameter."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @cached_property
    def piece(self) -> Piece:
        """The share as a `Piece` of the parameter."""
        return (
            Piece.whole(self.whole) if self.shape == self.whole else Piece.interval(self.whole, self.start, self.stop)
        )

    def local(self, tensor: Tensor) -> Tensor:
        """View a tensor of the share's shape as the local tensor of its `piece`."""
        return tensor if self.shape == self.whole else tensor.reshape(-1)

    @property
    def transfers(self) -> Iterator[ShareTransfer]:
        """The transfers of all shards that overlap the share; as many as ranks, on a large mesh."""
        # Computed on request: a rank needs all transfers of the shares that it owns, and only its own of the others.
        for piece, ranks in self.cut.holders.items():
            if (transfer := self._transfer(piece, ranks)) is not None:
                yield transfer

    def transfer_of(self, rank: int) -> ShareTransfer | None:
        """Return the transfer of a rank's own shard, or None if the shard does not overlap the share."""
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
        """Return the transfers of a rank."""
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
        """True if any element must be sent to the owner."""
        return self.owner is not None and (0 if self._at_owner is None else self._at_owner.numel) < self.numel

    @cached_property
    def needs_send(self) -> bool:
        """True if any element must be sent back."""
        return self.needs_gather or (self._at_owner is not None and len(self._at_owner.ranks) > 1)

    @property
    def route(self) -> str:
        """How the matrices reach their owner and the results return: "everyone", "owner", "split" or "local"."""
        if self.owner is None:
            return "everyone"
        return "owner" if self.needs_gather else "split" if self.needs_send else "local"

    @property
    def reason(self) -> str:
        """Why the share has its `route`, as a text for `Plan.explain`."""
        held = self._at_owner
        if self.owner is None:
            return f"all ranks hold it, and {self.cost:.1e} operations take less time than to send it"
        if not self.needs_send:
            return "it is whole on its owner alone"
        if held is not None and not self.needs_gather:
            return f"{len(held.ranks)} ranks hold it whole: one computes and sends the result"
        pieces, numel = sum(1 for _ in self.transfers), 0 if held is None else held.numel
        return f"it lies in {pieces} pieces; its owner holds {numel / max(self.numel, 1):.0%} of it"


class Part(NamedTuple):
    """Matrices of one parameter that one owner may take, and the candidate ranks."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    candidates: tuple[int, ...]
    complete: bool
    """True if each candidate holds all of it."""
    one_each: bool = False
    """True if a candidate may take at most one such part of the parameter."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


def matrices_of(run: Run, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Return the shape of one matrix, for the leaves that all transforms of a run treat as the same stacks."""
    found = [tx.on_stacks(shapes)[1] for _, tx in run]
    return {
        name: matrix
        for name, matrix in found[0].items()
        if prod(shapes[name]) and all(other.get(name) == matrix for other in found)
    }


def on_stacks(run: Run, shapes: dict[str, tuple[int, ...]]) -> Run:
    """Return the transforms of a run for some leaves as stacks of matrices."""
    return tuple((name, tx.on_stacks(shapes)[0]) for name, tx in run)


def parts_of(matrix: tuple[int, int] | None, name: str, layout: Layout) -> Iterator[Part]:
    """Yield the parts of a parameter: ranges of its stack, or all of it if it is no stack."""
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
    """Fix the owners of parts with `one_each`: for each parameter the least loaded candidates."""
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
    """Consecutive matrices of a stack."""

    first: int
    last: int
    """The exclusive end."""
    candidates: tuple[int, ...]
    """The one owner; or, for a single matrix, the ranks that may own one such matrix of the stack each."""
    complete: bool
    """True if each candidate holds all of it."""


class _Held(NamedTuple):
    """The holders of one matrix of a stack."""

    ranks: tuple[int, ...]
    """The ranks that hold all of it, or else the ranks that hold some of it."""
    complete: bool
    most: tuple[int, ...]
    """The ranks that hold most of it."""


def _ranges(cut: Cut, shape: tuple[int, ...], each: int) -> list[_Range]:
    """Divide the matrices of a stack among its holders, in ranges."""
    holders = cut.holders
    found: list[_Range] = []

    def give(first: int, last: int, owner: int, complete: bool) -> None:
        if found and found[-1].last == first and found[-1].candidates == (owner,):
            found[-1] = found[-1]._replace(last=last, complete=found[-1].complete and complete)
        elif last > first:
            found.append(_Range(first, last, (owner,), complete))

    matrices = [
        _held(holders, boxes_of_interval(shape, i * each, (i + 1) * each), each) for i in range(prod(shape) // each)
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


def _held(holders: Mapping[Piece, Sequence[int]], boxes: Sequence[Box], each: int) -> _Held:
    have = [(sum(box.numel for box in piece.shared(boxes)), rank) for piece, ranks in holders.items() for rank in ranks]
    whole = sorted(rank for numel, rank in have if numel == each)
    some = sorted(rank for numel, rank in have if numel)
    most = max(numel for numel, _ in have)
    return _Held(tuple(whole or some), bool(whole), tuple(sorted(rank for numel, rank in have if numel == most)))
