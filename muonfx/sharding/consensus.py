"""Agreement between ranks: on small facts, on the leaves of a tree, and on errors, before any rank changes anything."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.sharding.dtensors import is_dtensor, local_of
from muonfx.sharding.messages import ShardingError, collective
from muonfx.sharding.shard_table import ShardTable
from muonfx.tree import PyTree
from muonfx.tree.display import format_list
from muonfx.tree.tracing import functorch_is_active, is_wrapped, without_transforms

__all__ = [
    "DTYPES",
    "LARGE",
    "UNPLACED",
    "Different",
    "Facts",
    "agree",
    "agree_on_leaves",
    "all_numbers",
    "check_pieces",
    "compare",
    "find_difference",
    "host_device",
    "listed",
    "number_of",
    "outside_transforms",
    "raise_difference",
    "warn_together",
]

LARGE = 0x3FFFFFFF
"""Larger than any number on which ranks agree."""

WORDS = 4
"""The number of 30-bit words in a digest of facts: 120 bits."""

Fact = str | Mapping[str, str]
Facts = Mapping[str, Fact]
"""Facts to compare: a text, or texts by name, under the subject that an error names."""


def host_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of small facts: the CPU if the group supports it, so that reading them syncs with no device."""
    kinds = [torch.device(kind) for kind in getattr(group, "_device_types", [torch.device("cpu")])]
    return torch.device("cpu") if any(kind.type == "cpu" for kind in kinds) else kinds[0]


def all_numbers(mine: Sequence[int], group: dist.ProcessGroup, what: str) -> list[list[int]]:
    """Gather the integers of each rank on all ranks; every rank gives the same number of them."""
    own = torch.tensor(mine, dtype=torch.int64, device=host_device(group))
    said = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with collective(what):
        dist.all_gather(said, own, group=group)
    return [numbers.tolist() for numbers in said]


def agree(facts: Sequence[int], group: dist.ProcessGroup, problem: BaseException | None = None) -> list[int]:
    """Return the elementwise maximum over ranks, or raise on all ranks if any rank has a problem."""
    said = torch.tensor([problem is not None, *facts], dtype=torch.int32, device=host_device(group))
    with collective("agreeing on this step"):
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=group)
    failed, *found = said.tolist()
    if failed:
        _raise_together(problem, group)
    return found


def _raise_together(problem: BaseException | None, group: dist.ProcessGroup) -> None:
    said: list[str | None] = [None] * dist.get_world_size(group)
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


def warn_together(message: str, group: dist.ProcessGroup, stacklevel: int = 2) -> None:
    """Warn on all ranks of a group; if the warning is an error on one rank, raise on all."""
    # If `python -W error` raises on one rank only, the others must not wait for it in the next collective.
    problem: Warning | None = None
    try:
        warnings.warn(message, stacklevel=stacklevel + 1)
    except Warning as error:
        problem = error
    agree([], group, problem)


def listed(ranks: Sequence[int]) -> str:
    """Format ranks for a message."""
    return f"rank{'s' * (len(ranks) > 1)} {format_list(ranks, str)}"


def number_of(facts: object) -> int:
    """Return a number that is equal on two ranks if their facts are, whatever the order of keys."""
    return _words(facts)[0]


def _words(facts: object) -> list[int]:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "big") & LARGE for i in range(WORDS)]


def compare(
    facts: Facts,
    group: dist.ProcessGroup,
    problem: BaseException | None = None,
    own: Mapping[str, int] | None = None,
) -> dict[str, tuple[int, int]]:
    """Require equal facts on all ranks, and return the minimum and maximum over ranks of each number in `own`."""
    # One all-reduce of about 60 bytes compares digests; the facts themselves are sent only if they differ.
    mine = [*_words(facts), *(own or {}).values()]
    found = agree([*mine, *(LARGE - number for number in mine)], group, problem)
    # The maximum of LARGE - number gives the minimum: all ranks agree if minimum and maximum are equal.
    most, least = found[: len(mine)], [LARGE - number for number in found[len(mine) :]]
    if most[:WORDS] != least[:WORDS]:
        raise_difference(facts, group)
    return dict(zip(own or {}, zip(least[WORDS:], most[WORDS:], strict=True), strict=True))


def raise_difference(facts: Facts, group: dist.ProcessGroup) -> None:
    """Raise an error that names the first fact that differs between ranks; return if all facts agree."""
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


def find_difference(facts: Facts, group: dist.ProcessGroup) -> tuple[str, list[int], Fact, Fact] | None:
    """Return the first fact that differs between ranks: its subject, the odd ranks, rank 0's value, theirs."""
    mine = [(high << 30) + low for high, low, *_ in map(_words, facts.values())]
    rows = all_numbers(mine, group, "finding out what differs")
    for place, what in enumerate(facts):
        odd = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
        if odd:
            same = [rank for rank in odd if rows[rank][place] == rows[odd[0]][place]]
            return what, same, _told_by(0, facts[what], group), _told_by(odd[0], facts[what], group)
    return None


def _told_by(rank: int, mine: Fact, group: dist.ProcessGroup) -> Fact:
    box = [mine]
    with collective("telling what differs"):
        dist.broadcast_object_list(box, dist.get_global_rank(group, rank), group=group, device=host_device(group))
    return box[0]


DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point}, key=str))
UNPLACED = 64
"""Added to the dtype code of a gradient whose placements differ from its parameter's, for example partial."""


class Different(ShardingError):
    """A fact differs between ranks; `what` names it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"nothing was changed on any rank: the ranks have different {what}")
        self.what = what


def agree_on_leaves(
    values: PyTree,
    layout: ShardTable,
    problem: Exception | None = None,
    facts: Mapping[str, int] | None = None,
    wishes: Sequence[tuple[bool, Callable[[], None]]] = (),
) -> tuple[list[int], list[bool]]:
    """Return a dtype code per leaf (0: absent on all ranks) and whether any rank lacks it, equal on all ranks."""
    group = layout.group
    assert group is not None
    names, leaves = tree.names(values), tree.leaves(values)
    # One code for each parameter of the layout, so that ranks with different trees send equally many numbers.
    place_of = {name: place for place, name in enumerate(layout.names)}
    codes = [0] * len(place_of)
    for name, leaf in zip(names, leaves, strict=True):
        if name in place_of and isinstance(local_of(leaf), Tensor):
            codes[place_of[name]] = _code(name, leaf, layout)
    same = {"trees": number_of(names), **(facts or {})}
    twice = [number for fact in same.values() for number in (fact, LARGE - fact)]
    # The maximum of LARGE - number gives the minimum: all ranks agree if minimum and maximum are equal.
    lowest = [LARGE - code if code else 0 for code in codes]
    absent = [int(code == 0) for code in codes]
    found = agree([*(int(wish) for wish, _ in wishes), *twice, *codes, *lowest, *absent], group, problem)
    wished, found = found[: len(wishes)], found[len(wishes) :]
    for place, what in enumerate(same):
        if found[2 * place] != LARGE - found[2 * place + 1]:
            raise Different(what)
    # An action runs on all ranks if any rank wishes it, in the same order on all, because it may be collective.
    for (_, act), by_any in zip(wishes, wished, strict=True):
        if by_any:
            act()
    found = found[len(twice) :]
    most, least, some = (found[i * len(codes) : (i + 1) * len(codes)] for i in range(3))
    for name, place in place_of.items():
        if most[place] and most[place] != LARGE - least[place]:
            raise ShardingError(
                f"nothing was changed on any rank: {name!r} has different dtypes or placements on different ranks"
            )
    at = [place_of[name] for name in names]
    return [most[place] for place in at], [bool(some[place]) for place in at]


def _code(name: str, leaf: Tensor, layout: ShardTable) -> int:
    wanted = layout.dtensors.get(name)
    placed = not is_dtensor(leaf) or wanted is None or leaf._spec.placements == wanted.placements
    return 1 + DTYPES.index(leaf.dtype) + (0 if placed else UNPLACED) if leaf.dtype in DTYPES else 0


@contextmanager
def outside_transforms(verb: str, *values: PyTree) -> Generator[Exception | None]:
    """Leave the surrounding torch.func transforms; yield an error to raise if a value is a tensor of one."""
    found = functorch_is_active() and any(
        isinstance(leaf, Tensor) and is_wrapped(leaf) for leaf in map(local_of, tree.leaves(values))
    )
    problem = ShardingError(
        f"{verb} got a tensor of a torch.func transform (grad, vjp, jvp, vmap) and has no derivative and no batching "
        "rule: call it outside of the transform; only layout.all_gather can be called in it"
    )
    with without_transforms():
        yield problem if found else None


def check_pieces(layout: ShardTable, values: PyTree, *, as_placed: bool = True) -> None:
    """Require this rank's shards of the layout's parameters, with `as_placed` also equal placements of DTensors."""
    for name, leaf in zip(tree.names(values), tree.leaves(values), strict=True):
        if leaf is None:
            continue
        local, piece = local_of(leaf), layout.piece(name)
        if not isinstance(local, Tensor):
            raise TypeError(f"{name!r} must be a tensor or None, found {type(leaf).__name__}")
        if is_dtensor(leaf):
            wanted = layout.dtensors.get(name)
            if as_placed and (
                wanted is None or leaf.device_mesh != wanted.mesh or leaf.placements != wanted.placements
            ):
                raise ShardingError(
                    f"{name!r} is placed as {leaf.placements} on {leaf.device_mesh}, in the layout "
                    + (f"as {wanted.placements} on {wanted.mesh}" if wanted is not None else "it is no DTensor")
                    + ": make the layout anew after placements have changed"
                )
        # A gradient may be a partial DTensor, which has the parameter's whole shape.
        whole = is_dtensor(leaf) and not as_placed
        found, expected = (leaf, layout.specs[name].shape) if whole else (local, piece.shape)
        if tuple(found.shape) != expected and (whole or not piece.fits(found)):
            raise ShardingError(
                f"{name!r} has a local tensor of shape {tuple(found.shape)}, the layout says {expected}: was the "
                "tree sharded by this layout?"
            )
