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
    loads = [_Load(0.0, 0, rank) for rank in range(ranks)]
    owners: list[int] = []
    free: list[int] = []  # the items that more than one rank may have
    for item, ranks_of_item in enumerate(candidates):
        owner = ranks_of_item[0]
        owners.append(owner)
        if len(ranks_of_item) == 1:
            loads[owner] = loads[owner].plus(costs[item], sizes[item])
        else:
            free.append(item)
    free.sort(key=lambda item: (-costs[item], -sizes[item], item))
    loads_before = list(loads)
    queue_of_ranks: dict[tuple[int, ...], _Queue] = {}  # items with equal candidates share a queue
    for item in free:
        ranks_of_item = tuple(candidates[item])
        if ranks_of_item not in queue_of_ranks:
            queue_of_ranks[ranks_of_item] = _Queue(loads, ranks_of_item)
        owner = queue_of_ranks[ranks_of_item].least()
        owners[item] = owner
        loads[owner] = loads[owner].plus(costs[item], sizes[item])
    if len(queue_of_ranks) == 1:  # packing is possible only if all free items have the same candidates
        (group,) = queue_of_ranks
        cost_before = {rank: loads_before[rank].cost for rank in group}
        largest_cost = max(loads[rank].cost for rank in group)
        packed = _packed([costs[item] for item in free], cost_before, largest_cost)
        for item, rank in zip(free, packed, strict=False):  # `packed` is empty if it is no better
            owners[item] = rank
    return owners


def assign_by_bytes(costs: Sequence[float], sizes: Sequence[int], ranks: int) -> list[int]:
    """Choose a rank for each item, so that ranks have about equal costs and also about equal sizes.

    Ranks keep whole parameters, so their memory must be balanced too: no rank ends above the mean of sizes by more than
    the largest item with a cost.
    """
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], -sizes[item], item))
    with_cost = [item for item in order if costs[item] > 0]
    largest = max([sizes[item] for item in with_cost], default=0)
    limit = sum(sizes) // ranks + largest  # sizes are integers, so rounding the mean down changes nothing
    owners = [0] * len(costs)
    loads = [_Load(0.0, 0, rank) for rank in range(ranks)]
    queue = _Queue(loads, range(ranks))
    for item in with_cost:
        owner = queue.least()
        while loads[owner].nbytes + sizes[item] > limit:
            queue.leave()  # a rank with at most the mean always stays, so the queue never empties
            owner = queue.least()
        owners[item] = owner
        loads[owner] = loads[owner].plus(costs[item], sizes[item])
    by_bytes = [(load.nbytes, load.cost, load.rank) for load in loads]
    heapq.heapify(by_bytes)
    for item in order[len(with_cost) :]:  # the items without cost, each to the rank with the fewest bytes
        nbytes, cost, owner = by_bytes[0]
        owners[item] = owner
        heapq.heapreplace(by_bytes, (nbytes + sizes[item], cost, owner))
    return owners


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


def _packed(descending: Sequence[float], loads: dict[int, float], most: float) -> list[int]:
    """Search for an assignment of items to ranks whose largest load is below `most`. Return [] if none is found.

    The result is a list with a rank per item. `descending` has the costs, and `loads` each rank's load without them.
    """
    mean = (sum(descending) + sum(loads.values())) / len(loads)
    least = max(mean, max(loads.values()), max(descending, default=0.0))
    # More items are balanced without packing, which would take longer than a fraction of a second.
    if most <= 1.01 * least or len(descending) * len(loads) > 200_000:
        return []
    by_load = sorted(loads, key=lambda rank: (-loads[rank], rank))
    best: list[int] = []
    for _ in range(12):
        limit = (least + most) / 2
        owners = _first_fit(limit, descending, {rank: loads[rank] for rank in by_load})
        if owners is None:
            least = limit
        else:
            best = owners
            most = limit
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
