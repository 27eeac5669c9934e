"""Assignment of matrices to owners, in descending order of cost, each to the least loaded rank.

On equal ranks this order ends at most a third above the optimum (Graham 1969). If all ranks are candidates and the
result misses the mean, packing up to a common limit (MULTIFIT; Coffman, Garey and Johnson 1978) is tried, and the
better result is returned. All ranks call this with the same numbers and get the same result: ties are broken by rank,
never by the order of a dict or a set.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

__all__ = ["assign", "assign_by_bytes"]


def assign(costs: Sequence[float], candidates: Sequence[Sequence[int]], ranks: int, sizes: Sequence[int]) -> list[int]:
    """Assign every item to one of its candidates so that the sums of costs are about equal."""
    # Takes O(log P) for an item, and O(P) for each distinct object among the candidates.
    board = _Board(ranks)
    groups = {id(own): own for own in candidates if len(own) > 1}
    by_ranks = {own: _Queue(board, own) for own in map(tuple, groups.values())}  # equal groups share a queue
    queues = {key: by_ranks[tuple(own)] for key, own in groups.items()}
    owners = [own[0] for own in candidates]
    # Items with one candidate are first; the others follow by falling cost, ties by bytes, then by rank.
    for i, own in enumerate(candidates):
        if len(own) == 1:
            board.give(owners[i], costs[i], sizes[i])
    free = [i for i, own in enumerate(candidates) if len(own) > 1]
    free.sort(key=lambda i: (-costs[i], -sizes[i], i))
    before = board.loads.copy()
    for i in free:
        owners[i] = queues[id(candidates[i])].least()
        board.give(owners[i], costs[i], sizes[i])
    if len(by_ranks) == 1:
        (group,) = by_ranks
        packed = _packed([costs[i] for i in free], {rank: before[rank] for rank in group}, board.loads)
        for i, rank in zip(free, packed, strict=False):
            owners[i] = rank
    return owners


def assign_by_bytes(costs: Sequence[float], sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign every item to a rank so that both the sums of costs and the sums of sizes are about equal."""
    # Ranks keep whole parameters, so their memory must be balanced too: no rank ends above the mean of sizes by more
    # than the largest item.
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], -sizes[i], i))
    with_cost = [i for i in order if costs[i] > 0]
    spare = max((sizes[i] for i in with_cost), default=0)
    most = sum(sizes) // ranks + spare  # sizes are integers, so rounding the mean down changes nothing
    owners = [0] * len(costs)
    board = _Board(ranks)
    queue = _Queue(board, range(ranks))
    for i in with_cost:
        while board.bytes[owner := queue.least()] + sizes[i] > most:
            queue.leave()  # a rank with at most the mean always stays, so the queue never empties
        owners[i] = owner
        board.give(owner, costs[i], sizes[i])
    by_bytes = [(board.bytes[rank], board.loads[rank], rank) for rank in range(ranks)]
    heapq.heapify(by_bytes)
    for i in order[len(with_cost) :]:
        held, load, owner = by_bytes[0]
        owners[i] = owner
        heapq.heapreplace(by_bytes, (held + sizes[i], load, owner))
    return owners


class _Board:
    """The load and the bytes of each rank so far."""

    def __init__(self, ranks: int) -> None:
        self.loads = [0.0] * ranks
        self.bytes = [0] * ranks

    def standing(self, rank: int) -> tuple[float, int, int]:
        return self.loads[rank], self.bytes[rank], rank

    def give(self, rank: int, cost: float, size: int) -> None:
        self.loads[rank] += cost
        self.bytes[rank] += size


class _Queue:
    """A priority queue of ranks, the least loaded first."""

    def __init__(self, board: _Board, ranks: Iterable[int]) -> None:
        self._board = board
        # Entries may be stale. Loads only grow, so a stale entry is at the front too early, never too late, and `least`
        # replaces it by the current entry. Queues with common ranks therefore need no synchronization.
        self._heap = [board.standing(rank) for rank in ranks]
        heapq.heapify(self._heap)

    def least(self) -> int:
        while True:
            seen = self._heap[0]
            now = self._board.standing(seen[2])
            if seen == now:
                return seen[2]
            heapq.heapreplace(self._heap, now)

    def leave(self) -> None:
        """Remove the first rank."""
        heapq.heappop(self._heap)


def _packed(falling: Sequence[float], before: dict[int, float], loads: Sequence[float]) -> list[int]:
    """Assign items to ranks such that the largest load is as small as the search finds.

    `falling` are the items' costs in descending order, `before` the load of each rank without them, and `loads` the
    loads of the assignment to improve on. Returns the rank of each item, or [] if no better assignment is found.
    """
    # First fit by falling cost: each rank takes the largest items that fit, all items of one cost at once, which takes
    # O(ranks x distinct costs) for a limit.
    least = max((sum(falling) + sum(before.values())) / len(before), max(before.values()), max(falling, default=0.0))
    best = max(loads[rank] for rank in before)
    if best <= 1.01 * least:
        return []
    runs = [(cost, len(list(same))) for cost, same in itertools.groupby(falling)]
    if len(runs) * len(before) > 200_000:  # packing would take longer than a fraction of a second
        return []
    order = sorted(before, key=lambda rank: (-before[rank], rank))
    found: list[tuple[int, int, int]] = []
    low, high = least, best
    for _ in range(12):
        limit = (low + high) / 2
        taken = _fill(limit, runs, order, before)
        if taken is None:
            low = limit
        else:
            found, high = taken, limit
    by_run: list[list[int]] = [[] for _ in runs]
    for run, rank, count in found:
        by_run[run] += [rank] * count
    return [rank for ranks in by_run for rank in ranks]


def _fill(
    limit: float, runs: Sequence[tuple[float, int]], order: Sequence[int], before: dict[int, float]
) -> list[tuple[int, int, int]] | None:
    """Return (run, rank, count) for a packing of all items below `limit`, or None if they do not fit."""
    left = [count for _, count in runs]
    taken: list[tuple[int, int, int]] = []
    for rank in order:
        room = limit - before[rank]
        for i, (cost, _) in enumerate(runs):
            count = left[i] if cost * left[i] <= room else int(room / cost)
            if count > 0:
                taken.append((i, rank, count))
                left[i] -= count
                room -= count * cost
    return None if any(left) else taken
