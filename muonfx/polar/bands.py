"""The range of singular values that a set of coefficients produces."""

from __future__ import annotations

from typing import NamedTuple

import torch

from muonfx.polar.coefficients import CoefficientsLike, coefficients, schedule


class Band(NamedTuple):
    """Where singular values land: in `[minimum, maximum]` from `[lower, 1]`, at or below `peak` from `[0, 1]`."""

    minimum: float
    maximum: float
    peak: float


def scalar_polynomial(value: CoefficientsLike, s: torch.Tensor, steps: int | None = None) -> torch.Tensor:
    """The composed polynomial at `s`, any shape, in `s`'s own dtype.

    `s` is a singular value of the input over its Frobenius norm; the set's `norm_safety` is applied here. For a set
    with row scaling, `s` is a singular value after that scaling.

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
    """The band that singular values land in, from the scalar polynomial on a fine float64 grid (so to about 1e-7).

    Args:
        value: a name, a `Coefficients` or a sequence of `(a, b[, c])`.
        lower: the smallest normalised singular value that the band covers, in (0, 1].
        steps: as in `orthogonalize`.
        points: grid points; half as many again are added near zero, where the composition oscillates fastest.

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
