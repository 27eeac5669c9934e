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
def largest(steps: tuple[Step, ...], restarts: tuple[int, ...], safety: float, dtype: torch.dtype) -> float:
    """Return how much rounding in `dtype` may enlarge the result: 1.02 if singular values may be 2 percent larger.

    This is a bound of the singular values after all steps, divided by the bound in exact arithmetic. It is infinite if
    they are unbounded.

    Args:
        steps: the polynomial of each step.
        restarts: the numbers of steps after which the Gram matrix is recomputed.
        safety: divides the input.
        dtype: the dtype of the products.
    """
    after_every_step = tuple(range(1, len(steps)))
    exact = _largest(steps, after_every_step, safety, unit=0.0)
    if exact == math.inf:  # these polynomials diverge without any rounding
        return 1.0
    rounded = _largest(steps, restarts, safety, unit=torch.finfo(dtype).eps / 2)
    return rounded / exact


@called_once
def stable_restarts(
    steps: tuple[Step, ...], wanted: tuple[int, ...], safety: float, dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the numbers of steps after which to recompute the Gram matrix (restarts), so that `dtype` is stable.

    Fewer restarts save time, but share one rounded Gram matrix among more steps. Three choices are tried in this order,
    here for five steps; the first is returned whose bound of the singular values is accepted:

    1. `wanted`, for example ``(2, 3)``: steps 1 and 2 share a Gram matrix, and steps 4 and 5.
    2. ``(1, 2, 3)``: only the last two steps share one. No later step amplifies their errors.
    3. ``(1, 2, 3, 4)``: each step has its own, as in the standard form.

    `safety` divides the input.
    """
    after_every_step = tuple(range(1, len(steps)))
    last_two_together = after_every_step[:-1]
    for restarts in (wanted, last_two_together):
        if largest(steps, restarts, safety, dtype) <= TOLERANCE:
            return restarts
    return after_every_step


@functools.lru_cache(maxsize=4096)
def _largest(steps: tuple[Step, ...], restarts: tuple[int, ...], safety: float, unit: float) -> float:
    """Return a bound of the singular values after all steps, or infinity if they diverge.

    `unit` is the unit roundoff of the dtype; 0 for exact arithmetic. `restarts` are the numbers of steps after which a
    new stage begins, with a new Gram matrix.
    """
    top = (1 + unit) / safety  # bounds the singular values before the next stage
    cuts = (0, *restarts, len(steps))  # (0, 2, 3, 5) for stages of 2, 1 and 2 steps
    with untraced():
        for start, end in itertools.pairwise(cuts):
            product_error = _SHARE * (end - start) * unit  # assumed to grow with the number of steps in the stage
            top = _after_stage(steps[start:end], top, product_error)
            if not top <= _DIVERGED:  # also for NaN
                return math.inf
    return top


def _after_stage(steps: Sequence[Step], top: float, error: float) -> float:
    """Bound singular values that begin in `[0, top]`, after steps on one Gram matrix.

    The error of each rounded product is assumed to be `error` times its largest eigenvalue. The function follows
    `muonfx.polar.iteration.composed` to first order, on a grid of singular values `s`: `r`, `g` and `q` are the
    eigenvalues of the matrices `R`, `G` and `Q`, and `r_error`, `g_error` and `q_error` bound their errors. An error in
    R or G changes a function of it by the error times the derivative. Multiples of I are exact.
    """
    s = _grid(top)
    r = s * s
    r_error = error * top * top
    q = torch.ones_like(s)
    q_error = torch.zeros_like(s)
    for index, (a, b, c) in enumerate(steps):
        # G = a I + b R + c R^2: dG = (b + 2 c R) dR, and the rounding of the product
        g = a + r * (b + c * r)
        g_rounding = error * (g - a).abs().max()
        g_error = (b + 2 * c * r).abs() * r_error + g_rounding

        # Q <- G Q: |d(G Q)| <= |G| |dQ| + |Q| |dG|, and the rounding of the product
        q_error = g.abs() * q_error + q.abs() * g_error
        q = g * q
        if index > 0:  # the first Q is G itself, not a product that rounds
            multiple_of_identity = q[0]  # the value at s = 0
            q_error = q_error + error * (q - multiple_of_identity).abs().max()

        # R <- G (G R): two rounded products. The error of G counts once, in Q: R is updated with the same G.
        is_last = index == len(steps) - 1
        if not is_last:
            inner_rounding = error * (g * r).abs().max()
            new_r = g * g * r
            r_error = g * g * r_error + g.abs() * inner_rounding + error * new_r.max()
            r = new_r
    bounds = (q.abs() + q_error) * s
    return (1 + error) * float(bounds.max())


def _grid(top: float) -> torch.Tensor:
    """Return singular values in `[0, top]`: equidistant ones, and ones down to `top / 1000` with equal ratios."""
    linear = [top * i / _POINTS for i in range(_POINTS + 1)]
    geometric = [top * 10 ** (-3 * i / _POINTS) for i in range(_POINTS)]
    return torch.tensor(linear + geometric, dtype=torch.float64, device="cpu")
