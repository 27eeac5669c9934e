"""Globs over parameter names in the arguments of transforms, and the warning about those that match nothing."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from muonfx import tree
from muonfx.core.checks import shown_name, warn_caller
from muonfx.tree import PyTree
from muonfx.tree.arguments import close_names
from muonfx.tree.display import format_list
from muonfx.tree.wrappers import unwrapped

__all__ = ["NamePatterns", "warn_of_unmatched"]


class NamePatterns(NamedTuple):
    """Globs over dotted names in an argument of a transform; see ``name_patterns`` of `muonfx.transform`."""

    argument: str
    groups: tuple[tuple[str, ...], ...]
    """Groups of alternatives; one glob of each group must match."""
    first_counts: bool = False
    """True if a name belongs only to the first group that matches it."""
    required: bool = False
    """True if a group that matches nothing is an error, not a warning."""


def warn_of_unmatched(patterns: Iterable[NamePatterns], params: PyTree) -> None:
    """Warn of patterns in a transform's arguments that match no name in `params`.

    The names are the names of the whole tree. A transform for some of the parameters (under `partition` or `masked`)
    may have patterns for the others, such as a mask that all labels share: only a pattern without any match is a
    mistake.

    Raises:
        ValueError: required patterns match nothing.

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
    for argument, groups, first_counts, required in patterns if names else ():
        taken: set[str] = set()
        known = {*names, *unwrapped(names).values()} if required else names
        for group in groups:
            found = {n for n in known if any(fnmatchcase(n, pattern) for pattern in group)}
            if found and not found <= taken:
                taken |= found if first_counts else set()
                continue
            if found:
                there = format_list(sorted(found), shown_name)
                problem = f"matches only names that an earlier pattern matches, and the first counts: {there}"
            else:
                close = [name for pattern in group for name in close_names(pattern.strip("*."), names)]
                there = (
                    f"close: {format_list(close, shown_name)}"
                    if close
                    else f"they are {format_list(names, shown_name)}"
                )
                problem = f"matches none of the {len(names)} parameters; {there}"
            problem = f"{argument}: {(' or ' if required else ' and ').join(map(repr, group))} {problem}"
            if required:
                raise ValueError(f"{problem}; correct it")
            warn_caller(f"{problem}; correct or remove it")
