"""Assign matrices to ranks so that all have about equal work: by descending cost, each to the least loaded rank.

On equal ranks this order ends at most a third above the optimum (Graham 1969). If all ranks are candidates and the
result misses the mean, packing up to a common limit (MULTIFIT; Coffman, Garey and Johnson 1978) is tried, and the
better result is returned. All ranks call this with the same numbers and get the same result: ties are broken by rank,
never by the order of a dict or a set.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """Some matrices to compute on one rank, or a parameter to hold there."""

    cost: float
    size: int
    """The number of bytes or elements."""
    candidates: tuple[int, ...] = ()
    """The ranks of which `assign` chooses one; `assign_by_bytes` may choose any rank."""


class _Load(NamedTuple):
    """The items that are assigned to a rank so far. Loads are ordered by cost, then by size, then by rank."""

    cost: float
    size: float
    rank: int

    def plus(self, item: Item) -> _Load:
        """Return the load after one more item."""
        return _Load(self.cost + item.cost, self.size + item.size, self.rank)


def assign(items: Sequence[Item], ranks: int) -> list[int]:
    """Choose one of its candidates for each item, so that ranks have about equal costs. Sizes break ties.

    Here rank 0 must compute the expensive item, so rank 1 gets both others:

    >>> assign([Item(1.0, 0, (0, 1)), Item(1.0, 0, (0, 1)), Item(9.0, 0, (0,))], ranks=2)
    [1, 1, 0]
    """
    without_choice: dict[int, Item] = {}
    with_choice: dict[int, Item] = {}
    for index, item in enumerate(items):
        if len(item.candidates) == 1:
            without_choice[index] = item
        else:
            with_choice[index] = item
    # 1. Items with a single candidate.
    loads = [_Load(0.0, 0, rank) for rank in range(ranks)]
    owner_of = _assign_to_least_loaded(without_choice, loads)  # updates `loads`
    loads_before = list(loads)
    # 2. Each other item, from the highest cost to the lowest, goes to its candidate with the lowest load so far.
    by_cost = _descending(with_choice)
    owner_of |= _assign_to_least_loaded(by_cost, loads)
    # 3. This may end a third above the optimum. If all these items have the same candidates, as in most models, search
    # for an assignment with a lower largest cost, that is, a shorter step. If there is one, it replaces the assignment
    # of step 2.
    different_candidates = {item.candidates for item in by_cost.values()}
    if len(different_candidates) == 1:
        candidates = different_candidates.pop()
        largest_cost = max([loads[rank].cost for rank in candidates])
        costs_before = {rank: loads_before[rank].cost for rank in candidates}
        owner_of |= _packed(by_cost, costs_before, largest_cost)
    return [owner_of[index] for index in range(len(items))]


def _assign_to_least_loaded(items: Mapping[int, Item], loads: list[_Load]) -> dict[int, int]:
    """Assign each item to its candidate with the lowest load so far. Return the rank by index of the item.

    The items are added to `loads`. With descending costs, small items come last, and can fill the differences that
    large ones leave.
    """
    queues: dict[tuple[int, ...], list[_Load]] = {}  # items with equal candidates share a queue
    owner_of: dict[int, int] = {}
    for index, item in items.items():
        if item.candidates not in queues:
            # A sorted list is a heap.
            queues[item.candidates] = sorted([loads[rank] for rank in item.candidates])
        queue = queues[item.candidates]
        # The first entry may be an old load of its rank, such as 2.0 where it has 5.0 now. Loads only grow, so the rank
        # is then too early in the queue, and moves back.
        while queue[0] != loads[queue[0].rank]:
            heapq.heapreplace(queue, loads[queue[0].rank])
        rank = queue[0].rank
        loads[rank] = loads[rank].plus(item)
        owner_of[index] = rank
    return owner_of


def assign_by_bytes(items: Sequence[Item], ranks: int) -> list[int]:
    """Choose a rank for each item, so that ranks have about equal costs and also about equal sizes.

    Ranks keep whole parameters, so their memory must be balanced too: no rank ends above the mean of sizes by more than
    the largest item with a cost. Below, rank 0 gets the matrix, and rank 1 both biases, which cost nothing:

    >>> assign_by_bytes(
    ...     [Item(cost=9.0, size=10), Item(cost=0.0, size=6), Item(cost=0.0, size=4)], ranks=2
    ... )
    [0, 1, 1]
    """
    with_cost: dict[int, Item] = {}
    without_cost: dict[int, Item] = {}
    items_by_index = dict(enumerate(items))
    for index, item in _descending(items_by_index).items():
        if item.cost > 0:
            with_cost[index] = item
        else:
            without_cost[index] = item
    # The items with a cost, such as matrices, are assigned first: their cost is the time of a step.
    loads = [_Load(0.0, 0, rank) for rank in range(ranks)]
    sizes = [item.size for item in items]
    mean_size = sum(sizes) // ranks  # sizes are integers, so rounding down changes nothing
    owner_of = _assign_by_cost(with_cost, loads, mean_size)
    # The items without a cost, such as biases, go where the memory is least full. They take no time to compute.
    owner_of |= _assign_by_size(without_cost, loads)
    return [owner_of[index] for index in range(len(items))]


def _descending(items: Mapping[int, Item]) -> dict[int, Item]:
    """Sort items by descending cost, then by descending size. Equal items stay in their order."""
    return dict(sorted(items.items(), key=lambda pair: (-pair[1].cost, -pair[1].size)))


def _assign_by_cost(
    items: Mapping[int, Item], loads: list[_Load], mean_size: int
) -> dict[int, int]:
    """Assign each item to the rank with the lowest cost that has memory for it. Return the rank by index of the item.

    Each rank has memory for `mean_size`, the mean of the sizes of all items, plus the largest of these items. The items
    are added to `loads`. If the mean is 10 and the largest item is 6, a rank with 12 so far may get an item of 4, and
    none of 5.
    """
    sizes = [item.size for item in items.values()]
    limit = mean_size + max(sizes, default=0)
    queue = sorted(loads)  # a sorted list is a heap, whose first entry stays the lowest
    owner_of: dict[int, int] = {}
    for index, item in items.items():
        # The first rank has the lowest cost, but perhaps too little memory: it then leaves the queue. The queue never
        # becomes empty, because some rank has at most the mean, and so has room for any item.
        while queue[0].size + item.size > limit:
            heapq.heappop(queue)
        rank = queue[0].rank
        loads[rank] = loads[rank].plus(item)
        heapq.heapreplace(queue, loads[rank])
        owner_of[index] = rank
    return owner_of


def _assign_by_size(items: Mapping[int, Item], loads: Sequence[_Load]) -> dict[int, int]:
    """Assign each item, which has no cost, to the rank with the smallest size so far. Return the rank by index."""
    # A heap: the first entry is the least. Of equal sizes, the lower cost comes first, and then the lower rank.
    heap = [(load.size, load.cost, load.rank) for load in loads]
    heapq.heapify(heap)
    owner_of: dict[int, int] = {}
    for index, item in items.items():
        size, cost, rank = heap[0]
        owner_of[index] = rank
        heapq.heapreplace(heap, (size + item.size, cost, rank))
    return owner_of


_BALANCED = 1.01
"""The largest load over its lower bound from which on packing is not tried: it could save 1 % at most."""

_MOST_TRIALS = 200_000
"""The product of items and ranks up to which packing is tried; above it, packing would take seconds."""

_BISECTIONS = 12


def _packed(
    items: Mapping[int, Item], costs_before: Mapping[int, float], largest_cost: float
) -> dict[int, int]:
    """Search for an assignment of items to ranks of which no rank has a cost of `largest_cost` or more.

    Return the rank by index of the item; an empty dict if none is found. The items have descending costs, and
    `costs_before` has each rank's cost without them. Costs of 3, 3, 2, 2 and 2 fit on two ranks with 6 each. If each
    item went to the least loaded rank, one rank would have 7:

    >>> items = {index: Item(cost, 0) for index, cost in enumerate([3.0, 3.0, 2.0, 2.0, 2.0])}
    >>> _packed(items, {0: 0.0, 1: 0.0}, largest_cost=7.0)
    {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
    """
    ranks = len(costs_before)
    costs = [item.cost for item in items.values()]
    total = sum(costs) + sum(costs_before.values())
    lower = max(total / ranks, *costs_before.values(), *costs)  # no assignment is below the mean
    upper = largest_cost
    is_balanced = upper <= _BALANCED * lower
    takes_too_long = len(items) * ranks > _MOST_TRIALS
    if is_balanced or takes_too_long:
        return {}
    # Bisection for the lowest limit of a rank's cost with which all items fit.
    best: dict[int, int] = {}
    for _ in range(_BISECTIONS):
        limit = (lower + upper) / 2
        owner_of = _first_fit(limit, items, costs_before)
        if owner_of is None:  # the items need a higher limit
            lower = limit
        else:  # they fit: try a lower limit, and keep this assignment if none is found
            best = owner_of
            upper = limit
    return best


def _first_fit(
    limit: float, items: Mapping[int, Item], costs_before: Mapping[int, float]
) -> dict[int, int] | None:
    """Assign each item to the first rank whose total cost stays within `limit`. Return None if an item fits nowhere.

    `costs_before` has the cost of each rank without the items. The rank with the highest is tried first.

    >>> _first_fit(
    ...     5.0, {7: Item(3.0, 0), 8: Item(2.0, 0)}, {0: 4.0, 1: 0.0}
    ... )  # both items fit on rank 1 only
    {7: 1, 8: 1}
    """
    cost_of = dict(sorted(costs_before.items(), key=lambda pair: (-pair[1], pair[0])))
    owner_of: dict[int, int] = {}
    for index, item in items.items():
        for rank, cost in cost_of.items():
            # The first rank with room, not the emptiest: gaps are filled tightly.
            if cost + item.cost <= limit:
                cost_of[rank] = cost + item.cost
                owner_of[index] = rank
                break
        if index not in owner_of:  # no rank had room, so the limit is too low
            return None
    return owner_of
