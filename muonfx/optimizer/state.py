"""A transform's state in torch's format: leaves by path, and the checks of a saved state before it is loaded."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from muonfx.optimizer.values import Group, GroupNumbers
from muonfx.sharding.dtensors import is_dtensor, local_of
from muonfx.sharding.shards import IntervalTensor
from muonfx.tree.display import format_list
from muonfx.tree.dtypes import widens
from muonfx.tree.renaming import Rename, new_names
from muonfx.tree.wrappers import unwrapped

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor

__all__ = [
    "Load",
    "Take",
    "Taken",
    "on_this_rank",
    "other_piece",
    "path_of",
    "read_state_dict",
]


class Load(NamedTuple):
    """One copy of a load, made after all values are found to fit."""

    name: str
    """The parameter and the leaf: all ranks load in the order of names."""
    place: int
    """The index of the leaf in the transform's state."""
    target: Tensor | None
    """This rank's storage; None if it has no part of the leaf, or if `interval` is given."""
    source: Tensor
    """The values of the target's elements; with an interval, of the whole leaf."""
    interval: tuple[int, int] | None = None
    """The elements of the flattened source that this rank copies into its state leaf."""


Taken = tuple[Tensor | None, Tensor, tuple[int, int] | None]
"""The last fields of a `Load`."""

Take = Callable[[int, Any, Any], Taken | str]
"""From a leaf's index, the displayed leaf and a value for it: the last fields of a `Load`, or an error message."""


class Reading(NamedTuple):
    """A state dict that fits an optimizer."""

    groups: list[Group]
    """The saved groups in the optimizer's order."""
    loads: list[Load]
    absent: list[str]
    """The parameters of which it has no state."""


def path_of(entries: tuple[object, ...]) -> str:
    """Return the path of a leaf as a key of ``optimizer.state``."""
    return "/".join(map(str, entries))


def read_state_dict(
    given: Mapping[str, Any],
    groups: list[Group],
    numbers: list[GroupNumbers],
    state: Mapping[Tensor, Group],
    places: Mapping[tuple[int, str], int],
    take: Take,
    rename: Rename | None,
) -> Reading:
    """Match a state dict with an optimizer's groups and state; ValueError lists all that does not fit."""
    is_partial = _is_by_path(given)
    if is_partial:
        given = _named_by_path(groups, given)
    given = _renamed_groups(groups, given, rename or {})
    saved = _saved_groups(groups, given)
    for own, old in zip(numbers, saved, strict=True):
        own.parse(old)  # raises if a value is not a number
    loads, absent = _matched(groups, numbers, state, places, saved, given["state"], take, is_partial=is_partial)
    _warn_of_order(groups, given["param_groups"])
    return Reading(saved, loads, absent)


def _renamed_groups(groups: list[Group], given: Mapping[str, Any], rename: Rename) -> dict[str, Any]:
    """Return a state dict with this optimizer's parameter names, after `rename` and without wrappers' prefixes."""
    if not {"state", "param_groups"} <= given.keys():
        raise ValueError(f"expected a state dict with 'state' and 'param_groups', found the keys {sorted(given)}")
    saved: list[Group] = list(given["param_groups"])
    if not all("param_names" in old for old in saved):
        if rename:
            raise ValueError("rename: the state dict has no names of parameters, which it means by their order")
        return dict(given)
    names, wrong = new_names(
        unwrapped(name for old in saved for name in old["param_names"]), rename, level=".", what="parameter"
    )
    ours = {plain: name for name, plain in unwrapped(name for group in groups for name in group["param_names"]).items()}
    found = {written: ours.get(name, name) for written, name in names.items()}
    for name, times in Counter(found.values()).items():
        if times > 1:
            both = " and ".join(repr(written) for written, new in found.items() if new == name)
            wrong.append(f"{both} would both be {name!r}")
    if wrong:
        raise ValueError("nothing was loaded: rename: " + "; ".join(wrong[:10]))
    renamed = [{**old, "param_names": [found[name] for name in old["param_names"]]} for old in saved]
    return {**given, "param_groups": renamed}


def _is_by_path(given: Mapping[str, Any]) -> bool:
    """Return True if a state dict lists parameters by path, as ``torch.distributed.checkpoint.state_dict`` does."""
    listed = [param for old in given.get("param_groups", ()) for param in old.get("params", ())]
    return bool(listed) and all(isinstance(param, str) for param in listed)


def _named_by_path(groups: list[Group], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that lists paths with parameter names that are taken from these paths."""
    # torch.distributed.checkpoint.state_dict lists paths in the order of the loading optimizer, but "param_names" in
    # the order of the saving optimizer.
    saved: list[Group] = list(given["param_groups"])
    own = [list(group["param_names"]) for group in groups]
    paths = unwrapped(path for old in saved for path in old["params"])
    if set(unwrapped(name for names in own for name in names).values()) <= set(paths.values()):
        saved = [{**old, "param_names": list(old["params"])} for old in saved]
    elif (theirs := [old.get("param_names") for old in saved]) != own and sorted(map(sorted, own)) == sorted(
        sorted(names or ()) for names in theirs
    ):
        raise ValueError(
            f"nothing was loaded: the state dict names parameters by paths such as {next(iter(paths))!r}, the "
            f"optimizer by names such as {own[0][0]!r}, in another order than it was saved with: make the optimizer "
            "from the whole model, or from its named_parameters()"
        )
    if len(saved) == len(groups):
        # A group that is absent from the checkpoint, which torch allows under strict=False, keeps its hyperparameters.
        saved = [
            {**group, **old} if old.keys() <= {"params", "param_names"} else old
            for group, old in zip(groups, saved, strict=True)
        ]
    return {**given, "param_groups": saved}


def _saved_groups(groups: list[Group], given: Mapping[str, Any]) -> list[Group]:
    """Return the groups of a state dict in this optimizer's order, matched by parameter names."""
    saved: list[Group] = list(given["param_groups"])
    if not all("param_names" in old for old in saved):
        if [len(group["params"]) for group in groups] == [len(old["params"]) for old in saved]:
            return saved
        raise ValueError(
            f"the state has groups of {[len(old['params']) for old in saved]} parameters, this optimizer of "
            f"{[len(group['params']) for group in groups]}; was it made by another optimizer or for another model?"
        )
    left, found = list(saved), list[Group]()
    for group in groups:
        names = set(group["param_names"])
        match = next((old for old in left if set(old["param_names"]) == names), None)
        if match is None:
            absent = sorted(names - {name for old in saved for name in old["param_names"]})
            detail = f"it has no {format_list(absent)}" if absent else "it groups them in another way"
            raise ValueError(
                f"nothing was loaded: the state has no group of the {len(names)} parameters "
                f"{format_list(sorted(names))}: {detail}; was it made by another optimizer or for another model?"
            )
        left.remove(match)
        found.append(match)
    if left:
        raise ValueError(f"nothing was loaded: the state has a further group, of {format_list(left[0]['param_names'])}")
    return found


def _warn_of_order(groups: list[Group], saved: list[Group]) -> None:
    """Warn if the groups were saved in another order and a scheduler was used."""
    if not all("param_names" in old and "initial_lr" in old for old in saved):
        return
    first = [min(group["param_names"], default="") for group in groups]
    if first != [min(old["param_names"], default="") for old in saved]:
        warnings.warn(
            f"the groups were saved in the order {[old.get('label') for old in saved]}, and have "
            f"{[group['label'] for group in groups]} here: each has its own numbers again, but the saved state of a "
            "scheduler has lists in that order, such as base_lrs: put them in this one, or make the scheduler anew",
            stacklevel=4,
        )


def _matched(
    groups: list[Group],
    numbers: list[GroupNumbers],
    state: Mapping[Tensor, Group],
    places: Mapping[tuple[int, str], int],
    saved: list[Group],
    held: Mapping[object, Mapping[str, Any]],
    take: Take,
    *,
    is_partial: bool,
) -> tuple[list[Load], list[str]]:
    """Pair state leaves with values of a state dict, and list absent parameters; every other difference raises."""
    absent: list[str] = []
    wrong: list[str] = []
    loads: list[Load] = []
    for group, own, old in zip(groups, numbers, saved, strict=True):
        # Only hyperparameters are required: schedulers add other entries.
        wrong += [f"missing hyperparameter {one.key!r}" for one in own.hyperparams if one.key not in old]
        index_of = dict(zip(old.get("param_names", group["param_names"]), old["params"], strict=True))
        for name, param in zip(group["param_names"], group["params"], strict=True):
            index = index_of[name]
            have, want = held.get(index, {}), state[param]
            if not have and not param.requires_grad:
                continue  # torch.distributed.checkpoint.state_dict leaves frozen parameters out
            if not have and want and is_partial:
                absent.append(name)
                continue
            wrong += [f"{name!r} has no {key!r}" for key in want.keys() - have.keys()]
            wrong += [f"{name!r} has an unexpected {key!r}" for key in have.keys() - want.keys()]
            for key in sorted(want.keys() & have.keys()):
                if want[key] is None and have[key] is None:
                    continue
                leaf, value, place = want[key], have[key], places[id(param), key]
                found = _misfit(leaf, value) or take(place, leaf, value)
                if isinstance(found, str):
                    wrong.append(f"{name!r}: {key!r} {found}")
                else:
                    loads.append(Load(f"{key!r} of {name!r}", place, *found))
    if wrong:
        shown = "; ".join(sorted(wrong)[:20]) + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise ValueError(f"the state does not fit this optimizer, nothing was loaded: {shown}")
    return sorted(loads, key=lambda load: load.name), absent


def _misfit(leaf: object, value: object) -> str | None:
    """Describe why a value's shape or dtype does not fit a leaf, or return None."""
    if not isinstance(leaf, Tensor) or not isinstance(value, Tensor) or value.shape != leaf.shape:
        return f"is {_described(value)}, expected {_described(leaf)}"
    # Values of eight bits are codes, which mean nothing in another dtype.
    if value.dtype != leaf.dtype and 1 in (value.dtype.itemsize, leaf.dtype.itemsize):
        return f"holds codes of {value.dtype}, expected {leaf.dtype}"
    if not widens(value.dtype, leaf.dtype):
        return f"would narrow from {value.dtype} to {leaf.dtype}"
    return None


def on_this_rank(leaf: Any, value: Any) -> Taken | str:
    """Return the last fields of a `Load` for this rank's part of a leaf, or an error for another rank's part."""
    if not is_dtensor(leaf) and not is_dtensor(value):
        if not isinstance(leaf, IntervalTensor) and not isinstance(value, IntervalTensor):
            return leaf, value, None
        if isinstance(leaf, IntervalTensor):
            own = leaf.piece
            if not isinstance(value, IntervalTensor):
                return own.data, value.reshape(-1)[own.start : own.stop], None
            if (own.start, own.stop) == (value.piece.start, value.piece.stop):
                return own.data, value.piece.data, None
    elif is_dtensor(leaf) and not isinstance(value, IntervalTensor):
        if not is_dtensor(value):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value.to(leaf.device), leaf.device_mesh, leaf.placements, src_data_rank=None)
        if value.device_mesh == leaf.device_mesh and value.placements == leaf.placements:
            return other_piece(value, leaf.device_mesh) or (local_of(leaf), local_of(value), None)
    return (
        f"lies as {_lies(value)}, here as {_lies(leaf)}: load through torch.distributed.checkpoint or "
        "muonfx.checkpoint, which move values between layouts"
    )


def other_piece(value: DTensor, mesh: DeviceMesh) -> str | None:
    """Return an error if a DTensor is the shard of a rank that was elsewhere in the mesh; replicas are no error."""
    # A mesh is saved with the coordinates of the rank that saves it, and keeps them when it is loaded.
    sharded = [dim for dim, placement in enumerate(value.placements) if not placement.is_replicate()]
    theirs, ours = value.device_mesh.get_coordinate(), mesh.get_coordinate()
    if theirs is not None and ours is not None and all(theirs[dim] == ours[dim] for dim in sharded):
        return None
    if theirs == ours:
        return None
    return (
        f"is the shard of the rank at {_at(theirs)} of the mesh, expected that of {_at(ours)}: a rank loads what it "
        "saved itself"
    )


def _at(coordinate: Sequence[int] | None) -> str:
    return "no position" if coordinate is None else f"position {tuple(coordinate)}"


def _lies(value: object) -> str:
    if is_dtensor(value):
        return f"{value.placements} on {value.device_mesh}"
    return repr(value) if isinstance(value, IntervalTensor) else "a plain tensor"


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
