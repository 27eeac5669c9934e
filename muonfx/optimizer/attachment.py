"""Detection of parameters that were replaced after an optimizer was created, or are stepped on by another optimizer."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from muonfx.core.checks import warn_caller
from muonfx.optimizer.groups import (
    BoundGroup,
    Group,
    GroupNumbers,
    distinct_routes,
    group_hyperparams,
    keys_by_label,
    label_of,
    names_in,
    unread_key_warning,
)
from muonfx.optimizer.stepping import Stepping
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards.dtensors import is_dtensor

CAUSES = (
    "was the model sharded, loaded or converted after the optimizer was created (fully_shard, load_state_dict(assign="
    "True), to_empty() of meta parameters, parametrizations)? Create the optimizer after that"
)
FSDP1 = (
    "FullyShardedDataParallel (FSDP1) has flattened and split its matrices. Shard the model with fully_shard (FSDP2; "
    "in accelerate fsdp_version=2) instead"
)


def models_of(params: Any) -> list[nn.Module]:
    """Return the models in the argument ``params`` of an optimizer: ``params`` itself, or "params" of its groups."""
    items: Any = [{"params": params}] if isinstance(params, nn.Module) else params
    return [item["params"] for item in items if isinstance(item, dict) and isinstance(item.get("params"), nn.Module)]


def check_usable(named: Mapping[str, Tensor], layout: Layout | None) -> None:
    """Raise ValueError if FSDP1 has flattened parameters, or if only some parameters are on the meta device."""
    if not all(param.is_meta for param in named.values()):
        check_real(named)
    if layout is not None and layout.is_flat:
        return  # the caller's layout describes these shards
    views = [name for name, param in named.items() if getattr(param, "_fsdp_flattened", False)]
    flat = [name for name, param in named.items() if getattr(param, "_is_flat_param", False) and name not in views]
    # On one rank, and with NO_SHARD, the original parameters keep their shapes.
    if not flat and all(named[name].ndim < 2 for name in views):
        flat = views
    if flat:
        raise ValueError(
            f"{flat[0]!r} has shape {tuple(named[flat[0]].shape)}: {FSDP1}, or give these shards by "
            "layout=muonfx.sharding.flat(...)"
        )


class _Slot(NamedTuple):
    """The module that has a parameter, as a weak reference, and the parameter's attribute name in it."""

    module: weakref.ref[nn.Module]
    leaf: str

    def now(self) -> Tensor | None:
        """Return the parameter that the module has under this name now, or None if the module was deleted."""
        return None if (module := self.module()) is None else module._parameters.get(self.leaf)


class _Bound(NamedTuple):
    """A parameter with its shape, device and sharding at the time when its state was created or last moved."""

    param: Tensor
    shape: torch.Size
    device: torch.device
    placement: tuple[object, ...]
    slot: _Slot | None
    """Its position in a known model, or None, as for a copy that an engine has put into the groups."""


class Attachment:
    """Records for which tensors and param groups an optimizer has state, and which models contain them."""

    def __init__(
        self,
        models: Iterable[nn.Module],
        known: nn.Module | None,
        named: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
        left_out: Mapping[str, Tensor],
        *,
        alone: bool,
    ) -> None:
        # models: the optimizer has all of their parameters; known: a model of which it may have only some
        # frozen and left_out (by the label None): what was given to the optimizer, but is in no group
        self._models = [] if known is None else [(weakref.ref(known), True)]
        self.groups: list[BoundGroup] = []
        self._bound: dict[str, _Bound] = {}
        self._named: dict[str, Tensor] = {}
        self._listed: list[BoundGroup] | None = None  # the groups whose parameters `_named` has
        self._alone = alone  # one process: no other rank has the gradients that are missing here
        self._absent: tuple[str, ...] | None = None
        self._warned = set[str]()
        self._frozen: dict[str, _Slot | Tensor] = {}
        self._registered = -1  # `_registrations.count` when the models were last walked through
        self._outside: dict[str, Tensor] = {}  # the models' parameters that are not in the optimizer
        self._reported: dict[str, Tensor] = {}  # those of them that a warning has named
        self._callers_tensors: list[tuple[str, Tensor, int]] = []  # name, tensor and its version at construction
        self.bind(named, models)
        self._left_out = self._held(left_out)
        self.leave_out(frozen)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle, without models and parameters. A restored optimizer records its own."""
        # Frozen weights may be large, and the copy of an optimizer is of the trained ones.
        restored_later = {"_models": [], "_bound": {}, "_named": {}, "_listed": None, "_callers_tensors": []}
        restored_later |= {"_outside": {}, "_reported": {}, "_registered": -1, "_frozen": {}, "_left_out": {}}
        return {**self.__dict__, **restored_later}

    @property
    def models(self) -> list[nn.Module]:
        """The models that contain the optimizer's parameters, without models that have been deleted."""
        return [model for ref, _ in self._models if (model := ref()) is not None]

    @property
    def named(self) -> dict[str, Tensor]:
        """A dict from name to parameter, for the parameters that have optimizer state, in the order of the groups."""
        if self._listed is not self.groups:
            self._named = {name: self._bound[name].param for one in self.groups for name in one.names}
            self._listed = self.groups
        return self._named

    @property
    def names(self) -> dict[Tensor, str]:
        """The name of each parameter that has state, belongs to a model, or was left out because it is frozen."""
        names = {param: name for name, param in _present(self._frozen).items()} | names_in(self.models)
        return names | {bound.param: name for name, bound in self._bound.items()}

    # ------------------------------------------------------------------------------------------------------- groups

    def is_current(self, groups: list[Group]) -> bool:
        """Return True if no parameter was replaced, resized or moved, in the param groups or in the models."""
        if not self._has(groups):
            return False
        for param, shape, device, _, slot in self._bound.values():
            if param.shape != shape or param.device != device:
                return False
            if slot is not None and (module := slot.module()) is not None:  # `slot.now()` would be one more call
                now = module._parameters.get(slot.leaf)
                if now is not None and now is not param:
                    return False
        return True

    def _has(self, groups: list[Group]) -> bool:
        """Return True if these are the param groups that `note` recorded, with the same parameters and names."""
        if len(groups) != len(self.groups):
            return False
        named = self.named
        for group, one in zip(groups, self.groups, strict=True):
            if group is not one.group or group.get("param_names") != one.names:
                return False
            params = group["params"]
            if len(params) != len(one.names) or not all(map(is_, params, map(named.get, one.names))):
                return False
        return True

    def follow(self, groups: Any, stepping: Stepping, *, may_repeat: bool = False) -> None:
        """Record param groups that a user or engine has edited, and set "param_names". Raise if they do not fit."""
        if self._has(groups):
            return
        if may_repeat:  # as ``param_groups.extend(param_groups)`` makes them
            groups = list({id(group): group for group in groups}.values())
        names_per_group = self.names_of(groups)
        for group, names in zip(groups, names_per_group, strict=True):
            _require_all_hyperparams(group, names, stepping)
        for group, names in zip(groups, names_per_group, strict=True):
            group["params"], group["param_names"] = list(group["params"]), names
            group.setdefault("label", label_of(distinct_routes(names, stepping.routes)))
        self.note(groups, stepping)

    def note(self, groups: Iterable[Group], stepping: Stepping) -> None:
        """Record the param groups from which later steps read the hyperparameters."""
        former = {id(one.group): one.numbers for one in self.groups}
        of_names = {name: one.numbers for one in self.groups for name in one.names}
        found: list[BoundGroup] = []
        for group in groups:
            names: list[str] = list(group["param_names"])
            members = distinct_routes(names, stepping.routes)
            own = group_hyperparams(members, group) if members else ()
            for key in keys_by_label(members) - {hyperparam.key for hyperparam in own}:
                group.pop(key, None)
            known = former.get(id(group), of_names.get(names[0]) if names else None)
            # The former numbers are kept: they show which of two keys of a number is changed next.
            numbers = copy.copy(known) if known is not None and known.hyperparams == own else GroupNumbers(own)
            found.append(BoundGroup(group, names, numbers))
        self.groups = found
        self._key_counts: list[int] = []

    def added_in(self, groups: Iterable[Group]) -> dict[str, Tensor]:
        """Return, by name, the parameters of the models that somebody has put into the groups, and that have no state.

        Lightning assigns ``optimizer.param_groups`` when a run with unfrozen layers is resumed.
        """
        known = {bound.param for bound in self._bound.values()}
        unknown = [param for group in groups for param in group["params"] if param not in known]
        if not unknown:
            return {}
        names = self.names
        # A new tensor under a known name replaces a parameter.
        return {names[param]: param for param in unknown if names.get(param, "") not in {"", *self._bound}}

    def read_new_keys(self, stepping: Stepping) -> None:
        """Read keys that somebody has added to the groups. Warn once of a misspelt one, such as "weight_dacay"."""
        counts = [len(bound.group) for bound in self.groups]
        if counts == self._key_counts:  # a step must not compare all keys
            return
        # A group of several labels may now have a key, such as "weight_decay", that sets the numbers of all.
        self.note([bound.group for bound in self.groups], stepping)
        self._key_counts = [len(bound.group) for bound in self.groups]
        known = set[str]().union(*[bound.numbers.keys for bound in self.groups])
        for bound in self.groups:
            of = next(iter(bound.names), "no parameter")
            for key in bound.group.keys() - bound.numbers.keys - known:
                message = unread_key_warning(key, bound.group[key], of, bound.numbers.keys, known)
                if message is not None and key not in self._warned:
                    self._warned.add(key)
                    warnings.warn(message, stacklevel=5)

    def names_of(self, groups: list[Group]) -> list[list[str]]:
        """Return one list of parameter names per group. A new tensor gets the name of the tensor that it replaces."""
        known = {
            now: name
            for name, bound in self._bound.items()
            if bound.slot is not None and (now := bound.slot.now()) is not None
        } | {bound.param: name for name, bound in self._bound.items()}
        members: list[list[str]] = []
        for place, group in enumerate(groups):
            params, former = list(group["params"]), group.get("param_names", ())
            new = next((param for param in params if param not in known), None)
            if new is not None and (len(former) != len(params) or not {*former} <= self._bound.keys()):
                raise ValueError(
                    f"param_groups[{place}]: found a new tensor of shape {tuple(new.shape)} and {len(params)} params, "
                    f"expected {len(former)}, one for each of param_names: keep a replaced parameter at its position, "
                    "and add others with add_param_group. Under DeepSpeed's ZeRO use muonfx.engines.deepspeed.Muon"
                )
            members.append([known[param] if param in known else former[at] for at, param in enumerate(params)])
        times = Counter(name for names in members for name in names)
        if twice := [name for name, count in times.items() if count > 1]:
            raise ValueError(
                f"param_groups: {twice[0]!r} is listed {times[twice[0]]} times and would be updated as often: list it "
                "once; a new tensor takes the name of its place in param_names"
            )
        if absent := [name for name in self._bound if name not in times]:
            raise ValueError(
                f"param_groups: {len(absent)} of {len(self._bound)} parameters were removed, such as {absent[0]!r}: "
                "put them back; to stop training a parameter, set requires_grad_(False) and .grad = None"
            )
        return members

    def warn_once(self, before: str, lines: list[str], after: str) -> None:
        """Warn of those of several findings that this optimizer has not reported."""
        new_lines = [line for line in lines if line not in self._warned]
        self._warned.update(new_lines)
        if new_lines:
            more = f"; and {len(new_lines) - 10} more" if len(new_lines) > 10 else ""
            warn_caller(before + "; ".join(new_lines[:10]) + more + after)

    def note_callers_tensors(self, numbers: Mapping[str, Any]) -> None:
        """Record tensors that the caller gave as hyperparameters, of which the groups have copies."""
        for name, number in numbers.items():
            for value in number if isinstance(number, tuple | list) else (number,):
                if isinstance(value, Tensor) and not value.is_inference():  # inference tensors have no version
                    self._callers_tensors.append((name, value, value._version))

    def warn_of_written_tensors(self) -> None:
        """Warn once if the caller has written into a tensor that was given as a hyperparameter."""
        for name, tensor, version in self._callers_tensors:
            if tensor._version != version:
                self._callers_tensors = []
                warnings.warn(
                    f"the tensor that was given for {name!r} was changed in place, which has no effect: each param "
                    "group has a copy of it; write into the tensors in param_groups",
                    stacklevel=5,
                )
                return

    # --------------------------------------------------------------------------------------------------- parameters

    def bind(self, named: Mapping[str, Tensor], models: Iterable[nn.Module] = ()) -> None:
        """Record the named tensors for which the optimizer now has state, and further models that contain them."""
        self._models += [(weakref.ref(model), False) for model in models]
        slots: dict[Tensor, _Slot] | None = None
        for name, param in named.items():
            old = self._bound.get(name)
            slot = None if old is None else old.slot
            if slot is None or slot.now() is not param:
                slots = self._slots() if slots is None else slots
                slot = slots.get(param)
            # No weak references to tensors: torch.utils.swap_tensors, used to convert in place, rejects such tensors.
            self._bound[name] = _Bound(param, param.shape, param.device, _placement(param), slot)
            self._frozen.pop(name, None)
        self._absent = self._listed = None
        self.on_meta = any(bound.param.is_meta for bound in self._bound.values())

    def leave_out(self, frozen: Mapping[str, Tensor]) -> None:
        """Record parameters that are in no group because they are frozen, to raise if they are trained later."""
        self._frozen.update(self._held(frozen))

    def _held(self, params: Mapping[str, Tensor]) -> dict[str, _Slot | Tensor]:
        """Return the position in a model of each parameter, or the parameter itself if it is in none."""
        # A frozen model may be large: it must not be kept alive.
        slots = self._slots() if params else {}
        return {name: slots.get(param, param) for name, param in params.items()}

    def not_trained_params(self) -> dict[str, Tensor]:
        """Return the parameters that were given to the optimizer and are in no group, by name."""
        return {**_present(self._left_out), **_present(self._frozen)}

    def saved(self) -> tuple[list[BoundGroup], dict[str, _Bound], dict[str, _Slot | Tensor]]:
        """Return what `restore` needs to undo `bind`, `note` and `leave_out`."""
        return self.groups, dict(self._bound), dict(self._frozen)

    def restore(self, saved: tuple[list[BoundGroup], dict[str, _Bound], dict[str, _Slot | Tensor]]) -> None:
        """Undo all changes since `saved` was called."""
        self.groups, self._bound, self._frozen = saved
        self._listed = None

    def _slots(self) -> dict[Tensor, _Slot]:
        """Return a dict from each parameter of the models to its module and attribute name."""
        found: dict[Tensor, _Slot] = {}
        for module in (module for model in self.models for module in model.modules()):
            for leaf, param in module._parameters.items():
                if param is not None:
                    found.setdefault(param, _Slot(weakref.ref(module), leaf))
        return found

    def replaced(self, before: Mapping[str, Tensor], *, at_step: bool) -> dict[str, Tensor]:
        """Return, by name, the parameters that were replaced by other tensors or moved since the last `bind`."""
        now = {**before, **self._in_models(before)}
        new = [name for name, param in now.items() if self._bound[name].param is not param]
        is_late = at_step and any(self._bound[name].param.grad is not None for name in new)
        if is_late and all(param.grad is None for param in now.values()):
            raise ValueError(
                f"{new[0]!r} of the model was replaced between backward() and step(), and its gradient "
                "belongs to the former tensor: replace parameters before the backward pass"
            )
        moved: dict[str, Tensor] = {}
        for name, param in now.items():
            bound = self._bound[name]
            if param.shape != bound.shape:
                cause = FSDP1 if getattr(param, "_fsdp_flattened", False) else CAUSES
                found, expected = tuple(param.shape), tuple(bound.shape)
                raise ValueError(f"{name!r} has shape {found}, expected {expected}, as at construction: {cause}")
            if bound.param is not param or param.device != bound.device:
                moved[name] = param
        return moved

    def is_swap(self, replaced: Mapping[str, Tensor]) -> bool:
        """Return True if each new tensor has the device, dtype and sharding of the parameter that it replaces."""
        return all(self._bound[name].placement == _placement(param) for name, param in replaced.items())

    def replaced_in_models(self) -> dict[Tensor, Tensor]:
        """Return a dict from each parameter that was replaced in the models to the new tensor. It is empty if none."""
        for param, _, _, _, slot in self._bound.values():
            if slot is None:
                continue
            module = slot.module()  # `slot.now()` would be one more call
            if module is not None and module._parameters.get(slot.leaf) is not param:
                break
        else:  # the usual case, in which the models need no walk
            return {}
        before = self.named
        return {before[name]: now for name, now in self._in_models(before).items()}

    def _in_models(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return, by name, the new tensors of parameters that were replaced in the models."""
        found: dict[str, Tensor] = {}
        for name, param in named.items():
            bound = self._bound[name]
            # A tensor that an engine has put into the groups takes precedence over the model.
            now = bound.slot.now() if bound.slot is not None and bound.param is param else None
            if now is not None and now is not param:
                found[name] = now
        if not found:
            return found
        # During forward and backward, FSDP2 puts gathered plain parameters into the modules; ignore them.
        modules = [module for model in self.models for module in model.modules()]
        fsdp2 = [module for module in modules if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)]
        gathered = {id(param) for module in fsdp2 for param in module.parameters() if not is_dtensor(param)}
        found = {name: now for name, now in found.items() if is_dtensor(now) or id(now) not in gathered}
        # A tied parameter, which is in two positions, keeps the name that it has.
        while True:
            times = Counter(id(found.get(name, param)) for name, param in named.items())
            if not (twice := [name for name, now in found.items() if times[id(now)] > 1]):
                return found
            for name in twice:
                del found[name]

    # --------------------------------------------------------------------------------------------------- gradients

    def check(self, named: Mapping[str, Tensor], updates: Mapping[str, Tensor | None]) -> None:
        """Raise or warn if gradients are missing, but model parameters that are not in the optimizer have gradients."""
        if self.on_meta:
            check_real(self.named)
        self._check_frozen()
        all_present = type(None) not in set(map(type, updates.values()))
        absent = () if all_present else tuple([name for name, grad in updates.items() if grad is None])
        has_changed = absent != self._absent or self._registered != _registrations.count
        if has_changed:  # walking through a model takes time
            self._absent = absent
            self._registered = _registrations.count
            self._outside = self._parameters_outside(named)
        elif not self._outside:
            return
        none = len(absent) == len(updates)
        strangers = {name: param for name, param in self._outside.items() if param.grad is not None}
        if not has_changed and not any(self._reported.get(name) is not param for name, param in strangers.items()):
            return
        first = next(iter(strangers), None)
        if first is not None and none:
            self._absent = None  # check again at the next step
            raise ValueError(
                f"none of the {len(named)} parameters has a gradient, but {first!r} of the model has one and is not "
                f"among them: {FSDP1 if getattr(strangers[first], '_is_flat_param', False) else CAUSES}"
            )
        new = [name for name, param in strangers.items() if self._reported.get(name) is not param]
        self._reported = strangers
        if new:
            warnings.warn(
                f"{len(strangers)} parameters of the model have gradients and are not in the optimizer, such as "
                f"{new[0]!r}; they are not updated: {CAUSES}, or use add_param_group",
                stacklevel=5,
            )
        is_trained = any(param.requires_grad for param in named.values())
        if first is None and none and is_trained and self._alone and "none" not in self._warned:
            self._warned.add("none")
            warnings.warn(
                f"step() found no gradient on any of {len(named)} parameters and changes nothing: is backward() called "
                f"before it, on these parameters? If so: {CAUSES}",
                stacklevel=5,
            )

    def _check_frozen(self) -> None:
        """Raise if a parameter that was frozen at construction is trained now, because it is in no group."""
        for name, param in _present(self._frozen).items():
            if param.requires_grad and param.grad is not None:
                raise ValueError(
                    f"{name!r} has a gradient, but it was frozen when the optimizer was created, and is in no group: "
                    "call optimizer.add_param_group({'params': [...]}) with it. If another optimizer trains it, give "
                    "it the label None, or leave it out of this optimizer's parameters"
                )

    def not_trained(self) -> set[str]:
        """Return the names of parameters that are known, but have no state, as they are frozen or have label None."""
        return {*self._frozen, *self._left_out, *names_in(self.models).values()} - self._bound.keys()

    def _parameters_outside(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the models' parameters, by name, that are not in the optimizer."""
        ours = {id(param) for param in named.values()}
        # In a model that only provides names (`model=`), consider only parameters whose names the optimizer has.
        return {
            name: param
            for ref, is_known in self._models
            if (model := ref()) is not None
            for name, param in model.named_parameters()
            if id(param) not in ours and name not in self._left_out and (name in named or not is_known)
        }


def _present(held: Mapping[str, _Slot | Tensor]) -> dict[str, Tensor]:
    """Return the parameters that exist, by name: those of a model that was deleted do not."""
    found: dict[str, Tensor] = {}
    for name, slot_or_param in held.items():
        param = slot_or_param.now() if isinstance(slot_or_param, _Slot) else slot_or_param
        if param is not None:
            found[name] = param
    return found


def _require_all_hyperparams(group: Group, names: Sequence[str], stepping: Stepping) -> None:
    """Raise if parameters of other transforms were moved into a group, which lacks the hyperparameters of these."""
    routes = stepping.routes
    members = distinct_routes(names, routes)
    if len(members) < 2 or all(hyperparam.key in group for hyperparam in group_hyperparams(members, group)):
        return
    first = names[0]
    other = next(name for name in names if routes[name] != routes[first])
    raise ValueError(
        f"param_groups: {first!r} (label {routes[first].label!r}) and {other!r} (label {routes[other].label!r}) are in "
        "one group, but different transforms update them, and the group lacks hyperparameters of one: recreate the "
        "optimizer to change a label, or add_param_group to add parameters"
    )


class _Registrations:
    """Counts how often a parameter or a module was assigned to a module, of any model."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


_registrations = _Registrations()


def _placement(param: Tensor) -> tuple[object, ...]:
    of_mesh = (param.device_mesh, param.placements) if is_dtensor(param) else ()
    return (param.device, param.dtype, *of_mesh)


def check_real(named: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a parameter is on the meta device, because it has no values to update."""
    if meta := [name for name, param in named.items() if param.is_meta]:
        raise ValueError(
            f"{meta[0]!r} is on the meta device, as are {len(meta)} of {len(named)} parameters: allocate and load them "
            "first (model.to_empty(device=...), then load_state_dict). An optimizer that was given the model finds the "
            "new tensors; otherwise create the optimizer after that"
        )


_owners: WeakSet[Optimizer] = WeakSet()


def own_groups(optimizer: Optimizer) -> None:
    """Make every other optimizer raise if it steps on this optimizer's param groups, unless it wraps this optimizer."""
    _register()
    _owners.add(optimizer)


class OwnedGroup(dict[str, Any]):
    """A param group (a dict) whose class marks it as created by a muonfx optimizer.

    Another optimizer that steps on it raises, even if the muonfx one is deleted. torch.compile cannot trace the class.
    """


class GroupOwner(Optimizer):
    """Base class of optimizers whose param groups no other optimizer may step on, except a wrapper of this one."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        own_groups(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, marked so that another optimizer that steps on it raises."""
        super().add_param_group(OwnedGroup(param_group))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer, and mark its param groups as its own."""
        super().__setstate__(state)
        self.param_groups = [OwnedGroup(group) for group in self.param_groups]
        own_groups(self)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_refuse_exchanged)
    register_module_parameter_registration_hook(_registrations)
    register_module_module_registration_hook(_registrations)


def _refuse_exchanged(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling() or optimizer in _owners:
        return
    # accelerate replaces an optimizer by DeepSpeedCPUAdam(optimizer.param_groups) when DeepSpeed offloads: the groups
    # still have our labels, but our step never runs.
    ours = {id(group) for owner in _owners for group in owner.param_groups}
    owned = [group for group in optimizer.param_groups if id(group) in ours or isinstance(group, OwnedGroup)]
    if owned and not any(isinstance(value, Optimizer) and value in _owners for value in vars(optimizer).values()):
        labels = ", ".join(repr(group.get("label")) for group in owned)
        raise RuntimeError(
            f"{type(optimizer).__name__} steps on groups of a muonfx optimizer ({labels}), which itself never steps: "
            "an engine has replaced it. If DeepSpeed offloads the optimizer, accelerate and the Trainer do so "
            'unless the configuration has "zero_force_ds_cpu_optimizer": false. To use another optimizer on purpose, '
            "pass plain copies: [dict(group) for group in optimizer.param_groups]"
        )
