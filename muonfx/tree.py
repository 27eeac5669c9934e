"""Pytrees of tensors, on optree: leaves, names, and maps that leave ``None`` alone.

The words are optree's. A *tree* is any nest of dict, tuple, list and NamedTuple; a *leaf* is what hangs at its ends.
``None`` is a leaf here and means *absent*: a gradient that was not computed, a parameter that is frozen. Dictionaries
are walked in sorted order of their keys, so two trees that differ only in insertion order are the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

__all__ = [
    "NAMESPACE",
    "Present",
    "Spec",
    "device_of",
    "flatten",
    "leaves",
    "map",
    "names",
    "paths",
    "spec",
    "tensors",
    "unflatten",
]

NAMESPACE = "muonfx"
"""The optree namespace in which muonfx registers its own nodes (transforms and schedules)."""

PyTree = Any


class Spec(NamedTuple):
    """Shape and dtype of a tensor, without its values.

    >>> Spec((2, 3), torch.float32)
    Spec(shape=(2, 3), dtype=torch.float32)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


def flatten(tree: PyTree) -> tuple[list[Any], optree.PyTreeSpec]:
    """Take a tree apart into its leaves (``None`` included) and its structure.

    >>> flatten({"b": 2, "a": None})[0]
    [None, 2]
    """
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(treedef: optree.PyTreeSpec, leaves: Iterable[Any]) -> PyTree:
    """Put leaves back into a structure; the inverse of `flatten`.

    >>> leaves, treedef = flatten({"b": 2, "a": (1, None)})
    >>> unflatten(treedef, leaves)
    {'b': 2, 'a': (1, None)}
    """
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: PyTree) -> list[Any]:
    """List the leaves of a tree, ``None`` included.

    >>> leaves({"b": 2, "a": (1, None)})
    [1, None, 2]
    """
    if is_flat(tree):
        return [tree[key] for key in sorted(tree)]
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)


_PLAIN_LEAVES = frozenset({Tensor, torch.nn.Parameter, type(None)})


def is_flat(tree: PyTree) -> bool:
    """Whether a tree is a dict from strings to tensors and None, as ``dict(model.named_parameters())`` is.

    Such a tree needs no walk: transforms meet it several times a step, and a model has hundreds of leaves.

    >>> is_flat({"w": torch.ones(1)}), is_flat({"block": {"w": torch.ones(1)}})
    (True, False)
    """
    if type(tree) is not dict:
        return False
    return {type(leaf) for leaf in tree.values()} <= _PLAIN_LEAVES and {type(key) for key in tree} <= {str}


def tensors(tree: PyTree) -> Iterator[Tensor]:
    """Iterate over the leaves of a tree that are tensors.

    >>> [t.ndim for t in tensors({"a": torch.ones(2), "b": None, "c": 3})]
    [1]
    """
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))


def names(tree: PyTree) -> list[str]:
    """Name the leaves by the dotted path that leads to them, in the order of `leaves`.

    The names of ``dict(model.named_parameters())`` are PyTorch's own. A tree that is one leaf has the empty name.

    >>> names({"blocks": [{"q": 1.0}, {"q": 2.0}], "head": None})
    ['blocks.0.q', 'blocks.1.q', 'head']
    """
    if is_flat(tree):
        return sorted(tree)
    return [".".join([str(entry) for entry in path]) for path in paths(tree)]


def paths(tree: PyTree) -> list[tuple[Any, ...]]:
    """List the keys, indices and field names that lead to each leaf, in the order of `leaves`.

    >>> paths({"blocks": [{"q": 1.0}]})
    [('blocks', 0, 'q')]
    """
    if torch.compiler.is_compiling():
        return list(_paths(tree, ()))
    accessors = optree.tree_accessors(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [tuple(getattr(entry, "field", entry.entry) for entry in accessor) for accessor in accessors]


def _paths(tree: PyTree, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """`paths` in plain Python, which can be traced."""
    if isinstance(tree, dict):
        children = [(key, tree[key]) for key in sorted(tree)]
    elif optree.is_namedtuple(tree):
        children = [(field, getattr(tree, field)) for field in tree._fields]
    elif isinstance(tree, tuple | list):
        children = list(enumerate(tree))
    else:
        yield above
        return
    for entry, child in children:
        yield from _paths(child, (*above, entry))


def map(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Apply a function to corresponding leaves; where the first tree has ``None`` the result is ``None``.

    The rest must have the structure of the first; their own ``None`` leaves reach the function.

    >>> map(lambda x, y: x + y, {"a": 1, "b": None}, {"a": 10, "b": 20})
    {'a': 11, 'b': None}
    """

    def at(leaf: Any, *others: Any) -> Any:
        return None if leaf is None else function(leaf, *others)

    return optree.tree_map(at, tree, *rest, none_is_leaf=True, namespace=NAMESPACE)


def device_of(tree: PyTree) -> torch.device:
    """Find the device of a tree's first tensor, else the default device: where a state's scalars live.

    >>> device_of({"w": torch.zeros(2, device="meta")})
    device(type='meta')
    """
    first = next(tensors(tree), None)
    return torch.get_default_device() if first is None else first.device


def spec(tree: PyTree) -> PyTree:
    """Replace every tensor of a tree by its `Spec`.

    >>> spec({"w": torch.ones(2, 3), "b": None})
    {'w': Spec(shape=(2, 3), dtype=torch.float32), 'b': None}
    """
    return map(lambda leaf: Spec(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf, tree)


class Present:
    """The places at which a tree holds something, so that work can be done on plain lists of tensors.

    ``pick`` reads another tree (of the same structure) at these places, ``fill`` writes a list back to them. A
    gradient of ``None`` is thus skipped without a word in any transform:

    >>> at = Present({"a": torch.ones(2), "b": None})
    >>> at.pick({"a": 1, "b": 2})
    [1]
    >>> at.fill([5], old={"a": 1, "b": 2})
    {'a': 5, 'b': 2}
    >>> at.fill([5])
    {'a': 5, 'b': None}
    """

    def __init__(self, tree: PyTree) -> None:
        self._keys = list(tree) if is_flat(tree) else None
        if self._keys is None:
            self._leaves, self._treedef = flatten(tree)
        else:
            self._leaves = list(tree.values())
        self._everywhere = type(None) not in {type(leaf) for leaf in self._leaves}
        self._places = (
            range(len(self._leaves))
            if self._everywhere
            else [place for place, leaf in enumerate(self._leaves) if leaf is not None]
        )

    def _all(self, tree: PyTree) -> list[Any]:
        """The leaves of a tree of this structure, in the order of this one's."""
        if self._keys is not None and type(tree) is dict and len(tree) == len(self._keys):
            try:
                return [tree[key] for key in self._keys]
            except KeyError:
                found = []
        else:
            found = leaves(tree)
        if len(found) != len(self._leaves):
            raise ValueError(
                f"expected a tree with the {len(self._leaves)} leaves of the updates, found one with {len(found)}; "
                "updates, state and params must have one structure"
            )
        return found

    def _tree(self, leaves: Sequence[Any]) -> PyTree:
        return unflatten(self._treedef, leaves) if self._keys is None else dict(zip(self._keys, leaves, strict=True))

    def pick(self, tree: PyTree) -> list[Any]:
        """Read the leaves of another tree at these places.

        Raises:
            ValueError: the other tree has not the same number of leaves.
        """
        found = self._all(tree)
        return found if self._everywhere else [found[place] for place in self._places]

    def fill(self, values: Sequence[Any], old: PyTree = None) -> PyTree:
        """Build a tree with the values at these places, and with the leaves of ``old`` (or ``None``) elsewhere."""
        if self._everywhere:
            return self._tree(values)
        merged = [None] * len(self._leaves) if old is None else self._all(old)
        for place, value in zip(self._places, values, strict=True):
            merged[place] = value
        return self._tree(merged)

    def names(self) -> list[str]:
        """Name these places, as the function `names` does."""
        everything = names(self._tree(self._leaves)) if self._keys is None else self._keys
        return everything if self._everywhere else [everything[place] for place in self._places]
