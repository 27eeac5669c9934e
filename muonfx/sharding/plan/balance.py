"""Assign matrices to ranks so that all have about equal work: by descending cost, each to the least loaded rank.

On equal ranks this order ends at most a third above the optimum (Graham 1969). If all ranks are candidates and the
result misses the mean, packing up to a common limit (MULTIFIT; Coffman, Garey and Johnson 1978) is tried, and the
better result is returned. All ranks call this with the same numbers and get the same result: ties are broken by rank,
never by the order of a dict or a set.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class _Load(NamedTuple):
    """The items that are assigned to a rank so far. Loads are ordered by cost, then by bytes, then by rank."""

    cost: float
    nbytes: int
    rank: int

    def plus(self, cost: float, nbytes: int) -> _Load:
        """Return the load after one more item."""
        return _Load(self.cost + cost, self.nbytes + nbytes, self.rank)


def assign(costs: Sequence[float], candidates: Sequence[Sequence[int]], ranks: int, sizes: Sequence[int]) -> list[int]:
    """Choose one of its candidate ranks for each item, so that ranks have about equal costs. `sizes` break ties."""
    owners = [ranks_of_item[0] for ranks_of_item in candidates]
    loads = [_Load(0.0, 0, rank) for rank in range(ranks)]
    free: list[int] = []  # the items that more than one rank may have
    for item, owner in enumerate(owners):
        if len(candidates[item]) == 1:
            loads[owner] = loads[owner].plus(costs[item], sizes[item])
        else:
            free.append(item)
    free.sort(key=lambda item: (-costs[item], -sizes[item], item))
    loads_before = list(loads)
    groups = {tuple(candidates[item]) for item in free}
    queue_of = {group: _Queue(loads, group) for group in groups}  # items with equal candidates share a queue
    for item in free:
        owner = queue_of[tuple(candidates[item])].least()
        owners[item] = owner
        loads[owner] = loads[owner].plus(costs[item], sizes[item])
    if len(groups) == 1:  # packing is possible only if all free items have the same candidates
        (group,) = groups
        largest_cost = max(loads[rank].cost for rank in group)
        costs_before = {rank: loads_before[rank].cost for rank in group}
        packed = _packed([costs[item] for item in free], costs_before, largest_cost)
        if packed is not None:
            for item, owner in zip(free, packed, strict=True):
                owners[item] = owner
    return owners


def assign_by_bytes(costs: Sequence[float], sizes: Sequence[int], ranks: int) -> list[int]:
    """Choose a rank for each item, so that ranks have about equal costs and also about equal sizes.

    Ranks keep whole parameters, so their memory must be balanced too: no rank ends above the mean of sizes by more than
    the largest item with a cost.
    """
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], -sizes[item], item))
    with_cost = [item for item in order if costs[item] > 0]
    without_cost = [item for item in order if costs[item] <= 0]
    loads = [_Load(0.0, 0, rank) for rank in range(ranks)]
    owner_of = _assign_to_least_cost(with_cost, costs, sizes, loads)
    owner_of |= _assign_to_fewest_bytes(without_cost, sizes, loads)
    return [owner_of[item] for item in range(len(costs))]


def _assign_to_least_cost(
    items: Sequence[int], costs: Sequence[float], sizes: Sequence[int], loads: list[_Load]
) -> dict[int, int]:
    """Assign each item to the rank with the lowest cost that has memory for it. Return the rank by item.

    Each rank has memory for the mean of all sizes plus the largest item. The items are added to `loads`.
    """
    mean = sum(sizes) // len(loads)  # sizes are integers, so rounding down changes nothing
    limit = mean + max([sizes[item] for item in items], default=0)
    queue = _Queue(loads, range(len(loads)))
    owner_of: dict[int, int] = {}
    for item in items:
        owner = queue.least()
        while loads[owner].nbytes + sizes[item] > limit:
            queue.leave()  # a rank with at most the mean always stays, so the queue never empties
            owner = queue.least()
        owner_of[item] = owner
        loads[owner] = loads[owner].plus(costs[item], sizes[item])
    return owner_of


def _assign_to_fewest_bytes(items: Sequence[int], sizes: Sequence[int], loads: Sequence[_Load]) -> dict[int, int]:
    """Assign each item, which has no cost, to the rank with the fewest bytes so far. Return the rank by item."""
    heap = [(load.nbytes, load.cost, load.rank) for load in loads]
    heapq.heapify(heap)
    owner_of: dict[int, int] = {}
    for item in items:
        nbytes, cost, owner_of[item] = heap[0]
        heapq.heapreplace(heap, (nbytes + sizes[item], cost, owner_of[item]))
    return owner_of


class _Queue:
    """A priority queue of ranks. The first is the rank to which the lowest total cost is assigned so far."""

    def __init__(self, loads: Sequence[_Load], ranks: Iterable[int]) -> None:
        self._loads = loads
        # Entries may be stale. Loads only grow, so a stale entry is at the front too early, never too late, and `least`
        # replaces it by the current entry. Queues with common ranks therefore need no synchronization.
        self._heap = [loads[rank] for rank in ranks]
        heapq.heapify(self._heap)

    def least(self) -> int:
        """Return the rank with the lowest load."""
        while True:
            entry = self._heap[0]
            current = self._loads[entry.rank]
            if entry == current:
                return entry.rank
            heapq.heapreplace(self._heap, current)

    def leave(self) -> None:
        """Remove the first rank from the queue, so that it gets no more items."""
        heapq.heappop(self._heap)


_BALANCED = 1.01
"""The largest load over its lower bound from which on packing is not tried: it could save 1 % at most."""

_MOST_TRIALS = 200_000
"""The product of items and ranks up to which packing is tried; above it, packing would take seconds."""

_BISECTIONS = 12


def _packed(descending: Sequence[float], loads: dict[int, float], largest_load: float) -> list[int] | None:
    """Search for an assignment of items to ranks whose largest load is below `largest_load`, by bisection.

    Return a list with a rank per item, or None if no better assignment is found. `descending` has the costs of the
    items, and `loads` each rank's load without them.
    """
    mean = (sum(descending) + sum(loads.values())) / len(loads)
    lower = max(mean, max(loads.values()), max(descending, default=0.0))
    upper = largest_load
    if upper <= _BALANCED * lower or len(descending) * len(loads) > _MOST_TRIALS:
        return None
    by_load = sorted(loads, key=lambda rank: (-loads[rank], rank))
    best: list[int] | None = None
    for _ in range(_BISECTIONS):
        limit = (lower + upper) / 2
        owners = _first_fit(limit, descending, {rank: loads[rank] for rank in by_load})
        if owners is None:
            lower = limit
        else:
            best = owners
            upper = limit
    return best


def _first_fit(limit: float, descending: Sequence[float], loads: dict[int, float]) -> list[int] | None:
    """Assign each item to the first rank whose load stays below `limit`. Return None if an item fits nowhere."""
    owners: list[int] = []
    for cost in descending:
        for rank, load in loads.items():
            if load + cost <= limit:
                loads[rank] = load + cost
                owners.append(rank)
                break
        else:
            return None
    return owners
