"""A lower bound on the load of the busiest rank."""

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
    # Some rank gets k + 1 of the k P + 1 largest items, with at least the sum of the k + 1 smallest among these.
    for last in range(ranks, len(falling), ranks):
        least = max(least, sum(falling[last - last // ranks : last + 1]))
    sums = list(itertools.accumulate(falling, initial=0.0))
    # Find the smallest limit T that a bound on bin packing permits (Martello and Toth 1990, L2): an item above T - a
    # cannot share a rank with an item of at least a.
    low, high = least, 2 * least  # assignment in descending order ends at most at mean + largest
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _is_infeasible(middle, falling, sums, ranks) else (low, middle)
        )
    return low


def _is_infeasible(
    limit: float, falling: Sequence[float], sums: Sequence[float], ranks: int
) -> bool:
    """Return True only if every assignment loads some rank above `limit`; False proves nothing."""

    def above(cost: float) -> int:
        return bisect.bisect_left(falling, -cost, key=operator.neg)

    for a in set(falling[above(limit / 2) :]):
        alone, halves = above(limit - a), above(limit / 2)
        last = bisect.bisect_right(falling, -a, key=operator.neg)
        if max(alone, halves) > ranks or sums[last] - sums[alone] > (ranks - alone) * limit * (
            1 + 1e-12
        ):
            return True
    return False
