"""`fit_coefficients`: fit the polynomials of a Newton-Schulz iteration to an interval of singular values."""

from __future__ import annotations

import math

import torch

from muonfx.polar.coefficients import Coefficients, Step, require_steps, with_divided_input

_TAYLOR: Step = (1.875, -1.25, 0.375)
"""The limit of the best quintic as its interval shrinks to the point 1, where its value is 1 and its first two
derivatives are 0."""


def fit_coefficients(
    steps: int, lower: float = 1e-3, *, cushion: float = 0.02407327424182761, safety: float = 1.0
) -> Coefficients:
    """Fit coefficients of a Newton-Schulz iteration that maps singular values in `[lower, 1]` close to 1.

    There is one odd quintic polynomial per step. Each is the best uniform approximation of 1 on the interval into which
    the previous polynomials map the singular values. With `cushion=0` this greedy choice gives the best composition
    (arXiv 2505.16932, theorem 3.1).

    Args:
        steps: the number of polynomials, at least 1.
        lower: the smallest singular value of the normalized input to map close to 1, in (0, 1).
        cushion: if a polynomial's interval `[l, u]` is wider than `[cushion * u, u]`, fit on this part and rescale for
            `[l, u]`. Small singular values converge slightly slower, but no polynomial comes close to zero. 0: off.
        safety: the margin for rounding errors, as in `with_safety`; the fit of later steps accounts for it. 1 (no
            margin) is best in exact arithmetic, but diverges in bf16 or fp16, so `orthogonalize` then uses fp32. 1.01
            suffices for bf16.

    Returns:
        A `Coefficients` named "fitted".

    Raises:
        ValueError: an argument is outside its range.
        TypeError: `steps` is not an int.

    >>> round(fit_coefficients(2, 0.1, cushion=0).steps[0][0], 4)
    5.6037
    """
    require_steps(steps)
    if not 0 < lower < 1:
        raise ValueError(f"lower: found {lower!r}, expected a number in (0, 1)")
    if not 0 <= cushion < 1:
        raise ValueError(f"cushion: found {cushion!r}, expected a number in [0, 1)")
    if not 1 <= safety < math.inf:
        raise ValueError(f"safety: found {safety!r}, expected a finite number of at least 1")
    low = lower  # the previous polynomials map singular values into [low, high]
    high = 1.0
    fitted: list[Step] = []
    for i in range(steps):
        polynomial = _TAYLOR  # if both ends are 1, in double precision
        if low < high:
            polynomial = best_quintic(max(low, cushion * high), high)
        # If it was fitted on a part of the interval only, multiply it so that the results at both ends of the whole
        # interval are equally far from 1: (p(low) + p(high)) / 2 = 1.
        if low < cushion * high:
            factor = 2.0 / (_value(polynomial, low) + _value(polynomial, high))
            a, b, c = polynomial
            polynomial = (a * factor, b * factor, c * factor)
        if i < steps - 1:  # not the last: divide the input by the margin for rounding
            polynomial = with_divided_input(polynomial, safety)
        fitted.append(polynomial)
        # The best polynomial maps its interval to [1 - e, 1 + e], and `low` to 1 - e. Both ends converge to 1.
        low = _value(polynomial, low)
        high = 2.0 - low
    return Coefficients(
        "fitted",
        tuple(fitted),
        f"fit_coefficients({steps}, {lower!r}, cushion={cushion!r}, safety={safety!r}), after arXiv 2505.16932",
    )


def best_quintic(low: float, high: float) -> Step:
    """Return `(a, b, c)` such that `a s + b s^3 + c s^5` is as close to 1 as possible on `[low, high]`.

    Closest means the least maximal error. It is found by the Remez algorithm.
    """
    if low > (1 - 5e-6) * high:
        # The four points below would coincide in double precision. The solution for a single point, scaled to it:
        return with_divided_input(_TAYLOR, (low + high) / 2)
    # The error of the best polynomial is `+e`, `-e`, `+e`, `-e` at both ends and at the two extrema between them. Solve
    # for a, b, c and e, move the two inner points to the extrema of this polynomial, and repeat.
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    previous = math.inf
    for _ in range(100):
        s = torch.tensor([low, *inner, high], dtype=torch.float64, device="cpu")
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64, device="cpu")
        equations = torch.stack([s, s**3, s**5, signs], dim=1)  # a s + b s^3 + c s^5 + sign e = 1
        a, b, c, error = torch.linalg.solve(equations, torch.ones_like(s)).tolist()
        if abs(error - previous) <= 1e-15:
            break
        previous = error
        inner = _extrema(a, b, c)
    return a, b, c  # pyright: ignore[reportPossiblyUnboundVariable]


def _extrema(a: float, b: float, c: float) -> list[float]:
    """Return the two positive extrema of `a s + b s^3 + c s^5`, in ascending order."""
    # The derivative a + 3 b t + 5 c t^2, with t = s^2, has the zeros t = q / (5 c) and t = a / q, where
    # q = -(3 b + sign(b) sqrt(9 b^2 - 20 a c)) / 2. Unlike the usual formula, this one does not cancel.
    discriminant = 2.25 * b * b - 5 * a * c
    root = math.sqrt(max(discriminant, 0.0))  # rounding may make it negative
    q = -1.5 * b + math.copysign(root, -b)
    extrema = [math.sqrt(a / q), math.sqrt(q / (5 * c))]
    return sorted(extrema)


def _value(step: Step, s: float) -> float:
    """Return `a s + b s^3 + c s^5`."""
    a, b, c = step
    return s * (a + s * s * (b + c * s * s))
