"""Continue a run whose model, labels or chain have changed since the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.checkpoint.errors import MismatchError
from muonfx.checkpoint.folder import inspect
from muonfx.checkpoint.leaves import (
    GROUPS,
    PARAMS,
    SavedOptimizer,
    in_section,
    is_optimizer,
    is_sharded,
    named_tensors,
    path_of,
    plain_names,
)
from muonfx.checkpoint.load import load
from muonfx.core import Transform
from muonfx.internal.display import Report, Shown, Table
from muonfx.sharding.transform import Sharded, from_global, is_global, to_global
from muonfx.tree import PyTree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each leaf of a state, by name."""


@dataclass(frozen=True)
class Continuation(Shown):
    """The state of a changed run, and where each leaf of it comes from. It prints as a table.

    Attributes:
        state: the state for the changed run; of an optimizer, its `transform_state`.
        kept: names of the leaves that have the same name in the checkpoint.
        moved: a dict from the name of a leaf to its other name in the checkpoint.
        grown: a dict from the name of a leaf that is larger now to its name in the checkpoint: the saved values are at
            the lowest indices, and the rest is as ``init`` made it.
        new: names of the leaves that are not in the checkpoint, and are as ``init`` made them.
        dropped: names in the checkpoint of the leaves that are not used.
        groups: a sentence about the param groups of an optimizer; "" for the state of a transform.

    >>> import tempfile
    >>> import muonfx as mfx
    >>> path = mfx.checkpoint.save(tempfile.mkdtemp(), mfx.momentum().init({"w": torch.ones(2)}))
    >>> changed = mfx.chain(mfx.momentum(), mfx.scale(-0.1))
    >>> mfx.checkpoint.load_changed(path, changed.init({"w": torch.ones(2), "b": torch.ones(2)})).new
    ('momentum/trace/b',)
    """

    state: PyTree = field(repr=False)
    kept: tuple[str, ...]
    moved: Mapping[str, str]
    grown: Mapping[str, str]
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    groups: str = ""

    def report(self) -> Report:
        """Return the printed form: the number of leaves that were kept, and a row for each other leaf."""
        rows: list[tuple[str, str]] = []
        for name, source in self.moved.items():
            rows.append((name, f"moved from {source}"))
        for name, source in self.grown.items():
            rows.append((name, f"grown from {source}, the rest as init made it"))
        for name in self.new:
            rows.append((name, "new, as init made it"))
        for name in self.dropped:
            rows.append((name, "dropped"))
        parts: list[str | Table] = [f"{len(self.kept)} leaves kept"]
        if rows:
            parts.append(Table(("leaf", "state"), rows))
        if self.groups:
            parts.append(self.groups)
        return Report(tuple(parts))


def load_changed(
    path: str | os.PathLike[str],
    like: PyTree,
    *,
    tx: Transform | None = None,
    group: ProcessGroup | None = None,
) -> Continuation:
    """Load a checkpoint into a run that has changed since: other labels, parameters, sizes, or another chain.

    Where `load` raises an error for each difference, this function carries over the state of each parameter as far as
    it fits, and returns an account of all leaves. The state of a parameter in a transform, such as "mu" and "nu" of
    "wte.weight", is carried over as a whole: from the same name, or else from the one state of this parameter in the
    checkpoint with equal variables whose name has the longest equal end. A parameter may have more rows than in the
    checkpoint, as after a vocabulary has grown: its first rows are carried over. A step count comes from the transforms
    that the parameters come from, and starts again if all of them are new. All other leaves stay as in ``like``.
    Parameters must have the same names.

    Args:
        path: the folder of the checkpoint.
        like: a new state of the changed chain for the changed parameters, ``tx.init(params)``; or a new
            `muonfx.Muon` or `muonfx.TransformOptimizer`, which then continues with the loaded state.
        tx: the transform of a sharded state, as in `load`. Not given for an optimizer.
        group: a process group, as in `load`.

    Returns:
        The state and the account, which prints as a table.

    Raises:
        NotFoundError, CorruptError, FormatError: as in `load`.
        MismatchError: a leaf has a narrower dtype than in the checkpoint, or the step counts of the transforms that a
            transform comes from differ. Nothing was loaded.

    Example:
        >>> import tempfile
        >>> import muonfx as mfx
        >>> params = {"wte": torch.ones(4, 4), "up": torch.ones(4, 4), "out": torch.ones(4, 4)}
        >>> transforms = {"muon": mfx.momentum(), "adamw": mfx.scale_by_adam()}
        >>> before = mfx.partition(transforms, {"wte": "adamw", "up": "muon", "out": "muon"})
        >>> path = mfx.checkpoint.save(tempfile.mkdtemp(), before.init(params))
        >>> after = mfx.partition(transforms, {"wte": "adamw", "up": "muon", "out": "adamw"})
        >>> print(mfx.checkpoint.load_changed(path, after.init(params)))
        4 leaves kept
        <BLANKLINE>
        leaf            state
        adamw/mu/out    new, as init made it
        adamw/nu/out    new, as init made it
        muon/trace/out  dropped
    """
    if is_optimizer(like):
        continuation = load_changed(path, like.transform_state, tx=like.transform, group=group)
        return _continue_optimizer(like, continuation, inspect(path).objects.get(GROUPS))
    local_tx: Sharded | None = None  # the sharded transform whose local state on this rank is ``like``
    if isinstance(tx, Sharded):
        group = group or tx.layout.group
        if not is_global(like):
            local_tx = tx
    global_like = like if local_tx is None else to_global(local_tx, like)
    continuation = _load_state(path, global_like, group)
    if local_tx is None:
        return continuation
    return replace(continuation, state=from_global(local_tx, continuation.state))


def _continue_optimizer(
    optimizer: SavedOptimizer, continuation: Continuation, saved_groups: list[dict[str, Any]] | None
) -> Continuation:
    """Copy a state into an optimizer, and the saved groups if it has the same groups."""
    groups = "param_groups: none in the checkpoint; those of this optimizer stay"
    if saved_groups is not None:
        try:
            optimizer.load_transform_state(continuation.state, saved_groups)
        except ValueError as error:
            groups = f"param_groups: those of this optimizer stay, because the saved ones do not fit: {error}"
        else:
            return replace(continuation, state=optimizer.transform_state, groups="param_groups: loaded")
    optimizer.load_transform_state(continuation.state)
    return replace(continuation, state=optimizer.transform_state, groups=groups)


def _load_state(path: str | os.PathLike[str], like: PyTree, group: ProcessGroup | None) -> Continuation:
    """Return the continuation of a state whose leaves are whole tensors or shards that `load` accepts."""
    named = named_tensors(like)
    expected = {name: leaf for name, leaf in named if leaf is not None}
    shapes = {name: tuple(leaf.shape) for name, leaf in expected.items()}
    stored = _stored_shapes(inspect(path).leaves)
    sources = _sources(shapes, stored)
    loaded = _load_sources(path, sources, expected, stored, group)
    _require_equal_counts(path, sources, loaded)
    source_of = {name: candidates[0] for name, candidates in sources.items()}

    leaves: list[Any] = []
    for name, leaf in named:
        if name in source_of:
            leaves.append(_value(leaf, loaded[source_of[name]]))
        elif isinstance(leaf, Tensor):
            leaves.append(leaf.clone())
        else:
            leaves.append(leaf)
    state = tree.unflatten(tree.flatten(like)[1], leaves)
    return _account(state, shapes, stored, source_of)


def _account(state: PyTree, shapes: Shapes, stored: Shapes, source_of: Mapping[str, str]) -> Continuation:
    """Return a state with the account of its leaves; ``source_of`` maps a leaf to its name in the checkpoint."""
    kept: list[str] = []
    new: list[str] = []
    moved: dict[str, str] = {}
    grown: dict[str, str] = {}
    for name, shape in shapes.items():
        source = source_of.get(name)
        if source is None:
            new.append(name)
        elif stored[source] != shape:
            grown[name] = source
        elif source != name:
            moved[name] = source
        else:
            kept.append(name)
    dropped = sorted(stored.keys() - source_of.values())
    return Continuation(state, tuple(kept), moved, grown, tuple(new), tuple(dropped))


def _stored_shapes(leaves: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each leaf of the state in a checkpoint, by its name without prefixes of wrappers."""
    plain_name_of = plain_names(leaves)
    return {plain_name_of[name]: leaf.spec.shape for name, leaf in leaves.items() if not in_section(name, PARAMS)}


# ---------------------------------------------------------------------------------------------------------- the sources


class Unit(NamedTuple):
    """The state of one parameter in one transform, such as ("adamw/scale_by_adam", "wte.weight")."""

    prefix: str
    """The levels of the names above the variable."""
    parameter: str


def _sources(expected: Shapes, stored: Shapes) -> dict[str, list[str]]:
    """Return a dict from the name of each leaf that is carried over to its possible names in the checkpoint.

    Several names are those of step counts, which must be equal.
    """
    units = _units(expected)
    stored_units = _units(stored)
    unit_sources: dict[Unit, Unit] = {}
    for unit in units:
        if unit in stored_units and _fits(unit, unit, units, stored_units):
            unit_sources[unit] = unit
    unused = [unit for unit in stored_units if unit not in unit_sources]
    for unit in units:
        if unit not in unit_sources:
            fitting = [source for source in unused if _fits(unit, source, units, stored_units)]
            source = _closest(unit.prefix, {source.prefix: source for source in fitting})
            if source is not None:
                unit_sources[unit] = source
    sources: dict[str, list[str]] = {}
    for unit, source in unit_sources.items():
        for variable in units[unit]:
            sources[_leaf_name(unit, variable)] = [_leaf_name(source, variable)]
    for name in expected:
        if name in sources or expected[name]:
            continue
        candidates = _sources_of_scalar(name, units, unit_sources, stored)
        if candidates:
            sources[name] = candidates
    return sources


def _units(shapes: Shapes) -> dict[Unit, dict[str, tuple[int, ...]]]:
    """Return the shape of each variable of each unit; 0-d leaves belong to no parameter.

    >>> _units({"adam/count": (), "adam/mu/w": (2, 3), "adam/nu/w": (2, 3)})
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
    """Return the name of a leaf: the inverse of `_units`."""
    return "/".join(level for level in (unit.prefix, variable, unit.parameter) if level)


def _fits(unit: Unit, source: Unit, units: Mapping[Unit, Shapes], stored_units: Mapping[Unit, Shapes]) -> bool:
    """Return whether a unit can come from a unit of the checkpoint: equal variables, and at most fewer rows."""
    shapes = units[unit]
    stored_shapes = stored_units[source]
    if unit.parameter != source.parameter or shapes.keys() != stored_shapes.keys():
        return False
    for variable, shape in shapes.items():
        stored_shape = stored_shapes[variable]
        if stored_shape[1:] != shape[1:] or stored_shape[0] > shape[0]:
            return False
    return True


def _closest(prefix: str, by_prefix: Mapping[str, Any]) -> Any:
    """Return the value whose key has the longest end in levels in common with a prefix; None if two have, or none is.

    >>> _closest("partition/adamw/adam", {"adamw/adam": 1, "other/adam": 2})
    1
    """
    lengths = {key: _equal_levels(prefix, key) for key in by_prefix}
    longest = max(lengths.values(), default=0)
    closest = [key for key, length in lengths.items() if length == longest]
    if len(closest) != 1:
        return None
    return by_prefix[closest[0]]


def _equal_levels(first: str, second: str) -> int:
    """Return the number of last levels that two names have in common.

    >>> _equal_levels("partition/adamw/adam", "adamw/adam")
    2
    """
    equal = 0
    for one, other in zip(reversed(first.split("/")), reversed(second.split("/")), strict=False):
        if one != other:
            break
        equal += 1
    return equal


def _sources_of_scalar(
    name: str, units: Collection[Unit], unit_sources: Mapping[Unit, Unit], stored: Shapes
) -> list[str]:
    """Return the names in the checkpoint from which a 0-d leaf, such as a step count, may come.

    These are the leaves of its name in the transforms from which the units of its transform come. A transform without
    units, such as a schedule, has the leaf with the same name, or else the closest one.
    """
    transform, _, variable = name.rpartition("/")
    candidates: list[str] = []
    for unit, source in unit_sources.items():
        source_transform = _source_transform(transform, unit.prefix, source.prefix)
        if source_transform is not None:
            candidates.append(f"{source_transform}/{variable}".removeprefix("/"))
    candidates = [candidate for candidate in dict.fromkeys(candidates) if stored.get(candidate) == ()]
    if candidates:
        return candidates
    if any(unit.prefix == transform for unit in units):
        return []  # all its parameters are new, and so are their steps
    if stored.get(name) == ():
        return [name]
    return _closest_scalar(transform, variable, stored)


def _closest_scalar(transform: str, variable: str, stored: Shapes) -> list[str]:
    """Return the name of the 0-d leaf of a variable whose transform has the closest name, if there is one."""
    names: dict[str, str] = {}  # by the name of the transform
    for name, shape in stored.items():
        other_transform, _, other_variable = name.rpartition("/")
        is_similar = other_variable == variable and _equal_levels(transform, other_transform) > 0
        if shape == () and is_similar:
            names[other_transform] = name
    closest = _closest(transform, names)
    return [] if closest is None else [closest]


def _source_transform(transform: str, prefix: str, source_prefix: str) -> str | None:
    """Return the transform of the checkpoint that corresponds to ``transform``, if a unit below it has moved.

    Return None if the unit is not below the transform, or if the levels between them have changed.

    >>> _source_transform("chain", "chain/adamw/adam", "adamw/adam")
    ''
    >>> _source_transform("chain", "muon/momentum", "muon/momentum") is None
    True
    """
    if not f"{prefix}/".startswith(f"{transform}/".removeprefix("/")):
        return None
    levels_between = prefix.removeprefix(transform)
    if not source_prefix.endswith(levels_between.removeprefix("/")):
        return None
    return source_prefix.removesuffix(levels_between.removeprefix("/")).removesuffix("/")


# ----------------------------------------------------------------------------------------------------------- the values


def _load_sources(
    path: str | os.PathLike[str],
    sources: Mapping[str, list[str]],
    expected: Mapping[str, Any],
    stored: Shapes,
    group: ProcessGroup | None,
) -> dict[str, Any]:
    """Load the leaves that are carried over; return them by their names in the checkpoint."""
    templates: dict[str, Any] = {}
    for name, candidates in sources.items():
        for source in candidates:
            template = expected[name]
            if stored[source] != tuple(template.shape):
                if is_sharded(template):
                    raise _growing_shards(path, name, stored[source], tuple(template.shape))
                template = torch.empty(stored[source], dtype=template.dtype, device=template.device)
            templates[source] = template
    nested: dict[Any, Any] = {}
    for source, template in templates.items():
        *levels, last = path_of(source)
        branch = nested
        for level in levels:
            branch = branch.setdefault(level, {})
        branch[last] = template
    return dict(named_tensors(load(path, nested, allow_extra=True, group=group)))


def _value(leaf: Tensor, loaded: Any) -> Any:
    """Return the new value of a leaf: the loaded one, or, if that has fewer rows, the leaf with these rows replaced."""
    if tuple(loaded.shape) != tuple(leaf.shape):
        value = leaf.clone()
        value[: len(loaded)] = loaded
        return value
    if not loaded.shape:
        return loaded.clone()  # one step count may be that of several transforms
    return loaded


def _require_equal_counts(path: object, sources: Mapping[str, list[str]], loaded: Mapping[str, Any]) -> None:
    """Raise if parameters with different step counts now have one transform, and so one count."""
    for name, candidates in sources.items():
        values = {source: loaded[source].item() for source in candidates if len(candidates) > 1}
        if len(set(values.values())) > 1:
            problem = f"{name!r} would be the step count of parameters with the counts {values}"
            raise MismatchError(
                f"{path}: {problem}, nothing was loaded; give these parameters a label of their own", [problem]
            )


def _growing_shards(path: object, name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> MismatchError:
    """Return the error for a leaf that has more rows now, and of which each rank holds a shard."""
    problem = f"{name!r} has shape {stored} in the checkpoint, expected {expected}"
    return MismatchError(
        f"{path}: {problem}, and shards cannot grow, nothing was loaded; load it in one process, save it again, and "
        "load that on all ranks",
        [problem],
    )
