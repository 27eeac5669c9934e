"""Summaries of optimizers, transforms and states: what they hold, where, and how many bytes it takes."""

from muonfx.inspect.summary import Summary, summary

__all__ = ["Summary", "summary"]


def __dir__() -> list[str]:
    return sorted(__all__)
