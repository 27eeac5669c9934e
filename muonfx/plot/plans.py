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
    """Draw which rank computes which matrices under a plan, and how many bytes each rank sends.

    Args:
        plan: the result of `muonfx.sharding.plan_for`.
        ax: the axes to draw on; None: a new figure, whose height grows with the ranks.

    Returns:
        The axes. Each rank has a bar, with a segment for each parameter that it computes. The width of a segment is the
        number of operations in a step. A blue parameter is computed by one rank, a green parameter by every rank. The
        text at the end of a bar is the number of bytes that the rank sends. A dotted line marks the mean.

    Raises:
        TypeError: ``plan`` is not a plan.
        ValueError: the plan has no matrices.

    >>> import torch
    >>> import muonfx as mfx
    >>> params = {"up": torch.zeros(64, 16), "down": torch.zeros(16, 64)}
    >>> ax = mfx.plot.plot_plan(mfx.sharding.plan_for(mfx.muon(0.1), mfx.sharding.zero(params, 2)))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['rank 0', 'rank 1']
    """
    if not isinstance(plan, sharding.Plan):
        raise TypeError(f"plan must be a result of muonfx.sharding.plan_for(tx, layout), found {type(plan).__name__}")
    if not any(plan.flops):
        raise ValueError("the plan has no matrices to compute: no transform of the chain needs whole matrices")
    most = max(plan.flops)
    units = {15: "PFLOP", 12: "TFLOP", 9: "GFLOP", 6: "MFLOP", 3: "kFLOP"}
    power = next((power for power in units if most >= 10**power), 3)
    scale = 10.0**power
    edge = 1.25 * most / scale
    has_labels = plan.size <= 24
    with axes_for(ax, 0.8 + 0.3 * min(plan.size, 24)) as axes:
        ends = [0.0] * plan.size
        counts = [0] * plan.size
        for name, rank, flops, by_all in _segments(plan):
            width = flops / scale
            color = (_BY_ALL if by_all else _BY_ONE)[counts[rank] % 2]
            axes.barh(rank, width, 0.7, ends[rank], color=color, linewidth=0)
            if flops >= _NAMED * most and has_labels:
                middle, text = ends[rank] + width / 2, _fitting(name, flops / most)
                axes.text(middle, rank, text, color="white", ha="center", va="center", fontsize=7.5)
            ends[rank] += width
            counts[rank] += 1
        for rank, nbytes in enumerate(plan.sent if has_labels else ()):
            text = f"sends {format_bytes(nbytes)}" if nbytes else "sends nothing"
            axes.text(edge, rank, text, ha="right", va="center")
        axes.axvline(sum(plan.flops) / plan.size / scale, color=COLORS["gray"], linestyle=":", linewidth=1.2)
        if has_labels:
            axes.set_yticks(range(plan.size), [f"rank {rank}" for rank in range(plan.size)])
        axes.set(ylim=(plan.size - 0.5, -0.5), xlim=(0, edge))
        axes.grid(visible=False, axis="y")
        dotted = f"(dotted: the mean; the most is {plan.balance:.2f} of it)"
        axes.set_xlabel(f"Newton-Schulz of a step, {units[power]} {dotted}")
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
