"""Transforms of updates: the contract, the decorator that makes them, and those that put others together."""

from muonfx.core.combine import add_updates, apply_updates, chain, identity, set_to_zero, stateless
from muonfx.core.contract import Donation, EmptyState, Locality, Transform
from muonfx.core.factory import InitAndUpdate, transform
from muonfx.core.scheduled import ScheduledHyperparamsState

__all__ = [
    "InitAndUpdate",
    "Donation",
    "EmptyState",
    "Locality",
    "ScheduledHyperparamsState",
    "Transform",
    "add_updates",
    "apply_updates",
    "chain",
    "identity",
    "set_to_zero",
    "stateless",
    "transform",
]
