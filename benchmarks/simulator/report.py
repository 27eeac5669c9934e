"""The report of a simulation: the figures of each scheme, as a table with explanations."""

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
"""Characters per line of a report, which a page of the documentation shows without scrolling."""


class Cluster(NamedTuple):
    """Rates and delays of a cluster, the inputs of predicted times; `benchmarks/planner.py` measures them."""

    flops: tuple[tuple[int, float], ...] = ((1, 400e12),)
    """Operations per second of a rank in Newton-Schulz, as points (short side of the matrix, rate) with rising sides.
    Between points, the rate is interpolated in the logarithm of the side; outside, the nearest point is used."""
    intra: float = 300e9
    """Bytes per second that a rank sends within its node."""
    inter: float = 40e9
    """Bytes per second that a rank sends to other nodes."""
    node: int = 8
    """Ranks per node."""
    latency: float = 0.0
    """Fixed seconds per exchange."""
    overhead: float = 0.0
    """Fixed seconds per matrix."""

    def rate(self, side: int) -> float:
        """Return the operations per second for matrices with this short side.

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
    """Bytes per step sent by the busiest rank."""
    sent_mean: float
    """Bytes per step sent by a rank on average."""
    flops_max: float
    """Operations of Newton-Schulz per step on the busiest rank."""
    flops_mean: float
    """Operations of Newton-Schulz per step on a rank on average."""
    over_mean: float
    """Load of the busiest rank over the mean load."""
    over_least: float
    """Load of the busiest rank over the minimum with each matrix computed once."""
    state: float
    """Bytes of momentum and moments, maximum over ranks."""
    scratch: float
    """Bytes of intermediates and buffers, maximum over ranks."""
    compute: float
    """Seconds of Newton-Schulz on the busiest rank."""
    wire: float
    """Seconds of communication: sending on the busiest rank of each kind of group, and latency of exchanges."""

    @property
    def step(self) -> float:
        """Seconds per step without overlap. With full overlap, it is the longer of `compute` and communication."""
        return self.compute + self.wire


def rows(on: Setting, cluster: Cluster, schemes: Sequence[Scheme]) -> list[Row]:
    """Return the figures of the schemes that the mesh supports.

    A group that spans several nodes sends all bytes at the rate between nodes.
    """
    supported: list[Row] = []
    for scheme in schemes:
        tally = scheme.tally(on)
        if tally is not None:
            supported.append(_row(scheme, tally, cluster, on.least))
    return supported


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
    """Return the maximum over ranks of the bytes sent over all wires."""
    return max(map(sum, zip(*sent, strict=True)), default=0.0)


def table(on: Setting, cluster: Cluster, schemes: Sequence[Scheme]) -> str:
    """Return the report: the setting, a line for each scheme, the meaning of the columns, and the best balance."""
    found = rows(on, cluster, schemes)
    lines = [*_heading(on, cluster), "", _line([name for name, _, _ in _COLUMNS], "scheme")]
    for title, ours in (("muonfx", True), ("other libraries", False)):
        rows_of_title = [row for row in found if row.ours is ours]
        if rows_of_title:
            lines += ["-" * WIDTH, title]
        for row in rows_of_title:
            cells = [show(getattr(row, field)) for _, field, show in _COLUMNS]
            lines.append(_line(cells, f"  {row.scheme}", row.layout))
    lines += ["-" * WIDTH, "", *_KEY, ""]
    fitting = {row.scheme for row in found}
    lines += ["Schemes:"]
    lines += [f"  {scheme.name:<18} {scheme.about}" for scheme in schemes if scheme.name in fitting]
    left_out = [scheme.name for scheme in schemes if scheme.name not in fitting]
    if left_out:
        lines += _wrapped(f"Not on this mesh: {', '.join(left_out)}.")
    return "\n".join([*lines, "", *_best_balance(on)])


def _heading(on: Setting, cluster: Cluster) -> list[str]:
    numel = sum(matrix.numel for matrix in on.matrices)
    dtype = str(on.dtype).removeprefix("torch.")
    muon = f"{_count(numel)} of them in {len(on.matrices):,} matrices for Muon"
    return [
        f"{on.model.name}: {_count(on.model.numel)} parameters, {muon}",
        f"shapes: {on.model.source}",
        f"mesh: {on.mesh}: {on.mesh.ranks:,} ranks, nodes of {cluster.node}",
        f"messages and products in {dtype}; state with {on.state_size} bytes per element; "
        f"buckets of {on.bucket // 2**20} MiB",
        *_wrapped(
            f"each rank: {_rates(cluster)} TFLOP/s; {cluster.intra / 1e9:g} GB/s within a node, "
            f"{cluster.inter / 1e9:g} GB/s between nodes{_delays(cluster)}"
        ),
    ]


def _rates(cluster: Cluster) -> str:
    if len(cluster.flops) == 1:
        return f"{cluster.flops[0][1] / 1e12:g}"
    return ", ".join(f"{rate / 1e12:g} at a side of {side:,}" for side, rate in cluster.flops)


def _delays(cluster: Cluster) -> str:
    if not cluster.latency and not cluster.overhead:
        return ""
    return f"; {cluster.latency * 1e6:g} us per exchange, {cluster.overhead * 1e6:g} us per matrix"


def _line(cells: Sequence[str], name: str, layout: str = "layout") -> str:
    return f"{name:<21}{layout:<11}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)
    )


def _best_balance(on: Setting) -> list[str]:
    """Return the best possible balance and, if it is uneven, the reason."""
    mean, ranks, count = sum(on.loads) / on.mesh.ranks, on.mesh.ranks, len(on.matrices)
    least = on.least
    if least <= 1.05 * mean:
        return _wrapped(
            f"The best assignment of whole matrices to all ranks has /mean = {least / mean:.2f}."
        )
    because = (
        f"{count:,} matrices leave some of {ranks:,} ranks without work"
        if count < ranks
        else "one matrix costs more than the mean of a rank"
        if max(on.loads) >= least
        else f"{count:,} matrices of these sizes cannot be distributed evenly over {ranks:,} ranks"
    )
    return _wrapped(
        f"The best assignment of whole matrices to all ranks has /mean = {least / mean:.2f}: {because}."
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _scaled(value: float, unit: str, digits: int = 3) -> str:
    """Format a value with a decimal prefix and three digits.

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
    "sent      bytes per step sent by the busiest rank, without averaging gradients and gathering weights",
    "NS work   floating-point operations of Newton-Schulz on the busiest rank",
    "/mean     its load (the time of that work) over the mean of all ranks: the balance",
    "/least    its load over the minimum possible if each matrix is computed once",
    "state     momentum and Adam's moments, maximum over ranks",
    "scratch   intermediates of Newton-Schulz and buffers of messages, maximum over ranks; not the updates",
    "compute   time of the NS work;  step: compute and communication without overlap",
)
