"""The client optimizer: one parameter group for each label, stepped on the flat tensors of DeepSpeed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonfx.core import Locality, Transform
from muonfx.core.hyperparams import hyperparams
from muonfx.core.transform import require_transform
from muonfx.core.visit import visit
from muonfx.engines.deepspeed.experts import expert_group_name
from muonfx.engines.deepspeed.pieces import (
    flats_of,
    local_shape_of,
    locate,
    stage_3_of,
    trained_parameters,
    whole_pieces,
)
from muonfx.engines.deepspeed.rates import GroupRates
from muonfx.engines.deepspeed.tensor_parallel import tensor_group_of, whole_shape_of
from muonfx.engines.deepspeed.unit import Unit
from muonfx.optimizer.group_numbers import GroupNumbers
from muonfx.optimizer.groups import defaults_for_schedulers
from muonfx.optimizer.owned_groups import GroupOwner
from muonfx.optimizer.routes import routes_of, split_by_route


class ZeroOptimizer(GroupOwner):
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
        self._like = {n: torch.empty(whole_shape_of(x), dtype=x.dtype, device="meta") for n, x in self._params.items()}
        tx.init(self._like)  # raises if the transform cannot handle the parameters
        routes = routes_of(tuple(visit(tx, self._like)))
        if left_out := [name for name in self._like if name not in routes or routes[name].is_left_out]:
            raise ValueError(
                f"{left_out[0]!r} requires grad but has no label: give it a label, or freeze it before this call"
            )
        defaults = hyperparams(tx)
        self._numbers: dict[tuple[str, ...], GroupNumbers] = {}
        self._units: dict[Tensor, Unit] = {}
        groups: list[dict[str, Any]] = []
        for part in split_by_route(list(self._params.items()), routes):
            route = routes[part[0][0]]
            for expert_group, pairs in _by_expert_group(part).items():
                numbers = GroupNumbers(route.hyperparams)
                self._numbers[tuple(name for name, _ in pairs)] = numbers
                values = numbers.entries({name: defaults[name] for name in numbers.names})
                group = {"label": route.label, "lr": 0.0, **values, "params": pairs}
                if expert_group is not None:
                    # With these entries ZeRO partitions the group among the ranks that have the same experts.
                    group |= {"moe": True, "name": expert_group}
                groups.append(group)
        super().__init__(groups, {})
        self.defaults.update(defaults_for_schedulers(self.param_groups))
        _warn_of_unequal_stages(model, self.param_groups)
        self._rates = GroupRates(self.param_groups)
        for group in self.param_groups:
            # If two keys of a group set one number, later reads compare both with this one to find the changed key.
            self._numbers[tuple(group["param_names"])].read(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the flat tensors that DeepSpeed has put into ``param_groups``; all ranks must call this together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_same_trained()
        self._rates.check(self.param_groups)
        is_first = not self._units
        units = [(group, self._units_of(group["param_names"], group["params"])) for group in self.param_groups]
        # A real step on zeros would advance the count of AdamW and decay the weights.
        if is_first and self._is_initialization():
            return loss
        for group, own in units:
            numbers = self._numbers[tuple(group["param_names"])]
            for unit in own:
                unit.step(numbers.read(group), self.state)
        return loss

    def _is_initialization(self) -> bool:
        """Return whether this is the step with zero gradients that DeepSpeed takes only to allocate the state."""
        own = set(self._params.values())
        given = [param for group in self.param_groups for param in group["params"]]
        are_copies = not any(unit.pieces.is_flat for unit in self._units.values()) and own.isdisjoint(given)
        return are_copies and not any(param.grad is None or bool(param.grad.any()) for param in given)

    def _require_same_trained(self) -> None:
        """Raise if a parameter was frozen, unfrozen, added or removed since the optimizer was constructed."""
        # DeepSpeed's flat tensors contain the parameters from construction only.
        now, own = ({param: name for name, param in x.items()} for x in (trained_parameters(self.model), self._params))
        for these, others, when in ((now, own, "requires grad now, but did not"), (own, now, "required grad")):
            if changed := [name for param, name in these.items() if param not in others]:
                raise ValueError(
                    f"{changed[0]!r} {when} when the optimizer was made; DeepSpeed steps on the parameters from then: "
                    "freeze, unfreeze, add or remove it first, then make the optimizer and DeepSpeed's engine"
                )

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
            given = group["params"] if engine is None else flats_of(engine, params)
            units += self._units_of(names, given, without_grads=True)
        return units

    @torch.no_grad()
    def update_working_copy(self) -> None:
        """Copy the full-precision parameters into the model's parameters, and round them to the dtype of the model."""
        for unit in self.all_units():
            for name, piece in unit.pieces.views(unit.pieces.flat).items():
                held = getattr(self._params[name], "ds_tensor", None)
                if held is None:
                    self._params[name].copy_(piece)
                else:
                    held.data.view(-1)[: piece.numel()].copy_(piece.reshape(-1))

    def _units_of(self, names: Sequence[str], given: list[Tensor], *, without_grads: bool = False) -> list[Unit]:
        params = {name: self._params[name] for name in names}
        tensor_group = tensor_group_of(self.model.modules())
        if [tuple(x.shape) for x in given] == [local_shape_of(param) for param in params.values()]:  # stage 0
            if given and given[0] not in self._units:
                pieces = whole_pieces(dict(zip(names, given, strict=True)), params, self._like, tensor_group)
                self._units[given[0]] = Unit(self.tx, self._like, pieces, self.state)
            return [self._units[x] for x in given[:1]]
        flats = [flat for flat in given if without_grads or flat.grad is not None]
        for flat in flats:
            if flat not in self._units:
                pieces = locate(flat, params, self._like, tensor_group)
                self._units[flat] = Unit(self.tx, self._like, pieces, self.state)
        return [self._units[flat] for flat in flats]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, and keep the dtypes in it. DeepSpeed calls this with the state of this rank.

        Raises:
            ValueError: the groups have other parameters, or a group lacks a hyperparameter; nothing was loaded. If the
                state belongs to another transform, the next step raises an error.
        """
        saved: list[dict[str, Any]] = state_dict["param_groups"]
        own = [group["param_names"] for group in self.param_groups]
        if (theirs := [group.get("param_names") for group in saved]) != own:
            raise ValueError(f"the state has groups with the parameters {theirs}, expected {own}")
        for names, old in zip(own, saved, strict=True):
            if missing := [one.key for one in self._numbers[tuple(names)].hyperparams if one.key not in old]:
                raise ValueError(f"the state has no hyperparameter {missing[0]!r} for the group of {names[0]!r}")
        super().load_state_dict(state_dict)
        places = chain.from_iterable(group["params"] for group in saved)
        for place, param in zip(places, chain.from_iterable(g["params"] for g in self.param_groups), strict=True):
            for key, value in state_dict["state"].get(place, {}).items():
                if isinstance(value, Tensor):  # undo the cast to the parameter's dtype by torch
                    self.state[param][key] = value.to(param.device, copy=True)


def _warn_of_unequal_stages(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn if the stages of a pipeline have different groups; all ranks call this together."""
    is_pipeline = hasattr(model, "num_stages") and hasattr(model, "topology")
    if not is_pipeline or not dist.is_initialized():
        return
    labels_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(labels_of_ranks, [group["label"] for group in groups])
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
