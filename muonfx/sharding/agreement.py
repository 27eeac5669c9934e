"""All ranks agree on small facts, and on whether any of them has an error, before any of them acts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from muonfx.sharding.errors import ShardingError
from muonfx.sharding.messages import collective

__all__ = ["LARGE", "Facts", "agree", "compare", "host_device", "listed", "number_of", "raise_difference"]

LARGE = 0x3FFFFFFF
"""More than any number that ranks agree on."""

WORDS = 4
"""The numbers of a digest of facts: 120 bits."""

Facts = Mapping[str, str | Mapping[str, str]]
"""Texts, or texts by name, by what they are, in words for an error."""


def host_device(group: dist.ProcessGroup) -> torch.device:
    """Where small facts are exchanged: in host memory if the group can, since to read them then waits for no device."""
    kinds = [torch.device(kind) for kind in getattr(group, "_device_types", [torch.device("cpu")])]
    return torch.device("cpu") if any(kind.type == "cpu" for kind in kinds) else kinds[0]


def agree(facts: Sequence[int], group: dist.ProcessGroup, problem: BaseException | None = None) -> list[int]:
    """Find the largest that any rank says; and raise on all ranks if something is wrong on one.

    Args:
        facts: small numbers, of 0 or more; as many on all ranks.
        group: the ranks.
        problem: what is wrong here, if anything.

    Raises:
        ShardingError: something is wrong on another rank, or one is gone.
        BaseException: ``problem`` itself, where it was found.
    """
    said = torch.tensor([problem is not None, *facts], dtype=torch.int32, device=host_device(group))
    with collective("agreeing on this step"):
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=group)
    failed, *found = said.tolist()
    if failed:
        _raise_together(problem, group)
    return found


def _raise_together(problem: BaseException | None, group: dist.ProcessGroup) -> None:
    said: list[Any] = [None] * dist.get_world_size(group)
    with collective("telling all ranks what is wrong"):
        dist.all_gather_object(said, None if problem is None else f"{type(problem).__name__}: {problem}", group=group)
    if problem is not None:
        raise problem
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(said):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    lines = [f"{listed(ranks)}: {text}" for text, ranks in by_text.items()]
    raise ShardingError("nothing was changed on any rank:\n" + "\n".join(lines))


def listed(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> listed([3]), listed([0, 1, 5]), listed(range(100))
    ('rank 3', 'ranks 0, 1, 5', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more')
    """
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def number_of(facts: Any) -> int:
    """A number for facts, to be compared with those of other ranks: the same for the same facts in any order.

    >>> number_of({"a": "1", "b": "2"}) == number_of({"b": "2", "a": "1"}) != number_of({"a": "1"})
    True
    """
    return _words(facts)[0]


def _words(facts: Any) -> list[int]:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "big") & LARGE for i in range(WORDS)]


def compare(
    facts: Facts,
    group: dist.ProcessGroup,
    problem: BaseException | None = None,
    own: Mapping[str, int] | None = None,
) -> dict[str, tuple[int, int]]:
    """Require that facts are the same on all ranks.

    One all-reduce of some 60 bytes, whatever the facts and however many the ranks: it compares digests. What the facts
    are is told only where they differ.

    Args:
        facts: what must be the same.
        group: the ranks.
        problem: what is wrong here, if anything.
        own: small numbers that may differ; the same names on all ranks.

    Returns:
        For each of the numbers that may differ, the least and the most that any rank has.

    Raises:
        ShardingError: the facts differ; the message says in what, and between which ranks. Raised on all ranks.
        BaseException: ``problem`` itself, where it was found.
    """
    mine = [*_words(facts), *(own or {}).values()]
    found = agree([*mine, *(LARGE - number for number in mine)], group, problem)
    # The largest of a number and of its opposite tell whether all are one.
    most, least = found[: len(mine)], [LARGE - number for number in found[len(mine) :]]
    if most[:WORDS] != least[:WORDS]:
        raise_difference(facts, group)
    return dict(zip(own or {}, zip(least[WORDS:], most[WORDS:], strict=True), strict=True))


def raise_difference(facts: Facts, group: dist.ProcessGroup) -> None:
    """Find out on all ranks which of some facts differs, and raise it; return where none does.

    Every rank hears a digest of each fact from every other, and then the fact itself from two of them.

    Raises:
        ShardingError: the first fact that differs.
    """
    difference = find_difference(facts, group)
    if difference is None:
        return
    what, odd, first, other = difference
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
        detail = f"{name!r} is {first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on {listed(odd)}"
    else:
        detail = f"rank 0 has {first}\n  {listed(odd)}: {other}"
    raise ShardingError(f"the ranks have different {what}: {detail}\nAll ranks must make the same one.")


def find_difference(facts: Facts, group: dist.ProcessGroup) -> tuple[str, list[int], Any, Any] | None:
    """The first fact that differs between ranks: what it is, where it is not as on rank 0, how it is there and here."""
    mine = torch.tensor(
        [(high << 30) + low for high, low, *_ in map(_words, facts.values())],
        dtype=torch.int64,
        device=host_device(group),
    )
    said = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with collective("finding out what differs"):
        dist.all_gather(said, mine, group=group)
    rows = [row.tolist() for row in said]
    for place, what in enumerate(facts):
        odd = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
        if odd:
            same = [rank for rank in odd if rows[rank][place] == rows[odd[0]][place]]
            return what, same, _told_by(0, facts[what], group), _told_by(odd[0], facts[what], group)
    return None


def _told_by(rank: int, mine: Any, group: dist.ProcessGroup) -> Any:
    box = [mine]
    with collective("telling what differs"):
        dist.broadcast_object_list(box, dist.get_global_rank(group, rank), group=group, device=host_device(group))
    return box[0]
