"""Functions on pytrees of tensors: flatten, map, name and search leaves.

Private modules of this folder hold utilities of the whole package: checks of arguments, tables as text and HTML, names
of dtypes, and the detection of ``torch.func`` and ``torch.compile``.

The terms are optree's. A *tree* is a nest of dicts, tuples, lists and NamedTuples; its *leaves* are all other values.
``None`` is a leaf and means *absent*, such as a gradient that was not computed. Dictionaries are traversed in sorted
order of their keys, so two trees that differ only in insertion order are equal. An ``OrderedDict`` keeps its own order.
"""

from muonfx.tree.arithmetic import norm
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
from muonfx.tree.structure import Structure as Structure
from muonfx.tree.structure import copy_shared as copy_shared
from muonfx.tree.structure import ids as ids
from muonfx.tree.structure import is_flat as is_flat
from muonfx.tree.structure import named_leaves as named_leaves

# fmt: off
__all__ = [
    "NAMESPACE", "Present", "PyTree", "Spec", "device_of", "flatten", "get", "get_all", "leaves", "map",
    "map_params", "names", "norm", "paths", "same_structure", "set", "spec", "subtrees", "tensors", "unflatten",
]
# fmt: on


def __dir__() -> list[str]:
    return sorted(__all__)
