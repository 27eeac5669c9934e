"""Plots of curves: losses over seeds, the effect of coefficients, and spectra before and after orthogonalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from matplotlib.axes import Axes
from torch import Tensor

from muonfx.plot.axes import COLORS, axes_for
from muonfx.polar.bands import band, scalar_polynomial
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.coefficients import coefficients as resolve

_LOWER = 0.01
"""The smallest singular value, divided by the Frobenius norm, for which a plot shows the range of a polynomial."""


def plot_band(
    runs: Tensor | Sequence[Sequence[float]],
    x: Tensor | Sequence[float] | None = None,
    *,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the mean of several runs as a line, and a band from the lowest to the highest run.

    To compare optimizers, call it several times with one ``ax``.

    Args:
        runs: a row for each run, such as one seed, and a column for each point, such as the loss at a step.
        x: the position of each point; None: 0, 1, 2 and so on.
        label: the name of the runs in a legend.
        ax: the axes to draw on; None: a new figure.

    Returns:
        The axes, with one more line and its band.

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
        raise ValueError(
            f"runs must be a table (runs, points) with at least one run, found shape {tuple(table.shape)}"
        )
    if x is None:
        x = range(table.shape[1])
    with axes_for(ax) as axes:
        positions: list[float] = torch.as_tensor(x).tolist()
        draw_band(axes, positions, table.unbind(dim=1), label=label)
    return axes


def draw_band(
    axes: Axes, positions: Sequence[float], values_at: Sequence[Tensor], **line_style: Any
) -> None:
    """Draw the mean of several runs as a line, and a band from the lowest to the highest run.

    ``positions`` are on the x axis, and ``values_at`` has a tensor for each: the values of the runs, shape (runs,).
    The number of runs may differ between positions. ``line_style`` are arguments of `Axes.plot`. For example, the
    values ``[1.0, 3.0]`` at a position give a line at 2, in a band from 1 to 3.
    """
    means: list[float] = []
    lowest: list[float] = []
    highest: list[float] = []
    for values in values_at:
        means.append(values.mean().item())
        lowest.append(values.min().item())
        highest.append(values.max().item())
    (line,) = axes.plot(positions, means, **line_style)  # plot returns a list of one line
    axes.fill_between(positions, lowest, highest, color=line.get_color(), alpha=0.16, linewidth=0)


def plot_polynomial(coefficients: CoefficientsLike, *, ax: Axes | None = None) -> Axes:
    """Draw how a set of Newton-Schulz coefficients changes singular values, and the range of the results.

    To compare sets, call it several times with one ``ax``.

    Args:
        coefficients: a name such as "keller", a `muonfx.polar.Coefficients`, or a sequence of ``(a, b[, c])``, the
            polynomial of each step.
        ax: the axes to draw on; None: a new figure.

    Returns:
        The axes. The x axis is the singular value divided by the Frobenius norm, from 1e-4 to 1, logarithmic. The
        curve is the composition of all steps, and the shaded band is the range of its values from 0.01 to 1.

    Raises:
        ValueError: no set of coefficients has the name.

    >>> import muonfx as mfx
    >>> ax = mfx.plot.plot_polynomial("keller")
    >>> ax.get_xlabel(), ax.lines[0].get_label()
    ('singular value, over the Frobenius norm', 'keller: 0.68 to 1.13')
    """
    # The least and the largest result for values from 0.01 to 1.
    result_range = band(coefficients, _LOWER)
    s = torch.logspace(-4, 0, 1000, dtype=torch.float64)  # singular values, from 1e-4 to 1
    with axes_for(ax) as axes:
        values = scalar_polynomial(coefficients, s)
        name = f"{resolve(coefficients).name}: {result_range.minimum:.2f} to {result_range.maximum:.2f}"
        (line,) = axes.semilogx(s.tolist(), values.tolist(), label=name)
        color = cast("str", line.get_color())
        axes.fill_between(
            [_LOWER, 1.0],
            result_range.minimum,
            result_range.maximum,
            color=color,
            alpha=0.16,
            linewidth=0,
        )
        # This counts all curves, because the axes may have curves of other sets already.
        highest = max(max(cast("list[float]", line.get_ydata())) for line in axes.lines)
        axes.set(
            xlabel="singular value, over the Frobenius norm", ylabel="singular value afterwards"
        )
        axes.set(xlim=(1e-4, 1.0), ylim=(0.0, 1.05 * highest))
        title = f"values from {_LOWER:g} to 1"
        legend = axes.legend(
            loc="lower right", title=title, frameon=False, labelcolor="linecolor", alignment="left"
        )
        legend.get_title().set_color(COLORS["gray"])
    return axes


def plot_spectrum(before: Tensor, after: Tensor | None = None, *, ax: Axes | None = None) -> Axes:
    """Draw the singular values of a matrix, and of the matrix after a transform, largest first.

    Args:
        before: a matrix, such as a gradient or the momentum. Its singular values are divided by the largest one, as
            only the shape of the spectrum matters to orthogonalization.
        after: a second matrix, such as the update, drawn without scaling; None: ``before`` alone.
        ax: the axes to draw on; None: a new figure.

    Returns:
        The axes. The y axis is the singular value, the x axis its position in descending order.

    Raises:
        ValueError: an argument is not a single matrix.
        torch.linalg.LinAlgError: a matrix has NaN or infinite elements.

    >>> import torch
    >>> import muonfx as mfx
    >>> matrix = torch.randn(32, 48)
    >>> ax = mfx.plot.plot_spectrum(matrix, mfx.polar.orthogonalize(matrix))
    >>> len(ax.lines[0].get_ydata()), len(ax.lines[1].get_ydata())
    (32, 32)
    """
    values = _singular_values("before", before)
    if values.any():  # a matrix of zeros is not scaled
        values = values / values.max()
    values_after = None
    if after is not None:
        values_after = _singular_values("after", after)
    with axes_for(ax) as axes:
        _draw_curve(axes, values, "before, over its largest", COLORS["gray"], ":")
        if values_after is not None:
            _draw_curve(axes, values_after, "after", COLORS["blue"], "-")
        axes.set(xlabel="number of the singular value, largest first", ylabel="singular value")
        axes.set(ylim=(0.0, None), xlim=(1, max(len(values), 2)))
    return axes


def _draw_curve(axes: Axes, values: Tensor, name: str, color: str, line: str) -> None:
    """Draw values at 1, 2, 3 and so on, with the name of the curve at its end."""
    axes.plot(range(1, len(values) + 1), values.tolist(), color=color, linestyle=line, label=name)
    if len(values):
        end = (len(values), values[-1].item())
        axes.annotate(
            name,
            end,
            (5, 0),
            textcoords="offset points",
            va="center",
            color=color,
            annotation_clip=False,
        )


def _singular_values(argument: str, matrix: Tensor) -> Tensor:
    """Return the singular values of a matrix, largest first, in float64; ``argument`` is its name in errors."""
    if matrix.ndim != 2:
        raise ValueError(
            f"{argument} must be one matrix, a tensor (rows, columns), found shape {tuple(matrix.shape)}"
        )
    return torch.linalg.svdvals(matrix.detach().to("cpu", torch.float64))
