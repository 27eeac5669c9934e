"""Cuts: which piece of one tensor each rank holds, for all ranks, without a list of all of them.

A rank needs its own piece of every parameter, and all ranks' pieces only of the few matrices that it owns. So a cut
makes a piece when it is asked for: by coordinates on a mesh, by places in a buffer. Parameters of one shape that are
cut alike share one cut, and what follows from it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from muonfx.sharding.shards import Piece, Span
from muonfx.tree import Spec

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

__all__ = ["Buffer", "Cut", "Intervals", "Listed", "OnMesh", "OneOwner", "Places", "Replicas"]


class Buffer(NamedTuple):
    """The places of parameters in the flat buffers of an engine; in elements."""

    starts: dict[str, int]
    """The beginning of each parameter: in the one buffer that is cut, or in that of the rank that has it."""
    lengths: tuple[int, ...]
    """Of each rank's part, with its padding."""


class Cut:
    """The pieces of one tensor, by rank."""

    def __init__(self, shape: Sequence[int], size: int) -> None:
        self.shape = tuple(shape)
        self.size = size
        self.derived: dict[object, Any] = {}
        """Values that follow from the cut, computed once."""
        self._asked: dict[int, Piece] = {}
        """The pieces that somebody asked for: a rank's own, at every step."""

    def _at(self, rank: int) -> Piece:
        """The piece of a rank that there is."""
        raise NotImplementedError

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Numbers and words that say all of it: the same on all ranks, and equal for equal cuts."""
        raise NotImplementedError

    @cached_property
    def digest(self) -> str:
        """A hash of `key`."""
        return hashlib.sha256(repr(self.key).encode()).hexdigest()

    def _ranks(self) -> Iterator[int]:
        """Those that may hold elements, rising."""
        return iter(range(self.size))

    @cached_property
    def holders(self) -> Mapping[Piece, tuple[int, ...]]:
        """The different pieces that have elements, by their first ranks, and the ranks that hold each."""
        found: dict[Piece, list[int]] = {}
        for rank in self._ranks():
            piece = self._at(rank)
            if piece.numel:
                found.setdefault(piece, []).append(rank)
        return {piece: tuple(ranks) for piece, ranks in found.items()}

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same piece, for each piece that several ranks hold.

        >>> Replicas((2,), 3).copies, Intervals((4,), 0, (0, 2, 4)).copies
        (((0, 1, 2),), ())
        """
        return tuple(ranks for ranks in self.holders.values() if len(ranks) > 1)

    @cached_property
    def firsts(self) -> frozenset[int]:
        """The first of the ranks that hold each piece: those that count it in sums over all ranks."""
        return frozenset(ranks[0] for ranks in self.holders.values())

    @cached_property
    def complete(self) -> tuple[int, ...]:
        """The ranks that hold every element, of which there is one at least; rising."""
        numel = prod(self.shape)
        return tuple(sorted(rank for piece, ranks in self.holders.items() if piece.numel == numel for rank in ranks))

    @cached_property
    def taking_part(self) -> tuple[int, ...]:
        """The ranks that hold some element; rising."""
        return tuple(sorted(rank for ranks in self.holders.values() for rank in ranks))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, rank: int) -> Piece:
        found = self._asked.get(rank)
        if found is None:
            found = self._asked[rank] = self._at(range(self.size)[rank])
        return found

    def __iter__(self) -> Iterator[Piece]:
        return map(self._at, range(self.size))

    def __eq__(self, other: object) -> bool:
        """Two cuts are equal when all ranks hold the same pieces."""
        if not isinstance(other, Cut):
            return NotImplemented
        if self is other or (type(self) is type(other) and self.key == other.key):
            return True
        return self.shape == other.shape and self.size == other.size and all(map(Piece.__eq__, self, other))

    def __hash__(self) -> int:
        return hash((self.shape, self.size))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.shape} over {self.size} ranks>"


class Replicas(Cut):
    """Every rank holds all.

    >>> Replicas((2, 3), 4).holders
    {Piece(shape=(2, 3), boxes=(Box(offsets=(0, 0), sizes=(2, 3)),), start=None, spans=(((0, 2),), ((0, 3),))): \
(0, 1, 2, 3)}
    """

    @cached_property
    def _whole(self) -> Piece:
        return Piece.whole(self.shape)

    def _at(self, rank: int) -> Piece:
        return self._whole

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The shape, and how many ranks there are."""
        return "replicas", self.shape, self.size

    @cached_property
    def holders(self) -> Mapping[Piece, tuple[int, ...]]:
        """The whole, at all ranks."""
        return {self._whole: tuple(range(self.size))} if self._whole.numel else {}


class OneOwner(Cut):
    """One rank holds all, the others nothing.

    >>> [piece.shape for piece in OneOwner((2, 3), 3, 1)]
    [(0,), (2, 3), (0,)]
    """

    def __init__(self, shape: Sequence[int], size: int, owner: int) -> None:
        super().__init__(shape, size)
        self.owner = owner

    def _at(self, rank: int) -> Piece:
        return Piece.whole(self.shape) if rank == self.owner else Piece.interval(self.shape, 0, 0)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The shape, how many ranks there are, and which has it."""
        return "one owner", self.shape, self.size, self.owner

    def _ranks(self) -> Iterator[int]:
        yield self.owner


class Intervals(Cut):
    """Each rank holds an interval of the flattened tensor, which lies in a buffer that is cut.

    Args:
        shape: of the tensor.
        start: where it begins in the buffer.
        cuts: P + 1 places in the buffer, not falling: rank r has ``cuts[r]:cuts[r + 1]``. Shared by all parameters.

    >>> [piece.numel for piece in Intervals((2, 3), 4, (0, 5, 5, 12))]
    [1, 0, 5]
    """

    def __init__(self, shape: Sequence[int], start: int, cuts: Sequence[int]) -> None:
        super().__init__(shape, len(cuts) - 1)
        self.start = start
        self.cuts = cuts

    def _at(self, rank: int) -> Piece:
        numel = prod(self.shape)
        low, high = (min(max(place - self.start, 0), numel) for place in (self.cuts[rank], self.cuts[rank + 1]))
        return Piece.interval(self.shape, low, high)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The shape, and where it is cut."""
        first, last = self._between
        inner = tuple(self.cuts[first + 1 : last])
        return "intervals", self.shape, self.size, first, last, tuple(place - self.start for place in inner)

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """None."""
        return ()

    @cached_property
    def _between(self) -> tuple[int, int]:
        """The first rank that may hold elements, and the first behind the last."""
        end = self.start + prod(self.shape)
        return max(bisect_right(self.cuts, self.start) - 1, 0), min(bisect_left(self.cuts, end), self.size)

    def _ranks(self) -> Iterator[int]:
        yield from range(*self._between)


class Places:
    """The coordinates of a group's ranks on a mesh; one for all parameters on it.

    Args:
        shape: of the mesh.
        coordinates: of each rank; None for one that is not on the mesh.
    """

    def __init__(self, shape: Sequence[int], coordinates: Sequence[tuple[int, ...] | None]) -> None:
        self.shape = tuple(shape)
        self.coordinates = tuple(coordinates)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The shape, and a digest of the coordinates."""
        return self.shape, hashlib.sha256(repr(self.coordinates).encode()).hexdigest()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Those on the mesh."""
        return tuple(rank for rank, at in enumerate(self.coordinates) if at is not None)

    @cached_property
    def are_different(self) -> bool:
        """True if no two ranks have the same coordinates, as they may on meshes of their own."""
        return len({self.coordinates[rank] for rank in self.ranks}) == len(self.ranks)


class OnMesh(Cut):
    """Each rank holds what its coordinates on a mesh say, as DTensor cuts a tensor.

    The indices along a dim of the tensor depend on the coordinates along those dims of the mesh that cut it, so they
    are found once for these: P of them for P ranks in a line, 512 + 8 on a grid of 512 x 8 whose dims cut different
    ones.

    Args:
        shape: of the tensor.
        places: of the ranks.
        placements: for each dim of the mesh a `Shard` or `Replicate` of torch.
    """

    def __init__(self, shape: Sequence[int], places: Places, placements: Sequence[Any]) -> None:
        super().__init__(shape, len(places.coordinates))
        self.places = places
        self.placements = tuple(placements)
        self._cutting: list[list[int]] = [[] for _ in self.shape]
        for along, (placement, parts) in enumerate(zip(self.placements, places.shape, strict=True)):
            if parts > 1 and not placement.is_replicate():
                self._cutting[placement.dim].append(along)
        self._shards: dict[tuple[int, ...], list[tuple[Span, ...]]] = {}
        self._pieces: dict[tuple[int, ...], Piece] = {}

    def _at(self, rank: int) -> Piece:
        at = self.places.coordinates[rank]
        if at is None:
            return Piece.interval(self.shape, 0, 0)
        deciding = tuple(at[along] for cutting in self._cutting for along in cutting)
        if deciding not in self._pieces:
            self._pieces[deciding] = Piece.grid(
                [self._along(dim, tuple(at[along] for along in cutting)) for dim, cutting in enumerate(self._cutting)]
            )
        return self._pieces[deciding]

    def _ranks(self) -> Iterator[int]:
        return iter(self.places.ranks)

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks with equal pieces; none, and no piece is made, if every dim of the mesh cuts."""
        cutting = {along for dims in self._cutting for along in dims}
        every = all(parts == 1 or along in cutting for along, parts in enumerate(self.places.shape))
        return () if every and self.places.are_different else super().copies

    def _along(self, dim: int, at: tuple[int, ...]) -> tuple[Span, ...]:
        """The indices along a dim that are left after the first so many mesh dims that cut it."""
        if not at:
            return ((0, self.shape[dim]),)
        before = (dim, *at[:-1])
        if before not in self._shards:
            along = self._cutting[dim][len(at) - 1]
            indices = torch.cat([torch.arange(*span) for span in (self._along(dim, at[:-1]) or [(0, 0)])])
            shards = _split(self.placements[along], indices, self.places.shape[along])
            self._shards[before] = [_spans(shard) for shard in shards]
        shards = self._shards[before]
        return shards[at[-1]] if at[-1] < len(shards) else ()

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The shape, the mesh, and the placements that cut it."""
        ways = tuple(
            (along, repr(self.placements[along])) for along in sorted(a for cutting in self._cutting for a in cutting)
        )
        return "on a mesh", self.shape, self.places.key, ways


class Listed(Cut):
    """Pieces that follow no rule, one for each rank."""

    def __init__(self, shape: Sequence[int], pieces: Sequence[Piece]) -> None:
        super().__init__(shape, len(pieces))
        self._pieces = tuple(pieces)

    def _at(self, rank: int) -> Piece:
        return self._pieces[rank]

    @cached_property
    def key(self) -> tuple[object, ...]:
        """All of them."""
        return "listed", self._pieces


def _split(placement: Placement, indices: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Cut the indices of a dim as the same placement cuts the first dim of a tensor."""
    kind: Any = type(placement)
    factor = getattr(placement, "split_factor", None)
    first = kind(0) if factor is None else kind(0, split_factor=factor)
    return list(first._split_tensor(indices, parts, with_padding=False, contiguous=True)[0])


def _spans(indices: torch.Tensor) -> tuple[Span, ...]:
    """Runs of neighbouring indices."""
    if not len(indices):
        return ()
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):  # they rise
        return ((first, last + 1),)
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    begins, ends = [0, *breaks], [*breaks, len(indices)]
    return tuple((int(indices[begin]), int(indices[end - 1]) + 1) for begin, end in zip(begins, ends, strict=True))


def equal_intervals(specs: Mapping[str, Spec], size: int, alignment: int = 1) -> tuple[dict[str, Cut], Buffer]:
    """Cut parameters, one behind another, equally: one buffer for each dtype, since an engine casts them apart.

    >>> equal_intervals({"w": Spec((2, 3), torch.float32), "b": Spec((3,), torch.float32)}, 2, 4)[1].lengths
    (8, 8)
    """
    pieces: dict[str, Cut] = {}
    starts: dict[str, int] = {}
    lengths = [0] * size
    for dtype in dict.fromkeys(spec.dtype for spec in specs.values()):
        names = [name for name, spec in specs.items() if spec.dtype == dtype]
        begin = one_behind_another(specs, names)
        step = padded(-(-sum(prod(specs[name].shape) for name in names) // size), alignment)
        cuts = tuple(rank * step for rank in range(size + 1))
        for name in names:
            pieces[name] = Intervals(specs[name].shape, begin[name], cuts)
            starts[name] = begin[name]
        lengths = [length + step for length in lengths]
    return {name: pieces[name] for name in specs}, Buffer(starts, tuple(lengths))


def equal_parts(specs: Mapping[str, Spec], size: int, alignment: int = 1) -> tuple[dict[str, Cut], Buffer]:
    """Cut each parameter by itself into equal parts, the last of them padded; a rank's parts lie one behind another.

    >>> equal_parts({"w": Spec((2, 3), torch.float32), "b": Spec((3,), torch.float32)}, 2, 2)[1]
    Buffer(starts={'w': 0, 'b': 4}, lengths=(6, 6))
    """
    of_shape: dict[tuple[int, ...], Cut] = {}
    starts: dict[str, int] = {}
    length = 0
    for name, spec in specs.items():
        part = padded(-(-prod(spec.shape) // size), alignment)
        if spec.shape not in of_shape:
            of_shape[spec.shape] = Intervals(spec.shape, 0, tuple(part * rank for rank in range(size + 1)))
        starts[name] = length
        length += part
    return {name: of_shape[spec.shape] for name, spec in specs.items()}, Buffer(starts, (length,) * size)


def padded(length: int, alignment: int) -> int:
    """A length rounded up to a multiple.

    >>> padded(5, 4)
    8
    """
    return -(-length // alignment) * alignment


def one_behind_another(specs: Mapping[str, Spec], order: Sequence[str]) -> dict[str, int]:
    """The place at which each parameter begins in a buffer without gaps."""
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        starts[name] = end
        end += prod(specs[name].shape)
    return starts
