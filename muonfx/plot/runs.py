"""Plots of runs that were repeated with several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muonfx.plot.axes import axes_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_band"]


def plot_band(
    runs: Tensor | Sequence[Sequence[float]],
    x: Tensor | Sequence[float] | None = None,
    *,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the mean of several runs, in a band from the lowest to the highest run.

    Several calls on one ``ax`` compare optimizers.

    Args:
        runs: a row for each run, such as a seed, and a column for each point, such as the loss at a step.
        x: the position of each point; None: 0, 1, 2 and so on.
        label: the name of the runs in a legend.
        ax: the axes to draw on; None: a new figure.

    Returns:
        The axes.

    Raises:
        ValueError: ``runs`` is not two-dimensional or has no runs, or ``x`` has another length.

    >>> import muonfx as mfx
    >>> losses = [[1.0, 0.6, 0.5], [1.0, 0.8, 0.3]]
    >>> ax = mfx.plot.plot_band(losses, label="Muon, 2 seeds")
    >>> ax.lines[0].get_ydata().round(2).tolist()
    [1.0, 0.7, 0.4]
    """
    table = torch.as_tensor(runs, dtype=torch.float64).detach().cpu()
    if table.ndim != 2 or len(table) == 0:
        raise ValueError(f"runs must be a table (runs, points) with at least one run, found shape {tuple(table.shape)}")
    points = torch.arange(table.shape[1]) if x is None else torch.as_tensor(x).detach().cpu()
    if points.shape != table.shape[1:]:
        found = tuple(points.shape)
        raise ValueError(f"x must have one value for each of {table.shape[1]} points, found shape {found}")
    with axes_for(ax) as axes:
        (line,) = axes.plot(points.tolist(), table.mean(0).tolist(), label=label)
        lowest, highest = table.amin(0).tolist(), table.amax(0).tolist()
        axes.fill_between(points.tolist(), lowest, highest, color=line.get_color(), alpha=0.16, linewidth=0)
    return axes
