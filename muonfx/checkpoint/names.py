"""Names of leaves in a checkpoint: '/' between the levels of a tree, and an exact inverse.

A state's leaf is called by the way to it, ``momentum/trace/blocks.0.attn.q.weight``; a parameter's name stands behind
``params/``. A chain's state is a dict by the names of its members, so a leaf keeps its name when a transform of another
name joins the chain. It gets other levels in front when a whole recipe becomes a member of a chain.

What an entry may not contain as it is, it contains escaped: ``~0`` stands for ``~`` and ``~1`` for ``/`` (as in JSON
Pointer, RFC 6901). ``~2`` in front says that the rest is meant literally: a string that is empty or that reads as an
integer (an index is written as its digits), and a state's own top-level entry ``params`` or ``__metadata__``. ``~``
alone is a tree that is one leaf.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from muonfx import tree
from muonfx.tree import PyTree
from muonfx.tree.wrappers import may_be_wrapped, unwrapped

__all__ = [
    "PARAMS",
    "in_section",
    "is_leaf",
    "is_name",
    "name_of",
    "named_leaves",
    "named_tensors",
    "path_of",
    "plain_names",
]

PARAMS = "params"
"""The top level under which parameters stand."""

_RESERVED = frozenset({PARAMS, "__metadata__"})
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_PLAIN_ENTRY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
"""Nearly all: they stand for themselves."""
_PLAIN_NAME = re.compile(rf"{_PLAIN_ENTRY.pattern}(/({_PLAIN_ENTRY.pattern}|{_INTEGER.pattern}))*")
_ESCAPES = {"~0": "~", "~1": "/"}
_ROOT = "~"


def name_of(path: tuple[Any, ...]) -> str:
    """Write the way to a leaf of a state as its name.

    Args:
        path: keys, indices and field names, as `muonfx.tree.paths` lists them.

    Raises:
        TypeError: an entry is neither a string nor an int.
        ValueError: a string is no valid Unicode.

    >>> name_of(("momentum", "trace", "blocks.0.attn.q.weight"))
    'momentum/trace/blocks.0.attn.q.weight'
    >>> name_of(("trace", "a/b", 0, "0"))
    'trace/a~1b/0/~20'
    """
    if not path:
        return _ROOT
    entries = [_escaped(entry) for entry in path]
    if entries[0] in _RESERVED:
        entries[0] = "~2" + entries[0]
    return "/".join(entries)


def _escaped(entry: Any) -> str:
    if type(entry) is str and _PLAIN_ENTRY.fullmatch(entry):
        return entry
    if isinstance(entry, bool) or not isinstance(entry, str | int):
        raise TypeError(
            f"the key {entry!r} cannot be part of a leaf's name in a checkpoint: keys must be strings or ints, found "
            f"{type(entry).__name__}"
        )
    if isinstance(entry, int):
        return str(int(entry))
    try:
        entry.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the key {entry!r} cannot be part of a leaf's name: it is no valid Unicode") from error
    literal = "~2" if not entry or _INTEGER.fullmatch(entry) else ""
    return literal + entry.replace("~", "~0").replace("/", "~1")


def path_of(name: str) -> tuple[str | int, ...]:
    """Read a name back into the way to the leaf; the inverse of `name_of`.

    Raises:
        ValueError: no path has this name.

    >>> path_of("trace/a~1b/0/~20")
    ('trace', 'a/b', 0, '0')
    """
    if name == _ROOT:
        return ()
    path = tuple(_read(entry) for entry in name.split("/"))
    if name_of(path) != name:
        raise ValueError(f"{name!r} is not the name of a leaf")
    return path


def _read(entry: str) -> str | int:
    if _INTEGER.fullmatch(entry):
        return int(entry)
    return re.sub("~[01]", lambda found: _ESCAPES[found[0]], entry.removeprefix("~2"))


def named_leaves(values: PyTree, section: str = "") -> list[tuple[str, Any]]:
    """List the leaves of a tree with their names, in the order of `muonfx.tree.leaves`; None is a leaf, and absent.

    Names of parameters are those without wrappers: see `plain_names`.

    Args:
        values: a tree.
        section: a top level to put in front; "" for a state.

    Raises:
        TypeError: a key is neither a string nor an int.
        ValueError: a key is no valid Unicode, or two leaves have one name, as it may be only without wrappers.
    """
    if section:
        found = [section + "".join(f"/{_escaped(entry)}" for entry in path) for path in tree.paths(values)]
    else:
        found = [name_of(path) for path in tree.paths(values)]
    plain = plain_names(found)
    if len(set(plain.values())) < len(plain):
        twice = next(name for name, times in Counter(plain.values()).items() if times > 1)
        both = " and ".join(repr(old) for old, name in plain.items() if name == twice)
        raise ValueError(
            f"{both} are both {twice!r} without what wrappers (torch.compile, DistributedDataParallel, ...) put into "
            "names: rename one of them"
        )
    if len(set(found)) < len(found):
        twice = next(name for place, name in enumerate(found) if name in found[:place])
        raise ValueError(f"two leaves are called {twice!r}: a dict has a key as an int and as a string, say")
    return list(zip((plain[name] for name in found), tree.leaves(values), strict=True))


def is_leaf(value: Any) -> bool:
    """True if a value can be a leaf of a saved state: a tensor, or a piece of one that a rank holds."""
    return isinstance(value, Tensor) or hasattr(value, "__create_chunk_list__")


def named_tensors(values: PyTree, section: str = "") -> list[tuple[str, Any]]:
    """`named_leaves` of a tree whose leaves are tensors, pieces of tensors, or None.

    Raises:
        TypeError: a leaf is something else; the message names it.
    """
    named = named_leaves(values, section)
    for name, leaf in named:
        if leaf is not None and not is_leaf(leaf):
            raise TypeError(
                f"the leaf {name!r} is a {type(leaf).__name__}, expected a tensor: a checkpoint holds tensors and "
                "JSON; keep a number as a 0-d tensor, or give it in extra="
            )
    return named


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """For each name of a leaf the one that it has where no wrapper (`muonfx.tree.wrappers`) is in the parameter's name.

    Leaves beside one another, as those of one momentum are, belong to one model.

    >>> list(plain_names(["mu/module._orig_mod.up", "mu/module._orig_mod.down", "count"]).values())
    ['mu/up', 'mu/down', 'count']
    """
    found = {name: name for name in names}
    if not any(map(may_be_wrapped, found)):
        return found
    beside: dict[str, dict[str, str]] = {}
    for name in found:
        above, level, last = name.rpartition("/")
        entry = _read(last)
        if isinstance(entry, str):
            beside.setdefault(above + level, {})[entry] = name
    for above, group in beside.items():
        for entry, plain in unwrapped(group).items():
            if plain != entry:
                reserved = "~2" if not above and plain in _RESERVED else ""
                found[group[entry]] = above + reserved + _escaped(plain)
    return found


def in_section(name: str, section: str) -> bool:
    """True if a name stands under a top level; "" is the state, which is everything but the parameters."""
    of_params = name == PARAMS or name.startswith(PARAMS + "/")
    return of_params == (section == PARAMS)


def is_name(name: str) -> bool:
    """True if a text is the name of a leaf, of a state or of parameters.

    >>> is_name("momentum/trace/w"), is_name("params/w"), is_name("params/~9")
    (True, True, False)
    """
    if _PLAIN_NAME.fullmatch(name):
        return True
    try:
        if not in_section(name, PARAMS):
            return name_of(path_of(name)) == name
        entries = name.split("/")[1:]
        return [_escaped(_read(entry)) for entry in entries] == entries
    except ValueError:
        return False
