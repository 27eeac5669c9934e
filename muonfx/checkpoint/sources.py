"""Find where the leaves of a changed state come from: the names in a checkpoint of states that moved in the tree.

The name of a leaf has the levels of the transform, the variable and the parameter, as in
"adamw/scale_by_adam/mu/wte.weight".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each leaf of a state by name, or of each variable of a `Unit`."""


class Unit(NamedTuple):
    """The state of one parameter in one transform, such as ("adamw/scale_by_adam", "wte.weight")."""

    prefix: str
    """The levels of the names above the variable."""
    parameter: str


class Sources(NamedTuple):
    """The leaves of a checkpoint from which the leaves of a state come."""

    source_of: dict[str, str]
    """The name in the checkpoint of each leaf that is carried over."""
    equal_counts: dict[str, list[str]]
    """By the name of a step count: all counts of the checkpoint that become this one, which must be equal."""


def sources(expected: Shapes, stored: Shapes) -> Sources:
    """Return the sources of the leaves of a state with the shapes ``expected`` in a checkpoint with ``stored``.

    The state of a parameter in a transform is carried over as a whole: from the same name, or else from the one state
    of this parameter with equal variables whose name has the most equal last levels. If two states could come from one,
    both have no source. The parameter may have fewer rows in the checkpoint.
    """
    units = units_of(expected)
    unit_sources = _unit_sources(units, units_of(stored))
    source_of: dict[str, str] = {}
    equal_counts: dict[str, list[str]] = {}
    for unit, source in unit_sources.items():
        for variable in units[unit]:
            source_of[_leaf_name(unit, variable)] = _leaf_name(source, variable)
    for name, shape in expected.items():
        if shape:
            continue
        candidates = _sources_of_scalar(name, units, unit_sources, stored)
        if candidates:
            source_of[name] = candidates[0]
        if len(candidates) > 1:
            equal_counts[name] = candidates
    return Sources(source_of, equal_counts)


def units_of(shapes: Shapes) -> dict[Unit, dict[str, tuple[int, ...]]]:
    """Return the shape of each variable of each unit; 0-d leaves belong to no parameter.

    >>> units_of({"adam/count": (), "adam/mu/w": (2, 3), "adam/nu/w": (2, 3)})
    {Unit(prefix='adam', parameter='w'): {'mu': (2, 3), 'nu': (2, 3)}}
    """
    units: dict[Unit, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if shape:
            levels, _, parameter = name.rpartition("/")
            prefix, _, variable = levels.rpartition("/")
            units.setdefault(Unit(prefix, parameter), {})[variable] = shape
    return units


def _leaf_name(unit: Unit, variable: str) -> str:
    """Return the name of a leaf: the inverse of `units_of`."""
    return "/".join(level for level in (unit.prefix, variable, unit.parameter) if level)


def _unit_sources(units: Mapping[Unit, Shapes], stored_units: Mapping[Unit, Shapes]) -> dict[Unit, Unit]:
    """Return a dict from each unit that is carried over to its unit in the checkpoint.

    This is the unit with the same name, or else the closest one that no other unit is carried over from. If two units
    could come from one, both are new.
    """
    source_of: dict[Unit, Unit] = {}
    for unit, shapes in units.items():
        if unit in stored_units and _fits(shapes, stored_units[unit]):
            source_of[unit] = unit
    unused_prefixes: dict[str, list[str]] = {}  # by parameter
    for prefix, parameter in stored_units.keys() - source_of.keys():
        unused_prefixes.setdefault(parameter, []).append(prefix)
    moved: dict[Unit, Unit] = {}
    for unit in units:
        if unit in source_of:
            continue
        candidates = [Unit(prefix, unit.parameter) for prefix in unused_prefixes.get(unit.parameter, ())]
        prefixes = [source.prefix for source in candidates if _fits(units[unit], stored_units[source])]
        prefix = _closest(unit.prefix, prefixes)
        if prefix is not None:
            moved[unit] = Unit(prefix, unit.parameter)
    uses = Counter(moved.values())
    for unit, source in moved.items():
        if uses[source] == 1:
            source_of[unit] = source
    return source_of


def _fits(shapes: Shapes, stored_shapes: Shapes) -> bool:
    """Return whether a unit can come from one of the checkpoint: equal variables, which have at most fewer rows."""
    if shapes.keys() != stored_shapes.keys():
        return False
    for variable, shape in shapes.items():
        stored_shape = stored_shapes[variable]
        if stored_shape[1:] != shape[1:] or stored_shape[0] > shape[0]:
            return False
    return True


def _closest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that has the most last levels in common with a name; None if two have, or there is none.

    >>> _closest("partition/adamw/adam", ["adamw/adam", "other/adam"])
    'adamw/adam'
    """
    equal_levels_of = {candidate: equal_levels(name, candidate) for candidate in candidates}
    most = max(equal_levels_of.values(), default=0)
    closest = [candidate for candidate, equal in equal_levels_of.items() if equal == most]
    if len(closest) != 1:
        return None
    return closest[0]


def equal_levels(first: str, second: str) -> int:
    """Return the number of last levels that two names have in common.

    >>> equal_levels("partition/adamw/adam", "adamw/adam")
    2
    """
    equal = 0
    for level, other_level in zip(reversed(first.split("/")), reversed(second.split("/")), strict=False):
        if level != other_level:
            break
        equal += 1
    return equal


def _sources_of_scalar(
    name: str, units: Collection[Unit], unit_sources: Mapping[Unit, Unit], stored: Shapes
) -> list[str]:
    """Return the names in the checkpoint from which a 0-d leaf, such as a step count, may come.

    For example, "new/adam/count" comes from "old/adam/count" if ``unit_sources`` is
    ``{Unit("new/adam", "w"): Unit("old/adam", "w")}``.

    These are the leaves of its name in the transforms from which the units of its transform come. A transform without
    units, such as a schedule, has the leaf with the same name, or else the closest one.
    """
    transform, _, variable = name.rpartition("/")
    candidates: dict[str, None] = {}  # each once, in order
    for unit, source in unit_sources.items():
        source_transform = _source_transform(transform, unit.prefix, source.prefix)
        if source_transform is not None:
            candidate = f"{source_transform}/{variable}".removeprefix("/")
            if stored.get(candidate) == ():
                candidates[candidate] = None
    if candidates:
        return list(candidates)
    if any(unit.prefix == transform for unit in units):
        return []  # all its parameters are new, and so are their steps
    if stored.get(name) == ():
        return [name]
    similar_transforms: list[str] = []
    for stored_name, shape in stored.items():
        stored_transform, _, stored_variable = stored_name.rpartition("/")
        is_similar = stored_variable == variable and equal_levels(transform, stored_transform) > 0
        if shape == () and is_similar:
            similar_transforms.append(stored_transform)
    closest = _closest(transform, similar_transforms)
    if closest is None:
        return []
    return [f"{closest}/{variable}"]


def _source_transform(transform: str, prefix: str, source_prefix: str) -> str | None:
    """Return the transform of the checkpoint that corresponds to ``transform``, if a unit below it has moved.

    Return None if the unit is not below the transform, or if the levels between them have changed.

    >>> _source_transform("chain", "chain/adamw/adam", "adamw/adam")
    ''
    >>> _source_transform("chain", "muon/momentum", "muon/momentum") is None
    True
    >>> _source_transform("chain", "chain/adamw/adam", "xadamw/adam") is None
    True
    """
    levels = _levels(transform)
    prefix_levels = _levels(prefix)
    source_levels = _levels(source_prefix)
    if prefix_levels[: len(levels)] != levels:
        return None
    levels_between = prefix_levels[len(levels) :]
    above = len(source_levels) - len(levels_between)  # the number of levels of the transform in the checkpoint
    if above < 0 or source_levels[above:] != levels_between:
        return None
    return "/".join(source_levels[:above])


def _levels(name: str) -> list[str]:
    """Return the levels of a name; the name of the outermost transform, "", has none."""
    return name.split("/") if name else []
