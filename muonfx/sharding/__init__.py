"""One chain under every shard layout, with the same answer.

A *layout* says which piece of each parameter each rank holds; `sharded` makes of any transform one over these pieces,
which gives the same update. See the page "Sharding" of the documentation.
"""

from muonfx.program.offload import offload
from muonfx.sharding.cut import Buffer
from muonfx.sharding.layout import Layout
from muonfx.sharding.layouts import flat, from_dtensors, replicated, zero
from muonfx.sharding.messages import ShardingError
from muonfx.sharding.plan.assignment import Machine, Plan, plan_for
from muonfx.sharding.replicas import broadcast
from muonfx.sharding.shards import Piece
from muonfx.sharding.transform import sharded
from muonfx.sharding.views import local, logical

__all__ = [
    # who holds what
    "Layout",
    "Piece",
    "Buffer",
    "replicated",
    "from_dtensors",
    "zero",
    "flat",
    "broadcast",
    # the same update
    "sharded",
    "ShardingError",
    # where the state lies
    "offload",
    # who computes what
    "plan_for",
    "Plan",
    "Machine",
    # checkpoints
    "logical",
    "local",
]


def __dir__() -> list[str]:
    return sorted(__all__)
