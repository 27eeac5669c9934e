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

    Return a dict from each name in the checkpoint to its new name, and a list of texts about wrong entries. The caller
    raises one error with these texts and its own, so that a user sees all mistakes at once.

    Args:
        names: a dict from each name in the checkpoint to this name without the prefixes that wrappers add, such as
            from "module.fc.weight" to "fc.weight". An entry of ``rename`` may match either.
        rename: a dict from old to new names. The leading levels of names, or patterns with ``*``, may stand for names.
        level: the separator in names.
        what: the noun in errors, such as "leaf".

    >>> new_names({"layers/0/w": "layers/0/w", "head": "head"}, {"layers/*": "blocks/*"})
    ({'layers/0/w': 'blocks/0/w', 'head': 'head'}, [])
    >>> new_names({"head": "head"}, {"haed": "out"})
    ({'head': 'head'}, ["'haed' matches no leaf in the checkpoint, close: 'head': correct or remove it"])
    """
    target_of, problems = _checked_entries(rename)
    # "layers/0/*" is applied in place of "layers/*" where both match.
    target_of = dict(sorted(target_of.items(), key=_exactness, reverse=True))
    new_name_of: dict[str, str] = {}
    used_patterns: set[str | None] = set()
    for saved_name, name in names.items():
        pattern, new_name = _rename_by_first_match(saved_name, name, target_of, level)
        new_name_of[saved_name] = new_name
        used_patterns.add(pattern)
    # An entry that has renamed nothing is probably misspelt.
    all_names = [*names.values(), *names]
    for pattern in sorted(target_of.keys() - used_patterns):
        problems.append(_describe_unused(pattern, all_names, level, what))
    return new_name_of, problems


def _rename_by_first_match(
    saved_name: str, name: str, target_of: Mapping[str, str], level: str
) -> tuple[str | None, str]:
    """Return the pattern of the first entry that matches a name, and the new name. Without one: None and the name.

    ``name`` is ``saved_name`` without the prefixes of wrappers, such as "module.". An entry may match either.
    """
    for pattern, target in target_of.items():
        for candidate in (name, saved_name):
            new_name = _new_name(candidate, pattern, target, level)
            if new_name is not None:
                return pattern, new_name
    return None, name


def _exactness(entry: tuple[str, str]) -> tuple[int, bool]:
    """Return a key that sorts entries: the most exact has most characters other than ``*``, then no ``*`` at all.

    >>> (
    ...     _exactness(("layers/0/*", "")) > _exactness(("layers/*", "")),
    ...     _exactness(("a", "")) > _exactness(("a*", "")),
    ... )
    (True, True)
    """
    pattern, _ = entry
    return len(pattern.replace("*", "")), "*" not in pattern


def _checked_entries(rename: Rename) -> tuple[dict[str, str], list[str]]:
    """Return the entries of ``rename`` that can be applied, and texts about the others.

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
        if pattern.count("*") == target.count("*"):
            target_of[pattern] = target
        else:
            problems.append(f"{pattern!r} and {target!r} must have the same number of '*'")
    return target_of, problems


def _describe_unused(pattern: str, names: Sequence[str], level: str, what: str) -> str:
    """Return an error text about an entry of a renaming, with the given pattern, that has renamed no name.

    >>> _describe_unused("layer/*", ["layers/0/w"], level="/", what="leaf")
    "'layer/*' matches no leaf in the checkpoint, close: 'layers/0/w': correct or remove it"
    """
    # The pattern itself is used as the target, because it only matters whether there is a new name.
    matches_a_name = any(_new_name(name, pattern, pattern, level) is not None for name in names)
    if matches_a_name:  # but for each of these names, another entry was applied
        return f"{pattern!r} has no effect, because more exact entries rename the same names: remove it"
    similar_names = close_names(pattern.strip("*" + level), names, level)
    if similar_names:
        candidates = f"close: {format_list(similar_names)}"
    else:
        candidates = f"which has {format_list(sorted(set(names)))}"
    return f"{pattern!r} matches no {what} in the checkpoint, {candidates}: correct or remove it"


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
    >>> prefix_renaming(extra=["trace/fc.weight"], missing=["trace/head.bias"])
    {}
    """
    # Sorted by path, then by parameter, both lists have one order if the names differ by a prefix only. So the names at
    # an index are a pair.
    extra_names = sorted(extra, key=lambda name: name.rpartition("/"))
    missing_names = sorted(missing, key=lambda name: name.rpartition("/"))
    if len(extra_names) != len(missing_names):  # the names differ by more than a prefix
        return {}
    # For each pair of names, the prefix and its replacement: ("", "model."); None if they differ otherwise.
    changes = list(map(_change_of_prefix, extra_names, missing_names))
    if len(set(changes)) != 1 or changes[0] is None:
        return {}
    prefix, new_prefix = changes[0]
    renaming: dict[str, str] = {}
    for name in extra_names:
        path, slash, _ = name.rpartition("/")
        renaming[f"{path}{slash}{prefix}*"] = f"{path}{slash}{new_prefix}*"
    return renaming


def _change_of_prefix(name: str, new_name: str) -> tuple[str, str] | None:
    """Return the prefix that a parameter loses and the one that it gets, one of which is empty; None for other changes.

    >>> _change_of_prefix("trace/fc.weight", "trace/model.fc.weight")
    ('', 'model.')
    >>> _change_of_prefix("trace/model.fc.weight", "trace/fc.weight")
    ('model.', '')
    """
    path, _, parameter = name.rpartition("/")
    new_path, _, new_parameter = new_name.rpartition("/")
    if path != new_path:
        return None
    if new_parameter.endswith(f".{parameter}"):
        return "", new_parameter.removesuffix(parameter)
    if parameter.endswith(f".{new_parameter}"):
        return parameter.removesuffix(new_parameter), ""
    return None
