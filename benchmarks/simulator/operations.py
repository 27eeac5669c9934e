"""The floating-point operations of a Newton-Schulz iteration, counted from its plan."""

from __future__ import annotations

from muonfx.polar import Plan
from muonfx.polar.products import block_side

__all__ = ["flops"]


def flops(plan: Plan) -> float:
    """Return the number of floating-point operations to orthogonalize one matrix as the plan describes."""
    n, m = plan.shape
    gram_share = _computed_share(plan.products, n)
    small_share = _computed_share(plan.small_products, n)
    # Products with the long side: each stage computes the symmetric R = X X^T, and Q X.
    long_products = len(plan.stages) * (1 + gram_share) * n * n * m
    # Products of n by n matrices, in the order of `muonfx.polar.iteration.composed`. Each step has the polynomial
    # G = a I + b R + c R^2. Only of squares, one half is mirrored.
    squares = 0
    full_products = 0
    for stage in plan.stages:
        last = len(stage.steps) - 1
        for index, (_, _, c) in enumerate(stage.steps):
            if c != 0:
                squares += 1  # R^2
            if index > 0:
                full_products += 1  # G Q
            if index < last:  # the next R is G (G R)
                full_products += 1
                if c == 0:
                    squares += 1  # G R is a R + b R^2
                else:
                    full_products += 1  # G R
    small_products = (small_share * squares + full_products) * n**3
    return 2 * (long_products + small_products)


def _computed_share(how: str, n: int) -> float:
    """Return the part of a symmetric `n x n` product that is computed, not mirrored, by "batched" or "blocks"."""
    if how == "batched" or n == 0:
        return 1.0
    side = min(n, block_side(n))
    computed = 0
    for start in range(0, n, side):  # a row of blocks, from the diagonal on
        computed += min(side, n - start) * (n - start)
    return computed / n**2
