"""Plot of a plan over ranks: the matrices that each rank computes, and the bytes that it sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muonfx import sharding
from muonfx.plot.axes import COLORS, axes_for
from muonfx.tree.display import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_plan"]

_BY_ONE = (COLORS["blue"], "#4553b4")
_BY_ALL = ("#23877b", "#1b6b61")
"""Fills on which white text is legible; neighbouring shares alternate, so that their ends are visible."""

_NAMED = 0.11
"""Smallest part of the axis for which a share is labelled with its parameter."""


def plot_plan(plan: sharding.Plan, *, ax: Axes | None = None) -> Axes:
    """Draw who computes which matrices under a plan, and how many bytes each rank sends.

    Args:
        plan: what `muonfx.sharding.plan_for` returns.
        ax: where to draw; None: a new figure, as high as there are ranks.

    Returns:
        The axes: a bar for each rank, cut into the shares of parameters that it computes, as wide as their operations
        in a step. Blue stands for what one rank computes for all, green for what every rank computes. The bytes that
        the rank sends stand at its end, and a dotted line where all would end if the work were dealt out evenly.

    Raises:
        TypeError: what is given is no plan.
        ValueError: the plan has no matrices.

    >>> import torch
    >>> import muonfx as mfx
    >>> params = {"up": torch.zeros(64, 16), "down": torch.zeros(16, 64)}
    >>> ax = mfx.plot.plot_plan(mfx.sharding.plan_for(mfx.muon(0.1), mfx.sharding.zero(params, 2)))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['rank 0', 'rank 1']
    """
    if not isinstance(plan, sharding.Plan):
        raise TypeError(f"plan must be what muonfx.sharding.plan_for(tx, layout) returns, found {type(plan).__name__}")
    if not any(plan.flops):
        raise ValueError("the plan has no matrices to compute: no transform of the chain needs whole matrices")
    most = max(plan.flops)
    power, unit = next(
        ((p, u) for p, u in ((15, "PFLOP"), (12, "TFLOP"), (9, "GFLOP"), (6, "MFLOP")) if most >= 10**p), (3, "kFLOP")
    )
    scale = 10.0**power
    with axes_for(ax, 0.8 + 0.3 * min(plan.size, 24)) as axes:
        ends = [0.0] * plan.size
        counts = [0] * plan.size
        for name, rank, flops, by_all in _segments(plan):
            width = flops / scale
            color = (_BY_ALL if by_all else _BY_ONE)[counts[rank] % 2]
            axes.barh(rank, width, 0.7, ends[rank], color=color, linewidth=0)
            if flops >= _NAMED * most and plan.size <= 24:
                axes.text(
                    ends[rank] + width / 2,
                    rank,
                    _fitting(name, flops / most),
                    color="white",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                )
            ends[rank] += width
            counts[rank] += 1
        edge = 1.25 * most / scale
        for rank, nbytes in enumerate(plan.sent if plan.size <= 24 else ()):
            axes.text(
                edge, rank, f"sends {format_bytes(nbytes)}" if nbytes else "sends nothing", ha="right", va="center"
            )
        mean = sum(plan.flops) / plan.size / scale
        axes.axvline(mean, color=COLORS["gray"], linestyle=":", linewidth=1.2)
        if plan.size <= 24:
            axes.set_yticks(range(plan.size), [f"rank {rank}" for rank in range(plan.size)])
        axes.set_ylim(plan.size - 0.5, -0.5)
        axes.set_xlim(0, edge)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"Newton-Schulz of a step, {unit} (dotted: the mean; the most is {plan.balance:.2f} of it)")
    return axes


def _segments(plan: sharding.Plan) -> list[tuple[str, int, float, bool]]:
    """Return parameter, rank and operations of each share; True if every rank computes it."""
    found: list[tuple[str, int, float, bool]] = []
    for run in plan.runs:
        for share in run.shares:
            ranks = range(plan.size) if share.owner is None else (share.owner,)
            found += [(share.name, rank, share.cost, share.owner is None) for rank in ranks]
    return found


def _fitting(name: str, part: float) -> str:
    """Shorten a name to the width of a segment, keeping its end, which distinguishes layers."""
    room = max(3, int(part * 62))
    return name if len(name) <= room else "..." + name[-(room - 3) :] if room > 5 else name[-room:]
