"""`Bucket`: the transfers of one rank for the matrix shards that are sent together, as positions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from muonfx.sharding.plan.assignment import RunPlan
from muonfx.sharding.plan.matrix_shards import LocalTransfers
from muonfx.sharding.shards.position import ShardView


class Bucket(NamedTuple):
    """The transfers of this rank for a bucket, without the matrices whose gradient is None.

    It depends on shapes and on the layout, so most steps use the same.
    """

    transfers: list[LocalTransfers]
    """The transfers of all matrix shards of the bucket."""
    already_local: list[LocalTransfers]
    """Those of the matrices that this rank computes and already holds."""
    gathered: list[str]
    """The parameters whose matrices are gathered on their owners."""
    outgoing: list[list[tuple[str, ShardView]]]
    """For each rank, the boxes of this rank's shards to send to it, by parameter name."""
    expected: list[int]
    """For each rank, the number of elements that it sends to this rank."""
    received: list[LocalTransfers]
    """The matrices that this rank gathers and computes."""
    received_groups: list[list[LocalTransfers]]
    """The same matrices, in groups of one shape whose boxes come from shards at the same positions."""
    stored: list[LocalTransfers]
    """The matrices that this rank computes and no other rank needs."""
    returned: list[LocalTransfers]
    """The matrices whose results are sent to other ranks."""
    expected_results: list[int]
    """For each rank, the number of elements of results that it sends to this rank."""

    @classmethod
    def of(cls, transfers: list[LocalTransfers], size: int) -> Bucket:
        """Build the bucket of some matrix shards between `size` ranks."""
        gathered = [local for local in transfers if local.shard.needs_gather]
        returned = [local for local in transfers if local.shard.needs_send]
        computed = [local for local in transfers if local.computes]
        received = [local for local in computed if local.shard.needs_gather]
        outgoing: list[list[tuple[str, ShardView]]] = [[] for _ in range(size)]
        expected = [0] * size
        expected_results = [0] * size
        for local in gathered:
            assert local.shard.owner is not None
            if local.sends:
                outgoing[local.shard.owner] += [(local.shard.name, view) for view in local.local_views]
            for transfer, _ in local.transfers:
                expected[transfer.sender] += transfer.numel
        for local in returned:
            assert local.shard.owner is not None
            expected_results[local.shard.owner] += local.numel
        return cls(
            transfers,
            already_local=[local for local in computed if not local.shard.needs_gather],
            gathered=[local.shard.name for local in gathered],
            outgoing=outgoing,
            expected=expected,
            received=received,
            received_groups=_grouped_by_views(received),
            stored=[local for local in computed if not local.shard.needs_send],
            returned=returned,
            expected_results=expected_results,
        )


def _grouped_by_views(received: list[LocalTransfers]) -> list[list[LocalTransfers]]:
    groups: dict[Hashable, list[LocalTransfers]] = {}
    for local in received:
        views = tuple([views for _, views in local.transfers])
        is_whole = local.shard.shape == local.shard.whole
        groups.setdefault((local.shard.shape, is_whole, views), []).append(local)
    return list(groups.values())


def buckets_of(plan: RunPlan, leaves: Mapping[str, Any]) -> list[Bucket]:
    """Return each bucket that has matrices to compute, and at least one bucket. `leaves` has the updates by name."""
    absent = frozenset([name for name, leaf in leaves.items() if leaf is None])
    cache: dict[frozenset[str], list[Bucket]] = plan.messages
    if absent not in cache:
        cache.clear()  # only those of the last step are stored: most steps have the same gradients
        buckets: list[Bucket] = []
        for transfers in plan.local_transfers:
            present = [local for local in transfers if local.shard.name not in absent]
            if present:
                buckets.append(Bucket.of(present, plan.size))
        cache[absent] = buckets or [Bucket.of([], plan.size)]
    return cache[absent]
