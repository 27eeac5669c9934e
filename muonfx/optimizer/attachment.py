"""Compare an optimizer's parameters with the parameters that its model trains now."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from muonfx.optimizer.values import Group
from muonfx.sharding.dtensors import is_dtensor
from muonfx.sharding.layout import Layout
from muonfx.tree.display import format_list

__all__ = ["Attachment", "check_lists", "check_usable", "models_of"]

CAUSES = (
    "was the model sharded, loaded or converted after the optimizer was made (fully_shard, FullyShardedDataParallel, "
    "load_state_dict(assign=True), to_empty() of meta parameters, parametrizations)? Make the optimizer after that"
)
FSDP1 = (
    "it is what FullyShardedDataParallel (FSDP1) leaves of parameters, flattened and cut, of which no matrix can be "
    "told: shard the model with fully_shard (FSDP2; in accelerate fsdp_version=2) instead"
)


def models_of(params: Any) -> list[nn.Module]:
    """Return the models among the arguments of an optimizer: `params` itself, or the "params" of groups."""
    if isinstance(params, nn.Module):
        return [params]
    if not isinstance(params, list | tuple):
        return []
    items: Iterable[Any] = params
    return [item["params"] for item in items if isinstance(item, dict) and isinstance(item.get("params"), nn.Module)]


def check_usable(named: Mapping[str, Tensor], layout: Layout | None) -> None:
    """Raise ValueError for flattened parameters of FSDP1, or if only some parameters are on the meta device."""
    if not all(param.is_meta for param in named.values()):
        _check_real(named)
    if layout is not None and layout.is_flat:
        return  # the caller's layout describes these shards
    flat = [name for name, param in named.items() if getattr(param, "_is_flat_param", False)]
    views = {name: param for name, param in named.items() if getattr(param, "_fsdp_flattened", False)}
    # On one rank, and with NO_SHARD, the original parameters keep their shapes.
    flat = [name for name in flat if name not in views]
    if flat or (views and all(param.ndim < 2 for param in views.values())):
        name = next(iter(flat or views))
        raise ValueError(
            f"{name!r} has shape {tuple(named[name].shape)}: {FSDP1}, or say with layout=muonfx.sharding.flat(...) "
            "which pieces these are"
        )


def check_lists(groups: object) -> None:
    """Raise TypeError if ``param_groups`` is not a list of groups."""
    if not isinstance(groups, list):
        raise TypeError(f"param_groups must be a list of groups, found {type(groups).__name__}")
    for group in cast("list[object]", groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list | tuple):
            raise TypeError(f"param_groups must hold dicts with a list under 'params', found {group!r:.200}")


class _Slot(NamedTuple):
    """The position of a bound parameter in a model; the module is not kept alive."""

    module: weakref.ref[nn.Module]
    leaf: str

    def now(self) -> Tensor | None:
        """Return the parameter that is in this position now."""
        module = self.module()
        return None if module is None else module._parameters.get(self.leaf)


class _Bound(NamedTuple):
    """A parameter as it was when its state was created or moved."""

    param: Tensor
    shape: torch.Size
    device: torch.device
    dtype: torch.dtype
    slot: _Slot | None
    """None for a parameter of no known model, such as a copy that an engine has put into the groups."""


class Comparison(NamedTuple):
    """The parameters of an optimizer as they are now, compared with the bound ones."""

    before: Mapping[str, Tensor]
    """The tensors in the groups."""
    later: dict[str, Tensor]
    """The tensors that have replaced them in the models."""
    named: dict[str, Tensor]
    """The tensors to bind: those in the models, where they were replaced there, else those in the groups."""
    replaced: list[str]
    """The names whose tensor is not the bound one, or has moved."""
    is_swap: bool
    """True if each new tensor has the device, dtype and sharding of the former one."""

    def check_in_time(self, *, is_first: bool) -> None:
        """Raise ValueError if only former tensors have gradients; warn of tensors replaced since zero_grad()."""
        if not self.later:
            return
        name = next(iter(self.later))
        if all(now.grad is None for now in self.named.values()) and any(
            self.before[name].grad is not None for name in self.later
        ):
            raise ValueError(
                f"{name!r} of the model was replaced between backward() and step(), and its gradient is that of the "
                "former tensor: replace parameters before the backward pass"
            )
        # Before the first step, replacing all parameters, as fully_shard does, is no reason to warn.
        if not is_first or any(param.requires_grad for name, param in self.before.items() if name not in self.later):
            warnings.warn(
                f"{len(self.later)} of {len(self.before)} parameters were replaced in the model, such as {name!r}, "
                "since the optimizer's gradients were cleared: the step is taken on those that the model has now, but "
                "a GradScaler or a clipping of the optimizer's groups has seen the former ones. Call "
                "optimizer.zero_grad() after that",
                stacklevel=4,
            )


class Attachment:
    """The parameters to which the optimizer has bound its state, and their models."""

    def __init__(
        self, models: Iterable[nn.Module], known: nn.Module | None, named: Mapping[str, Tensor], *, alone: bool
    ) -> None:
        # models: their parameters were given; known: a model of which only some parameters may have been given
        self._models = [weakref.ref(model) for model in models]
        self._known = None if known is None else weakref.ref(known)
        self._bound: dict[str, _Bound] = {}
        self._trained = any(param.requires_grad for param in named.values())
        self._alone = alone  # no other rank may have the gradients that are missing here
        self._seen: tuple[str, ...] | None = None
        self._warned_of_none = False
        self._warned_of = set[str]()
        self._steps = 0
        self.bind(named)

    @property
    def models(self) -> list[nn.Module]:
        """The known models that still exist."""
        refs = self._models if self._known is None else [*self._models, self._known]
        return [model for ref in refs if (model := ref()) is not None]

    @property
    def named(self) -> dict[str, Tensor]:
        """The bound parameters by name."""
        return {name: bound.param for name, bound in self._bound.items()}

    def names_by_tensor(self) -> dict[Tensor, str]:
        """Return the names of the bound parameters, and of the tensors that replace them in the models."""
        found = {
            now: name
            for name, bound in self._bound.items()
            if bound.slot is not None and (now := bound.slot.now()) is not None
        }
        return found | {bound.param: name for name, bound in self._bound.items()}

    def names_of_members(self, groups: Sequence[Group]) -> list[list[str]]:
        """Return the names of the tensors in groups; an unknown tensor takes the name of its position."""
        known = self.names_by_tensor()
        taken = {known[param] for group in groups for param in group["params"] if param in known}
        members: list[list[str]] = []
        for place, group in enumerate(groups):
            params, former = group["params"], group.get("param_names", ())
            names: list[str] = []
            for at, param in enumerate(params):
                name = known.get(param)
                if name is None:
                    new = f"a tensor of shape {tuple(param.shape)} is new"
                    if not former:
                        raise ValueError(f"param_groups[{place}]: {new}: add it by add_param_group")
                    if len(former) != len(params):
                        raise ValueError(
                            f"param_groups[{place}]: {len(params)} params stand in a group of {len(former)} "
                            f"param_names ({format_list(former)}), and {new}: replace each by one, or add_param_group. "
                            "Under DeepSpeed's ZeRO take muonfx.engines.deepspeed.Muon"
                        )
                    name = former[at]
                    if name in taken or name not in self._bound:
                        raise ValueError(
                            f"param_groups[{place}]: {new} in the place of {name!r}, which is "
                            f"{'elsewhere' if name in taken else 'unknown'}: put replaced parameters in the places of "
                            "the former ones, or add_param_group"
                        )
                names.append(name)
            members.append(names)
        times = Counter(name for names in members for name in names)
        if twice := [name for name, count in times.items() if count > 1]:
            raise ValueError(
                f"param_groups: {twice[0]!r} is listed {times[twice[0]]} times and would be stepped on as often: list "
                "it once"
            )
        if absent := [name for name in self._bound if name not in times]:
            raise ValueError(
                f"param_groups: {len(absent)} of {len(self._bound)} parameters were removed, such as {absent[0]!r}: "
                "put them back (add_param_group takes them too); a parameter that is not to be trained keeps its "
                "place, with requires_grad_(False) and .grad = None"
            )
        return members

    def is_bound(self, names: Sequence[str], params: Sequence[Tensor]) -> bool:
        """Return True if these are the bound parameters of these names."""
        return len(names) == len(params) and all(
            name in self._bound and self._bound[name].param is param for name, param in zip(names, params, strict=True)
        )

    def add(self, models: Iterable[nn.Module], named: Mapping[str, Tensor]) -> None:
        """Bind the parameters of an added group."""
        self._models += [weakref.ref(model) for model in models]
        self._trained = self._trained or any(param.requires_grad for param in named.values())
        self.bind(named)

    def check_real(self) -> None:
        """Raise ValueError for parameters on the meta device, which have no values to update."""
        if self._on_meta:
            _check_real(self.named)

    def compare(self, before: Mapping[str, Tensor]) -> Comparison:
        """Compare the tensors in the groups, by name, with the bound tensors, and these with those in the models."""
        later = self._in_models(before)
        named = {**before, **later}
        replaced = [name for name, param in named.items() if self._is_replaced(name, param)]
        is_swap = all(self._lies_alike(name, named[name]) for name in replaced)
        return Comparison(before, later, named, replaced, is_swap)

    def _is_replaced(self, name: str, param: Tensor) -> bool:
        """Return True if a tensor was replaced or has moved; a tensor of another shape raises ValueError."""
        bound = self._bound[name]
        if bound.param is not param and param.shape != bound.shape:
            raise ValueError(
                f"{name!r} in param_groups was replaced by a tensor of shape {tuple(param.shape)}, expected "
                f"{tuple(bound.shape)}: {CAUSES}"
            )
        return bound.param is not param or param.device != bound.device

    def _in_models(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors, by name, that have replaced bound parameters in the models."""
        found: dict[str, Tensor] = {}
        for name, param in named.items():
            bound = self._bound[name]
            # A tensor that others have put into the groups takes precedence.
            now = bound.slot.now() if bound.slot is not None and bound.param is param else None
            if now is not None and now is not param:
                found[name] = now
        if not found:
            return found
        # FSDP2 has plain parameters during a forward and backward pass; they do not count.
        sharded = [
            module
            for model in self.models
            for module in model.modules()
            if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
        ]
        gathered = {id(param) for module in sharded for param in module.parameters() if not is_dtensor(param)}
        found = {name: now for name, now in found.items() if is_dtensor(now) or id(now) not in gathered}
        # A tensor in two positions, as a tied parameter is, keeps the name that has it already.
        while True:
            times = Counter(id(found.get(name, param)) for name, param in named.items())
            if not (twice := [name for name, now in found.items() if times[id(now)] > 1]):
                return found
            for name in twice:
                del found[name]

    def _lies_alike(self, name: str, param: Tensor) -> bool:
        """Return True if a tensor has the device, dtype and sharding of the bound tensor of its name."""
        bound = self._bound[name]
        if (bound.device, bound.dtype) != (param.device, param.dtype):
            return False
        if is_dtensor(bound.param) and is_dtensor(param):
            return bound.param.device_mesh == param.device_mesh and bound.param.placements == param.placements
        return is_dtensor(bound.param) == is_dtensor(param)

    def bind(self, named: Mapping[str, Tensor]) -> None:
        """Record that these tensors have a state."""
        slots: dict[Tensor, _Slot] | None = None
        for name, param in named.items():
            old = self._bound.get(name)
            slot = None if old is None else old.slot
            if slot is None or slot.now() is not param:
                slots = self._slots() if slots is None else slots
                slot = slots.get(param)
            # No weak references: torch.utils.swap_tensors, used to convert in place, refuses tensors that have any
            self._bound[name] = _Bound(param, param.shape, param.device, param.dtype, slot)
        self._seen = None
        self._on_meta = any(bound.param.is_meta for bound in self._bound.values())

    def _slots(self) -> dict[Tensor, _Slot]:
        """Return the positions of the models' parameters."""
        found: dict[Tensor, _Slot] = {}
        for model in self.models:
            for module in model.modules():
                for leaf, param in module._parameters.items():
                    if param is not None:
                        found.setdefault(param, _Slot(weakref.ref(module), leaf))
        return found

    def check(self, named: Mapping[str, Tensor], updates: Mapping[str, Tensor | None]) -> None:
        """Check the shapes of parameters; if gradients are missing, check that the models train these parameters."""
        for name, param in named.items():
            shape = self._bound[name].shape
            if param.shape != shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(param.shape)}, {tuple(shape)} when the optimizer was made: "
                    + (FSDP1 if getattr(param, "_fsdp_flattened", False) else CAUSES)
                )
        absent = tuple(name for name, grad in updates.items() if grad is None)
        self._steps += 1
        # Walking through a model takes time: with the same gradients missing, check at steps 1, 2, 4, 8, ... only.
        if absent == self._seen and self._steps & (self._steps - 1):
            return
        self._seen = absent
        none = self._trained and len(absent) == len(updates)
        strangers = self._strangers(named)
        if strangers and none:
            self._seen = None  # check again at every step
            first = next(iter(strangers))
            is_flat = getattr(strangers[first], "_is_flat_param", False)
            raise ValueError(
                f"none of the {len(named)} parameters has a gradient, but {first!r} of the model has one and is not "
                f"among them: {FSDP1 if is_flat else CAUSES}"
            )
        is_new = not strangers.keys() <= self._warned_of
        self._warned_of |= strangers.keys()
        if is_new:
            lacking = next((name for name in absent if named[name].requires_grad), None)
            also = "" if lacking is None else f", while {lacking!r} of the optimizer has none"
            warnings.warn(
                f"{len(strangers)} parameters of the model have gradients and are not the optimizer's, such as "
                f"{next(iter(strangers))!r}{also}; they stay as they are: {CAUSES}, or add_param_group",
                stacklevel=5,
            )
        elif none and self._alone and not self._warned_of_none:
            self._warned_of_none = True
            warnings.warn(
                f"step() found no gradient on any of {len(named)} parameters and changes nothing: is backward() called "
                f"before it, on these parameters? If so: {CAUSES}",
                stacklevel=5,
            )

    def _strangers(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the models' parameters that have a gradient and are not the optimizer's."""
        ours = {id(param) for param in named.values()}
        # Of a model that only gives names, consider only parameters whose names the optimizer has.
        models = [(ref(), False) for ref in self._models]
        if self._known is not None:
            models.append((self._known(), True))
        return {
            name: param
            for model, is_known in models
            if model is not None
            for name, param in model.named_parameters()
            if id(param) not in ours and param.grad is not None and (name in named or not is_known)
        }


def _check_real(named: Mapping[str, Tensor]) -> None:
    if meta := [name for name, param in named.items() if param.is_meta]:
        raise ValueError(
            f"{meta[0]!r} is on the meta device, as are {len(meta)} of {len(named)} parameters: give them storage and "
            "values first (model.to_empty(device=...), then the weights). The optimizer finds them by name if it was "
            "given the model; else make it after that"
        )
