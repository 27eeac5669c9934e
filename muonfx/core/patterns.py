"""Checks that globs over parameter names, in the arguments of transforms, match at least one parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from muonfx import tree
from muonfx.core.checks import warn_caller
from muonfx.internal.arguments import close_names
from muonfx.internal.display import format_list, shown_name
from muonfx.internal.wrappers import unwrapped
from muonfx.tree import PyTree

__all__ = ["NamePatterns", "names_close_to", "warn_of_unmatched"]


class NamePatterns(NamedTuple):
    """Globs over parameter names in one argument of a transform, such as the keys of a `MatrixView`.

    ``NamePatterns("view", (("*.q",), ("*.k", "*.key")))`` requires a name that matches ``*.q``, and a name that matches
    ``*.k`` or ``*.key``.
    """

    argument: str
    """The name of the argument, for messages."""
    groups: tuple[tuple[str, ...], ...]
    """Groups of globs. In each group, at least one glob must match a parameter name."""
    first_counts: bool = False
    """True if each name is used only for the first group that matches it."""
    required: bool = False
    """True if a group without a match is an error; False for a warning."""
    optional: frozenset[str] = frozenset()
    """Globs that may match no name without a warning, because the user has not written them."""


def warn_of_unmatched(patterns: Iterable[NamePatterns], params: PyTree) -> None:
    """Warn of each group of globs that matches no parameter name.

    Args:
        patterns: the globs in the arguments of a transform, as `muonfx.core.transform.patterns_in` returns them.
        params: all parameters, also for a transform that receives only some of them, as under `partition`. A glob may
            be meant for the others, so only a glob without any match is a mistake.

    Raises:
        ValueError: a group with ``required=True`` matches no name.

    >>> import warnings
    >>> import muonfx as mfx
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     view = mfx.MatrixView({"*.qvk": "(part=3 out) in -> part out in"})
    ...     mfx.contrib.normalize_rows(view=view).init({"h.qkv": torch.zeros(6, 2)})
    EmptyState()
    >>> str(caught[0].message)
    "view: '*.qvk' matches none of the 1 parameters; close: 'h.qkv'; correct or remove it"
    """
    names = tree.names(params)
    if not names:
        return
    for pattern in patterns:
        _check_groups(pattern, names)


def _check_groups(pattern: NamePatterns, names: list[str]) -> None:
    """Report each group of globs of an argument that selects no parameter, by a warning or an error.

    A glob is, for example, ``*.bias``. In a group of globs, at least one must match one of the parameter names.
    """
    candidates = set(names)
    # Transforms with required globs also match names without "module." and other wrappers.
    if pattern.required:
        candidates.update(unwrapped(names).values())
    matched_before: set[str] = set()  # by the groups so far
    for group in pattern.groups:
        matches = {name for name in candidates if _matches(name, group)}
        # An empty group is always a mistake.
        is_optional = bool(group) and pattern.optional.issuperset(group)
        if not matches and not is_optional:
            _report(
                pattern,
                group,
                f"matches none of the {len(names)} parameters; {names_close_to(group, names)}",
            )
        # A pattern "head.weight" after "*.weight" has no effect.
        has_no_effect = pattern.first_counts and matches <= matched_before
        if matches and has_no_effect:
            shown = format_list(sorted(matches), shown_name)
            problem = (
                f"matches only names that an earlier pattern matches, and the first counts: {shown}"
            )
            _report(pattern, group, problem)
        matched_before |= matches


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def names_close_to(globs: Sequence[str], names: list[str]) -> str:
    """Return the parameter names that are close to some globs, such as "close: 'h.qkv'"; if none is, list all.

    >>> names_close_to(["*.qvk"], ["h.qkv", "h.out"])
    "close: 'h.qkv'"
    """
    close: dict[str, None] = {}  # each name once, in order
    for glob in globs:
        close |= dict.fromkeys(close_names(glob.strip("*."), names))
    if close:
        return f"close: {format_list(list(close), shown_name)}"
    return f"they are {format_list(names, shown_name)}"


def _report(pattern: NamePatterns, globs: tuple[str, ...], problem: str) -> None:
    """Raise ValueError for a group of globs of a required pattern; warn for any other.

    ``problem`` is the end of the sentence about the globs.

    >>> pattern = NamePatterns("view", (("*.qvk",),), required=True)
    >>> _report(pattern, ("*.qvk",), "matches none of the 5 parameters")
    Traceback (most recent call last):
    ValueError: view: '*.qvk' matches none of the 5 parameters; correct it
    """
    conjunction = " or " if pattern.required else " and "
    message = f"{pattern.argument}: {conjunction.join(map(repr, globs))} {problem}"
    if pattern.required:
        raise ValueError(f"{message}; correct it")
    warn_caller(f"{message}; correct or remove it")
