"""Remove the components that wrappers add to parameter names, so that a state fits wrapped and unwrapped models.

``torch.compile`` adds ``_orig_mod`` to a name, FSDP1 ``_fsdp_wrapped_module``, activation checkpointing
``_checkpoint_wrapped_module``. No model uses these names itself, so they are removed at any position.
``DistributedDataParallel``, ``DataParallel`` and ``AveragedModel`` add a leading ``module``, which a model may use
itself. It is removed only as a prefix of all names of one tree, as often as all names have it. A model whose only
child is called ``module`` loses that level too, in every file, so its names still match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Components of parameter names that wrappers add; they are removed at any position."""

_PREFIX = "module."


MAY_BE_WRAPPED = re.compile("|".join(map(re.escape, sorted({_PREFIX, *WRAPPERS}))))
"""A cheap first test: a regular expression that is found in every name to which a wrapper added a component."""


def unwrapped(names: Iterable[str]) -> dict[str, str]:
    """Return a dict from each parameter name of a model to the name without the components that wrappers add.

    >>> unwrapped(["module.fc.weight", "module._orig_mod.fc.bias"])
    {'module.fc.weight': 'fc.weight', 'module._orig_mod.fc.bias': 'fc.bias'}
    """
    # No model uses names such as "_orig_mod" itself, so they are removed at any position.
    plain_name_of: dict[str, str] = {}
    for name in names:
        components = [component for component in name.split(".") if component not in WRAPPERS]
        plain_name_of[name] = ".".join(components) or name
    # A model may use the name "module" itself, so it is removed only if all names begin with it. Repeat, since a model
    # may be wrapped twice: "module.module.fc.weight".
    while plain_name_of and all(map(_has_prefix, plain_name_of.values())):
        for name, plain_name in plain_name_of.items():
            plain_name_of[name] = plain_name.removeprefix(_PREFIX)
    return plain_name_of


def _has_prefix(name: str) -> bool:
    return name.startswith(_PREFIX) and name != _PREFIX


def unwrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper, which has only copies of the groups; else the argument."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return inner
    return optimizer
