"""Verify replicas on several ranks by checksums, and make them equal by `broadcast`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.sharding.binding import Binding
from muonfx.sharding.checksums import checksum, scattered, vanishing
from muonfx.sharding.collectives import BUCKET, exchange, in_buckets
from muonfx.sharding.consensus import (
    agree_on_leaves,
    all_numbers,
    check_pieces,
    host_device,
    listed,
    outside_transforms,
    warn_together,
)
from muonfx.sharding.dtensors import local_of
from muonfx.sharding.layout import Layout
from muonfx.sharding.messages import ShardingError, collective, copied
from muonfx.sharding.state import LeafPlacement, describe_state
from muonfx.tree import PyTree
from muonfx.tree.arguments import plain_arguments

__all__ = ["broadcast", "verify_params", "verify_state", "warn_of_gradients"]

T = TypeVar("T")


class _Copies(NamedTuple):
    """A leaf of which several ranks may hold replicas."""

    name: str
    value: Tensor | None
    """This rank's replica."""
    holders: Sequence[Sequence[int]]
    """For each part of the leaf, the ranks that hold it; the same order on all ranks."""


class _Difference(NamedTuple):
    """A leaf whose replicas differ."""

    name: str
    first: int
    """The rank with which the others are compared."""
    odd: list[int]
    more: int
    """The number of other leaves that differ."""

    @property
    def where(self) -> str:
        return f"has other values on {listed(self.odd)} than on rank {self.first}"

    def also(self, what: str) -> str:
        return f" (and {self.more} other {what} differ)" if self.more else ""


def verify_params(layout: Layout, local: PyTree) -> None:
    """Raise on all ranks if replicas of a parameter differ in any bit; syncs with the device."""
    found = _find_difference(_copies_of(layout, local), layout)
    if found is None:
        return
    if found.name in layout.on_several_meshes:
        raise ShardingError(
            f"{found.name!r} lies on different meshes on different ranks and {found.where}{found.also('parameters')}: "
            "if these are different parameters, give them different names, or place them on one mesh of more dims; if "
            f"they are one, {_ADVICE}"
        )
    raise ShardingError(
        f"parameter {found.name!r} {found.where}{found.also('parameters')}, though {layout!r} says that they hold the "
        f"same; nothing was changed. Was the model made with another seed, or loaded on some ranks only? {_ADVICE}"
    )


_ADVICE = (
    "make them equal with muonfx.sharding.broadcast(params, layout), which returns the first holder's values, or "
    "writes them in place with donate=True"
)


def verify_state(binding: Binding, tx: Transform, like: PyTree, state: PyTree) -> None:
    """Raise on all ranks if replicas of a state leaf differ in any bit; syncs with the device."""
    described, leaves = describe_state(binding, tx, like), tree.leaves(state)
    if len(described) != len(leaves):
        return  # the state of another transform: the check of the state reports it
    copies = [
        _Copies(name, leaf if isinstance(leaf, Tensor) else None, _holders_of(binding.layout, what))
        for name, leaf, what in zip(tree.names(state), leaves, described, strict=True)
    ]
    found = _find_difference(copies, binding.layout)
    if found is not None:
        raise ShardingError(
            f"the state's {found.name!r} {found.where}{found.also('leaves')}, though they hold the same; nothing was "
            "changed. Was it loaded on some ranks only, or from different checkpoints? Load one state on all ranks"
        )


def warn_of_gradients(layout: Layout, local: PyTree) -> None:
    """Warn if replicated gradients differ between ranks, as they do if they were not reduced."""
    found = _find_difference(_copies_of(layout, local), layout)
    if found is not None and layout.group is not None:
        warn_together(
            f"the gradient of {found.name!r} {found.where}{found.also('gradients')}, though {layout!r} says that they "
            "hold the same: were gradients reduced over the ranks? If not, the copies of the parameter drift apart",
            layout.group,
        )


def _copies_of(layout: Layout, local: PyTree) -> list[_Copies]:
    named = dict(zip(tree.names(local), tree.leaves(local), strict=True))
    return [_Copies(name, named.get(name), layout.pieces[name].copies) for name in layout.names]


def _holders_of(layout: Layout, what: LeafPlacement | None) -> Sequence[Sequence[int]]:
    """Return the groups of ranks that hold replicas of a state leaf."""
    if what is None:
        return []
    if what.name is None or any(share.owner is None for share in what.shares):
        return [range(layout.size)]
    return [] if what.owned else layout.pieces[what.name].copies


def _find_difference(copies: Sequence[_Copies], layout: Layout) -> _Difference | None:
    """Return the first leaf whose replicas differ, or None; the same result on all ranks."""
    group = layout.group
    if group is None or layout.size == 1 or not any(len(ranks) > 1 for leaf in copies for ranks in leaf.holders):
        return None
    # One sum over all leaves is zero if all replicas are equal. Only otherwise the ranks add one number for each leaf,
    # and gather the checksums of the first leaf that differs.
    mine = [_factor(leaf, layout.rank) for leaf in copies]
    sums = _checksums([leaf.value if factor else None for leaf, factor in zip(copies, mine, strict=True)])
    each = [factor * number for factor, number in zip(mine, sums, strict=True)]
    (total,) = _added_up([sum(scattered(place) * number for place, number in enumerate(each))], group)
    if not total:
        return None
    wrong = [place for place, number in enumerate(_added_up(each, group)) if number]
    if not wrong:
        return None
    place = wrong[0]
    numbers = all_numbers([sums[place]], group, "finding out which copies differ")
    for ranks in copies[place].holders:
        odd = [rank for rank in ranks if numbers[rank] != numbers[ranks[0]]]
        if odd:
            return _Difference(copies[place].name, ranks[0], odd, len(wrong) - 1)
    return None


def _factor(leaf: _Copies, rank: int) -> int:
    """Return the factor of this rank's checksum; over equal replicas the products sum to zero."""
    ranks = next((ranks for ranks in leaf.holders if len(ranks) > 1 and rank in ranks), None)
    usable = leaf.value is not None and not leaf.value.is_meta
    return 0 if ranks is None or not usable else vanishing(len(ranks))[ranks.index(rank)]


def _checksums(values: Sequence[Tensor | None]) -> list[int]:
    """Return checksums as integers, 0 for None, with one sync for each device."""
    found = [0] * len(values)
    by_device: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        if value is not None:
            by_device.setdefault(value.device, []).append(place)
    sums = {
        device: torch.stack([checksum(value) for place in places if (value := values[place]) is not None])
        for device, places in by_device.items()
    }
    for device, places in by_device.items():
        for place, number in zip(places, sums[device].tolist(), strict=True):
            found[place] = number
    return found


def _added_up(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """Return the sums over all ranks, modulo 2^64."""
    wrapped = [(number + (1 << 63)) % (1 << 64) - (1 << 63) for number in numbers]
    said = torch.tensor(wrapped, dtype=torch.int64, device=host_device(group))
    with collective("comparing checksums between ranks"):
        dist.all_reduce(said, group=group)
    return said.tolist()


# ----------------------------------------------------------------------------------------------------------- broadcast


@torch.no_grad()
@plain_arguments
def broadcast(params: T, layout: Layout, *, donate: bool = False) -> T:
    """Make equal what several ranks hold: every copy becomes that of the first rank that holds it.

    For models that were made with a seed for each rank, or loaded on one rank only. All ranks must call it together.

    Args:
        params: a tree of local tensors, or of DTensors.
        layout: who holds what.
        donate: the caller's promise not to use the old values again: they are overwritten, which makes a model's
            parameters equal where they are: ``broadcast(dict(model.named_parameters()), layout, donate=True)``.

    Returns:
        A tree like ``params``; without ``donate``, of new tensors where several ranks hold a leaf. Leaves that this
        rank alone holds are the very ones.

    Raises:
        ShardingError: a leaf is not what the layout says, or something is wrong on another rank.

    Example:
        >>> import muonfx as mfx
        >>> params = {"w": torch.ones(2)}
        >>> mfx.sharding.broadcast(params, mfx.sharding.replicated(params, 1))
        {'w': tensor([1., 1.])}
    """
    with outside_transforms("broadcast", params) as problem:
        return _broadcast(params, layout, problem, donate=donate)


def _broadcast(params: T, layout: Layout, problem: Exception | None, *, donate: bool) -> T:
    try:
        check_pieces(layout, params)
    except (TypeError, ShardingError) as error:
        problem = problem or error
    if layout.group is None or layout.size == 1:
        if problem is not None:
            raise problem
        return params
    _, missing = agree_on_leaves(params, layout, problem)
    leaves, treedef = tree.flatten(params)
    names = tree.names(params)
    places: dict[str, Tensor] = {}
    for place, (name, leaf, gone) in enumerate(zip(names, leaves, missing, strict=True)):
        if leaf is None or not layout.pieces[name].copies:
            continue
        if gone:  # equal on all ranks, so all of them raise
            raise ShardingError(f"{name!r} is None on some ranks only: give it on all ranks that hold it")
        if not donate:
            leaves[place] = leaf = leaf.detach().clone()
        places[name] = local_of(leaf).detach()
    _from_first_holders(places, layout, layout.group)
    return tree.unflatten(treedef, leaves)


def _from_first_holders(places: Mapping[str, Tensor], layout: Layout, group: dist.ProcessGroup) -> None:
    """Overwrite tensors by the values of the first rank that holds them."""
    holders = {name: layout.pieces[name].copies for name in places}
    of_all = [name for name in places if len(holders[name][0]) == layout.size]
    for bucket in in_buckets([places[name] for name in of_all], BUCKET):
        tensors = [places[of_all[place]] for place in bucket]
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with collective("broadcasting parameters"):
            dist.broadcast(packed, dist.get_global_rank(group, 0), group=group)
        parts = packed.split([tensor.numel() for tensor in tensors])
        copied([part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)], tensors)
    rest = [name for name in places if name not in set(of_all)]
    most = max((len(ranks) for name in rest for ranks in holders[name]), default=1)
    like = [torch.empty(layout.specs[name].shape, dtype=places[name].dtype, device="meta") for name in rest]
    for bucket in in_buckets(like, max(1, BUCKET // most)):
        outgoing: list[list[Tensor]] = [[] for _ in range(layout.size)]
        incoming: list[list[Tensor]] = [[] for _ in range(layout.size)]
        for name in (rest[place] for place in bucket):
            for first, *others in holders[name]:
                if layout.rank == first:
                    for other in others:
                        outgoing[other].append(places[name])
                elif layout.rank in others:
                    incoming[first].append(places[name])
        exchange(outgoing, incoming, places[rest[bucket[0]]], layout, "broadcasting parameters")
