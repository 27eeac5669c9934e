"""Find where the leaves of a changed state come from: the names in a checkpoint of states that moved in the tree.

The name of a leaf has the levels of the transform, the variable and the parameter, as in
"adamw/scale_by_adam/mu/wte.weight". The *source* of a leaf is the leaf of the checkpoint whose values it gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each leaf of a state by name, or of each variable of a `ParamState` ("mu", "nu")."""


class ParamState(NamedTuple):
    """The state of one parameter in one transform, such as ("adamw/scale_by_adam", "wte.weight").

    Its leaves are one or more variables, such as "adamw/scale_by_adam/mu/wte.weight" and the same with "nu".
    """

    transform: str
    """The levels of the names above the variable."""
    parameter: str


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

    >>> find_sources({"new/adam/mu/w": (2, 3), "new/adam/count": ()}, {"adam/mu/w": (2, 3), "adam/count": ()}).source_of
    {'new/adam/mu/w': 'adam/mu/w', 'new/adam/count': 'adam/count'}
    """
    variables_of = param_states_of(expected)
    stored_state_of = _stored_states(variables_of, param_states_of(stored))
    source_of: dict[str, str] = {}
    # The leaves of parameters: all variables of a parameter in a transform, such as "mu" and "nu", go together.
    for param_state, stored_state in stored_state_of.items():
        for variable in variables_of[param_state]:
            source_of[_leaf_name(param_state, variable)] = _leaf_name(stored_state, variable)
    # The 0-d leaves, such as step counts, belong to all parameters of a transform, and so may have several sources.
    equal_counts: dict[str, list[str]] = {}
    for name in _scalars(expected):
        counts = _sources_of_scalar(name, variables_of, stored_state_of, stored)
        if counts:
            source_of[name] = counts[0]
        if len(counts) > 1:  # the first is right only if all have one value, which the caller checks
            equal_counts[name] = counts
    return Sources(source_of, equal_counts)


def _scalars(shapes: Shapes) -> list[str]:
    """Return the names of the 0-d leaves, such as the step counts of transforms."""
    return [name for name, shape in shapes.items() if shape == ()]


def param_states_of(shapes: Shapes) -> dict[ParamState, dict[str, tuple[int, ...]]]:
    """Group the leaves of a state by transform and parameter: return the shape of each variable of each group.

    0-d leaves are left out: a step count belongs to a transform, but to no parameter.

    >>> param_states_of({"adam/count": (), "adam/mu/w": (2, 3), "adam/nu/w": (2, 3)})
    {ParamState(transform='adam', parameter='w'): {'mu': (2, 3), 'nu': (2, 3)}}
    """
    param_states: dict[ParamState, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if not shape:  # 0-d, such as a step count
            continue
        # "adam/mu/w" -> transform "adam", variable "mu", parameter "w"
        upper_levels, _, parameter = name.rpartition("/")
        transform, _, variable = upper_levels.rpartition("/")
        param_states.setdefault(ParamState(transform, parameter), {})[variable] = shape
    return param_states


def _leaf_name(param_state: ParamState, variable: str) -> str:
    """Return the name of a leaf, such as "adam/mu/w" for ("adam", "w") and "mu"; the inverse of `param_states_of`."""
    levels = [param_state.transform, variable, param_state.parameter]
    return "/".join(level for level in levels if level)  # the name of the outermost transform is ""


def _stored_states(
    param_states: Mapping[ParamState, Shapes], stored_states: Mapping[ParamState, Shapes]
) -> dict[ParamState, ParamState]:
    """Find the state in the checkpoint from which each state of a parameter comes; omit those that are new.

    Both arguments have the shape of each variable of a state, such as "mu" and "nu" of Adam. In the example, the
    momentum of "w" was in the transform "muon" and is in "new/muon". If two states could come from one, both are new.

    >>> momentum = {"trace": (2, 3)}
    >>> _stored_states({ParamState("new/muon", "w"): momentum}, {ParamState("muon", "w"): momentum})
    {ParamState(transform='new/muon', parameter='w'): ParamState(transform='muon', parameter='w')}
    """
    # 1. States that have not moved come from the same name.
    stored_state_of: dict[ParamState, ParamState] = {}
    for param_state, shapes in param_states.items():
        if param_state in stored_states and _can_come_from(shapes, stored_states[param_state]):
            stored_state_of[param_state] = param_state
    # 2. Others may have moved: each comes from the closest of the states of the checkpoint that are not used yet.
    other_states = {state: shapes for state, shapes in param_states.items() if state not in stored_state_of}
    unused_states = {state: shapes for state, shapes in stored_states.items() if state not in stored_state_of}
    closest_state_of = _closest_states(other_states, unused_states)
    uses = Counter(closest_state_of.values())
    for param_state, stored_state in closest_state_of.items():
        if uses[stored_state] == 1:  # otherwise nothing shows which of them has moved
            stored_state_of[param_state] = stored_state
    return stored_state_of


def _closest_states(
    param_states: Mapping[ParamState, Shapes], stored_states: Mapping[ParamState, Shapes]
) -> dict[ParamState, ParamState]:
    """Find for each state of a parameter the state of this parameter in the transform with the closest name.

    A name is close if its last levels are equal: "muon" to "new/muon". States that have none, or several, are omitted.
    Two states may have the same one. Both arguments have the shape of each variable of a state.

    >>> momentum = {"trace": (2, 3)}
    >>> _closest_states({ParamState("new/muon", "w"): momentum}, {ParamState("muon", "w"): momentum})
    {ParamState(transform='new/muon', parameter='w'): ParamState(transform='muon', parameter='w')}
    """
    # By parameter, so that each of thousands of parameters is compared only with its own states.
    states_of_param: dict[str, dict[str, Shapes]] = {}  # {"w": {"muon": {"trace": (2, 3)}}}
    for (stored_transform, parameter), stored_shapes in stored_states.items():
        states_of_param.setdefault(parameter, {})[stored_transform] = stored_shapes
    closest_state_of: dict[ParamState, ParamState] = {}
    for param_state, shapes in param_states.items():
        transform, parameter = param_state
        similar_transforms: list[str] = []  # in which this parameter has such a state in the checkpoint
        for stored_transform, stored_shapes in states_of_param.get(parameter, {}).items():
            if _can_come_from(shapes, stored_shapes):
                similar_transforms.append(stored_transform)
        closest_transform = _closest(transform, similar_transforms)
        if closest_transform is not None:
            closest_state_of[param_state] = ParamState(closest_transform, parameter)
    return closest_state_of


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
    # From the last level to the first; the longer name has more levels than are compared.
    for level, other_level in zip(reversed(first.split("/")), reversed(second.split("/")), strict=False):
        if level != other_level:
            break
        equal += 1
    return equal


def _sources_of_scalar(
    name: str,
    param_states: Collection[ParamState],
    stored_state_of: Mapping[ParamState, ParamState],
    stored: Shapes,
) -> list[str]:
    """Return the names in the checkpoint from which a 0-d leaf, such as the step count of a transform, may come.

    Args:
        name: the leaf, such as "new/adam/count".
        param_states: the states of all parameters in all transforms.
        stored_state_of: those that are carried over, with the state in the checkpoint that each comes from.
        stored: the shapes of the leaves in the checkpoint.

    >>> moved = {ParamState("new/adam", "w"): ParamState("adam", "w")}
    >>> _sources_of_scalar("new/adam/count", list(moved), moved, {"adam/count": (), "adam/mu/w": (2, 3)})
    ['adam/count']
    """
    # 1. A step count comes from the transforms from which the parameters of its transform come.
    stored_counts = [count for count in _counts_of_parameters(name, stored_state_of) if stored.get(count) == ()]
    if stored_counts:
        return stored_counts
    # 2. If none of its parameters is carried over, all of them are new, and so are their steps.
    transform, _, _ = name.rpartition("/")
    has_parameters = any(param_state.transform == transform for param_state in param_states)
    if has_parameters:
        return []
    # 3. A transform without parameters, such as a schedule, keeps its name or has moved.
    if stored.get(name) == ():
        return [name]
    return _closest_scalar(name, stored)


def _counts_of_parameters(name: str, stored_state_of: Mapping[ParamState, ParamState]) -> list[str]:
    """Return the names that a step count has in the checkpoint, one for each place from which its parameters come.

    ``stored_state_of`` has the old transform of each parameter: "w" was in "old/adam" and is in "new/adam". The count
    "new/count" of the transform around it was therefore "old/count".

    >>> _counts_of_parameters("new/count", {ParamState("new/adam", "w"): ParamState("old/adam", "w")})
    ['old/count']
    """
    transform, _, variable = name.rpartition("/")
    counts: dict[str, None] = {}  # each once, in order
    for param_state, stored_state in stored_state_of.items():
        stored_transform = _stored_transform(transform, param_state.transform, stored_state.transform)
        if stored_transform is not None:
            count = f"{stored_transform}/{variable}".removeprefix("/")  # "" is the outermost transform
            counts[count] = None
    return list(counts)


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
    levels = _levels_of(transform)
    inner_levels = _levels_of(inner)
    stored_levels = _levels_of(stored_inner)
    if inner_levels[: len(levels)] != levels:  # `inner` is inside another transform
        return None
    levels_below = inner_levels[len(levels) :]  # ["adamw", "adam"] below "chain"
    count = len(stored_levels) - len(levels_below)  # of the levels above them in the checkpoint, such as ["old"]
    if count < 0 or stored_levels[count:] != levels_below:
        return None
    return "/".join(stored_levels[:count])


def _levels_of(name: str) -> list[str]:
    """Return the levels of a name, ["adamw", "adam"] for "adamw/adam"; none for "", the outermost transform."""
    if name == "":
        return []
    return name.split("/")
