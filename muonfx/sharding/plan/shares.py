"""Shares and legs: what an owner computes, and what of it lies where."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from muonfx.boxes import Box
from muonfx.sharding.pieces import Piece

__all__ = ["Leg", "Share"]


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
    """In which the owner computes: the parameter's own, or (how many, rows, columns) of a stack."""
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
        return tensor if self.shape == self.whole else tensor.reshape(-1)

    @cached_property
    def comes(self) -> bool:
        """Whether anything must be sent to the owner."""
        return self.owner is not None and any(leg.sender != self.owner for leg in self.legs)

    @cached_property
    def goes(self) -> bool:
        """Whether anything must be sent back."""
        return self.owner is not None and any(leg.ranks != (self.owner,) for leg in self.legs)
