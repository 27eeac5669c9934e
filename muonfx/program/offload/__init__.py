"""State in host memory or on disk, loaded bucket by bucket."""

from muonfx.program.offload.transform import offload

__all__ = ["offload"]
