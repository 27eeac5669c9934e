"""A plan on paper: the figures of each scheme, and a table that explains itself."""

from __future__ import annotations

import bisect
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.simulator.mesh import Setting
from benchmarks.simulator.tally import Scheme, Tally

__all__ = ["Cluster", "Row", "rows", "table"]

WIDTH = 96
"""Columns of a report: what a page of the docs shows without scrolling."""


class Cluster(NamedTuple):
    """The rates and delays that predicted times rest on; `benchmarks/planner.py` measures them."""

    flops: tuple[tuple[int, float], ...] = ((1, 400e12),)
    """Operations a second that a rank reaches in Newton-Schulz, by the short side of the matrix: points with rising
    sides, between which the logarithm of the side counts; beyond them the nearest point holds."""
    intra: float = 300e9
    """Bytes that a rank sends within its node, a second."""
    inter: float = 40e9
    """Bytes that a rank sends out of its node, a second."""
    node: int = 8
    """Ranks of a node."""
    latency: float = 0.0
    """Seconds that an exchange takes however little it carries."""
    overhead: float = 0.0
    """Seconds that a matrix takes beyond its products."""

    def rate(self, side: int) -> float:
        """Operations a second for matrices with this short side.

        >>> Cluster(((128, 50e9), (512, 100e9))).rate(256) / 1e9
        75.0
        """
        sides, rates = zip(*self.flops, strict=True)
        at = bisect.bisect_left(sides, side)
        if at == 0 or at == len(sides):
            return rates[min(at, len(sides) - 1)]
        part = math.log(side / sides[at - 1]) / math.log(sides[at] / sides[at - 1])
        return (1 - part) * rates[at - 1] + part * rates[at]


class Row(NamedTuple):
    """One scheme's figures."""

    scheme: str
    layout: str
    ours: bool
    sent_max: float
    """Bytes that the busiest rank sends, a step."""
    sent_mean: float
    """Bytes that a rank sends on average, a step."""
    flops_max: float
    """Newton-Schulz at the busiest rank, a step."""
    flops_mean: float
    """Newton-Schulz of a rank on average, a step."""
    over_mean: float
    """The busiest rank's load over the mean load."""
    over_least: float
    """The busiest rank's load over the least that is possible, with each matrix computed once by any rank."""
    state: float
    """Bytes of momentum and moments at the fullest rank."""
    scratch: float
    """Bytes of intermediates and buffers at the busiest rank."""
    compute: float
    """Seconds of the busiest rank's Newton-Schulz."""
    wire: float
    """Seconds of sending, at the busiest rank of each kind of group, and of its exchanges' latency."""

    @property
    def step(self) -> float:
        """Seconds, if nothing overlaps; overlapped, no less than the longer of the two."""
        return self.compute + self.wire


def rows(on: Setting, cluster: Cluster, schemes: Sequence[Scheme]) -> list[Row]:
    """The figures of those schemes that can be done on the mesh.

    A group that spans more than a node sends all at the rate between nodes.
    """
    tallies = [(scheme, scheme.tally(on)) for scheme in schemes]
    return [_row(scheme, tally, cluster, on.least) for scheme, tally in tallies if tally is not None]


def _row(scheme: Scheme, tally: Tally, cluster: Cluster, least: float) -> Row:
    sent, load, flops = tally.sent, tally.load, tally.flops
    ranks, busiest = len(load), max(load)
    near = [wire.sent for wire in tally.wires if wire.block <= cluster.node]
    far = [wire.sent for wire in tally.wires if wire.block > cluster.node]
    wire = _busiest(near) / cluster.intra + _busiest(far) / cluster.inter
    seconds = tally.weighted(lambda side, cost: cost.load / cluster.rate(side) + cluster.overhead)
    return Row(
        scheme=scheme.name,
        layout=scheme.layout,
        ours=scheme.ours,
        sent_max=max(sent),
        sent_mean=sum(sent) / ranks,
        flops_max=max(flops),
        flops_mean=sum(flops) / ranks,
        over_mean=busiest * ranks / sum(load),
        over_least=busiest / least,
        state=max(tally.state),
        scratch=tally.scratch,
        compute=max(seconds),
        wire=wire + tally.exchanges * cluster.latency,
    )


def _busiest(sent: Sequence[Sequence[float]]) -> float:
    """The most that a rank sends over all of some wires."""
    return max(map(sum, zip(*sent, strict=True)), default=0.0)


def table(on: Setting, cluster: Cluster, schemes: Sequence[Scheme]) -> str:
    """The report: what is planned, a line for each scheme, what the columns mean, and why a balance is what it is."""
    found = rows(on, cluster, schemes)
    lines = [*_heading(on, cluster), "", _line([name for name, _, _ in _COLUMNS], "scheme")]
    for title, ours in (("muonfx", True), ("other libraries, as their code has it", False)):
        group = [row for row in found if row.ours is ours]
        lines += ["-" * WIDTH, title] if group else []
        lines += [
            _line([show(getattr(row, field)) for _, field, show in _COLUMNS], f"  {row.scheme}", row.layout)
            for row in group
        ]
    lines += ["-" * WIDTH, "", *_KEY, ""]
    fitting = {row.scheme for row in found}
    lines += ["Schemes:"]
    lines += [f"  {scheme.name:<18} {scheme.about}" for scheme in schemes if scheme.name in fitting]
    left_out = [scheme.name for scheme in schemes if scheme.name not in fitting]
    if left_out:
        lines += _wrapped(f"Not on this mesh: {', '.join(left_out)}.")
    return "\n".join([*lines, "", *_why_uneven(on)])


def _heading(on: Setting, cluster: Cluster) -> list[str]:
    numel = sum(matrix.numel for matrix in on.matrices)
    dtype = str(on.dtype).removeprefix("torch.")
    muon = f"{len(on.matrices):,} matrices, {_count(numel)}, go to Muon"
    return [
        f"{on.model.name}: {_count(on.model.numel)} parameters; {muon}",
        f"shapes: {on.model.source}",
        f"mesh: {on.mesh}: {on.mesh.ranks:,} ranks, nodes of {cluster.node}",
        f"sent and multiplied in {dtype}; state of {on.state_size} bytes an element; "
        f"buckets of {on.bucket // 2**20} MiB",
        *_wrapped(
            f"a rank: {_rates(cluster)} TFLOP/s; sends {cluster.intra / 1e9:g} GB/s in its node, "
            f"{cluster.inter / 1e9:g} GB/s beyond{_delays(cluster)}"
        ),
    ]


def _rates(cluster: Cluster) -> str:
    if len(cluster.flops) == 1:
        return f"{cluster.flops[0][1] / 1e12:g}"
    return ", ".join(f"{rate / 1e12:g} at a side of {side:,}" for side, rate in cluster.flops)


def _delays(cluster: Cluster) -> str:
    if not cluster.latency and not cluster.overhead:
        return ""
    return f"; {cluster.latency * 1e6:g} us an exchange, {cluster.overhead * 1e6:g} us a matrix"


def _line(cells: Sequence[str], name: str, layout: str = "layout") -> str:
    return f"{name:<21}{layout:<11}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _why_uneven(on: Setting) -> list[str]:
    """The reason why no way to deal out the matrices comes near the mean, where none does."""
    mean, ranks, count = sum(on.loads) / on.mesh.ranks, on.mesh.ranks, len(on.matrices)
    least = on.least
    if least <= 1.05 * mean:
        return _wrapped(f"Dealt out over all ranks, matrices can at best come to {least / mean:.2f} of the mean.")
    because = (
        f"there are {count:,} matrices for {ranks:,} ranks, and some have none"
        if count < ranks
        else "one matrix is more than a rank's share"
        if max(on.loads) >= least
        else f"{count:,} matrices of these sizes do not go evenly into {ranks:,} ranks"
    )
    return _wrapped(
        f"Dealt out over all ranks, matrices can at best come to {least / mean:.2f} of the mean: {because}."
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _scaled(value: float, unit: str, digits: int = 3) -> str:
    """With a decimal prefix, three digits.

    >>> _scaled(1234567.0, "B"), _scaled(0.0, "B"), _scaled(0.0021, "s")
    ('1.23 MB', '0', '2.1 ms')
    """
    if value == 0:
        return "0"
    prefixes = {-6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
    rounded = float(f"{value:.{digits - 1}e}")
    power = max(power for power in prefixes if power == -6 or rounded >= 10.0**power)
    return f"{rounded / 10.0**power:.{digits}g} {prefixes[power]}{unit}"


def _bytes(value: float) -> str:
    return _scaled(value, "B")


def _operations(value: float) -> str:
    return _scaled(value, "F")


def _seconds(value: float) -> str:
    return _scaled(value, "s") if value < 1000 else f"{float(f'{value:.2e}'):,.0f} s"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 99.5 else f"{value:.0f}"


def _count(value: float) -> str:
    return f"{value / 1e9:.4g} billion" if value >= 1e9 else f"{value / 1e6:.4g} million"


_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("sent", "sent_max", _bytes),
    ("NS work", "flops_max", _operations),
    ("/mean", "over_mean", _ratio),
    ("/least", "over_least", _ratio),
    ("state", "state", _bytes),
    ("scratch", "scratch", _bytes),
    ("compute", "compute", _seconds),
    ("step", "step", _seconds),
)
_WIDTHS = (8, 8, 6, 7, 8, 8, 9, 10)

_KEY = (
    "sent      bytes a step from the busiest rank, averaging gradients and gathering weights aside",
    "NS work   floating-point operations of Newton-Schulz at the busiest rank",
    "/mean     its load (the time of that work) over the mean of all ranks: the balance",
    "/least    its load over the least that is possible with each matrix computed once, by any rank",
    "state     momentum, and Adam's moments of all other parameters, at the fullest rank",
    "scratch   Newton-Schulz's intermediates and the buffers of what is sent and received",
    "compute   seconds for the NS work;  step: with sending, if nothing overlaps",
)
