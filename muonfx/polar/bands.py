"""`band`: the interval into which the polynomials of a Newton-Schulz iteration map singular values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.polar.coefficients import CoefficientsLike, coefficients, schedule


class Band(NamedTuple):
    """Bounds of the singular values after a Newton-Schulz iteration, as `band` returns them.

    Attributes:
        minimum: the least result for singular values in `[lower, 1]` before the iteration.
        maximum: the largest result for singular values in `[lower, 1]` before the iteration.
        peak: the largest result for singular values in `[0, 1]` before the iteration.
    """

    minimum: float
    maximum: float
    peak: float


def scalar_polynomial(value: CoefficientsLike, s: Tensor, steps: int | None = None) -> Tensor:
    """Apply the polynomials of all Newton-Schulz steps to singular values `s`; return the new singular values.

    Args:
        value: the coefficients: a name in `PRESETS`, a `Coefficients` or a sequence of `(a, b[, c])`.
        s: singular values of a matrix that was divided by its Frobenius norm, but not by `norm_safety`. For
            coefficients with `row_scaling`: the singular values after the rows were scaled.
        steps: the number of steps, as in `orthogonalize`.

    >>> scalar_polynomial([(1.5, -0.5)], torch.tensor([0.0, 1.0]))
    tensor([0., 1.])
    """
    known = coefficients(value)
    if not known.row_scaling:
        s = s / known.norm_safety
    for a, b, c in schedule(known, steps):
        square = s * s
        s = s * (a + square * (b + c * square))
    return s


def band(
    value: CoefficientsLike, lower: float = 0.01, *, steps: int | None = None, points: int = 200_001
) -> Band:
    """Return the band of a Newton-Schulz iteration: the smallest and largest singular values that it produces.

    The composed polynomial is evaluated on a float64 grid, so the bounds are accurate to about 1e-7.

    Args:
        value: the coefficients: a name in `PRESETS`, a `Coefficients` or a sequence of `(a, b[, c])`.
        lower: the smallest singular value of the normalized input to consider, in (0, 1].
        steps: the number of steps, as in `orthogonalize`.
        points: the number of grid points in `[lower, 1]`; `points // 2` more are placed between 0 and `lower`.

    Returns:
        A `Band`: the minimum and maximum for inputs in `[lower, 1]`, and the maximum (`peak`) for inputs in `[0, 1]`.

    Raises:
        ValueError: `lower` is outside (0, 1].

    >>> [round(x, 3) for x in band("keller")]
    [0.682, 1.134, 1.202]
    """
    if not 0 < lower <= 1:
        raise ValueError(f"band: lower is {lower!r}, expected a number in (0, 1]")
    grid = torch.linspace(lower, 1.0, points, dtype=torch.float64, device="cpu")
    grid_below = torch.logspace(-7, 0, points // 2, dtype=torch.float64, device="cpu") * lower
    results = scalar_polynomial(value, grid, steps)
    results_below = scalar_polynomial(value, grid_below, steps)
    maximum = results.max().item()
    peak = max(maximum, results_below.max().item())
    return Band(results.min().item(), maximum, peak)
