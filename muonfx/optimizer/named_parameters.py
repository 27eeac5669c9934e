"""Convert the argument ``params`` of an optimizer to groups of named parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor, nn

from muonfx.core import Transform
from muonfx.optimizer.group_numbers import Group

NamedParameters = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor] | Tensor] | Iterable[Group]


"""The parameters of an optimizer: a model, named parameters, tensors of a known model, or groups of these."""


def names_in(models: Iterable[nn.Module]) -> dict[Tensor, str]:
    """Return a dict from each parameter of the models to its name."""
    return {param: name for model in models for name, param in model.named_parameters()}


def resolve_groups(params: Any, known: Mapping[Tensor, str] | None = None) -> list[Group]:
    """Convert the argument `params` of an optimizer to a list of groups whose "params" are (name, tensor) pairs."""
    items: list[Any] = [{"params": params}] if isinstance(params, nn.Module | Mapping) else list(params)
    if not items or not all(isinstance(item, dict) for item in items):
        items = [{"params": items}]
    groups: list[Group] = [{**item, "params": named_pairs(item["params"], known)} for item in items]
    check_once(pair for group in groups for pair in group["params"])
    return groups


def require_parameters(params: object) -> None:
    """Raise TypeError unless an argument can be the parameters of an optimizer."""
    if isinstance(params, nn.Module | Mapping | Iterable) and not isinstance(params, str):
        return
    wanted = "a model, model.named_parameters(), or a dict from names to tensors"
    advice = "; the model comes first, then the transform" if isinstance(params, Transform) else ""
    if isinstance(params, Real):
        advice = f"; the model comes first: Muon(model, lr={params})"
    raise TypeError(f"params must be {wanted}, found {type(params).__name__}{advice}")


def check_once(pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if two parameters have the same name, or if one tensor is given under two names."""
    seen = set[str]()
    name_of: dict[Tensor, str] = {}
    for name, param in pairs:
        if name in seen:
            raise ValueError(f"two parameters are named {name!r}: give each parameter of all groups another name")
        seen.add(name)
        if (first := name_of.setdefault(param, name)) != name:
            raise ValueError(f"{first!r} and {name!r} are one tensor, which would be stepped on twice: give it once")


def named_pairs(params: Any, known: Mapping[Tensor, str] | None = None) -> list[tuple[str, Tensor]]:
    """Convert a model, named parameters or tensors to (name, tensor) pairs. ``known`` maps unnamed tensors to names."""
    if isinstance(params, nn.Module):
        return list(params.named_parameters())
    if isinstance(params, Mapping):
        return list(params.items())
    items: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    return [_named_pair(item, known) for item in items]


def _named_pair(item: object, known: Mapping[Tensor, str] | None) -> tuple[str, Tensor]:
    if isinstance(item, Tensor) and known:
        if item not in known:
            shape = tuple(item.shape)
            raise ValueError(f"params: a tensor of shape {shape} is not a parameter of the model: give (name, tensor)")
        return known[item], item
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor):
        return item
    raise TypeError(
        f"expected named parameters, found {type(item).__name__}: pass the model, model.named_parameters(), or model= "
        "with the tensors, because labels, masks and checkpoints use names"
    )
