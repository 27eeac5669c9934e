"""Pytrees of tensors, on optree: leaves, names, and maps that leave ``None`` alone; search and arithmetic.

The words are optree's. A *tree* is any nest of dict, tuple, list and NamedTuple; a *leaf* is what hangs at its ends.
``None`` is a leaf here and means *absent*: a gradient that was not computed, a parameter that is frozen. Dictionaries
are walked in sorted order of their keys, so two trees that differ only in insertion order are the same tree; an
``OrderedDict`` is walked in its own order, which is part of its structure, as optree has it.
"""

from muonfx.tree.arithmetic import add, norm, scale, vdot
from muonfx.tree.members import map_params
from muonfx.tree.search import get, get_all, set
from muonfx.tree.structure import (
    NAMESPACE,
    Present,
    PyTree,
    Spec,
    device_of,
    flatten,
    leaves,
    map,
    names,
    paths,
    same_structure,
    spec,
    subtrees,
    tensors,
    unflatten,
)
from muonfx.tree.structure import (
    Structure as Structure,
)
from muonfx.tree.structure import (
    is_flat as is_flat,
)

__all__ = [
    "NAMESPACE",
    "Present",
    "PyTree",
    "Spec",
    "add",
    "device_of",
    "flatten",
    "get",
    "get_all",
    "leaves",
    "map",
    "map_params",
    "names",
    "norm",
    "paths",
    "same_structure",
    "scale",
    "set",
    "spec",
    "subtrees",
    "tensors",
    "unflatten",
    "vdot",
]


def __dir__() -> list[str]:
    return sorted(__all__)
