"""A lower bound on the busiest rank's load, with which plans are compared."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterable, Sequence

__all__ = ["lower_bound"]


def lower_bound(costs: Iterable[float], ranks: int) -> float:
    """Return a lower bound on the busiest rank's load under any assignment."""
    falling = sorted(costs, reverse=True)
    if not falling:
        return 0.0
    least = max(falling[0], sum(falling) / ranks)
    # Of the k P + 1 largest items some rank gets k + 1: at least the k + 1 smallest of them.
    for last in range(ranks, len(falling), ranks):
        least = max(least, sum(falling[last - last // ranks : last + 1]))
    sums = list(itertools.accumulate(falling, initial=0.0))
    # The least limit T that a bound on bin packing does not exclude (Martello and Toth 1990, L2): items above T - a
    # share a rank with no item of at least a.
    low, high = least, 2 * least  # descending assignment never ends above mean + largest
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _is_too_little(middle, falling, sums, ranks) else (low, middle)
    return low


def _is_too_little(limit: float, falling: Sequence[float], sums: Sequence[float], ranks: int) -> bool:
    """True only if every assignment loads some rank above `limit`; False may be wrong."""

    def above(cost: float) -> int:
        return bisect.bisect_left(falling, -cost, key=operator.neg)

    for a in set(falling[above(limit / 2) :]):
        alone, halves = above(limit - a), above(limit / 2)
        last = bisect.bisect_right(falling, -a, key=operator.neg)
        if max(alone, halves) > ranks or sums[last] - sums[alone] > (ranks - alone) * limit * (1 + 1e-12):
            return True
    return False
