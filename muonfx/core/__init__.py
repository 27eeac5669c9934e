"""Transforms as values: the `transform` decorator, `chain`, schedules, donation, and hyperparameters as data.

A transform is a pair of pure functions, ``init`` and ``update``. It records the function that created it and the
arguments of that call, which define its ``repr``, equality, pickling and ``replace``. Numeric arguments
(hyperparameters) can be numbers, 0-d tensors or schedules.
"""

from muonfx.core import checks, patterns, schedules
from muonfx.core.combine import add_updates, apply_updates, chain, identity, set_to_zero, stateless
from muonfx.core.contract import EmptyState, Transform
from muonfx.core.definition import Combinator, InitAndUpdate, Locality
from muonfx.core.donation import Donation
from muonfx.core.factory import transform
from muonfx.core.hyperparams import as_tensors, hyperparams, stack, with_hyperparams
from muonfx.core.schedules import ScheduledState

__all__ = [
    "Combinator",
    "Donation",
    "EmptyState",
    "InitAndUpdate",
    "Locality",
    "ScheduledState",
    "Transform",
    "add_updates",
    "apply_updates",
    "as_tensors",
    "chain",
    "checks",
    "hyperparams",
    "identity",
    "patterns",
    "schedules",
    "set_to_zero",
    "stack",
    "stateless",
    "transform",
    "with_hyperparams",
]
