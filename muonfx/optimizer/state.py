"""Checks of a saved ``state_dict`` against an optimizer, and the choice of the tensors to copy from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from muonfx.core import Transform
from muonfx.internal.display import format_list
from muonfx.internal.renaming import Rename, new_names
from muonfx.internal.wrappers import unwrapped
from muonfx.optimizer.groups import BoundGroup, Group
from muonfx.optimizer.resuming import keys_of_schedules
from muonfx.sharding.shards.dtensors import is_dtensor, local_of
from muonfx.sharding.shards.flat_shard import FlatShardTensor
from muonfx.tree.dtypes import widens

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor

Load = tuple[str, int, Tensor]
"""One tensor to load: a text for messages, the index of the leaf in the state, and the values (this rank's or all)."""

Take = Callable[[int, Any, Any], Tensor | str]
"""A function ``(index of a leaf, the leaf in optimizer.state, saved value) -> values of the Load, or an error``."""


class StateToLoad(NamedTuple):
    """What `read_state_dict` has found in a state dict for an optimizer."""

    groups: list[Group | None]
    """For each group of the optimizer, the saved group, or None if no parameter of it was saved."""
    loads: list[Load]
    without_state: list[str]
    """The names of trained parameters of which no state was saved."""
    warnings: list[str]


def read_state_dict(
    given: Mapping[str, Any],
    tx: Transform,
    own: Sequence[BoundGroup],
    state: Mapping[Tensor, Group],
    places: Mapping[tuple[int, str], int],
    take: Take,
    rename: Rename | None,
    not_trained: Set[str],
) -> StateToLoad:
    """Check a saved state dict (``given``) against an optimizer, and return what to load.

    ``own`` are the optimizer's groups and ``state`` is ``optimizer.state``. ``not_trained`` are names of parameters
    whose saved state is not needed, because they are frozen now. Raise ValueError with all differences.
    """
    given = _renamed_groups(own, _named_by_path(own, given), rename or {})
    saved_groups = _saved_groups(own, given["param_groups"], not_trained)
    wrong: list[str] = []
    loads: list[Load] = []
    without_state: list[str] = []
    for bound, saved in zip(own, saved_groups, strict=True):
        index_of: dict[str, Any] = {}
        if saved is not None:
            bound.numbers.parse(saved)  # raises if a value is not a number
            # Only hyperparameters are required: schedulers add other entries, and schedules come from the code.
            from_code = keys_of_schedules(tx, bound)
            required = [x.key for x in bound.numbers.hyperparams if not x.key.startswith(from_code)]
            wrong += [f"missing hyperparameter {key!r}" for key in required if key not in saved]
            index_of = dict(zip(saved["param_names"], saved["params"], strict=True))
        for name, param in zip(bound.names, bound.group["params"], strict=True):
            saved_entries, entries = given["state"].get(index_of.get(name)), state[param]
            if saved_entries is None:
                # torch.distributed.checkpoint.state_dict leaves out parameters that are frozen now.
                if entries and param.requires_grad:
                    without_state.append(name)
                continue
            wrong += [f"{name!r} has no {key!r}" for key in entries.keys() - saved_entries.keys()]
            wrong += [f"{name!r} has an unexpected {key!r}" for key in saved_entries.keys() - entries.keys()]
            for key in entries.keys() & saved_entries.keys():
                leaf, value = entries[key], saved_entries[key]
                if leaf is None and value is None:
                    continue
                place = places[id(param), key]
                taken = _misfit(leaf, value) or take(place, leaf, value)
                if isinstance(taken, str):
                    wrong.append(f"{name!r}: {key!r} {taken}")
                else:
                    loads.append((f"{key!r} of {name!r}", place, taken))
    if wrong:
        shown = "; ".join(sorted(wrong)[:20]) + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise ValueError(
            f"the state does not fit this optimizer, nothing was loaded: {shown}. Load it into an optimizer for the "
            "same model, with the same transform"
        )
    loads.sort(key=lambda load: load[0])  # all ranks load in this order
    return StateToLoad(saved_groups, loads, without_state, _warnings(own, given, without_state))


def _warnings(own: Sequence[BoundGroup], given: Mapping[str, Any], without_state: Sequence[str]) -> list[str]:
    """Return a warning if state was saved for parameters that are not trained now, or the other way round."""
    trained = {name for bound in own for name in bound.names}
    kept_out = [name for saved in given["param_groups"] for name in saved["param_names"] if name not in trained]
    found: list[str] = []
    if kept_out:
        found.append(
            f"load_state_dict: the state of {format_list(kept_out)} was not loaded, because this optimizer does not "
            "train them (frozen, or the label None). To train them again, call add_param_group before load_state_dict"
        )
    if without_state:
        found.append(
            f"load_state_dict: found no state of {format_list(without_state)}, as if they were frozen when it was "
            "saved. They keep the state that they have, which in a new optimizer is the initial one"
        )
    return found


def _named_by_path(own: Sequence[BoundGroup], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict with "param_names", from the names in "params" that torch.distributed.checkpoint saves."""
    # Paths are in the order of the loading optimizer, but "param_names" are in the order of the saving optimizer.
    saved: list[Group] = list(given.get("param_groups", ()))
    paths = [path for old in saved for path in old.get("params", ())]
    if not paths or not all(isinstance(path, str) for path in paths):
        return given
    names = [one.names for one in own]
    own_names = set(unwrapped(name for some in names for name in some).values())
    if own_names <= set(unwrapped(paths).values()):
        return {**given, "param_groups": [{**old, "param_names": list(old["params"])} for old in saved]}
    theirs = [old.get("param_names", []) for old in saved]
    if theirs != names and sorted(map(sorted, names)) == sorted(map(sorted, theirs)):
        raise ValueError(
            f"nothing was loaded: the state dict has paths such as {paths[0]!r}, and the optimizer has names such as "
            f"{names[0][0]!r} in another order: create both optimizers from the model or its named_parameters()"
        )
    return given


def _renamed_groups(own: Sequence[BoundGroup], given: Mapping[str, Any], rename: Rename) -> Mapping[str, Any]:
    """Return a state dict with this optimizer's parameter names, after ``rename`` and without wrapper prefixes."""
    if not {"state", "param_groups"} <= given.keys():
        raise ValueError(f"expected a state dict with 'state' and 'param_groups', found the keys {sorted(given)}")
    saved: list[Group] = list(given["param_groups"])
    if not all("param_names" in old for old in saved):
        # Engines such as torchtitan drop the names and keep the order of this optimizer's parameters.
        if rename or [len(old["params"]) for old in saved] != [len(one.names) for one in own]:
            raise ValueError(
                "nothing was loaded: the state dict has no 'param_names' to find parameters by, and "
                + ("rename= needs names" if rename else "its groups have other sizes than this optimizer's")
            )
        saved = [{**old, "param_names": list(one.names)} for one, old in zip(own, saved, strict=True)]
        return {**given, "param_groups": saved}
    names, wrong = new_names(
        unwrapped(name for old in saved for name in old["param_names"]), rename, level=".", what="parameter"
    )
    ours = {plain: name for name, plain in unwrapped(name for one in own for name in one.names).items()}
    found = {written: ours.get(name, name) for written, name in names.items()}
    for name, times in Counter(found.values()).items():
        if times > 1:
            both = " and ".join(repr(written) for written, new in found.items() if new == name)
            wrong.append(f"{both} would both be {name!r}")
    if wrong:
        raise ValueError("nothing was loaded: rename: " + "; ".join(wrong[:10]))
    renamed = [{**old, "param_names": [found[name] for name in old["param_names"]]} for old in saved]
    return {**given, "param_groups": renamed}


def _saved_groups(
    own: Sequence[BoundGroup], saved_groups: Sequence[Group], not_trained: Set[str]
) -> list[Group | None]:
    """Match saved groups to this optimizer's groups by the names of parameters, and return them in its order.

    A parameter that is in the optimizer and was not saved, or that was saved and is not trained now, is ignored.
    """
    own_names = {name for bound in own for name in bound.names}
    saved_names = {name for saved in saved_groups for name in saved["param_names"]}
    common = own_names & saved_names
    _require_known(own_names, saved_names, not_trained)
    saved_with: dict[frozenset[str], Group] = {}
    saved_without: list[Group] = []
    for saved in saved_groups:
        names = common.intersection(saved["param_names"])
        if names:
            saved_with[frozenset(names)] = saved
        else:
            saved_without.append(saved)
    if own_names == saved_names and len(saved_groups) != len(own):
        raise ValueError(
            f"nothing was loaded: the state dict has {len(saved_groups)} groups, expected {len(own)}: create this "
            "optimizer with the groups of the optimizer that was saved"
        )
    matched: list[Group | None] = []
    empty_groups = iter(saved_without)
    for bound in own:
        names = frozenset(common.intersection(bound.names))
        if names:
            _require_same_group(names, saved_with)
            matched.append(saved_with[names])
        else:
            matched.append(None if bound.names else next(empty_groups, None))
    return matched


def _require_known(own_names: Set[str], saved_names: Set[str], not_trained: Set[str]) -> None:
    """Raise if a state dict is of another model: it has names that are unknown here, or none that is known."""
    plain_not_trained = set(unwrapped(not_trained).values())
    unknown = [name for name, plain in unwrapped(saved_names - own_names).items() if plain not in plain_not_trained]
    if not unknown and (own_names & saved_names or not own_names or not saved_names):
        return
    lacking = sorted(own_names - saved_names)
    differing = {"lacks": lacking, "also has": sorted(unknown)}
    found = "; it ".join(f"{verb} {format_list(names)}" for verb, names in differing.items() if names)
    raise ValueError(
        f"nothing was loaded: the state dict {found}; expected parameters of this optimizer, or of its model: load it "
        "into an optimizer for the model that was saved"
        + ("; if only names differ: rename={saved name: name here}" if all(differing.values()) else "")
    )


def _require_same_group(names: frozenset[str], saved_with: Mapping[frozenset[str], Group]) -> None:
    """Raise if the parameters of one group of this optimizer were in several saved groups, or with others."""
    if names in saved_with:
        return
    name = min(names)
    saved_with_name = next(saved for saved in saved_with if name in saved)
    found, expected = (format_list(sorted(members - {name})) or "no other" for members in (saved_with_name, names))
    raise ValueError(
        f"nothing was loaded: the state dict has {name!r} in a group with {found}, expected with {expected}: "
        "create this optimizer with the labels and groups of the one that was saved; to change labels, save "
        "transform_state with muonfx.checkpoint and load it with allow_other_chain=True"
    )


def _misfit(leaf: object, value: object) -> str | None:
    """Return an error message if a saved value has the wrong shape or dtype for a state tensor, else None."""
    if not isinstance(leaf, Tensor) or not isinstance(value, Tensor) or value.shape != leaf.shape:
        found, expected = (
            f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in (value, leaf)
        )
        return f"is {found}, expected {expected}"
    # Eight-bit values are codes of quantized state, which are not numbers and have no meaning in another dtype.
    if value.dtype != leaf.dtype and 1 in (value.dtype.itemsize, leaf.dtype.itemsize):
        return f"holds codes of {value.dtype}, expected {leaf.dtype}"
    return None if widens(value.dtype, leaf.dtype) else f"would narrow from {value.dtype} to {leaf.dtype}"


def on_this_rank(leaf: Any, value: Any) -> Tensor | str:
    """Return this rank's part of a saved tensor, sharded like the state tensor ``leaf``, or an error message."""
    if isinstance(leaf, FlatShardTensor) and not is_dtensor(value):
        own = leaf.shard
        if not isinstance(value, FlatShardTensor):
            return value.reshape(-1)[own.start : own.stop]
        if (own.start, own.stop) == (value.shard.start, value.shard.stop):
            return value.shard.data
    elif is_dtensor(leaf) and not isinstance(value, FlatShardTensor):
        if not is_dtensor(value):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value.to(leaf.device), leaf.device_mesh, leaf.placements, src_data_rank=None)
        if value.device_mesh == leaf.device_mesh and value.placements == leaf.placements:
            return shard_error(value, leaf.device_mesh) or local_of(value)
    elif not is_dtensor(value) and not isinstance(value, FlatShardTensor):
        return value
    found, expected = (
        f"{x.placements} on {x.device_mesh}"
        if is_dtensor(x)
        else repr(x)
        if isinstance(x, FlatShardTensor)
        else "a plain tensor"
        for x in (value, leaf)
    )
    return (
        f"is placed as {found}, here as {expected}: load through torch.distributed.checkpoint or muonfx.checkpoint, "
        "which move values between layouts"
    )


def shard_error(value: DTensor, mesh: DeviceMesh) -> str | None:
    """Return an error message if a loaded DTensor is the shard of a rank at another mesh position, else None."""
    # A mesh is saved with the coordinates of the rank that saves it, and keeps them when it is loaded.
    sharded = [dim for dim, placement in enumerate(value.placements) if not placement.is_replicate()]
    theirs, ours = value.device_mesh.get_coordinate(), mesh.get_coordinate()
    if theirs == ours or (theirs and ours and all(theirs[dim] == ours[dim] for dim in sharded)):
        return None
    there, here = ("no position" if at is None else f"position {tuple(at)}" for at in (theirs, ours))
    return f"is the shard of the rank at {there} of the mesh, expected {here}: load the state that this rank saved"
