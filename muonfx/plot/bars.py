"""Plots by part: updates by layer, the memory of a state by dtype, and a plan over ranks."""

from __future__ import annotations

from collections import Counter
from itertools import chain, cycle

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

_THICKNESS = 0.7
"""Height of a bar of a state or a rank, as a part of its row."""

_WITH_TEXT = 1.18
"""Width of the axis over the longest bar, with room for a text such as "1.50 MiB" at its end."""

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
    rms_by_monitor = _rms_by_monitor(state)
    if not rms_by_monitor:
        raise ValueError(
            'the state has no "rms" of a monitor; put monitor("updates", ("rms",), by_leaf=True) after the transform '
            "to measure, last in the chain for the size of the steps"
        )
    row_of: dict[str, int] = {}
    for rms_of in rms_by_monitor.values():
        for name in rms_of:
            row_of.setdefault(name, len(row_of))
    with axes_for(ax, 0.75 + _ROW * len(row_of)) as axes:
        for (monitor, rms_of), color in zip(
            rms_by_monitor.items(), cycle(COLORS.values()), strict=False
        ):
            values: list[float] = []
            rows: list[int] = []
            for name, rms in rms_of.items():
                if rms > 0:  # the axis is logarithmic
                    values.append(rms)
                    rows.append(row_of[name])
            axes.plot(values, rows, linestyle="none", marker="o", color=color, label=monitor)
        axes.set_xscale("log")
        # Labels of all nine minor ticks of a decade would overlap.
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.set_yticks(range(len(row_of)), list(row_of))
        axes.set(ylim=(len(row_of) - 0.5, -0.5), xlabel="root mean square of an element")
        if len(rms_by_monitor) > 1:
            _legend_above(axes)
    return axes


def _rms_by_monitor(state: PyTree) -> dict[str, dict[str, float]]:
    """Return a dict from the name of each monitor in a state to the "rms" of each of its parameters.

    The metric "updates/blocks.0.weight/rms" gives ``{"updates": {"blocks.0.weight": 0.1}}``. A metric of all parameters
    together, such as "updates/rms", has the name of the monitor in place of a parameter.
    """
    rms_by_monitor: dict[str, dict[str, float]] = {}
    for key, value in metrics(state).items():  # "updates/blocks.0.weight/rms"
        path, _, metric = key.rpartition("/")  # "updates/blocks.0.weight", "rms"
        if metric == "rms":
            # "updates", "blocks.0.weight"; the name may be ""
            monitor, _, name = path.partition("/")
            rms_by_monitor.setdefault(monitor, {})[name or monitor] = float(value)
    return rms_by_monitor


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
    table = what
    if not isinstance(table, Summary):
        table = summary(what)
    bars = _bars([leaf for leaf in table.leaves if leaf.nbytes])
    if not bars:
        raise ValueError(
            "the state has no tensor with bytes on this rank; there is nothing to draw"
        )
    totals = [bytes_of_dtype.total() for bytes_of_dtype in bars.values()]
    largest = max(totals)
    scale, unit = _unit_of(largest, 1024, ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"])
    with axes_for(ax, 0.75 + _ROW * 1.4 * len(bars)) as axes:
        _draw_dtypes(axes, table, bars, scale)
        for row, total in enumerate(totals):
            end = (total / scale, row)
            axes.annotate(
                format_bytes(total), end, xytext=(4, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks(range(len(bars)), list(bars))
        axes.set_ylim(len(bars) - 0.5, -0.5)  # the first bar is at the top
        axes.set_xlim(0, largest / scale * _WITH_TEXT)
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
        if largest < size * base:  # the next unit is above the number
            return size, name
        size *= base
    return size, units[-1]  # no next unit: the number may be large in it


def _bars(leaves: list[LeafSummary]) -> dict[str, Counter[str]]:
    """Group the leaves of a state by bar: return ``{"adamw": {"float32": 8192}, "muon.trace": {"bfloat16": 1024}}``.

    These are bars with the bytes of each dtype. The leaves have the paths ("tx", "adamw", "mu"), ("tx", "adamw", "nu")
    and ("tx", "muon", "trace"), which differ at the second entry. The label of a bar is what its paths share from there
    on.
    """
    if not leaves:
        return {}
    depth = _depth_of_bars(leaves)  # 1: "tx" is no part of a label
    # The keys are the first entries of paths that differ, such as ("tx", "adamw").
    groups: dict[tuple[str, ...], list[LeafSummary]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.path[: depth + 1], []).append(leaf)
    # The label has all entries that the paths of a bar share, without the entries that all bars share.
    bars: dict[str, Counter[str]] = {}
    for group in groups.values():
        label = ".".join(_shared_path(group)[depth:]) or "-"
        bars[label] = Counter(Summary(tuple(group)).by_dtype())
    return bars


def _depth_of_bars(leaves: list[LeafSummary]) -> int:
    """Return how many first entries of the paths belong to no label of a bar: those that all paths share.

    It is 1 for ("tx", "a") and ("tx", "b"). It is also 1 for a single leaf ("tx", "a"), whose label needs an entry.
    """
    paths = [leaf.path for leaf in leaves]
    shared_path = _shared_path(leaves)
    if shared_path in paths:  # such as a single leaf
        shared_path = shared_path[:-1]
    return len(shared_path)


def _shared_path(leaves: list[LeafSummary]) -> tuple[str, ...]:
    """Return the entries with which the paths of all leaves begin: ("a",) for ("a", "b") and ("a", "c")."""
    shared = leaves[0].path
    for leaf in leaves:
        # Remove last entries until the path of this leaf begins with the others.
        while leaf.path[: len(shared)] != shared:  # ends at the latest with no entry
            shared = shared[:-1]
    return shared


def _legend_above(ax: Axes) -> None:
    """Add a legend in one line above the axes, each name in its own colour.

    There it covers no bar, however long the bars are.
    """
    handles, _ = ax.get_legend_handles_labels()
    # The lower left corner of the legend is at (0, 1) of the axes, their upper left corner.
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


def _draw_dtypes(axes: Axes, table: Summary, bars: dict[str, Counter[str]], scale: float) -> None:
    """Draw the segments of all bars, one dtype after the other, with an entry of the legend for each dtype.

    ``bars`` has the bytes by dtype for each bar, and ``table`` the bytes of all bars together. ``scale`` is the number
    of bytes in the unit of the axis.
    """
    ends = [0.0] * len(bars)  # of the segments that are drawn, in each row
    colors = cycle(COLORS.values())
    for dtype, nbytes in table.by_dtype().items():
        widths = [bytes_of_dtype[dtype] / scale for bytes_of_dtype in bars.values()]
        label = f"{dtype}, {format_bytes(nbytes)}"
        axes.barh(range(len(bars)), widths, _THICKNESS, ends, color=next(colors), label=label)
        for row, width in enumerate(widths):  # the next segments begin there
            ends[row] += width


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
        ValueError: the plan has no matrices.

    >>> import torch
    >>> import muonfx as mfx
    >>> params = {"up": torch.zeros(64, 16), "down": torch.zeros(16, 64)}
    >>> ax = mfx.plot.plot_plan(mfx.sharding.plan_for(mfx.muon(2e-3), mfx.sharding.zero(params, 2)))
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['rank 0', 'rank 1']
    """
    if not any(plan.flops):
        raise ValueError(
            "the plan has no matrices to compute: no transform of the chain needs whole matrices"
        )
    most = max(plan.flops)
    thousands, unit = _unit_of(most / 1000, 1000, ["kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"])
    scale = 1000.0 * thousands
    edge = 1.25 * most / scale  # of the x axis, with room for the text of the bytes
    ranks = range(plan.size)
    has_labels = plan.size <= _MOST_NAMED_RANKS
    with axes_for(ax, 0.8 + 0.3 * min(plan.size, _MOST_NAMED_RANKS)) as axes:
        for rank in ranks:
            _draw_bar(axes, plan, rank, scale, has_labels)
        mean = sum(plan.flops) / plan.size
        axes.axvline(mean / scale, color=COLORS["gray"], linestyle=":", linewidth=1.2)
        if has_labels:
            for rank, nbytes in enumerate(plan.sent):
                text = "sends nothing"
                if nbytes:
                    text = f"sends {format_bytes(nbytes)}"
                axes.text(edge, rank, text, ha="right", va="center")
            axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
        axes.set(ylim=(plan.size - 0.5, -0.5), xlim=(0, edge))
        axes.grid(visible=False, axis="y")
        dotted = f"(dotted: the mean; the most is {plan.balance:.2f} of it)"
        axes.set_xlabel(f"Newton-Schulz of a step, {unit} {dotted}")
    return axes


def _draw_bar(axes: Axes, plan: sharding.Plan, rank: int, scale: float, has_labels: bool) -> None:
    """Draw the bar of one rank, with a segment for each parameter that it orthogonalizes, in the order of computation.

    Args:
        axes: the axes to draw on.
        plan: which rank orthogonalizes which parameters, with the number of operations for each.
        rank: the rank, which is also the row of the bar.
        scale: the number of operations that are one unit of the x axis.
        has_labels: True to write names of parameters into the segments.
    """
    most = max(plan.flops)
    all_shards = chain.from_iterable([run.shards for run in plan.runs])
    # The owner of a shard is None if every rank computes it.
    shards_of_rank = [shard for shard in all_shards if shard.owner in (rank, None)]
    end = 0.0  # of the last segment, on the x axis
    for index, shard in enumerate(shards_of_rank):
        colors = _BY_ALL if shard.owner is None else _BY_ONE
        width = shard.cost / scale
        axes.barh(rank, width, _THICKNESS, end, color=colors[index % 2], linewidth=0)
        if has_labels and shard.cost >= _NAMED * most:  # else its name does not fit
            text = _fitting(shard.name, shard.cost / most)
            axes.text(
                end + width / 2, rank, text, color="white", ha="center", va="center", fontsize=7.5
            )
        end += width


def _fitting(name: str, width: float) -> str:
    """Shorten a parameter name from the left to fit a segment of a bar: "...q.weight".

    The end of a name, which differs between parameters of a layer, is kept. ``width`` is the width of the segment as a
    fraction of the axis, at least `_NAMED`.
    """
    most_characters = int(width * 62)  # an axis is about 62 characters wide
    if len(name) <= most_characters:
        return name
    # Three dots, and the last most_characters - 3 characters.
    return "..." + name[3 - most_characters :]
