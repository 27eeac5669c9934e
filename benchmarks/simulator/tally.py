"""Bytes, work and memory of each way to run Muon on many ranks, rank by rank; ours as the assignment has it.

Only what Muon adds is counted: averaging gradients and gathering weights happens anyway. Ours are read off the layout
and the plan that a run of that size would have. All ways are given the same Newton-Schulz iteration and dtypes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

from benchmarks.simulator.mesh import Setting
from muonfx.polar.cost import Cost
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import BUFFERS_PER_BUCKET, Plan, RunPlan
from muonfx.sharding.plan.shares import Share

__all__ = ["OURS", "Scheme", "Tally", "Wire"]


class Wire(NamedTuple):
    """The bytes that ranks send in groups of one kind."""

    sent: Sequence[float]
    """Bytes by rank."""
    block: int
    """Ranks of the block that such a group lies in."""


class Tally(NamedTuple):
    """A scheme's account."""

    wires: list[Wire]
    work: dict[tuple[int, Cost], list[float]]
    """The number of matrices that each rank computes, by their short side and the cost of one."""
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

    def weighted(self, weight: Callable[[int, Cost], float]) -> list[float]:
        """A sum by rank over its matrices, each with the weight of its short side and cost.

        >>> from muonfx.polar.cost import newton_schulz_cost
        >>> cost = newton_schulz_cost((4, 8))
        >>> Tally([], {(4, cost): [1.0, 2.0]}, [], 0.0).weighted(lambda side, cost: side)
        [4.0, 8.0]
        """
        columns = [[weight(*kind) * number for number in numbers] for kind, numbers in self.work.items()]
        return [sum(of_rank) for of_rank in zip(*columns, strict=True)]

    @property
    def flops(self) -> list[float]:
        """Operations of Newton-Schulz by rank."""
        return self.weighted(lambda _, cost: cost.flops)

    @property
    def load(self) -> list[float]:
        """The time of these, as operations of full products, by rank."""
        return self.weighted(lambda _, cost: cost.load)


class Scheme(NamedTuple):
    """A way to run Muon."""

    name: str
    layout: str
    """The layout: fsdp2 (with tensor or expert parallelism or not), zero-whole, zero-flat or ddp."""
    about: str
    """A line that says it."""
    tally: Callable[[Setting], Tally | None]
    """Counts it; None where it cannot be done on a mesh, or is there what another one is."""
    ours: bool = False
    """True for a route of this package, false for another library's."""


# ---------------------------------------------------------------------------------------------------------------- ours


def of_plan(on: Setting, layout: Layout, plan: Plan) -> Tally:
    """Count a plan of one run under its layout."""
    (run,) = plan.runs
    exchanges, fullest = _exchanged(run)
    return Tally(
        [Wire(run.sent_for(shares), block) for block, shares in _by_block(run).items()],
        _work(on, run),
        _state(on, layout),
        on.intermediates + BUFFERS_PER_BUCKET * fullest,
        exchanges + (run.size > 1),  # all ranks agree before a step
    )


def _by_block(run: RunPlan) -> dict[int, list[Share]]:
    """Shares by block: the smallest power of two of ranks, aligned to its size, that holds a parameter."""
    # If nodes have a power of two of ranks, a block no larger than a node does not cross nodes.
    found: dict[int, list[Share]] = {}
    for share in run.shares:
        ranks = share.cut.taking_part or (0,)
        found.setdefault(min(1 << (ranks[0] ^ ranks[-1]).bit_length(), run.size), []).append(share)
    return found


def _work(on: Setting, run: RunPlan) -> dict[tuple[int, Cost], list[float]]:
    work: dict[tuple[int, Cost], list[float]] = {}
    counts = Counter[tuple[int | None, tuple[int, ...]]]()
    for share in run.shares:
        counts[share.owner, share.shape[-2:]] += prod(share.shape[:-2])
    for (owner, shape), number in counts.items():
        done = work.setdefault((min(shape), on.cost(shape)), [0.0] * run.size)
        for rank in range(run.size) if owner is None else (owner,):
            done[rank] += number
    return work


def _exchanged(run: RunPlan) -> tuple[int, int]:
    """The number of exchanges of a run, and the most bytes of exchanged matrices that an owner has in a bucket."""
    exchanges, fullest = 0, 0
    for bucket in run.buckets:
        shares = [run.shares[i] for i in bucket if run.shares[i].route in ("owner", "split")]
        # by the owner's route pieces come and results go; what is split is there already
        exchanges += any(share.route == "owner" for share in shares) + bool(shares)
        held = Counter[int | None]()
        for share in shares:
            held[share.owner] += share.numel * run.specs[share.name].dtype.itemsize
        fullest = max(fullest, *held.values(), 0)
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
    return of_plan(on, on.layout(layout), on.plan(layout, **settings))


OURS = (
    _ours("owner", "fsdp2", "one of a matrix's holders gets it, computes, sends all holders their pieces"),
    _ours("whole parameters", "zero-whole", "who keeps a matrix has all of it and computes it"),
    _ours("owner, flat cuts", "zero-flat", "matrices across a cut go to one of their holders and back"),
    _ours("split", "ddp", "each matrix at one rank, results to all", replicas="split"),
    _ours("everyone", "ddp", "all ranks compute everything", replicas="everyone"),
)
"""The routes of this package."""
