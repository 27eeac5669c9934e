"""The plan of a run: which rank computes which matrices, by which route, in which order.

Four words. A *run* is what needs whole matrices: neighbouring transforms of a chain. A *share* is some whole matrices
of one parameter that one rank, its *owner*, computes: the parameter itself, or a range of a stack. A *leg* is what of
a share lies in one piece, and so on the way to the owner and back. A *bucket* is the shares that travel together.

A plan follows from the layout, the chain and shapes alone, so that all ranks make the same one without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from muonfx.boxes import Box, boxes_of_interval
from muonfx.core import Locality
from muonfx.sharding.layout import Layout
from muonfx.sharding.pieces import Piece
from muonfx.sharding.plan.balance import assign
from muonfx.sharding.plan.costs import Run, cost_of
from muonfx.tree import Spec

__all__ = ["Leg", "Machine", "RunPlan", "Settings", "Share", "plan_run"]


class Machine(NamedTuple):
    """What a rank can do, as far as routes depend on it."""

    flops: float
    """Floating-point operations a second in matrix products."""
    bandwidth: float
    """Bytes a second that a rank sends."""

    @classmethod
    def of(cls, device: str) -> Machine:
        """A guess for a kind of device: only the order of magnitude counts.

        >>> Machine.of("cpu").flops < Machine.of("cuda").flops
        True
        """
        return cls(4e14, 5e10) if device == "cuda" else cls(1e11, 1e9)


class Settings(NamedTuple):
    """What a caller may choose."""

    replicas: str = "auto"
    """What is done with matrices that several ranks hold whole: "split", "everyone" or "auto"."""
    bucket_bytes: int = 1 << 26
    """About how many bytes of whole matrices a rank holds at a time; a single larger one stands alone."""
    exchange_dtype: torch.dtype | None = None
    """In which dtype matrices travel; None: in that to which their transform rounds them anyway."""
    machine: Machine | None = None
    """What routes are chosen by; None: a guess by the kind of device."""


class Leg(NamedTuple):
    """What of a share lies in one piece."""

    ranks: tuple[int, ...]
    """That hold the piece."""
    sender: int
    """Of these the one that sends it to the owner: the owner itself, or the one of the nearest rank."""
    boxes: tuple[Box, ...]
    """Of the whole parameter."""
    numel: int


@dataclass(frozen=True)
class Share:
    """Some whole matrices of one parameter, computed by one rank or, with the owner None, by every rank."""

    name: str
    start: int
    """The first element, in the flattened parameter."""
    stop: int
    shape: tuple[int, ...]
    """In which the owner computes: the parameter's own, or (how many, rows, columns)."""
    whole: tuple[int, ...]
    """The parameter's shape."""
    owner: int | None
    route: str
    reason: str
    cost: float
    """Floating-point operations."""
    legs: tuple[Leg, ...] = field(repr=False)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    @property
    def piece(self) -> Piece:
        """The share as a piece of the parameter."""
        return (
            Piece.whole(self.whole) if self.shape == self.whole else Piece.interval(self.whole, self.start, self.stop)
        )

    def local(self, tensor: Tensor) -> Tensor:
        """A tensor of the share's shape as the local tensor of its piece."""
        return tensor if self.shape == self.whole else tensor.view(-1)

    @cached_property
    def comes(self) -> bool:
        """Whether anything must be sent to the owner."""
        return self.owner is not None and any(leg.sender != self.owner for leg in self.legs)

    @cached_property
    def goes(self) -> bool:
        """Whether anything must be sent back."""
        return self.owner is not None and any(leg.ranks != (self.owner,) for leg in self.legs)

    def elements_sent(self, size: int) -> list[int]:
        """What each rank sends, there and back, in elements: to itself nothing."""
        sent = [0] * size
        if self.owner is not None:
            for leg in self.legs:
                if leg.sender != self.owner:
                    sent[leg.sender] += leg.numel
                sent[self.owner] += leg.numel * sum(1 for rank in leg.ranks if rank != self.owner)
        return sent


@dataclass(frozen=True)
class RunPlan:
    """Who computes what of one run, and when."""

    run: Run = field(repr=False)
    size: int
    shares: tuple[Share, ...]
    buckets: tuple[tuple[int, ...], ...]
    """Places of shares, all of one dtype, that travel together; in this order."""
    specs: dict[str, Spec] = field(repr=False)
    device: torch.device
    exchange_dtype: torch.dtype | None

    @property
    def flops(self) -> list[float]:
        """What each rank computes."""
        loads = [0.0] * self.size
        for share in self.shares:
            for rank in range(self.size) if share.owner is None else (share.owner,):
                loads[rank] += share.cost
        return loads

    @property
    def sent(self) -> list[int]:
        """The bytes that each rank sends, there and back."""
        total = [0] * self.size
        for share in self.shares:
            for rank, nbytes in enumerate(self.bytes_of(share)):
                total[rank] += nbytes
        return total

    def bytes_of(self, share: Share) -> list[int]:
        """The bytes that each rank sends for a share."""
        there, back = self.travels(self.specs[share.name].dtype)
        sent = [0] * self.size
        if share.owner is not None:
            for leg in share.legs:
                if leg.sender != share.owner:
                    sent[leg.sender] += leg.numel * there.itemsize
                sent[share.owner] += leg.numel * back.itemsize * sum(1 for rank in leg.ranks if rank != share.owner)
        return sent

    def travels(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """In which dtypes updates of a dtype go to the owner and come back: no value changes, unless asked for."""
        if self.exchange_dtype is not None:
            return self.exchange_dtype, self.exchange_dtype
        return self._narrowed(0, dtype), self._narrowed(-1, dtype)

    def _narrowed(self, place: int, dtype: torch.dtype) -> torch.dtype:
        tx = self.run[place][1]
        declared = cast("Any", tx.factory).rounds_to
        rounded = dtype if declared is None else declared(tx, dtype, self.device)
        return rounded if rounded.itemsize < dtype.itemsize else dtype


def plan_run(
    run: Run, names: Sequence[str], layout: Layout, device: torch.device, settings: Settings, compute: torch.dtype
) -> RunPlan:
    """Plan a run for some parameters.

    Args:
        run: the transforms.
        names: of the parameters that reach it.
        layout: who holds what.
        device: of the values.
        settings: what the caller has chosen.
        compute: what a dtype of "auto" stands for, on all ranks.
    """
    specs = {name: layout._specs[name] for name in names}
    machine = settings.machine or Machine.of(device.type)
    parts = [part for name in names for part in _parts(run, name, layout)]

    def cost(part: _Part) -> float:
        return cost_of(run, part.name, part.shape, specs[part.name].dtype, device.type, compute)

    costs = [cost(part) for part in parts]
    nbytes = [part.numel * specs[part.name].dtype.itemsize for part in parts]
    alone = [_everyone(part, c, b, layout, machine, settings) for part, c, b in zip(parts, costs, nbytes, strict=True)]
    shared = [i for i, all_compute in enumerate(alone) if not all_compute]
    given = dict(zip(shared, _owners([parts[i] for i in shared], [costs[i] for i in shared], layout.size), strict=True))
    shares = tuple(
        _share(part, None if alone[i] else given[i], costs[i], layout, machine) for i, part in enumerate(parts)
    )
    buckets = tuple(_buckets(shares, specs, layout.size, settings.bucket_bytes))
    return RunPlan(run, layout.size, shares, buckets, specs, device, settings.exchange_dtype)


class _Part(NamedTuple):
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
        return self.stop - self.start


def _parts(run: Run, name: str, layout: Layout) -> Iterator[_Part]:
    """Cut a parameter where its matrices allow it: a stack between ranks, or into as many ranges as ranks may own."""
    shape = layout._specs[name].shape
    locality = max(tx.locality for _, tx in run)
    stacked = locality is Locality.MATRIX and len(shape) > 2 and prod(shape) > 0
    each = prod(shape[-2:]) if stacked else prod(shape)
    holders = layout.holders(name)
    if not stacked:
        whole = [rank for piece, ranks in holders.items() if piece.numel == each for rank in ranks]
        some = sorted(rank for ranks in holders.values() for rank in ranks) or list(range(layout.size))
        yield _Part(name, 0, each, shape, tuple(sorted(whole) or some), bool(whole))
        return
    ranges = _ranges(layout, name, shape, each)
    owners = [owner for _, _, owner, _ in ranges]
    if len(set(owners)) < len(owners):  # the state of a rank's part of a stack must be one range
        yield _Part(name, 0, prod(shape), shape, tuple(sorted(set(owners))), False)
        return
    for first, last, owner, complete in ranges:
        yield _Part(name, first * each, last * each, (last - first, *shape[-2:]), (owner,), complete)


class _Held(NamedTuple):
    """Who holds one matrix of a stack."""

    ranks: tuple[int, ...]
    """Those that hold all of it, or else those that hold some."""
    complete: bool
    most: int
    """The rank that holds most of it."""


def _ranges(layout: Layout, name: str, shape: tuple[int, ...], each: int) -> list[tuple[int, int, int, bool]]:
    """Share out the matrices of a stack: first, last + 1, owner, whether the owner holds them already.

    What one rank holds alone it keeps. What several hold is divided evenly among them, in ranges; a few that cross a
    boundary go to the rank that has most of each.
    """
    holders = layout.holders(name)
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


def _held(holders: dict[Piece, list[int]], boxes: Sequence[Box], each: int) -> _Held:
    have = [(sum(box.numel for box in piece.shared(boxes)), rank) for piece, ranks in holders.items() for rank in ranks]
    whole = sorted(rank for numel, rank in have if numel == each)
    some = sorted(rank for numel, rank in have if numel)
    return _Held(tuple(whole or some), bool(whole), min((-numel, rank) for numel, rank in have)[1])


def _everyone(part: _Part, cost: float, nbytes: int, layout: Layout, machine: Machine, settings: Settings) -> bool:
    """Whether all ranks compute a part that all hold: where that takes less time than to send the result."""
    if layout.size == 1 or len(part.candidates) < layout.size or not part.complete or settings.replicas == "split":
        return False
    return settings.replicas == "everyone" or cost / machine.flops < nbytes / machine.bandwidth


def _owners(parts: Sequence[_Part], costs: Sequence[float], size: int) -> list[int]:
    groups: dict[tuple[int, ...], tuple[int, ...] | None] = {tuple(range(size)): None}
    candidates = [groups.setdefault(part.candidates, part.candidates) for part in parts]
    return assign(costs, candidates, size, sizes=[part.numel for part in parts])


def _share(part: _Part, owner: int | None, cost: float, layout: Layout, machine: Machine) -> Share:
    shape = layout._specs[part.name].shape
    boxes = boxes_of_interval(shape, part.start, part.stop)
    legs: list[Leg] = []
    for piece, ranks in layout.holders(part.name).items():
        common = tuple(piece.shared(boxes))
        if common:
            nearest = min(ranks, key=lambda rank: (abs(rank - (owner or 0)), rank))
            legs.append(Leg(tuple(ranks), nearest, common, sum(box.numel for box in common)))
    route, reason = _route(part, owner, legs, layout, machine, cost)
    return Share(part.name, part.start, part.stop, part.shape, shape, owner, route, reason, cost, tuple(legs))


def _route(
    part: _Part, owner: int | None, legs: Sequence[Leg], layout: Layout, machine: Machine, cost: float
) -> tuple[str, str]:
    if owner is None:
        return "everyone", f"all {layout.size} ranks hold it, and {cost:.1e} operations take less time than to send it"
    if all(leg.ranks == (owner,) for leg in legs):
        return "local", "it is whole on its owner alone"
    if part.complete:
        return "split", f"{len(part.candidates)} ranks hold it whole: one computes and sends the result"
    held = sum(leg.numel for leg in legs if owner in leg.ranks)
    return "owner", f"it lies in {len(legs)} pieces; its owner holds {held / max(part.numel, 1):.0%} of it"


def _buckets(shares: Sequence[Share], specs: dict[str, Spec], size: int, limit: int) -> Iterator[tuple[int, ...]]:
    """Every owner's shares of a dtype in lists of so many bytes; the first lists of all owners travel together."""
    for dtype in dict.fromkeys(specs[share.name].dtype for share in shares):
        lists: list[list[list[int]]] = [[] for _ in range(size)]
        room = [0] * size
        mine = [i for i, share in enumerate(shares) if specs[share.name].dtype == dtype]
        for i in sorted(mine, key=lambda i: (tuple(sorted(shares[i].shape[-2:])), i)):
            owner, nbytes = shares[i].owner or 0, shares[i].numel * dtype.itemsize
            if not lists[owner] or nbytes > room[owner]:
                lists[owner].append([])
                room[owner] = limit
            lists[owner][-1].append(i)
            room[owner] -= nbytes
        for turn in range(max(map(len, lists))):
            yield tuple(sorted(i for own in lists if turn < len(own) for i in own[turn]))
