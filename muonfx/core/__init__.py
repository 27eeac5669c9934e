"""Transforms as values: the `transform` decorator, `chain`, schedules, donation, and hyperparameters as data.

A transform is a pair of pure functions, ``init`` and ``update``. It records the function that created it and the
arguments of that call, which define its ``repr``, equality, pickling and ``replace``. Numeric arguments
(hyperparameters) can be numbers, 0-d tensors or schedules.
"""

from muonfx.core import checks, patterns, schedules
from muonfx.core.apply import apply_updates
from muonfx.core.chain import add_updates, chain
from muonfx.core.donation import Donation
from muonfx.core.extras import InitAndUpdate
from muonfx.core.hyperparams import as_tensors, hyperparams, stack, with_hyperparams
from muonfx.core.partition import masked, partition
from muonfx.core.schedules import ScheduledState
from muonfx.core.simple import identity, set_to_zero, stateless
from muonfx.core.transform import Combinator, EmptyState, Locality, MatrixWork, Transform, transform

__all__ = [
    "Combinator",
    "Donation",
    "EmptyState",
    "InitAndUpdate",
    "Locality",
    "MatrixWork",
    "ScheduledState",
    "Transform",
    "add_updates",
    "apply_updates",
    "as_tensors",
    "chain",
    "checks",
    "hyperparams",
    "identity",
    "masked",
    "partition",
    "patterns",
    "schedules",
    "set_to_zero",
    "stack",
    "stateless",
    "transform",
    "with_hyperparams",
]
