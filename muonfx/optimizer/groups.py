"""Assign parameters to groups: names, routes through partitions, and the hyperparameters of each group."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from muonfx.core import Locality, Transform
from muonfx.core.checks import warn_caller
from muonfx.core.hyperparams import hyperparams, with_hyperparams
from muonfx.core.order import combine_signs
from muonfx.optimizer.values import Group, GroupNumbers, Hyperparam, fitted
from muonfx.program.nodes import Node, Program

__all__ = [
    "NamedParameters",
    "Route",
    "check_once",
    "defaults_for_schedulers",
    "groups_by_route",
    "hyperparams_of",
    "named_pairs",
    "names_in",
    "resolve_groups",
    "routes_of",
    "split_by_route",
    "warn_of_ascent",
    "warn_of_unread_rates",
]

NamedParameters = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor] | Tensor] | Iterable[Group]
"""The parameters of an optimizer: a model, named parameters, tensors of a known model, or groups of these."""


class Route(NamedTuple):
    """The transforms of a program that act on some parameters."""

    places: tuple[int, ...]
    """The indices of these transforms among all transforms of the program."""
    label: str | None
    """The labels on the route, joined for display."""
    is_left_out: bool
    """True if the labels of some partition leave the parameters out."""
    hyperparams: tuple[Hyperparam, ...]
    """The hyperparameters of these transforms."""
    order: tuple[int, bool, tuple[int, ...]]
    """The sort key of the group, independent of the order of parameters: Muon's, Adam's, others, untrained ones."""


def defaults_for_schedulers(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the usual hyperparameters, each of the first group that has it; OneCycleLR looks for its momentum here."""
    usual = ("lr", "weight_decay", "momentum")
    return {key: group[key] for key in usual for group in reversed(groups) if key in group}


def names_in(models: Iterable[nn.Module]) -> dict[Tensor, str]:
    """Return the names of the parameters of some models."""
    return {param: name for model in models for name, param in model.named_parameters()}


def resolve_groups(params: Any, known: Mapping[Tensor, str] | None = None) -> list[Group]:
    """Convert the `params` of an optimizer to groups whose "params" are lists of (name, tensor)."""
    items: list[Any] = [{"params": params}] if isinstance(params, nn.Module | Mapping) else list(params)
    if not items or not all(isinstance(item, dict) for item in items):
        items = [{"params": items}]
    groups: list[Group] = [{**item, "params": named_pairs(item["params"], known)} for item in items]
    check_once(pair for group in groups for pair in group["params"])
    return groups


def check_once(pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if two tensors have one name, or one tensor has two names."""
    seen = set[str]()
    name_of: dict[Tensor, str] = {}
    for name, param in pairs:
        if name in seen:
            raise ValueError(f"two parameters are named {name!r}; names must differ over all groups")
        seen.add(name)
        if (first := name_of.setdefault(param, name)) != name:
            raise ValueError(f"{first!r} and {name!r} are one tensor, which would be stepped on twice: give it once")


def named_pairs(params: Any, known: Mapping[Tensor, str] | None = None) -> list[tuple[str, Tensor]]:
    """Convert a model, named parameters or tensors with known names to (name, tensor) pairs."""
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
            raise ValueError(f"params: a tensor of shape {shape} is no parameter of the model: give (name, tensor)")
        return known[item], item
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor):
        return item
    raise TypeError(
        f"expected named parameters, found {type(item).__name__}: pass the model, model.named_parameters(), or model= "
        "with the tensors, because labels, masks and checkpoints use names"
    )


def routes_of(program: Program) -> dict[str, Route]:
    """Return each parameter's route: the transforms of the program that have it among their leaves."""
    nodes = tuple(program.transforms())
    met: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        for name in node.names:
            met.setdefault(name, []).append(place)
    known: dict[tuple[int, ...], Route] = {}
    routes: dict[str, Route] = {}
    for name, placed in met.items():
        places = tuple(placed)
        if places not in known:
            known[places] = _route(name, places, [nodes[place] for place in places])
        routes[name] = known[places]
    return routes


def _route(name: str, places: tuple[int, ...], nodes: list[Node]) -> Route:
    labels = [node.label for node in nodes if node.label is not None]
    left_out = any(
        any(called.label is not None for called in node.called)
        and not any(name in called.names for called in node.called)
        for node in nodes
    )
    hyperparams = hyperparams_of(nodes)
    keys = {one.key for one in hyperparams}
    kind = 3 if left_out or not keys else 1 if "betas" in keys else 0 if "momentum" in keys else 2
    is_elementwise = all(
        node.tx.locality not in (Locality.MATRIX, Locality.LEAF) for node in nodes if not node.children
    )
    return Route(places, "/".join(labels) or None, left_out, tuple(hyperparams), (kind, is_elementwise, places))


def warn_of_ascent(program: Program, routes: Mapping[str, Route], params: Mapping[str, Tensor]) -> None:
    """Warn of trained parameters whose route has no transform that reverses the gradient."""
    trained = [name for name, param in params.items() if param.requires_grad and not routes[name].is_left_out]
    # Check one name for each route: the same transforms act on its other parameters.
    one_of = {routes[name].places: name for name in trained}
    root = next(program.transforms())
    rising = {places for places, name in one_of.items() if 1 in _signs(root, name)}
    if found := [name for name in trained if routes[name].places in rising]:
        warn_caller(
            f"{len(found)} of {len(params)} parameters, such as {found[0]!r}, would move uphill: none of their "
            "transforms reverses the gradient. Put scale_by_learning_rate(...) at the end of their chain; your own "
            'transform that reverses it declares position="learning_rate"'
        )


def _signs(node: Node, name: str) -> frozenset[int]:
    """Return the signs that a parameter's update may have after a node, relative to its gradient."""
    called = [_signs(one, name) for one in node.called if name in one.names]
    return combine_signs(node.tx, called)


def hyperparams_of(nodes: Iterable[Node]) -> list[Hyperparam]:
    """Return the hyperparameters of the given nodes, under short names and without labels if that is unambiguous."""
    owns = [node.own for node in nodes]
    claims = Counter(key for own in owns for key in own.short_names)
    alike = Counter(key for own in owns for key in own.keys)
    found: list[Hyperparam] = []
    for own in owns:
        named = set[str]()
        for key, several in own.short_names.items():
            if claims[key] == 1:
                names = several if isinstance(several, tuple) else (several,)
                is_mirror = named >= set(names)
                named |= set(names)
                found.append(Hyperparam(key, names, isinstance(several, tuple), is_mirror))
        for name, key in zip(own.names, own.keys, strict=True):
            if name not in named:
                found.append(Hyperparam(key if alike[key] == 1 else name, (name,)))
    return found


def split_by_route(pairs: list[tuple[str, Tensor]], routes: Mapping[str, Route]) -> list[list[tuple[str, Tensor]]]:
    """Split named parameters into one list for each route, in the order of groups."""
    parts: dict[Route, list[tuple[str, Tensor]]] = {}
    for name, param in pairs:
        parts.setdefault(routes[name], []).append((name, param))
    return [parts[route] for route in sorted(parts, key=lambda route: route.order)]


NOT_HYPERPARAMS = {"params", "label", "param_names", "lr", "initial_lr"}
"""Group entries that need not be hyperparameters; "lr" is one if the route has a learning rate."""


def groups_by_route(
    tx: Transform, routes: Mapping[str, Route], given: Group, pairs: list[tuple[str, Tensor]]
) -> list[Group]:
    """Split a group by the routes of its parameters, and complete each part with all of its hyperparameters."""
    parts = [(routes[part[0][0]], part) for part in split_by_route(pairs, routes)]
    known = {one.key for route, _ in parts for one in route.hyperparams if not one.is_mirror}
    if unknown := sorted(given.keys() - known - NOT_HYPERPARAMS):
        there = ", ".join(sorted(known)) or "none"
        raise ValueError(f"param_groups: unknown hyperparameter {', '.join(unknown)}; there are {there}")
    defaults = hyperparams(tx)
    found: list[Group] = []
    for route, part in parts:
        numbers = GroupNumbers(route.hyperparams)
        values = numbers.complete(given, defaults)
        with_hyperparams(tx, fitted(defaults, [values])[0]).prepare_all()  # raises if one is out of range
        complete: Group = {
            "label": route.label,
            "lr": 0.0,  # torch's schedulers require an lr in every group, also if it is never read
            **{key: given[key] for key in given.keys() & NOT_HYPERPARAMS},
            **numbers.entries(values),
        }
        found.append({**complete, "params": part})
    return found


def warn_of_unread_rates(groups: Sequence[Group]) -> bool:
    """Warn of an lr or a scheduler in groups of which none has an lr that is read; return True if there was one."""
    for place, group in enumerate(groups):
        if "initial_lr" in group or (not isinstance(group["lr"], Tensor) and group["lr"] != 0.0):
            warnings.warn(
                f"param_groups[{place}]: nothing reads this 'lr', found {group['lr']!r}: the chain has its own "
                "schedule, or no learning rate. For one that can be set here, build the chain with a number",
                UserWarning,
                stacklevel=5,  # torch wraps `step`
            )
            return True
    return False
