"""Bytes, work and memory of a scheme of sharded Muon by rank, and the schemes of `muonfx.sharding`.

Averaging gradients and gathering weights is not counted, as any optimizer needs it. The figures of our schemes are
computed from the layout and the plan of a run of that size. All schemes use the same Newton-Schulz and dtypes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

from benchmarks.simulator.mesh import Setting
from benchmarks.simulator.operations import flops
from muonfx import polar
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import BUFFERS_PER_BUCKET, Plan, RunPlan
from muonfx.sharding.plan.matrix_shards import MatrixShard

__all__ = ["OURS", "Scheme", "Tally", "Wire"]


class Wire(NamedTuple):
    """The bytes that ranks send in one kind of group."""

    sent: Sequence[float]
    """Bytes by rank."""
    block: int
    """Number of ranks in the block around such a group."""


class Tally(NamedTuple):
    """The costs of a scheme."""

    wires: list[Wire]
    work: dict[tuple[int, polar.Plan], list[float]]
    """Number of matrices that each rank computes, by short side and cost."""
    state: list[float]
    """Bytes of momentum and moments, by rank."""
    scratch: float
    """Bytes on the busiest rank."""
    exchanges: float = 0.0
    """Number of consecutive collectives of a rank per step. Ours include the agreement of all ranks."""

    @property
    def sent(self) -> list[float]:
        """Bytes by rank, over all wires."""
        return [sum(of_rank) for of_rank in zip(*(wire.sent for wire in self.wires), strict=True)]

    def weighted(self, weight: Callable[[int, polar.Plan], float]) -> list[float]:
        """Return the sum over each rank's matrices of a function of short side and cost.

        >>> from muonfx.polar.cost import newton_schulz_cost
        >>> cost = newton_schulz_cost((4, 8))
        >>> Tally([], {(4, cost): [1.0, 2.0]}, [], 0.0).weighted(lambda side, cost: side)
        [4.0, 8.0]
        """
        size = len(next(iter(self.work.values())))
        sums = [0.0] * size
        for (side, cost), matrices_of_rank in self.work.items():
            weight_of_matrix = weight(side, cost)
            for rank, matrices in enumerate(matrices_of_rank):
                sums[rank] += weight_of_matrix * matrices
        return sums

    @property
    def flops(self) -> list[float]:
        """Operations of Newton-Schulz by rank."""
        return self.weighted(lambda _, cost: flops(cost))

    @property
    def load(self) -> list[float]:
        """Time of Newton-Schulz by rank, in equivalent operations of full products."""
        return self.weighted(lambda _, cost: cost.load)


class Scheme(NamedTuple):
    """A scheme of sharded Muon."""

    name: str
    layout: str
    """The layout: fsdp2 (also with tensor or expert parallelism), zero-whole, zero-flat or ddp."""
    about: str
    """A description of one line."""
    tally: Callable[[Setting], Tally | None]
    """Counts the costs; None if the mesh does not support the scheme or makes it equal to another one."""
    ours: bool = False
    """True for a route of this package, False for another library."""


# ---------------------------------------------------------------------------------------------------------------- ours


def of_plan(on: Setting, layout: Layout, plan: Plan) -> Tally:
    """Count the costs of a plan of one run under its layout."""
    (run,) = plan.runs
    exchanges, fullest = _exchanged(run)
    return Tally(
        [Wire(run.sent_for(shards), block) for block, shards in _by_block(run).items()],
        _work(on, run),
        _state(on, layout),
        on.intermediates + BUFFERS_PER_BUCKET * fullest,
        exchanges + (run.size > 1),  # all ranks agree before a step
    )


def _by_block(run: RunPlan) -> dict[int, list[MatrixShard]]:
    """Return the shards by block size. A block is the smallest aligned power of two of ranks that holds a parameter."""
    # If the ranks per node are a power of two, a block no larger than a node does not cross nodes.
    found: dict[int, list[MatrixShard]] = {}
    for shard in run.shards:
        ranks = shard.cut.taking_part or (0,)
        found.setdefault(min(1 << (ranks[0] ^ ranks[-1]).bit_length(), run.size), []).append(shard)
    return found


def _work(on: Setting, run: RunPlan) -> dict[tuple[int, polar.Plan], list[float]]:
    work: dict[tuple[int, polar.Plan], list[float]] = {}
    counts = Counter[tuple[int | None, tuple[int, ...]]]()
    for shard in run.shards:
        counts[shard.owner, shard.shape[-2:]] += prod(shard.shape[:-2])
    for (owner, shape), number in counts.items():
        done = work.setdefault((min(shape), on.cost(shape)), [0.0] * run.size)
        for rank in range(run.size) if owner is None else (owner,):
            done[rank] += number
    return work


def _exchanged(run: RunPlan) -> tuple[int, int]:
    """Return the number of exchanges, and the maximum bytes of exchanged matrices of an owner in a bucket."""
    exchanges, fullest = 0, 0
    for bucket in run.buckets:
        shards = [run.shards[i] for i in bucket if run.shards[i].route in ("owner", "split")]
        # The owner's route sends shards and results; a split matrix is already on its rank.
        exchanges += any(shard.route == "owner" for shard in shards) + bool(shards)
        held = Counter[int | None]()
        for shard in shards:
            held[shard.owner] += shard.numel * run.specs[shard.name].dtype.itemsize
        fullest = max(fullest, *held.values(), 0)
    return exchanges, fullest


def _state(on: Setting, layout: Layout) -> list[float]:
    """Return the bytes of momentum and moments, sharded as the parameters."""
    kept: dict[str, int] = {}
    cuts = {cut.digest: cut for cut in layout.cuts.values()}
    for own, cut in zip(on.parameters.values(), layout.cuts.values(), strict=True):
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
    _ours("owner", "fsdp2", "one rank gathers and computes a matrix, and scatters the result"),
    _ours("whole parameters", "zero-whole", "each matrix is stored and computed on one rank"),
    _ours(
        "owner, flat cuts",
        "zero-flat",
        "matrices across a boundary are gathered on one rank and scattered back",
    ),
    _ours("split", "ddp", "each matrix is computed on one rank and broadcast", replicas="split"),
    _ours("everyone", "ddp", "all ranks compute all matrices", replicas="everyone"),
)
"""The routes of this package."""
