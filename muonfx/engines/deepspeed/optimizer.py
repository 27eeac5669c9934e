"""The client optimizer: param_groups by route, and a step on the tensors that DeepSpeed has put into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from muonfx.core import Locality, Transform
from muonfx.core.contract import require_transform
from muonfx.core.hyperparams import hyperparams
from muonfx.engines.deepspeed.pieces import (
    Pieces,
    check_values,
    cut_buffer,
    cut_parameters,
    flats_of,
    global_parameters,
    untyped,
    whole_parameters,
)
from muonfx.engines.deepspeed.unit import Unit
from muonfx.optimizer.groups import Route, defaults_for_schedulers, routes_of, split_by_route
from muonfx.optimizer.ownership import GroupOwner
from muonfx.optimizer.values import GroupNumbers
from muonfx.program.lower import lower

__all__ = ["ZeroOptimizer"]


class ZeroOptimizer(GroupOwner):
    """The client optimizer that `optimizer` makes.

    Raises:
        ValueError: at the first step, a flat tensor in which the parameters of its group are not found again, or in
            which other values lie where a parameter should be (``round_robin_gradients``); the message names it. At
            any step, a parameter that was frozen, unfrozen or added after the optimizer was made.
        RuntimeError: another optimizer steps on these groups, since an engine has exchanged the optimizer.

    Example:
        >>> import muonfx as mfx
        >>> model = nn.Linear(2, 2, bias=False)
        >>> made = ZeroOptimizer(model, mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1)))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> made.step()
        >>> list(made.state[model.weight])
        ['momentum/trace']
    """

    def __init__(self, model: nn.Module, tx: Transform) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, found {type(model).__name__}")
        require_transform("tx", tx)
        if tx.locality is Locality.TREE:
            raise ValueError(
                f"{tx!r} looks at the whole tree, and DeepSpeed steps one flat tensor at a time: leave clipping to its "
                '"gradient_clipping", and skipping of overflows to its loss scaler'
            )
        self.tx, self._model = tx, model
        self._like = global_parameters(model)
        self._params = {name: param for name, param in model.named_parameters() if name in self._like}
        tx.init(self._like)  # raises if the transform cannot handle the parameters
        routes = routes_of(lower(tx, self._like))
        if left_out := [name for name in self._like if name not in routes or routes[name].is_left_out]:
            raise ValueError(
                f"{left_out[0]!r} requires grad, but the labels leave it out: freeze it before, or give it a label"
            )
        defaults = hyperparams(tx)
        self._numbers: dict[tuple[str, ...], GroupNumbers] = {}
        self._units: dict[Tensor, Unit] = {}
        groups: list[dict[str, Any]] = []
        for part in split_by_route(list(self._params.items()), routes):
            route: Route = routes[part[0][0]]
            numbers = GroupNumbers(route.hyperparams)
            self._numbers[tuple(name for name, _ in part)] = numbers
            values = numbers.entries({name: defaults[name] for name in numbers.names})
            groups.append({"label": route.label, "lr": 0.0, **values, "params": part})
        super().__init__(groups, {})
        self.defaults.update(defaults_for_schedulers(self.param_groups))
        for group in self.param_groups:
            # If two keys of a group set one number, later reads compare both with this one to find the changed key.
            self._numbers[tuple(group["param_names"])].read(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on what DeepSpeed has put into the groups; all ranks that share its parts together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_same_trained()
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
        """True if DeepSpeed steps on zeros to allocate the state, as at stage 0 in bf16 when its optimizer is made."""
        own = set(self._params.values())
        given = [param for group in self.param_groups for param in group["params"]]
        are_copies = all(unit.pieces.layout is None for unit in self._units.values()) and own.isdisjoint(given)
        return are_copies and not any(param.grad is None or bool(param.grad.any()) for param in given)

    def _require_same_trained(self) -> None:
        """Require that the model trains the same parameters as at construction."""
        # DeepSpeed's flat tensors contain the parameters from construction only.
        now = {param: name for name, param in self._model.named_parameters() if param.requires_grad}
        own = {param: name for name, param in self._params.items()}
        if late := [name for param, name in now.items() if param not in own]:
            raise ValueError(
                f"{late[0]!r} requires grad now, but was frozen or absent when the optimizer was made, so it would "
                "never be trained: unfreeze or add it first, then make the optimizer and DeepSpeed's engine"
            )
        if gone := [name for param, name in own.items() if param not in now]:
            raise ValueError(
                f"{gone[0]!r} required grad when the optimizer was made, but is frozen or removed now; DeepSpeed "
                "would step on zeros for its gradient: freeze it first, then make the optimizer and DeepSpeed's engine"
            )

    def all_units(self) -> list[Unit]:
        """The parts that are stepped on, also those of other groups and before the first step; all ranks together."""
        self._require_same_trained()
        units: list[Unit] = []
        for group in self.param_groups:
            names: list[str] = group["param_names"]
            engine = self.stage_3(names)
            given = group["params"] if engine is None else flats_of(engine, [self._params[name] for name in names])
            units += self._units_of(names, given, without_grads=True)
        return units

    def stage_3(self, names: Iterable[str] | None = None) -> Any:
        """DeepSpeed's optimizer of stage 3; None at other stages."""
        params = (self._params[name] for name in (self._params if names is None else names))
        return next((x._z3_optimizer for x in map(untyped, params) if hasattr(x, "_z3_optimizer")), None)

    @torch.no_grad()
    def update_working_copy(self) -> None:
        """Round the values that are stepped on to the model's dtype: at stage 0 whole, at stage 3 this rank's parts."""
        for unit in self.all_units():
            for name, piece in unit.pieces.views(unit.pieces.flat).items():
                param = untyped(self._params[name])
                if hasattr(param, "ds_tensor"):
                    param.ds_tensor.data.view(-1)[: piece.numel()].copy_(piece.reshape(-1))
                else:
                    param.copy_(piece)

    def _units_of(self, names: Sequence[str], given: list[Tensor], *, without_grads: bool = False) -> list[Unit]:
        if [tuple(x.shape) for x in given] == [tuple(self._like[name].shape) for name in names]:
            found = [whole_parameters(names, given)]  # stage 0
        else:
            found = [self._pieces_in(flat, names) for flat in given if without_grads or flat.grad is not None]
        units: list[Unit] = []
        for pieces in found:
            first = pieces.flat[0]
            if first not in self._units:
                self._units[first] = Unit(self.tx, self._like, pieces, self.state)
            units.append(self._units[first])
        return units

    def _pieces_in(self, flat: Tensor, names: Sequence[str]) -> Pieces:
        if flat in self._units:
            return self._units[flat].pieces
        params = {name: self._params[name] for name in names}
        engine = self.stage_3(names)
        pieces = cut_buffer(flat, params) if engine is None else cut_parameters(flat, params, engine)
        pieces = pieces.among(self._like)
        check_values(pieces, params)
        return pieces

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, in the dtypes that it has; DeepSpeed calls it with a rank's own part.

        Raises:
            ValueError: groups of other parameters, or without one of the hyperparameters; nothing has been loaded then.
                A state of another transform is found at the next step.
        """
        saved: list[dict[str, Any]] = state_dict["param_groups"]
        own = [group["param_names"] for group in self.param_groups]
        if (theirs := [group.get("param_names") for group in saved]) != own:
            raise ValueError(f"the state is of groups with the parameters {theirs}, and here they are {own}")
        for names, old in zip(own, saved, strict=True):
            if missing := [one.key for one in self._numbers[tuple(names)].hyperparams if one.key not in old]:
                raise ValueError(f"the state has no hyperparameter {missing[0]!r} for the group of {names[0]!r}")
        super().load_state_dict(state_dict)
        places = chain.from_iterable(group["params"] for group in saved)
        for place, param in zip(places, chain.from_iterable(g["params"] for g in self.param_groups), strict=True):
            for key, value in state_dict["state"].get(place, {}).items():
                if isinstance(value, Tensor):  # undo the cast to the parameter's dtype by torch
                    self.state[param][key] = value.to(param.device, copy=True)
