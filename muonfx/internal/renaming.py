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
    """Rename the leaves or parameters of a checkpoint by the dict ``rename`` that a user passes.

    Return a dict from each name in the checkpoint to its new name, and a list of texts about wrong entries.

    Args:
        names: a dict from each name in the checkpoint to this name without the prefixes that wrappers add, such as
            from "module.fc.weight" to "fc.weight". An entry of ``rename`` may match either.
        rename: a dict from old to new names. The leading levels of names, or patterns with ``*``, may stand for names.
        level: the separator in names.
        what: the noun in errors, such as "leaf".

    >>> new_names({"layers/0/w": "layers/0/w", "head": "head"}, {"layers/*": "blocks/*"})
    ({'layers/0/w': 'blocks/0/w', 'head': 'head'}, [])
    """
    target_of, problems = _checked_entries(rename)
    # "layers/0/*" is more exact than "layers/*", and is applied in its place where both match.
    most_exact_first = sorted(target_of, key=_exactness, reverse=True)
    new_name_of = dict(names)  # without a matching entry, the name without prefixes
    used_patterns: set[str] = set()
    for saved_name, name in names.items():
        for pattern in most_exact_first:
            target = target_of[pattern]
            new_name = _new_name(name, pattern, target, level)
            if new_name is None:  # perhaps the entry has the prefix of a wrapper, such as "module."
                new_name = _new_name(saved_name, pattern, target, level)
            if new_name is not None:
                used_patterns.add(pattern)
                new_name_of[saved_name] = new_name
                break  # only the most exact entry that matches is applied
    # An entry that has renamed nothing is probably misspelt.
    all_names = [*names.values(), *names]
    for pattern in sorted(target_of.keys() - used_patterns):
        problems.append(_unused(pattern, all_names, level, what))
    return new_name_of, problems


def _exactness(pattern: str) -> tuple[int, bool]:
    """Return a key that sorts patterns: the most exact has most characters other than ``*``, then no ``*`` at all.

    >>> _exactness("layers/0/*") > _exactness("layers/*"), _exactness("head") > _exactness("head*")
    (True, True)
    """
    return len(pattern.replace("*", "")), "*" not in pattern


def _checked_entries(rename: Rename) -> tuple[dict[str, str], list[str]]:
    """Return the entries of ``rename`` that have as many ``*`` in the new name as in the old; and a text about others.

    Each ``*`` of a new name is replaced by the text that the ``*`` of the old name matches, so the numbers must agree.

    >>> _checked_entries({"layers/*": "blocks/*", "head*": "out"})
    ({'layers/*': 'blocks/*'}, ["'head*' and 'out' must have the same number of '*'"])
    """
    if not isinstance(rename, Mapping):
        raise TypeError(f"rename must be a dict from old names to new ones, found {rename!r}")
    target_of: dict[str, str] = {}
    problems: list[str] = []
    for pattern, target in rename.items():
        if not isinstance(pattern, str) or not isinstance(target, str):
            raise TypeError(f"rename must map strings to strings, found {pattern!r}: {target!r}")
        # Else a text that a star matches would have no place in the new name, or a star no text.
        if pattern.count("*") == target.count("*"):
            target_of[pattern] = target
        else:
            problems.append(f"{pattern!r} and {target!r} must have the same number of '*'")
    return target_of, problems


def _unused(pattern: str, names: Sequence[str], level: str, what: str) -> str:
    """Return an error text about an entry of a renaming, with the given pattern, that has renamed no name.

    >>> _unused("layer/*", ["layers/0/w"], level="/", what="leaf")
    "'layer/*' matches no leaf in the checkpoint, close: 'layers/0/w': correct or remove it"
    """
    # It matches names, but for each of them another entry was applied.
    if any(_matches(name, pattern, level) for name in names):
        return f"{pattern!r} has no effect, because more exact entries rename the same names: remove it"
    similar_names = close_names(pattern.strip("*" + level), names, level)
    if similar_names:
        candidates = f"close: {format_list(similar_names)}"
    else:
        candidates = f"which has {format_list(sorted(set(names)))}"
    return f"{pattern!r} matches no {what} in the checkpoint, {candidates}: correct or remove it"


def _matches(name: str, pattern: str, level: str) -> bool:
    return _new_name(name, pattern, target=pattern, level=level) is not None


def _new_name(name: str, pattern: str, target: str, level: str) -> str | None:
    """Apply one entry ``pattern: target`` of a renaming; return the new name, or None if the entry does not match.

    >>> _new_name("layers/0/w", "layers/*/w", "blocks/*/weight", "/")
    'blocks/0/weight'
    >>> _new_name("layers/0/w", "layers", "blocks", "/")
    'blocks/0/w'
    """
    if "*" in pattern:
        return _new_name_by_stars(name, pattern, target)
    # Without a star, the pattern is the whole name, or the levels with which it begins.
    prefix = pattern.rstrip(level)
    if name == pattern or name.startswith(prefix + level):
        return target.rstrip(level) + name[len(prefix) :]
    return None


def _new_name_by_stars(name: str, pattern: str, target: str) -> str | None:
    """Return the target with the texts that each ``*`` of the pattern matches in a name; None if it does not match.

    For the name "layers/0/w", the pattern "layers/*/w" and the target "blocks/*/weight", it is "blocks/0/weight".
    """
    # A regular expression with a group for each star: "layers/(.*)/w".
    expression = re.escape(pattern).replace(r"\*", "(.*)")
    match = re.fullmatch(expression, name, re.DOTALL)
    if match is None:
        return None
    # Put the matched texts between the parts of the target: "blocks/" + "0" + "/weight".
    new_name, *texts_after_stars = target.split("*")
    for matched_text, text in zip(match.groups(), texts_after_stars, strict=True):
        new_name += matched_text + text
    return new_name


def prefix_renaming(extra: Iterable[str], missing: Iterable[str]) -> dict[str, str]:
    """Return the renaming to suggest if all names differ by one prefix of the parameter, such as "model."; else {}.

    ``extra`` are names that only the checkpoint has, and ``missing`` those that only the model has. A name is a path,
    a "/" and the name of a parameter.

    >>> prefix_renaming(extra=["trace/fc.weight"], missing=["trace/model.fc.weight"])
    {'trace/*': 'trace/model.*'}
    """
    # Sorted by path, then by parameter. With one prefix more or less, both lists have one order.
    extra_names = sorted([name.rpartition("/") for name in extra])  # [("trace", "/", "fc.weight")]
    missing_names = sorted([name.rpartition("/") for name in missing])
    if len(extra_names) != len(missing_names):  # the names differ by more than a prefix
        return {}
    renaming: dict[str, str] = {}
    changes_of_prefix: set[tuple[str, str]] = set()
    for extra_name, missing_name in zip(extra_names, missing_names, strict=True):
        path, slash, parameter = extra_name
        new_path, _, new_parameter = missing_name
        change = _change_of_prefix(parameter, new_parameter)
        if path != new_path or change is None:
            return {}
        prefix, new_prefix = change
        changes_of_prefix.add(change)
        renaming[f"{path}{slash}{prefix}*"] = f"{path}{slash}{new_prefix}*"
    if len(changes_of_prefix) != 1:  # there are no names, or they lose different prefixes
        return {}
    return renaming


def _change_of_prefix(parameter: str, new_parameter: str) -> tuple[str, str] | None:
    """Return the prefix that a name loses and the one that it gets, one of which is empty; None for another change.

    >>> _change_of_prefix("fc.weight", "model.fc.weight"), _change_of_prefix("model.fc.weight", "fc.weight")
    (('', 'model.'), ('model.', ''))
    """
    if new_parameter.endswith(f".{parameter}"):
        return "", new_parameter.removesuffix(parameter)
    if parameter.endswith(f".{new_parameter}"):
        return parameter.removesuffix(new_parameter), ""
    return None
