"""`Cut`: the partition of one parameter over all ranks, which says for each rank which shard it holds.

A rank needs the position of its own shard of every parameter. It needs the positions of the other ranks' shards only
for the few matrices that it computes. A cut therefore computes a shard on request, from coordinates on a mesh or from
offsets in a buffer, and stores no list of all shards. Parameters with the same shape and partition share one cut and
its cached values.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from muonfx.sharding.digests import digest
from muonfx.sharding.shards.position import ShardPosition, Span
from muonfx.sharding.shards.remembered import remembered
from muonfx.tree import Spec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


class Cut:
    """The partition of one tensor over all ranks. ``cut[rank]`` is a `ShardPosition`: which elements the rank holds."""

    def __init__(self, shape: Sequence[int], size: int) -> None:
        self.shape = tuple(shape)
        self.size = size

    def _at(self, rank: int) -> ShardPosition:
        """Return which elements of the tensor a rank holds. Subclasses implement this; ``cut[rank]`` remembers it."""
        raise NotImplementedError

    def _key(self) -> tuple[object, ...]:
        """Return a tuple that describes how the tensor is split over all ranks."""
        raise NotImplementedError

    @cached_property
    def digest(self) -> str:
        """A short hash of the partition. Ranks compare it to check that they split the tensor in the same way."""
        return digest(self._key())

    def _ranks(self) -> Iterable[int]:
        """Return, in ascending order, all ranks that may hold elements of the tensor. Other ranks are never visited."""
        return range(self.size)

    @cached_property
    def holders(self) -> Mapping[ShardPosition, tuple[int, ...]]:
        """A dict from the position of each distinct nonempty shard to the ranks that hold it, in ascending order.

        If ranks 0 and 2 hold the upper half of a matrix, and ranks 1 and 3 the lower half, it has two entries: the
        position of the upper half with ``(0, 2)``, and the position of the lower half with ``(1, 3)``.
        """
        ranks_at: dict[ShardPosition, list[int]] = {}
        for rank in self._ranks():
            position = self._at(rank)
            if position.numel:
                ranks_at.setdefault(position, []).append(rank)
        return dict(zip(ranks_at, map(tuple, ranks_at.values()), strict=True))

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """A tuple with one tuple of ranks for each replicated shard: the ranks that hold it, in ascending order."""
        return tuple([ranks for ranks in self.holders.values() if len(ranks) > 1])

    @cached_property
    def firsts(self) -> frozenset[int]:
        """For each shard, the lowest rank that holds it. In sums over ranks, only this rank counts the shard."""
        return frozenset(map(min, self.holders.values()))

    @cached_property
    def complete(self) -> tuple[int, ...]:
        """The ranks that hold the whole tensor, in ascending order. Empty for a tensor without elements."""
        ranks: list[int] = []
        for position, holders in self.holders.items():
            if position.numel == prod(self.shape):
                ranks += holders
        return tuple(sorted(ranks))

    @cached_property
    def taking_part(self) -> tuple[int, ...]:
        """The ranks that hold at least one element of the tensor, in ascending order."""
        return tuple(sorted(itertools.chain.from_iterable(self.holders.values())))

    @remembered
    def __getitem__(self, rank: int) -> ShardPosition:
        return self._at(range(self.size)[rank])  # a negative rank counts from the last

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.shape} over {self.size} ranks>"


class Whole(Cut):
    """The partition of a tensor that is not split. All ranks hold it whole, or only the rank `owner` if given."""

    def __init__(self, shape: Sequence[int], size: int, owner: int | None = None) -> None:
        super().__init__(shape, size)
        self._owners = range(size) if owner is None else range(owner, owner + 1)
        self._whole = ShardPosition.whole(shape)

    def _at(self, rank: int) -> ShardPosition:
        if rank in self._owners:
            return self._whole
        return ShardPosition.interval(self.shape, 0, 0)

    def _key(self) -> tuple[object, ...]:
        return "whole", self.shape, self.size, self._owners

    def _ranks(self) -> Iterable[int]:
        return self._owners


class Intervals(Cut):
    """The partition of a tensor within a flat buffer, as in ZeRO, when each rank holds one interval of the buffer.

    The flattened tensor begins at `start` in the buffer. Rank r holds the elements ``borders[r]:borders[r + 1]`` of the
    buffer, of which some may be in this tensor.
    """

    def __init__(self, shape: Sequence[int], start: int, borders: Sequence[int]) -> None:
        super().__init__(shape, len(borders) - 1)
        self.start = start
        self.borders = borders

    def _at(self, rank: int) -> ShardPosition:
        start = self._index(self.borders[rank])
        stop = self._index(self.borders[rank + 1])
        return ShardPosition.interval(self.shape, start, stop)

    def _index(self, position: int) -> int:
        """Convert a position in the buffer to an index in the flattened tensor, or to the nearer end of the tensor."""
        return min(max(position - self.start, 0), prod(self.shape))

    def _key(self) -> tuple[object, ...]:
        first, stop = self._first_and_stop
        # The borders inside the tensor, counted from its first element. So two parameters that are split in the same
        # way have equal keys, wherever they are in their buffers.
        borders_inside = self.borders[first + 1 : stop]
        ends = tuple([border - self.start for border in borders_inside])
        return "intervals", self.shape, self.size, first, stop, ends

    @cached_property
    def _first_and_stop(self) -> tuple[int, int]:
        """The first rank that holds elements of the tensor, and the rank after the last.

        With the borders ``(0, 4, 9, 10)``, a tensor of 4 elements that begins at 4 is on rank 1 alone: ``(1, 2)``.
        """
        end = self.start + prod(self.shape)
        # The last interval that begins at the first element or before. Others with the same start are empty.
        first = bisect_right(self.borders, self.start) - 1
        # The first interval that begins at the end of the tensor or after it.
        stop = bisect_left(self.borders, end)
        # A tensor that extends beyond the borders has no such intervals: only ranks that exist are returned.
        return max(first, 0), min(stop, self.size)

    def _ranks(self) -> Iterable[int]:
        return range(*self._first_and_stop)


class Listed(Cut):
    """The partition of a tensor for which the `ShardPosition` of each rank is passed, as a list."""

    def __init__(self, shape: Sequence[int], positions: Sequence[ShardPosition]) -> None:
        super().__init__(shape, len(positions))
        self._positions = tuple(positions)

    def _at(self, rank: int) -> ShardPosition:
        return self._positions[rank]

    def _key(self) -> tuple[object, ...]:
        return "listed", self.shape, self._positions


@dataclass(frozen=True, eq=False)
class MeshCoordinates:
    """The coordinates of each rank of a process group on a device mesh."""

    shape: tuple[int, ...]
    """The shape of the mesh."""
    coordinates: Sequence[tuple[int, ...] | None]
    """The coordinates of each rank; None for a rank that is not on the mesh."""

    @classmethod
    def of(cls, mesh: DeviceMesh, ranks: Sequence[int]) -> MeshCoordinates:
        """Return the coordinates of some global ranks on a mesh, in the order of `ranks`.

        On a mesh of ranks 0 and 2, ranks 0 to 2 have the coordinates ``[(0,), None, (1,)]``.
        """
        shape = tuple(mesh.shape)
        ranks_on_mesh = mesh.mesh.flatten().tolist()
        # The coordinates have the order of these ranks, since the last dim varies fastest in both.
        coordinates = itertools.product(*map(range, shape))
        coordinates_of = dict(zip(ranks_on_mesh, coordinates, strict=True))
        coordinates_of_ranks = [coordinates_of.get(rank) for rank in ranks]
        return cls(shape, coordinates_of_ranks)

    @cached_property
    def digest(self) -> str:
        """A hash of the coordinates of all ranks."""
        return digest(list(self.coordinates))  # equal for a list and a tuple

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks of the process group that are on the mesh, in ascending order."""
        return [
            rank for rank, coordinates in enumerate(self.coordinates) if coordinates is not None
        ]


class OnMesh(Cut):
    """The partition of a DTensor. A rank's coordinates on the device mesh decide which shard it holds."""

    def __init__(
        self, shape: Sequence[int], mesh: MeshCoordinates, placements: Sequence[Any]
    ) -> None:
        """Find the mesh dims that split each dim of the tensor. ``placements`` has one `Placement` for each mesh dim.

        With ``[Shard(0), Replicate(), Shard(0)]``, mesh dims 0 and 2 split dim 0, and `_mesh_dims_of` is
        ``[[0, 2], []]`` for a matrix.
        """
        super().__init__(shape, len(mesh.coordinates))
        self.mesh = mesh
        self.placements = tuple(placements)
        self._mesh_dims_of: list[list[int]] = [[] for _ in self.shape]
        """For each dim of the tensor, the mesh dims that split it."""
        for mesh_dim, (placement, size) in enumerate(zip(self.placements, mesh.shape, strict=True)):
            if size > 1 and not placement.is_replicate():
                self._mesh_dims_of[placement.dim].append(mesh_dim)

    def _at(self, rank: int) -> ShardPosition:
        """Return the position of the shard that a rank holds."""
        coordinates = self.mesh.coordinates[rank]  # such as (3, 1)
        if coordinates is None:  # the rank is not on the mesh and holds nothing
            return ShardPosition.interval(self.shape, 0, 0)
        # For each dim of the tensor, the coordinates along the mesh dims that split it. If the mesh has the dims (data,
        # model), and "model" splits the rows of a matrix, the rank at (3, 1) has [(1,), ()]: all ranks with 1 have
        # the same shard.
        coordinates_of_dims: list[tuple[int, ...]] = []
        for mesh_dims in self._mesh_dims_of:
            along_mesh_dims = [coordinates[mesh_dim] for mesh_dim in mesh_dims]
            coordinates_of_dims.append(tuple(along_mesh_dims))
        return self._position_at(tuple(coordinates_of_dims))

    @remembered
    def _position_at(self, coordinates_of_dims: Sequence[tuple[int, ...]]) -> ShardPosition:
        """Return the shard of the ranks with these coordinates, along the mesh dims that split the tensor.

        `coordinates_of_dims` has, for each dim of the tensor, the coordinates along the mesh dims that split this dim.
        If a mesh dim of two ranks splits the rows of a matrix of shape (8, 4), and none splits the columns, the second
        rank has the coordinates ``((1,), ())``. Its shard has rows 4 to 7 and all columns: ``((4, 8),)`` and
        ``((0, 4),)``.
        """
        # For each dim of the tensor, ranges of indices (start, end)
        spans_of_dims: list[tuple[Span, ...]] = []
        for parts, coordinates in zip(self._parts_of_dims, coordinates_of_dims, strict=True):
            spans_of_dims.append(parts.get(coordinates, ()))  # there may be fewer parts than ranks
        return ShardPosition.grid(spans_of_dims)

    def _ranks(self) -> Iterable[int]:
        return self.mesh.ranks

    @cached_property
    def _parts_of_dims(self) -> list[dict[tuple[int, ...], tuple[Span, ...]]]:
        """For each dim of the tensor, the parts into which the mesh splits it, as `_parts_of_dim` returns them."""
        parts_of_dims: list[dict[tuple[int, ...], tuple[Span, ...]]] = []
        for size, mesh_dims in zip(self.shape, self._mesh_dims_of, strict=True):
            placements = [self.placements[mesh_dim] for mesh_dim in mesh_dims]
            counts = [self.mesh.shape[mesh_dim] for mesh_dim in mesh_dims]
            parts_of_dims.append(_parts_of_dim(size, placements, counts))
        return parts_of_dims

    def _key(self) -> tuple[object, ...]:
        splitting_mesh_dims = sorted(itertools.chain.from_iterable(self._mesh_dims_of))
        placements = tuple(
            [(mesh_dim, repr(self.placements[mesh_dim])) for mesh_dim in splitting_mesh_dims]
        )
        return "on a mesh", self.shape, self.mesh.shape, self.mesh.digest, placements


def _parts_of_dim(
    size: int, placements: Sequence[Placement], counts: Sequence[int]
) -> dict[tuple[int, ...], tuple[Span, ...]]:
    """Return the index ranges (start, end) of each part into which some mesh dims split a tensor dim of this size.

    `placements` and `counts` have the placement and the number of ranks of each of these mesh dims. The key of a part
    is a tuple of the coordinates along them. Two mesh dims of two ranks split 8 rows into halves, and these into
    quarters:

    >>> from torch.distributed.tensor import Shard
    >>> _parts_of_dim(8, [Shard(0), Shard(0)], [2, 2])
    {(0, 0): ((0, 2),), (0, 1): ((2, 4),), (1, 0): ((4, 6),), (1, 1): ((6, 8),)}
    """
    if not placements:  # no mesh dim splits this dim
        return {(): ((0, size),)}
    # A placement such as `_StridedShard` may put indices with gaps in one part, so it splits all single indices.
    parts: dict[tuple[int, ...], torch.Tensor] = {(): torch.arange(size)}
    for placement, count in zip(placements, counts, strict=True):
        inner_parts: dict[tuple[int, ...], torch.Tensor] = {}
        for coordinates, indices in parts.items():
            for coordinate, part in enumerate(_split(placement, indices, count)):
                inner_parts[(*coordinates, coordinate)] = part
        parts = inner_parts
    return {coordinates: _spans(indices) for coordinates, indices in parts.items()}


def _split(placement: Placement, indices: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Split the indices of one tensor dim among `count` ranks, exactly as the DTensor placement does.

    There may be fewer parts than ranks. Five columns on two ranks:

    >>> from torch.distributed.tensor import Shard
    >>> _split(Shard(1), torch.arange(5), 2)
    [tensor([0, 1, 2]), tensor([3, 4])]
    """
    split_factor = getattr(placement, "split_factor", None)
    if split_factor is None:  # a `Shard`
        return list(indices.chunk(count))
    # A `_StridedShard`, of which a part may have indices with gaps. It can split the indices itself, if it is built
    # again for dim 0, because they have one dim.
    strided: Any = type(placement)
    along_first_dim = strided(0, split_factor=split_factor)
    parts, _ = along_first_dim._split_tensor(indices, count, with_padding=False, contiguous=True)
    return list(parts)


def _spans(indices: torch.Tensor) -> tuple[Span, ...]:
    """Group ascending indices into ranges (start, exclusive end). For example, 0, 1, 4 become (0, 2) and (4, 5)."""
    if not len(indices):
        return ()
    # The positions in the list after which an index is left out: for 0, 1, 4 this is position 1.
    before_gap = torch.nonzero(indices.diff() != 1).flatten()
    # A range starts at the first index and after each gap. It ends before each gap and at the last index.
    starts = torch.cat([indices[:1], indices[before_gap + 1]])
    last_indices = torch.cat([indices[before_gap], indices[-1:]])
    ends = last_indices + 1  # exclusive
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def cuts_of_dtensors(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    coordinates_on: Mapping[DeviceMesh, MeshCoordinates],
    size: int,
) -> dict[str, Cut]:
    """Return a dict from parameter name to its partition over ranks. Plain tensors are whole on every rank.

    Args:
        specs: the shapes and dtypes of all parameters.
        dtensors: the mesh and the placements, such as ``(Shard(0),)``, of each parameter that is a DTensor.
        coordinates_on: for each mesh, the coordinates of all ranks on it.
        size: the number of ranks.

    Raises:
        TypeError: a placement is neither Shard nor Replicate.
    """
    # Parameters with the same shape and placements share one partition, with its remembered values.
    whole = functools.cache(Whole)
    on_mesh = functools.cache(OnMesh)
    cuts: dict[str, Cut] = {}
    for name, spec in specs.items():
        dtensor = dtensors.get(name)
        if dtensor is None:  # a plain tensor, which every rank has
            cuts[name] = whole(spec.shape, size)
        else:
            _require_shard_or_replicate(name, dtensor.placements)
            cuts[name] = on_mesh(spec.shape, coordinates_on[dtensor.mesh], dtensor.placements)
    return cuts


def _require_shard_or_replicate(name: str, placements: Sequence[Placement]) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    for placement in placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            raise TypeError(f"{name!r} has the placement {placement}, expected Shard or Replicate")


def equal_intervals(specs: Mapping[str, Spec], size: int) -> dict[str, Cut]:
    """Return a dict of partitions by parameter name: all parameters of a dtype form one buffer, split equally.

    For "v" with 4 elements and "w" with 8 on two ranks, the buffer has 12 elements: rank 0 holds "v" and the first 2
    elements of "w".
    """
    # 1. One buffer for each dtype.
    names_of: dict[torch.dtype, list[str]] = {}
    for name, spec in specs.items():
        names_of.setdefault(spec.dtype, []).append(name)
    # 2. In each buffer, where its parameters begin, and the borders between the ranks.
    cut_of: dict[str, Cut] = {}
    for names in names_of.values():
        starts = one_behind_another(specs, names)
        numel_of_buffer = 0
        for name in names:
            numel_of_buffer += prod(specs[name].shape)
        borders = _equal_borders(numel_of_buffer, size)
        for name in names:
            cut_of[name] = Intervals(specs[name].shape, starts[name], borders)
    return {name: cut_of[name] for name in specs}  # in the order of the parameters


def equal_parts(specs: Mapping[str, Spec], size: int) -> dict[str, Cut]:
    """Return a dict of partitions by name: each parameter is flattened and split equally, with a shorter last shard."""

    @functools.cache  # parameters of one shape share a partition, with its remembered values
    def intervals(shape: tuple[int, ...]) -> Cut:
        borders = _equal_borders(prod(shape), size)
        return Intervals(shape, 0, borders)

    return {name: intervals(spec.shape) for name, spec in specs.items()}


def _equal_borders(numel: int, size: int) -> tuple[int, ...]:
    """Return the borders of `size` equal intervals of a buffer. The last may extend beyond its `numel` elements.

    >>> _equal_borders(10, 4)
    (0, 3, 6, 9, 12)
    """
    length = -(-numel // size)  # rounded up
    if not length:
        return (0,) * (size + 1)
    return tuple(range(0, length * size + 1, length))


def one_behind_another(specs: Mapping[str, Spec], order: Sequence[str]) -> dict[str, int]:
    """Return a dict from parameter name to its first index in a flat buffer that has this order and no gaps."""
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        starts[name] = end
        end += prod(specs[name].shape)
    return starts
