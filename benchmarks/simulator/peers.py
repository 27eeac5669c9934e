"""Costs of the schemes of other libraries, from reading their code at the versions given below.

- LLaMA-Factory v1, `v1/plugins/trainer_plugins/muon_optimizer.py` at commit 7374682. Every rank calls `full_tensor()`
  on the gradient, and computes momentum and Newton-Schulz of the full matrix. `distribute_tensor` then broadcasts the
  result along replicating mesh dims and scatters it along sharding mesh dims, from the first rank of each.
- DeepSpeed 0.19.8, `runtime/zero/stage3.py`, `_apply_muon_to_accumulated_grads` and `_muon_update_sub_group`. All ranks
  gather gradients and momentum bucket by bucket. Each rank computes one matrix per round. Results and momentum are
  gathered again, padded to the largest matrix of a round and to one matrix per rank. Not modelled: sub-groups, which
  split buckets, and the all-reduce of gradients that it requires instead of a reduce-scatter, `S (N - 1) / N` more.
- DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`, `_get_flat_partition_unpadded`. A rank runs Newton-Schulz on every
  matrix that its partition touches. A matrix across a boundary is computed on both sides, with its momentum.
- Dion's Muon (microsoft/dion), as in torchtitan's `experiments/dion_optimizer/muon.py` at commit 175ea57. Matrices of
  one shape form batches of one matrix per rank; the last batch is padded with zeros. One all_to_all sends the shards to
  the ranks, and another sends results back. It supports one sharded dim, and every replica computes all matrices.
- torchtitan 0.3.0, `distributed/flex_shard/dist_muon.py`. The user chooses the buckets of parameters and, for each
  parameter, the mesh dim along which one rank owns it. Within a bucket, the costliest matrix is assigned to the least
  loaded rank; loads of earlier buckets only break ties. Shards are sent to owners and back by one all_to_all each, with
  exact sizes and two sets of buffers. Every replica computes all matrices. Here, buckets are neighbouring matrices with
  as many bytes as ours. Not modelled: heads and stacks of experts that are already whole on a rank and stay there. It
  does not support a matrix sharded by two mesh dims, identical computation on every rank, CPUs, plain tensors, or a
  missing gradient.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from benchmarks.simulator.mesh import Mesh, Setting
from benchmarks.simulator.tally import Scheme, Tally, Wire
from muonfx import polar
from muonfx.sharding.plan.assignment import BUFFERS_PER_BUCKET

__all__ = ["PEERS"]

REDUCE_BUCKET = 500_000_000
"""Elements per bucket, DeepSpeed's default."""


class Matrix(NamedTuple):
    """One matrix that Muon updates, with shards of equal size."""

    shape: tuple[int, ...]
    part: int | None
    """The part of a replica that holds it; None for the whole replica."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def pieces(self, mesh: Mesh) -> int:
        """Return the number of its shards."""
        return mesh.pieces if self.part is None else mesh.pieces // mesh.ep

    def holders(self, mesh: Mesh) -> range:
        """Return the ranks of the first replica that hold a shard of it.

        >>> Matrix((4, 4), part=1).holders(Mesh(shard=8, ep=2))
        range(4, 8)
        """
        pieces = self.pieces(mesh)
        first = 0 if self.part is None else self.part * pieces
        return range(first, first + pieces)


def matrices_of(on: Setting) -> list[Matrix]:
    """Return every matrix that Muon updates, layer by layer."""
    return [Matrix(own.kind.shape, own.part) for own in on.matrices]


def adam_state(on: Setting) -> int:
    """Return the bytes of AdamW's two moments."""
    return sum(
        kind.numel * kind.repeats * on.state_of(kind) for kind in on.model.kinds if not kind.muon
    )


def gather_everywhere(on: Setting) -> Tally:
    """Count `S (P - 1) / P` per rank to gather, and the result from the first rank to all replicas and shards."""
    mesh, work, state = on.mesh, Work(on, on.mesh.ranks), Ledger(on.mesh.ranks)
    every = range(mesh.ranks)
    sent, replicated = Sending(mesh.ranks), Ledger(mesh.ranks)
    state.add(every, adam_state(on) / mesh.pieces)
    for matrix, count in Counter(matrices_of(on)).items():
        ranks, holders, size = (
            matrix.pieces(mesh),
            matrix.holders(mesh),
            count * matrix.numel * on.dtype.itemsize,
        )
        for replica in range(mesh.dp):
            here = range(
                replica * mesh.pieces + holders.start, replica * mesh.pieces + holders.stop
            )
            sent.add(here, size * (ranks - 1) / ranks, ranks)
            work.add(here, matrix.shape, count)
            state.add(here, count * matrix.numel * on.state_size)
            for first, amount in _scattered(here, mesh.tp, size):
                sent.add(first, amount, ranks)
            if replica < mesh.dp - 1:  # the last replica of a ring forwards nothing
                replicated.add(here, size)
    wires = [*sent.wires(), Wire(replicated.by_rank(), mesh.ranks)]
    scratch = on.intermediates + 2 * max(on.sizes)
    # For each matrix: a gather, and a broadcast or scatter along every mesh dim with more than one rank.
    dims = sum(size > 1 for size in (mesh.dp, mesh.shard, mesh.tp))
    return Tally(wires, work.by_rank(), state.by_rank(), scratch, len(on.matrices) * (1 + dims))


def _scattered(ranks: range, tp: int, size: float) -> Iterator[tuple[int, float]]:
    """Yield the bytes that ranks send to scatter a matrix along the sharding dim, then the tensor parallel dim."""
    rows = len(ranks) // tp
    for rank in ranks[:tp]:
        yield rank, size * (rows - 1) / rows
    for rank in ranks[::tp]:
        yield rank, size / rows * (tp - 1) / tp


def four_gathers(on: Setting) -> Tally:
    """Count gathers of gradients, momentum, results and momentum: `4 S (N - 1) / N` per rank, and padding."""
    ranks, work, sent = on.mesh.ranks, Work(on, on.mesh.ranks), 0.0
    most = exchanges = 0
    for bucket in _buckets(matrices_of(on), REDUCE_BUCKET):
        most = max(most, sum(matrix.numel for matrix in bucket))
        sent += 2 * sum(-(-matrix.numel // ranks) for matrix in bucket) * (ranks - 1)
        exchanges += 2
        for start in range(0, len(bucket), ranks):
            exchanges += 2
            one_round = bucket[start : start + ranks]
            sent += 2 * max(matrix.numel for matrix in one_round) * (ranks - 1)
            for rank, matrix in enumerate(one_round):
                work.add(rank, matrix.shape)
    wires = [Wire([sent * on.dtype.itemsize] * ranks, ranks)]
    # Each of two gathers has a buffer and a result.
    scratch = on.intermediates + 4 * most * on.dtype.itemsize
    return Tally(wires, work.by_rank(), even_state(on), scratch, exchanges if ranks > 1 else 0)


def _buckets(matrices: Sequence[Matrix], most: int) -> Iterator[list[Matrix]]:
    """Yield buckets of neighbouring matrices with at most this number of elements, or a larger matrix alone."""
    bucket: list[Matrix] = []
    numel = 0
    for matrix in matrices:
        if bucket and numel + matrix.numel > most:
            yield bucket
            bucket, numel = [], 0
        bucket.append(matrix)
        numel += matrix.numel
    yield bucket


def duplicates(on: Setting) -> Tally:
    """Count every matrix, with its full momentum, on each rank that holds a shard of it; nothing is sent."""
    ranks, work, state = on.mesh.ranks, Work(on, on.mesh.ranks), Ledger(on.mesh.ranks)
    state.add(range(ranks), adam_state(on) / ranks)
    matrices = matrices_of(on)
    for matrix, held in zip(
        matrices, flat_cuts([matrix.numel for matrix in matrices], ranks), strict=True
    ):
        for rank in held:
            work.add(rank, matrix.shape)
            state.add(rank, matrix.numel * on.state_size)
    return Tally([Wire([0.0] * ranks, ranks)], work.by_rank(), state.by_rank(), on.intermediates)


def batches_of_one_shape(on: Setting) -> Tally:
    """Count `2 S (P - 1) / P` and one Newton-Schulz per rank for a batch of `P` matrices, including padding."""
    mesh, work, sent = on.mesh, Work(on, on.mesh.pieces), Sending(on.mesh.pieces)
    largest, exchanges = max(on.sizes), 0
    for matrix, count in Counter(matrices_of(on)).items():
        ranks = matrix.holders(mesh)
        batches = -(-count // len(ranks))
        exchanges += 2 * batches
        work.add(ranks, matrix.shape, batches)
        size = matrix.numel * on.dtype.itemsize
        sent.add(ranks, batches * 2 * size * (len(ranks) - 1) / len(ranks), len(ranks))
    scratch = on.intermediates + 4 * largest
    return Tally(sent.wires(mesh.dp), work.by_rank(mesh.dp), sharded_state(on), scratch, exchanges)


def balanced_in_buckets(on: Setting) -> Tally:
    """Count `2 S (P - 1) / P^2` per rank on average; owners of more bytes send more."""
    mesh, work, sent = on.mesh, Work(on, on.mesh.pieces), Sending(on.mesh.pieces)
    in_groups: dict[range, list[Matrix]] = {}
    for matrix in matrices_of(on):
        in_groups.setdefault(matrix.holders(mesh), []).append(matrix)
    exchanges = most = 0
    for ranks, own in in_groups.items():
        pieces, loads = len(ranks), [0] * len(ranks)
        for bucket in _buckets(own, on.bucket // BUFFERS_PER_BUCKET * pieces // on.dtype.itemsize):
            exchanges += 2 * (pieces > 1)
            held = [0] * pieces
            for matrix, owner in zip(
                bucket, owners_in_bucket([matrix.shape for matrix in bucket], loads), strict=True
            ):
                size = matrix.numel * on.dtype.itemsize
                held[owner] += size
                work.add(ranks[owner], matrix.shape)
                # The owner keeps its own shard and sends all others.
                sent.add(ranks, size / pieces, pieces)
                sent.add(ranks[owner], size * (pieces - 2) / pieces, pieces)
            most = max(most, max(held) + sum(held) // pieces)
    largest = max(on.sizes)
    scratch = on.intermediates + 2 * (most + largest + largest / mesh.pieces)
    return Tally(sent.wires(mesh.dp), work.by_rank(mesh.dp), sharded_state(on), scratch, exchanges)


def owners_in_bucket(shapes: Sequence[tuple[int, ...]], loads: list[int]) -> list[int]:
    """Assign each matrix of a bucket to a rank, and add its cost to `loads`, the loads of all buckets so far.

    Matrices are assigned in descending order of cost, each to the rank with the lowest cost in this bucket. Ties go to
    the fewest elements, then to the lowest load of earlier buckets.

    >>> loads = [0, 0]
    >>> owners_in_bucket([(8, 32)], loads), owners_in_bucket([(8, 8), (8, 8)], loads)
    ([0], [1, 0])
    >>> loads
    [6144, 1536]
    """
    costs = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    board = [(0, 0, load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(board)
    owners = [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: (-costs[i], -prod(shapes[i]), i)):
        load, numel, before, owners[i] = board[0]
        heapq.heapreplace(
            board, (load + costs[i], numel + prod(shapes[i]), before + costs[i], owners[i])
        )
    loads[:] = [before for _, _, before, _ in sorted(board, key=operator.itemgetter(3))]
    return owners


# -------------------------------------------------------------------------------------------------------- sums


class Ledger:
    """Sums by rank, with entries for one rank or for a range of ranks.

    >>> ledger = Ledger(3)
    >>> ledger.add(range(3), 1.0)
    >>> ledger.add(2, 5.0)
    >>> ledger.by_rank()
    [1.0, 1.0, 6.0]
    """

    def __init__(self, ranks: int) -> None:
        self._single = [0.0] * ranks
        self._ranges: dict[range, float] = {}

    def add(self, ranks: int | range, amount: float) -> None:
        """Add an amount for each of the ranks."""
        if isinstance(ranks, int):
            self._single[ranks] += amount
        else:
            self._ranges[ranks] = self._ranges.get(ranks, 0.0) + amount

    def by_rank(self) -> list[float]:
        """Return the sums."""
        sums = self._single.copy()
        for ranks, amount in self._ranges.items():
            for rank in ranks:
                sums[rank] += amount
        return sums


class Work:
    """Newton-Schulz iterations by rank."""

    def __init__(self, on: Setting, ranks: int) -> None:
        self._on, self._ranks = on, ranks
        self._by_shape: dict[tuple[int, ...], Ledger] = {}

    def add(self, ranks: int | range, shape: tuple[int, ...], times: int = 1) -> None:
        """Add this number of matrices of a shape to each of the ranks."""
        # A ledger has an entry for every rank, so it is created once per shape.
        if shape not in self._by_shape:
            self._by_shape[shape] = Ledger(self._ranks)
        self._by_shape[shape].add(ranks, times)

    def by_rank(self, copies: int = 1) -> dict[tuple[int, polar.Plan], list[float]]:
        """Return the number of matrices by short side and cost, with the ranks repeated `copies` times."""
        work: dict[tuple[int, polar.Plan], list[float]] = {}
        for shape, ledger in self._by_shape.items():
            done = work.setdefault((min(shape), self._on.cost(shape)), [0.0] * self._ranks * copies)
            done[:] = [a + b for a, b in zip(done, ledger.by_rank() * copies, strict=True)]
        return work


class Sending:
    """Bytes sent by rank, for each size of the block of ranks around a group."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._by_block: dict[int, Ledger] = {}

    def add(self, ranks: int | range, amount: float, block: int) -> None:
        """Add an amount to the bytes that each of the ranks sends in a group within a block of this size."""
        if block not in self._by_block:
            self._by_block[block] = Ledger(self._ranks)
        self._by_block[block].add(ranks, amount)

    def wires(self, copies: int = 1) -> list[Wire]:
        """Return a wire for each block size, with the ranks repeated `copies` times."""
        return [Wire(ledger.by_rank() * copies, block) for block, ledger in self._by_block.items()]


def sharded_state(on: Setting) -> list[float]:
    """Return the bytes of momentum and moments by rank, sharded as the parameters."""
    mesh = on.mesh
    state = Ledger(mesh.pieces)
    state.add(range(mesh.pieces), adam_state(on) / mesh.pieces)
    for matrix in matrices_of(on):
        state.add(matrix.holders(mesh), matrix.numel * on.state_size / matrix.pieces(mesh))
    return state.by_rank() * mesh.dp


def even_state(on: Setting) -> list[float]:
    """Return the bytes of momentum and moments by rank, in equal parts."""
    total = sum(matrix.numel for matrix in matrices_of(on)) * on.state_size + adam_state(on)
    return [total / on.mesh.ranks] * on.mesh.ranks


def flat_cuts(numels: Sequence[int], ranks: int) -> list[dict[int, int]]:
    """Return the elements of each matrix on each rank, for a flat buffer that is split into equal parts.

    >>> flat_cuts([4, 6], 3)
    [{0: 4}, {1: 4, 2: 2}]
    """
    size = -(-sum(numels) // ranks)
    ends = list(itertools.accumulate(numels))
    bounds = [size * (rank + 1) for rank in range(ranks)]
    cuts: list[dict[int, int]] = []
    for end, numel in zip(ends, numels, strict=True):
        start, held = end - numel, dict[int, int]()
        for rank in range(bisect.bisect_right(bounds, start), ranks):
            if rank * size >= end:
                break
            held[rank] = min(end, bounds[rank]) - max(start, rank * size)
        cuts.append(held)
    return cuts


# ---------------------------------------------------------------------------------------------------- all of them


def _peer(
    name: str,
    layout: str,
    about: str,
    tally: Callable[[Setting], Tally],
    fits: Callable[[Mesh], bool] | None = None,
) -> Scheme:
    return Scheme(
        name, layout, about, lambda on: tally(on) if fits is None or fits(on.mesh) else None
    )


def _is_sharded(mesh: Mesh) -> bool:
    return mesh.pieces > 1


def _one_sharded_dim(mesh: Mesh) -> bool:
    return mesh.pieces > 1 and (mesh.tp == 1 or mesh.shard == 1)


PEERS = (
    _peer(
        "LLaMA-Factory v1",
        "fsdp2",
        "all ranks gather and compute all matrices",
        gather_everywhere,
        _is_sharded,
    ),
    _peer(
        "Dion's Muon",
        "fsdp2",
        "batches of one shape, one matrix per rank, padded with zeros",
        batches_of_one_shape,
        _one_sharded_dim,
    ),
    _peer(
        "torchtitan's Muon",
        "fsdp2",
        "an owner in each replica, balanced within each bucket",
        balanced_in_buckets,
        _one_sharded_dim,
    ),
    _peer(
        "DeepSpeed ZeRO-1/2",
        "zero-flat",
        "every rank with a shard of a matrix computes it",
        duplicates,
    ),
    _peer(
        "DeepSpeed ZeRO-3",
        "zero-flat",
        "all ranks gather gradients, momentum, results, momentum",
        four_gathers,
    ),
)
"""The schemes of other libraries."""
