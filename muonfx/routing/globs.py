"""Shorten names of parameters to globs, such as ``"*.fc.weight"``, for rules and views."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from glob import escape
from itertools import combinations
from typing import TypeVar

from muonfx.internal.tracing import matches

T = TypeVar("T")


def any_glob_matches(globs: Collection[str], names: Iterable[str]) -> bool:
    """Return True if one of the globs matches one of the names.

    >>> any_glob_matches(["lm_head.*", "*.bias"], ["wte.weight", "lm_head.weight"])
    True
    """
    for name in names:
        for glob in globs:
            if matches(name, glob):
                return True
    return False


def patterns(values: Mapping[str, T], others: Iterable[str]) -> dict[str, T]:
    """Shorten a dict by parameter name to a few globs, which still match after wrappers have changed the names.

    A glob, such as "*.fc.weight", matches only names with its value, and none of ``others``.

    >>> patterns(
    ...     {"h.0.fc.weight": "a", "h.1.fc.weight": "a", "h.1.proj.weight": "b"}, ["head.fc.weight"]
    ... )
    {'*h.*.fc.weight': 'a', '*.proj.weight': 'b'}
    """
    all_names = {*values, *others}
    value_of_glob: dict[str, T] = {}
    for name, value in values.items():
        if any_glob_matches(value_of_glob, [name]):  # the glob of an earlier name has this value
            continue
        # The glob must match no name without a value, and none with another value.
        excluded = [other_name for other_name in all_names if values.get(other_name) != value]
        value_of_glob[_shortest_glob(name, excluded)] = value
    return value_of_glob


def _shortest_glob(name: str, excluded: Sequence[str]) -> str:
    """Return the most general glob that matches a parameter name and none of the names in ``excluded``.

    >>> _shortest_glob("h.0.fc.weight", ["head.fc.weight"])
    '*h.*.fc.weight'
    """
    for glob in _globs(name):  # the general ones first
        if not any_glob_matches([glob], excluded):
            return glob
    return escape(name)  # the name itself


def _globs(name: str) -> Iterator[str]:
    """Yield globs for a parameter name, general ones first. An ending without numbers is yielded twice.

    They begin with "*", since wrappers of a model add components in front of names.

    >>> list(_globs("h.0.fc.weight"))
    ['*.fc.weight', '*h.*.fc.weight', '*.fc.weight', '*h.0.fc.weight']
    """
    components = [escape(component) for component in name.split(".")]
    starts = _starts_of_endings(components)  # [2, 0]: at "fc" and at "h"
    # ["h", "*", "fc", "weight"], and then with the number 0
    for glob_components in _with_wildcards(components):
        for start in starts:
            ending = ".".join(glob_components[start:])
            # Without a dot after "*", the glob of a whole name also matches it if no wrapper is in front.
            if start == 0:
                yield f"*{ending}"
            else:
                yield f"*.{ending}"


def _starts_of_endings(components: Sequence[str]) -> list[int]:
    """Return at which components an ending of a name may begin, the last one first: at words, not at numbers.

    It may not be the last word, such as "weight", which alone would be too general.

    >>> _starts_of_endings(["h", "0", "fc", "weight"])
    [2, 0]
    """
    starts = [index for index, component in enumerate(components) if not component.isdigit()]
    if not starts:  # a name of numbers
        return [0]
    if len(starts) > 1:
        starts.pop()
    return starts[::-1]


def _with_wildcards(components: Sequence[str]) -> Iterator[list[str]]:
    """Yield copies of a name's components with "*" in place of numbers: first all numbers, then all but one, and so on.

    "*" matches any index, so that the first copy is the most general one. The last one has all numbers as they are.

    >>> list(_with_wildcards(["blocks", "0", "fc"]))
    [['blocks', '*', 'fc'], ['blocks', '0', 'fc']]
    """
    number_positions = [index for index, component in enumerate(components) if component.isdigit()]
    # A literal number remains as it is. There are 0 of them at first, and all in the end.
    for literal_count in range(len(number_positions) + 1):
        for literal_positions in combinations(number_positions, literal_count):
            replaced = list(components)
            for index in number_positions:
                if index not in literal_positions:
                    replaced[index] = "*"
            yield replaced
