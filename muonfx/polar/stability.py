"""A bound of the singular values that rounding drives out of the interval that polynomials were fitted for.

A good set uses its interval to the ends: just beyond them its polynomials grow fast, and each step multiplies an
overshoot by the slope there, about 4 to 8. So one percent too much in the first steps is enough to diverge in the last.

A stage takes all its steps on one rounded Gram matrix. Let a singular value `s` belong to a direction within few large
rows, two nearly parallel ones, say. The rounding of their large products leaves an error of a unit in *their* last
place on the eigenvalue `s^2`, however small that is; the first step of the stage multiplies it by `a^2` before the
second one sees it. A Gaussian matrix has no such directions, which is why averages over them do not show this.

The bound here needs no matrix: it follows the interval `[0, top]` through the stages, with an error in each rounded
product that is a share of its largest eigenvalue. What is allowed is then known before the first product, so that
there is no branch on data and no synchronisation. See the decision record on stages and rounding.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from muonfx.polar.coefficients import Step
from muonfx.tree.symbols import called_once

TOLERANCE = 1.125
"""The ratio to the largest value in exact arithmetic up to which stages count as stable."""

_SHARE = 0.25
"""The error of a rounded product, in units roundoff of its largest eigenvalue, for each step that its stage takes.

Measured on diagonal, nearly parallel, low-rank, graded and Hilbert matrices, thousands for each of 70 schedules: with
this share no stages went beyond their bound, and of those that it refuses most diverged for some matrix.
"""

_POINTS = 400
_DIVERGED = 10.0


@called_once  # a tracer calls this once and keeps the answer
def largest(steps: tuple[Step, ...], restarts: tuple[int, ...], safety: float, dtype: torch.dtype) -> float:
    """The largest singular value that steps may lead to when they are computed in `dtype` in these stages.

    Over the largest one in exact arithmetic; infinity where it may be anything. 1 for polynomials that diverge without
    any rounding.

    >>> once, twice = ((2.0, -1.5, 0.5),) * 2, ((3.4445, -4.775, 2.0315),) * 10
    >>> largest(once, (1,), 1.0, torch.bfloat16) < 1.02
    True
    >>> largest(twice, (2, 4, 6, 8), 1.0, torch.bfloat16), largest(twice, (2, 4, 6, 8), 1.0, torch.float32) < 1.01
    (inf, True)
    """
    exact = _largest(steps, tuple(range(1, len(steps))), safety, 0.0)
    if exact == math.inf:
        return 1.0
    return _largest(steps, restarts, safety, torch.finfo(dtype).eps / 2) / exact


@called_once
def stable_restarts(
    steps: tuple[Step, ...], wanted: tuple[int, ...], safety: float, dtype: torch.dtype
) -> tuple[int, ...]:
    """The restarts `wanted`, or, where rounding in `dtype` forbids them, one step in each stage.

    Except for two in the last one where that is stable: no later step makes more of its overshoot.

    >>> steps = ((3.4445, -4.775, 2.0315),) * 5
    >>> stable_restarts(steps, (2, 4), 1.0, torch.float32), stable_restarts(steps, (2, 4), 1.0, torch.bfloat16)
    ((2, 4), (1, 2, 3))
    """
    single = tuple(range(1, len(steps)))
    return next((cut for cut in (wanted, single[:-1]) if largest(steps, cut, safety, dtype) <= TOLERANCE), single)


@functools.lru_cache(maxsize=4096)
def _largest(steps: tuple[Step, ...], restarts: tuple[int, ...], safety: float, unit: float) -> float:
    top = (1 + unit) / safety
    cuts = (0, *restarts, len(steps))
    for start, end in itertools.pairwise(cuts):
        top = _after(steps[start:end], top, _SHARE * (end - start) * unit)
        if not top <= _DIVERGED:
            return math.inf
    return top


def _after(steps: Sequence[Step], top: float, error: float) -> float:
    """The largest singular value after one stage, from ones up to `top`; `error` is that of a product over its largest.

    Follows `muonfx.polar.iteration.composed` to first order on a grid of singular values: the eigenvalues of `R` and
    `Q`, and bounds of their errors. An error of a polynomial `G` counts once, in `Q`: `R` is updated with the same `G`.
    """
    grid = [top * i / _POINTS for i in range(_POINTS + 1)] + [top * 10 ** (-3 * i / _POINTS) for i in range(_POINTS)]
    r, r_error = [s * s for s in grid], [error * top * top] * len(grid)
    q, q_error = [1.0] * len(grid), [0.0] * len(grid)
    for i, (a, b, c) in enumerate(steps):
        g = [a + x * (b + c * x) for x in r]
        own = error * max(abs(x - a) for x in g)
        g_error = [abs(b + 2 * c * x) * e + own for x, e in zip(r, r_error, strict=True)]
        if i + 1 < len(steps):
            between = error * max(abs(x * y) for x, y in zip(g, r, strict=True))
            r = [x * x * y for x, y in zip(g, r, strict=True)]
            rounded = error * max(r)
            r_error = [x * x * e + abs(x) * between + rounded for x, e in zip(g, r_error, strict=True)]
        q_error = [abs(x) * e + abs(y) * f for x, e, y, f in zip(g, q_error, q, g_error, strict=True)]
        q = [x * y for x, y in zip(g, q, strict=True)]
        if i > 0:
            rounded = error * max(abs(x - q[0]) for x in q)
            q_error = [e + rounded for e in q_error]
    return (1 + error) * max((abs(x) + e) * s for x, e, s in zip(q, q_error, grid, strict=True))
