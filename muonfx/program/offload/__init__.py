"""Optimizer state in host memory or on disk, loaded bucket by bucket during a step."""

from muonfx.program.offload.transform import offload

__all__ = ["offload"]
