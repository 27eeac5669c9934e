"""Pytrees of tensors, on optree: leaves, names, and maps that skip ``None``.

The terms are optree's, as in the docstring of `muonfx.tree`. ``None`` is a leaf and means *absent*, such as a gradient
that was not computed or a frozen parameter.

Under ``torch.compile`` trees are traversed in plain Python (`open_node`), which can be traced through every container.
optree's own code in torch 2.13 cannot. Both traverse in the same order.
"""

from __future__ import annotations

import builtins
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import optree
import torch
from optree.utils import total_order_sorted
from torch import Tensor

from muonfx.internal.display import format_list

NAMESPACE = "muonfx"
"""The optree namespace in which muonfx registers its own nodes (transforms and schedules)."""

PyTree = Any
"""A tree: a nest of dicts, tuples, lists and NamedTuples with tensors as leaves. For type checkers it is ``Any``.

If parameters are a ``dict[str, Tensor]``, the return type of `muonfx.apply_updates` is this type.
"""


class Spec(NamedTuple):
    """The shape and dtype of a tensor, without its values.

    >>> Spec((2, 3), torch.float32)
    Spec(shape=(2, 3), dtype=torch.float32)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size in bytes of a tensor with this shape and dtype.

        >>> Spec((2, 3), torch.float32).nbytes
        24
        """
        return math.prod(self.shape) * self.dtype.itemsize


Structure = optree.PyTreeSpec
"""The containers and keys of a tree, without leaves, as `flatten` returns them; a `_Node` under ``torch.compile``."""


_DICTS = (dict, OrderedDict, defaultdict)


@dataclass(unsafe_hash=True)  # a graph may break while one is a key of a dict
class _Node:
    """The structure of a tree, in plain Python for ``torch.compile``; `kind` is its container, or None for a leaf."""

    kind: type | None = None
    entries: tuple[object, ...] = ()
    """The key, index or field name of each child."""
    metadata: object = None
    """Further data of the container, such as the default factory of a defaultdict."""
    rebuild: Callable[[list[PyTree]], PyTree] | None = field(default=None, compare=False)
    """Builds the container from its children; None for a leaf."""
    children: tuple[_Node, ...] = ()

    @property
    def num_leaves(self) -> int:
        if self.kind is None:
            return 1
        return sum([child.num_leaves for child in self.children])

    def unflatten(self, leaves: Iterator[object]) -> PyTree:
        """Build the tree with this structure from the next leaves of an iterator."""
        if self.rebuild is None:
            return next(leaves)
        return self.rebuild([child.unflatten(leaves) for child in self.children])

    def flatten_up_to(self, tree: PyTree) -> list[PyTree]:
        """Cut a tree where this structure has its leaves, and return the list of subtrees.

        The structure of ``{"a": 0, "b": 0}`` gives ``[1, (2, 3)]`` for ``{"a": 1, "b": (2, 3)}``. Raise ValueError if
        ``tree`` has another container than the structure above a leaf.
        """
        if self.kind is None:  # a leaf of the structure, at which any subtree may be
            return [tree]
        subtrees: list[PyTree] = []
        for structure, child in zip(self.children, self._children_of(tree), strict=True):
            subtrees += structure.flatten_up_to(child)
        return subtrees

    def _children_of(self, tree: PyTree) -> list[PyTree]:
        """Return the children of a tree that has this structure at its top, in the order of the structure.

        Raise ValueError if it is another container or has other keys. A dict, an OrderedDict and a defaultdict with the
        same keys count as the same container, as in optree.

        >>> structure, _ = open_node({"a": 1, "b": 2})
        >>> structure._children_of({"b": 4, "a": [3]})
        [[3], 4]
        """
        are_dicts = self.kind in _DICTS and type(tree) in _DICTS
        if are_dicts and {*tree} == {*self.entries}:  # of a dict, the entries are the keys
            return [tree[entry] for entry in self.entries]
        node, children = open_node(tree)
        if node is None or node.kind is not self.kind or node.entries != self.entries:
            kind: Any = self.kind  # not None, as of a leaf, which has no children
            raise ValueError(
                f"expected {kind.__name__} of {self.entries}, found {type(tree).__name__}"
            )
        return children


def open_node(node: PyTree) -> tuple[_Node | None, list[PyTree]]:
    """Return the container at the top of a tree, as a `_Node`, and its children; (None, []) if the tree is a leaf.

    A `_Node` describes one container: its type, its keys or indices (``entries``), and how to build it (``rebuild``).

    >>> node, children = open_node({"b": 1, "a": [2]})
    >>> node.entries, children
    (('a', 'b'), [[2], 1])
    >>> node.rebuild([10, 20])
    {'b': 20, 'a': 10}
    """
    kind = type(node)
    if kind in _DICTS:
        return _open_dict(node)
    # None and tensors are tested first: a compiler cannot call the function of optree on a tensor outside of a graph.
    if (
        node is None
        or isinstance(node, Tensor)
        or optree.tree_is_leaf(node, none_is_leaf=True, namespace=NAMESPACE)
    ):
        return None, []
    children, metadata, entries, build = optree.tree_flatten_one_level(
        node, none_is_leaf=True, namespace=NAMESPACE
    )
    # Optree has indices as entries; paths have the names of fields.
    if optree.is_namedtuple_class(kind):
        entries = optree.namedtuple_fields(kind)

    def rebuild(new_children: list[PyTree]) -> PyTree:
        return build(metadata, new_children)

    return _Node(kind, tuple(entries), metadata, rebuild), list(children)


def _open_dict(node: dict[Any, PyTree]) -> tuple[_Node, list[PyTree]]:
    """Return a dict, OrderedDict or defaultdict as a `_Node`, and its children in the order of optree.

    That is the order of the sorted keys; an OrderedDict keeps its own order. This function takes the place of optree's,
    because torch 2.13 cannot trace optree (0.20) through an empty dict.

    >>> node, children = _open_dict({"b": 2, "a": 1})
    >>> children, node.rebuild([10, 20])
    ([1, 2], {'b': 20, 'a': 10})
    """
    kind = type(node)
    old_keys = list(node)
    keys = old_keys
    if kind is not OrderedDict:  # the order of other dicts has no meaning
        keys = total_order_sorted(node)
    default_factory = node.default_factory if isinstance(node, defaultdict) else None

    def rebuild(children: list[PyTree]) -> PyTree:
        """Build a dict of the same type from new children. It has the keys in the order of the old dict."""
        # The children are in the order of the sorted keys.
        child_of = dict(zip(keys, children, strict=True))
        items = {key: child_of[key] for key in old_keys}
        if kind is defaultdict:
            return defaultdict(default_factory, items)
        if kind is OrderedDict:
            return OrderedDict(items)
        return items

    values = [node[key] for key in keys]
    return _Node(kind, tuple(keys), default_factory, rebuild), values


def _traced_flatten(tree: PyTree) -> tuple[list[Any], _Node]:
    """Do the work of `flatten` while a compiler traces, which cannot trace optree."""
    node, children = open_node(tree)
    if node is None:
        return [tree], _Node()
    leaves: list[Any] = []
    for child in children:
        child_leaves, child_node = _traced_flatten(child)
        leaves += child_leaves
        node.children += (child_node,)
    return leaves, node


def flatten(tree: PyTree) -> tuple[list[Any], Structure]:
    """Return the leaves of a tree (``None`` included) and its structure; `unflatten` rebuilds the tree from both.

    >>> flatten({"b": 2, "a": None})[0]
    [None, 2]
    """
    if torch.compiler.is_compiling():
        traced: Any = _traced_flatten(tree)
        return traced
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(treedef: Structure, leaves: Iterable[object]) -> PyTree:
    """Build the tree with the given structure and leaves; the inverse of `flatten`.

    Raises:
        ValueError: there are more or fewer leaves than the structure has.

    >>> leaves, treedef = flatten({"b": 2, "a": (1, None)})
    >>> unflatten(treedef, leaves)
    {'b': 2, 'a': (1, None)}
    """
    if isinstance(treedef, _Node):  # made by `flatten` under a compiler
        leaves = list(leaves)
        if len(leaves) != treedef.num_leaves:
            raise ValueError(f"expected {treedef.num_leaves} leaves, found {len(leaves)}")
        return treedef.unflatten(iter(leaves))
    return optree.tree_unflatten(treedef, leaves)


def same_structure(a: PyTree, b: PyTree) -> bool:
    """Return True if two trees have the same containers with the same keys; leaves are not compared.

    >>> same_structure({"a": 1, "b": 2}, {"b": None, "a": 3}), same_structure([1], (1,))
    (True, False)
    """
    return flatten(a)[1] == flatten(b)[1]


def leaves(tree: PyTree) -> list[Any]:
    """Return the leaves of a tree as a list, ``None`` included; dict entries are in sorted order of their keys.

    >>> leaves({"b": 2, "a": (1, None)})
    [1, None, 2]
    """
    if is_flat(tree):  # a plain dict of tensors, which needs no traversal
        return [tree[key] for key in sorted(tree)]
    if torch.compiler.is_compiling():  # the compiler cannot trace optree
        return flatten(tree)[0]
    # A state has such dicts as parts, which optree would traverse one tensor at a time.
    tree_leaves: list[Any] = []
    for part in optree.tree_leaves(tree, is_flat, none_is_leaf=True, namespace=NAMESPACE):
        if type(part) is dict:
            tree_leaves += [part[key] for key in sorted(part)]
        else:
            tree_leaves.append(part)
    return tree_leaves


def ids(tree: PyTree) -> set[int]:
    """Return the set of ``id(leaf)`` for all leaves of a tree except None, to find leaves that two trees share.

    The ids of ``{"w": x}`` and ``(x, y)`` have ``id(x)`` in common.
    """
    leaf_ids = set(builtins.map(id, leaves(tree)))
    # All trees share None, which is one object.
    leaf_ids.discard(id(None))
    return leaf_ids


_PLAIN_LEAVES = frozenset({Tensor, torch.nn.Parameter, type(None)})


def is_flat(tree: PyTree) -> bool:
    """Return True if a tree is a dict from strings to tensors and None, such as ``dict(model.named_parameters())``.

    >>> is_flat({"w": torch.ones(2), "b": None}), is_flat({"mlp": {"w": torch.ones(2)}})
    (True, False)
    """
    # Such a tree needs no traversal: transforms use it several times a step, and a model has hundreds of leaves. So
    # this function compares sets of types, and has no loop over leaves.
    if type(tree) is not dict:
        return False
    key_types = set(builtins.map(type, tree))
    if not key_types <= {str}:
        return False
    leaf_types = set(builtins.map(type, tree.values()))
    if leaf_types <= _PLAIN_LEAVES:  # tensors, parameters and None
        return True
    if torch.compiler.is_compiling():  # torch 2.10 cannot trace a loop over a set
        return False
    return all(issubclass(leaf_type, Tensor | None) for leaf_type in leaf_types)  # such as DTensor


def tensors(tree: PyTree) -> Iterator[Tensor]:
    """Iterate over the tensors among the leaves of a tree.

    >>> [t.ndim for t in tensors({"a": torch.ones(2), "b": None, "c": 3})]
    [1]
    """
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf


def names(tree: PyTree) -> list[str]:
    """Return the name of each leaf of a tree, which is its dotted path, in the order of `leaves`.

    For ``dict(model.named_parameters())`` these are PyTorch's names. If the tree is a single leaf, its name is "".

    >>> names({"blocks": [{"q": 1.0}, {"q": 2.0}], "head": None})
    ['blocks.0.q', 'blocks.1.q', 'head']
    """
    if is_flat(tree):
        return sorted(tree)
    return list(builtins.map(dotted, paths(tree)))


def dotted(path: tuple[object, ...]) -> str:
    """Return a path as text: "a.0" for ("a", 0)."""
    return ".".join(builtins.map(str, path))


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Return a list of pairs (dotted name, leaf) for all leaves of a tree, in the order of `leaves`."""
    return list(zip(names(tree), leaves(tree), strict=True))


def paths(tree: PyTree) -> list[tuple[object, ...]]:
    """Return the path to each leaf, a tuple of keys, indices and field names, in the order of `leaves`.

    >>> paths({"blocks": [{"q": 1.0}]})
    [('blocks', 0, 'q')]
    """
    return list(builtins.map(entries_of_path, typed_paths(tree)))


class Key(NamedTuple):
    """One step of a path: a key of a dict, an index, or the name of a field of a NamedTuple."""

    entry: object
    is_field: bool = False
    """True for the field of a NamedTuple, which a dict's key of the same name does not equal."""


TypedPath = tuple[Key, ...]


def entries_of_path(path: TypedPath) -> tuple[object, ...]:
    """Return a path without the marks of fields: ("a", 0) for (Key("a"), Key(0))."""
    return tuple([key.entry for key in path])


def typed_paths(tree: PyTree, above: TypedPath = ()) -> list[TypedPath]:
    """Return the path to each leaf, in the order of `leaves`, with fields of NamedTuples marked.

    The path of the leaf in ``{"a": [1.0]}`` is ``(Key("a"), Key(0))``. Each path begins with ``above``, the path to the
    tree itself.
    """
    node, children = open_node(tree)
    if node is None:  # the tree is a leaf
        return [above]
    is_field = optree.is_namedtuple_class(node.kind)
    paths_of_leaves: list[TypedPath] = []
    # The paths within a child begin with the path to this child: one step more.
    for entry, child in zip(node.entries, children, strict=True):
        paths_of_leaves += typed_paths(child, (*above, Key(entry, is_field)))
    return paths_of_leaves


@overload
def map(
    function: Callable[..., Tensor], tree: dict[str, Tensor], *rest: PyTree
) -> dict[str, Tensor]: ...


@overload
def map(function: Callable[..., PyTree], tree: PyTree, *rest: PyTree) -> PyTree: ...


def map(function: Callable[..., PyTree], tree: PyTree, *rest: PyTree) -> PyTree:
    """Apply a function to corresponding leaves of trees, and return a tree of the results.

    The trees must have one structure. If a leaf of the first tree is ``None``, the result is ``None``, and the function
    is not called. ``None`` leaves of the other trees are passed to the function.

    Raises:
        ValueError: the trees have different structures.

    >>> map(lambda x, y: x + y, {"a": 1, "b": None}, {"a": 10, "b": 20})
    {'a': 11, 'b': None}
    """

    def unless_none(leaf: Any, *corresponding: Any) -> Any:
        return None if leaf is None else function(leaf, *corresponding)

    if torch.compiler.is_compiling():  # the compiler cannot trace optree
        tree_leaves, treedef = flatten(tree)
        leaves_of_rest = [subtrees(treedef, further_tree) for further_tree in rest]
        return unflatten(treedef, builtins.map(unless_none, tree_leaves, *leaves_of_rest))
    try:
        return optree.tree_map(unless_none, tree, *rest, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError:  # of optree or of the function
        _require_structure(tree, rest)
        raise


def _require_structure(tree: PyTree, rest: Sequence[PyTree]) -> None:
    """Raise ValueError unless each tree of `rest` has the structure of the first tree above its leaves, for `map`."""
    treedef = flatten(tree)[1]
    for number, further_tree in enumerate(rest, 2):
        if further_tree is None:
            raise ValueError(
                f"tree.map: tree {number} is None, expected the structure of tree 1: if it is the tree of the "
                "parameters, call update(updates, state, params)"
            )
        try:
            subtrees(treedef, further_tree)
        except ValueError as error:
            raise ValueError(
                f"tree.map: tree {number} does not have the structure of tree 1: {error}. Within partition and masked, "
                "a transform receives the parameters that it updates, as a flat dict by dotted name, and an extra "
                "argument whole: take its part by name"
            ) from error


def copy_shared(outputs: PyTree, inputs: PyTree) -> PyTree:
    """Return the tree ``outputs``, with copies of the tensors that are also leaves of the tree ``inputs``.

    >>> x, y = torch.zeros(1), torch.ones(1)
    >>> copied = copy_shared({"a": x, "b": y}, {"a": x})
    >>> copied["a"] is x, copied["b"] is y
    (False, True)
    """
    ids_of_inputs = ids(inputs)
    if not ids_of_inputs & ids(outputs):  # nothing is shared: the usual case
        return outputs
    leaves_of_outputs, treedef = flatten(outputs)
    for index, leaf in enumerate(leaves_of_outputs):
        if isinstance(leaf, Tensor) and id(leaf) in ids_of_inputs:
            leaves_of_outputs[index] = leaf.clone()
    return unflatten(treedef, leaves_of_outputs)


def subtrees(treedef: Structure, tree: PyTree) -> list[PyTree]:
    """Return a list of subtrees of a tree, one at each leaf of ``treedef``, the structure of its upper levels.

    Raises:
        ValueError: the upper levels of the tree do not have this structure.

    >>> subtrees(flatten({"mu": 0, "nu": 0})[1], {"nu": {"w": 2}, "mu": {"w": 1}})
    [{'w': 1}, {'w': 2}]
    """
    return treedef.flatten_up_to(tree)


def device_of(tree: PyTree) -> torch.device:
    """Return the device of a tree's first tensor. If it has no tensors: the default device, or the CPU if this is meta.

    >>> device_of({"w": torch.zeros(2, device="meta")})
    device(type='meta')
    """
    for tensor in tensors(tree):
        return tensor.device
    default_device = torch.get_default_device()
    if default_device.type == "meta":  # a count on the meta device has no value
        return torch.device("cpu")
    return default_device


def spec(tree: PyTree) -> PyTree:
    """Return a copy of a tree in which each tensor is replaced by its `Spec` (shape and dtype).

    >>> spec({"w": torch.ones(2, 3), "b": None})
    {'w': Spec(shape=(2, 3), dtype=torch.float32), 'b': None}
    """

    def spec_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return Spec(tuple(leaf.shape), leaf.dtype)

    return map(spec_of, tree)


class Present:
    """The positions of the leaves of a tree that are not None, so that transforms can work on lists of tensors.

    ``pick`` returns the leaves of another tree at these positions, and ``fill`` builds a tree with new leaves there.
    A transform thus skips gradients of ``None``:

    >>> at = Present({"a": torch.ones(2), "b": None})
    >>> at.pick({"a": 1, "b": 2})
    [1]
    >>> at.fill([5], old={"a": 1, "b": 2})
    {'a': 5, 'b': 2}
    >>> at.fill([5])
    {'a': 5, 'b': None}
    """

    def __init__(self, tree: PyTree) -> None:
        """Store the leaves of ``tree``, and the indices of those that are not None: [0] for ``{"a": x, "b": None}``.

        A transform does this at every step, for hundreds of gradients, so the usual cases are made fast.
        """
        # A flat dict {"w": tensor} is read by its keys, which take less time to find.
        if is_flat(tree):
            self._keys = list(tree)
            self._leaves = list(tree.values())
        else:  # nested dicts, tuples and so on
            self._keys = None
            self._leaves, self._treedef = flatten(tree)
        # Faster than a loop over hundreds of leaves.
        leaf_types = set(builtins.map(type, self._leaves))
        self._is_complete = type(None) not in leaf_types
        self._indices: Sequence[int] = range(len(self._leaves))
        if not self._is_complete:
            self._indices = [index for index, leaf in enumerate(self._leaves) if leaf is not None]

    def _subtrees(self, tree: PyTree) -> list[Any]:
        """Return a list with the value of another tree for each leaf of the tree of gradients given to `__init__`.

        ``pick`` and ``fill`` select from it the values where a gradient is not None. Raise ValueError or KeyError if
        the tree has another structure.

        >>> Present({"w": torch.ones(1), "b": None})._subtrees({"w": (1, 2), "b": (3, 4)})
        [(1, 2), (3, 4)]
        """
        if self._keys is None:  # the gradients are no flat dict, such as {"w": g}, but nested
            return subtrees(self._treedef, tree)
        has_as_many_keys = isinstance(tree, _DICTS) and len(tree) == len(self._keys)
        if not has_as_many_keys:  # as many other keys raise KeyError below
            raise ValueError(
                f"updates, state and params must have one structure: expected a dict of {format_list(self._keys)}, "
                f"found a {type(tree).__name__} of {format_list(names(tree))}"
            )
        return [tree[key] for key in self._keys]

    def _tree(self, leaves: Sequence[object]) -> PyTree:
        """Build a tree with the structure of the tree given to `Present`, with one leaf for each position."""
        if self._keys is None:
            return unflatten(self._treedef, leaves)
        return dict(zip(self._keys, leaves, strict=True))

    def pick(self, tree: PyTree) -> list[Any]:
        """Return a list of the leaves of ``tree`` at the positions where the tree given to `Present` is not None."""
        leaves = self._subtrees(tree)
        if self._is_complete:  # no position is skipped
            return leaves
        return [leaves[index] for index in self._indices]

    def fill(self, values: Sequence[object], old: PyTree = None) -> PyTree:
        """Return a tree with ``values`` at the positions that are not None, else with leaves of ``old``, or None.

        With gradients ``{"a": g, "b": None}``, one new value x and an old tree ``{"a": 1, "b": 2}``, the result is
        ``{"a": x, "b": 2}``.
        """
        if self._is_complete:  # no leaf is None
            return self._tree(values)
        merged: list[object] = [None] * len(self._leaves)
        if old is not None:
            merged = self._subtrees(old)
        for index, value in zip(self._indices, values, strict=True):
            merged[index] = value
        return self._tree(merged)

    def names(self) -> list[str]:
        """Return a list of the dotted names of the leaves that are not None."""
        all_names = self._keys
        if all_names is None:
            all_names = names(self._tree(self._leaves))
        return [all_names[index] for index in self._indices]
