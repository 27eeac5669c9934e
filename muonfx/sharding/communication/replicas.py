"""Check that replicas of a tensor on several ranks are equal, by checksums, and make them equal with `broadcast`.

The checksum of 32-bit words `u_0, u_1, ...` is `sum_j w_j u_j` modulo 2^64, with a pseudo-random odd weight for each
index. The order of elements counts, one pass suffices, and two given tensors that differ have the same checksum with a
probability of about 2^-32. Bits are compared: 0.0 and -0.0 differ, and so do two NaNs with different payloads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.internal.arguments import plain_arguments
from muonfx.internal.tracing import without_transforms
from muonfx.placement.buckets import split_into_buckets
from muonfx.sharding.binding import Binding
from muonfx.sharding.communication.agree import (
    NO_VALUE,
    LeafAgreement,
    agree,
    errors_on_all_ranks,
    warn_together,
)
from muonfx.sharding.communication.collectives import BUCKET, agree_on_shards, in_buckets
from muonfx.sharding.communication.differences import listed
from muonfx.sharding.communication.messages import (
    all_objects,
    collective,
    copied,
    exchange,
    lists_by_rank,
    split_buffer,
)
from muonfx.sharding.digests import checksums
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards.dtensors import local_tree, map_named, require_no_transform
from muonfx.sharding.state import LeafPlacement, describe_state
from muonfx.tree import PyTree

T = TypeVar("T")


Groups = Sequence[Sequence[int]]
"""Groups of two or more ranks that must hold equal values of a leaf, in the same order on all ranks."""


class _Difference(NamedTuple):
    """The first leaf whose replicas differ."""

    name: str
    text: str
    """How they differ, such as "has other values on rank 1 than on rank 0"."""


def verify_params(layout: Layout, local: PyTree) -> None:
    """Raise on all ranks if replicas of a parameter, the copies of one shard on several ranks, differ in any bit."""
    values = dict(tree.named_leaves(local))
    difference = _find_difference(
        "comparing parameters", values, _replicas_of_layout(layout), layout
    )
    if difference is not None:
        raise _different_params(layout, difference)


def _different_params(layout: Layout, difference: _Difference) -> ShardingError:
    """Return an error for a parameter whose replicas differ, with the usual causes."""
    name, text = difference
    advice = (
        "make them equal with muonfx.sharding.broadcast(params, layout), which returns the first holder's values, or "
        "writes them in place with donate=True"
    )
    if name in layout.on_several_meshes:
        return ShardingError(
            f"{name!r} has different meshes on different ranks and {text}, expected equal values. If these are "
            "different parameters, rename them, or place them on one mesh with more dims. If they are the same "
            f"parameter, {advice}"
        )
    return ShardingError(
        f"nothing was changed: parameter {name!r} {text}, expected equal values, because they are replicas in "
        f"{layout!r}. Was the model created with another seed, or loaded on some ranks only? If so, {advice}"
    )


def verify_state(binding: Binding, tx: Transform, like: PyTree, state: PyTree) -> None:
    """Raise on all ranks if replicas of a tensor in the optimizer state differ in any bit. Syncs with the device.

    Such tensors are the momentum of a parameter that ranks 0 and 1 hold, and a step count, which all ranks have.
    """
    placements = describe_state(binding, tx, like)
    named_leaves = tree.named_leaves(state)
    if len(placements) != len(named_leaves):
        return  # the state of another transform: the check of the state reports it
    # For each leaf of the state, the groups of ranks that must hold equal values of it, such as ``[(0, 1)]``.
    groups_of: dict[str, Groups] = {}
    for (name, _), placement in zip(named_leaves, placements, strict=True):
        groups_of[name] = _replicas_of_leaf(binding.layout, placement)
    difference = _find_difference("comparing states", dict(named_leaves), groups_of, binding.layout)
    if difference is not None:
        raise ShardingError(
            f"nothing was changed: {difference.name!r} of the state {difference.text}, expected equal values on these "
            "ranks. Was it loaded on some ranks only, or from different checkpoints? Load one state on all ranks"
        )


def verify_extras(layout: Layout, leaves: Mapping[str, Any]) -> None:
    """Raise on all ranks if a tensor of an extra argument differs in any bit. `leaves` has them by dotted name."""
    on_all_ranks: Groups = [range(layout.size)]
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    groups_of = dict.fromkeys(tensors, on_all_ranks)
    difference = _find_difference("comparing extra arguments", tensors, groups_of, layout)
    if difference is not None:
        raise ShardingError(
            f"nothing was changed: the extra argument {difference.name} {difference.text}, expected equal values: "
            "reduce it over the ranks first"
        )


def warn_of_gradients(layout: Layout, gradients: Mapping[str, Any]) -> None:
    """Warn if gradients of replicated parameters differ between ranks, for example because of a missing all-reduce.

    A parameter is replicated if several ranks hold the same shard of it, as all ranks do under data parallelism.
    """
    difference = _find_difference(
        "comparing gradients", gradients, _replicas_of_layout(layout), layout
    )
    if difference is not None and layout.group is not None:
        warn_together(
            f"the gradient of {difference.name!r} {difference.text}, expected equal values, because the parameter is "
            f"replicated in {layout!r}: were gradients reduced over the ranks? If not, the replicas of the parameter "
            "will diverge. DistributedDataParallel does not reduce gradients of parameters that were frozen when it "
            "wrapped the model: freeze them after that, with find_unused_parameters=True",
            layout.group,
        )


def _replicas_of_layout(layout: Layout) -> dict[str, Groups]:
    """Return by parameter name the groups of ranks that hold the same shard."""
    return {name: cut.copies for name, cut in layout.cuts.items()}


def _replicas_of_leaf(layout: Layout, placement: LeafPlacement | None) -> Groups:
    """Return the groups of ranks that must hold equal values of one leaf of the state.

    For the momentum of a parameter whose two shards are each on two of four ranks, these are ``[(0, 2), (1, 3)]``.
    """
    if placement is None:  # the leaf is None
        return []
    # Values that all ranks have: a counter, or the state of a matrix that every rank computes.
    has_no_parameter = placement.name is None
    is_computed_everywhere = any(shard.owner is None for shard in placement.shards)
    if has_no_parameter or is_computed_everywhere:
        return [range(layout.size)]
    if placement.owned:  # only the rank that computes a matrix has its state
        return []
    assert placement.name is not None
    return layout.cuts[placement.name].copies  # the leaf is sharded like its parameter


def _find_difference(
    operation: str, values: Mapping[str, Any], groups_of: Mapping[str, Groups], layout: Layout
) -> _Difference | None:
    """Find the first leaf whose replicas differ. Return the same on each rank, or None. All ranks call this together.

    `values` has the leaves on this rank, ``{"w": tensor}``, of which some may be None. `groups_of` has the ranks that
    must hold equal values, ``{"w": [(0, 1)]}``, and is equal on all ranks. `operation` is for errors.
    """
    if layout.group is None or layout.size == 1:
        return None
    if not any(groups_of.values()):  # no rank has replicas
        return None
    # 1. The checksums of the leaves that other ranks hold too.
    names_of_group = _names_by_group(groups_of)
    replicas: dict[str, Any] = {}
    for ranks, names in names_of_group.items():
        if layout.rank in ranks:
            replicas |= {name: values.get(name) for name in names}
    checksum_of = checksums(replicas)
    # 2. One small all-reduce, in which each group of ranks compares a hash of the checksums of all its leaves.
    compared: list[object] = []
    for ranks, names in names_of_group.items():
        if layout.rank in ranks:
            compared.append([checksum_of[name] for name in names])
        else:
            compared.append(NO_VALUE)
    agreement = agree(operation, layout.group, compared=compared)
    if agreement.are_equal:
        return None
    # 3. Only after a difference: the ranks send all checksums, to find the leaf.
    checksums_of_ranks = all_objects(checksum_of, layout.group, operation)
    return _first_difference(groups_of, checksums_of_ranks)


def _names_by_group(groups_of: Mapping[str, Groups]) -> dict[tuple[int, ...], list[str]]:
    """Return the leaves of which a group of ranks must hold equal values, by the group. It is equal on all ranks.

    Ranks 0 and 1 hold the same "w" and "v", and ranks 2 and 3 hold another shard of "w":

    >>> _names_by_group({"w": [(0, 1), (2, 3)], "v": [(0, 1)]})
    {(0, 1): ['w', 'v'], (2, 3): ['w']}
    """
    names_of_group: dict[tuple[int, ...], list[str]] = {}
    for name, groups in groups_of.items():
        for ranks in groups:
            names_of_group.setdefault(tuple(ranks), []).append(name)
    return names_of_group


def _first_difference(
    groups_of: Mapping[str, Groups], checksums_of_rank: Sequence[Mapping[str, int]]
) -> _Difference | None:
    """Compare the checksums of all ranks. Return the first leaf that differs, and the ranks that differ.

    >>> _first_difference({"w": [(0, 1, 2)]}, [{"w": 5}, {"w": 5}, {"w": 6}])
    _Difference(name='w', text='has other values on rank 2 than on rank 0')
    """
    for name, groups in groups_of.items():
        # A group is a tuple of ranks with equal shards. Its first rank is compared with each of the others.
        for first, *replicas in groups:
            expected = checksums_of_rank[first][name]
            different = [rank for rank in replicas if checksums_of_rank[rank][name] != expected]
            if different:
                return _Difference(
                    name, f"has other values on {listed(different)} than on rank {first}"
                )
    return None


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
    with errors_on_all_ranks(layout.group):
        require_no_transform("broadcast", params)
    with without_transforms():
        agreement = agree_on_shards("broadcasting parameters", params, layout)
        _require_on_all_holders(agreement, layout)
        if layout.group is None or layout.size == 1:
            return params
        return _broadcast(params, layout, layout.group, donate=donate)


def _require_on_all_holders(agreement: LeafAgreement, layout: Layout) -> None:
    """Raise if a leaf with replicas is None on some ranks. This is equal on all ranks, so all of them raise."""
    for name in agreement.missing:
        if layout.cuts[name].copies:
            raise ShardingError(
                f"{name!r} is None on some ranks, expected a tensor on all ranks that hold it"
            )


def _broadcast(params: T, layout: Layout, group: dist.ProcessGroup, *, donate: bool) -> T:
    """Copy each shard that several ranks hold from the lowest of these ranks to the others. Return this rank's tree.

    If ranks 1 and 3 hold the same shard of "w", rank 3 gets the values of rank 1. Shards that only one rank holds stay
    as they are. With `donate`, the tensors of `params` are overwritten; without, replicas are new tensors.
    """

    def copied_if_replicated(name: str, leaf: Tensor) -> Tensor:
        if layout.cuts[name].copies:
            return leaf.detach().clone()
        return leaf

    # 1. The tensors to overwrite: the caller's tensors, or copies of them.
    if not donate:
        params = map_named(copied_if_replicated, params)
    # 2. Which ranks hold them. ``copies`` is ``((0, 2), (1, 3))`` for a parameter if ranks 0 and 2 hold one of its
    # shards, and ranks 1 and 3 the other. It follows from the layout, so it is equal on all ranks.
    on_all_ranks: list[Tensor] = []
    on_some_ranks: dict[str, Tensor] = {}
    for name, local in tree.named_leaves(local_tree(params)):  # of a DTensor, its local tensor
        if local is None:  # perhaps no parameter of the layout
            continue
        copies = layout.cuts[name].copies
        if not copies:
            continue
        if len(copies[0]) == layout.size:
            on_all_ranks.append(local)
        else:
            on_some_ranks[name] = local
    # 3. One broadcast for many tensors, and messages between the ranks that hold the others.
    _broadcast_from_first_rank(on_all_ranks, group)
    _send_from_first_holders(on_some_ranks, layout)
    return params


def _broadcast_from_first_rank(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors that all ranks hold with the values of rank 0, bucket by bucket.

    The tensors of a bucket are packed into one tensor, because one large broadcast is faster than many small ones.
    """
    first_rank = dist.get_global_rank(group, 0)  # the source is named by its rank in the whole job
    for indices in in_buckets(tensors, BUCKET):
        targets = [tensors[index] for index in indices]
        # Rank 0 sends these values.
        packed = torch.cat([target.flatten() for target in targets])
        with collective("broadcasting parameters"):
            dist.broadcast(packed, first_rank, group=group)
        shapes = [target.shape for target in targets]
        copied(split_buffer(packed, shapes), targets)


class Send(NamedTuple):
    """A tensor that one rank copies to others."""

    tensor: Tensor
    """The values on the sender. They are overwritten on the receivers."""
    sender: int
    receivers: Sequence[int]


def _send_from_first_holders(local: Mapping[str, Tensor], layout: Layout) -> None:
    """Overwrite shards that some ranks hold with the values of the lowest of these ranks, bucket by bucket.

    ``layout.cuts["w"].copies`` is ``((0, 2), (1, 3))`` if ranks 0 and 2 hold the same shard of "w", and so do ranks 1
    and 3. Then rank 0 sends it to rank 2, and rank 1 sends the other shard to rank 3.
    """
    nbytes_of_dtype: dict[torch.dtype, dict[str, int]] = {}
    for name, tensor in local.items():
        # Shards may have different sizes on different ranks, so the size of the whole tensor is used. One rank may send
        # it to all other ranks that hold it, and these copies together are limited.
        largest_group = max(map(len, layout.cuts[name].copies))
        nbytes = prod(layout.specs[name].shape) * tensor.itemsize * largest_group
        nbytes_of_dtype.setdefault(tensor.dtype, {})[name] = nbytes
    for nbytes_of in nbytes_of_dtype.values():
        for names in split_into_buckets(nbytes_of, BUCKET):
            sends: list[Send] = []
            for name in names:
                for first, *receivers in layout.cuts[name].copies:
                    sends.append(Send(local[name], first, receivers))
            send_copies(sends, layout, "broadcasting parameters")


def send_copies(sends: Sequence[Send], layout: Layout, operation: str) -> None:
    """Copy tensors of one dtype between ranks in place. All ranks call this with the same senders and receivers.

    For ``[Send(w, 0, [2]), Send(v, 1, [3])]``, rank 0 sends its `w` to rank 2, which overwrites its own `w`. At the
    same time, rank 1 sends its `v` to rank 3.
    """
    # This rank takes part in those of these messages that it sends or receives.
    outgoing = lists_by_rank(layout)
    incoming = lists_by_rank(layout)
    for tensor, sender, receivers in sends:
        if layout.rank == sender:
            for receiver in receivers:
                outgoing[receiver].append(tensor)
        elif layout.rank in receivers:
            incoming[sender].append(tensor)
    exchange(layout, outgoing, incoming, sends[0].tensor, operation)
