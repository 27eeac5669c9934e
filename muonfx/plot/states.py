"""Plots of states: the size of updates by layer, and the memory of a state by dtype."""

from __future__ import annotations

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
        ax: where to draw; None: a new figure, as high as there are layers.

    Returns:
        The axes: a point for each measured "rms", the first at the top, on a logarithmic scale. One that is zero has no
        point. Each monitor has its own colour.

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
            'the state has no "rms" of a monitor; put monitor("updates", ("rms",), by_leaf=True) where the updates are '
            "to be measured, last in the chain for the size of the steps"
        )
    parts = {key: key.rpartition("/")[0].partition("/") for key in found}
    rows = list(dict.fromkeys(leaf or name for name, _, leaf in parts.values()))
    monitors = list(dict.fromkeys(name for name, _, _ in parts.values()))
    with axes_for(ax, 0.75 + _ROW * len(rows)) as axes:
        colors = list(COLORS.values())
        for number, monitor in enumerate(monitors):
            mine = {leaf or name: found[key] for key, (name, _, leaf) in parts.items() if name == monitor}
            shown = {row: value for row, value in mine.items() if value > 0}
            axes.plot(
                list(shown.values()),
                [rows.index(row) for row in shown],
                linestyle="none",
                marker="o",
                color=colors[number % len(colors)],
                label=monitor,
            )
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(
            LogLocator(subs=(2, 5))
        )  # labels of all nine minor ticks of a decade would overlap
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("root mean square of an element")
        if len(monitors) > 1:
            legend_above(axes)
    return axes


def plot_state_memory(what: PyTree | Summary, *, ax: Axes | None = None) -> Axes:
    """Draw the memory of a state as bars, by its parts and by dtype.

    Args:
        what: what `muonfx.summary` takes (a state, an optimizer, a model, a transform and its state as a pair), or what
            it has returned.
        ax: where to draw; None: a new figure.

    Returns:
        The axes: a bar for each part of the state, cut by dtype, with its bytes at its end. Over ranks, what this rank
        holds.

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
    dtypes = list(about.by_dtype())
    largest = max(sum(leaf.nbytes for leaf in leaves) for leaves in parts.values())
    power = next((power for power in range(5, 0, -1) if largest >= 1024**power), 0)
    scale, unit = 1024**power, ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"][power]
    with axes_for(ax, 0.75 + _ROW * 1.4 * len(parts)) as axes:
        starts = [0.0] * len(parts)
        for number, dtype in enumerate(dtypes):
            widths = [sum(leaf.nbytes for leaf in leaves if leaf.dtype == dtype) / scale for leaves in parts.values()]
            color = list(COLORS.values())[number % len(COLORS)]
            axes.barh(
                range(len(parts)),
                widths,
                0.7,
                starts,
                color=color,
                label=f"{dtype}, {format_bytes(about.by_dtype()[dtype])}",
            )
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for place, (end, leaves) in enumerate(zip(starts, parts.values(), strict=True)):
            text = format_bytes(sum(leaf.nbytes for leaf in leaves))
            axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(parts)), list(parts))
        axes.set_ylim(len(parts) - 0.5, -0.5)
        axes.set_xlim(0, largest / scale * 1.18)
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
