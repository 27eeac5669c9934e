"""Parameter names without the components of wrappers, so that a state fits both wrapped and unwrapped models.

``torch.compile`` adds ``_orig_mod`` to a name, FSDP1 ``_fsdp_wrapped_module``, activation checkpointing
``_checkpoint_wrapped_module``. No model uses these names itself, so they are removed at any position.
``DistributedDataParallel``, ``DataParallel`` and ``AveragedModel`` add a leading ``module``, which a model may use
itself. It is removed only as a prefix of all names of one tree, as often as all names have it. A model whose only
child is called ``module`` loses that level too, in every file, so its names still match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Name components that belong to wrappers at any position."""

_IN_FRONT = "module."


MAY_BE_WRAPPED = re.compile("|".join(map(re.escape, sorted({_IN_FRONT, *WRAPPERS}))))
"""Matches in every name with a component of a wrapper, and in a few others; a cheap test for most names."""


def unwrapped(names: Iterable[str]) -> dict[str, str]:
    """Map each parameter name of one model to its name without wrappers."""
    found = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) or name for name in names}
    while found and all(name.startswith(_IN_FRONT) and name != _IN_FRONT for name in found.values()):
        found = {name: plain.removeprefix(_IN_FRONT) for name, plain in found.items()}
    return found
