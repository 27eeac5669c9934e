"""State in host memory or on disk, brought in by buckets."""

from muonfx.sharding.offload.transform import offload

__all__ = ["offload"]
