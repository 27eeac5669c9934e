"""Convert the argument ``params`` of an optimizer to groups of named parameters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from numbers import Real
from typing import Any, cast

from torch import Tensor, nn

from muonfx.core import Transform
from muonfx.core.checks import is_frozen, warn_caller
from muonfx.internal.display import format_list
from muonfx.optimizer.group_numbers import Group

NamedTensors = Mapping[str, Tensor]
"""Parameters by name, such as ``{"0.weight": tensor}``."""

NamedPairs = list[tuple[str, Tensor]]
"""Pairs of a name and a parameter."""

Gradients = dict[str, Tensor | None]
"""The gradient of each parameter by name; None for a parameter without one."""

NamedParameters = (
    nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor] | Tensor] | Iterable[Group]
)
"""The parameters of an optimizer: a model, named parameters, tensors of a known model, or groups of these."""


def names_in(models: Iterable[nn.Module]) -> dict[Tensor, str]:
    """Return a dict from each parameter of the models to its name in the first model that has it."""
    name_of: dict[Tensor, str] = {}
    for model in models:
        for name, param in model.named_parameters():
            name_of.setdefault(param, name)
    return name_of


def resolve_groups(params: Any, model: nn.Module | None) -> list[Group]:
    """Convert the argument ``params`` of an optimizer to a list of groups whose "params" are (name, tensor) pairs.

    For example, ``model`` becomes ``[{"params": [("weight", tensor), ("bias", tensor)]}]``. A list of groups keeps its
    other entries, such as "lr". ``model`` provides the names of tensors without names. Raise unless each parameter is
    given once.
    """
    require_parameters(params)
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {type(model).__name__}")
    models = [] if model is None else [model]
    name_of = names_in(models)
    groups: list[Group] = [{"params": params}]  # one group, unless `params` is a list of groups
    if not isinstance(params, nn.Module | Mapping):
        items: list[Any] = list(params)
        if items and all(isinstance(item, dict) for item in items):
            groups = items
    # Replace the "params" of each group by pairs.
    named_groups: list[Group] = []
    all_pairs: NamedPairs = []
    for group in groups:
        pairs = named_pairs(params_of(group), name_of)
        named_groups.append({**group, "params": pairs})
        all_pairs += pairs
    check_once(all_pairs)
    return named_groups


def warn_of_empty_groups(groups: Iterable[Group], model: nn.Module | None) -> None:
    """Warn of each group without parameters, as when the names that select them match nothing.

    Do not warn if a group may be empty on purpose:

    - Frozen parameters are often left out of the groups. So ``model`` must be given, and none of its parameters frozen.
    - Parameters with and without weight decay are often two groups, of which one is empty in a model without biases
      and norms. So a group with "weight_decay" may be empty.
    """
    if model is None or any(is_frozen(param) for param in model.parameters()):
        return
    for number, group in enumerate(groups):
        if not group["params"] and "weight_decay" not in group:
            warn_caller(
                f"params: group {number} has no parameters; check the names that select them"
            )


def params_of(group: object) -> Any:
    """Return the "params" of a param group. Raise TypeError if it is no dict, and ValueError if it has no "params"."""
    if not isinstance(group, Mapping):
        raise TypeError(
            f"a param group must be a dict, such as {{'params': model}}, found {type(group).__name__}"
        )
    entries = cast("Mapping[str, Any]", group)
    if "params" not in entries:
        raise ValueError(
            f"a param group must have the key 'params', found {format_list(list(entries))}"
        )
    params = entries["params"]
    if not _can_be_parameters(params):
        raise TypeError(
            "'params' of a param group must be a model, named parameters, or a dict from names to tensors, found "
            f"{type(params).__name__}"
        )
    return params


def require_parameters(params: object) -> None:
    """Raise TypeError unless an argument can be the parameters of an optimizer, such as a model or a dict of tensors.

    If it is a learning rate or a transform, the error shows the right order of arguments: ``Muon(model, lr=0.1)``.
    """
    if _can_be_parameters(params):
        return
    advice = ""
    if isinstance(params, Transform):
        advice = "; the model comes first, then the transform"
    elif isinstance(params, Real):
        advice = f"; the model comes first: Muon(model, lr={params})"
    raise TypeError(
        "params must be a model, model.named_parameters(), or a dict from names to tensors, found "
        f"{type(params).__name__}{advice}"
    )


def _can_be_parameters(params: object) -> bool:
    """Return True for a model and for a container. Its items are not checked."""
    return isinstance(params, nn.Module | Iterable) and not isinstance(params, str)


def divide(named: NamedTensors, names: Container[str]) -> tuple[NamedTensors, NamedTensors]:
    """Divide parameters into those whose names are in ``names``, and the others, as two dicts by name.

    For example, ``{"w": tensor, "b": tensor}`` and ``["w"]`` give ``({"w": tensor}, {"b": tensor})``.
    """
    with_these_names: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for name, param in named.items():
        if name in names:
            with_these_names[name] = param
        else:
            others[name] = param
    return with_these_names, others


def divide_frozen(named: NamedTensors) -> tuple[NamedTensors, NamedTensors]:
    """Return the frozen parameters, and the others."""
    return divide(named, {name for name, param in named.items() if is_frozen(param)})


def check_once(pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if two parameters have the same name, or if one tensor is given twice.

    State is stored by name, so two parameters of one name would share it. A tensor that is given twice would be
    updated twice by each step.
    """
    names_so_far = set[str]()
    name_of: dict[Tensor, str] = {}
    for name, param in pairs:
        # This includes a tensor with two names of the caller, if a model has given it one name.
        if name_of.get(param) == name:
            raise ValueError(
                f"{name!r} is given twice, and would be stepped on twice: give it once"
            )
        if name in names_so_far:
            raise ValueError(
                f"two parameters are named {name!r}: give each parameter of all groups another name"
            )
        if param in name_of:
            first = name_of[param]
            raise ValueError(
                f"{first!r} and {name!r} are one tensor, which would be stepped on twice: give it once"
            )
        names_so_far.add(name)
        name_of[param] = name


def named_pairs(params: Any, known: Mapping[Tensor, str] | None = None) -> NamedPairs:
    """Convert a model, named parameters or tensors to (name, tensor) pairs. ``known`` maps unnamed tensors to names.

    For example, ``{"w": tensor}`` becomes ``[("w", tensor)]``, and so does ``[tensor]`` if ``known`` is
    ``{tensor: "w"}``.
    """
    if isinstance(params, nn.Module):
        return list(params.named_parameters())
    if isinstance(params, Mapping):
        _require_tensors(params)
        return list(params.items())
    if isinstance(params, Tensor):
        return [_named_pair(params, known)]
    return [_named_pair(item, known) for item in params]


def _require_tensors(params: Mapping[str, object]) -> None:
    """Raise TypeError if a value of a dict of parameters is no tensor, as in a single group, ``{"params": [...]}``."""
    for name, value in params.items():
        if isinstance(value, Tensor):
            continue
        advice = ""
        if "params" in params:
            advice = ": give a group in a list, as in [{'params': model}]"
        raise _no_tensor(name, value, advice)


def _no_tensor(name: object, value: object, advice: str = "") -> TypeError:
    """Return an error for a named parameter that is no tensor, such as ``("bias", None)``."""
    return TypeError(f"params: {name!r} must be a tensor, found {type(value).__name__}{advice}")


def with_known_names(pairs: NamedPairs, known: Mapping[Tensor, str]) -> NamedPairs:
    """Return (name, tensor) pairs with the names that known models have for the tensors.

    ``block.named_parameters()`` has the name "weight" for the parameter "blocks.0.weight" of the model, which counts.

    >>> param = nn.Parameter()
    >>> pairs = with_known_names([("weight", param)], known={param: "blocks.0.weight"})
    >>> dict(pairs)
    {'blocks.0.weight': Parameter containing:
    tensor([], requires_grad=True)}
    """
    renamed: NamedPairs = []
    for given_name, param in pairs:
        name = known.get(param, given_name)
        renamed.append((name, param))
    return renamed


def _named_pair(item: object, known: Mapping[Tensor, str] | None) -> tuple[str, Tensor]:
    """Return the name and the tensor of one item of the argument ``params``: such a pair, or a tensor of a model.

    ``known`` has the names of the tensors of the model, if the caller has given one. Raise for any other item.
    """
    if isinstance(item, Tensor) and known:  # a tensor without name, of a known model
        if item not in known:  # for example, it was in the model before `fully_shard`
            shape = tuple(item.shape)
            raise ValueError(
                f"params: a tensor of shape {shape} is not a parameter of the model: pass the model, or a list "
                "that was made after the model was sharded or changed"
            )
        return known[item], item
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        name, value = item
        if not isinstance(value, Tensor):
            raise _no_tensor(name, value)
        return name, value
    raise TypeError(
        f"expected named parameters, found {type(item).__name__}: pass the model, model.named_parameters(), or model= "
        "with the tensors, because labels, masks and checkpoints use names. If a program passes model.parameters() "
        "itself: configure_optimizers for Lightning (not the CLI's --optimizer), muonfx.engines.huggingface.muon(args) "
        "for Hugging Face's Trainer, layout=muonfx.sharding.replicated in place of ZeroRedundancyOptimizer"
    )
