"""Find a leaf or subtree of a tree by path or by type, and replace it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar, overload

from muonfx.internal.arguments import close_names
from muonfx.internal.display import format_list
from muonfx.tree.structure import PyTree, dotted, open_node

Node = TypeVar("Node")
Path = tuple[object, ...]
Where = str | type
"""How to find leaves or subtrees: by the last keys of their dotted path, such as "momentum.trace", or by type."""


@overload
def get(tree: PyTree, where: type[Node]) -> Node: ...


@overload
def get(tree: PyTree, where: str) -> PyTree: ...


def get(tree: PyTree, where: Where) -> PyTree:
    """Return the one node of a tree, a leaf or a subtree, with the given path or type.

    Args:
        tree: the tree, such as a state.
        where: the dotted path of the node, or the last keys of the path, such as "momentum.trace"; or the type of
            the node, such as ``AdamState``.

    Raises:
        KeyError: no node matches, or several do; the message lists paths.

    Follows Optax's ``tree_get``, which returns a default instead of raising an error.

    >>> import muonfx as mfx
    >>> state = mfx.chain(mfx.momentum(), mfx.scale_by_adam()).init({"w": torch.zeros(2)})
    >>> get(state, "count"), get(state, "trace.w"), get(state, mfx.transforms.MomentumState)
    (tensor(0), tensor([0., 0.]), MomentumState(trace={'w': tensor([0., 0.])}))
    >>> get(state, "w")
    Traceback (most recent call last):
    KeyError: "'w' matches 3 nodes: momentum.trace.w, scale_by_adam.mu.w, scale_by_adam.nu.w; give a longer path"
    """
    return _find_one(tree, where)[1]


def get_all(tree: PyTree, where: Where) -> dict[str, PyTree]:
    """Return a dict from dotted path to node, for all nodes of a tree with the given path or type.

    Args:
        tree: the tree, such as a state.
        where: the last keys of the paths, or the type of the nodes, as for `get`.

    >>> import muonfx as mfx
    >>> state = mfx.scale_by_adam().init({"w": torch.zeros(1)})
    >>> get_all(state, "w")
    {'mu.w': tensor([0.]), 'nu.w': tensor([0.])}
    """
    node_of: dict[str, PyTree] = {}
    for path, node in _find(tree, where):
        node_of[dotted(path)] = node
    return node_of


def set(tree: PyTree, where: Where, value: PyTree) -> PyTree:
    """Return a copy of a tree in which one node, a leaf or a subtree, is replaced.

    Args:
        tree: the tree; it is not modified.
        where: the path or the type of the node, as for `get`.
        value: the new node. In a state, give its tensors the dtypes of the old ones: later updates keep the dtypes.

    Raises:
        KeyError: as for `get`.

    Follows Optax's ``tree_set``.

    >>> import muonfx as mfx
    >>> state = mfx.chain(mfx.momentum(), mfx.scale_by_adam()).init({"w": torch.zeros(1)})
    >>> set(state, "count", torch.tensor(100))["scale_by_adam"].count
    tensor(100)
    """
    return _replaced(tree, _find_one(tree, where)[0], value)


def _nodes(node: PyTree, path: Path = ()) -> Iterator[tuple[Path, PyTree]]:
    """Yield a (path, value) pair for every leaf and subtree of a tree, parents first."""
    yield path, node
    container, children = open_node(node)
    if container is None:  # a leaf
        return
    # The entry of a child is its key, index or field, with which its path is one step longer.
    for entry, child in zip(container.entries, children, strict=True):
        yield from _nodes(child, (*path, entry))


def _find(tree: PyTree, where: Where) -> list[tuple[Path, PyTree]]:
    """Return a pair (path, node) for each node of a tree with the path or the type ``where``."""
    return [(path, node) for path, node in _nodes(tree) if _fits(path, node, where)]


def _fits(path: Path, node: PyTree, where: Where) -> bool:
    """Return True if a node has the path or the type ``where``. Keys count whole: "w" fits "a.w", and not "a.raw"."""
    if isinstance(where, str):
        return f".{dotted(path)}".endswith(f".{where}")
    return isinstance(node, where)


def _find_one(tree: PyTree, where: Where) -> tuple[Path, PyTree]:
    """Return the path and the node with the path or the type ``where``. Raise KeyError unless there is exactly one.

    In ``{"momentum": {"w": 1}}``, "w" is at the path ("momentum", "w").
    """
    matches = _find(tree, where)
    if len(matches) == 1:  # else the error lists the paths that match, or similar ones
        return matches[0]
    if not matches:
        raise _no_match(tree, where)
    paths = [dotted(path) or "the tree itself" for path, _ in matches]
    raise KeyError(
        f"{_shown(where)} matches {len(matches)} nodes: {format_list(paths, str)}; give a longer path"
    )


def _no_match(tree: PyTree, where: Where) -> KeyError:
    """Return an error for a path or type that no node has, with similar paths: "...; did you mean trace?"."""
    # Only similar paths are searched, not similar names of types.
    message = f"no node of the tree matches {_shown(where)}"
    if isinstance(where, str):
        paths = [dotted(path) for path, _ in _nodes(tree) if path]  # without the tree itself
        similar = close_names(where, paths)
        if similar:
            message += f"; did you mean {' or '.join(similar)}?"
    return KeyError(message)


def _shown(where: Where) -> str:
    """Return a path in quotes, or the name of a type, for an error."""
    return repr(where) if isinstance(where, str) else where.__qualname__


def _replaced(node: PyTree, path: Path, value: PyTree) -> PyTree:
    """Return a copy of a tree with another node at a path: ``{"a": [1, 5]}`` for ``{"a": [1, 2]}``, ("a", 1) and 5.

    Only the containers on the path are built again. All other nodes are taken from the old tree.
    """
    if not path:  # the node itself is replaced
        return value
    container, children = open_node(node)
    assert container is not None
    assert container.rebuild is not None
    # Replace the child with which the path begins, by a copy that has the new node at the rest of the path.
    index = container.entries.index(path[0])
    children[index] = _replaced(children[index], path[1:], value)
    return container.rebuild(children)
