"""Run a transform on sharded parameters, with the same update under every layout.

A *shard* is the part of a tensor that one rank holds. A *cut* is the partition of one tensor into the shards of all
ranks, and a `Layout` has the cut of each parameter. `sharded` turns any transform into one that runs on these shards.
See the page "Sharding" of the documentation.

Its files are in three groups. `shards` (which rank holds what) and `plan` (which rank computes what) are values, which
need no process group. All messages and collectives are in `communication`. The files above them join the two.
"""

from muonfx.placement.offload import offload
from muonfx.sharding.communication.replicas import broadcast
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.layout import Layout
from muonfx.sharding.layouts import flat, from_dtensors, replicated, zero
from muonfx.sharding.plan.assignment import Plan, plan_for
from muonfx.sharding.shards.position import ShardPosition
from muonfx.sharding.transform import from_global, sharded, to_global

__all__ = [
    # which rank holds which shard
    "Layout",
    "ShardPosition",
    "replicated",
    "from_dtensors",
    "zero",
    "flat",
    "broadcast",
    # the same update
    "sharded",
    "ShardingError",
    # where the state is stored
    "offload",
    # which rank computes which matrix
    "plan_for",
    "Plan",
    # checkpoints
    "to_global",
    "from_global",
]


def __dir__() -> list[str]:
    return sorted(__all__)
