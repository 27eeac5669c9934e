"""Continue a run whose model, labels or chain have changed since the checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from muonfx.checkpoint.errors import MismatchError, first_of_each_kind
from muonfx.checkpoint.index import Index
from muonfx.checkpoint.leaves import (
    GROUPS,
    PARAMS,
    SavedOptimizer,
    StateSpec,
    in_section,
    is_optimizer,
    is_sharded,
    plain_names,
)
from muonfx.checkpoint.load import Target, load_checkpoint, local_transform, require_no_arguments
from muonfx.checkpoint.match import Rules
from muonfx.checkpoint.state_dicts import has_state_dict
from muonfx.core import Transform
from muonfx.core.chain_differences import CHAINS
from muonfx.internal.display import Report, Shown, Table, format_list
from muonfx.internal.wrappers import unwrapped
from muonfx.sharding.transform import Sharded, from_global, to_global
from muonfx.tree import PyTree, Spec
from muonfx.tree.dtypes import widens

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
    checkpoint with equal variables whose name has the most equal last levels; if two states could come from one, both
    are new. A parameter may have more rows than in the checkpoint, as after a vocabulary has grown: its first rows are
    carried over. A step count comes from the transforms that the parameters come from, and starts again if all of them
    are new. All other leaves stay as in ``like``. Parameters must have the same names.

    Args:
        path: the folder of the checkpoint.
        like: a new state of the changed chain for the changed parameters, ``tx.init(params)``; or a new
            `muonfx.Muon` or `muonfx.TransformOptimizer`, which then continues with the loaded state. Its checkpoint may
            also have a state dict, written by ``dcp.save`` with `Writer`, as for `load`. Create a scheduler of torch
            for it after this call, as the end of the account shows.
        tx: the transform of a sharded state, as in `load`. Not given for an optimizer.
        group: a process group, as in `load`.

    Returns:
        The state and the account, which prints as a table.

    Raises:
        TypeError: ``like`` is a `StateSpec`, which has no values; or ``tx`` is given for an optimizer.
        NotFoundError, CorruptError, FormatError: as in `load`.
        MismatchError: no parameter has the same name as in the checkpoint, or no leaf can be carried over; or a leaf
            has a narrower dtype than there, or is a shard of a parameter that has more rows now; or the step counts of
            the transforms that a transform comes from differ. Nothing was loaded.

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
    if isinstance(like, StateSpec):
        raise TypeError("like: found a StateSpec, expected a state with values, which new leaves keep: tx.init(params)")
    if is_optimizer(like):
        require_no_arguments(tx, None)
        state = like.transform_state
        continuation, index = _load_state(path, state, like.transform, group, objects={GROUPS})
        return _continue_optimizer(like, continuation, index)
    continuation, _ = _load_state(path, like, tx, group)
    return continuation


def _load_state(
    path: str | os.PathLike[str],
    like: PyTree,
    tx: Transform | None,
    group: ProcessGroup | None,
    objects: set[str] | None = None,
) -> tuple[Continuation, Index]:
    """Return the continuation of the state of a transform, and the index of the checkpoint.

    ``like`` and the state of the result may be this rank's local state of a sharded ``tx``. ``objects`` is the field of
    the `Target`.
    """
    if isinstance(tx, Sharded) and group is None:
        group = tx.layout.group
    local_tx = local_transform(tx, like)

    def make_target() -> ChangedTarget:
        """Return the tree to fill. `load_checkpoint` calls this, so that an error is raised on all ranks."""
        global_like = like if local_tx is None else to_global(local_tx, like)
        rules = Rules((), (), allow_other_chain=True, cast={}, rename={})
        return ChangedTarget.of(global_like, tx, rules, is_alone=group is None, objects=objects)

    continuation, index = load_checkpoint(path, make_target, group)
    if local_tx is not None:
        continuation = replace(continuation, state=from_global(local_tx, continuation.state))
    return continuation, index


def _continue_optimizer(optimizer: SavedOptimizer, continuation: Continuation, index: Index) -> Continuation:
    """Copy a state into an optimizer, and the saved groups if it has the same groups."""
    reason = "the checkpoint has none"
    saved_groups: list[dict[str, Any]] | None = index.objects.get(GROUPS)
    if saved_groups is not None:
        saved_groups = [dict(saved) for saved in saved_groups]
        for saved in saved_groups:
            saved.pop(CHAINS, None)  # the chain may be another one, so its record is not compared
        current_groups = optimizer.saved_groups()
        renamed_groups, new_numbers = _for_groups_of(current_groups, saved_groups)
        try:
            optimizer.load_transform_state(continuation.state, renamed_groups)
        except ValueError as error:
            reason = _difference_of_groups(current_groups, saved_groups)
            if not reason:
                reason = str(error).removeprefix("nothing was loaded: ")  # the state is loaded below
        else:
            groups = "; ".join(["param_groups: loaded", *new_numbers])
            return replace(continuation, state=optimizer.transform_state, groups=groups)
    optimizer.load_transform_state(continuation.state)
    groups = f"param_groups: this optimizer keeps its own, because {reason}. {_scheduler_text(index.step)}"
    return replace(continuation, state=optimizer.transform_state, groups=groups)


def _difference_of_groups(groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]) -> str:
    """Return how saved groups divide the parameters otherwise than the groups of an optimizer; "" if they do not.

    >>> saved_groups = [{"label": "muon", "param_names": ["up", "out"]}]
    >>> groups = [{"label": "muon", "param_names": ["up"]}, {"label": "adamw", "param_names": ["out"]}]
    >>> _difference_of_groups(groups, saved_groups)
    "'out' moved from group 'muon' to 'adamw'"
    """
    saved_label_of = _labels_of_params(saved_groups)
    moved: dict[tuple[Any, Any], list[str]] = {}  # the parameters by their two labels
    for name, label in _labels_of_params(groups).items():
        if name in saved_label_of and saved_label_of[name] != label:
            moved.setdefault((saved_label_of[name], label), []).append(name)
    if moved:
        texts: list[str] = []
        for (saved_label, label), names in moved.items():
            texts.append(f"{format_list(names)} moved from group {saved_label!r} to {label!r}")
        return "; ".join(texts)
    if _members(groups) != _members(saved_groups):
        return "the saved groups have other parameters"
    return ""


def _labels_of_params(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the label of the group of each parameter, by its name without the prefixes of wrappers."""
    label_of: dict[str, Any] = {}
    for group in groups:
        label_of.update(dict.fromkeys(group["param_names"], group.get("label")))
    return {plain_name: label_of[name] for name, plain_name in unwrapped(label_of).items()}


def _members(groups: list[dict[str, Any]]) -> Counter[frozenset[str]]:
    """Return the sets of the parameters of groups."""
    plain_name_of = unwrapped([name for group in groups for name in group["param_names"]])
    return Counter([frozenset(map(plain_name_of.__getitem__, group["param_names"])) for group in groups])


def _scheduler_text(step: int | None) -> str:
    """Return how to create a scheduler of torch for groups that keep their numbers, at a step of the checkpoint."""
    if step is None:
        at_step = "the step of the checkpoint, which was saved without step="
        last_epoch = "step - 1"
    else:
        at_step = f"step {step}"
        last_epoch = str(step - 1)
    return (
        f"The numbers of its groups come from the code. If it has a scheduler of torch, create it now, at {at_step}:\n"
        '    for group in optimizer.param_groups: group.setdefault("initial_lr", group["lr"])\n'
        f"    scheduler = LambdaLR(optimizer, f, last_epoch={last_epoch})"
    )


def _for_groups_of(
    groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return saved groups with the keys of an optimizer, and a text for each group that has keys which were not saved.

    A saved group belongs to each group that has one of its parameters.
    """
    converted_groups: list[dict[str, Any]] = []
    texts: list[str] = []
    for saved in saved_groups:
        converted = dict(saved)
        saved_names = set(unwrapped(saved.get("param_names", ())).values())
        for group in groups:
            if saved_names.isdisjoint(unwrapped(group["param_names"]).values()):
                continue
            new_keys = _convert_keys(converted, saved, group)
            if new_keys:
                stay = format_list(sorted(new_keys))
                texts.append(f"of group {group.get('label')!r}, {stay} stay as in this optimizer")
        converted_groups.append(converted)
    return converted_groups, texts


def _convert_keys(converted: dict[str, Any], saved: dict[str, Any], group: dict[str, Any]) -> list[str]:
    """Give ``converted``, a copy of the saved group, the keys of a group. Return the keys that were not saved.

    The chain that was saved may be inside another transform now: "momentum.decay" is then "inner.momentum.decay". If
    the group also has "momentum.decay", of another transform, the saved number goes to this equal key. A key that was
    not saved, as of a new transform, has the value of the optimizer.
    """
    new_keys: list[str] = []
    for key in group.keys() - saved.keys() - _KEYS_WITHOUT_NUMBERS:
        old_keys = [old_key for old_key in saved if key.endswith(f".{old_key}") and old_key not in group]
        if old_keys:
            old_key = max(old_keys, key=len)
            converted[key] = saved[old_key]
            converted.pop(old_key, None)
        else:
            converted[key] = group[key]
            new_keys.append(key)
    return new_keys


_KEYS_WITHOUT_NUMBERS = frozenset(["label", "param_names", "schedules"])
"""Keys of a group that are no hyperparameters."""


# ----------------------------------------------------------------------------------------------------------- the target


@dataclass
class ChangedTarget(Target):
    """The tree that `load_changed` fills. It takes what fits from a checkpoint, and `filled` returns the account."""

    source_of: dict[str, str] = field(init=False)
    """The name in the checkpoint of each leaf that is carried over."""
    equal_counts: dict[str, list[str]] = field(init=False)
    """By the name of a step count: all counts of the checkpoint that become this one, which must be equal."""
    stored: dict[str, Spec] = field(init=False)
    """The spec of each leaf in the checkpoint."""
    where: str = field(init=False)
    """The path of the checkpoint, for messages."""
    read: dict[str, Any] = field(init=False)
    """The tensors that are read, by name in the checkpoint; their values are there when `filled` is called."""

    def allocate(self, index: Index, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Allocate the tensors of the tree, after a check that those to read fit.

        Return two dicts: the leaves of the result by name, and the tensors to read by their names in the checkpoint.
        """
        self.where = where
        stored_name_of = _stored_names(index.leaves)
        self.stored = {name: index.leaves[stored_name].spec for name, stored_name in stored_name_of.items()}
        shapes = {name: tuple(leaf.shape) for name, leaf in self.like.items()}
        stored_shapes = {name: spec.shape for name, spec in self.stored.items()}
        _require_common_parameter(shapes, stored_shapes, where)
        self.source_of, self.equal_counts = _sources(shapes, stored_shapes)
        if self.like and not self.source_of:
            raise _nothing_to_keep(shapes, stored_shapes, index, where)
        self._require_fitting()

        self.read = {}
        for name, source in self.source_of.items():
            for stored_name in [source, *self.equal_counts.get(name, ())]:
                if stored_name not in self.read:  # a step count may be read once for several leaves
                    self.read[stored_name] = self._tensor_to_read(self.like[name], self.stored[stored_name].shape)

        leaves: dict[str, Any] = {}
        for name, leaf in self.like.items():
            source = self.source_of.get(name)
            if source is not None and self.read[source].shape == leaf.shape:
                leaves[name] = self.read[source]
            else:  # it is new, or has more rows now, the first of which `filled` replaces
                leaves[name] = self._copy(name, leaf)
        return leaves, {stored_name_of[name]: tensor for name, tensor in self.read.items()}

    def filled(self, leaves: Mapping[str, Any]) -> Continuation:
        """Return the state, into which the values were read, and the account of its leaves."""
        _require_equal_counts(self.equal_counts, self.read, self.where)
        kept: list[str] = []
        new: list[str] = []
        moved: dict[str, str] = {}
        grown: dict[str, str] = {}
        for name, leaf in leaves.items():
            source = self.source_of.get(name)
            if source is None:
                new.append(name)
                continue
            first_rows = self.read[source]
            if first_rows.shape != leaf.shape:
                leaf[: len(first_rows)] = first_rows
                grown[name] = source
            elif source != name:
                moved[name] = source
            else:
                kept.append(name)
        dropped = sorted(self.stored.keys() - self.source_of.values())
        return Continuation(super().filled(leaves), tuple(kept), moved, grown, tuple(new), tuple(dropped))

    def _tensor_to_read(self, leaf: Any, shape: tuple[int, ...]) -> Any:
        """Allocate a tensor or shard for values that have the shape ``shape`` in the checkpoint."""
        if tuple(leaf.shape) == shape:
            return self._empty(leaf)
        return torch.empty(shape, dtype=leaf.dtype, device=leaf.device)

    def _require_fitting(self) -> None:
        """Raise one error with all leaves that do not fit: they have a narrower dtype, or are shards with more rows."""
        problems: list[str] = []
        advice: dict[str, None] = {}  # each sentence once, in order
        for name, source in self.source_of.items():
            leaf = self.like[name]
            shape = tuple(leaf.shape)
            stored_spec = self.stored[source]
            if not widens(stored_spec.dtype, leaf.dtype):
                problems.append(f"narrowing: {name!r} is {stored_spec.dtype} in the checkpoint, expected {leaf.dtype}")
                advice["to keep the values: use a chain with the state dtypes of the checkpoint"] = None
            if is_sharded(leaf) and shape != stored_spec.shape:
                problems.append(
                    f"reshaped:  {name!r} has shape {stored_spec.shape} in the checkpoint, expected {shape}"
                )
                advice["shards cannot grow: load it in one process, save it again, and load that on all ranks"] = None
        if problems:
            differences = "\n  ".join(first_of_each_kind(problems))
            to_do = "\n  ".join(advice)
            text = f"{self.where} does not fit, nothing was loaded:\n  {differences}\nwhat to do:\n  {to_do}"
            raise MismatchError(text, problems)


def _stored_names(leaves: Iterable[str]) -> dict[str, str]:
    """Return a dict from the name of each leaf of the state, without prefixes of wrappers, to its name as stored."""
    plain_name_of = plain_names(leaves)
    return {plain_name_of[name]: name for name in leaves if not in_section(name, PARAMS)}


def _require_common_parameter(expected: Shapes, stored: Shapes, where: str) -> None:
    """Raise if both have parameters and none has the same name, so that the whole state would be lost."""
    parameters = {unit.parameter for unit in _units(expected)}
    stored_parameters = {unit.parameter for unit in _units(stored)}
    if parameters and stored_parameters and not parameters & stored_parameters:
        problem = (
            f"no parameter of the checkpoint is in `like`: it has {format_list(sorted(stored_parameters))}, "
            f"and `like` has {format_list(sorted(parameters))}"
        )
        raise MismatchError(
            f"{where}: {problem}; nothing was loaded. load_changed compares parameters by name: load(..., rename=) "
            "gives them other names",
            [problem],
        )


def _nothing_to_keep(expected: Shapes, stored: Shapes, index: Index, where: str) -> MismatchError:
    """Return an error for a checkpoint of which no leaf fits any leaf of a state."""
    texts = [f"{name!r} {shape}" for name, shape in expected.items()]
    stored_texts = [f"{name!r} {shape}" for name, shape in stored.items()]
    problem = (
        f"no leaf of the checkpoint fits `like`, whose whole state would start again: it has "
        f"{format_list(stored_texts, str) or 'no state'}, and `like` has {format_list(texts, str)}"
    )
    advice = "to start the state again, do not call load_changed"
    if has_state_dict(index.objects):
        advice = "it has the state dict of an optimizer: pass an optimizer as `like`, not its state"
    return MismatchError(f"{where}: {problem}; nothing was loaded; {advice}", [problem])


def _require_equal_counts(equal_counts: Mapping[str, list[str]], read: Mapping[str, Any], where: str) -> None:
    """Raise if parameters with different step counts now have one transform, and so one count."""
    for name, stored_names in equal_counts.items():
        counts = {stored_name: read[stored_name].item() for stored_name in stored_names}
        if len(set(counts.values())) > 1:
            problem = f"{name!r} would be the step count of parameters with the counts {counts}"
            raise MismatchError(
                f"{where}: {problem}, nothing was loaded; give these parameters a label of their own", [problem]
            )


# ---------------------------------------------------------------------------------------------------------- the sources


class Unit(NamedTuple):
    """The state of one parameter in one transform, such as ("adamw/scale_by_adam", "wte.weight")."""

    prefix: str
    """The levels of the names above the variable."""
    parameter: str


def _sources(expected: Shapes, stored: Shapes) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return a dict from the name of each leaf that is carried over to its name in the checkpoint.

    The second dict has, for a step count that comes from several transforms, the names of all their counts.
    """
    units = _units(expected)
    unit_sources = _unit_sources(units, _units(stored))
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
    return source_of, equal_counts


def _unit_sources(units: Mapping[Unit, Shapes], stored_units: Mapping[Unit, Shapes]) -> dict[Unit, Unit]:
    """Return a dict from each unit that is carried over to its unit in the checkpoint.

    This is the unit with the same name, or else the closest one that no other unit is carried over from. If two units
    could come from one, both are new.
    """
    source_of: dict[Unit, Unit] = {}
    for unit in units:
        if unit in stored_units and _fits(unit, unit, units, stored_units):
            source_of[unit] = unit
    unused = [unit for unit in stored_units if unit not in source_of]
    moved: dict[Unit, Unit] = {}
    for unit in units:
        if unit not in source_of:
            fitting = [source for source in unused if _fits(unit, source, units, stored_units)]
            source = _closest(unit.prefix, {source.prefix: source for source in fitting})
            if source is not None:
                moved[unit] = source
    uses = Counter(moved.values())
    for unit, source in moved.items():
        if uses[source] == 1:
            source_of[unit] = source
    return source_of


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
