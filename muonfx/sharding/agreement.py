"""What all ranks must know alike before any of them acts: who has what, and whether something is wrong anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from muonfx.sharding.errors import ShardingError
from muonfx.sharding.messages import collective

__all__ = ["agree", "compare"]


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
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
    raise ShardingError("nothing was changed on any rank:\n" + "\n".join(lines))


def compare(facts: Mapping[str, Any], group: dist.ProcessGroup, problem: BaseException | None = None) -> list[Any]:
    """Require that some facts are the same on all ranks; return what every rank said of those that may differ.

    Args:
        facts: by what they are, for the error; small, and such that they pickle. Those whose name begins with "own" may
            differ.
        group: the ranks.
        problem: what is wrong here, if anything.

    Raises:
        ShardingError: they differ; the message says where. Raised on all ranks.
        BaseException: ``problem`` itself, where it was found.
    """
    said: list[Any] = [None] * dist.get_world_size(group)
    mine = (None if problem is None else f"{type(problem).__name__}: {problem}", dict(facts))
    with collective("comparing parameters and chains between ranks"):
        dist.all_gather_object(said, mine, group=group)
    if problem is not None:
        raise problem
    if failed := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(said) if text is not None]:
        raise ShardingError("nothing was changed on any rank:\n" + "\n".join(failed))
    for what in facts:
        if not what.startswith("own"):
            _require_same(what, [theirs.get(what) for _, theirs in said])
    return [theirs for _, theirs in said]


def _require_same(what: str, said: Sequence[Any]) -> None:
    odd = next((rank for rank, theirs in enumerate(said) if theirs != said[0]), None)
    if odd is None:
        return
    first, other = said[0], said[odd]
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
        detail = f"{name!r} is {first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {odd}"
    else:
        detail = f"rank 0 has {first}\n  rank {odd} has {other}"
    raise ShardingError(f"the ranks have different {what}: {detail}\nAll ranks must make the same one.")
