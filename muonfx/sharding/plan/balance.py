"""Assign matrices to ranks so that all have about equal work: by descending cost, each to the least loaded rank.

On equal ranks this order ends at most a third above the optimum (Graham 1969). If all ranks are candidates and the
result misses the mean, packing up to a common limit (MULTIFIT; Coffman, Garey and Johnson 1978) is tried, and the
better result is returned. All ranks call this with the same numbers and get the same result: ties are broken by rank,
never by the order of a dict or a set.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


def assign(costs: Sequence[float], candidates: Sequence[Sequence[int]], ranks: int, sizes: Sequence[int]) -> list[int]:
    """Choose one of its candidate ranks for each item, so that ranks have about equal costs. `sizes` break ties."""
    # Takes O(log P) for an item, and O(P) for each distinct object among the candidates.
    board: _Board = [(0.0, 0, rank) for rank in range(ranks)]
    groups = {id(own): own for own in candidates if len(own) > 1}
    by_ranks = {own: _Queue(board, own) for own in map(tuple, groups.values())}  # equal groups shard a queue
    queues = {key: by_ranks[tuple(own)] for key, own in groups.items()}
    owners = [own[0] for own in candidates]
    # Items with one candidate are first; the others follow by descending cost, ties by bytes, then by rank.
    for i, own in enumerate(candidates):
        if len(own) == 1:
            _give(board, owners[i], costs[i], sizes[i])
    free = [i for i, own in enumerate(candidates) if len(own) > 1]
    free.sort(key=lambda i: (-costs[i], -sizes[i], i))
    before = [load for load, _, _ in board]
    for i in free:
        owners[i] = queues[id(candidates[i])].least()
        _give(board, owners[i], costs[i], sizes[i])
    if len(by_ranks) == 1:
        (group,) = by_ranks
        most = max(board[rank][0] for rank in group)
        packed = _packed([costs[i] for i in free], {rank: before[rank] for rank in group}, most)
        for i, rank in zip(free, packed, strict=False):
            owners[i] = rank
    return owners


def assign_by_bytes(costs: Sequence[float], sizes: Sequence[int], ranks: int) -> list[int]:
    """Choose a rank for each item, so that ranks have about equal costs and also about equal sizes."""
    # Ranks keep whole parameters, so their memory must be balanced too: no rank ends above the mean of sizes by more
    # than the largest item.
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], -sizes[i], i))
    with_cost = [i for i in order if costs[i] > 0]
    spare = max((sizes[i] for i in with_cost), default=0)
    most = sum(sizes) // ranks + spare  # sizes are integers, so rounding the mean down changes nothing
    owners = [0] * len(costs)
    board: _Board = [(0.0, 0, rank) for rank in range(ranks)]
    queue = _Queue(board, range(ranks))
    for i in with_cost:
        while board[owner := queue.least()][1] + sizes[i] > most:
            queue.leave()  # a rank with at most the mean always stays, so the queue never empties
        owners[i] = owner
        _give(board, owner, costs[i], sizes[i])
    by_bytes = [(nbytes, load, rank) for load, nbytes, rank in board]
    heapq.heapify(by_bytes)
    for i in order[len(with_cost) :]:
        held, load, owner = by_bytes[0]
        owners[i] = owner
        heapq.heapreplace(by_bytes, (held + sizes[i], load, owner))
    return owners


_Board = list[tuple[float, int, int]]
"""For each rank: the sum of costs and the sum of bytes assigned to it so far, and the rank itself."""


def _give(board: _Board, rank: int, cost: float, size: int) -> None:
    load, nbytes, _ = board[rank]
    board[rank] = load + cost, nbytes + size, rank


class _Queue:
    """A priority queue of ranks. The first is the rank to which the lowest total cost is assigned so far."""

    def __init__(self, board: _Board, ranks: Iterable[int]) -> None:
        self._board = board
        # Entries may be stale. Loads only grow, so a stale entry is at the front too early, never too late, and `least`
        # replaces it by the current entry. Queues with common ranks therefore need no synchronization.
        self._heap = [board[rank] for rank in ranks]
        heapq.heapify(self._heap)

    def least(self) -> int:
        while True:
            seen = self._heap[0]
            now = self._board[seen[2]]
            if seen == now:
                return seen[2]
            heapq.heapreplace(self._heap, now)

    def leave(self) -> None:
        """Remove the first rank from the queue, so that it gets no more items."""
        heapq.heappop(self._heap)


def _packed(descending: Sequence[float], before: dict[int, float], most: float) -> list[int]:
    """Search for an assignment of items to ranks whose largest load is below `most`. Return [] if none is found.

    The result is a list with a rank per item. `descending` has the costs, and `before` each rank's load without them.
    """
    least = max(
        (sum(descending) + sum(before.values())) / len(before), max(before.values()), max(descending, default=0.0)
    )
    # More items are balanced without packing, which would take longer than a fraction of a second.
    if most <= 1.01 * least or len(descending) * len(before) > 200_000:
        return []
    order = sorted(before, key=lambda rank: (-before[rank], rank))
    found: list[int] = []
    for _ in range(12):
        limit = (least + most) / 2
        owners = _first_fit(limit, descending, {rank: before[rank] for rank in order})
        if owners is None:
            least = limit
        else:
            found, most = owners, limit
    return found


def _first_fit(limit: float, descending: Sequence[float], loads: dict[int, float]) -> list[int] | None:
    """Assign each item to the first rank whose load stays below `limit`. Return None if an item fits nowhere."""
    owners: list[int] = []
    for cost in descending:
        owner = next((rank for rank, load in loads.items() if load + cost <= limit), None)
        if owner is None:
            return None
        loads[owner] += cost
        owners.append(owner)
    return owners
