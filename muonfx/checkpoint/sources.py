"""Find where the leaves of a changed state come from: the names in a checkpoint of states that moved in the tree.

The name of a leaf has the levels of the transform, the variable and the parameter, as in
"adamw/scale_by_adam/mu/wte.weight". The *source* of a leaf is the leaf of the checkpoint whose values it gets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each leaf of a state by name, or of each variable of one parameter in a transform ("mu", "nu")."""

States = Mapping[str, Shapes]
"""The states of one parameter by transform: ``{"adamw/scale_by_adam": {"mu": (2, 3), "nu": (2, 3)}}``."""


class Sources(NamedTuple):
    """The leaves of a checkpoint from which the leaves of a state come."""

    source_of: dict[str, str]
    """The name in the checkpoint of each leaf that is carried over."""
    equal_counts: dict[str, list[str]]
    """By the name of a step count: all counts of the checkpoint that become this one, which must be equal."""


def find_sources(expected: Shapes, stored: Shapes) -> Sources:
    """Find the leaf of a checkpoint for each leaf of a state whose transforms may have moved in the tree.

    The arguments have the shape of each leaf by name: ``expected`` of the new state, ``stored`` of the checkpoint.

    The state of a parameter in a transform is carried over as a whole: from the same name, or else from the one state
    of this parameter with equal variables ("mu" and "nu") whose name has the most equal last levels. If two states
    could come from one, both have no source. The parameter may have fewer rows in the checkpoint.

    >>> find_sources(
    ...     {"new/adam/mu/w": (2, 3), "new/adam/count": ()}, {"adam/mu/w": (2, 3), "adam/count": ()}
    ... ).source_of
    {'new/adam/mu/w': 'adam/mu/w', 'new/adam/count': 'adam/count'}
    """
    stored_states_of = states_by_parameter(stored)
    source_of: dict[str, str] = {}
    transforms: set[str] = set()  # those with parameters
    # A transform, and the one in the checkpoint from which it has states.
    pairs: dict[tuple[str, str], None] = {}
    # The leaves of parameters: all variables of a parameter in a transform, such as "mu" and "nu", go together.
    for parameter, states in states_by_parameter(expected).items():
        transforms.update(states)
        for transform, stored_transform in _stored_transforms(
            states, stored_states_of.get(parameter, {})
        ).items():
            pairs[transform, stored_transform] = None
            for variable in states[transform]:
                name = _leaf_name(transform, variable, parameter)
                source_of[name] = _leaf_name(stored_transform, variable, parameter)
    # The 0-d leaves, such as step counts, belong to all parameters of a transform, and so may have several sources.
    equal_counts: dict[str, list[str]] = {}
    for name in _scalars(expected):
        counts = _sources_of_scalar(name, transforms, pairs, stored)
        if counts:
            source_of[name] = counts[0]
        # The first is right only if all have one value, which the caller checks.
        if len(counts) > 1:
            equal_counts[name] = counts
    return Sources(source_of, equal_counts)


def _scalars(shapes: Shapes) -> list[str]:
    """Return the names of the 0-d leaves, such as the step counts of transforms."""
    return [name for name, shape in shapes.items() if shape == ()]


def states_by_parameter(shapes: Shapes) -> dict[str, dict[str, dict[str, tuple[int, ...]]]]:
    """Group the leaves of a state by parameter and transform: return the shape of each variable of each group.

    0-d leaves are left out: a step count belongs to a transform, but to no parameter.

    >>> states_by_parameter({"adam/count": (), "adam/mu/w": (2, 3), "adam/nu/w": (2, 3)})
    {'w': {'adam': {'mu': (2, 3), 'nu': (2, 3)}}}
    """
    states_of: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        if not shape:  # 0-d, such as a step count
            continue
        # "adam/mu/w" -> transform "adam", variable "mu", parameter "w"
        upper_levels, _, parameter = name.rpartition("/")
        transform, _, variable = upper_levels.rpartition("/")
        states = states_of.setdefault(parameter, {})
        states.setdefault(transform, {})[variable] = shape
    return states_of


def _leaf_name(transform: str, variable: str, parameter: str) -> str:
    """Return the name of a leaf, such as "adam/mu/w" for "adam", "mu" and "w"; the outermost transform is ""."""
    return "/".join(level for level in (transform, variable, parameter) if level)


def _stored_transforms(states: States, stored_states: States) -> dict[str, str]:
    """Find the transform in the checkpoint from which each state of one parameter comes; omit states that are new.

    Both arguments have the states of the parameter by transform. In the example, its momentum was in the transform
    "muon" and is in "new/muon". If two states could come from one, both are new.

    >>> momentum = {"trace": (2, 3)}
    >>> _stored_transforms({"new/muon": momentum}, {"muon": momentum})
    {'new/muon': 'muon'}
    """
    # 1. A state that has not moved comes from the same name.
    stored_transform_of: dict[str, str] = {}
    for transform, shapes in states.items():
        if transform in stored_states and _can_come_from(shapes, stored_states[transform]):
            stored_transform_of[transform] = transform
    # 2. Any other state may have moved. It then comes from the closest of the states that remain.
    free_states = {
        name: shapes for name, shapes in stored_states.items() if name not in stored_transform_of
    }
    # For each transform in the checkpoint, these are the transforms that may have its state now.
    moved_to: dict[str, list[str]] = {}
    for transform, shapes in states.items():
        if transform in stored_transform_of:
            continue
        candidates = [
            name
            for name, stored_shapes in free_states.items()
            if _can_come_from(shapes, stored_shapes)
        ]
        closest = _closest(transform, candidates)
        if closest is not None:
            moved_to.setdefault(closest, []).append(transform)
    for stored_transform, transforms in moved_to.items():
        if len(transforms) == 1:  # otherwise nothing shows which of them has moved
            stored_transform_of[transforms[0]] = stored_transform
    return stored_transform_of


def _can_come_from(shapes: Shapes, stored_shapes: Shapes) -> bool:
    """Return whether a parameter's state fits one of the checkpoint: equal variables, which have at most fewer rows.

    For example, ``{"mu": (50, 8)}`` can come from ``{"mu": (40, 8)}``, as after a vocabulary has grown. It cannot come
    from ``{"trace": (50, 8)}`` or ``{"mu": (50, 4)}``.
    """
    if shapes.keys() != stored_shapes.keys():  # the state of another kind of transform
        return False
    # The rows are dim 0. All other dims must be equal.
    for variable, shape in shapes.items():
        stored_shape = stored_shapes[variable]
        if stored_shape[1:] != shape[1:] or stored_shape[0] > shape[0]:
            return False
    return True


def _closest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that has the most last levels in common with a name; None if two have, or there is none.

    Names are compared by their last levels, because a transform that moves into a chain gets more first levels.

    >>> _closest("partition/adamw/adam", ["adamw/adam", "other/adam"])
    'adamw/adam'
    """
    equal_levels_of = {candidate: equal_levels(name, candidate) for candidate in candidates}
    most = max(equal_levels_of.values(), default=0)
    closest = [candidate for candidate, equal in equal_levels_of.items() if equal == most]
    if len(closest) != 1:  # none, or nothing shows which of them is right
        return None
    return closest[0]


def equal_levels(first: str, second: str) -> int:
    """Return the number of last levels that two names have in common.

    >>> equal_levels("partition/adamw/adam", "adamw/adam")
    2
    """
    equal = 0
    # Levels are compared from the last to the first. Those that only the longer name has are not compared.
    for level, other_level in zip(
        reversed(first.split("/")), reversed(second.split("/")), strict=False
    ):
        if level != other_level:
            break
        equal += 1
    return equal


def _sources_of_scalar(
    name: str, transforms: Collection[str], pairs: Iterable[tuple[str, str]], stored: Shapes
) -> list[str]:
    """Return the names in the checkpoint from which a 0-d leaf, such as the step count of a transform, may come.

    Args:
        name: the leaf, such as "new/adam/count".
        transforms: the transforms that have states of parameters.
        pairs: a transform of the new state, and the transform in the checkpoint from which it gets states.
        stored: the shapes of the leaves in the checkpoint.

    >>> _sources_of_scalar(
    ...     "new/adam/count", ["new/adam"], [("new/adam", "adam")], {"adam/count": ()}
    ... )
    ['adam/count']
    """
    # 1. A step count comes from the transforms from which the parameters of its transform come.
    stored_counts = [
        count for count in _counts_of_parameters(name, pairs) if stored.get(count) == ()
    ]
    if stored_counts:
        return stored_counts
    # 2. If none of its parameters is carried over, all of them are new, and so are their steps.
    transform, _, _ = name.rpartition("/")
    if transform in transforms:
        return []
    # 3. A transform without parameters, such as a schedule, keeps its name or has moved.
    if stored.get(name) == ():
        return [name]
    return _closest_scalar(name, stored)


def _counts_of_parameters(name: str, pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names that a step count has in the checkpoint, one for each place from which its parameters come.

    ``pairs`` has the transform of each parameter and its transform in the checkpoint: "new/adam" was "old/adam". The
    count "new/count" of the transform around it was therefore "old/count". If a transform kept its name, its count is
    the first, so that the account of `load_changed` lists the count as kept, not as moved.

    >>> _counts_of_parameters("new/count", [("new/adam", "old/adam")])
    ['old/count']
    """
    transform, _, variable = name.rpartition("/")
    counts: dict[str, None] = {}  # each once, in order
    for inner, stored_inner in sorted(pairs, key=_has_moved):
        stored_transform = _stored_transform(transform, inner, stored_inner)
        if stored_transform is not None:
            # "" is the outermost transform
            count = f"{stored_transform}/{variable}".removeprefix("/")
            counts[count] = None
    return list(counts)


def _has_moved(pair: tuple[str, str]) -> bool:
    """Return whether a transform has another name in the checkpoint."""
    transform, stored_transform = pair
    return transform != stored_transform


def _closest_scalar(name: str, stored: Shapes) -> list[str]:
    """Return the 0-d leaf of a checkpoint with the same variable whose transform has the closest name, if there is one.

    Such a leaf is the step count of a schedule that has moved. The variable is the last level of its name.

    >>> _closest_scalar("new/schedule/count", {"schedule/count": (), "adam/count": ()})
    ['schedule/count']
    """
    transform, _, variable = name.rpartition("/")
    similar_transforms: list[str] = []
    for stored_name in _scalars(stored):
        stored_transform, _, stored_variable = stored_name.rpartition("/")
        if stored_variable == variable and equal_levels(transform, stored_transform) > 0:
            similar_transforms.append(stored_transform)
    closest = _closest(transform, similar_transforms)
    if closest is None:
        return []
    return [f"{closest}/{variable}"]


def _stored_transform(transform: str, inner: str, stored_inner: str) -> str | None:
    """Return the name that a transform has in the checkpoint, from the names of a transform inside it.

    The inner transform is called ``inner`` now, and ``stored_inner`` in the checkpoint. If "chain/adamw/adam" was
    "old/adamw/adam", then "chain" was "old". Return None if ``inner`` is not inside the transform, or if the levels
    below the transform have changed.

    >>> _stored_transform("chain", "chain/adamw/adam", "old/adamw/adam")
    'old'
    >>> _stored_transform("chain", "chain/adamw/adam", "adamw/adam")
    ''
    >>> _stored_transform("chain", "muon/momentum", "muon/momentum") is None
    True
    >>> _stored_transform("chain", "chain/adamw/adam", "xadamw/adam") is None
    True
    """
    # With a "/" before each level, the levels below a transform are the end of a text: "/adamw/adam" below "/chain".
    path = f"/{transform}".rstrip("/")  # "" for the outermost transform
    inner_path = f"/{inner}".rstrip("/")
    stored_path = f"/{stored_inner}".rstrip("/")
    if not f"{inner_path}/".startswith(f"{path}/"):  # `inner` is inside another transform
        return None
    levels_below = inner_path.removeprefix(path)
    if not stored_path.endswith(levels_below):
        return None
    return stored_path.removesuffix(levels_below).removeprefix("/")
