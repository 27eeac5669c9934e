"""Find parameters that were replaced, param groups that were edited, and gradients that are missing."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from muonfx.core.checks import all_usable, is_frozen, is_usable, warn_caller
from muonfx.optimizer.group_numbers import Group, GroupNumbers, Hyperparam, TrackedGroup
from muonfx.optimizer.named_parameters import Gradients, NamedTensors, names_in
from muonfx.optimizer.param_groups import warn_of_unread_keys
from muonfx.optimizer.update_rules import UpdateRules, distinct_rules, group_hyperparams, keys_by_label, label_of
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
    """Return the models in the argument ``params`` of an optimizer: ``params`` itself, or "params" of its groups.

    For example, ``[model]`` for ``[{"params": model, "lr": 0.1}]``, and no model for named parameters.
    """
    if isinstance(params, nn.Module):
        return [params]
    # Otherwise groups, named parameters or tensors. Of these, only a group (a dict) can contain a model.
    models: list[nn.Module] = []
    for item in params:
        if isinstance(item, dict) and isinstance(item.get("params"), nn.Module):
            models.append(item["params"])
    return models


def check_usable(named: NamedTensors, layout: Layout | None) -> None:
    """Raise ValueError if an optimizer cannot be created for these parameters.

    Examples are a matrix that FSDP1 has flattened, and a model of which only some parameters are on the meta device.
    """
    is_on_meta = all(param.is_meta for param in named.values())
    if not is_on_meta:  # a whole model on the meta device is accepted: it gets its values before the first step
        check_real(named)
    if layout is None or not layout.is_flat:  # a flat layout describes the tensors of FSDP1
        _require_not_flattened(named)


def _require_not_flattened(named: NamedTensors) -> None:
    """Raise ValueError if FSDP1 (FullyShardedDataParallel) has flattened parameters, so that matrices have no shape.

    FSDP1 copies all parameters into one flat tensor. With ``use_orig_params``, the parameters become views of it.
    """
    names_of_views: list[str] = []
    flattened_names: list[str] = []
    for name, param in named.items():
        if getattr(param, "_fsdp_flattened", False):  # FSDP1 sets this attribute of a view
            names_of_views.append(name)
        elif getattr(param, "_is_flat_param", False):  # and this one of the flat tensor
            flattened_names.append(name)
    # A sharded view has one dim. On one rank, and with NO_SHARD, views keep their shapes and can be used.
    if all(named[name].ndim < 2 for name in names_of_views):
        flattened_names += names_of_views
    if flattened_names:
        name = flattened_names[0]
        raise ValueError(
            f"{name!r} has shape {tuple(named[name].shape)}: {FSDP1}, or give these shards by "
            "layout=muonfx.sharding.flat(...)"
        )


def check_real(named: NamedTensors) -> None:
    """Raise ValueError if a parameter is on the meta device, because it has no values to update.

    Large models are often created there, without memory, and get their values when they are loaded.
    """
    names = [name for name, param in named.items() if param.is_meta]  # a meta tensor has a shape, and no memory
    if names:
        raise ValueError(
            f"{names[0]!r} is on the meta device, as are {len(names)} of {len(named)} parameters: allocate and load "
            "them first (model.to_empty(device=...), then load_state_dict). An optimizer that was given the model "
            "finds the new tensors; otherwise create the optimizer after that"
        )


class Position(NamedTuple):
    """A position in a model: a weak reference to a module, and the name of an attribute that is a parameter."""

    module: weakref.ref[nn.Module]
    attribute: str

    def current(self) -> Tensor | None:
        """Return the parameter that the module has under this name now, or None if the module was deleted."""
        module = self.module()
        if module is None:
            return None
        return module._parameters.get(self.attribute)


class TrackedParameter(NamedTuple):
    """A parameter with its shape, device and sharding at the time when its state was created or last moved."""

    param: Tensor
    shape: torch.Size
    device: torch.device
    placement: tuple[object, ...]
    position: Position | None
    """Its position in a known model, or None, as for a copy that an engine has put into the groups."""


class KnownModel(NamedTuple):
    """A model that contains parameters of an optimizer."""

    ref: weakref.ref[nn.Module]
    names: frozenset[str] | None
    """The names, also of tied parameters, under which the model has parameters of the optimizer; None if it has all."""


class TrackedParameters:
    """Records for which tensors an optimizer has state, and where its models have these parameters.

    A parameter is identified by its name. Its tensor may be replaced, in a module of a model or in a param group.

    Args:
        models: models of which the optimizer has all parameters.
        model_of_names: a model from which parameters got their names; the optimizer may have only some of its
            parameters.
        trained: the parameters in the groups, by name.
        frozen: parameters that are in no group because they are frozen.
        left_out: parameters that are in no group because they have the label None.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        model_of_names: nn.Module | None,
        trained: NamedTensors,
        frozen: NamedTensors,
        left_out: NamedTensors,
    ) -> None:
        """Record the models, and the position of each parameter in them."""
        self._models: list[KnownModel] = []
        if model_of_names is not None:
            self._add_model_of_names(model_of_names, {*trained.values(), *frozen.values(), *left_out.values()})
        self.add_models(models)
        # By name, the position of each in a model, or the tensor itself if it is in none. A position is a weak
        # reference: frozen weights may be large and must not be kept alive.
        self._frozen = self._positions_or_tensors(frozen)
        self._left_out = self._positions_or_tensors(left_out)
        self.tracked: dict[str, TrackedParameter] = {}
        """The parameters that have state, by name."""
        self._new_in_groups: dict[str, Tensor] = {}
        """New tensors of the models that the groups have already, by name, while the state is of the former ones."""
        self.version = 0
        """How often `tracked` was changed, so that `GradientCheck` searches the models again after a change."""
        self.track(trained)

    @property
    def models(self) -> list[nn.Module]:
        """The models that contain the optimizer's parameters, without models that have been deleted."""
        return [model for ref, _ in self._models if (model := ref()) is not None]

    @property
    def names(self) -> dict[Tensor, str]:
        """The name of each parameter that has state, belongs to a model, or was left out because it is frozen."""
        names = {param: name for name, param in _existing(self._frozen).items()}
        names |= names_in(self.models)
        return names | {tracked.param: name for name, tracked in self.tracked.items()}

    @property
    def on_meta(self) -> bool:
        """True if a parameter was on the meta device when its state was created, so that the state has no values."""
        # Not `tracked.param.is_meta`: after `fully_shard`, `to_empty` changes the device of the same tensor object.
        return any(tracked.device.type == "meta" for tracked in self.tracked.values())

    def add_models(self, models: Iterable[nn.Module]) -> None:
        """Record models of which the optimizer has all parameters."""
        for model in models:
            self._models.append(KnownModel(weakref.ref(model), None))

    def _add_model_of_names(self, model: nn.Module, params: Set[Tensor]) -> None:
        """Record a model from which the caller may have given only some parameters to the optimizer, ``params``.

        For example, with the weight of ``Linear(2, 3)``, but not its bias, ``{"weight"}`` is recorded. A gradient of
        the bias is then no mistake: another optimizer may train it.
        """
        all_params = list(model.named_parameters(remove_duplicate=False))  # also the second name of a tied parameter
        names = frozenset([name for name, param in all_params if param in params])
        # None means all parameters: then also one that the model gets later should be in the optimizer.
        has_others = len(names) < len(all_params)
        self._models.append(KnownModel(weakref.ref(model), names if has_others else None))

    def track(self, named: NamedTensors) -> None:
        """Record the named tensors for which the optimizer now has state, and their positions in the models.

        A position is a module with the name of its attribute, such as ``(model[0], "weight")``. If the module has
        another tensor there later, as after ``fully_shard``, this tensor has replaced the parameter.
        """
        position_of = self._positions()  # the position of each tensor in the models
        # A module may be used after the model that contained it was deleted, so positions recorded earlier count, too.
        for tracked in self.tracked.values():
            if tracked.position is None:
                continue
            param_of_module = tracked.position.current()
            if param_of_module is not None:
                position_of.setdefault(param_of_module, tracked.position)  # a position in a model takes precedence
        # Record each tensor as it is now: a later difference from this record means that it was replaced or moved.
        for name, param in named.items():
            # No weak references to tensors: torch.utils.swap_tensors, used to convert in place, rejects such tensors.
            self.tracked[name] = TrackedParameter(
                param, param.shape, param.device, _placement(param), position_of.get(param)
            )
            self._frozen.pop(name, None)  # it is trained now
            self._new_in_groups.pop(name, None)  # the state belongs to the new tensor now
        self.version += 1

    def leave_out(self, frozen: NamedTensors) -> None:
        """Record parameters that are in no group because they are frozen, to raise if they are trained later."""
        self._frozen.update(self._positions_or_tensors(frozen))

    def _positions_or_tensors(self, params: NamedTensors) -> dict[str, Position | Tensor]:
        """Return the position in a model of each parameter, or the parameter itself if it is in none.

        A position is a module with an attribute, such as ``(model[0], "weight")``. It keeps no tensor alive.
        """
        position_of = self._positions() if params else {}
        return {name: position_of.get(param, param) for name, param in params.items()}

    def _positions(self) -> dict[Tensor, Position]:
        """Return the position of each parameter of the models: its module, and the attribute such as "weight".

        A tied parameter has several positions, of which the first is returned.
        """
        position_of: dict[Tensor, Position] = {}
        for module in self._modules():
            for attribute, param in module._parameters.items():
                if param is not None:  # such as the bias of Linear(bias=False)
                    position_of.setdefault(param, Position(weakref.ref(module), attribute))
        return position_of

    def _modules(self) -> Iterator[nn.Module]:
        for model in self.models:
            yield from model.modules()

    def saved(self) -> tuple[dict[str, TrackedParameter], dict[str, Position | Tensor]]:
        """Return what `restore` needs to undo `track` and `leave_out`."""
        return dict(self.tracked), dict(self._frozen)

    def restore(self, saved: tuple[dict[str, TrackedParameter], dict[str, Position | Tensor]]) -> None:
        """Undo all changes since `saved` was called."""
        self.tracked, self._frozen = saved
        self.version += 1

    # ------------------------------------------------------------------------------------------ replaced parameters

    def are_current(self) -> bool:
        """Return True if no parameter was replaced, resized or moved, as far as the models show."""
        # After `param.data = param.data.cuda()`, the tensor object is the same, but on another device than recorded.
        for tracked in self.tracked.values():
            if tracked.param.shape != tracked.shape or tracked.param.device != tracked.device:
                return False
        # After `fully_shard(model)`, the modules have other tensor objects.
        return not self._others_in_models()

    def _others_in_models(self) -> NamedTensors:
        """Return, by name, the tensors that modules now have in place of parameters of the optimizer.

        For example, ``{"0.weight": dtensor}`` after ``fully_shard(model)``. During forward and backward, FSDP2 also
        puts gathered tensors there, which replace the parameters for a short time only.
        """
        others: dict[str, Tensor] = {}
        for name, tracked in self.tracked.items():
            if tracked.position is None:  # in no known model
                continue
            current = tracked.position.current()  # None if the module was deleted
            if current is not None and current is not tracked.param:
                others[name] = current
        return others

    def replaced(self, named: NamedTensors, *, at_step: bool) -> NamedTensors:
        """Find parameters that were replaced or moved, and return the tensor that each name has now.

        For example, ``{"0.weight": dtensor}`` after ``fully_shard(model)``, which replaces the parameters. After
        ``param.data = param.data.cuda()``, the tensor object is the same, but on another device: it is included, too.
        The caller moves the optimizer state to these tensors.

        Args:
            named: the parameters in the param groups.
            at_step: True before a step, which needs gradients of the new tensors: raise if only the replaced ones
                have them.
        """
        # The tensor of each name now: the model's, if it has another one, else the tensor in the groups.
        current = {**named, **self._replaced_in_models(named)}
        if at_step:
            self._require_new_gradients(current)
        replaced: dict[str, Tensor] = {}
        for name, param in current.items():
            tracked = self.tracked[name]  # the parameter as it was when its state was created
            if param.shape != tracked.shape:  # the state has the former shape, and cannot be converted
                cause = FSDP1 if getattr(param, "_fsdp_flattened", False) else CAUSES
                raise ValueError(
                    f"{name!r} has shape {tuple(param.shape)}, expected {tuple(tracked.shape)}, as at construction: "
                    f"{cause}"
                )
            if tracked.param is not param or param.device != tracked.device:
                replaced[name] = param
        return replaced

    def _require_new_gradients(self, current: NamedTensors) -> None:
        """Raise if parameters were replaced after the backward pass, so that only the former tensors have gradients.

        For example, ``fully_shard(model)`` was called between ``loss.backward()`` and ``optimizer.step()``. ``current``
        has the tensors that the groups and models have now, by parameter name.
        """
        without_gradient: list[str] = []
        for name, param in current.items():
            former_param = self.tracked[name].param
            is_replaced = former_param is not param
            if is_replaced and former_param.grad is not None and param.grad is None:
                without_gradient.append(name)
        if not without_gradient:  # nothing was replaced, or the backward pass was after it
            return
        # If other parameters have gradients, only warn: the former tensors may have theirs from the last step.
        if all(param.grad is None for param in current.values()):
            raise ValueError(
                f"{without_gradient[0]!r} of the model was replaced between backward() and step(), and its gradient "
                "belongs to the former tensor: replace parameters before the backward pass"
            )
        warn_caller(
            f"{without_gradient[0]!r} has no gradient and is not updated, but the tensor that it has replaced has one: "
            "replace parameters before backward(), not between it and step()"
        )

    def have_same_placement(self, replaced: NamedTensors) -> bool:
        """Return True if each new tensor has the device, dtype and sharding of the parameter that it replaces."""
        return all(self.tracked[name].placement == _placement(param) for name, param in replaced.items())

    def replaced_in_models(self) -> dict[Tensor, Tensor]:
        """Return a dict from each tensor in the param groups that was replaced in the models to the new tensor.

        For example, ``{weight: dtensor}`` after ``fully_shard(model)``. The caller puts the new tensors into the
        groups, where users expect the parameters of the model. The state moves to them later, such as at the next step.
        """
        param_of: dict[str, Tensor] = {}  # the tensor in the groups, by name
        for name, tracked in self.tracked.items():
            # An earlier call may have put a new tensor there, which itself was replaced since.
            param_of[name] = self._new_in_groups.get(name, tracked.param)
        new_param_of = self._replaced_in_models(param_of)
        # The groups now have tensors that have no state yet: remember that they are the model's, not an engine's.
        self._new_in_groups.update(new_param_of)
        return {param_of[name]: new_param for name, new_param in new_param_of.items()}

    def _replaced_in_models(self, named: NamedTensors) -> NamedTensors:
        """Return, by name, the tensors that have replaced parameters in the models since the last `track`.

        ``named`` are the tensors in the param groups. A tensor of a model is left out in three cases:

        - An engine has put its own copy of the parameter into the groups, which takes precedence.
        - FSDP2 has put a gathered tensor there for the time of forward and backward.
        - The tensor would be in the groups twice.
        """
        others = self._others_in_models()
        if not others:  # usually; the search for gathered tensors walks through the models
            return {}
        gathered_ids = self._gathered_by_fsdp2()
        replaced: dict[str, Tensor] = {}
        for name, new_param in others.items():
            param_in_groups = named.get(name)
            # The tensor in the groups has the state, or is a new one from the model, or is the copy of an engine.
            is_tracked = param_in_groups is self.tracked[name].param
            is_new_in_groups = name in self._new_in_groups and param_in_groups is self._new_in_groups[name]
            is_from_engine = not is_tracked and not is_new_in_groups
            if not is_from_engine and id(new_param) not in gathered_ids:
                replaced[name] = new_param
        _remove_tied(replaced, named)  # the third case
        return replaced

    def _gathered_by_fsdp2(self) -> set[int]:
        """Return the ids of the tensors that FSDP2 has put into modules for the time of forward and backward.

        FSDP2 gathers the shards of a parameter there, and puts the sharded parameter, a DTensor, back afterwards. So a
        plain tensor in such a module is a gathered one.
        """
        gathered_ids: set[int] = set()
        for module in self._modules():
            # `fully_shard` adds FSDPModule to the bases of a module's class. Found by name, to import no FSDP here.
            class_names = [base.__name__ for base in type(module).__mro__]
            if "FSDPModule" in class_names:
                gathered_ids.update([id(param) for param in module.parameters() if not is_dtensor(param)])
        return gathered_ids

    def added_in(self, groups: Iterable[Group]) -> NamedTensors:
        """Return, by name, the parameters of the models that somebody has put into the groups, and that have no state.

        For example, Lightning assigns ``optimizer.param_groups`` when a run with unfrozen layers is resumed. The groups
        then have the weight of a layer that was frozen so far, and the result is ``{"0.weight": weight}``.
        """
        known_params = {tracked.param for tracked in self.tracked.values()}
        unknown_params = [param for group in groups for param in group["params"] if param not in known_params]
        if not unknown_params:  # usually; to look up names takes time
            return {}
        name_of = self.names
        added: dict[str, Tensor] = {}
        for param in unknown_params:
            name = name_of.get(param)
            # A tensor that has replaced a parameter has no name yet, or the name of a parameter with state.
            if name is not None and name not in self.tracked:
                added[name] = param
        return added

    def names_of(self, groups: Iterable[Group]) -> list[list[str]]:
        """Return the names of the parameters in each group, such as ``[["0.weight"], ["0.bias"]]``.

        Somebody has edited the groups: a new tensor gets the name of the tensor that it replaces. Raise ValueError if a
        tensor replaces no parameter, or if a parameter is in the groups twice or not at all.
        """
        name_of: dict[Tensor, str] = {}
        for name, param in self._others_in_models().items():  # the models have it in place of a parameter
            name_of[param] = name
        # After the new tensors, because a tied one may have state itself: it keeps the name of its state.
        for name, tracked in self.tracked.items():
            name_of[tracked.param] = name
        names_per_group = [self._names_in(index, group, name_of) for index, group in enumerate(groups)]
        self._require_each_once(Counter(itertools.chain(*names_per_group)))
        return names_per_group

    def _require_each_once(self, times: Mapping[str, int]) -> None:
        """Raise ValueError unless each parameter is in the groups once, after somebody has edited them.

        ``times`` is how often each name is there: ``{"0.weight": 1, "0.bias": 2}``.
        """
        for name, count in times.items():
            if count > 1:
                raise ValueError(
                    f"param_groups: {name!r} is listed {count} times and would be updated as often: list it once; a "
                    "new tensor takes the name of its place in param_names"
                )
        # Each parameter that has state must be in a group.
        removed = [name for name in self.tracked if name not in times]
        if removed:
            raise ValueError(
                f"param_groups: {len(removed)} of {len(self.tracked)} parameters were removed, such as {removed[0]!r}: "
                "put them back; to stop training a parameter, set requires_grad_(False) and .grad = None"
            )

    def _names_in(self, index: int, group: Group, name_of: Mapping[Tensor, str]) -> list[str]:
        """Return the names of the parameters in a group that was edited; raise ValueError if a tensor has no name.

        A new tensor has the name at its position in "param_names": it replaces the parameter that was there. For
        example, ``{"params": [weight, new], "param_names": ["w", "b"]}`` gives ``["w", "b"]``.

        Args:
            index: the index of the group in ``param_groups``, for the message.
            group: the group.
            name_of: the names of the tensors that are parameters already.
        """
        params: list[Tensor] = list(group["params"])
        former_names: list[str] = list(group.get("param_names", ()))
        # The names belong to the tensors only if there is one for each, and each is of a parameter of the optimizer.
        has_name_for_each = len(former_names) == len(params) and self.tracked.keys() >= set(former_names)
        names: list[str] = []
        for position, param in enumerate(params):
            if param in name_of:  # a known tensor has its name at any position, so that users can move it
                names.append(name_of[param])
            elif has_name_for_each:
                names.append(former_names[position])
            else:
                raise ValueError(
                    f"param_groups[{index}]: found a new tensor of shape {tuple(param.shape)} and {len(params)} "
                    f"params, expected {len(former_names)}, one for each of param_names: keep a replaced parameter at "
                    "its position, and add others with add_param_group. Under DeepSpeed's ZeRO use "
                    "muonfx.engines.deepspeed.Muon"
                )
        return names

    # ---------------------------------------------------------------------------------- parameters that are in no group

    def not_trained_params(self) -> NamedTensors:
        """Return the parameters that were given to the optimizer and are in no group, by name."""
        return {**_existing(self._left_out), **_existing(self._frozen)}

    def not_trained(self) -> set[str]:
        """Return the names of parameters that are known, but have no state, as they are frozen or have label None."""
        return {*self._frozen, *self._left_out, *names_in(self.models).values()} - self.tracked.keys()

    def check_frozen(self) -> None:
        """Raise if a parameter that was frozen at construction is trained now, because it is in no group.

        Without the error, a run that unfreezes layers after some epochs would not train them.
        """
        for name, param in _existing(self._frozen).items():
            # Not frozen any more, and used by the loss. Without a gradient, a step would not change it anyway.
            if param.requires_grad and param.grad is not None:
                raise ValueError(
                    f"{name!r} has a gradient, but it was frozen when the optimizer was created, and is in no group: "
                    "call optimizer.add_param_group({'params': [...]}) with it, or, if a scheduler of the groups "
                    "exists already, call requires_grad_() on it before the optimizer is created, and freeze it "
                    "afterwards, as for adapters of PEFT that are selected later. If another optimizer trains "
                    "it, give it the label None, or leave it out of this optimizer's parameters"
                )

    def outside(self, named: NamedTensors) -> NamedTensors:
        """Return the models' parameters, by name, that are not in the optimizer. ``named`` are those that are.

        For example, the weight of a layer that was added to the model after the optimizer was created. If the optimizer
        was given only some parameters of a model, this returns only tensors that have their names.
        """
        known_ids = {id(param) for param in named.values()}
        outside: dict[str, Tensor] = {}
        for ref, names_of_model in self._models:
            model = ref()
            if model is None:  # it was deleted
                continue
            for name, param in model.named_parameters():
                if id(param) in known_ids or name in self._left_out:  # in the optimizer, or left out by its label
                    continue
                has_all = names_of_model is None  # the optimizer was given all parameters of this model
                # A known name with an unknown tensor: the parameter was replaced. Other names may be another
                # optimizer's, unless this one was given the whole model.
                if has_all or name in names_of_model or name in named:
                    outside[name] = param
        return outside


def _remove_tied(replaced: dict[str, Tensor], named: NamedTensors) -> None:
    """Remove tensors that would be in the param groups twice, so that a step would update them twice.

    For example, ``model.head.weight = model.embedding.weight`` ties two parameters. The head's name would get the
    tensor that the groups have for the embedding, so it keeps its former tensor instead: "head.weight" is removed from
    ``replaced``, in place.

    Args:
        replaced: the new tensors by parameter name.
        named: the tensors in the groups by parameter name.
    """
    while True:
        # How often each tensor would be in the groups with the replacements.
        times = Counter(id(replaced.get(name, param)) for name, param in named.items())
        tied = [name for name, param in replaced.items() if times[id(param)] > 1]
        if not tied:
            return
        for name in tied:
            del replaced[name]
        # A parameter that has its former tensor again may have this in common with another replacement: check again.


def _existing(positions_or_tensors: Mapping[str, Position | Tensor]) -> NamedTensors:
    """Return parameters by name, from tensors or positions in models. Parameters of a deleted model are left out."""
    existing: dict[str, Tensor] = {}
    for name, position_or_tensor in positions_or_tensors.items():
        param = position_or_tensor.current() if isinstance(position_or_tensor, Position) else position_or_tensor
        if param is not None:
            existing[name] = param
    return existing


def _placement(param: Tensor) -> tuple[object, ...]:
    """Return the device and dtype of a parameter, and how a DTensor is sharded over ranks, to compare them."""
    if is_dtensor(param):
        return (param.device, param.dtype, param.device_mesh, param.placements)
    return (param.device, param.dtype)


_EQUAL_STEPS = 10
"""After this many steps at one rate below all requested rates, it is no longer the first or last step of a schedule."""

_NEGLIGIBLE = 0.01
"""Rates below this part of the requested ones are minima, such as ``min_lr`` of ReduceLROnPlateau, and hardly train."""


class TrackedGroups:
    """Records the param groups from which the steps of an optimizer read the hyperparameters.

    Args:
        parameters: the parameters of the optimizer, from which the names of tensors in the groups are read.
    """

    def __init__(self, parameters: TrackedParameters) -> None:
        """Begin without groups: `record` sets them."""
        self.groups: list[TrackedGroup] = []
        """The groups as `record` has recorded them."""
        self._parameters = parameters
        self._key_counts: list[int] = []
        """How many keys each group had when the keys were last read."""
        self._reported = set[str]()
        """The keys of which a warning was given."""
        self._has_warned_of_rate = False
        """True after the warning of an "lr" that no transform reads."""
        self._requested_rates: list[float] = []
        """The learning rates of the groups at construction, if these differ, until the warning of one rate."""
        self._rates_have_differed = False
        """True after a step with different learning rates."""
        self._equal_steps = 0
        """How many steps in succession had one rate in all groups, as `_is_low_rate_kept` counts them."""
        self._last_equal_rate: float | None = None
        """The rate that all groups had in the last of these steps."""

    @property
    def named(self) -> NamedTensors:
        """A dict from name to parameter, for the parameters that have optimizer state, in the order of the groups."""
        tracked_parameters = self._parameters.tracked
        named: dict[str, Tensor] = {}
        for tracked in self.groups:
            for name in tracked.names:
                named[name] = tracked_parameters[name].param
        return named

    def are_current(self, groups: Sequence[Group]) -> bool:
        """Return True if no parameter was replaced, resized or moved, in the param groups or in the models."""
        return self._are_recorded(groups) and self._parameters.are_current()

    def _are_recorded(self, groups: Sequence[Group]) -> bool:
        """Return True if the param groups are as `record` recorded them: the same dicts, parameters and names."""
        if len(groups) != len(self.groups):  # a group was added or removed
            return False
        params: list[Tensor] = []
        for group, tracked in zip(groups, self.groups, strict=True):
            if group is not tracked.group or group.get("param_names") != tracked.names:  # another dict, or renamed
                return False
            if len(group["params"]) != len(tracked.names):  # compared before the tensors, to pair these correctly
                return False
            params += group["params"]
        return all(map(is_, params, self.named.values()))  # each parameter is the same tensor object

    def record(self, groups: Iterable[Group], rules: UpdateRules) -> None:
        """Record the param groups from which later steps read the hyperparameters, such as "lr" and "momentum".

        ``rules`` has, for each parameter name, the transforms that update it and their hyperparameters.
        """
        tracked_groups: list[TrackedGroup] = []
        for group in groups:
            names: list[str] = list(group["param_names"])
            # Usually one. The parameters of a group with the labels "muon" and "adamw" have two.
            distinct = distinct_rules(names, rules)
            numbers = self._numbers_of(group, names, group_hyperparams(distinct, group))
            # A key of one label has no effect if there is one for all: "weight_decay" replaces "adamw.weight_decay".
            for key in keys_by_label(distinct).difference(numbers.keys):
                group.pop(key, None)
            tracked_groups.append(TrackedGroup(group, names, numbers))
        self.groups = tracked_groups
        self._key_counts = []  # the next step reads the keys of all groups

    def _numbers_of(self, group: Group, names: Sequence[str], hyperparams: tuple[Hyperparam, ...]) -> GroupNumbers:
        """Return the object that reads the hyperparameters of a param group at every step.

        If an object has read the group so far, for the same ``hyperparams``, return a copy of it. The copy has the
        numbers of the last step, which show whether the user has changed "momentum" or "betas" since.
        """
        former_numbers = self._former_numbers(group, names)
        if former_numbers is None or former_numbers.hyperparams != hyperparams:  # a new group, or it has other keys now
            return GroupNumbers(hyperparams)
        return copy.copy(former_numbers)

    def _former_numbers(self, group: Group, names: Sequence[str]) -> GroupNumbers | None:
        """Return the object that has read the hyperparameters of a group so far; None for a group of new parameters."""
        # Usually the dict in `param_groups` is the object that was recorded.
        for tracked in self.groups:
            if tracked.group is group:
                return tracked.numbers
        # An engine may have put new dicts into `param_groups`: find the group by its first parameter.
        for tracked in self.groups:
            if names and names[0] in tracked.names:
                return tracked.numbers
        return None

    def follow(self, groups: Sequence[Group], rules: UpdateRules) -> None:
        """Use param groups that a user or engine has edited, such as after a parameter was moved to another group.

        ``rules`` has the transforms of each parameter, by name. Raise ValueError, before any change, if a tensor is of
        no parameter, or if a group lacks hyperparameters.
        """
        if self._are_recorded(groups):  # not edited
            return
        # 1. Check all groups before any is changed.
        names_per_group = self._parameters.names_of(groups)
        for group, names in zip(groups, names_per_group, strict=True):
            _require_all_hyperparams(group, names, rules)
        # 2. Add the entries that a group of an optimizer must have.
        for group, names in zip(groups, names_per_group, strict=True):
            group["params"] = list(group["params"])
            group["param_names"] = names
            group.setdefault("label", label_of(distinct_rules(names, rules)))
        # 3. Later steps read these groups.
        self.record(groups, rules)

    def read_new_keys(self, rules: UpdateRules) -> None:
        """Read keys that somebody has added to the groups. Warn once of a misspelt one, such as "weight_dacay".

        ``rules`` has the transforms and hyperparameters of each parameter, by name.
        """
        if self._count_keys() == self._key_counts:  # a step only counts the keys, which is faster than comparing them
            return
        # A group of several labels may now have a key, such as "weight_decay", that sets the numbers of all.
        self.record([tracked.group for tracked in self.groups], rules)
        self._key_counts = self._count_keys()  # again, because `record` may have removed keys
        # Warn of each key that no transform reads, with the key that was perhaps intended.
        all_keys = set[str]().union(*[tracked.numbers.keys for tracked in self.groups])
        for tracked in self.groups:
            first_name = tracked.names[0] if tracked.names else "no parameter"
            # A scheduler may write a hyperparameter of some groups into all groups, as OneCycleLR does: do not warn.
            reported_or_known = self._reported | all_keys
            new_entries = {key: value for key, value in tracked.group.items() if key not in reported_or_known}
            self._reported.update(warn_of_unread_keys(new_entries, first_name, set(tracked.numbers.keys), all_keys))

    def warn_of_unread_rate(self) -> None:
        """Warn once if a group has an "lr" that somebody has set, and no transform of any group reads it.

        For example, the rate is a schedule of the transform, and a scheduler of torch sets "lr" in vain.
        """
        # If a transform of one group reads "lr", a scheduler may write it into all groups.
        if self._has_warned_of_rate or any("lr" in tracked.numbers.keys for tracked in self.groups):
            return
        for index, tracked in enumerate(self.groups):
            rate = tracked.group["lr"]
            is_set = not isinstance(rate, Tensor) and rate != 0.0  # 0.0 is the value for groups without a rate
            has_scheduler = "initial_lr" in tracked.group  # which a scheduler adds
            if is_set or has_scheduler:
                self._has_warned_of_rate = True
                warn_caller(
                    f"param_groups[{index}]: 'lr' is {rate!r}, expected no value: the chain has a schedule or no "
                    "learning rate, and ignores it. To set the rate in groups, create the chain with a number as "
                    "learning rate"
                )
                return

    def note_rates(self) -> None:
        """Record the learning rates of the groups at construction, for `warn_of_one_rate`."""
        rates = self._rates()
        if len(set(rates)) > 1:
            self._requested_rates = rates

    def warn_of_one_rate(self) -> None:
        """Warn once if groups that were made with different learning rates have the same.

        For example, the rates were 0.02 and 0.001, and a scheduler has written 0.001 into both. A rate below all of
        them is accepted for some steps: a warmup may start there, and CosineAnnealingLR ends all groups at ``eta_min``.
        """
        if not self._requested_rates:  # the groups were made with one rate, or a warning was given
            return
        rates = self._rates()
        if len(rates) < 2:  # nothing to compare
            return
        if len(set(rates)) > 1:  # they differ, as they should
            self._rates_have_differed = True
            self._equal_steps = 0
            return
        rate = rates[0]
        smallest = min(self._requested_rates)
        if rate < smallest and not self._is_low_rate_kept(rate, smallest):
            return
        requested = ", ".join([f"{requested_rate:g}" for requested_rate in self._requested_rates])
        self._requested_rates = []
        warn_caller(
            f"param_groups: all groups have the learning rate {rate:g}, expected different rates, because they were "
            f"made with {requested}. A scheduler, a callback or a search for a rate may have written one number into "
            "all groups: give it one number for each group, in the order of param_groups"
        )

    def _is_low_rate_kept(self, rate: float, smallest: float) -> bool:
        """Count a step at which all groups have one rate below all requested rates; return True if there were enough.

        For example, SWALR brings all groups to one ``swa_lr``, and keeps them there. ``smallest`` is the smallest
        requested rate.
        """
        if rate < _NEGLIGIBLE * smallest:
            return False
        # A warmup that changes once an epoch has one rate in the whole first epoch. So before the rates have differed,
        # only new values count.
        is_new_rate = rate != self._last_equal_rate
        self._last_equal_rate = rate
        if self._rates_have_differed or is_new_rate:
            self._equal_steps += 1
        return self._equal_steps >= _EQUAL_STEPS

    def _rates(self) -> list[float]:
        """Return the learning rates that transforms read, such as ``[0.02, 0.001]`` for two groups.

        Groups without parameters are left out, and so are tensors on other devices than CPUs, which reading would sync.
        """
        rates: list[float] = []
        for tracked in self.groups:
            if "lr" not in tracked.numbers.keys or not tracked.names:
                continue
            rate = tracked.group.get("lr")
            if isinstance(rate, int | float) or (isinstance(rate, Tensor) and rate.is_cpu):
                rates.append(float(rate))
        return rates

    def _count_keys(self) -> list[int]:
        """Return the number of keys in each group."""
        return [len(tracked.group) for tracked in self.groups]


def _require_all_hyperparams(group: Group, names: Sequence[str], rules: UpdateRules) -> None:
    """Raise if parameters were moved into a group that lacks the hyperparameters of the transforms that update them.

    For example, a parameter of AdamW was moved into a group of Muon, which has "momentum" and no "betas".

    Args:
        group: the param group.
        names: the names of the parameters that it has now.
        rules: the transforms and hyperparameters of each parameter, by name.
    """
    distinct = distinct_rules(names, rules)  # without repetitions, such as the rules of "muon" and "adamw"
    # A group of one rule that lacks a key gets a message about this key when its numbers are read.
    if len(distinct) < 2 or all(hyperparam.key in group for hyperparam in group_hyperparams(distinct, group)):
        return
    # The message shows two parameters that different transforms update.
    first = names[0]
    others = [name for name in names if rules[name] != rules[first]]
    raise ValueError(
        f"param_groups: {first!r} (label {rules[first].label!r}) and {others[0]!r} (label {rules[others[0]].label!r}) "
        "are in one group, but different transforms update them, and the group lacks hyperparameters of one: recreate "
        "the optimizer to change a label, or add_param_group to add parameters"
    )


class GradientCheck:
    """Raises or warns if gradients are missing, but parameters of a model that are not in the optimizer have some.

    Args:
        parameters: the parameters of the optimizer, and the models that contain them.
        is_alone: True in one process, where no other rank has the gradients that are missing here.
    """

    def __init__(self, parameters: TrackedParameters, *, is_alone: bool) -> None:
        """Prepare the check. The first call of `check` searches the models."""
        _count_registrations()  # `_search_outside` repeats its search after a module got a new parameter
        self._parameters = parameters
        self._is_alone = is_alone
        self._outside: NamedTensors = {}
        """The models' parameters that are not in the optimizer, by name, from the last search of the models."""
        self._last_changes: object = None
        """The values of `_changes` at the last search; if a step has the same, `_outside` is still right."""
        self._module_lists: list[weakref.ref[nn.Module]] = []
        """The lists of modules in the models: `ModuleList.insert` does not register the module that it inserts."""
        self._reported: dict[str, Tensor] = {}
        """Those of `_outside` that had gradients, and that a warning has reported."""
        self._has_warned_of_none = False
        """True after the warning that no parameter has a gradient."""

    def check(self, named: NamedTensors, gradients: Gradients) -> None:
        """Raise or warn, before a step, if gradients are missing, because the step would not train the model.

        The usual cause: the model got new parameters after the optimizer was created, and backward() fills the
        gradients of these.

        Args:
            named: the parameters of the optimizer.
            gradients: the gradient of each, or None.
        """
        check_real(named)
        self._parameters.check_frozen()
        # Parameters of the models that are not in the optimizer. The search takes time, so it follows a change only.
        without_gradient = tuple([name for name, gradient in gradients.items() if gradient is None])
        if self._changes(without_gradient) != self._last_changes:
            self._search_outside(named, without_gradient)
        outside_with_gradient = {name: param for name, param in self._outside.items() if param.grad is not None}
        # An error if only such parameters have gradients; a warning if parameters of the optimizer have some, too.
        has_no_gradient = len(without_gradient) == len(gradients)  # no parameter of the optimizer has one
        if has_no_gradient and outside_with_gradient:
            raise _only_outside(outside_with_gradient, len(named))
        self._warn_of_outside(outside_with_gradient)
        if has_no_gradient and self._is_alone:  # over ranks, the step finds out whether another rank has one
            self.warn_of_none(named)

    def _search_outside(self, named: NamedTensors, without_gradient: tuple[str, ...]) -> None:
        """Search the models for parameters that are not in the optimizer, and set `_outside` to them.

        Also record the values of `_changes`, so that the search is repeated only after a change of the models.
        """
        self._outside = self._parameters.outside(named)
        # `insert` of these lists adds a module without an assignment that a hook of torch could count.
        self._module_lists = []
        for model in self._parameters.models:
            for module in model.modules():
                if isinstance(module, nn.ModuleList | nn.Sequential):
                    self._module_lists.append(weakref.ref(module))
        self._last_changes = self._changes(without_gradient)  # with the lengths of these lists

    def _changes(self, without_gradient: tuple[str, ...]) -> tuple[object, ...]:
        """Return values that differ from those of the last search if a model may have got a new parameter since.

        This is faster than another search. The values are:

        - the names of the parameters without gradient, because a parameter that was replaced has none
        - how often the parameters of the optimizer have changed
        - how often any module got a parameter or module by assignment
        - the lengths of the module lists, because ``ModuleList.insert`` is no such assignment
        """
        lengths: list[int] = []
        for ref in self._module_lists:
            module = ref()
            if module is not None:
                lengths.append(len(module._modules))
        return without_gradient, self._parameters.version, _registrations["assigned"], lengths

    def _warn_of_outside(self, with_gradient: NamedTensors) -> None:
        """Warn of parameters that have a gradient and are not in the optimizer, once for each of them."""
        # Without parameters of earlier warnings. A name is reported again if the model has another tensor for it now.
        unreported = [name for name, param in with_gradient.items() if self._reported.get(name) is not param]
        self._reported.update(with_gradient)
        if unreported:
            warn_caller(
                f"{len(with_gradient)} parameters of the model have gradients and are not in the optimizer, such as "
                f"{unreported[0]!r}; they are not updated: {CAUSES}, or use add_param_group"
            )

    def warn_of_none(self, named: NamedTensors) -> None:
        """Warn once that no parameter has a gradient, so that a step changes nothing.

        The usual causes are a forgotten backward(), and a loss of detached tensors. Over ranks, the caller has found
        that no rank has a gradient.
        """
        is_trained = any(not is_frozen(param) for param in named.values())  # at least one parameter
        if self._has_warned_of_none or not is_trained:  # frozen parameters need no gradient
            return
        self._has_warned_of_none = True
        # Over ranks, the message names one more cause, and says that no rank has a gradient.
        parameters = f"{len(named)} parameters"
        cause_over_ranks = ""
        if not self._is_alone:
            parameters += " on any rank"
            cause_over_ranks = "Was model.set_requires_gradient_sync(False) left on? "
        warn_caller(
            f"step() found no gradient on any of {parameters} and changes nothing: is backward() called before it, on "
            f"these parameters? {cause_over_ranks}Tensors of state_dict() and detach() get no gradient. Else: {CAUSES}"
        )


def _only_outside(outside_with_gradient: NamedTensors, number: int) -> ValueError:
    """Return an error for a step in which only parameters outside of the optimizer have gradients.

    ``number`` is how many parameters the optimizer has.
    """
    name, param = next(iter(outside_with_gradient.items()))
    cause = FSDP1 if getattr(param, "_is_flat_param", False) else CAUSES
    return ValueError(
        f"none of the {number} parameters has a gradient, but {name!r} of the model has one and is not "
        f"among them: {cause}"
    )


def require_dense_and_real(gradients: Gradients) -> None:
    """Raise TypeError if a gradient is sparse or complex: transforms accept neither.

    For example, ``Embedding(sparse=True)`` has sparse gradients.
    """
    if all_usable(gradients.values()):  # one pass without names, as at almost every step
        return
    # At least one is not usable: find its name for the message.
    for name, grad in gradients.items():
        if grad is not None and not is_usable(grad):
            raise TypeError(
                f"the gradient of {name!r} must be dense and real, found {grad.layout}, {grad.dtype}: use "
                "Embedding(sparse=False), or give the parameter the label None and another optimizer, such as "
                "torch.optim.SparseAdam"
            )


_registrations = Counter[str]()
"""How often a parameter or a module was assigned to a module, of any model, under the key "assigned"."""


def _count_registration(*_: object) -> None:
    if torch.compiler.is_compiling():  # a graph that reads the count would be compiled again whenever it changes
        return
    _registrations["assigned"] += 1


@cache
def _count_registrations() -> None:
    """Let `_registrations` count from now on, in all models of this process."""
    register_module_parameter_registration_hook(_count_registration)
    register_module_module_registration_hook(_count_registration)
