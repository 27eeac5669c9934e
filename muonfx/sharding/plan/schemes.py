"""What each way to run Muon on many ranks sends, computes and keeps, counted rank by rank.

`S` is a matrix's bytes as sent, `P` the ranks that hold its pieces, `N` all ranks; formulas are for one matrix. Only
what Muon adds is counted: averaging gradients and gathering weights happens anyway. In a ring (all_gather, broadcast,
all_reduce) each rank passes on what it gets. All schemes are given the same Newton-Schulz iteration and the same
dtypes, so that what differs is the scheme. ZeRO's and DDP's have all ranks of the mesh as data ranks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from muonfx.sharding.plan.balance import assign, assign_by_bytes
from muonfx.sharding.plan.cost import newton_schulz_cost
from muonfx.sharding.plan.mesh import Matrix, Mesh
from muonfx.sharding.plan.models import Model
from muonfx.sharding.plan.plan import AT_A_TIME

__all__ = ["Ledger", "Scheme", "Setting", "Tally", "Wire"]


class Setting(NamedTuple):
    """What is planned for."""

    model: Model
    mesh: Mesh
    matrices: Sequence[Matrix]
    device: str
    dtype: torch.dtype
    """On the wire and in Newton-Schulz."""
    state_size: int = 4
    """Bytes of an element of momentum and of Adam's moments."""
    bucket: int = 256 * 2**20
    """Bytes of exchanges under way: matrices and messages of the bucket that is computed, the next, and the last."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each matrix as sent."""
        return [matrix.numel * self.dtype.itemsize for matrix in self.matrices]

    @property
    def loads(self) -> list[float]:
        """What each matrix costs."""
        return [matrix.cost.load for matrix in self.matrices]

    @property
    def adam_state(self) -> int:
        """Bytes of two moments of all that is not Muon's."""
        return 2 * self.state_size * sum(kind.numel * kind.repeats for kind in self.model.kinds if not kind.muon)

    @property
    def intermediates(self) -> int:
        """Scratch of Newton-Schulz itself, one matrix at a time."""
        return max(matrix.cost.scratch_bytes for matrix in self.matrices)

    @property
    def exchanged(self) -> int:
        """Scratch where matrices are sent in buckets, beside that of Newton-Schulz.

        `bucket` holds for all that is under way at a time, `AT_A_TIME` times the matrices of one bucket; but there is
        never more than all matrices, nor a bucket of less than the largest one.
        """
        return self.intermediates + AT_A_TIME * min(sum(self.sizes), max(self.bucket // AT_A_TIME, *self.sizes, 1))

    @property
    def agreement(self) -> int:
        """The small all-reduce in which ranks agree before a step, where there are several."""
        return int(self.mesh.ranks > 1)

    def rounds(self, owners: Sequence[int], ranks: int) -> int:
        """Buckets that are exchanged one after another: as many as the fullest owner fills."""
        owned = [0] * ranks
        for size, rank in zip(self.sizes, owners, strict=True):
            owned[rank] += size
        return -(-max(owned) // max(1, self.bucket // AT_A_TIME))


class Wire(NamedTuple):
    """What each rank sends in groups of one kind."""

    sent: list[float]
    """Bytes by rank."""
    reach: int
    """Neighbouring ranks that such a group spans."""


class Tally(NamedTuple):
    """A scheme's account."""

    wires: list[Wire]
    flops: list[float]
    """Newton-Schulz, by rank."""
    load: list[float]
    """The time of that, as operations of full products, by rank."""
    sides: dict[int, list[float]]
    """The same load by the matrices' short side: small products run at a lower rate than large ones."""
    matrices: list[float]
    """The number of matrices that each rank computes."""
    state: list[float]
    """Bytes of momentum and moments, by rank."""
    scratch: float
    """Bytes at the busiest rank."""
    exchanges: float = 0.0
    """Collectives that a rank takes part in, one after another; of ours one a step is the agreement of all ranks."""

    @property
    def sent(self) -> list[float]:
        """Bytes by rank, over all wires."""
        return [sum(of_rank) for of_rank in zip(*(wire.sent for wire in self.wires), strict=True)]


class Scheme(NamedTuple):
    """A way to run Muon."""

    name: str
    layout: str
    """What holds the parameters: fsdp2 (with tensor or expert parallelism or not), zero-whole, zero-flat or ddp."""
    ours: bool
    """Whether it is a route of this package, or another library's."""
    about: str
    """What it does, in a line."""
    tally: Callable[[Setting], Tally]
    fits: Callable[[Mesh], bool] = lambda mesh: True
    """Whether it can be done on a mesh, and is not there what another one is."""


class Ledger:
    """Amounts by rank, entered for one rank or for a range of them.

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
        """Enter an amount for each of the ranks."""
        if isinstance(ranks, int):
            self._single[ranks] += amount
        else:
            self._ranges[ranks] = self._ranges.get(ranks, 0.0) + amount

    def by_rank(self) -> list[float]:
        """The sums."""
        sums = self._single.copy()
        for ranks, amount in self._ranges.items():
            for rank in ranks:
                sums[rank] += amount
        return sums


class Sending:
    """Bytes by rank, for each reach of groups."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._by_reach: dict[int, Ledger] = {}

    def add(self, ranks: int | range, amount: float, reach: int) -> None:
        """Each of the ranks sends an amount in a group of this reach."""
        if reach not in self._by_reach:  # a ledger has a place for every rank: made once, not at every entry
            self._by_reach[reach] = Ledger(self._ranks)
        self._by_reach[reach].add(ranks, amount)

    def wires(self, copies: int = 1) -> list[Wire]:
        """A wire for each reach, the ranks repeated so many times."""
        return [Wire(ledger.by_rank() * copies, reach) for reach, ledger in self._by_reach.items()]


class Work:
    """Newton-Schulz by rank."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._flops, self._load, self._count = Ledger(ranks), Ledger(ranks), Ledger(ranks)
        self._sides: dict[int, Ledger] = {}

    def add(self, ranks: int | range, matrix: Matrix, share: float = 1.0, *, count: float | None = None) -> None:
        """Each of the ranks does this share of a matrix, or of so many of them."""
        self._flops.add(ranks, matrix.cost.flops * share)
        self._load.add(ranks, matrix.cost.load * share)
        self._count.add(ranks, share if count is None else count)
        side = min(matrix.shape)
        if side not in self._sides:
            self._sides[side] = Ledger(self._ranks)
        self._sides[side].add(ranks, matrix.cost.load * share)

    def by_rank(self, copies: int = 1) -> tuple[list[float], list[float], dict[int, list[float]], list[float]]:
        """Operations, load, load by side and matrices, the ranks repeated so many times."""
        flops, load, count = (ledger.by_rank() * copies for ledger in (self._flops, self._load, self._count))
        return flops, load, {side: ledger.by_rank() * copies for side, ledger in self._sides.items()}, count


def sharded_state(on: Setting) -> list[float]:
    """Momentum and moments where the pieces are."""
    mesh = on.mesh
    state = Ledger(mesh.pieces)
    state.add(range(mesh.pieces), on.adam_state / mesh.pieces)
    for matrix in on.matrices:
        state.add(matrix.holders(mesh), matrix.numel * on.state_size / matrix.pieces(mesh))
    return state.by_rank() * mesh.dp


def owned_pieces(on: Setting, owners: Sequence[int], ranks: int) -> Sending:
    """Bytes by rank of pieces to owners and back.

    A rank sends its piece of each matrix that another owns, and of one that it owns all pieces but its own.
    """
    sent = Sending(ranks)
    for matrix, size, owner in zip(on.matrices, on.sizes, owners, strict=True):
        pieces, first = matrix.pieces(on.mesh), owner // on.mesh.pieces * on.mesh.pieces
        holders = matrix.holders(on.mesh)
        sent.add(range(first + holders.start, first + holders.stop), size / pieces, pieces)
        sent.add(owner, size / pieces * (pieces - 2), pieces)
    return sent


def owner(on: Setting) -> Tally:
    """Each replica for itself, each matrix at an owner among its holders: `2 S (P - 1) / P^2` a rank on average."""
    mesh, work = on.mesh, Work(on.mesh.pieces)
    holders = [matrix.holders(mesh) for matrix in on.matrices]
    owners = assign(on.loads, _one_object_each(holders), mesh.pieces)
    for matrix, rank in zip(on.matrices, owners, strict=True):
        work.add(rank, matrix)
    wires = owned_pieces(on, owners, mesh.pieces).wires(mesh.dp)
    scratch = on.exchanged if mesh.pieces > 1 else on.intermediates
    rounds = on.rounds(owners, mesh.pieces)
    exchanges = on.agreement + (2 * rounds if mesh.pieces > 1 else 0)
    return Tally(wires, *work.by_rank(mesh.dp), sharded_state(on), scratch, exchanges)


def shared_owner(on: Setting) -> Tally:
    """One owner among all replicas: pieces from its own replica and back, then on to the same ranks of the others.

    On average a rank sends `2 S (P - 1) / (dp P^2)` in its replica, and `S (dp - 1) / (dp P)` in rings across.
    """
    mesh, work = on.mesh, Work(on.mesh.ranks)
    holders = [matrix.holders(mesh) for matrix in on.matrices]
    replicas = range(0, mesh.ranks, mesh.pieces)
    groups = {part: tuple(first + rank for first in replicas for rank in part) for part in set(holders)}
    owners = assign(on.loads, [groups[part] for part in holders], mesh.ranks)
    passed = Ledger(mesh.pieces)
    not_passed = Ledger(mesh.ranks)
    for matrix, size, part, rank in zip(on.matrices, on.sizes, holders, owners, strict=True):
        work.add(rank, matrix)
        last = (rank // mesh.pieces - 1) % mesh.dp * mesh.pieces  # the ring ends before the owner's replica
        passed.add(part, size / len(part))
        not_passed.add(range(last + part.start, last + part.stop), size / len(part))
    across = [a - b for a, b in zip(passed.by_rank() * mesh.dp, not_passed.by_rank(), strict=True)]
    wires = [*owned_pieces(on, owners, mesh.ranks).wires(), Wire(across, mesh.ranks)]
    # there, back, and on to the other replicas
    exchanges = on.agreement + 3 * on.rounds(owners, mesh.ranks)
    return Tally(wires, *work.by_rank(), sharded_state(on), on.exchanged, exchanges)


def gram(on: Setting) -> Tally:
    """All-reduce of packed Gram matrices, where matrices are cut along their long side.

    `K` stages sum an `n x n` matrix each, of which a triangle is sent, in a ring: `K n (n + 1) (P - 1) / P` elements a
    rank, less than the owner's route where `m / n > K P / 2`. Ranks share the long products and repeat the small ones.
    """
    mesh, work, sent, sums = on.mesh, Work(on.mesh.pieces), Sending(on.mesh.pieces), 0
    for matrix in on.matrices:
        n, ranks = min(matrix.shape), matrix.holders(mesh)
        cost = newton_schulz_cost(matrix.shape, on.device, dtype=on.dtype, method="gram")
        share = cost.long_share / len(ranks) + 1 - cost.long_share
        work.add(ranks, matrix._replace(cost=cost), share, count=1.0)
        sums += cost.stages
        numel = cost.stages * n * (n + 1) * (len(ranks) - 1) / len(ranks)
        sent.add(ranks, numel * on.dtype.itemsize, len(ranks))
    done = work.by_rank(mesh.dp)
    return Tally(sent.wires(mesh.dp), *done, sharded_state(on), on.intermediates, sums + on.agreement)


def whole(on: Setting) -> Tally:
    """ZeRO with whole parameters: who keeps a matrix has it all, and nothing is sent."""
    ranks, work = on.mesh.ranks, Work(on.mesh.ranks)
    adam = [(0.0, 2 * on.state_size * k.numel) for k in on.model.kinds if not k.muon for _ in range(k.repeats)]
    muon = [(matrix.cost.load, matrix.numel * on.state_size) for matrix in on.matrices]
    sizes = [size for _, size in muon + adam]
    owners = assign_by_bytes([load for load, _ in muon + adam], sizes, ranks)
    state = Ledger(ranks)
    for size, rank in zip(sizes, owners, strict=True):
        state.add(rank, size)
    for matrix, rank in zip(on.matrices, owners, strict=False):
        work.add(rank, matrix)
    wires = [Wire([0.0] * ranks, ranks)]
    return Tally(wires, *work.by_rank(), state.by_rank(), on.intermediates, on.agreement)


def flat(on: Setting) -> Tally:
    """ZeRO with equal cuts: a matrix that crosses one goes to one of its holders and back: `2 (S - its own part)`."""
    ranks, work, sent = on.mesh.ranks, Work(on.mesh.ranks), Ledger(on.mesh.ranks)
    cuts = flat_cuts([matrix.numel for matrix in on.matrices], ranks)
    owners = assign(on.loads, [tuple(held) for held in cuts], ranks)
    for matrix, held, rank in zip(on.matrices, cuts, owners, strict=True):
        work.add(rank, matrix)
        for holder, numel in held.items():
            away = numel if holder != rank else matrix.numel - numel
            sent.add(holder, away * on.dtype.itemsize)
    scratch = on.exchanged if ranks > 1 else on.intermediates
    exchanges = on.agreement + (2 * on.rounds(owners, ranks) if any(len(held) > 1 for held in cuts) else 0)
    return Tally([Wire(sent.by_rank(), ranks)], *work.by_rank(), even_state(on), scratch, exchanges)


def split(on: Setting) -> Tally:
    """Replicated parameters, each matrix at one rank, the results in a ring to all: `S (N - 1) / N` a rank."""
    ranks, work = on.mesh.ranks, Work(on.mesh.ranks)
    owners = assign(on.loads, None, ranks)
    sent = Ledger(ranks)
    sent.add(range(ranks), sum(on.sizes))
    for matrix, size, rank in zip(on.matrices, on.sizes, owners, strict=True):
        work.add(rank, matrix)
        sent.add((rank - 1) % ranks, -size)  # the ring ends before the owner
    exchanges = on.agreement + (on.rounds(owners, ranks) if ranks > 1 else 0)
    return Tally([Wire(sent.by_rank(), ranks)], *work.by_rank(), replicated_state(on), on.exchanged, exchanges)


def everyone(on: Setting) -> Tally:
    """Replicated parameters, and all ranks compute everything: nothing is sent."""
    ranks, work = on.mesh.ranks, Work(on.mesh.ranks)
    for matrix in on.matrices:
        work.add(range(ranks), matrix)
    wires = [Wire([0.0] * ranks, ranks)]
    return Tally(wires, *work.by_rank(), replicated_state(on), on.intermediates, on.agreement)


def even_state(on: Setting) -> list[float]:
    """Momentum and moments cut into equal parts."""
    total = sum(matrix.numel for matrix in on.matrices) * on.state_size + on.adam_state
    return [total / on.mesh.ranks] * on.mesh.ranks


def replicated_state(on: Setting) -> list[float]:
    """Momentum and moments whole at every rank."""
    return [share * on.mesh.ranks for share in even_state(on)]


def flat_cuts(numels: Sequence[int], ranks: int) -> list[dict[int, int]]:
    """For each matrix of one flat buffer in equal cuts: how many elements each of its holders has.

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


def _one_object_each(groups: Iterable[range]) -> list[range]:
    """The same groups, equal ones as one object, which `assign` finds faster."""
    known: dict[range, range] = {}
    return [known.setdefault(group, group) for group in groups]
