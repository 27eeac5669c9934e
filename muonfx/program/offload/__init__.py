"""State in host memory or on disk, brought in by buckets."""

from muonfx.program.offload.transform import offload

__all__ = ["offload"]
