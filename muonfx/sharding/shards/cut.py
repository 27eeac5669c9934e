"""`Cut`: how one parameter is partitioned over all ranks.

A rank needs the position of its own shard of every parameter. It needs the positions of the other ranks' shards only
for the few matrices that it computes. A cut therefore computes a shard on request, from coordinates on a mesh or from
offsets in a buffer, and stores no list of all shards. Parameters with the same shape and partition shard one cut and
its cached values.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from muonfx.sharding.digests import digest
from muonfx.sharding.shards.once import Once
from muonfx.sharding.shards.position import ShardPosition, Span
from muonfx.tree import Spec

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class Cut:
    """How one tensor is split over all ranks. ``cut[rank]`` is a `ShardPosition`: which elements the rank holds."""

    def __init__(self, shape: Sequence[int], size: int) -> None:
        self.shape = tuple(shape)
        self.size = size
        self.once = Once()
        """A cache of values that are computed from this partition alone."""

    def _at(self, rank: int) -> ShardPosition:
        """Return which elements of the tensor a rank holds. Subclasses implement this; ``cut[rank]`` caches it."""
        raise NotImplementedError

    @cached_property
    def key(self) -> tuple[object, ...]:
        """A tuple that describes how the tensor is split over all ranks. Two partitions are equal if their keys are."""
        raise NotImplementedError

    @cached_property
    def digest(self) -> str:
        """A short hash of `key`. Ranks compare it to check that they split the tensor in the same way."""
        return digest(self.key)

    def _ranks(self) -> Iterator[int]:
        """Yield, in ascending order, all ranks that may hold elements of the tensor. Other ranks are never visited."""
        return iter(range(self.size))

    @cached_property
    def holders(self) -> Mapping[ShardPosition, tuple[int, ...]]:
        """A dict from each distinct nonempty shard, as a `ShardPosition` (its position), to the ranks that hold it."""
        found: dict[ShardPosition, list[int]] = {}
        for rank in self._ranks():
            position = self._at(rank)
            if position.numel:
                found.setdefault(position, []).append(rank)
        return {position: tuple(ranks) for position, ranks in found.items()}

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """A tuple with one tuple of ranks for each replicated shard: the ranks that hold it, in ascending order."""
        return tuple(ranks for ranks in self.holders.values() if len(ranks) > 1)

    @cached_property
    def firsts(self) -> frozenset[int]:
        """For each shard, the lowest rank that holds it. In sums over ranks, only this rank counts the shard."""
        return frozenset(ranks[0] for ranks in self.holders.values())

    @cached_property
    def complete(self) -> tuple[int, ...]:
        """The ranks that hold the whole tensor, in ascending order. Empty for a tensor without elements."""
        numel = prod(self.shape)
        return tuple(
            sorted(rank for position, ranks in self.holders.items() if position.numel == numel for rank in ranks)
        )

    @cached_property
    def taking_part(self) -> tuple[int, ...]:
        """The ranks that hold at least one element of the tensor, in ascending order."""
        return tuple(sorted(rank for ranks in self.holders.values() for rank in ranks))

    def __getitem__(self, rank: int) -> ShardPosition:
        return self.once(("position", rank), lambda: self._at(range(self.size)[rank]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cut) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.shape} over {self.size} ranks>"


class Whole(Cut):
    """The partition of a tensor that is not split. All ranks hold it whole, or only the rank `owner` if given."""

    def __init__(self, shape: Sequence[int], size: int, owner: int | None = None) -> None:
        super().__init__(shape, size)
        self._owners = range(size) if owner is None else range(owner, owner + 1)
        self._whole = ShardPosition.whole(shape)

    def _at(self, rank: int) -> ShardPosition:
        return self._whole if rank in self._owners else ShardPosition.interval(self.shape, 0, 0)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """A tuple of the shape, the number of ranks, and the ranks that hold the tensor."""
        return "whole", self.shape, self.size, self._owners

    def _ranks(self) -> Iterator[int]:
        return iter(self._owners)


class Intervals(Cut):
    """The partition of a tensor within a flat buffer, as in ZeRO, when each rank holds one interval of the buffer.

    The flattened tensor begins at `start`. Rank r holds the elements ``cuts[r]:cuts[r + 1]`` of the buffer.
    """

    def __init__(self, shape: Sequence[int], start: int, cuts: Sequence[int]) -> None:
        super().__init__(shape, len(cuts) - 1)
        self.start = start
        self.cuts = cuts

    def _at(self, rank: int) -> ShardPosition:
        numel = prod(self.shape)
        low, high = (min(max(place - self.start, 0), numel) for place in (self.cuts[rank], self.cuts[rank + 1]))
        return ShardPosition.interval(self.shape, low, high)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """A tuple of the shape, the number of ranks, the ranks that hold elements, and where their intervals end."""
        first, last = self._between
        inner = tuple(self.cuts[first + 1 : last])
        return "intervals", self.shape, self.size, first, last, tuple(place - self.start for place in inner)

    @cached_property
    def _between(self) -> tuple[int, int]:
        end = self.start + prod(self.shape)
        return max(bisect_right(self.cuts, self.start) - 1, 0), min(bisect_left(self.cuts, end), self.size)

    def _ranks(self) -> Iterator[int]:
        yield from range(*self._between)


class Listed(Cut):
    """The partition of a tensor for which the shard of each rank is given, as a list of `ShardPosition`."""

    def __init__(self, shape: Sequence[int], pieces: Sequence[ShardPosition]) -> None:
        super().__init__(shape, len(pieces))
        self._pieces = tuple(pieces)

    def _at(self, rank: int) -> ShardPosition:
        return self._pieces[rank]

    @cached_property
    def key(self) -> tuple[object, ...]:
        """A tuple of the shape and the shards of all ranks."""
        return "listed", self.shape, self._pieces


class Places:
    """The coordinates of each rank of a process group on a device mesh; None for a rank that is not on the mesh."""

    def __init__(self, shape: Sequence[int], coordinates: Sequence[tuple[int, ...] | None]) -> None:
        self.shape = tuple(shape)
        self.coordinates = tuple(coordinates)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """A tuple that identifies the coordinates: the shape of the mesh, and a hash of them."""
        return self.shape, digest(self.coordinates)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the process group that are on the mesh, in ascending order."""
        return tuple(rank for rank, at in enumerate(self.coordinates) if at is not None)


class OnMesh(Cut):
    """The partition of a DTensor. A rank's coordinates on the device mesh decide which shard it holds."""

    def __init__(self, shape: Sequence[int], places: Places, placements: Sequence[Any]) -> None:
        super().__init__(shape, len(places.coordinates))
        self.places = places
        self.placements = tuple(placements)
        self._cutting: list[list[int]] = [[] for _ in self.shape]
        for along, (placement, parts) in enumerate(zip(self.placements, places.shape, strict=True)):
            if parts > 1 and not placement.is_replicate():
                self._cutting[placement.dim].append(along)
        # Keyed by the mesh dims that split one dim: 512 + 8 entries, not 4096, if a 512 x 8 mesh splits two dims.
        self._shards: dict[tuple[int, ...], list[tuple[Span, ...]]] = {}
        self._pieces: dict[tuple[int, ...], ShardPosition] = {}

    def _at(self, rank: int) -> ShardPosition:
        at = self.places.coordinates[rank]
        if at is None:
            return ShardPosition.interval(self.shape, 0, 0)
        deciding = tuple(at[along] for cutting in self._cutting for along in cutting)
        if deciding not in self._pieces:
            self._pieces[deciding] = ShardPosition.grid(
                [self._along(dim, tuple(at[along] for along in cutting)) for dim, cutting in enumerate(self._cutting)]
            )
        return self._pieces[deciding]

    def _ranks(self) -> Iterator[int]:
        return iter(self.places.ranks)

    def _along(self, dim: int, at: tuple[int, ...]) -> tuple[Span, ...]:
        """Return the index ranges (start, end) along one tensor dim that the rank with mesh coordinates `at` holds."""
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
        """A tuple of the shape, the mesh, and the DTensor placements that split the tensor, such as ``Shard(0)``."""
        ways = tuple(
            (along, repr(self.placements[along])) for along in sorted(a for cutting in self._cutting for a in cutting)
        )
        return "on a mesh", self.shape, self.places.key, ways


def _split(placement: Placement, indices: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Split the indices of one tensor dim among `parts` ranks, exactly as the DTensor placement does."""
    kind: Any = type(placement)
    factor = getattr(placement, "split_factor", None)
    first = kind(0) if factor is None else kind(0, split_factor=factor)
    return list(first._split_tensor(indices, parts, with_padding=False, contiguous=True)[0])


def _spans(indices: torch.Tensor) -> tuple[Span, ...]:
    """Group ascending indices into ranges (start, exclusive end). For example, 0, 1, 4 become (0, 2) and (4, 5)."""
    if not len(indices):
        return ()
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):  # one run, because indices ascend
        return ((first, last + 1),)
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    begins, ends = [0, *breaks], [*breaks, len(indices)]
    return tuple((int(indices[begin]), int(indices[end - 1]) + 1) for begin, end in zip(begins, ends, strict=True))


def equal_intervals(specs: Mapping[str, Spec], size: int) -> dict[str, Cut]:
    """Return a dict of partitions by parameter name: all parameters of a dtype form one buffer, split equally."""
    pieces: dict[str, Cut] = {}
    for dtype in dict.fromkeys(spec.dtype for spec in specs.values()):
        names = [name for name, spec in specs.items() if spec.dtype == dtype]
        starts = one_behind_another(specs, names)
        step = -(-sum(prod(specs[name].shape) for name in names) // size)
        cuts = tuple(rank * step for rank in range(size + 1))
        pieces |= {name: Intervals(specs[name].shape, starts[name], cuts) for name in names}
    return {name: pieces[name] for name in specs}


def equal_parts(specs: Mapping[str, Spec], size: int) -> dict[str, Cut]:
    """Return a dict of partitions by name: each parameter is flattened and split equally, with a shorter last part."""
    of_shape: dict[tuple[int, ...], Cut] = {}
    for shape in dict.fromkeys(spec.shape for spec in specs.values()):
        step = -(-prod(shape) // size)
        of_shape[shape] = Intervals(shape, 0, tuple(step * rank for rank in range(size + 1)))
    return {name: of_shape[spec.shape] for name, spec in specs.items()}


def one_behind_another(specs: Mapping[str, Spec], order: Sequence[str]) -> dict[str, int]:
    """Return a dict from parameter name to its first index in a flat buffer that has this order and no gaps."""
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        starts[name] = end
        end += prod(specs[name].shape)
    return starts
