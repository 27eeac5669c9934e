"""Record for which tensors an optimizer has state, and find those that have replaced them in a model or in groups.

Also raise or warn of gradients with which a step would not train the model: missing, sparse or complex ones.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from muonfx.core.checks import all_usable, is_frozen, is_usable, warn_caller
from muonfx.optimizer.group_numbers import Group
from muonfx.optimizer.named_parameters import Gradients, NamedTensors, names_in
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards.dtensors import is_dtensor
from muonfx.tree.elementwise import wide_dtype

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
    # These are groups, named parameters or tensors. Only a group (a dict) can contain a model.
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
    # A whole model on the meta device is accepted: it gets its values before the first step.
    if not is_on_meta:
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
    # A meta tensor has a shape, and no memory.
    names = [name for name, param in named.items() if param.is_meta]
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
        if module is None or self.attribute not in module._parameters:
            return None
        # TorchScript's mapping of parameters has no method `get`
        return module._parameters[self.attribute]

    def in_copy(self, copies: Mapping[int, Any]) -> Position | None:
        """Return the position in the copy of the module, or None if there is none. ``copies`` is by ``id``."""
        module = self.module()
        if module is None or id(module) not in copies:
            return None
        return Position(weakref.ref(copies[id(module)]), self.attribute)


class KeptParameter(NamedTuple):
    """A parameter that is in no known model, and so has no `Position` from which it could be read later."""

    param: Tensor

    def current(self) -> Tensor:
        """Return the parameter itself, which nothing can replace."""
        return self.param

    def in_copy(self, copies: Mapping[int, Any]) -> KeptParameter | None:
        """Return the copy of the parameter, or None if there is none. ``copies`` is by ``id``."""
        if id(self.param) not in copies:
            return None
        return KeptParameter(copies[id(self.param)])


Source = Position | KeptParameter
"""From where the current tensor of a parameter is read."""


class TrackedParameter(NamedTuple):
    """A parameter with its shape, device, dtype and sharding when its state was created or last moved."""

    param: Tensor
    shape: torch.Size
    device: torch.device
    dtype: torch.dtype
    sharding: object
    """The mesh and the placements of a DTensor, or None for a plain tensor."""
    position: Position | None
    """Its position in a known model, or None, as for a copy that an engine has put into the groups."""

    def fits_state_of(self, param: Tensor) -> bool:
        """Return True if ``param`` has the device, dtype and sharding for which the state was created."""
        return (
            self.device == param.device
            and self.dtype == param.dtype
            and self.sharding == _sharding(param)
        )


class KnownModel(NamedTuple):
    """A model that contains parameters of an optimizer."""

    ref: weakref.ref[nn.Module]
    names: frozenset[str] | None
    """The names of the parameters that the optimizer was given, also of tied ones; None if it was given all."""


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
        """Record the models and the parameters: ``trained``, ``frozen``, and ``left_out`` because of the label None.

        The optimizer has all parameters of ``models``, but perhaps not all of ``model_of_names``, which gave the names.
        """
        self._models: list[KnownModel] = []
        if model_of_names is not None:
            self._add_model_of_names(
                model_of_names, {*trained.values(), *frozen.values(), *left_out.values()}
            )
        self.add_models(models)
        self.tracked: dict[str, TrackedParameter] = {}
        """The parameters that have state, by name."""
        self._frozen = self._sources_of(frozen)
        """Where the frozen parameters are, by name. It keeps no weights of a model alive, which may be large."""
        self._left_out = self._sources_of(left_out)
        """The same for the parameters with the label None."""
        self._put_in_groups: dict[str, Tensor] = {}
        """The tensor that the optimizer has put into its groups for each parameter, by name.

        It is the one that has state or, until the state moves, a newer one of a model. Others are of an engine.
        """
        self.version = 0
        """How often `tracked` was changed, so that `GradientCheck` searches the models again after a change."""
        self.follows_dtypes = True
        """True if the state follows a parameter that is converted, as by ``model.double()``. False over ranks.

        A rank may have converted it alone, and would wait for the others where the state moves.
        """
        self._has_warned_of_converted = False
        self.track(trained)

    @property
    def models(self) -> list[nn.Module]:
        """The models that contain the optimizer's parameters, without models that have been deleted."""
        models: list[nn.Module] = []
        for known_model in self._models:
            model = known_model.ref()
            if model is not None:
                models.append(model)
        return models

    @property
    def names(self) -> dict[Tensor, str]:
        """The name of each parameter that has state, belongs to a model, or was left out because it is frozen."""
        names = {param: name for name, param in _existing(self._frozen).items()}
        names |= names_in(self.models)
        return names | {tracked.param: name for name, tracked in self.tracked.items()}

    @property
    def on_meta(self) -> bool:
        """True if a parameter was on the meta device when its state was created, so that the state has no values."""
        # `tracked.param.is_meta` may be False now: after `fully_shard`, `to_empty` changes the device of the same
        # object.
        return any(tracked.device.type == "meta" for tracked in self.tracked.values())

    def add_models(self, models: Iterable[nn.Module]) -> None:
        """Record models of which the optimizer has all parameters."""
        for model in models:
            self._models.append(KnownModel(weakref.ref(model), names=None))

    def _add_model_of_names(self, model: nn.Module, params: Set[Tensor]) -> None:
        """Record a model from which the caller may have given only some parameters to the optimizer, ``params``.

        For example, with the weight of ``Linear(2, 3)``, but not its bias, ``{"weight"}`` is recorded. A gradient of
        the bias is then no mistake: another optimizer may train it.
        """
        has_all = True
        names: set[str] = set()
        # The names include the second name of a tied parameter.
        for name, param in model.named_parameters(remove_duplicate=False):
            if param in params:
                names.add(name)
            else:
                has_all = False
        if has_all:  # then also a parameter that the model gets later should be in the optimizer
            self.add_models([model])
        else:
            self._models.append(KnownModel(weakref.ref(model), frozenset(names)))

    def follow_copies(self, original: TrackedParameters, copies: Mapping[int, Any]) -> None:
        """Record the models of another record that were copied, and where the copied parameters are in them.

        ``copies`` has the copy of each object by its ``id``, as the memo of ``copy.deepcopy`` does. A copied module may
        be incomplete, if the optimizer is an attribute of the model that is copied, so no model is searched.
        """
        for known_model in original._models:
            model = known_model.ref()
            if model is not None and id(model) in copies:
                self._models.append(known_model._replace(ref=weakref.ref(copies[id(model)])))
        for name, tracked in original.tracked.items():
            if tracked.position is not None:
                self.tracked[name] = self.tracked[name]._replace(
                    position=tracked.position.in_copy(copies)
                )
        self._frozen = _in_copies(original._frozen, copies)
        self._left_out = _in_copies(original._left_out, copies)
        self.version += 1

    def track(self, named: NamedTensors) -> None:
        """Record the parameters for which the optimizer now has state, by name.

        A record has the shape, device, dtype and sharding of a parameter, and its position in the models, such as the
        module "layers.0" and its attribute "weight". A later difference means that the parameter was replaced, moved or
        converted.
        """
        position_of = self._positions()
        for name, param in named.items():
            position = position_of.get(param)
            # The model was deleted, but perhaps not its module.
            if position is None and name in self.tracked:
                former_position = self.tracked[name].position
                if former_position is not None and former_position.current() is param:
                    position = former_position
            # These are no weak references to tensors, because torch.utils.swap_tensors, used to convert in place,
            # rejects them.
            self.tracked[name] = TrackedParameter(
                param, param.shape, param.device, param.dtype, _sharding(param), position
            )
            self._put_in_groups[name] = param
        self._remove_from_frozen(named)
        self.version += 1

    def _remove_from_frozen(self, trained: NamedTensors) -> None:
        """Remove parameters that are trained now from the record of frozen ones.

        They are compared as tensors, too: a wrapper that was put around their layer since, such as
        `checkpoint_wrapper`, has changed their names.
        """
        trained_params = set(trained.values())
        for name, source in list(self._frozen.items()):
            if name in trained or source.current() in trained_params:
                del self._frozen[name]

    def leave_out(self, frozen: NamedTensors) -> None:
        """Record parameters that are in no group because they are frozen, to raise if they are trained later."""
        self._frozen.update(self._sources_of(frozen))

    def _sources_of(self, params: NamedTensors) -> dict[str, Source]:
        """Return the position of each parameter in a model, which keeps no tensor alive: ``(model[0], "weight")``.

        A parameter that is in no known model has no position. It is kept itself, as a `KeptParameter`.
        """
        if not params:  # usually; the search for positions walks through the models
            return {}
        position_of = self._positions()
        sources: dict[str, Source] = {}
        for name, param in params.items():
            sources[name] = position_of.get(param, KeptParameter(param))
        return sources

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

    # ------------------------------------------------------------------------------------------ replaced parameters

    def are_current(self) -> bool:
        """Return True if no parameter was replaced, resized, moved or converted, as far as the models show."""
        for tracked in self.tracked.values():
            if tracked.param.shape != tracked.shape or self._was_moved(tracked, tracked.param):
                return False
        # After `fully_shard(model)`, the modules have other tensor objects.
        return not self._others_in_models()

    def _was_moved(self, tracked: TrackedParameter, param: Tensor) -> bool:
        """Return True if a parameter has another device than its state, or was converted to or from float64.

        After ``param.data = param.data.cuda()``, or ``model.double()``, it is the same tensor object. Between bfloat16
        and float32, a state keeps its dtype: a model that is converted and back must not round it.
        """
        if tracked.device != param.device:
            return True
        if not self.follows_dtypes or tracked.dtype == param.dtype:  # the usual case
            return False
        return wide_dtype(tracked.dtype) != wide_dtype(param.dtype)

    def warn_of_converted(self, named: NamedTensors) -> None:
        """Warn once of parameters that were converted to float64 over ranks, where the state keeps its dtypes."""
        if self.follows_dtypes or self._has_warned_of_converted:
            return
        for name, param in named.items():
            dtype = self.tracked[name].dtype
            if param.dtype == torch.float64 and dtype != torch.float64:
                self._has_warned_of_converted = True
                warn_caller(
                    f"{name!r} was converted from {dtype} to {param.dtype}, and the state keeps its dtypes: "
                    "over ranks, convert the model before the optimizer is created"
                )
                return

    def _others_in_models(self) -> NamedTensors:
        """Return, by name, the tensors that modules now have in place of parameters of the optimizer.

        For example, ``{"0.weight": dtensor}`` after ``fully_shard(model)``. During forward and backward, FSDP2 also
        puts other tensors there, which replace the parameters for a short time only.
        """
        others: dict[str, Tensor] = {}
        for name, tracked in self.tracked.items():
            if tracked.position is None:  # in no known model
                continue
            current = tracked.position.current()  # None if the module was deleted
            if current is not None and current is not tracked.param:
                others[name] = current
        return others

    def current_params(self, named: NamedTensors) -> NamedTensors:
        """Return the tensor that each parameter has now, from the tensors in the param groups by name.

        If a tensor was replaced in the models, as by ``fully_shard(model)``, it is the new one.
        """
        return {**named, **self._replaced_in_models(named)}

    def replaced(self, current: NamedTensors) -> NamedTensors:
        """Return the tensors in ``current``, by name, that have replaced parameters, or were moved or converted.

        For example, ``{"0.weight": dtensor}`` after ``fully_shard(model)``. The caller moves the optimizer state to
        these tensors. Raise ValueError if a shape has changed.
        """
        replaced: dict[str, Tensor] = {}
        for name, param in current.items():
            tracked = self.tracked[name]  # the parameter as it was when its state was created
            _require_same_shape(name, param, tracked)
            if tracked.param is not param or self._was_moved(tracked, param):
                replaced[name] = param
        return replaced

    def require_new_gradients(self, current: NamedTensors) -> None:
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
        return all(self.tracked[name].fits_state_of(param) for name, param in replaced.items())

    def moved(self, groups: Iterable[Group]) -> list[Tensor]:
        """Return the tensors in the models and the groups that have replaced parameters of another placement.

        For example, the DTensors after ``fully_shard(model)``. This does not check the groups.
        """
        pairs = list(self._replaced_in_models(self._put_in_groups).items())
        for group in groups:
            pairs += zip(group.get("param_names", ()), group.get("params", ()), strict=False)
        moved: list[Tensor] = []
        for name, param in pairs:
            tracked = self.tracked.get(name)
            if tracked is None:
                continue
            is_replaced = tracked.param is not param or self._was_moved(tracked, param)
            if is_replaced and not tracked.fits_state_of(param):
                moved.append(param)
        return moved

    def put_replacements_into(self, groups: Iterable[Group]) -> None:
        """Put the tensors that have replaced parameters in the models into the param groups, where users expect them.

        For example, the DTensors after ``fully_shard(model)``. The state moves to them later, such as at the next step.
        """
        replacement_of: dict[Tensor, Tensor] = {}
        for name, new_param in self._replaced_in_models(self._put_in_groups).items():
            former_param = self._put_in_groups[name]
            replacement_of[former_param] = new_param
            self._put_in_groups[name] = new_param
        if not replacement_of:  # usually
            return
        for group in groups:
            group["params"] = [replacement_of.get(param, param) for param in group["params"]]

    def _replaced_in_models(self, named: NamedTensors) -> NamedTensors:
        """Return, by name, the tensors that have replaced parameters in the models since the last `track`.

        ``named`` are the tensors in the param groups. A tensor of a model is left out in three cases:

        - An engine has put its own copy of the parameter into the groups, which takes precedence.
        - FSDP2 has put it there for the time of forward and backward.
        - The tensor would be in the groups twice.
        """
        others = self._others_in_models()
        if not others:  # usually; the search for temporary tensors walks through the models
            return {}
        temporary_ids = self._temporary_in_fsdp2()
        replaced: dict[str, Tensor] = {}
        for name, new_param in others.items():
            is_temporary = id(new_param) in temporary_ids
            if not is_temporary and not self._is_of_engine(name, named[name]):
                replaced[name] = new_param
        return _without_tied(replaced, named)  # the third case

    def _is_of_engine(self, name: str, param_in_groups: Tensor) -> bool:
        """Return True if an engine has put the tensor into the groups: it has no state, and the optimizer did not."""
        has_state = param_in_groups is self.tracked[name].param
        is_of_optimizer = param_in_groups is self._put_in_groups[name]
        return not has_state and not is_of_optimizer

    def _temporary_in_fsdp2(self) -> set[int]:
        """Return the ids of the tensors that FSDP2 has put into modules for the time of forward and backward.

        FSDP2 puts the parameter itself, a DTensor, back afterwards. Until then, the module has a gathered tensor, or
        shards over fewer ranks (``reshard_after_forward=2``). Either may be a DTensor, too.
        """
        temporary_ids: set[int] = set()
        for module in self._modules():
            for fsdp_param in _params_of_fsdp2(module):
                # The first forward sets the attributes. Until then, the module has the parameter itself.
                temporary_ids.add(id(getattr(fsdp_param, "_unsharded_param", None)))
                temporary_ids.add(id(getattr(fsdp_param, "_sharded_post_forward_param", None)))
        return temporary_ids

    def added_in(self, groups: Iterable[Group]) -> NamedTensors:
        """Return, by name, the parameters of the models that somebody has put into the groups, and that have no state.

        For example, Lightning assigns ``optimizer.param_groups`` when a run with unfrozen layers is resumed. The groups
        then have the weight of a layer that was frozen so far, and the result is ``{"0.weight": weight}``.
        """
        known_name_of = self._names_of_known()
        unknown_params: list[Tensor] = []
        for group in groups:
            unknown_params += [param for param in group["params"] if param not in known_name_of]
        if not unknown_params:  # usually; to look up all names takes time
            return {}
        name_of = self.names
        added: dict[str, Tensor] = {}
        for param in unknown_params:
            name = name_of.get(param)
            # A tensor that has replaced a parameter has no name yet, or the name of a parameter with state.
            if name is not None and name not in self.tracked:
                added[name] = param
        return added

    def _names_of_known(self) -> dict[Tensor, str]:
        """Return the names of the tensors that have state, and of those that have replaced some of them in the models.

        Replacements are found by their position in a model, because a wrapper that was put around their layer since, as
        accelerate does for activation checkpointing, has changed their names.
        """
        name_of = {param: name for name, param in self._others_in_models().items()}
        for name, tracked in self.tracked.items():
            # A tied tensor that is in both keeps the name of its state.
            name_of[tracked.param] = name
        return name_of

    def names_of(self, groups: Iterable[Group], added: NamedTensors) -> list[list[str]]:
        """Return the names of the parameters in each group that a user or engine has edited: ``[["w"], ["b"]]``.

        A new tensor gets the name of the tensor that it replaces. Raise ValueError if a tensor replaces no parameter,
        or if a parameter is in the groups twice or not at all. ``added`` are parameters that get state just now, by
        name.
        """
        name_of = self._names_of_known()
        for name, param in added.items():
            name_of[param] = name
        names_per_group: list[list[str]] = []
        times = Counter[str]()
        for index, group in enumerate(groups):
            names = _names_in(index, group, name_of)
            names_per_group.append(names)
            times.update(names)
        self._require_each_once(times)
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

    # ---------------------------------------------------------------------------------- parameters that are in no group

    def not_trained_params(self) -> NamedTensors:
        """Return the parameters that were given to the optimizer and are in no group, by name."""
        return {**_existing(self._left_out), **_existing(self._frozen)}

    def not_trained(self) -> set[str]:
        """Return the names of parameters that are known, but have no state, as they are frozen or have label None."""
        return {
            *self._frozen,
            *self._left_out,
            *names_in(self.models).values(),
        } - self.tracked.keys()

    def check_frozen(self) -> None:
        """Raise if a parameter that was frozen at construction has a gradient now, because it is in no group.

        Without the error, a run that unfreezes layers after some epochs would not train them.
        """
        for name, param in _existing(self._frozen).items():
            is_trained = param.requires_grad and param.grad is not None
            if is_trained:
                raise _unfrozen(name)

    def outside(self, named: NamedTensors) -> NamedTensors:
        """Return the models' parameters, by name, that should be in the optimizer and are not. ``named`` are in it.

        For example, the weight of a layer that was added to the model after the optimizer was created. If the optimizer
        was given only some parameters of a model, others may be another optimizer's: the result then has only tensors
        with the names of its own parameters, which have replaced them.
        """
        known_params = {*named.values(), *_existing(self._left_out).values()}
        outside: dict[str, Tensor] = {}
        for known_model in self._models:
            model = known_model.ref()
            if model is None:  # it was deleted
                continue
            for name, param in model.named_parameters():
                # A parameter with the label None is left out on purpose.
                is_known = param in known_params or name in self._left_out
                is_expected = (
                    known_model.names is None or name in known_model.names or name in named
                )
                if is_expected and not is_known:
                    outside[name] = param
        return outside


def _params_of_fsdp2(module: nn.Module) -> list[Any]:
    """Return FSDP2's records of the parameters that it shards for a module (``FSDPParam``); none for other modules.

    No public function of torch returns them. Parameters in ``ignored_params`` of `fully_shard` have no record.
    """
    # `fully_shard` adds FSDPModule to the bases of a module's class. Found by name, to import no FSDP here.
    class_names = [base.__name__ for base in type(module).__mro__]
    if "FSDPModule" not in class_names:
        return []
    state = cast("Any", module)._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    # Older versions of torch, such as 2.10, have one group, or None without parameters.
    if groups is None:
        groups = [state._fsdp_param_group]
    records: list[Any] = []
    for group in groups:
        if group is not None:
            records += group.fsdp_params
    return records


def _names_in(index: int, group: Group, name_of: Mapping[Tensor, str]) -> list[str]:
    """Return the names of the parameters in a group that was edited; raise ValueError if a tensor has no name.

    A new tensor has the name at its position in "param_names": it replaces the parameter that was there. For example,
    ``{"params": [weight, new], "param_names": ["w", "b"]}`` gives ``["w", "b"]``.

    Args:
        index: the index of the group in ``param_groups``, for the message.
        group: the group.
        name_of: the names of all tensors that are parameters already.
    """
    params: list[Tensor] = list(group["params"])
    former_names: list[str] = list(group.get("param_names", ()))
    # The names belong to the tensors only if there is one for each, and each is of a parameter of the optimizer.
    has_name_for_each = len(former_names) == len(params) and set(former_names) <= set(
        name_of.values()
    )
    names: list[str] = []
    for position, param in enumerate(params):
        # A known tensor has its name at any position, so that users can move it.
        if param in name_of:
            names.append(name_of[param])
        elif has_name_for_each:
            names.append(former_names[position])
        else:
            raise _new_tensor(index, param, len(params), len(former_names))
    return names


def _new_tensor(index: int, param: Tensor, param_count: int, name_count: int) -> ValueError:
    """Return an error for a tensor without a name in ``param_groups[index]``, which a user or engine has edited.

    ``param_count`` and ``name_count`` are how many parameters and names the group has.
    """
    return ValueError(
        f"param_groups[{index}]: found a new tensor of shape {tuple(param.shape)} and {param_count} params, expected "
        f"{name_count}, one for each of param_names: keep a replaced parameter at its position, and add others with "
        "add_param_group. Under DeepSpeed's ZeRO use muonfx.engines.deepspeed.Muon"
    )


def _unfrozen(name: str) -> ValueError:
    """Return an error for a parameter that was frozen at construction, is in no group, and has a gradient now."""
    return ValueError(
        f"{name!r} has a gradient, but it was frozen when the optimizer was created, and is in no group: call "
        "optimizer.add_param_group({'params': [...]}) with it, or, if a scheduler of the groups exists already, call "
        "requires_grad_() on it before the optimizer is created, and freeze it afterwards, as for adapters of PEFT "
        "that are selected later. If Lightning's BackboneFinetuning has unfrozen it: it does not add parameters with "
        "the same values as one in the groups, such as norms and biases that were not trained yet, so add them in a "
        "finetune_function of yours. If another optimizer trains it, give it the label None, or leave it out of this "
        "optimizer's parameters"
    )


def _without_tied(replaced: NamedTensors, named: NamedTensors) -> NamedTensors:
    """Return the new tensors, without tensors that would be in the param groups twice: a step would update them twice.

    For example, ``model.head.weight = model.embedding.weight`` ties two parameters. The groups have this tensor for the
    embedding, so "head.weight" is left out, and keeps its former tensor in the groups.

    Args:
        replaced: the new tensors by parameter name.
        named: the tensors in the groups by parameter name.
    """
    untied = dict(replaced)
    tied_names = _tied_names(untied, named)
    # Repeated, because a name that is left out keeps its former tensor, which another name may have got. For example,
    # the groups have A, B and C, and would get B, C and C: the second name keeps B, so the first must keep A.
    while tied_names:
        for name in tied_names:
            del untied[name]
        tied_names = _tied_names(untied, named)
    return untied


def _tied_names(replaced: NamedTensors, named: NamedTensors) -> list[str]:
    """Return the names in ``replaced`` whose new tensors would be in the groups under several names."""
    ids_in_groups = [id(replaced.get(name, param)) for name, param in named.items()]
    times = Counter(ids_in_groups)
    return [name for name, param in replaced.items() if times[id(param)] > 1]


def _require_same_shape(name: str, param: Tensor, tracked: TrackedParameter) -> None:
    """Raise ValueError if the tensor of a parameter has another shape than its state, which cannot be converted."""
    if param.shape == tracked.shape:
        return
    cause = FSDP1 if getattr(param, "_fsdp_flattened", False) else CAUSES
    raise ValueError(
        f"{name!r} has shape {tuple(param.shape)}, expected {tuple(tracked.shape)}, as at construction: {cause}"
    )


def _existing(sources: Mapping[str, Source]) -> NamedTensors:
    """Return the parameters that exist now, by name. Those of a model that was deleted are left out."""
    existing: dict[str, Tensor] = {}
    for name, source in sources.items():
        param = source.current()
        if param is not None:
            existing[name] = param
    return existing


def _in_copies(sources: Mapping[str, Source], copies: Mapping[int, Any]) -> dict[str, Source]:
    """Return where the copies of parameters are, by name, without parameters that were not copied."""
    copied_sources: dict[str, Source] = {}
    for name, source in sources.items():
        copied_source = source.in_copy(copies)
        if copied_source is not None:
            copied_sources[name] = copied_source
    return copied_sources


def _sharding(param: Tensor) -> object:
    """Return the mesh and the placements of a DTensor, to compare them, and None for a plain tensor."""
    if is_dtensor(param):
        return (param.device_mesh, param.placements)
    return None


# ----------------------------------------------------------------------------------------------------------- gradients


class GradientCheck:
    """Raises or warns if gradients are missing, but parameters of a model that are not in the optimizer have some.

    Args:
        parameters: the parameters of the optimizer, and the models that contain them.
        is_alone: True in one process, where no other rank has the gradients that are missing here.
    """

    def __init__(self, parameters: TrackedParameters, *, is_alone: bool) -> None:
        """Prepare the check. The first call of `check` searches the models."""
        self._parameters = parameters
        self._is_alone = is_alone
        self._outside = _OutsideParameters(parameters)
        self._reported: dict[str, Tensor] = {}
        """The parameters outside of the optimizer that a warning has reported, by name."""
        self._has_warned_of_none = False
        """True after the warning that no parameter has a gradient."""

    def check(self, named: NamedTensors, gradients: Gradients) -> None:
        """Raise or warn, before a step, if gradients are missing, because the step would not train the model.

        - An error if only parameters outside of the optimizer have gradients. Usually, the model got new parameters
          after the optimizer was created.
        - A warning if such parameters have gradients, too, or if no parameter has one.

        ``named`` are the parameters of the optimizer, and ``gradients`` the gradient of each, or None.
        """
        check_real(named)
        self._parameters.check_frozen()
        without_gradient = tuple([name for name, gradient in gradients.items() if gradient is None])
        # Parameters of the models, not of the optimizer.
        outside = self._outside.find(named, without_gradient)
        outside_with_gradient = {
            name: param for name, param in outside.items() if param.grad is not None
        }
        # Here, no parameter of the optimizer has a gradient.
        has_no_gradient = len(without_gradient) == len(gradients)
        if has_no_gradient and outside_with_gradient:
            raise _only_outside(outside_with_gradient, len(named))
        self._warn_of_outside(outside_with_gradient)
        # Over ranks, the step finds out whether another rank has one.
        if has_no_gradient and self._is_alone:
            self.warn_of_none(named)

    def _warn_of_outside(self, with_gradient: NamedTensors) -> None:
        """Warn of parameters that have a gradient and are not in the optimizer, once for each of them."""
        # Leave out parameters of earlier warnings. A name is reported again if the model has another tensor for it now.
        unreported = [
            name for name, param in with_gradient.items() if self._reported.get(name) is not param
        ]
        self._reported.update(with_gradient)
        if unreported:
            warn_caller(
                f"{len(with_gradient)} parameters of the model have gradients and are not in the optimizer, such as "
                f"{unreported[0]!r}; they are not updated: {CAUSES}, or use add_param_group"
            )

    def warn_of_none(self, named: NamedTensors) -> None:
        """Warn once that no parameter has a gradient, so that a step changes no parameter.

        The usual causes are a forgotten backward(), and a loss of detached tensors. Over ranks, the caller has found
        that no rank has a gradient.
        """
        are_all_frozen = all(is_frozen(param) for param in named.values())
        if self._has_warned_of_none or are_all_frozen:  # frozen parameters need no gradient
            return
        self._has_warned_of_none = True
        parameters = f"{len(named)} parameters"
        cause_over_ranks = ""
        if not self._is_alone:  # there are several ranks
            parameters += " on any rank"
            cause_over_ranks = "Was model.set_requires_gradient_sync(False) left on? "
        warn_caller(
            f"step() found no gradient on any of {parameters} and changes none of them: is backward() called before "
            f"it, on these parameters? {cause_over_ranks}Tensors of state_dict() and detach() get no gradient. Else: "
            f"{CAUSES}"
        )


class _OutsideParameters:
    """Finds the parameters of the models that are not in the optimizer.

    A search walks through all modules, which takes time at every step. So it is repeated only if the models may have
    got a new parameter since the last search.

    Args:
        parameters: the parameters of the optimizer, and the models that contain them.
    """

    def __init__(self, parameters: TrackedParameters) -> None:
        """Begin without a result: the first call of `find` searches the models."""
        _count_registrations()  # lets torch count, from now on, each parameter that a model gets
        self._parameters = parameters
        self._result: NamedTensors = {}
        """The parameters that the last search has found, by name."""
        self._lengths: list[tuple[weakref.ref[nn.Module], int]] = []
        """The lists of modules that the last search has found in the models, with their lengths."""
        self._last_changes: object = None
        """The signs of a change, as `find` compares them, at this search; None before the first one."""

    def find(self, named: NamedTensors, without_gradient: tuple[str, ...]) -> NamedTensors:
        """Return, by name, the parameters of the models that are not in the optimizer.

        Args:
            named: the parameters of the optimizer.
            without_gradient: the names of those that have no gradient. A parameter that was replaced in a model has
                none, so other names are a reason for a new search.
        """
        # How many parameters and modules were assigned to any module.
        assignments = _registrations["assigned"]
        changes = (without_gradient, self._parameters.version, assignments)
        if changes != self._last_changes or self._has_other_length():
            self._result = self._parameters.outside(named)
            self._lengths = _lengths_of_lists(self._parameters.models)
            self._last_changes = changes
        return self._result

    def _has_other_length(self) -> bool:
        """Return True if a list was deleted or has another length: `ModuleList.insert` makes no assignment to count."""
        for ref, length in self._lengths:
            module = ref()
            if module is None or len(module._modules) != length:
                return True
        return False


def _lengths_of_lists(models: Iterable[nn.Module]) -> list[tuple[weakref.ref[nn.Module], int]]:
    """Return a weak reference to each ``ModuleList`` and ``Sequential`` of the models, with its number of modules."""
    lengths: list[tuple[weakref.ref[nn.Module], int]] = []
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                lengths.append((weakref.ref(module), len(module._modules)))
    return lengths


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
    # A graph that reads the count would be compiled again whenever it changes.
    if torch.compiler.is_compiling():
        return
    _registrations["assigned"] += 1


@cache
def _count_registrations() -> None:
    """Let `_registrations` count from now on, in all models of this process."""
    register_module_parameter_registration_hook(_count_registration)
    register_module_module_registration_hook(_count_registration)
