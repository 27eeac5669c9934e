"""Let the ranks agree before any of them changes a tensor: on a call, on which gradients are None, and on errors."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.sharding.dtensors import PLAIN, is_dtensor, is_placed_like, local_of
from muonfx.sharding.messages import ShardingError, collective, digest
from muonfx.sharding.shard_table import ShardTable
from muonfx.tree import PyTree
from muonfx.tree.display import format_list
from muonfx.tree.tracing import functorch_is_active, is_wrapped, without_transforms

__all__ = [
    "CONSTRUCTING",
    "DTYPES",
    "LARGE",
    "UNPLACED",
    "Agreement",
    "Facts",
    "agree",
    "agree_on_leaves",
    "all_objects",
    "check_pieces",
    "construction",
    "host_device",
    "listed",
    "outside_transforms",
    "report_failure",
    "wait_for_all",
    "warn_together",
    "words",
]

LARGE = 0x3FFFFFFF
"""Larger than any number that `agree` compares; ``LARGE - number`` turns a maximum over ranks into a minimum."""

Facts = Mapping[str, str | Mapping[str, str]]
"""Descriptions that must be equal on all ranks: from a subject, which an error names, to a text or texts by name."""


def host_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for small messages in a group. It is the CPU if possible, which avoids syncs with a GPU."""
    cpu = torch.device("cpu")
    kinds = getattr(group, "_device_types", [cpu])
    return cpu if cpu in kinds else torch.device(kinds[0])


def all_objects(mine: Any, group: dist.ProcessGroup, what: str) -> list[Any]:
    """Gather one Python object per rank, in a list on every rank. `what` names the operation in errors."""
    found: list[Any] = [None] * dist.get_world_size(group)
    with collective(what):
        dist.all_gather_object(found, mine, group=group)
    return found


def words(value: object, count: int) -> list[int]:
    """Hash a value to a list of `count` integers of 30 bits. Ranks compare these instead of the value."""
    found = hashlib.blake2b(repr(value).encode(), digest_size=4 * count).digest()
    return [int.from_bytes(found[4 * i : 4 * i + 4], "big") & LARGE for i in range(count)]


class Agreement(NamedTuple):
    """The result of `agree`, equal on all ranks."""

    are_equal: bool
    """True if all ranks passed the same value `compared`."""
    numbers: list[int]
    """The maximum over ranks of each of the `numbers`."""
    is_requested: bool
    """True if any rank passed a `request`."""


def agree(
    what: str,
    group: dist.ProcessGroup,
    problem: BaseException | None = None,
    *,
    same: object = "",
    compared: object = "",
    explain: Callable[[], Facts] = dict,
    numbers: Sequence[int] = (),
    request: bool = False,
) -> Agreement:
    """Check with one all-reduce that all ranks make the same call. Raise the error of any rank (`problem`) on all.

    The call's name, `what`, and the value `same` must be equal on all ranks. If not, `explain` returns texts for the
    error to compare. With `request`, a rank requests something of all ranks, such as a comparison of replicas.
    """
    # Without `numbers` every call sends 44 bytes, so ranks that make different calls find that out here.
    mine = [*words((what, same), 3), *words(compared, 2)]
    # The maximum of LARGE - number gives the minimum: all ranks agree if minimum and maximum are equal.
    urgency = _PROBLEM if problem is not None else int(request)
    said = [urgency, *mine, *(LARGE - number for number in mine), *numbers]
    reduced = torch.tensor(said, dtype=torch.int32, device=host_device(group))
    with collective(what):
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    most_urgent, *found = reduced.tolist()
    if most_urgent == _PROBLEM:
        _raise_together(what, problem, group)
    equal = [found[place] == LARGE - found[5 + place] for place in range(5)]
    if not all(equal[:3]):
        _raise_difference({"calls": what, **explain()}, group)
    return Agreement(all(equal), found[10:], bool(most_urgent))


_PROBLEM = 2
"""The first number of the message of a rank that has an error. It is larger than that of a request, which is 1."""


def _raise_together(what: str, problem: BaseException | None, group: dist.ProcessGroup) -> None:
    by_text: dict[str, list[int]] = {}
    mine = None if problem is None else f"{type(problem).__name__}: {problem}"
    for rank, text in enumerate(all_objects(mine, group, what)):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if problem is not None:
        raise problem
    lines = [f"{listed(ranks)}: {text}" for text, ranks in by_text.items()]
    raise ShardingError("nothing was changed on any rank:\n" + "\n".join(lines))


def _raise_difference(facts: Facts, group: dist.ProcessGroup) -> None:
    """Raise a ShardingError that names the first text in `facts` that differs between ranks, and these ranks."""
    what = "finding out what differs"
    rows = all_objects({subject: digest(fact) for subject, fact in facts.items()}, group, what)
    for subject in rows[0]:
        odd = [rank for rank, row in enumerate(rows) if row.get(subject) != rows[0][subject]]
        if odd:
            same = [rank for rank in odd if rows[rank].get(subject) == rows[odd[0]].get(subject)]
            is_shown = dist.get_rank(group) in (0, odd[0])
            shown = all_objects(facts.get(subject) if is_shown else None, group, what)
            raise ShardingError(
                f"nothing was changed on any rank: the ranks have different {subject}: "
                f"{_difference(shown[0], shown[odd[0]], listed(same))}\nAll ranks must have the same."
            )
    raise ShardingError(
        "nothing was changed on any rank: found different calls, parameters or options on different ranks, expected "
        "the same: construct and step the optimizer in the same way on all ranks"
    )


def _difference(first: object, other: object, odd: str) -> str:
    """Return an error text: how the description `first` of rank 0 differs from `other`, which the ranks `odd` have."""
    place = ""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        name = next((name for name in [*first, *other] if first.get(name) != other.get(name)), None)
        if name is None:
            return f"rank 0 has the order {[*first]}\n  {odd}: {[*other]}"
        place, first, other = f"{name!r} is ", first.get(name, "missing"), other.get(name, "missing")
    # Of long texts only the part around the first difference is shown.
    one, two = str(first), str(other)
    start = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
    one, two = (text if len(text) <= 400 else f"...{text[max(0, start - 200) : start + 200]}..." for text in (one, two))
    return f"{place}{one} on rank 0 and {two} on {odd}" if place else f"rank 0 has {one}\n  {odd}: {two}"


def warn_together(message: str, group: dist.ProcessGroup, stacklevel: int = 2) -> None:
    """Issue a warning on all ranks of a group. If a rank turns warnings into errors, raise on all ranks."""
    # If one rank alone raised, the others would wait for it in the next collective.
    problem: Warning | None = None
    try:
        warnings.warn(message, stacklevel=stacklevel + 1)
    except Warning as error:
        problem = error
    agree("a warning", group, problem)


def listed(ranks: Sequence[int]) -> str:
    """Return a text for some ranks, such as "ranks 1, 2", to be used in a message."""
    return f"rank{'s' * (len(ranks) > 1)} {format_list(ranks, str)}"


# -------------------------------------------------------------------------------------------------------------- leaves

DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point}, key=str))
UNPLACED = 64
"""Added to the dtype code of a gradient whose DTensor placements differ from its parameter's, such as Partial."""

_CODES = {dtype: code for code, dtype in enumerate(DTYPES, 1)}


def agree_on_leaves(
    what: str,
    names: Sequence[str],
    leaves: Sequence[Any],
    layout: ShardTable,
    problem: Exception | None = None,
    *,
    same: object = "",
    explain: Callable[[], Facts] = dict,
    request: bool = False,
) -> tuple[list[int], list[bool], bool]:
    """Find out which leaves of a tree are None on some ranks. Raise on all ranks if a leaf has different dtypes.

    Return two lists with an item per leaf, equal on all ranks. The first has the leaf's dtype as an integer, 0 if it is
    None on all ranks. The second is True if it is None on some ranks only. Also return whether any rank has passed a
    `request`. Other arguments are as in `agree`.
    """
    # One code for each parameter of the layout, so that ranks with different trees send equally many numbers.
    codes = dict.fromkeys(layout.specs, 0)
    for name, leaf in zip(names, leaves, strict=True):
        if name in codes and isinstance(leaf, Tensor):
            code = _CODES.get(leaf.dtype, 0)
            is_placed = type(leaf) in PLAIN or is_placed_like(leaf, layout.dtensors.get(name))
            codes[name] = code if is_placed or not code else code + UNPLACED
    mine = [*codes.values()]
    if layout.group is None or layout.size == 1:
        if problem is None and layout.size > 1:
            problem = ShardingError(
                f"{layout!r} was created with a number of ranks and has no process group, expected a process group: "
                "create it in the running job, or use assemble() in one process"
            )
        if problem is not None:
            raise problem
        return [codes[name] for name in names], [False] * len(names), request
    trees = layout.once(("names", tuple(names)), lambda: digest((layout.digest, list(layout.specs), list(names))))
    are_equal, _, is_requested = agree(
        what,
        layout.group,
        problem,
        same=(trees, same),
        compared=mine,
        explain=lambda: {
            "parameters": str([*layout.specs]),
            "layouts": f"{layout!r} ({layout.digest})",
            "trees": str(list(names)),
            **explain(),
        },
        request=request,
    )
    if are_equal:
        return [codes[name] for name in names], [False] * len(names), is_requested
    numbers = [*mine, *(LARGE - code if code else 0 for code in mine), *(int(not code) for code in mine)]
    found = agree("comparing leaves", layout.group, numbers=numbers).numbers
    most, least, some = (dict(zip(codes, found[i * len(mine) : (i + 1) * len(mine)], strict=True)) for i in range(3))
    for name, code in most.items():
        if code and code != LARGE - least[name]:
            raise ShardingError(
                f"nothing was changed on any rank: {name!r} has different dtypes or placements on different ranks, "
                "expected equal ones: load and shard the model in the same way on all ranks"
            )
    return [most[name] for name in names], [bool(most[name] and some[name]) for name in names], is_requested


@contextmanager
def outside_transforms(verb: str, *values: PyTree) -> Generator[Exception | None]:
    """Run a with block outside of torch.func transforms. Yield an error if `values` are inside one, else None."""
    if not functorch_is_active():
        yield None
        return
    found = any(isinstance(leaf, Tensor) and is_wrapped(leaf) for leaf in map(local_of, tree.leaves(values)))
    problem = ShardingError(
        f"{verb}: found a tensor of a torch.func transform (grad, vjp, jvp, vmap), expected a plain tensor, because "
        f"{verb} has no derivative and no batching rule: call it outside the transform; only layout.all_gather can be "
        "called inside"
    )
    with without_transforms():
        yield problem if found else None


def check_pieces(
    layout: ShardTable, names: Sequence[str], leaves: Sequence[Any], *, as_placed: bool = True
) -> list[Tensor | None]:
    """Raise unless each leaf is None or has the shape of this rank's shard. Return a list of local tensors.

    With `as_placed`, a DTensor must also have the placements of its parameter.
    """
    shards = layout.expected_shards
    found: list[Tensor | None] = []
    for name, leaf in zip(names, leaves, strict=True):
        # Nearly all leaves pass these quick tests; the others are examined one by one.
        shard, local, fits = shards.get(name), leaf, leaf is None
        if shard is not None and leaf is not None:
            if type(leaf) in PLAIN:
                fits = leaf.shape == shard.shape
            else:
                local = getattr(leaf, "_local_tensor", None)
                fits = local is not None and local.shape == shard.shape and shard.is_placed(leaf._spec)
        found.append(local if fits else _checked_piece(layout, name, leaf, as_placed=as_placed))
    return found


def _checked_piece(layout: ShardTable, name: str, leaf: object, *, as_placed: bool) -> Tensor:
    local, piece, wanted = local_of(leaf), layout.piece(name), layout.dtensors.get(name)
    if not isinstance(local, Tensor):
        raise TypeError(f"{name!r} must be a tensor or None, found {type(leaf).__name__}")
    if is_dtensor(leaf) and as_placed:
        found = leaf.placements, leaf.device_mesh
        expected = None if wanted is None else (wanted.placements, wanted.mesh)
        if found != expected:
            shown = "a plain tensor" if expected is None else "{} on {}".format(*expected)
            raise ShardingError(
                f"{name!r} has the placements {found[0]} on {found[1]}, expected {shown} as in the layout: create a "
                "new layout after changing placements"
            )
    # A gradient may be a partial DTensor, which has the parameter's whole shape.
    whole = leaf if is_dtensor(leaf) and not as_placed else None
    shape, needed = (local.shape, piece.shape) if whole is None else (whole.shape, layout.specs[name].shape)
    if tuple(shape) != needed and (whole is not None or not piece.fits(local)):
        raise ShardingError(
            f"{name!r} has a local shape {tuple(shape)}, expected {needed} under the layout: shard the tree with "
            "layout.shard(...) of this layout"
        )
    return local


# ------------------------------------------------------------------------------------------------------------- waiting
# A caller may start a collective on one rank alone by mistake. The ranks therefore first wait for each other through
# the key-value store of their group, without a collective. A rank that calls alone disturbs no collective of the
# others, for example in the next backward pass, and its error names the missing ranks.

PATIENCE = timedelta(seconds=20)
"""The time after which a rank that waits for others in `wait_for_all` warns."""

_met: dict[tuple[str, str], int] = {}
"""How often `wait_for_all` has returned for a group and a purpose; equal on all ranks of the group."""


_WITHOUT_STORE = ("fake", "mpi")
"""Backends whose groups have no key-value store: torch's pretended ranks, and MPI. Their ranks do not wait here."""


def wait_for_all(group: dist.ProcessGroup, what: str) -> None:
    """Wait until every rank of a group has called this with the same `what`. After a timeout, name missing ranks."""
    if dist.get_backend(group) in _WITHOUT_STORE:
        return
    turn = _met.get((group.group_name, what), 0)
    keys = [f"muonfx/{what}/{turn}/{rank}" for rank in range(dist.get_world_size(group))]
    own = keys[dist.get_rank(group)]
    with collective(what):
        store = group.get_group_store()
        store.set(own, "")
        try:
            patience = _timeout(group)
            missing = _missing(store, keys, min(PATIENCE, patience))
            if missing and patience > PATIENCE:
                warnings.warn(f"{what} waits for {missing}: all ranks must call it together", stacklevel=4)
                missing = _missing(store, keys, patience - PATIENCE)
            if missing:
                raise ShardingError(
                    f"nothing was changed: all ranks must call {what} together, but {missing} did not within {patience}"
                )
        except BaseException:  # also an interrupt: this rank no longer waits, and all can meet later
            store.delete_key(own)
            raise
        _met[group.group_name, what] = turn + 1
        failed = _failure_key(what, turn)
        if store.check([failed]):
            raise ShardingError(f"nothing was changed on any rank:\n{store.get(failed).decode()}")


def _failure_key(what: str, turn: int) -> str:
    return f"muonfx/{what}/{turn}/failed"


def report_failure(group: dist.ProcessGroup, what: str, problem: BaseException) -> None:
    """Let the ranks that wait in `wait_for_all`, or will, raise this rank's error at once. This rank does not wait."""
    if dist.get_backend(group) in _WITHOUT_STORE:
        return
    turn = _met.get((group.group_name, what), 0)
    rank = dist.get_rank(group)
    store = group.get_group_store()
    store.set(_failure_key(what, turn), f"rank {rank}: {type(problem).__name__}: {problem}")
    for other in range(dist.get_world_size(group)):  # so that no rank waits for another that is late
        store.set(f"muonfx/{what}/{turn}/{other}", "")
    _met[group.group_name, what] = turn + 1


CONSTRUCTING = "the construction of a sharded transform or optimizer"


@contextmanager
def construction(find_group: Callable[[], dist.ProcessGroup | None]) -> Generator[None]:
    """Report an error of the ``with`` block to the other ranks, if this rank has not met them in the block.

    Without the report, they would wait for this rank until the timeout of the group. `find_group` returns their group,
    and is called after an error only; None if this rank constructs alone.
    """
    met_before = dict(_met)
    try:
        yield
    except Exception as error:
        group = find_group()
        if group is not None and dist.get_world_size(group) > 1:
            key = group.group_name, CONSTRUCTING
            if _met.get(key) == met_before.get(key):
                report_failure(group, CONSTRUCTING, error)
        raise


def _missing(store: dist.Store, keys: list[str], patience: timedelta) -> str:
    """Wait until each rank has set its key in a store. Return a text of the ranks that have not, or "" if all have."""
    try:
        store.wait(keys, patience)
    except RuntimeError:  # DistStoreError of most stores
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return listed(absent) if absent else ""
    return ""


def _timeout(group: Any) -> timedelta:
    """Return how long the collectives of a process group wait before they fail."""
    try:
        return group._get_backend(host_device(group)).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
