"""Names of leaves in a checkpoint: unique, with "/" between the levels of a tree.

A leaf of a state is named by its path, ``momentum/trace/blocks.0.attn.q.weight``; the name of a parameter begins with
``params/``. The state of a chain is a dict by member name, so a leaf keeps its name when another transform is added to
the chain. If a whole recipe becomes a member of a chain, its names get a prefix.

Special characters in an entry are escaped: ``~0`` is ``~`` and ``~1`` is ``/`` (as in JSON Pointer, RFC 6901). The
prefix ``~2`` marks an entry as a literal string. It is added to an empty string, to a string that reads as an integer
(an index is written in digits), and to a state's own top-level entry ``params`` or ``__metadata__``. ``~`` alone names
a tree that is a single leaf.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.internal.wrappers import MAY_BE_WRAPPED, unwrapped
from muonfx.tree import PyTree

_MISTAKEN = {
    Transform: "its state, which tx.init(params) or tx.update(...) returned",
    torch.optim.Optimizer: "its state, optimizer.transform_state",
    torch.nn.Module: "its parameters, dict(model.named_parameters())",
}
"""Classes of objects that are easily passed instead of a tree, and the code for the tree."""

PARAMS = "params"
"""The top level of the names of parameters."""

_RESERVED = frozenset({PARAMS, "__metadata__"})
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_ESCAPES = {"~0": "~", "~1": "/"}
_ROOT = "~"


def name_of(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf in a checkpoint, such as "momentum/trace/fc.weight", from its path in the tree."""
    if not path:
        return _ROOT
    entries = [_escaped(entry) for entry in path]
    if entries[0] in _RESERVED:
        entries[0] = "~2" + entries[0]
    return "/".join(entries)


@lru_cache(10_000, typed=True)  # the upper levels are in many names, and 1, 1.0 and True are equal
def _escaped(entry: object) -> str:
    """Return one level of a leaf name for a key of a tree, such that different keys have different levels.

    The int 0 becomes "0", and the string "0" becomes "~20". In strings, "~" becomes "~0", and "/" becomes "~1".
    """
    if isinstance(entry, bool) or not isinstance(entry, str | int):
        raise TypeError(
            f"found the key {entry!r} of type {type(entry).__name__}, expected a string or an int: keys are part of "
            "the leaf names in a checkpoint"
        )
    if isinstance(entry, int):
        return str(int(entry))
    literal = "~2" if not entry or _INTEGER.fullmatch(entry) else ""
    return literal + entry.replace("~", "~0").replace("/", "~1")


def named_leaves(values: PyTree, section: str = "") -> list[tuple[str, Any]]:
    """Return a list with the name and the value of each leaf of a tree, None leaves included.

    Names begin with ``section``, such as "params", if given. Prefixes from wrappers like ``torch.compile`` are removed.
    """
    if section:
        stored_names = ["/".join([section, *map(_escaped, path)]) for path in tree.paths(values)]
    else:
        stored_names = [name_of(path) for path in tree.paths(values)]
    plain_name_of = plain_names(stored_names)
    names = [plain_name_of[name] for name in stored_names]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(
                f"two leaves have the name {name!r} when the prefixes of wrappers (torch.compile, DataParallel, ...) "
                "are removed: rename one of them"
            )
    return list(zip(names, tree.leaves(values), strict=True))


def named_tensors(values: PyTree, section: str = "") -> list[tuple[str, Any]]:
    """Return a list of (name, leaf) pairs; raise TypeError unless each leaf is a tensor, a shard, or None."""
    for kind, code in _MISTAKEN.items():
        if isinstance(values, kind):
            raise TypeError(f"found a {type(values).__name__}, expected a tree of tensors: pass {code}")
    named = named_leaves(values, section)
    for name, leaf in named:
        if leaf is not None and not isinstance(leaf, Tensor) and not hasattr(leaf, "__create_chunk_list__"):
            raise TypeError(
                f"the leaf {name!r} is a {type(leaf).__name__}, expected a tensor: a checkpoint stores tensors and "
                "JSON; store a number as a 0-d tensor, or pass it in extra="
            )
    return named


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return a dict from each leaf name to the name without the prefixes of wrappers such as ``torch.compile``."""
    plain_name_of = {name: name for name in names}
    if not any(map(MAY_BE_WRAPPED.search, plain_name_of)):
        return plain_name_of
    # Leaves with a common prefix, such as those of one momentum, belong to one model.
    siblings: dict[str, dict[str, str]] = {}
    for name in plain_name_of:
        above, level, escaped = name.rpartition("/")
        if not _INTEGER.fullmatch(escaped):
            siblings.setdefault(above + level, {})[_unescaped(escaped)] = name
    for above, name_of_entry in siblings.items():
        for entry, plain_entry in unwrapped(name_of_entry).items():
            if plain_entry == entry:
                continue
            escaped = _escaped(plain_entry)
            if not above and plain_entry in _RESERVED:
                escaped = "~2" + escaped
            plain_name_of[name_of_entry[entry]] = above + escaped
    return plain_name_of


def _unescaped(escaped: str) -> str:
    """Return the string of an escaped entry: "a/b" for "a~1b"."""
    return re.sub("~[01]", lambda match: _ESCAPES[match[0]], escaped.removeprefix("~2"))


def in_section(name: str, section: str) -> bool:
    """Return whether a name belongs to a parameter (``section="params"``) or to the state (``section=""``)."""
    of_params = name == PARAMS or name.startswith(PARAMS + "/")
    return of_params == (section == PARAMS)
