"""Summaries of optimizers, transforms and states: what they store, on which device, and in how many bytes."""

from muonfx.inspect.summary import Summary, summary

__all__ = ["Summary", "summary"]


def __dir__() -> list[str]:
    return sorted(__all__)
