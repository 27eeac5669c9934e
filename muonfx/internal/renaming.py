"""Rename leaves or parameters when a checkpoint is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from muonfx.internal.arguments import close_names
from muonfx.internal.display import format_list

Rename = Mapping[str, str]
"""A mapping from old to new names. A key may also be the leading levels of names, or a pattern with ``*``."""


def new_names(
    names: Mapping[str, str], rename: Rename, level: str = "/", what: str = "leaf"
) -> tuple[dict[str, str], list[str]]:
    """Rename checkpoint entries; return a dict from each name in the checkpoint to its new name, and a list of errors.

    Errors are texts about entries of ``rename`` that are malformed or match no name. ``level`` is the separator in
    names, and ``what`` is the noun in errors, such as "leaf".
    """
    # An entry `old: new` matches the name `old` and names that begin with `old` and `level`; with `*`, it matches as a
    # pattern, and each `*` of `new` is replaced by the text of the same `*` in `old`. Of several matching entries the
    # most exact one applies: the name itself, then the entry with the most characters other than `*`. `names` maps
    # each name in the checkpoint to the name before renaming, and an entry may match either.
    if not isinstance(rename, Mapping):
        raise TypeError(f"rename must be a dict from old names to new ones, found {rename!r}")
    wrong: list[str] = []
    entries: dict[str, str] = {}
    for old, new in rename.items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise TypeError(f"rename must map strings to strings, found {old!r}: {new!r}")
        if old.count("*") != new.count("*"):
            wrong.append(f"{old!r} and {new!r} must have the same number of '*'")
        else:
            entries[old] = new
    found = dict(names)
    used: set[str] = set()
    for written, name in names.items():
        fitting = [
            ((which == old, len(old.replace("*", ""))), made, old)
            for old, new in entries.items()
            for which in (name, written)
            if (made := _new_name(which, old, new, level)) is not None
        ]
        if fitting:
            _, found[written], old = max(fitting, key=lambda entry: entry[0])
            used.add(old)
    return found, wrong + [
        _unused(old, [*names.values(), *names], level, what) for old in sorted(entries.keys() - used)
    ]


def _unused(old: str, names: Sequence[str], level: str, what: str) -> str:
    if any(_new_name(name, old, old, level) is not None for name in names):
        return f"{old!r} has no effect, because more exact entries rename the same names: remove it"
    close = close_names(old.strip("*" + level), names, level)
    there = f"close: {format_list(close)}" if close else f"which has {format_list(sorted(set(names)))}"
    return f"{old!r} matches no {what} in the checkpoint, {there}: correct or remove it"


def _new_name(name: str, old: str, new: str, level: str) -> str | None:
    """Apply one entry ``old: new`` of a renaming; return the new name, or None if the entry does not match ``name``."""
    if "*" in old:
        found = re.fullmatch("(.*)".join(map(re.escape, old.split("*"))), name, re.DOTALL)
        texts = () if found is None else found.groups()
        return None if found is None else "".join(map("".join, zip_longest(new.split("*"), texts, fillvalue="")))
    begin = old.rstrip(level)
    if name == old or name.startswith(begin + level):
        return new.rstrip(level) + name[len(begin) :]
    return None


def prefix_renaming(extra: Iterable[str], missing: Iterable[str]) -> dict[str, str]:
    """Return a renaming that adds or removes one prefix, such as "model.", after the last "/" of all names; else {}."""
    short, long = (sorted(names) for names in (extra, missing))
    adds = sum(map(len, short)) < sum(map(len, long))
    if not adds:
        short, long = long, short
    levels = [name.rpartition("/") for name in short]
    last = long[0].rpartition("/")[2] if long else ""
    for prefix in (last[: dot.end()] for dot in re.finditer(r"\.", last)):
        if sorted(f"{above}{level}{prefix}{end}" for above, level, end in levels) == long:
            entries = {f"{above}{level}*": f"{above}{level}{prefix}*" for above, level, _ in levels}
            return entries if adds else {new: old for old, new in entries.items()}
    return {}
