"""Names of parameters without what wrappers put into them, so that a state moves between wrapped and unwrapped models.

``torch.compile`` puts ``_orig_mod`` into a name, FSDP1 ``_fsdp_wrapped_module``, activation checkpointing
``_checkpoint_wrapped_module``. Nobody else calls a module so, and these are taken out wherever they stand.
``DistributedDataParallel``, ``DataParallel`` and ``AveragedModel`` put ``module`` in front of all names: a word that a
model may use itself. It is taken out only in front, where all names of one tree begin with it, as often as they do. A
model that itself holds everything in a child called ``module`` loses that level too, but alike in every file, so
nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["WRAPPERS", "may_be_wrapped", "unwrapped"]

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Components of names that are of wrappers wherever they stand."""

_IN_FRONT = "module."


def may_be_wrapped(name: str) -> bool:
    """False if there is surely nothing of a wrapper in a name; cheap, for most names are of this kind.

    >>> may_be_wrapped("up.weight"), may_be_wrapped("_orig_mod.up.weight")
    (False, True)
    """
    return _IN_FRONT in name or any(part in name for part in WRAPPERS)


def unwrapped(names: Iterable[str]) -> dict[str, str]:
    """For each name of one model's parameters the name that it has without wrappers.

    >>> unwrapped(["module._orig_mod.up.weight", "module._orig_mod.up.bias"])
    {'module._orig_mod.up.weight': 'up.weight', 'module._orig_mod.up.bias': 'up.bias'}
    >>> unwrapped(["module.up.weight", "head.weight"])
    {'module.up.weight': 'module.up.weight', 'head.weight': 'head.weight'}
    """
    found = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) or name for name in names}
    while found and all(name.startswith(_IN_FRONT) and name != _IN_FRONT for name in found.values()):
        found = {name: plain.removeprefix(_IN_FRONT) for name, plain in found.items()}
    return found
