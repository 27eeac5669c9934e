"""Divide the matrices of each parameter among the ranks that orthogonalize them.

A `MatrixShard` is the shard of a parameter that one rank, its *owner*, computes: some whole matrices. The layout
divides the same parameter into other shards, which the ranks hold. A `Transfer` is the overlap of a matrix shard with
one of these shards, which is sent to the owner and back. `LocalTransfers` say where one rank has the elements that it
sends and receives.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from torch import Tensor

from muonfx.core.transform import stacked
from muonfx.sharding.plan.cost import Run
from muonfx.sharding.shards.boxes import Box, boxes_of_interval, numel_of
from muonfx.sharding.shards.cut import Cut
from muonfx.sharding.shards.position import ShardPosition, ShardView
from muonfx.sharding.shards.remembered import remembered


def nearest(ranks: Sequence[int], owner: int) -> int:
    """Return the rank in `ranks`, an ascending list, that is nearest to the rank `owner`. Prefer the lower in a tie.

    Ranks with near numbers are usually on one machine, where messages are fast.

    >>> nearest([0, 3, 6], 5)
    6
    """
    if len(ranks) == 1:
        return ranks[0]
    index = bisect_left(ranks, owner)  # of the first rank that is not below the owner
    # `neighbours` are the rank below the owner, and the one at or above it.
    neighbours = ranks[max(index - 1, 0) : index + 1]
    return min(neighbours, key=lambda rank: (abs(rank - owner), rank))


class Transfer(NamedTuple):
    """The elements that a shard of the layout has in common with a matrix shard: sent to its owner and back."""

    ranks: tuple[int, ...]
    """The ranks that hold the shard of the layout, ascending."""
    sender: int
    """The rank that sends the overlap to the owner: the owner itself if it holds the shard, else the nearest holder."""
    boxes: tuple[Box, ...]
    """The overlap as boxes (offsets and sizes) of the whole parameter."""
    numel: int


_NO_TRANSFER = Transfer(ranks=(), sender=-1, boxes=(), numel=0)
"""The transfer between a matrix shard and a shard of the layout that have no element in common."""


class OwnerBox(NamedTuple):
    """One box of a transfer, as the owner of the matrix shard sees it."""

    view: ShardView
    """Where the box is in the tensor of the matrix shard."""
    numel: int
    sender: int
    """The rank that sends the box to the owner."""
    holders: tuple[int, ...]
    """The ranks that hold the box, ascending. The owner sends its result to them."""


class LocalTransfers(NamedTuple):
    """The elements that one rank sends and receives in a step for a matrix shard."""

    shard: MatrixShard
    computes: bool
    """True if the rank computes the matrix shard."""
    is_same_shard: bool
    """True if the rank's shard of the parameter has exactly the elements of the matrix shard."""
    local_views: tuple[ShardView, ...]
    """Where the boxes in which the rank's shard overlaps the matrix shard are in the rank's local tensor."""
    matrix_views: tuple[ShardView, ...]
    """Where the same boxes are in the tensor of the matrix shard."""
    numel: int
    """The number of elements in these boxes."""
    sends: bool
    """True if the rank sends these elements to the owner; another rank may hold a replica and send it."""
    owner_boxes: list[OwnerBox]
    """On the owner, the boxes of all transfers of the matrix shard; empty on other ranks."""


@dataclass(frozen=True)
class MatrixShard:
    """Some whole matrices of one parameter, and the rank that computes them (the owner)."""

    name: str
    start: int
    """The index of the first element in the flattened parameter."""
    stop: int
    shape: tuple[int, ...]
    """The shape in which the owner computes: the parameter's own, or (count, rows, columns) for a stack of matrices."""
    cut: Cut = field(repr=False)
    """The partition of the parameter into the shards that the ranks hold, as in the layout."""
    candidates: tuple[int, ...]
    """The ranks of which one is chosen as the owner."""
    complete: bool
    """True if each candidate holds all of these matrices."""
    one_each: bool = False
    """True if a rank may compute at most one of the parameter's shards that have this flag."""
    cost: float = 0.0
    """The estimated cost, in floating-point operations of dense matrix products that take the same time."""
    nbytes: int = 0
    owner: int | None = None
    """The rank that computes the matrices. None: every rank, or none is chosen yet."""

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.cut.shape

    @property
    def is_whole_parameter(self) -> bool:
        """True if these are all matrices of the parameter, and are computed in its own shape."""
        return self.shape == self.whole

    @property
    def numel(self) -> int:
        """The number of elements in these matrices."""
        return self.stop - self.start

    @property
    def is_on_all_ranks(self) -> bool:
        """True if there are several ranks, and each of them holds all of these matrices."""
        return self.complete and len(self.candidates) == self.cut.size > 1

    @cached_property
    def position(self) -> ShardPosition:
        """Which elements of the parameter these matrices have."""
        if self.is_whole_parameter:
            return ShardPosition.whole(self.whole)
        return ShardPosition.interval(self.whole, self.start, self.stop)

    def as_shard(self, matrices: Tensor) -> Tensor:
        """Reshape a tensor of these matrices to the shape of `position`: flat if they are not the whole parameter."""
        if self.is_whole_parameter:
            return matrices
        return matrices.reshape(-1)

    @property
    def transfers(self) -> Iterator[Transfer]:
        """An iterator over the transfers from the shards of the layout that contain elements of these matrices."""
        # Computed on request: a rank needs all transfers of the matrices that it owns, and only its own of the others.
        for held_position, ranks in self.cut.holders.items():
            transfer = self._transfer(held_position, ranks)
            if transfer.numel:
                yield transfer

    def transfer_of(self, rank: int) -> Transfer:
        """Return which elements of these matrices are in the shard of `rank`, perhaps none."""
        held_position = self.cut[rank]
        if not held_position.numel:
            return _NO_TRANSFER
        return self._transfer(held_position, self.cut.holders[held_position])

    def _transfer(self, held_position: ShardPosition, ranks: tuple[int, ...]) -> Transfer:
        """Return the overlap of these matrices with the shard at `held_position`, which some `ranks` hold."""
        boxes = held_position.boxes
        if self.numel != prod(self.whole):
            boxes = tuple(held_position.overlaps(self._boxes))
        if not boxes:
            return _NO_TRANSFER
        return Transfer(ranks, nearest(ranks, self.owner or 0), boxes, numel_of(boxes))

    @cached_property
    def _boxes(self) -> list[Box]:
        return boxes_of_interval(self.whole, self.start, self.stop)

    def local_transfers(self, rank: int) -> LocalTransfers:
        """Return which elements of these matrices a rank sends to the rank that computes them (the owner), and back.

        Rank 1 may hold rows 2 and 3 of a matrix of four rows, which rank 0 computes. On rank 1, ``local_views`` has all
        of its local tensor, ``matrix_views`` has rows 2 and 3 of the matrix, and ``sends`` is True. On rank 0,
        ``owner_boxes`` has rows 2 and 3, from rank 1, and the other two, from itself.
        """
        local_shard = self.cut[rank]  # the elements of the parameter that the rank holds
        overlap = self.transfer_of(rank)  # the elements that are in these matrices
        return LocalTransfers(
            shard=self,
            computes=self.owner in (None, rank),
            # The rank holds all elements of the matrices and no others, so they are its local tensor.
            is_same_shard=overlap.numel == self.numel == local_shard.numel,
            local_views=tuple(map(local_shard.view, overlap.boxes)),
            matrix_views=tuple(map(self.position.view, overlap.boxes)),
            numel=overlap.numel,
            # Only one of the ranks that hold these elements sends them.
            sends=overlap.sender == rank,
            owner_boxes=self._owner_boxes() if rank == self.owner else [],
        )

    def _owner_boxes(self) -> list[OwnerBox]:
        """Return the boxes that the owner receives from the ranks that hold them, itself included."""
        owner_boxes: list[OwnerBox] = []
        for transfer in self.transfers:
            for box in transfer.boxes:
                owner_boxes.append(
                    OwnerBox(self.position.view(box), box.numel, transfer.sender, transfer.ranks)
                )
        return owner_boxes

    @property
    def the_owner(self) -> int:
        """The owner of matrices that not every rank computes."""
        assert self.owner is not None
        return self.owner

    @cached_property
    def _at_owner(self) -> Transfer:
        """The elements that the owner holds, with all ranks that hold the same ones."""
        return _NO_TRANSFER if self.owner is None else self.transfer_of(self.owner)

    @cached_property
    def needs_gather(self) -> bool:
        """True if the owner (the rank that computes these matrices) must first receive elements of them."""
        return self.owner is not None and self._at_owner.numel < self.numel

    @cached_property
    def needs_send(self) -> bool:
        """True if the owner (the rank that computes these matrices) must send results to other ranks."""
        return self.needs_gather or len(self._at_owner.ranks) > 1

    @property
    def route(self) -> str:
        """How the matrices reach the rank that computes them (the owner), and how the results reach other ranks.

        "everyone": all ranks compute, and nothing is sent. "owner": the matrices are gathered on the owner. "split":
        the owner holds them and sends only the results. "local": only the owner holds them, and nothing is sent.
        """
        if self.owner is None:
            return "everyone"
        if self.needs_gather:
            return "owner"
        if self.needs_send:
            return "split"
        return "local"

    @property
    def reason(self) -> str:
        """A text that explains the `route` of the matrices, for the tables of `Plan.explain`.

        For example, "cut into 2 shards; the owner holds 50%".
        """
        if self.route == "everyone":
            return f"every rank holds it; computing it ({self.cost:.1e} operations) is faster than sending it"
        if self.route == "local":
            return "the owner alone holds it"
        if self.route == "split":
            return f"{len(self._at_owner.ranks)} ranks hold it; the owner sends the result to the others"
        fraction = self._at_owner.numel / max(self.numel, 1)
        return f"cut into {len(list(self.transfers))} shards; the owner holds {fraction:.0%}"


def matrices_of(run: Run, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) by parameter name, for parameters that all transforms treat as a stack of matrices."""
    matrices = [stacked(tx, shapes)[1] for _, tx in run]
    # These entries are equal in all transforms. One that sees another matrix in a parameter excludes it.
    common = set(matrices[0].items()).intersection(
        *[of_transform.items() for of_transform in matrices]
    )
    return {name: matrix for name, matrix in sorted(common) if prod(shapes[name])}


def shards_of_parameter(matrix: tuple[int, int] | None, name: str, cut: Cut) -> list[MatrixShard]:
    """Divide a parameter into the parts that one rank each will compute, with the ranks that may compute them.

    A parameter of shape (6, 4, 4) is a stack of six matrices, and `matrix` is (4, 4). If rank 0 holds the first three
    and rank 1 the others, the parts are matrices 0 to 2 for rank 0, and 3 to 5 for rank 1. If `matrix` is None, the
    parameter is no stack, and one part.
    """
    if matrix is None:
        # The ranks that hold it whole, else those that hold a part of it, else, if it has no elements, all ranks.
        candidates = cut.complete or cut.taking_part or tuple(range(cut.size))
        return [
            MatrixShard(
                name, 0, prod(cut.shape), cut.shape, cut, candidates, complete=bool(cut.complete)
            )
        ]
    numel = prod(matrix)  # of one matrix
    # Matrix number i of the stack has the elements i * numel to (i + 1) * numel of the flattened parameter.
    shards: list[MatrixShard] = []
    for matrices in _ranges(cut, numel):
        count = matrices.stop - matrices.first
        shards.append(
            MatrixShard(
                name,
                start=matrices.first * numel,
                stop=matrices.stop * numel,
                shape=(count, *matrix),
                cut=cut,
                candidates=matrices.candidates,
                complete=matrices.complete,
                one_each=matrices.one_each,
            )
        )
    return shards


def with_ranks_of_their_own(shards: Sequence[MatrixShard], size: int) -> list[MatrixShard]:
    """Choose one rank for each shard with the flag ``one_each``. Return all shards, the others unchanged.

    These are single matrices of a stack, which get different ranks: if matrices 0 and 1 of "w" have the candidates 0 to
    3, and rank 0 has the highest load, they are assigned to ranks 1 and 2. The most expensive matrices come first.
    """
    # Other shards with several candidates are assigned later, and count for no rank yet.
    loads = [0.0] * size
    # The matrices to assign, by parameter and candidates.
    stacks: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for index, shard in enumerate(shards):
        if len(shard.candidates) == 1:
            loads[shard.candidates[0]] += shard.cost
        elif shard.one_each:
            stacks.setdefault((shard.name, shard.candidates), []).append(index)
    assigned = list(shards)
    for indices in sorted(stacks.values(), key=lambda indices: -shards[indices[0]].cost):
        candidates = shards[indices[0]].candidates
        by_load = sorted(candidates, key=lambda rank: (loads[rank], rank))
        least_loaded = by_load[: len(indices)]
        for index, owner in zip(indices, sorted(least_loaded), strict=True):
            assigned[index] = replace(shards[index], candidates=(owner,))
            loads[owner] += shards[index].cost
    return assigned


class _Range(NamedTuple):
    """Consecutive matrices of a stack, and the ranks of which one will compute them."""

    first: int
    stop: int
    candidates: tuple[int, ...]
    complete: bool
    """True if each candidate holds the whole range."""
    one_each: bool = False
    """True if each candidate may compute at most one of the ranges that have this flag."""


class _Matrix(NamedTuple):
    """The ranks that hold elements of one matrix of a stack."""

    ranks: tuple[int, ...]
    """The ranks that hold the whole matrix or, if there is no such rank, the ranks that hold some of it."""
    complete: bool
    """True if these ranks hold the whole matrix."""
    with_largest_part: tuple[int, ...]
    """The ranks that hold the largest part of the matrix."""


@remembered  # parameters with the same shape and partition share a cut
def _ranges(cut: Cut, numel: int) -> list[_Range]:
    """Divide a stack of matrices, with `numel` elements per matrix, among the ranks that hold elements of them.

    Six matrices of 16 elements, of which rank 0 holds the first 40 elements (two matrices and half of the third):

    >>> from muonfx.sharding.shards.cut import Intervals
    >>> ranges = _ranges(Intervals((6, 4, 4), start=0, borders=(0, 40, 96)), 16)
    >>> [(matrices.first, matrices.stop, matrices.candidates) for matrices in ranges]
    [(0, 3, (0,)), (3, 6, (1,))]

    If a rank had two ranges, such as matrices 0 and 2 of three, one rank computes the whole stack: the result is one
    range.
    """
    number_of_matrices = prod(cut.shape) // numel
    matrices = [_matrix(cut, number, numel) for number in range(number_of_matrices)]
    # 1. Neighbouring matrices that one rank computes are a range. A matrix with several candidates is a range alone.
    ranges: list[_Range] = []
    for number, candidates in enumerate(_candidates(matrices)):
        complete = matrices[number].complete
        has_choice = len(candidates) > 1
        if ranges and candidates == ranges[-1].candidates and not has_choice:
            complete = complete and ranges[-1].complete
            ranges[-1] = ranges[-1]._replace(stop=number + 1, complete=complete)
        else:
            ranges.append(_Range(number, number + 1, candidates, complete, one_each=has_choice))
    # 2. A rank has one tensor of state for the stack, of one range, so it cannot compute two. A matrix with `one_each`
    # gets a rank later that computes no other range.
    owners = [part.candidates for part in ranges if not part.one_each]
    has_rank_two_ranges = len(set(owners)) < len(owners)
    if has_rank_two_ranges:
        all_candidates = set[int]().union(*[part.candidates for part in ranges])
        return [_Range(0, number_of_matrices, tuple(sorted(all_candidates)), complete=False)]
    return ranges


def _candidates(matrices: Sequence[_Matrix]) -> list[tuple[int, ...]]:
    """Return, for each matrix of a stack, the ranks of which one will compute it: usually a single rank.

    Neighbouring matrices that the same ranks hold are divided among these ranks. Here ranks 4 and 5 hold all three
    matrices; rank 4 computes the first, and rank 5 the others:

    >>> _candidates([_Matrix(ranks=(4, 5), complete=True, with_largest_part=(4, 5))] * 3)
    [(4,), (5,), (5,)]
    """
    # For each rank, this is the number of matrices of the stack of which it holds elements.
    matrices_on: Counter[int] = Counter()
    for matrix in matrices:
        matrices_on.update(matrix.ranks)
    candidates: list[tuple[int, ...]] = []
    for _, neighbours in itertools.groupby(
        matrices, lambda matrix: (matrix.ranks, matrix.complete)
    ):
        candidates += _candidates_of_neighbours(list(neighbours), matrices_on)
    return candidates


def _candidates_of_neighbours(
    neighbours: Sequence[_Matrix], matrices_on: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """Return which ranks may compute each of some neighbouring matrices of a stack, which the same ranks hold.

    The matrices on ranks 0 and 1 are divided into equal ranges: of four, rank 0 computes the first two and rank 1 the
    last two. Of two matrices that are each split equally over ranks 0 to 3, any two of these ranks compute one each.

    `matrices_on` has, by rank, of how many matrices of the whole stack it holds elements.
    """
    ranks = neighbours[0].ranks
    count = len(neighbours)
    # 1. With at least as many matrices as ranks, each rank computes an equal range of them.
    if count >= len(ranks):
        return [(owner,) for owner in _in_equal_ranges(ranks, count)]
    # 2. With fewer matrices, each may get a rank that computes no other. `with_ranks_of_their_own` chooses it later, by
    # load, among the ranks that hold the largest part of every matrix.
    candidates = set(ranks)
    for matrix in neighbours:
        candidates.intersection_update(matrix.with_largest_part)
    has_choice = len(candidates) > 1 and len(candidates) >= count
    # Where a candidate holds elements of further matrices of the stack, it may have to compute one of them. A rank has
    # one tensor of state for the stack, of one range: it could not compute matrices 0 and 4, for example.
    hold_no_others = all(matrices_on[rank] == count for rank in candidates)
    if has_choice and hold_no_others:
        return [tuple(sorted(candidates))] * count
    # 3. Otherwise the first rank with the largest part of a matrix computes it, since it receives least.
    return [matrix.with_largest_part[:1] for matrix in neighbours]


def _in_equal_ranges(ranks: Sequence[int], count: int) -> list[int]:
    """Return the rank of each of `count` matrices, if each rank has an equal range of neighbours.

    >>> _in_equal_ranges([4, 5], 5)
    [4, 4, 5, 5, 5]
    """
    owners: list[int] = []
    for index, rank in enumerate(ranks):
        # Neighbouring ranges share this boundary, so all matrices are divided even if the division has a remainder.
        start = count * index // len(ranks)
        stop = count * (index + 1) // len(ranks)
        owners += [rank] * (stop - start)
    return owners


def _matrix(cut: Cut, number: int, numel: int) -> _Matrix:
    """Find the ranks that hold elements of one matrix of a stack. `numel` is the number of elements of a matrix.

    Of the third matrix here, elements 32 to 47 of the parameter, rank 0 holds 4 and rank 1 holds 12:

    >>> from muonfx.sharding.shards.cut import Intervals
    >>> _matrix(Intervals((6, 4, 4), start=0, borders=(0, 36, 96)), number=2, numel=16)
    _Matrix(ranks=(0, 1), complete=False, with_largest_part=(1,))
    """
    # 1. The number of elements on each rank that holds any.
    first_element = number * numel
    boxes = boxes_of_interval(cut.shape, first_element, first_element + numel)
    numel_of_rank: dict[int, int] = {}
    for position, ranks in cut.holders.items():
        overlap = numel_of(position.overlaps(boxes))
        if overlap:
            numel_of_rank.update(dict.fromkeys(ranks, overlap))
    # 2. The ranks with the largest part of the matrix, perhaps with all of it.
    largest = max(numel_of_rank.values())
    all_ranks = tuple(sorted(numel_of_rank))
    with_largest_part = tuple([rank for rank in all_ranks if numel_of_rank[rank] == largest])
    if largest == numel:
        return _Matrix(ranks=with_largest_part, complete=True, with_largest_part=with_largest_part)
    return _Matrix(ranks=all_ranks, complete=False, with_largest_part=with_largest_part)
