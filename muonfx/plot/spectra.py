"""Plots of singular values: the effect of coefficients, and a matrix before and after orthogonalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from muonfx.plot.axes import COLORS, axes_for, label_end
from muonfx.polar.bands import band, scalar_polynomial
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.coefficients import coefficients as resolve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_band", "plot_spectrum"]


def plot_band(
    coefficients: CoefficientsLike,
    *,
    steps: int | None = None,
    lower: float = 0.01,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw what a set of coefficients makes of singular values, and the band in which they land.

    Several calls on one ``ax`` put sets side by side.

    Args:
        coefficients: a name, a `muonfx.polar.Coefficients` or a sequence of ``(a, b[, c])``.
        steps: as in `muonfx.polar.orthogonalize`.
        lower: the smallest singular value, over the Frobenius norm, that the band covers; in (0, 1].
        label: the name of the curve; None: that of the set, where it has one.
        ax: where to draw; None: a new figure.

    Returns:
        The axes. Over the singular value (over the Frobenius norm, from 1e-4 to 1, logarithmic) the composed
        polynomial, and shaded the band from the least to the largest of its values from ``lower`` on.

    Raises:
        ValueError: ``lower`` outside (0, 1], or an unknown set.

    >>> import muonfx as mfx
    >>> ax = mfx.plot.plot_band("keller")
    >>> ax.get_xlabel(), ax.lines[0].get_label()
    ('singular value, over the Frobenius norm', 'keller: 0.68 to 1.13')
    """
    found = band(coefficients, lower, steps=steps)
    s = torch.logspace(-4, 0, 1000, dtype=torch.float64)
    if label is None:
        label = resolve(coefficients).name
    with axes_for(ax) as axes:
        values = scalar_polynomial(coefficients, s, steps)
        name = f"{label}: {found.minimum:.2f} to {found.maximum:.2f}"
        (line,) = axes.semilogx(s.tolist(), values.tolist(), label=name)
        color = cast("str", line.get_color())
        axes.fill_between([lower, 1.0], found.minimum, found.maximum, color=color, alpha=0.16, linewidth=0)
        axes.set(xlabel="singular value, over the Frobenius norm", ylabel="singular value afterwards")
        axes.set_xlim(1e-4, 1.0)
        axes.set_ylim(0.0, 1.05 * max(max(cast("list[float]", line.get_ydata())) for line in axes.lines))
        legend = axes.legend(
            loc="lower right",
            title=f"from {lower:g} on, they land in",
            frameon=False,
            labelcolor="linecolor",
            alignment="left",
        )
        legend.get_title().set_color(COLORS["gray"])
    return axes


def plot_spectrum(before: Tensor, after: Tensor | None = None, *, ax: Axes | None = None) -> Axes:
    """Draw the singular values of a matrix before and after, largest first.

    Args:
        before: a matrix, such as a gradient or the momentum. It is drawn over its largest singular value, as only the
            shape of its spectrum matters to what orthogonalizes.
        after: the matrix made of it, such as the update, drawn as it is; None: ``before`` alone.
        ax: where to draw; None: a new figure.

    Returns:
        The axes: the number of each singular value against its size.

    Raises:
        TypeError: what is given is no tensor.
        ValueError: it is no single matrix, or not finite.

    >>> import torch
    >>> import muonfx as mfx
    >>> matrix = torch.randn(32, 48)
    >>> ax = mfx.plot.plot_spectrum(matrix, mfx.polar.orthogonalize(matrix))
    >>> len(ax.lines[0].get_ydata()), len(ax.lines[1].get_ydata())
    (32, 32)
    """
    sizes = _singular_values("before", before)
    largest = sizes[0] if sizes and sizes[0] > 0 else 1.0
    curves: list[tuple[str, Sequence[float], str, str]] = [
        ("before, over its largest", [size / largest for size in sizes], COLORS["gray"], ":")
    ]
    if after is not None:
        curves.append(("after", _singular_values("after", after), COLORS["blue"], "-"))
    with axes_for(ax) as axes:
        for name, values, color, line in curves:
            axes.plot(range(1, len(values) + 1), values, color=color, linestyle=line, label=name)
            if values:
                label_end(axes, len(values), values[-1], name, color)
        axes.set(xlabel="number of the singular value, largest first", ylabel="singular value")
        axes.set_ylim(bottom=0.0)
        axes.set_xlim(1, max(len(sizes), 2))
    return axes


def _singular_values(what: str, matrix: Tensor) -> list[float]:
    if not isinstance(matrix, Tensor):
        raise TypeError(f"{what} must be one matrix, a tensor (rows, columns), found {type(matrix).__name__}")
    if matrix.ndim != 2:
        raise ValueError(f"{what} has shape {tuple(matrix.shape)}, expected one matrix (rows, columns)")
    if not matrix.isfinite().all():
        raise ValueError(f"{what} has elements that are not finite, and so no singular values")
    return cast("list[float]", torch.linalg.svdvals(matrix.detach().to("cpu", torch.float64)).tolist())
