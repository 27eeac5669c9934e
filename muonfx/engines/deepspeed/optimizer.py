"""The client optimizer: one parameter group for each label, stepped on the flat tensors of DeepSpeed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muonfx.core import Locality, Transform
from muonfx.core.hyperparams import hyperparams
from muonfx.core.transform import require_transform
from muonfx.core.visit import visit
from muonfx.engines.deepspeed.parallel import expert_group_name, gather_objects, tensor_group_of, whole_shape_of
from muonfx.engines.deepspeed.pieces import (
    flats_of,
    local_shape_of,
    locate,
    stage_3_of,
    trained_parameters,
    whole_pieces,
)
from muonfx.engines.deepspeed.rates import GroupRates
from muonfx.engines.deepspeed.unit import Unit, raise_on_all_ranks
from muonfx.optimizer.group_numbers import GroupNumbers
from muonfx.optimizer.param_groups import OwnedGroup, defaults_for_schedulers, own_groups
from muonfx.optimizer.update_rules import UpdateRule, pairs_by_rule, update_rules_of


class ZeroOptimizer(Optimizer):
    """The optimizer that `optimizer` returns for DeepSpeed; it applies a transform to DeepSpeed's flat tensors.

    Raises:
        ValueError: at the first step, if DeepSpeed's mapping of a parameter to a flat tensor is missing or wrong, as
            with ``round_robin_gradients``; the message names the parameter. At any step, if a parameter was frozen,
            unfrozen, added or removed after the optimizer was made, or if a scheduler has given all groups one rate.
        RuntimeError: an engine has replaced this optimizer by another one, which steps on its groups.

    Example:
        >>> import muonfx as mfx
        >>> model = nn.Linear(2, 2, bias=False)
        >>> made = ZeroOptimizer(model, mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1)))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> made.step()
        >>> list(made.state[model.weight])
        ['momentum.trace']
    """

    def __init__(self, model: nn.Module, tx: Transform) -> None:
        require_transform("tx", tx)
        if tx.locality is Locality.TREE:
            raise ValueError(
                f"{tx!r} reads the whole tree, and DeepSpeed steps one flat tensor at a time: use DeepSpeed's "
                '"gradient_clipping" for clipping, and its loss scaler for skipping overflows'
            )
        self.tx = tx
        self.model = model
        self._params = trained_parameters(model)
        self._like: dict[str, Tensor] = {}
        """The parameters in full, as meta tensors."""
        for name, param in self._params.items():
            self._like[name] = torch.empty(whole_shape_of(param), dtype=param.dtype, device="meta")
        tx.init(self._like)  # raises if the transform cannot handle the parameters
        self._numbers: dict[tuple[str, ...], GroupNumbers] = {}
        """The object that reads the hyperparameters of each group, by the parameter names of the group."""
        self._units: dict[Tensor, Unit] = {}
        """The units that exist, by their first tensor: a flat tensor, or at stage 0 the first one of a group."""
        super().__init__(self._new_groups(), {})
        own_groups(self)
        self.defaults.update(defaults_for_schedulers(self.param_groups))
        _warn_of_unequal_stages(model, self.param_groups)
        self._rates = GroupRates(self.param_groups)
        for group in self.param_groups:
            # If two keys of a group set one number, later reads compare both with this one to find the changed key.
            self._numbers_of(group).read(group)

    def _new_groups(self) -> list[dict[str, Any]]:
        """Return the param groups: parameters with one update rule (their label and transforms) are in one group.

        Experts have a group of their own for each group of ranks that share them.
        """
        rules = update_rules_of(tuple(visit(self.tx, self._like)))
        for name in self._like:
            if name not in rules or rules[name].is_left_out:
                raise ValueError(
                    f"{name!r} requires grad but has no label: give it a label, or freeze it before this call"
                )
        groups: list[dict[str, Any]] = []
        for rule, rule_pairs in pairs_by_rule(self._params.items(), rules).items():
            for expert_group, pairs in _by_expert_group(rule_pairs).items():
                groups.append(self._new_group(rule, expert_group, pairs))
        return groups

    def _new_group(self, rule: UpdateRule, expert_group: str | None, pairs: list[tuple[str, Tensor]]) -> dict[str, Any]:
        """Return a param group for named parameters with the hyperparameters of the transforms that update them."""
        defaults = hyperparams(self.tx)
        numbers = GroupNumbers(rule.hyperparams)
        self._numbers[tuple([name for name, _ in pairs])] = numbers
        entries = numbers.entries({name: defaults[name] for name in numbers.names})
        group = {"label": rule.label, "lr": 0.0, **entries, "params": pairs}
        if expert_group is not None:
            # With these entries ZeRO partitions the group among the ranks that have the same experts.
            group["moe"] = True
            group["name"] = expert_group
        return group

    def _numbers_of(self, group: Mapping[str, Any]) -> GroupNumbers:
        """Return the object that reads the hyperparameters of a group."""
        return self._numbers[tuple(group["param_names"])]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, marked so that another optimizer that steps on it raises."""
        super().add_param_group(OwnedGroup(param_group))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer, and mark its param groups as its own."""
        super().__setstate__(state)
        self.param_groups = [OwnedGroup(group) for group in self.param_groups]
        own_groups(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the flat tensors that DeepSpeed has put into ``param_groups``; all ranks must call this together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_first = not self._units
        numbers_per_group: list[dict[str, Any]] = []
        units_per_group: list[list[Unit]] = []
        try:
            self._require_same_trained()
            self._rates.check(self.param_groups)
            for group in self.param_groups:
                numbers_per_group.append(self._numbers_of(group).read(group))
            # The units of all groups before any update, because creating a unit may raise an error.
            for group in self.param_groups:
                units_per_group.append(self._units_of(group["param_names"], group["params"]))
            for units in units_per_group:
                for unit in units:
                    unit.check(self.state)
        except Exception as error:
            raise_on_all_ranks(error, self._units.values())
            raise  # without ranks that wait for this one
        # DeepSpeed may take a first step with zero gradients, only to allocate the state. The units now have their
        # state. A real step on zeros would advance the count of AdamW and decay the weights.
        if is_first and self._is_initialization():
            return loss
        for numbers, units in zip(numbers_per_group, units_per_group, strict=True):
            for unit in units:
                unit.step(numbers, self.state)
        return loss

    def _is_initialization(self) -> bool:
        """Return whether this is the step with zero gradients that DeepSpeed takes only to allocate the state."""
        if any(unit.pieces.is_flat for unit in self._units.values()):
            return False
        model_params = set(self._params.values())
        for group in self.param_groups:
            for param in group["params"]:
                is_copy = param not in model_params  # in fp32, into which DeepSpeed puts the zeros
                if not is_copy or param.grad is None or param.grad.any():
                    return False
        return True

    def _require_same_trained(self) -> None:
        """Raise if a parameter was frozen, unfrozen, added or removed since the optimizer was constructed."""
        # DeepSpeed's flat tensors contain the parameters from construction only.
        name_of_trained = {param: name for name, param in trained_parameters(self.model).items()}
        name_of_former = {param: name for name, param in self._params.items()}
        for param, name in name_of_trained.items():
            if param not in name_of_former:
                raise _trained_has_changed(name, "requires grad now, but did not")
        for param, name in name_of_former.items():
            if param not in name_of_trained:
                raise _trained_has_changed(name, "required grad")

    def all_units(self) -> list[Unit]:
        """Return a list with a `Unit` (parameters and their state) for each flat tensor that DeepSpeed steps on.

        Before the first step, this method creates them. All ranks must call it together.
        """
        self._require_same_trained()
        units: list[Unit] = []
        for group in self.param_groups:
            names: list[str] = group["param_names"]
            params = [self._params[name] for name in names]
            engine = stage_3_of(params)
            tensors = group["params"] if engine is None else flats_of(engine, params)
            units += self._units_of(names, tensors, without_grads=True)
        return units

    @torch.no_grad()
    def update_working_copy(self) -> None:
        """Copy the full-precision parameters into the model's parameters, and round them to the dtype of the model."""
        for unit in self.all_units():
            for name, piece in unit.pieces.views(unit.pieces.flat).items():
                partition = getattr(self._params[name], "ds_tensor", None)  # this rank's part at stage 3
                if partition is None:
                    self._params[name].copy_(piece)
                else:
                    partition.data.view(-1)[: piece.numel()].copy_(piece.reshape(-1))

    def _units_of(self, names: Sequence[str], tensors: list[Tensor], *, without_grads: bool = False) -> list[Unit]:
        """Return the units of one param group, and create those that do not exist.

        ``names`` are the parameters from which DeepSpeed made the group, and ``tensors`` are the tensors that are in
        the group now. At stage 0 these are the parameters, or copies of them in fp32, and the group has one unit. At
        other stages they are flat tensors with shards of the parameters, and each has a unit. A flat tensor without a
        gradient is left out unless ``without_grads``, because a step does not update it.
        """
        params = {name: self._params[name] for name in names}
        tensor_group = tensor_group_of(self.model.modules())
        param_shapes = [local_shape_of(param) for param in params.values()]
        is_stage_0 = [tuple(tensor.shape) for tensor in tensors] == param_shapes
        if is_stage_0:
            first_tensors = tensors[:1]
        else:
            first_tensors = [flat for flat in tensors if without_grads or flat.grad is not None]
        units: list[Unit] = []
        for tensor in first_tensors:
            if tensor not in self._units:
                if is_stage_0:
                    pieces = whole_pieces(dict(zip(names, tensors, strict=True)), params, self._like, tensor_group)
                else:
                    pieces = locate(tensor, params, self._like, tensor_group)
                self._units[tensor] = Unit(self.tx, self._like, pieces, self.state)
            units.append(self._units[tensor])
        return units

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, and keep the dtypes in it. DeepSpeed calls this with the state of this rank.

        Raises:
            ValueError: the groups have other parameters, or a group lacks a hyperparameter; nothing was loaded. If the
                state belongs to another transform, the next step raises an error.
        """
        saved_groups: list[dict[str, Any]] = state_dict["param_groups"]
        names_per_group = [group["param_names"] for group in self.param_groups]
        saved_names_per_group = [group.get("param_names") for group in saved_groups]
        if saved_names_per_group != names_per_group:
            raise ValueError(
                f"the state has groups with the parameters {saved_names_per_group}, expected {names_per_group}"
            )
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            for hyperparam in self._numbers_of(group).hyperparams:
                if hyperparam.key not in saved_group:
                    first_name = group["param_names"][0]
                    raise ValueError(
                        f"the state has no hyperparameter {hyperparam.key!r} for the group of {first_name!r}"
                    )
        super().load_state_dict(state_dict)
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            for param, index in zip(group["params"], saved_group["params"], strict=True):
                for key, value in state_dict["state"].get(index, {}).items():
                    if isinstance(value, Tensor):  # undo the cast to the parameter's dtype by torch
                        self.state[param][key] = value.to(param.device, copy=True)


def _trained_has_changed(name: str, when: str) -> ValueError:
    """Return an error for a parameter that was frozen, unfrozen, added or removed after construction."""
    return ValueError(
        f"{name!r} {when} when the optimizer was made; DeepSpeed steps on the parameters from then: "
        "freeze, unfreeze, add or remove it first, then make the optimizer and DeepSpeed's engine"
    )


def _warn_of_unequal_stages(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn if the stages of a pipeline have different groups; all ranks call this together."""
    is_pipeline = hasattr(model, "num_stages") and hasattr(model, "topology")
    if not is_pipeline:
        return
    labels_of_ranks = gather_objects([group["label"] for group in groups])
    for rank, labels in enumerate(labels_of_ranks):
        if len(labels) != len(labels_of_ranks[0]):
            warnings.warn(
                f"param_groups: found the groups {labels_of_ranks[0]} on rank 0 and {labels} on rank {rank}, because "
                "the pipeline stages have other kinds of parameters. With ZeRO stage 1, DeepSpeed sums the gradient "
                "norm group by group over all stages, and waits forever: use ZeRO stage 0, or another "
                "partition_method, so that each stage has a parameter of each label",
                stacklevel=4,
            )
            return


def _by_expert_group(pairs: Sequence[tuple[str, Tensor]]) -> dict[str | None, list[tuple[str, Tensor]]]:
    """Divide (name, parameter) pairs: None for the parameters that are not experts', else by expert group."""
    divided: dict[str | None, list[tuple[str, Tensor]]] = {}
    for name, param in pairs:
        divided.setdefault(expert_group_name(param), []).append((name, param))
    return divided
