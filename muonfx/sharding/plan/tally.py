"""What each way to run Muon on many ranks sends, computes and keeps, rank by rank; ours as the assignment has it.

Only what Muon adds is counted: averaging gradients and gathering weights happens anyway. Ours are read off the layout
and the plan that a run of that size would have. All ways are given the same Newton-Schulz iteration and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.cost import Cost, newton_schulz_cost
from muonfx.sharding.plan.mesh import Setting
from muonfx.sharding.plan.plan import AT_A_TIME, RunPlan
from muonfx.sharding.planning import Plan

__all__ = ["OURS", "Ledger", "Scheme", "Tally", "Wire", "Work"]


class Wire(NamedTuple):
    """What each rank sends in groups of one kind."""

    sent: list[float]
    """Bytes by rank."""
    reach: int
    """The block of neighbouring ranks that such a group lies in."""


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
    about: str
    """What it does, in a line."""
    tally: Callable[[Setting], Tally | None]
    """Counts it; None where it cannot be done on a mesh, or is there what another one is."""
    ours: bool = False
    """Whether it is a route of this package, or another library's."""


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


class Work:
    """Newton-Schulz by rank."""

    def __init__(self, on: Setting, ranks: int) -> None:
        self._on, self._ranks = on, ranks
        self._flops, self._load, self._count = Ledger(ranks), Ledger(ranks), Ledger(ranks)
        self._sides: dict[int, Ledger] = {}

    def add(self, ranks: int | range, shape: tuple[int, ...], times: int = 1) -> None:
        """Each of the ranks does so many matrices of a shape."""
        self.add_part(ranks, min(shape), self._on.cost(shape), times, times)

    def add_part(self, ranks: int | range, side: int, cost: Cost, part: float, count: int) -> None:
        """Each of the ranks does a part of a cost, for matrices of a short side, which counts as so many of them."""
        self._flops.add(ranks, cost.flops * part)
        self._load.add(ranks, cost.load * part)
        self._count.add(ranks, count)
        if side not in self._sides:
            self._sides[side] = Ledger(self._ranks)
        self._sides[side].add(ranks, cost.load * part)

    def by_rank(self, copies: int = 1) -> tuple[list[float], list[float], dict[int, list[float]], list[float]]:
        """Operations, load, load by side and matrices, the ranks repeated so many times."""
        flops, load, count = (ledger.by_rank() * copies for ledger in (self._flops, self._load, self._count))
        return flops, load, {side: ledger.by_rank() * copies for side, ledger in self._sides.items()}, count


# ---------------------------------------------------------------------------------------------------------------- ours


def of_plan(on: Setting, layout: Layout, plan: Plan) -> Tally:
    """Count a plan under its layout."""
    wires: dict[int, list[float]] = {}
    work, exchanges, largest = Work(on, plan.size), int(plan.size > 1), 0  # one exchange: all ranks agree before a step
    for run in plan.runs:
        for reach, sent in run.sent_by_reach().items():
            before = wires.get(reach, [0.0] * plan.size)
            wires[reach] = [a + b for a, b in zip(before, sent, strict=True)]
        _add_work(work, on, run)
        there_and_back, fullest = _exchanged(run)
        exchanges += there_and_back
        largest = max(largest, fullest)
    return Tally(
        [Wire(sent, reach) for reach, sent in wires.items()],
        *work.by_rank(),
        state=_state(on, layout),
        scratch=on.intermediates + AT_A_TIME * largest,
        exchanges=exchanges,
    )


def _add_work(work: Work, on: Setting, run: RunPlan) -> None:
    for share in run.shares:
        everyone = range(run.size)
        work.add(everyone if share.owner is None else share.owner, share.shape[-2:], prod(share.shape[:-2]))
    for share in run.spread:
        rows, columns = share.whole
        cost = newton_schulz_cost((rows, columns), on.device, held=on.dtype, dtype=on.dtype, method="gram")
        for leg in share.legs:  # ranks share the long products and repeat the small ones
            part = cost.long_share * leg.numel / share.numel + 1 - cost.long_share
            work.add_part(leg.ranks[0], min(rows, columns), cost, part, 1)


def _exchanged(run: RunPlan) -> tuple[int, int]:
    """The number of exchanges of a run, and the most bytes of exchanged matrices that an owner has in a bucket."""
    exchanges, fullest = 0, 0
    for bucket in run.buckets:
        shares = [run.shares[i] for i in bucket]
        exchanges += any(share.comes for share in shares) + any(share.goes for share in shares)
        held: dict[int | None, int] = {}
        for share in shares:
            if share.comes or share.goes:
                nbytes = share.numel * run.specs[share.name].dtype.itemsize
                held[share.owner] = held.get(share.owner, 0) + nbytes
        fullest = max(fullest, *held.values(), 0)
    if run.spread:  # the largest elements, the norms, and the Gram matrices of all, stage by stage
        exchanges += 2 + max(run.stages_of(share) for share in run.spread)
    return exchanges, fullest


def _state(on: Setting, layout: Layout) -> list[float]:
    """Bytes of momentum and moments, which lie as the parameters do."""
    kept: dict[str, int] = {}
    cuts = {cut.digest: cut for cut in layout.pieces.values()}
    for own, cut in zip(on.parameters.values(), layout.pieces.values(), strict=True):
        kept[cut.digest] = kept.get(cut.digest, 0) + on.state_of(own.kind)
    state = [0.0] * layout.size
    for digest, nbytes in kept.items():
        for piece, ranks in cuts[digest].holders.items():
            for rank in ranks:
                state[rank] += piece.numel * nbytes
    return state


def _ours(name: str, layout: str, about: str, **settings: Any) -> Scheme:
    return Scheme(name, layout, about, partial(_tally, layout=layout, settings=settings), ours=True)


def _tally(on: Setting, layout: str, settings: Mapping[str, Any]) -> Tally | None:
    if layout == "fsdp2" and on.mesh.pieces == 1:
        return None
    gram = settings.get("gram", False)
    if gram and on.mesh.dp > 1:  # a piece that several replicas hold goes to an owner: the same plan once more
        return None
    plan = on.plan(layout, **settings)
    if gram and not any(run.spread for run in plan.runs):
        return None
    return of_plan(on, on.layout(layout), plan)


OURS = (
    _ours("owner", "fsdp2", "one of a matrix's holders gets it, computes, sends all holders their pieces"),
    _ours(
        "owner or Gram", "fsdp2", "sums of small Gram matrices, where they are fewer bytes; else an owner", gram=True
    ),
    _ours("whole parameters", "zero-whole", "who keeps a matrix has all of it and computes it"),
    _ours("owner, flat cuts", "zero-flat", "matrices across a cut go to one of their holders and back"),
    _ours("split", "ddp", "each matrix at one rank, results to all", replicas="split"),
    _ours("everyone", "ddp", "all ranks compute everything", replicas="everyone"),
)
"""The routes of this package."""
