"""Owners of matrices: the longest first, each to the rank that has least so far.

That order ends at most a third above the best possible on equal ranks (Graham 1969). Where all ranks are candidates and
it does not reach the mean, it is compared with what packing ranks up to a common limit gives (MULTIFIT; Coffman, Garey
and Johnson 1978), and the better of the two is taken.

All ranks call this with the same numbers and get the same answer; ties are broken by rank, never by the order of a dict
or a set.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import operator
from collections.abc import Iterable, Sequence

__all__ = ["assign", "assign_by_bytes", "lower_bound"]

_MOST_WORK = 200_000
"""Different costs times ranks for which packing is tried: a fraction of a second."""


def assign(
    costs: Sequence[float],
    candidates: Sequence[Sequence[int] | None] | None,
    ranks: int,
    *,
    loads: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,
) -> list[int]:
    """Give every item to a rank, so that the sums of costs are about equal.

    Items with one candidate go first, as there is no choice; the others by falling cost, each to the candidate with the
    least cost so far; of several the one with the fewest bytes, then the lowest. Where the others can all go to the
    same ranks and the busiest ends more than a percent above the mean, ranks are packed instead, if that is better.

    Args:
        costs: of each item, at least 0.
        candidates: for each item the ranks that may take it, or None for all; None: all for all.
        ranks: how many there are.
        loads: what each rank has to do already; None: nothing.
        sizes: bytes of each item, for ties; None: none.

    Returns:
        The rank of each item. Takes O(log P) an item, and O(P) for each group of candidates that is another object.

    Raises:
        ValueError: lengths differ, a cost is negative or not finite, an item has no candidate or one out of range.

    >>> assign([5.0, 4.0, 3.0, 3.0, 3.0], None, 2)
    [0, 0, 1, 1, 1]
    >>> assign([5.0, 4.0], [(1,), None], 2)
    [1, 0]
    """
    allowed = [None] * len(costs) if candidates is None else list(candidates)
    bytes_of = [0] * len(costs) if sizes is None else sizes
    _check(costs, allowed, bytes_of, ranks, loads)
    board = _Board([0.0] * ranks if loads is None else loads)
    owners = [0] * len(costs)
    free: list[int] = []
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
    """Give every item to a rank, so that both the sums of costs and the sums of sizes are about equal.

    For ranks that keep whole parameters: they compute what they keep, and their memory must not differ either. No rank
    ends above `sum(sizes) / ranks` by more than the largest item. Items with a cost go first, by falling cost, to the
    rank with least cost that they fit on: within that mean and the largest item with a cost. A rank that one does not
    fit on takes no more of them; one that has no more than the mean always stays. Items without a cost (embeddings,
    vectors) come last, the largest first, to the rank with the fewest bytes.

    Args:
        costs: of each item, at least 0.
        sizes: bytes of each item, at least 0.
        ranks: how many there are.

    Returns:
        The rank of each item.

    Raises:
        ValueError: as `assign`.

    >>> assign_by_bytes([4.0, 2.0, 2.0, 0.0], [4, 2, 2, 8], 2)
    [0, 1, 1, 0]
    """
    _check(costs, [None] * len(costs), sizes, ranks, None)
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], -sizes[i], i))
    with_cost = [i for i in order if costs[i] > 0]
    spare = max((sizes[i] for i in with_cost), default=0)
    most = sum(sizes) // ranks + spare  # sizes are whole: to round the mean down changes nothing
    owners = [0] * len(costs)
    board = _Board([0.0] * ranks)
    queue = _Queue(board, range(ranks))
    for i in with_cost:
        while board.bytes[owner := queue.least()] + sizes[i] > most:
            queue.leave()
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
    """A bound from below on the busiest rank's load, however items are given out.

    The largest of four: the mean; the largest item; of the `k P + 1` largest items the `k + 1` smallest, as some rank
    gets so many of them; and the least limit that a bound on bin packing does not rule out (Martello and Toth 1990,
    L2): with a limit of T, items above `T - a` share a rank with none of at least `a`.

    >>> lower_bound([3.0, 1.0], 2), lower_bound([1.0, 1.0, 1.0, 1.0], 2), lower_bound([2.0, 2.0, 2.0], 2)
    (3.0, 2.0, 4.0)
    """
    falling = sorted(costs, reverse=True)
    if not falling:
        return 0.0
    least = max(falling[0], sum(falling) / ranks)
    for last in range(ranks, len(falling), ranks):
        least = max(least, sum(falling[last - last // ranks : last + 1]))
    sums = list(itertools.accumulate(falling, initial=0.0))
    low, high = least, 2 * least  # longest first never ends above mean + largest
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _is_too_little(middle, falling, sums, ranks) else (low, middle)
    return low


def _is_too_little(limit: float, falling: Sequence[float], sums: Sequence[float], ranks: int) -> bool:
    """True only if items cannot be given out without a rank going above `limit`; false may be wrong."""

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
    """Some ranks, the one that has least in front.

    The heap holds standings of some time. What a rank has only ever grows, so an old standing comes up too early, never
    too late: it is then replaced by that of now. So queues that share ranks need not know of each other.
    """

    def __init__(self, board: _Board, ranks: Iterable[int]) -> None:
        self._board = board
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
        """The rank in front goes for good."""
        heapq.heappop(self._heap)


def _queues(allowed: Sequence[Sequence[int] | None], board: _Board) -> dict[int, _Queue]:
    """A queue for each group of candidates, by the identity of the group's object; equal groups share one."""
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
    """Ranks of items, by packing under the lowest limit that is found to work; empty where that does not help.

    First fit by falling cost: rank by rank, each takes the largest items that still fit. Items of one cost are alike,
    so a rank takes as many at once as fit, and this costs O(ranks x different costs) for a limit.
    """
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
    """(run, rank, how many) where all items fit below `limit`; else None."""
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
    checked: set[int] = set()  # of large groups there are few, and many items share each
    for i, own in enumerate(candidates):
        if own is None or id(own) in checked:
            continue
        if len(own) == 0 or min(own) < 0 or max(own) >= ranks:
            raise ValueError(
                f"candidates[{i}]: found {list(own)}, expected some of the ranks 0 to {ranks - 1}, or None"
            )
        checked.add(id(own))
