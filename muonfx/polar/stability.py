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
from typing import NamedTuple

import torch

from muonfx.internal.tracing import called_once, untraced
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
def growth_by_rounding(
    steps: tuple[Step, ...], restarts: tuple[int, ...], safety: float, dtype: torch.dtype
) -> float:
    """Return the factor by which rounding to `dtype` may increase the largest singular value after all steps.

    It is 1.02 if it may be 2 percent larger than in exact arithmetic, and infinity if rounding may make the iteration
    diverge. It is 1 if the iteration diverges in exact arithmetic too, since rounding is not the reason then.

    Args:
        steps: the polynomial of each step.
        restarts: the numbers of steps after which the Gram matrix is recomputed.
        safety: divides the input.
        dtype: the dtype of the products.
    """
    after_every_step = tuple(range(1, len(steps)))
    exact = _bound(steps, after_every_step, safety, unit=0.0)
    if exact == math.inf:
        return 1.0
    rounded = _bound(steps, restarts, safety, unit=torch.finfo(dtype).eps / 2)
    return rounded / exact


@called_once
def stable_restarts(
    steps: tuple[Step, ...], wanted: tuple[int, ...], safety: float, dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the numbers of steps after which to recompute the Gram matrix `X X^T` (restarts), in products of `dtype`.

    Fewer restarts save time, but then more steps use one rounded Gram matrix, and the iteration may diverge. Three
    choices are tried in this order, here for five steps. The first is returned with which rounding makes singular
    values at most 12.5 percent larger (`TOLERANCE`):

    1. `wanted`, for example ``(2, 3)``: steps 1 and 2 share a Gram matrix, and steps 4 and 5.
    2. ``(1, 2, 3)``: only the last two steps share one. No later step amplifies their errors.
    3. ``(1, 2, 3, 4)``: each step has its own, as in the standard form.

    The input is divided by `safety` times its norm.
    """
    after_every_step = tuple(range(1, len(steps)))
    last_two_together = after_every_step[:-1]
    for restarts in (wanted, last_two_together):
        if growth_by_rounding(steps, restarts, safety, dtype) <= TOLERANCE:
            return restarts
    return after_every_step


@functools.lru_cache(maxsize=4096)
def _bound(steps: tuple[Step, ...], restarts: tuple[int, ...], safety: float, unit: float) -> float:
    """Return a bound of the singular values after all steps, or infinity if they diverge.

    `unit` is the unit roundoff of the dtype; 0 for exact arithmetic. `restarts` are the numbers of steps after which a
    new stage begins, with a new Gram matrix.
    """
    top = (1 + unit) / safety  # bounds the singular values before the next stage
    cuts = (0, *restarts, len(steps))  # (0, 2, 3, 5) for stages of 2, 1 and 2 steps
    with untraced():
        for start, end in itertools.pairwise(cuts):
            # Assumed to grow with the number of steps in the stage.
            product_error = _SHARE * (end - start) * unit
            top = _after_stage(steps[start:end], top, product_error)
            if not top <= _DIVERGED:  # also for NaN
                return math.inf
    return top


class _Eigenvalues(NamedTuple):
    """The eigenvalues of a matrix that belong to a grid of singular values, and a bound of the error of each."""

    values: torch.Tensor
    error: torch.Tensor | float


def _after_stage(steps: Sequence[Step], top: float, error: float) -> float:
    """Bound singular values that begin in `[0, top]`, after steps on one Gram matrix.

    A stage begins with `R = X X^T` and `Q = I`. Each step takes `G = a I + b R + c R^2`, `Q <- G Q` and `R <- G R G`.
    The stage ends with `X <- Q X`. All small matrices have the eigenvectors of R. So this function computes their
    eigenvalues for a grid of singular values `s` of X: r = s^2, g = a + b r + c r^2, and so on.

    The error of each rounded product is assumed to be `error` times its largest eigenvalue. Products of two errors are
    neglected.
    """
    s = _grid(top)
    r = _Eigenvalues(s * s, error * top * top)
    q = _Eigenvalues(torch.ones_like(s), torch.zeros_like(s))
    for index, step in enumerate(steps):
        g = _polynomial(step, r, error)
        q = _exact_product(g, q)
        if index > 0:  # the first Q is G itself, not a product that rounds
            multiple_of_identity = q.values[0]  # the value at s = 0, which is exact
            rounding = error * (q.values - multiple_of_identity).abs().max()
            q = _Eigenvalues(q.values, q.error + rounding)
        is_last = index == len(steps) - 1
        if not is_last:
            r = _next_gram(g, r, error)
    bounds = (q.values.abs() + q.error) * s
    return (1 + error) * float(bounds.max())


def _polynomial(step: Step, r: _Eigenvalues, error: float) -> _Eigenvalues:
    """Return the eigenvalues of `G = a I + b R + c R^2`: dG = (b + 2 c R) dR, and the rounding of the product."""
    a, b, c = step
    values = a + r.values * (b + c * r.values)
    derivative = b + 2 * c * r.values
    rounding = error * (values - a).abs().max()  # the multiple of I is exact
    return _Eigenvalues(values, derivative.abs() * r.error + rounding)


def _exact_product(g: _Eigenvalues, q: _Eigenvalues) -> _Eigenvalues:
    """Return the eigenvalues of `G Q` without rounding: |d(G Q)| <= |G| |dQ| + |Q| |dG|."""
    return _Eigenvalues(g.values * q.values, g.values.abs() * q.error + q.values.abs() * g.error)


def _next_gram(g: _Eigenvalues, r: _Eigenvalues, error: float) -> _Eigenvalues:
    """Return the eigenvalues of `G (G R)`, the next R, and a bound of their errors.

    R and both products are rounded: |d(G (G R))| <= G^2 |dR| + |G| |rounding of G R| + |rounding of the result|. The
    rounding of a product is `error` times its largest eigenvalue. The error of G is left out. It counts once, in Q,
    because R is updated with the same G.

    >>> g = _Eigenvalues(torch.tensor([2.0]), error=0.0)
    >>> r = _Eigenvalues(torch.tensor([3.0]), error=0.5)
    >>> _next_gram(g, r, error=0.0)
    _Eigenvalues(values=tensor([12.]), error=tensor([2.]))
    """
    inner_rounding = error * (g.values * r.values).abs().max()  # of G R
    g_squared = g.values * g.values
    new_values = g_squared * r.values
    outer_rounding = error * new_values.max()
    new_error = g_squared * r.error + g.values.abs() * inner_rounding + outer_rounding
    return _Eigenvalues(new_values, new_error)


def _grid(top: float) -> torch.Tensor:
    """Return singular values in `[0, top]`: equidistant ones, and ones down to `top / 1000` with equal ratios."""
    linear = [top * i / _POINTS for i in range(_POINTS + 1)]
    geometric = [top * 10 ** (-3 * i / _POINTS) for i in range(_POINTS)]
    return torch.tensor(linear + geometric, dtype=torch.float64, device="cpu")
