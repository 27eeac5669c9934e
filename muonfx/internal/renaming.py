"""Rename leaves or parameters when a checkpoint is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

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
    # pattern, and each `*` of `new` is replaced by the text of the same `*` in `old`. `names` maps each name in the
    # checkpoint to the name before renaming, and an entry may match either.
    entries, problems = _checked_entries(rename)
    new_name_of = dict(names)
    used: set[str] = set()
    for saved_name, name in names.items():
        best_entry = _most_exact_entry(entries, (name, saved_name), level)
        if best_entry is not None:
            old, new_name_of[saved_name] = best_entry
            used.add(old)
    all_names = [*names.values(), *names]
    for old in sorted(entries.keys() - used):
        problems.append(_unused(old, all_names, level, what))
    return new_name_of, problems


def _checked_entries(rename: Rename) -> tuple[dict[str, str], list[str]]:
    """Return the entries of ``rename`` whose ``*`` fit together, and a text about each other entry."""
    if not isinstance(rename, Mapping):
        raise TypeError(f"rename must be a dict from old names to new ones, found {rename!r}")
    entries: dict[str, str] = {}
    problems: list[str] = []
    for old, new in rename.items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise TypeError(f"rename must map strings to strings, found {old!r}: {new!r}")
        if old.count("*") == new.count("*"):
            entries[old] = new
        else:
            problems.append(f"{old!r} and {new!r} must have the same number of '*'")
    return entries, problems


def _most_exact_entry(entries: Mapping[str, str], names: Sequence[str], level: str) -> tuple[str, str] | None:
    """Return the old name of the entry that matches one of ``names`` most exactly, and the new name; None without one.

    A name itself is most exact, then the entry with the most characters other than ``*``.
    """
    best_entry: tuple[str, str] | None = None
    best_rank = (False, -1)
    for old, new in entries.items():
        for name in names:
            new_name = _new_name(name, old, new, level)
            rank = (name == old, len(old.replace("*", "")))
            if new_name is not None and rank > best_rank:
                best_entry = (old, new_name)
                best_rank = rank
    return best_entry


def _unused(old: str, names: Sequence[str], level: str, what: str) -> str:
    """Return an error text about an entry that renames nothing."""
    if any(_new_name(name, old, old, level) is not None for name in names):
        return f"{old!r} has no effect, because more exact entries rename the same names: remove it"
    similar = close_names(old.strip("*" + level), names, level)
    problem = f"{old!r} matches no {what} in the checkpoint"
    if similar:
        return f"{problem}, close: {format_list(similar)}: correct or remove it"
    return f"{problem}, which has {format_list(sorted(set(names)))}: correct or remove it"


def _new_name(name: str, old: str, new: str, level: str) -> str | None:
    """Apply one entry ``old: new`` of a renaming; return the new name, or None if the entry does not match ``name``.

    >>> _new_name("layers/0/w", "layers/*/w", "blocks/*/weight", "/")
    'blocks/0/weight'
    """
    if "*" in old:
        pattern = "(.*)".join([re.escape(text) for text in old.split("*")])
        match = re.fullmatch(pattern, name, re.DOTALL)
        if match is None:
            return None
        new_texts = new.split("*")
        matched_texts = [*match.groups(), ""]  # each replaces one "*"; none comes after the last text
        return "".join([text + matched for text, matched in zip(new_texts, matched_texts, strict=True)])
    prefix = old.rstrip(level)
    if name == old or name.startswith(prefix + level):
        return new.rstrip(level) + name[len(prefix) :]
    return None


def prefix_renaming(extra: Iterable[str], missing: Iterable[str]) -> dict[str, str]:
    """Return a renaming that adds or removes one prefix, such as "model.", after the last "/" of all names; else {}.

    >>> prefix_renaming(extra=["trace/fc.weight"], missing=["trace/model.fc.weight"])
    {'trace/*': 'trace/model.*'}
    """
    extra_names = sorted(extra)
    missing_names = sorted(missing)
    if sum(map(len, extra_names)) < sum(map(len, missing_names)):
        return _added_prefix(extra_names, missing_names)
    removed = _added_prefix(missing_names, extra_names)
    return {new: old for old, new in removed.items()}


def _added_prefix(short_names: Sequence[str], long_names: Sequence[str]) -> dict[str, str]:
    """Return a renaming that adds one prefix to ``short_names`` and gives the sorted ``long_names``; else {}."""
    if not long_names:
        return {}
    first_parameter = long_names[0].rpartition("/")[2]
    split_names = [name.rpartition("/") for name in short_names]  # ("trace", "/", "fc.weight")
    for dot in re.finditer(r"\.", first_parameter):
        prefix = first_parameter[: dot.end()]
        with_prefix = [f"{above}{slash}{prefix}{parameter}" for above, slash, parameter in split_names]
        if sorted(with_prefix) == long_names:
            return {f"{above}{slash}*": f"{above}{slash}{prefix}*" for above, slash, _ in split_names}
    return {}
