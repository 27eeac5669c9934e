"""The interval into which a set of coefficients maps the singular values of a matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch

from muonfx.polar.coefficients import CoefficientsLike, coefficients, schedule


class Band(NamedTuple):
    """Bounds of the singular values after the iteration, as `band` returns them.

    Inputs in `[lower, 1]` are mapped into `[minimum, maximum]`. Inputs in `[0, 1]` are mapped to at most `peak`.
    """

    minimum: float
    maximum: float
    peak: float


def scalar_polynomial(value: CoefficientsLike, s: torch.Tensor, steps: int | None = None) -> torch.Tensor:
    """Return the value to which the iteration maps each singular value in `s`, elementwise and in the dtype of `s`.

    `s` holds singular values of a matrix that was divided by its Frobenius norm; the division by `norm_safety` is done
    here. For a set with row scaling, `s` holds the singular values after the rows were scaled.

    >>> scalar_polynomial([(1.5, -0.5)], torch.tensor([0.0, 1.0]))
    tensor([0., 1.])
    """
    chosen = coefficients(value)
    if not chosen.row_scaling:
        s = s / chosen.norm_safety
    for a, b, c in schedule(chosen, steps):
        square = s * s
        s = s * (a + square * (b + c * square))
    return s


def band(value: CoefficientsLike, lower: float = 0.01, *, steps: int | None = None, points: int = 200_001) -> Band:
    """Return the smallest and largest singular values that the iteration produces.

    The composed polynomial is evaluated on a float64 grid, so the bounds are accurate to about 1e-7.

    Args:
        value: a name, a `Coefficients` or a sequence of `(a, b[, c])`.
        lower: the smallest singular value of the normalized input to consider, in (0, 1].
        steps: as in `orthogonalize`.
        points: the number of grid points in `[lower, 1]`; `points // 2` more are placed between 0 and `lower`.

    Returns:
        The minimum and the maximum for inputs in `[lower, 1]`, and the maximum for inputs in `[0, 1]`.

    Raises:
        ValueError: `lower` outside (0, 1].

    >>> [round(x, 3) for x in band("keller")]
    [0.682, 1.134, 1.202]
    """
    if not 0 < lower <= 1:
        raise ValueError(f"band: lower is {lower!r}, expected a number in (0, 1]")
    even = torch.linspace(lower, 1.0, points, dtype=torch.float64)
    below = torch.logspace(-7, 0, points // 2, dtype=torch.float64) * lower
    inside = scalar_polynomial(value, even, steps)
    outside = scalar_polynomial(value, below, steps)
    maximum = inside.max().item()
    return Band(inside.min().item(), maximum, max(maximum, outside.max().item()))
