"""Summaries of optimizers, transforms and states: their tensors, devices and bytes."""

from muonfx.inspect.summary import Summary, summary

__all__ = ["Summary", "summary"]


def __dir__() -> list[str]:
    return sorted(__all__)
