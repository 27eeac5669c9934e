"""Bound the singular values of a Newton-Schulz iteration in low precision, to choose the steps on one Gram matrix.

Good polynomials use the interval for which they were fitted to its ends. Just beyond them they grow fast, and each step
multiplies an overshoot by the slope there, about 4 to 8. One percent too much in the first steps is enough to diverge
in the last.

A stage takes all its steps on one rounded Gram matrix; a *restart* begins the next stage with a new one. Suppose a
small singular value `s` belongs to a direction within a few large rows, such as two nearly parallel ones. Rounding
their large products leaves an error of one unit in the last place of these products on the eigenvalue `s^2`. The first
step of the stage multiplies it by `a^2` before the second step. A Gaussian matrix has no such directions, so averages
over Gaussian matrices do not show the error.

The bound needs no matrix. It follows the interval `[0, top]` through the stages, with an error in each rounded product
that is a share of its largest eigenvalue. The allowed restarts are known before the first product, without a branch on
data and without synchronization. See the decision record on stages and rounding.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from muonfx.internal.tracing import called_once
from muonfx.polar.coefficients import Step

TOLERANCE = 1.125
"""Largest accepted ratio of the bound of singular values with rounding to the bound in exact arithmetic."""

# Measured on diagonal, nearly parallel, low-rank, graded and Hilbert matrices, thousands for each of 70 schedules: with
# this share no stages exceeded their bound, and most of the stages that it rejects diverged for some matrix.
_SHARE = 0.25
"""Assumed error of a rounded product, per step on one Gram matrix, in unit roundoffs of the largest eigenvalue."""

_POINTS = 400
"""The number of singular values in each half of the grid on which polynomials are evaluated."""

_DIVERGED = 10.0
"""A bound above this counts as divergence."""


@called_once  # a tracer calls this once and keeps the answer
def largest(steps: tuple[Step, ...], restarts: tuple[int, ...], safety: float, dtype: torch.dtype) -> float:
    """Return a bound of the singular values after all steps in `dtype`, divided by the bound in exact arithmetic.

    It is infinite if they are unbounded. The Gram matrix is recomputed after the numbers of steps in `restarts`;
    `safety` divides the input.
    """
    exact = _largest(steps, tuple(range(1, len(steps))), safety, 0.0)
    if exact == math.inf:  # these polynomials diverge without any rounding
        return 1.0
    return _largest(steps, restarts, safety, torch.finfo(dtype).eps / 2) / exact


@called_once
def stable_restarts(
    steps: tuple[Step, ...], wanted: tuple[int, ...], safety: float, dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the numbers of steps after which to recompute the Gram matrix (restarts), so that `dtype` is stable.

    Fewer restarts save time, but share one rounded Gram matrix among more steps. Three choices are tried in this order,
    here for five steps; the first is returned whose bound of the singular values is accepted:

    1. `wanted`, for example ``(2, 3)``: steps 1 and 2 share a Gram matrix, and steps 4 and 5.
    2. ``(1, 2, 3)``: only the last two steps share one.
    3. ``(1, 2, 3, 4)``: each step has its own, as in the standard form.

    `safety` divides the input.
    """
    every_step = tuple(range(1, len(steps)))
    two_at_the_end = every_step[:-1]  # no later step amplifies the overshoot of a last stage of two steps
    for restarts in (wanted, two_at_the_end):
        if largest(steps, restarts, safety, dtype) <= TOLERANCE:
            return restarts
    return every_step


@functools.lru_cache(maxsize=4096)
def _largest(steps: tuple[Step, ...], restarts: tuple[int, ...], safety: float, unit: float) -> float:
    """Return a bound of the singular values after all steps, or infinity.

    `unit` is the unit roundoff of the dtype; 0 for exact arithmetic.
    """
    top = (1 + unit) / safety
    cuts = (0, *restarts, len(steps))
    for start, end in itertools.pairwise(cuts):
        top = _after(steps[start:end], top, _SHARE * (end - start) * unit)
        if not top <= _DIVERGED:  # also for NaN
            return math.inf
    return top


def _after(steps: Sequence[Step], top: float, error: float) -> float:
    """Bound singular values that begin in `[0, top]`, after steps on a Gram matrix with this relative `error`."""
    # Follows `muonfx.polar.iteration.composed` to first order on a grid of singular values s: the eigenvalues r and q
    # of `R` and `Q`, and bounds of their errors. An error of a polynomial `G` counts once, in `Q`, since `R` is updated
    # with the same `G`.
    grid = _grid(top)
    # In the comprehensions, gs, rs and qs are the values of g, r and q at one s, and ge, re and qe their errors.
    r = [s * s for s in grid]
    r_error = [error * top * top] * len(grid)
    q = [1.0] * len(grid)
    q_error = [0.0] * len(grid)
    for index, step in enumerate(steps):
        g, g_error = _polynomial(step, r, r_error, error)
        if index + 1 < len(steps):
            r, r_error = _next_gram(g, r, r_error, error)
        q_error = [abs(gs) * qe + abs(qs) * ge for gs, qe, qs, ge in zip(g, q_error, q, g_error, strict=True)]
        q = [gs * qs for gs, qs in zip(g, q, strict=True)]
        if index > 0:  # the first `Q` is `G` itself, without a product that rounds
            rounding = error * max([abs(qs - q[0]) for qs in q])
            q_error = [qe + rounding for qe in q_error]
    bounds = [(abs(qs) + qe) * s for qs, qe, s in zip(q, q_error, grid, strict=True)]
    return (1 + error) * max(bounds)


def _grid(top: float) -> list[float]:
    """Return singular values in `[0, top]`: equidistant ones, and ones down to `top / 1000` with equal ratios."""
    linear = [top * i / _POINTS for i in range(_POINTS + 1)]
    geometric = [top * 10 ** (-3 * i / _POINTS) for i in range(_POINTS)]
    return linear + geometric


def _polynomial(step: Step, r: list[float], r_error: list[float], error: float) -> tuple[list[float], list[float]]:
    """Return the eigenvalues of `G = a I + b R + c R^2`, and bounds of their errors."""
    a, b, c = step
    g = [a + rs * (b + c * rs) for rs in r]
    rounding = error * max([abs(gs - a) for gs in g])
    g_error = [abs(b + 2 * c * rs) * re + rounding for rs, re in zip(r, r_error, strict=True)]
    return g, g_error


def _next_gram(g: list[float], r: list[float], r_error: list[float], error: float) -> tuple[list[float], list[float]]:
    """Return the eigenvalues of `G (G R)`, and bounds of their errors: both products are rounded."""
    inner_rounding = error * max([abs(gs * rs) for gs, rs in zip(g, r, strict=True)])
    new_r = [gs * gs * rs for gs, rs in zip(g, r, strict=True)]
    outer_rounding = error * max(new_r)
    new_error = [gs * gs * re + abs(gs) * inner_rounding + outer_rounding for gs, re in zip(g, r_error, strict=True)]
    return new_r, new_error
