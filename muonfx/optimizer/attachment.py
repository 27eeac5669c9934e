"""Compare an optimizer's parameters with those that its model trains now."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muonfx.sharding.layout import Layout
from muonfx.wrappers import unwrapped

__all__ = ["Attachment", "check_usable", "models_of"]

CAUSES = (
    "was the model sharded, loaded or converted after the optimizer was made (fully_shard, FullyShardedDataParallel, "
    "load_state_dict(assign=True), to_empty() of meta parameters, parametrizations)? Make the optimizer after that"
)
FSDP1 = (
    "it is what FullyShardedDataParallel (FSDP1) leaves of parameters, flattened and cut, of which no matrix can be "
    "told: shard the model with fully_shard (FSDP2; in accelerate fsdp_version=2) instead"
)


def models_of(params: Any) -> list[nn.Module]:
    """The models among what an optimizer was given: itself, or as the "params" of groups."""
    if isinstance(params, nn.Module):
        return [params]
    if not isinstance(params, list | tuple):
        return []
    items: Iterable[Any] = params
    return [item["params"] for item in items if isinstance(item, dict) and isinstance(item.get("params"), nn.Module)]


def check_usable(named: Mapping[str, Tensor], layout: Layout | None) -> None:
    """Refuse parameters that cannot be trained as the matrices that they are.

    Raises:
        ValueError: they are what FSDP1 leaves of parameters, or some are on the meta device and others are not.
    """
    if not all(param.is_meta for param in named.values()):
        _check_real(named)
    if layout is not None and layout.is_flat:
        return  # the caller says what these pieces are
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


class _Bound(NamedTuple):
    """A parameter as it was when its state was made or moved."""

    param: Tensor
    shape: torch.Size
    device: torch.device


class Attachment:
    """The parameters that the optimizer has bound its state to, and their models.

    Args:
        models: those whose parameters were given; they are not kept alive.
        known: a further model, of which perhaps not all parameters were given.
        named: the parameters.
        alone: whether no other rank may have the gradients that this one lacks.
    """

    def __init__(
        self, models: Iterable[nn.Module], known: nn.Module | None, named: Mapping[str, Tensor], *, alone: bool
    ) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._known = None if known is None else weakref.ref(known)
        self._bound: dict[str, _Bound] = {}
        self._trained = any(param.requires_grad for param in named.values())
        self._alone = alone
        self._seen: tuple[str, ...] | None = None
        self._looked: tuple[str, ...] | None = None
        self._warned_of_none = False
        self.bind(named)

    @property
    def models(self) -> list[nn.Module]:
        """All that are known, and still there."""
        refs = self._models if self._known is None else [*self._models, self._known]
        return [model for ref in refs if (model := ref()) is not None]

    def add(self, models: Iterable[nn.Module], named: Mapping[str, Tensor]) -> None:
        """Take in parameters of a group that was added."""
        self._models += [weakref.ref(model) for model in models]
        self._trained = self._trained or any(param.requires_grad for param in named.values())
        self.bind(named)

    def check_real(self) -> None:
        """Refuse parameters on the meta device: there is nothing to step on, or to load for.

        Raises:
            ValueError: there are some.
        """
        if self._on_meta:
            _check_real({name: bound.param for name, bound in self._bound.items()})

    def later(self, named: Mapping[str, Tensor], *, at_step: bool) -> dict[str, Tensor]:
        """The tensors that the models have now by names whose own tensors are still those that were bound.

        A model is sharded, loaded or given storage after its optimizer was made: its parameters are other objects then.
        Where somebody else has replaced one in the groups, that one counts. At a step models are looked at only where
        other parameters lack gradients than when they were looked at last.
        """
        absent = tuple(name for name, param in named.items() if param.grad is None) if at_step else None
        if absent is not None and absent in ((), self._looked):
            return {}
        there = {plain: param for model in self.models for plain, param in _plain(model).items()}
        ours = {id(param) for param in named.values()}
        found = {
            name: new
            for name, plain in unwrapped(named).items()
            if (new := there.get(plain)) is not None and id(new) not in ours and named[name] is self._bound[name].param
        }
        self._looked = None if found else absent
        return found

    def replaced(self, named: Mapping[str, Tensor]) -> list[str]:
        """The names by which there are other tensors now, or on another device.

        Raises:
            ValueError: one of them has another shape.
        """
        found: list[str] = []
        for name, param in named.items():
            bound = self._bound[name]
            is_same = bound.param is param
            if not is_same and param.shape != bound.shape:
                raise ValueError(
                    f"{name!r} in param_groups was replaced by a tensor of shape {tuple(param.shape)}, expected "
                    f"{tuple(bound.shape)}: {CAUSES}"
                )
            if not is_same or param.device != bound.device:
                found.append(name)
        return found

    def bind(self, named: Mapping[str, Tensor]) -> None:
        """Note that these tensors' state is there."""
        # Not by weak references: torch.utils.swap_tensors, which converts parameters in place, refuses what has any.
        self._bound |= {name: _Bound(param, param.shape, param.device) for name, param in named.items()}
        self._seen = self._looked = None
        self._on_meta = any(bound.param.is_meta for bound in self._bound.values())

    def check(self, named: Mapping[str, Tensor], updates: Mapping[str, Tensor | None]) -> None:
        """Look at parameters, and at their models where some parameter has no gradient.

        Raises:
            ValueError: a parameter has another shape than at construction, or the models train other parameters and
                none of these.
        """
        for name, param in named.items():
            shape = self._bound[name].shape
            if param.shape != shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(param.shape)}, {tuple(shape)} when the optimizer was made: "
                    + (FSDP1 if getattr(param, "_fsdp_flattened", False) else CAUSES)
                )
        absent = tuple(name for name, grad in updates.items() if grad is None)
        if absent == self._seen:
            return
        self._seen = absent
        none = self._trained and len(absent) == len(updates)
        strangers = self._strangers(named)
        if strangers and none:
            self._seen = None  # to be found at every step
            first = next(iter(strangers))
            is_flat = getattr(strangers[first], "_is_flat_param", False)
            raise ValueError(
                f"none of the {len(named)} parameters has a gradient, but {first!r} of the model has one and is not "
                f"among them: {FSDP1 if is_flat else CAUSES}"
            )
        if strangers:
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
        """The parameters of the models that have a gradient and are not the optimizer's."""
        ours = {id(param) for param in named.values()}
        models = [model for ref in self._models if (model := ref()) is not None]
        return {
            name: param
            for model in models
            for name, param in model.named_parameters()
            if id(param) not in ours and param.grad is not None
        }


def _plain(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model by names without what wrappers put into them."""
    found = dict(model.named_parameters())
    return {plain: found[name] for name, plain in unwrapped(found).items()}


def _check_real(named: Mapping[str, Tensor]) -> None:
    if meta := [name for name, param in named.items() if param.is_meta]:
        raise ValueError(
            f"{meta[0]!r} is on the meta device, as are {len(meta)} of {len(named)} parameters: give them storage and "
            "values first (model.to_empty(device=...), then the weights). The optimizer finds them by name if it was "
            "given the model; else make it after that"
        )
