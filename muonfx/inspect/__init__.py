"""Summaries of optimizers, transforms and states, and measurements of the next update."""

from muonfx.inspect.diagnose import Diagnosis, diagnose
from muonfx.inspect.summary import Summary, summary

__all__ = ["Diagnosis", "Summary", "diagnose", "summary"]


def __dir__() -> list[str]:
    return sorted(__all__)
