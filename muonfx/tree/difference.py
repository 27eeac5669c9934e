"""Describe in an error message how the containers and names of two trees differ."""

from __future__ import annotations

from muonfx.internal.display import format_list, shown_name
from muonfx.tree.structure import PyTree, names, open_node, same_structure


def difference(found: PyTree, expected: PyTree) -> str:
    """Return a text with the leaves that only one of two trees has, or else with a container that differs."""
    have, want = names(found), names(expected)
    differing = {
        "missing": [name for name in want if name not in set(have)],
        "unexpected": [name for name in have if name not in set(want)],
    }
    parts = [f"{kind} {format_list(some, shown_name)}" for kind, some in differing.items() if some]
    return "; ".join(parts) or _differing_container(found, expected)


def _differing_container(found: PyTree, expected: PyTree) -> str:
    (have, inside), (want, within) = open_node(found), open_node(expected)
    if have is None or want is None or (have.kind, have.entries) != (want.kind, want.entries):
        texts = (
            type(tree).__name__ + ("" if node is None else f" of {format_list(node.entries) or 'nothing'}")
            for tree, node in ((found, have), (expected, want))
        )
        return "found {}, expected {}".format(*texts)
    pairs = zip(inside, within, strict=True)
    return next((_differing_container(*pair) for pair in pairs if not same_structure(*pair)), "")
