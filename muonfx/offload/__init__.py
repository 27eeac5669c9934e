"""State in host memory or on disk, brought in by buckets."""

from muonfx.offload.transform import offload

__all__ = ["offload"]
