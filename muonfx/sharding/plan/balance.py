"""Assignment of matrices to owners, in descending order of cost, each to the least loaded rank.

On equal ranks this order ends at most a third above the optimum (Graham 1969). If all ranks are candidates and the
result misses the mean, packing up to a common limit (MULTIFIT; Coffman, Garey and Johnson 1978) is tried, and the
better result is returned. All ranks call this with the same numbers and get the same result: ties are broken by rank,
never by the order of a dict or a set.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import operator
from collections.abc import Iterable, Sequence

__all__ = ["assign", "assign_by_bytes", "lower_bound"]

_MOST_WORK = 200_000
"""The most distinct costs times ranks for which packing is tried: a fraction of a second."""


def assign(
    costs: Sequence[float],
    candidates: Sequence[Sequence[int] | None] | None,
    ranks: int,
    *,
    loads: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,
) -> list[int]:
    """Assign every item to a rank so that the sums of costs are about equal."""
    # Takes O(log P) for an item, and O(P) for each distinct object among the candidates.
    allowed = [None] * len(costs) if candidates is None else list(candidates)
    bytes_of = [0] * len(costs) if sizes is None else sizes
    _check(costs, allowed, bytes_of, ranks, loads)
    board = _Board([0.0] * ranks if loads is None else loads)
    owners = [0] * len(costs)
    free: list[int] = []
    # Items with one candidate are first; the others follow by falling cost, ties by bytes, then by rank.
    for i, own in enumerate(allowed):
        if own is not None and len(own) == 1:
            owners[i] = own[0]
            board.give(owners[i], costs[i], bytes_of[i])
        else:
            free.append(i)
    free.sort(key=lambda i: (-costs[i], -bytes_of[i], i))
    queues = _queues([allowed[i] for i in free], board)
    group = next(iter(queues.values())).ranks() if len(set(map(id, queues.values()))) == 1 else []
    before = board.loads.copy()
    for i in free:
        owners[i] = queues[id(allowed[i])].least()
        board.give(owners[i], costs[i], bytes_of[i])
    if group:
        packed = _packed([costs[i] for i in free], {rank: before[rank] for rank in group}, board.loads)
        for i, rank in zip(free, packed, strict=False):
            owners[i] = rank
    return owners


def assign_by_bytes(costs: Sequence[float], sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign every item to a rank so that both the sums of costs and the sums of sizes are about equal."""
    _check(costs, [None] * len(costs), sizes, ranks, None)
    # Ranks keep whole parameters, so their memory must be balanced too: no rank ends above the mean of sizes by more
    # than the largest item.
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], -sizes[i], i))
    with_cost = [i for i in order if costs[i] > 0]
    spare = max((sizes[i] for i in with_cost), default=0)
    most = sum(sizes) // ranks + spare  # sizes are integers, so rounding the mean down changes nothing
    owners = [0] * len(costs)
    board = _Board([0.0] * ranks)
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


class _Board:
    """The load and the bytes of each rank so far."""

    def __init__(self, loads: Sequence[float]) -> None:
        self.loads = list(loads)
        self.bytes = [0] * len(self.loads)

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

    def ranks(self) -> list[int]:
        return sorted(standing[2] for standing in self._heap)

    def leave(self) -> None:
        """Remove the first rank."""
        heapq.heappop(self._heap)


def _queues(allowed: Sequence[Sequence[int] | None], board: _Board) -> dict[int, _Queue]:
    """Return a queue for each group of candidates, by the id of the group's object; equal groups share a queue."""
    by_ranks: dict[tuple[int, ...] | None, _Queue] = {}
    by_id: dict[int, _Queue] = {}
    for own in allowed:
        if id(own) not in by_id:
            key = None if own is None else tuple(own)
            if key not in by_ranks:
                by_ranks[key] = _Queue(board, range(len(board.loads)) if key is None else key)
            by_id[id(own)] = by_ranks[key]
    return by_id


def _packed(falling: Sequence[float], before: dict[int, float], loads: Sequence[float]) -> list[int]:
    """Pack items under the lowest feasible limit found; return [] if that does not help."""
    # First fit by falling cost: each rank takes the largest items that fit, all items of one cost at once, which takes
    # O(ranks x distinct costs) for a limit.
    least = max((sum(falling) + sum(before.values())) / len(before), max(before.values()), max(falling, default=0.0))
    best = max(loads[rank] for rank in before)
    if best <= 1.01 * least:
        return []
    runs = [(cost, len(list(same))) for cost, same in itertools.groupby(falling)]
    if len(runs) * len(before) > _MOST_WORK:
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


def _check(
    costs: Sequence[float],
    candidates: Sequence[Sequence[int] | None],
    sizes: Sequence[int],
    ranks: int,
    loads: Sequence[float] | None,
) -> None:
    if ranks < 1:
        raise ValueError(f"ranks: found {ranks}, expected at least 1")
    for name, given in (("candidates", candidates), ("sizes", sizes)):
        if len(given) != len(costs):
            raise ValueError(f"{name}: found {len(given)}, expected one for each of the {len(costs)} costs")
    if loads is not None and len(loads) != ranks:
        raise ValueError(f"loads: found {len(loads)}, expected one for each of the {ranks} ranks")
    for name, numbers in (("costs", costs), ("sizes", sizes), ("loads", loads or ())):
        for i, number in enumerate(numbers):
            if not 0 <= number < float("inf"):
                raise ValueError(f"{name}[{i}]: found {number}, expected a finite number of at least 0")
    checked: set[int] = set()  # many items share one large group object, so each object is checked once
    for i, own in enumerate(candidates):
        if own is None or id(own) in checked:
            continue
        if len(own) == 0 or min(own) < 0 or max(own) >= ranks:
            raise ValueError(
                f"candidates[{i}]: found {list(own)}, expected some of the ranks 0 to {ranks - 1}, or None"
            )
        checked.add(id(own))
