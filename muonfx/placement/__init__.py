"""Run a transform where its tensors are: on shards, bucket by bucket, or with its state in host memory or on disk.

`placed` rewrites a transform to one that runs there. It depends on the transform and on the names and shapes of
parameters, never on values.
"""

from muonfx.placement.placed import Ranks, Where, placed

__all__ = ["Ranks", "Where", "placed"]
