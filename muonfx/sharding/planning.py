"""The plan of a whole chain, to be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from muonfx.core import Transform
from muonfx.polar import compute_dtype
from muonfx.recorded import bare
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.cost import runs_of
from muonfx.sharding.plan.plan import RunPlan, Settings, plan_run
from muonfx.tree import PyTree

__all__ = ["Plan", "plan_for"]


@dataclass(frozen=True)
class Plan:
    """Who computes which matrices of a chain, by which route, and what is sent; prints as a table.

    Attributes:
        runs: one plan for each run of neighbouring transforms that need whole matrices.
        size: how many ranks there are.

    >>> import muonfx as mfx
    >>> layout = mfx.sharding.zero({"w": torch.zeros(64, 64)}, 2, partition="flat")
    >>> plan = plan_for(mfx.muon(0.1, dtype=torch.float32), layout)
    >>> plan.owners(), sum(plan.sent)
    ({'w': [0]}, 16384)
    """

    runs: tuple[RunPlan, ...]
    size: int

    @property
    def flops(self) -> list[float]:
        """Floating-point operations of each rank in a step; of the matrices alone."""
        return [sum(loads) for loads in zip(*(run.flops for run in self.runs), strict=True)] or [0.0] * self.size

    @property
    def sent(self) -> list[int]:
        """Bytes that each rank sends in a step for matrices, there and back."""
        return [sum(sent) for sent in zip(*(run.sent for run in self.runs), strict=True)] or [0] * self.size

    @property
    def balance(self) -> float:
        """The most that a rank computes over the mean; 1 is perfect."""
        flops = self.flops
        return max(flops) * self.size / sum(flops) if sum(flops) else 1.0

    def owners(self) -> dict[str, list[int | None]]:
        """The owners of each parameter's matrices; None stands for all ranks."""
        found: dict[str, list[int | None]] = {}
        for run in self.runs:
            for share in run.shares + run.spread:
                found.setdefault(share.name, []).append(share.owner)
        return found

    def explain(self) -> str:
        """A table: one line for each share of each parameter, then what each rank computes and sends."""
        lines: list[str] = []
        for run in self.runs:
            lines.append("run of " + ", ".join(name for name, _ in run.run) + f", {len(run.buckets)} buckets")
            rows = [("parameter", "matrices", "owner", "route", "GFLOP", "KiB sent", "why")]
            for share in run.shares + run.spread:
                rows.append(
                    (
                        share.name,
                        " x ".join(map(str, share.shape)),
                        "each" if share.route == "gram" else "all" if share.owner is None else str(share.owner),
                        share.route,
                        f"{share.cost / 1e9:.4g}",
                        f"{sum(run.bytes_of(share)) / 1024:.4g}",
                        share.reason,
                    )
                )
            lines += _table(rows)
        rows = [("rank", "GFLOP", "KiB sent")]
        rows += [
            (str(rank), f"{f / 1e9:.4g}", f"{b / 1024:.4g}")
            for rank, (f, b) in enumerate(zip(self.flops, self.sent, strict=True))
        ]
        lines += ["", *_table(rows), "", f"balance: the most that a rank computes is {self.balance:.3f} of the mean"]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines with columns as wide as they must be; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = {place for place, title in enumerate(rows[0]) if title in ("owner", "rank", "GFLOP", "KiB sent")}

    def cell(text: str, width: int, place: int) -> str:
        return text.rjust(width) if place in numbers else text.ljust(width)

    return ["  ".join(cell(t, w, i) for i, (t, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def plan_for(
    tx: Transform,
    layout: Layout,
    params: PyTree = None,
    *,
    device: torch.device | str = "cpu",
    compute: torch.dtype | None = None,
    **settings: Any,
) -> Plan:
    """Plan a chain under a layout, on shapes alone and without a word to other ranks.

    Args:
        tx: the transform, sharded or not.
        layout: who holds what; a pretended one, for any number of ranks, will do.
        params: for a layout that has not met parameters.
        device: where it will run; it need not be here if `compute` is given.
        compute: what a dtype of "auto" stands for; None: what is fastest on the device, found out on this machine.
        **settings: as `sharded` takes them.

    >>> import muonfx as mfx
    >>> layout = mfx.sharding.zero({"w": torch.zeros(64, 64), "v": torch.zeros(64, 32)}, 2)
    >>> plan_for(mfx.muon(0.1), layout).owners()
    {'v': [1], 'w': [0]}
    """
    if params is not None:
        layout = layout.of(params)
    device = torch.device(device)
    compute = compute_dtype(torch.float32, device) if compute is None else compute
    given = Settings(**settings)
    runs = [plan_run(run, names, layout, device, given, compute) for run, names in runs_of(bare(tx), layout.meta())]
    return Plan(tuple(runs), layout.size)
