"""Plots by part: updates by layer, the memory of a state by dtype, and a plan over ranks."""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from muonfx import sharding
from muonfx.inspect.summary import LeafSummary, Summary, summary
from muonfx.internal.display import format_bytes
from muonfx.plot.axes import COLORS, axes_for
from muonfx.transforms.monitor import metrics
from muonfx.tree import PyTree

_ROW = 0.24
"""Height of one bar and its gap, in inches."""

_BY_ONE = (COLORS["blue"], "#4553b4")
_BY_ALL = ("#23877b", "#1b6b61")
"""Colours on which white text is legible; neighbouring segments alternate, so that their ends are visible."""

_MOST_NAMED_RANKS = 24
"""With more ranks, the bars are too narrow for text."""

_NAMED = 0.11
"""Smallest width of a segment, as a part of the axis, that is labelled with its parameter."""


def plot_update_rms(state: PyTree, *, ax: Axes | None = None) -> Axes:
    """Draw the root mean square of each parameter's last update, which `muonfx.monitor` has measured.

    Args:
        state: the state of a chain with one or more ``muonfx.monitor(..., ("rms",), by_leaf=True)``.
        ax: the axes to draw on; None: a new figure, whose height grows with the number of parameters.

    Returns:
        The axes, with a row for each parameter and a point for each measured "rms", on a logarithmic scale. Zeros are
        omitted. Each monitor has its own colour.

    Raises:
        ValueError: no monitor in the state measures "rms".

    >>> import torch
    >>> import muonfx as mfx
    >>> tx = mfx.chain(mfx.scale(0.5), mfx.monitor("updates", ("rms",), by_leaf=True))
    >>> params = {"up": torch.zeros(4, 2), "down": torch.zeros(2, 4)}
    >>> _, state = tx.update(mfx.tree.map(torch.ones_like, params), tx.init(params))
    >>> ax = mfx.plot.plot_update_rms(state)
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['down', 'up']
    """
    rms_of = {key: float(value) for key, value in metrics(state).items() if key.rpartition("/")[2] == "rms"}
    if not rms_of:
        raise ValueError(
            'the state has no "rms" of a monitor; put monitor("updates", ("rms",), by_leaf=True) after the transform '
            "to measure, last in the chain for the size of the steps"
        )
    monitors: dict[str, dict[str, float]] = {}
    for key, value in rms_of.items():  # "updates/blocks.0.weight/rms"
        monitor, _, leaf = key.rpartition("/")[0].partition("/")
        monitors.setdefault(monitor, {})[leaf or monitor] = value
    rows: list[str] = []
    for values in monitors.values():
        rows += [row for row in values if row not in rows]
    with axes_for(ax, 0.75 + _ROW * len(rows)) as axes:
        for (monitor, values), color in zip(monitors.items(), cycle(COLORS.values()), strict=False):
            positive = {row: value for row, value in values.items() if value > 0}
            heights = [rows.index(row) for row in positive]
            axes.plot(list(positive.values()), heights, linestyle="none", marker="o", color=color, label=monitor)
        axes.set_xscale("log")
        # Labels of all nine minor ticks of a decade would overlap.
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.set_yticks(range(len(rows)), rows)
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="root mean square of an element")
        if len(monitors) > 1:
            _legend_above(axes)
    return axes


def plot_state_memory(what: PyTree | Summary, *, ax: Axes | None = None) -> Axes:
    """Draw the memory of an optimizer state, with a bar for each part of the state, split by dtype.

    Args:
        what: a state, an optimizer, a model, or a pair of a transform and its state, as in `muonfx.summary`; or the
            result of `muonfx.summary`.
        ax: the axes to draw on; None: a new figure.

    Returns:
        The axes, with a bar for each part of the state. The bar is split by dtype, and the text at its end is the
        number of bytes. For a sharded state, these are the bytes of this rank.

    Raises:
        ValueError: the state has no bytes.

    >>> import torch
    >>> import muonfx as mfx
    >>> ax = mfx.plot.plot_state_memory(mfx.scale_by_adam().init({"w": torch.zeros(256, 4)}))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['count', 'mu.w', 'nu.w']
    """
    table = what if isinstance(what, Summary) else summary(what)
    leaves_of_bar = _leaves_of_bars([leaf for leaf in table.leaves if leaf.nbytes])
    if not leaves_of_bar:
        raise ValueError("the state has no tensor with bytes on this rank; there is nothing to draw")
    totals = [sum([leaf.nbytes for leaf in leaves]) for leaves in leaves_of_bar.values()]
    scale, unit = _unit_of(max(totals), 1024, ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"])
    count = len(leaves_of_bar)
    with axes_for(ax, 0.75 + _ROW * 1.4 * count) as axes:
        starts = [0.0] * count
        for (dtype, nbytes), color in zip(table.by_dtype().items(), cycle(COLORS.values()), strict=False):
            widths = [_bytes_in(leaves, dtype) / scale for leaves in leaves_of_bar.values()]
            label = f"{dtype}, {format_bytes(nbytes)}"
            axes.barh(range(count), widths, 0.7, starts, color=color, label=label)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for row, total in enumerate(totals):
            end = (total / scale, row)
            axes.annotate(format_bytes(total), end, xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(count), list(leaves_of_bar))
        axes.set(ylim=(count - 0.5, -0.5), xlim=(0, max(totals) / scale * 1.18))
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{unit}, {format_bytes(table.nbytes)} in all")
        _legend_above(axes)
    return axes


def _unit_of(largest: float, base: int, units: list[str]) -> tuple[int, str]:
    """Return the size and the name of the greatest unit that is not above a number.

    ``units`` are the names of units, each ``base`` times the one before it, of which the first has the size 1.

    >>> _unit_of(5000, 1024, ["bytes", "KiB", "MiB"])
    (1024, 'KiB')
    """
    size = 1
    for name in units[:-1]:
        if largest < size * base:
            return size, name
        size *= base
    return size, units[-1]


def _bytes_in(leaves: list[LeafSummary], dtype: str) -> int:
    return sum([leaf.nbytes for leaf in leaves if leaf.dtype == dtype])


def _leaves_of_bars(leaves: list[LeafSummary]) -> dict[str, list[LeafSummary]]:
    """Group the leaves of a state by bar: return a dict from the label of a bar, such as "muon", to its leaves.

    The paths ("tx", "adamw", "mu") and ("tx", "muon", "trace") differ at the second entry: the bars are "adamw.mu" and
    "muon.trace". With ("tx", "adamw", "nu") too, the first bar is "adamw".
    """
    # The entries that all paths share are no part of a label.
    depth = 0
    while len({leaf.path[: depth + 1] for leaf in leaves}) == 1 and all(len(leaf.path) > depth + 1 for leaf in leaves):
        depth += 1
    leaves_of_prefix: dict[tuple[str, ...], list[LeafSummary]] = {}
    for leaf in leaves:
        leaves_of_prefix.setdefault(leaf.path[: depth + 1], []).append(leaf)
    leaves_of_bar: dict[str, list[LeafSummary]] = {}
    for group in leaves_of_prefix.values():
        path = group[0].path
        end = depth + 1
        # Extend "adamw" to "adamw.scale_by_adam" if that is its only child.
        while len(path) > end and all(leaf.path[: end + 1] == path[: end + 1] for leaf in group):
            end += 1
        leaves_of_bar[".".join(path[depth:end]) or "-"] = group
    return leaves_of_bar


def _legend_above(ax: Axes) -> None:
    """Add a legend in one line above the axes, each name in its own colour."""
    handles, _ = ax.get_legend_handles_labels()
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=max(len(handles), 1),
        frameon=False,
        labelcolor="linecolor",
        borderaxespad=0.2,
        borderpad=0,
        handlelength=1.2,
    )


def plot_plan(plan: sharding.Plan, *, ax: Axes | None = None) -> Axes:
    """Draw which rank orthogonalizes which matrices, and how many bytes each rank sends, under a sharding plan.

    Args:
        plan: the result of `muonfx.sharding.plan_for`, which assigns each matrix to a rank.
        ax: the axes to draw on; None: a new figure, whose height grows with the number of ranks.

    Returns:
        The axes. Each rank has a bar, with a segment for each parameter that it orthogonalizes. The width of a segment
        is the number of operations in a step. Blue parameters are computed by one rank, green ones by every rank. The
        text at the end of a bar is the number of bytes that the rank sends. A dotted line marks the mean.

    Raises:
        TypeError: ``plan`` is not a plan.
        ValueError: the plan has no matrices.

    >>> import torch
    >>> import muonfx as mfx
    >>> params = {"up": torch.zeros(64, 16), "down": torch.zeros(16, 64)}
    >>> ax = mfx.plot.plot_plan(mfx.sharding.plan_for(mfx.muon(2e-3), mfx.sharding.zero(params, 2)))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['rank 0', 'rank 1']
    """
    if not isinstance(plan, sharding.Plan):
        raise TypeError(f"plan must be a result of muonfx.sharding.plan_for(tx, layout), found {type(plan).__name__}")
    if not any(plan.flops):
        raise ValueError("the plan has no matrices to compute: no transform of the chain needs whole matrices")
    most = max(plan.flops)
    thousands, unit = _unit_of(most / 1000, 1000, ["kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"])
    scale = 1000.0 * thousands
    edge = 1.25 * most / scale
    has_labels = plan.size <= _MOST_NAMED_RANKS
    with axes_for(ax, 0.8 + 0.3 * min(plan.size, _MOST_NAMED_RANKS)) as axes:
        ends = [0.0] * plan.size
        counts = [0] * plan.size
        for segment in _segments(plan):
            rank = segment.rank
            width = segment.flops / scale
            colors = _BY_ALL if segment.by_all else _BY_ONE
            axes.barh(rank, width, 0.7, ends[rank], color=colors[counts[rank] % 2], linewidth=0)
            if segment.flops >= _NAMED * most and has_labels:
                middle = ends[rank] + width / 2
                text = _fitting(segment.name, segment.flops / most)
                axes.text(middle, rank, text, color="white", ha="center", va="center", fontsize=7.5)
            ends[rank] += width
            counts[rank] += 1
        axes.axvline(sum(plan.flops) / plan.size / scale, color=COLORS["gray"], linestyle=":", linewidth=1.2)
        if has_labels:
            for rank, nbytes in enumerate(plan.sent):
                text = f"sends {format_bytes(nbytes)}" if nbytes else "sends nothing"
                axes.text(edge, rank, text, ha="right", va="center")
            axes.set_yticks(range(plan.size), [f"rank {rank}" for rank in range(plan.size)])
        axes.set(ylim=(plan.size - 0.5, -0.5), xlim=(0, edge))
        axes.grid(visible=False, axis="y")
        dotted = f"(dotted: the mean; the most is {plan.balance:.2f} of it)"
        axes.set_xlabel(f"Newton-Schulz of a step, {unit} {dotted}")
    return axes


class _Segment(NamedTuple):
    """A segment of a bar of `plot_plan`: a parameter that a rank orthogonalizes."""

    name: str
    rank: int
    flops: float
    by_all: bool
    """Whether every rank computes the parameter, so that each bar has this segment."""


def _segments(plan: sharding.Plan) -> list[_Segment]:
    """Return the segments of the bars, in the order in which the parameters are computed."""
    segments: list[_Segment] = []
    for run in plan.runs:
        for shard in run.shards:
            by_all = shard.owner is None
            ranks = range(plan.size) if shard.owner is None else (shard.owner,)
            segments += [_Segment(shard.name, rank, shard.cost, by_all) for rank in ranks]
    return segments


def _fitting(name: str, part: float) -> str:
    """Shorten a parameter name from the left to fit a segment of a bar: "...q.weight".

    ``part`` is the width of the segment as a fraction of the axis, at least `_NAMED`.
    """
    most_characters = int(part * 62)  # an axis is about 62 characters wide
    if len(name) <= most_characters:
        return name
    return "..." + name[3 - most_characters :]
