"""Plots of states: the size of updates by layer, and the memory of a state by dtype."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

from matplotlib.ticker import LogLocator

from muonfx.inspect.summary import LeafSummary, Summary, summary
from muonfx.plot.axes import COLORS, axes_for, legend_above
from muonfx.transforms.monitor import metrics
from muonfx.tree import PyTree
from muonfx.tree.display import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_state_memory", "plot_update_rms"]

_ROW = 0.24
"""Height of a bar in inches."""


def plot_update_rms(state: PyTree, *, ax: Axes | None = None) -> Axes:
    """Draw the root mean square of updates by layer, as `muonfx.monitor` keeps it in a state.

    Args:
        state: a state in which a ``monitor(..., by_leaf=True)`` measures "rms", or several monitors do.
        ax: the axes to draw on; None: a new figure, whose height grows with the layers.

    Returns:
        The axes, with a logarithmic scale and a point for each measured "rms". Zeros are omitted. Each monitor has its
        own colour.

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
    found = {key: float(value) for key, value in metrics(state).items() if key.rpartition("/")[2] == "rms"}
    if not found:
        raise ValueError(
            'the state has no "rms" of a monitor; put monitor("updates", ("rms",), by_leaf=True) after the transform '
            "to measure, last in the chain for the size of the steps"
        )
    monitors: dict[str, dict[str, float]] = {}
    for key, value in found.items():
        monitor, _, leaf = key.rpartition("/")[0].partition("/")
        monitors.setdefault(monitor, {})[leaf or monitor] = value
    rows = list(dict.fromkeys(row for values in monitors.values() for row in values))
    with axes_for(ax, 0.75 + _ROW * len(rows)) as axes:
        for (monitor, values), color in zip(monitors.items(), cycle(COLORS.values()), strict=False):
            shown = {row: value for row, value in values.items() if value > 0}
            places = [rows.index(row) for row in shown]
            axes.plot(list(shown.values()), places, linestyle="none", marker="o", color=color, label=monitor)
        axes.set_xscale("log")
        # Labels of all nine minor ticks of a decade would overlap.
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.set_yticks(range(len(rows)), rows)
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="root mean square of an element")
        if len(monitors) > 1:
            legend_above(axes)
    return axes


def plot_state_memory(what: PyTree | Summary, *, ax: Axes | None = None) -> Axes:
    """Draw the memory of a state as bars, by its parts and by dtype.

    Args:
        what: an argument of `muonfx.summary` (a state, an optimizer, a model, a pair of a transform and its state), or
            its result.
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
    about = what if isinstance(what, Summary) else summary(what)
    parts = _parts([leaf for leaf in about.leaves if leaf.nbytes])
    if not parts:
        raise ValueError("the state has no tensor with bytes on this rank; there is nothing to draw")
    totals = [sum(leaf.nbytes for leaf in leaves) for leaves in parts.values()]
    power = next((power for power in range(5, 0, -1) if max(totals) >= 1024**power), 0)
    scale, unit = 1024**power, ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"][power]
    with axes_for(ax, 0.75 + _ROW * 1.4 * len(parts)) as axes:
        starts = [0.0] * len(parts)
        for (dtype, nbytes), color in zip(about.by_dtype().items(), cycle(COLORS.values()), strict=False):
            widths = [sum(leaf.nbytes for leaf in leaves if leaf.dtype == dtype) / scale for leaves in parts.values()]
            label = f"{dtype}, {format_bytes(nbytes)}"
            axes.barh(range(len(parts)), widths, 0.7, starts, color=color, label=label)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for place, total in enumerate(totals):
            at = (total / scale, place)
            axes.annotate(format_bytes(total), at, xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(parts)), list(parts))
        axes.set(ylim=(len(parts) - 0.5, -0.5), xlim=(0, max(totals) / scale * 1.18))
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{unit}, {format_bytes(about.nbytes)} in all")
        legend_above(axes)
    return axes


def _parts(leaves: list[LeafSummary]) -> dict[str, list[LeafSummary]]:
    """Group the leaves by the first branches below their common path, one bar for each."""
    depth = 0
    while len({leaf.path[: depth + 1] for leaf in leaves}) == 1 and all(len(leaf.path) > depth + 1 for leaf in leaves):
        depth += 1
    found: dict[tuple[str, ...], list[LeafSummary]] = {}
    for leaf in leaves:
        found.setdefault(leaf.path[: depth + 1], []).append(leaf)
    names: dict[str, list[LeafSummary]] = {}
    for inside in found.values():
        first, end = inside[0].path, depth + 1
        # Extend "adamw" to "adamw.scale_by_adam" if that is its only child.
        while all(leaf.path[: end + 1] == first[: end + 1] for leaf in inside) and len(first) > end:
            end += 1
        names[".".join(first[depth:end]) or "-"] = inside
    return names
