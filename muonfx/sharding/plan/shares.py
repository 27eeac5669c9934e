"""Shares and legs: what an owner computes, and what of it lies where."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from torch import Tensor

from muonfx.boxes import Box, boxes_of_interval
from muonfx.sharding.cut import Cut
from muonfx.sharding.pieces import Piece, Window

__all__ = ["Leg", "Moves", "Share", "nearest"]


def nearest(ranks: Sequence[int], owner: int) -> int:
    """Of some rising ranks the one nearest to the owner; of two as near the lower.

    >>> nearest((0, 4, 8), 6), nearest((0, 4, 8), 8)
    (4, 8)
    """
    if len(ranks) == 1:
        return ranks[0]
    place = bisect_left(ranks, owner)
    return min(ranks[max(place - 1, 0) : place + 1], key=lambda rank: (abs(rank - owner), rank))


class Leg(NamedTuple):
    """What of a share lies in one piece."""

    ranks: tuple[int, ...]
    """That hold the piece; rising."""
    sender: int
    """Of these the one that sends it to the owner: the owner itself, or the one of the nearest rank."""
    boxes: tuple[Box, ...]
    """Of the whole parameter."""
    numel: int


class Moves(NamedTuple):
    """One rank's transfers of a share, there and back; the same at every step."""

    held: tuple[Window, ...]
    """The places, in the rank's own piece, of what it holds of the share."""
    within: tuple[Window, ...]
    """The places of the same in the share."""
    numel: int
    """The number of elements."""
    sends: bool
    """True if the rank sends them to the owner."""
    legs: tuple[tuple[Leg, tuple[Window, ...]], ...]
    """At the owner, the legs of all pieces and their places in the share; elsewhere none."""


@dataclass(frozen=True)
class Share:
    """Some whole matrices of one parameter, computed by one rank or, with the owner None, by every rank.

    A rank needs all legs of what it owns, and of other shares its own leg alone; so legs are made when asked for.
    """

    name: str
    start: int
    """The first element, in the flattened parameter."""
    stop: int
    shape: tuple[int, ...]
    """In which the owner computes: the parameter's own, or (how many, rows, columns) of a stack."""
    whole: tuple[int, ...]
    """The parameter's shape."""
    owner: int | None
    route: str
    cost: float
    """Floating-point operations."""
    cut: Cut = field(repr=False)
    """The piece of the parameter that each rank holds."""
    because: str = field(default="", repr=False)
    """The reason for the route, where it does not follow from the rest."""
    _moves: dict[int, Moves] = field(default_factory=dict, repr=False, compare=False)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    @cached_property
    def piece(self) -> Piece:
        """The share as a piece of the parameter."""
        return (
            Piece.whole(self.whole) if self.shape == self.whole else Piece.interval(self.whole, self.start, self.stop)
        )

    def local(self, tensor: Tensor) -> Tensor:
        """A tensor of the share's shape as the local tensor of its piece."""
        return tensor if self.shape == self.whole else tensor.reshape(-1)

    @property
    def legs(self) -> Iterator[Leg]:
        """Those of all pieces that have some of it; as many as ranks, on a large mesh."""
        for piece, ranks in self.cut.holders.items():
            if (leg := self._leg(piece, ranks)) is not None:
                yield leg

    def leg_of(self, rank: int) -> Leg | None:
        """The leg of a rank's own piece; None where that has nothing of the share."""
        piece = self.cut[rank]
        return self._leg(piece, self.cut.holders[piece]) if piece.numel else None

    def _leg(self, piece: Piece, ranks: tuple[int, ...]) -> Leg | None:
        if self.numel == prod(self.whole):
            return Leg(ranks, self._sender(ranks), piece.boxes, piece.numel)
        common = tuple(piece.shared(self._boxes))
        return Leg(ranks, self._sender(ranks), common, sum(box.numel for box in common)) if common else None

    @cached_property
    def _boxes(self) -> tuple[Box, ...]:
        return tuple(boxes_of_interval(self.whole, self.start, self.stop))

    def _sender(self, ranks: tuple[int, ...]) -> int:
        return ranks[0] if self.route == "gram" else nearest(ranks, self.owner or 0)

    def moves(self, rank: int) -> Moves:
        """The transfers of a rank."""
        if rank not in self._moves:
            leg = self.leg_of(rank)
            boxes = () if leg is None else leg.boxes
            self._moves[rank] = Moves(
                tuple(map(self.cut[rank].window, boxes)),
                tuple(map(self.piece.window, boxes)),
                0 if leg is None else leg.numel,
                leg is not None and leg.sender == rank,
                tuple((leg, tuple(map(self.piece.window, leg.boxes))) for leg in self.legs)
                if rank == self.owner
                else (),
            )
        return self._moves[rank]

    @cached_property
    def _at_owner(self) -> Leg | None:
        return None if self.owner is None else self.leg_of(self.owner)

    @cached_property
    def comes(self) -> bool:
        """Whether anything must be sent to the owner."""
        return self.owner is not None and (0 if self._at_owner is None else self._at_owner.numel) < self.numel

    @cached_property
    def goes(self) -> bool:
        """Whether anything must be sent back."""
        return self.comes or (self._at_owner is not None and len(self._at_owner.ranks) > 1)

    @property
    def reason(self) -> str:
        """Why it goes its route."""
        if self.because or self.route == "local":
            return self.because or "it is whole on its owner alone"
        held = 0 if self._at_owner is None else self._at_owner.numel
        pieces = len(self.cut.holders) if self.numel == prod(self.whole) else sum(1 for _ in self.legs)
        return f"it lies in {pieces} pieces; its owner holds {held / max(self.numel, 1):.0%} of it"
