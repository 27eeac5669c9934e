"""Check that replicas of a tensor on several ranks are equal, by checksums, and make them equal with `broadcast`.

The checksum of 32-bit words `u_0, u_1, ...` is `sum_j w_j u_j` modulo 2^64, with a pseudo-random odd weight for each
index. The order of elements counts, one pass suffices, and two given tensors that differ have the same checksum with a
probability of about 2^-32. Bits are compared: 0.0 and -0.0 differ, and so do two NaNs with different payloads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.sharding.binding import Binding
from muonfx.sharding.collectives import BUCKET, exchange, in_buckets
from muonfx.sharding.consensus import (
    LARGE,
    agree,
    agree_on_leaves,
    all_objects,
    check_pieces,
    listed,
    outside_transforms,
    warn_together,
    words,
)
from muonfx.sharding.dtensors import local_of
from muonfx.sharding.layout import Layout
from muonfx.sharding.messages import ShardingError, collective, copied, octets
from muonfx.sharding.state import LeafPlacement, describe_state
from muonfx.tree import PyTree
from muonfx.tree.arguments import plain_arguments

__all__ = ["broadcast", "checksum", "send_copies", "verify_params", "verify_state", "warn_of_gradients"]

T = TypeVar("T")


class _Copies(NamedTuple):
    """One leaf of a tree: its value on this rank, and the groups of ranks that must have the same value."""

    name: str
    value: Tensor | None
    """The leaf on this rank."""
    holders: Sequence[Sequence[int]]
    """Groups of ranks; the ranks of a group must hold equal values. The order of groups is the same on all ranks."""


def verify_params(layout: Layout, local: PyTree, problem: Exception | None = None, *, may_fail: bool = False) -> None:
    """Raise on all ranks if replicas of a parameter differ in any bit, or if one rank passes an error (`problem`).

    Set `may_fail` if any rank may pass an error. Then the ranks communicate even if there are no replicas.
    """
    found = _find_difference("comparing parameters", _copies_of(layout, local), layout, problem, may_fail=may_fail)
    if found is None:
        return
    name, where = found
    if name in layout.on_several_meshes:
        raise ShardingError(
            f"{name!r} has different meshes on different ranks and {where}, expected equal values. If these are "
            "different parameters, rename them, or place them on one mesh with more dims. If they are the same "
            f"parameter, {_ADVICE}"
        )
    raise ShardingError(
        f"nothing was changed: parameter {name!r} {where}, expected equal values, because they are replicas in "
        f"{layout!r}. Was the model created with another seed, or loaded on some ranks only? If so, {_ADVICE}"
    )


_ADVICE = (
    "make them equal with muonfx.sharding.broadcast(params, layout), which returns the first holder's values, or "
    "writes them in place with donate=True"
)


def verify_state(binding: Binding, tx: Transform, like: PyTree, state: PyTree) -> None:
    """Raise on all ranks if replicas of a tensor in the optimizer state differ in any bit. Syncs with the device."""
    described, leaves = describe_state(binding, tx, like), tree.leaves(state)
    if len(described) != len(leaves):
        return  # the state of another transform: the check of the state reports it
    copies = [
        _Copies(name, leaf if isinstance(leaf, Tensor) else None, _holders_of(binding.layout, what))
        for name, leaf, what in zip(tree.names(state), leaves, described, strict=True)
    ]
    found = _find_difference("comparing states", copies, binding.layout)
    if found is not None:
        raise ShardingError(
            f"nothing was changed: {found[0]!r} of the state {found[1]}, expected equal values on these ranks. Was it "
            "loaded on some ranks only, or from different checkpoints? Load one state on all ranks"
        )


def warn_of_gradients(layout: Layout, local: PyTree) -> None:
    """Warn if gradients of replicated parameters differ between ranks, for example because of a missing all-reduce."""
    found = _find_difference("comparing gradients", _copies_of(layout, local), layout)
    if found is not None and layout.group is not None:
        warn_together(
            f"the gradient of {found[0]!r} {found[1]}, expected equal values, because the parameter is replicated in "
            f"{layout!r}: were gradients reduced over the ranks? If not, the replicas of the parameter will diverge",
            layout.group,
        )


def _copies_of(layout: Layout, local: PyTree) -> list[_Copies]:
    named = dict(zip(tree.names(local), tree.leaves(local), strict=True))
    return [_Copies(name, named.get(name), cut.copies) for name, cut in layout.pieces.items()]


def _holders_of(layout: Layout, placement: LeafPlacement | None) -> Sequence[Sequence[int]]:
    """Return the groups of ranks that must hold equal values of one leaf of the state."""
    if placement is None:
        return []
    if placement.name is None or any(share.owner is None for share in placement.shares):
        return [range(layout.size)]
    return [] if placement.owned else layout.pieces[placement.name].copies


def _find_difference(
    what: str, copies: Sequence[_Copies], layout: Layout, problem: Exception | None = None, *, may_fail: bool = False
) -> tuple[str, str] | None:
    """Find the first leaf whose replicas differ. Return its name and a message with the ranks, or None.

    Each rank returns the same. If a rank passes an error (`problem`), all ranks raise.
    """
    group = layout.group
    if group is None or layout.size == 1:
        if problem is not None:
            raise problem
        return None
    # Each set of ranks that hold replicas compares one digest of all their leaves; more is sent only if two differ.
    sets = dict.fromkeys(tuple(ranks) for leaf in copies for ranks in leaf.holders if len(ranks) > 1)
    if not sets and not may_fail:
        return None
    shared = {leaf.name: leaf for leaf in copies if any(layout.rank in ranks for ranks in leaf.holders)}
    sums: dict[str, int] = {}
    if problem is None:
        sums = dict(zip(shared, _checksums([leaf.value for leaf in shared.values()]), strict=True))
    digests: list[int] = []
    for ranks in sets:
        (mine,) = words([number for name, number in sums.items() if ranks in map(tuple, shared[name].holders)], 1)
        digests += [mine, LARGE - mine] if layout.rank in ranks and problem is None else [0, 0]
    most = agree(what, group, problem, numbers=digests).numbers
    if all(most[place] == LARGE - most[place + 1] for place in range(0, len(most), 2)):
        return None
    rows = all_objects(sums, group, what)
    wrong: list[tuple[str, str]] = []
    for leaf in copies:
        for first, *others in leaf.holders:
            odd = [rank for rank in others if rows[rank][leaf.name] != rows[first][leaf.name]]
            if odd:
                wrong.append((leaf.name, f"has other values on {listed(odd)} than on rank {first}"))
                break
    (name, where), *more = wrong
    return name, where + (f" (and {len(more)} other leaves differ)" if more else "")


def _checksums(values: Sequence[Tensor | None]) -> list[int]:
    """Return a list with the checksum of each tensor as an int, and 0 for None. It syncs once for each device."""
    found = [0] * len(values)
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for place, value in enumerate(values):
        if value is not None and not value.is_meta:
            by_device.setdefault(value.device, {})[place] = checksum(value)
    for sums in by_device.values():
        for place, number in zip(sums, torch.stack([*sums.values()]).tolist(), strict=True):
            found[place] = number
    return found


WORDS = 1 << 20
"""The number of 32-bit words in a pass of `checksum`. All passes use one table of weights; each has its own factor."""


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Return the int64 weights of `checksum`: pseudo-random odd numbers, one for each 32-bit word of a pass."""
    # Constants and shifts as int64: a shift keeps the sign, which is masked away.
    z = torch.arange(1, WORDS + 1, dtype=torch.int64, device=device) * (0x9E3779B97F4A7C15 - (1 << 64))
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ (z >> 31 & (1 << 33) - 1) | 1


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor's bits as a 0-d int64 tensor on the same device. Strides do not change it."""
    total, weights = torch.zeros((), dtype=torch.int64, device=tensor.device), _weights(tensor.device)
    flat = tensor.detach().reshape(-1)
    for number, block in enumerate(flat.split(4 * WORDS // flat.element_size())):
        data = octets(block)
        if data.numel() % 4 or data.storage_offset() % 4:
            data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
        values = data.view(torch.int32).to(torch.int64)
        total += values.mul_(weights[: values.numel()]).sum() * weights[number]
    return total


# ----------------------------------------------------------------------------------------------------------- broadcast


@torch.no_grad()
@plain_arguments
def broadcast(params: T, layout: Layout, *, donate: bool = False) -> T:
    """Make replicas equal: copy each shard from the lowest rank that holds it to all other ranks that hold it.

    All ranks must call this together. Use it for a model that was initialized with a different seed on each rank, or
    loaded on one rank only.

    Args:
        params: a tree of this rank's shards, or of DTensors.
        layout: the layout of the parameters.
        donate: overwrite the tensors in place, as in
            ``broadcast(dict(model.named_parameters()), layout, donate=True)`` for a model.

    Returns:
        A tree like ``params``. Without ``donate``, leaves that have replicas are new tensors. Other leaves are returned
        unchanged.

    Raises:
        ShardingError: a leaf does not fit the layout, or another rank has an error.

    Example:
        >>> import muonfx as mfx
        >>> params = {"w": torch.ones(2)}
        >>> mfx.sharding.broadcast(params, mfx.sharding.replicated(params, 1))
        {'w': tensor([1., 1.])}
    """
    leaves, treedef = tree.flatten(params)
    names = tree.names(params)
    with outside_transforms("broadcast", params) as problem:
        try:
            check_pieces(layout, names, leaves)
        except Exception as error:  # perhaps on this rank only: raised on all ranks together
            problem = problem or error
        _, on_some, _ = agree_on_leaves("broadcasting parameters", names, leaves, layout, problem)
        if layout.group is None or layout.size == 1:
            return params
        places: dict[str, Tensor] = {}
        for place, (name, leaf, is_missing) in enumerate(zip(names, leaves, on_some, strict=True)):
            if leaf is None or not layout.pieces[name].copies:
                continue
            if is_missing:  # equal on all ranks, so all of them raise
                raise ShardingError(f"{name!r} is None on some ranks, expected a tensor on all ranks that hold it")
            if not donate:
                leaves[place] = leaf = leaf.detach().clone()
            places[name] = local_of(leaf).detach()
        _from_first_holders(places, layout, layout.group)
        return tree.unflatten(treedef, leaves)


def _from_first_holders(places: Mapping[str, Tensor], layout: Layout, group: dist.ProcessGroup) -> None:
    """Overwrite this rank's shards in place with the values of the lowest rank that holds the same shard."""
    holders = {name: layout.pieces[name].copies for name in places}
    of_all = [name for name in places if len(holders[name][0]) == layout.size]
    for bucket in in_buckets([places[name] for name in of_all], BUCKET):
        tensors = [places[of_all[place]] for place in bucket]
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with collective("broadcasting parameters"):
            dist.broadcast(packed, dist.get_global_rank(group, 0), group=group)
        parts = packed.split([tensor.numel() for tensor in tensors])
        copied([part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)], tensors)
    rest = [name for name in places if len(holders[name][0]) < layout.size]
    most = max((len(ranks) for name in rest for ranks in holders[name]), default=1)
    wholes = [torch.empty(layout.specs[name].shape, dtype=places[name].dtype, device="meta") for name in rest]
    for bucket in in_buckets(wholes, max(1, BUCKET // most)):
        names = [rest[place] for place in bucket]
        sends = [(places[name], first, others) for name in names for first, *others in holders[name]]
        send_copies(sends, places[names[0]], layout, "broadcasting parameters")


def send_copies(sends: Iterable[tuple[Tensor, int, Sequence[int]]], wire: Tensor, layout: Layout, what: str) -> None:
    """Copy tensors between ranks in place. Each item of `sends` is (local tensor, sending rank, receiving ranks)."""
    outgoing: list[list[Tensor]] = [[] for _ in range(layout.size)]
    incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
    for tensor, sender, takers in sends:
        if layout.rank == sender:
            for taker in takers:
                outgoing[taker].append(tensor)
        elif layout.rank in takers:
            incoming[sender].append(tensor)
    exchange(outgoing, incoming, wire, layout, what)
