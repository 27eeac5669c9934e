"""`Bucket`: the transfers of one rank for the matrix shards that are sent together, as positions."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from muonfx.sharding.plan.matrix_shards import LocalTransfers
from muonfx.sharding.shards.position import ShardView


@dataclass(frozen=True, eq=False)
class Bucket:
    """The transfers of this rank for a bucket, without the matrices whose gradient is None.

    It depends on shapes and on the layout, so most steps use the same. Its lists are computed once.
    """

    transfers: list[LocalTransfers]
    """The transfers of this rank for each matrix shard of the bucket."""
    size: int
    """The number of ranks."""

    @cached_property
    def gathered(self) -> list[LocalTransfers]:
        """The matrices that their owners do not hold in full, and gather."""
        return [local for local in self.transfers if local.shard.needs_gather]

    @cached_property
    def returned(self) -> list[LocalTransfers]:
        """The matrices whose results are sent to other ranks."""
        return [local for local in self.transfers if local.shard.needs_send]

    @cached_property
    def computed_names(self) -> list[str]:
        """The parameters whose matrices this rank computes."""
        return [local.shard.name for local in self.transfers if local.computes]

    @cached_property
    def already_local(self) -> list[LocalTransfers]:
        """The matrices that this rank computes and already holds."""
        return [
            local for local in self.transfers if local.computes and not local.shard.needs_gather
        ]

    @cached_property
    def stored(self) -> list[LocalTransfers]:
        """The matrices that this rank computes and no other rank needs."""
        return [local for local in self.transfers if local.computes and not local.shard.needs_send]

    @cached_property
    def received(self) -> list[LocalTransfers]:
        """The matrices that this rank gathers and computes."""
        return [local for local in self.gathered if local.computes]

    @cached_property
    def received_groups(self) -> list[list[LocalTransfers]]:
        """The matrices that this rank gathers and computes, in groups that can be allocated as one stack.

        The matrices of a group have one shape, and their boxes come from shards at the same positions.
        """
        # Matrices are in one group if this key is equal: then a box is at the same place in each entry of the stack.
        groups: dict[Hashable, list[LocalTransfers]] = {}
        for local in self.received:
            views = tuple([box.view for box in local.owner_boxes])
            key = (local.shard.shape, local.shard.is_whole_parameter, views)
            groups.setdefault(key, []).append(local)
        return list(groups.values())

    @cached_property
    def outgoing(self) -> list[list[tuple[str, ShardView]]]:
        """For each rank, the boxes to send to it: the name of a parameter, and where the box is in its local shard."""
        outgoing: list[list[tuple[str, ShardView]]] = [[] for _ in range(self.size)]
        for local in self.gathered:
            if not local.sends:
                continue
            boxes_to_owner = outgoing[local.shard.the_owner]
            for view in local.local_views:
                boxes_to_owner.append((local.shard.name, view))
        return outgoing

    @cached_property
    def expected(self) -> list[int]:
        """For each rank, the number of elements that it sends to this rank."""
        expected = [0] * self.size
        for local in self.gathered:
            for box in local.owner_boxes:
                expected[box.sender] += box.numel
        return expected

    @cached_property
    def expected_results(self) -> list[int]:
        """For each rank, the number of elements of results that it sends to this rank."""
        expected = [0] * self.size
        for local in self.returned:
            expected[local.shard.the_owner] += local.numel
        return expected
