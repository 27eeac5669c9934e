"""Transforms of updates: the contract, the decorator that makes them, and those that put others together."""

from muonfx.core.combine import (
    apply_updates,
    chain,
    chain_entries,
    identity,
    is_new,
    no_state,
    set_to_zero,
    stateless,
    widest,
)
from muonfx.core.contract import (
    NOTHING,
    Declaration,
    Donation,
    EmptyState,
    Extras,
    Functions,
    InStore,
    Locality,
    Transform,
    copy_kept,
    overlaps_itself,
    sum_over_leaves,
)
from muonfx.core.factory import transform

__all__ = [
    "NOTHING",
    "Declaration",
    "Donation",
    "EmptyState",
    "Extras",
    "Functions",
    "InStore",
    "Locality",
    "Transform",
    "apply_updates",
    "chain",
    "chain_entries",
    "copy_kept",
    "identity",
    "is_new",
    "no_state",
    "overlaps_itself",
    "set_to_zero",
    "stateless",
    "sum_over_leaves",
    "transform",
    "widest",
]
