"""Describe in an error message how the containers and names of two trees differ."""

from __future__ import annotations

from typing import Any

from muonfx.internal.display import format_list, shown_name
from muonfx.tree.structure import PyTree, names, open_node, same_structure


def difference(tree: PyTree, expected: PyTree) -> str:
    """Describe for an error how a tree differs from an expected one: by the names of leaves, or by a container.

    >>> difference({"a": 1}, {"b": 1})
    "missing 'b'; unexpected 'a'"
    """
    names_of_tree = names(tree)
    expected_names = names(expected)
    missing = _not_in(expected_names, names_of_tree)
    unexpected = _not_in(names_of_tree, expected_names)
    texts: list[str] = []
    if missing:
        texts.append(f"missing {format_list(missing, shown_name)}")
    if unexpected:
        texts.append(f"unexpected {format_list(unexpected, shown_name)}")
    # If the names are the same, one tree has a list where the other has a tuple, for example.
    return "; ".join(texts) or _differing_container(tree, expected)


def _not_in(candidates: list[str], excluded: list[str]) -> list[str]:
    lookup = set(excluded)
    return [name for name in candidates if name not in lookup]


def _differing_container(tree: PyTree, expected: PyTree) -> str:
    """Return a text about the first container that differs in two trees with equal names of leaves.

    For ``{"a": [1]}`` and ``{"a": (1,)}``, it is "found list of length 1, expected tuple of length 1".
    """
    node, children = open_node(tree)
    expected_node, expected_children = open_node(expected)
    # The containers at the top are equal, so the difference is in a child.
    if node == expected_node:
        for child, expected_child in zip(children, expected_children, strict=True):
            if not same_structure(child, expected_child):
                return _differing_container(child, expected_child)
    description = _described(node)
    expected_description = _described(expected_node)
    text = f"found {description}, expected {expected_description}"
    are_two_classes = (
        node is not None and expected_node is not None and node.kind is not expected_node.kind
    )
    if are_two_classes and description == expected_description:
        text += " of another class with this name: was its module reloaded?"
    return text


def _described(node: Any) -> str:
    """Return the type of a container with its keys, such as "dict of 'a', 'b'", or with its length."""
    if node is None:
        return "a leaf"
    if node.kind in (list, tuple):
        return f"{node.kind.__name__} of length {len(node.entries)}"
    return f"{node.kind.__name__} of {format_list(node.entries) or 'nothing'}"
