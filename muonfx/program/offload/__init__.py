"""Optimizer state in host memory or on disk, loaded bucket by bucket during a step."""
