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

    ``names`` maps each name in the checkpoint to a name without wrappers, such as "module.fc.weight" to "fc.weight". An
    entry of ``rename`` may match either. Errors are texts about entries that are malformed or match no name. ``level``
    is the separator in names, and ``what`` is the noun in errors, such as "leaf".
    """
    targets, problems = _checked_entries(rename)
    most_exact_first = sorted(targets, key=_exactness, reverse=True)
    new_name_of = dict(names)
    used: set[str] = set()
    for saved_name, name in names.items():
        for pattern in most_exact_first:
            new_name = _new_name(name, pattern, targets[pattern], level)
            if new_name is None:
                new_name = _new_name(saved_name, pattern, targets[pattern], level)
            if new_name is not None:
                used.add(pattern)
                new_name_of[saved_name] = new_name
                break
    all_names = [*names.values(), *names]
    for pattern in sorted(targets.keys() - used):
        problems.append(_unused(pattern, all_names, level, what))
    return new_name_of, problems


def _exactness(pattern: str) -> tuple[int, bool]:
    """Return a key that sorts patterns: the most exact has most characters other than ``*``, then no ``*`` at all."""
    return len(pattern.replace("*", "")), "*" not in pattern


def _checked_entries(rename: Rename) -> tuple[dict[str, str], list[str]]:
    """Return the entries of ``rename`` whose ``*`` fit together, and a text about each other entry."""
    if not isinstance(rename, Mapping):
        raise TypeError(f"rename must be a dict from old names to new ones, found {rename!r}")
    targets: dict[str, str] = {}
    problems: list[str] = []
    for pattern, target in rename.items():
        if not isinstance(pattern, str) or not isinstance(target, str):
            raise TypeError(f"rename must map strings to strings, found {pattern!r}: {target!r}")
        if pattern.count("*") == target.count("*"):
            targets[pattern] = target
        else:
            problems.append(f"{pattern!r} and {target!r} must have the same number of '*'")
    return targets, problems


def _unused(pattern: str, names: Sequence[str], level: str, what: str) -> str:
    """Return an error text about an entry that renames nothing."""
    if any(_new_name(name, pattern, pattern, level) is not None for name in names):
        return f"{pattern!r} has no effect, because more exact entries rename the same names: remove it"
    similar = close_names(pattern.strip("*" + level), names, level)
    candidates = f"which has {format_list(sorted(set(names)))}"
    if similar:
        candidates = f"close: {format_list(similar)}"
    return f"{pattern!r} matches no {what} in the checkpoint, {candidates}: correct or remove it"


def _new_name(name: str, pattern: str, target: str, level: str) -> str | None:
    """Apply one entry ``pattern: target`` of a renaming; return the new name, or None if the entry does not match.

    >>> _new_name("layers/0/w", "layers/*/w", "blocks/*/weight", "/")
    'blocks/0/weight'
    >>> _new_name("layers/0/w", "layers", "blocks", "/")
    'blocks/0/w'
    """
    if "*" in pattern:
        expression = re.escape(pattern).replace(r"\*", "(.*)")
        match = re.fullmatch(expression, name, re.DOTALL)
        if match is None:
            return None
        new_name, *texts = target.split("*")
        for matched_text, text in zip(match.groups(), texts, strict=True):
            new_name += matched_text + text
        return new_name
    prefix = pattern.rstrip(level)
    if name == pattern or name.startswith(prefix + level):
        return target.rstrip(level) + name[len(prefix) :]
    return None


def prefix_renaming(extra: Iterable[str], missing: Iterable[str]) -> dict[str, str]:
    """Return a renaming that adds or removes one prefix, such as "model.", after the last "/" of all names; else {}.

    >>> prefix_renaming(extra=["trace/fc.weight"], missing=["trace/model.fc.weight"])
    {'trace/*': 'trace/model.*'}
    """
    # Sorted by path, then by parameter. With one prefix more or less, both lists have one order.
    extra_names = sorted([name.rpartition("/") for name in extra])  # [("trace", "/", "fc.weight")]
    missing_names = sorted([name.rpartition("/") for name in missing])
    if len(extra_names) != len(missing_names):
        return {}
    renaming: dict[str, str] = {}
    prefixes: set[tuple[str, str]] = set()
    for extra_name, missing_name in zip(extra_names, missing_names, strict=True):
        path, slash, parameter = extra_name
        new_path, _, new_parameter = missing_name
        if path != new_path:
            return {}
        if new_parameter.endswith(f".{parameter}"):
            prefix = ""
            new_prefix = new_parameter.removesuffix(parameter)
        elif parameter.endswith(f".{new_parameter}"):
            prefix = parameter.removesuffix(new_parameter)
            new_prefix = ""
        else:
            return {}
        prefixes.add((prefix, new_prefix))
        renaming[f"{path}{slash}{prefix}*"] = f"{path}{slash}{new_prefix}*"
    return renaming if len(prefixes) == 1 else {}
