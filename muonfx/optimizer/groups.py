"""Parameters to groups: names, routes through partitions, and the hyperparameters that each group holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from muonfx.core import Transform
from muonfx.hyperparams import hyperparams, injected
from muonfx.partition import routes
from muonfx.recorded import Recorded, dotted, part_names
from muonfx.wrappers import unwrapped

__all__ = [
    "NOT_HYPERPARAMS",
    "NamedParameters",
    "Route",
    "hyperparams_of",
    "label_of",
    "named_pairs",
    "resolve_groups",
    "routes_of",
    "split_by_route",
]

NamedParameters = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
"""What an optimizer takes: a model, named parameters, or groups of them."""

Route = dict[str, Any]
"""The label of a parameter in each partition of a transform, or its value in each mask, by the dotted name of these."""


def resolve_groups(params: Any) -> list[dict[str, Any]]:
    """Resolve what the caller gave to groups whose "params" are lists of (name, tensor)."""
    items: list[Any] = [{"params": params}] if isinstance(params, nn.Module | Mapping) else list(params)
    if not items or not all(isinstance(item, dict) for item in items):
        items = [{"params": items}]
    groups: list[dict[str, Any]] = [{**item, "params": named_pairs(item["params"])} for item in items]
    names = [name for group in groups for name, _ in group["params"]]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two parameters are named {twice[0]!r}; names must differ over all groups")
    plain = unwrapped(names)
    if twice := [name for name, times in Counter(plain.values()).items() if times > 1]:
        both = " and ".join(repr(name) for name in names if plain[name] == twice[0])
        raise ValueError(
            f"{both} are both {twice[0]!r} without what wrappers (torch.compile, activation checkpointing, ...) put "
            "into names, by which states are saved: rename one of them"
        )
    return groups


def named_pairs(params: Any) -> list[tuple[str, Tensor]]:
    """Resolve a model or named parameters to pairs."""
    if isinstance(params, nn.Module):
        return list(params.named_parameters())
    pairs: list[Any] = list(params.items()) if isinstance(params, Mapping) else list(params)
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise TypeError(
                f"expected named parameters, found {type(pair).__name__}; pass the model, or model.named_parameters(): "
                "labels, masks and checkpoints go by name"
            )
    return pairs


def routes_of(tx: Transform, named: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """For each parameter the label that it has in each partition of the transform, by the partition's prefix."""
    found: dict[str, dict[str, Any]] = {name: {} for name in named}
    for prefix, names, labels in routes(tx, dict(named)):
        for name, label in zip(names, labels, strict=True):
            found[name][prefix] = label
    return found


def split_by_route(
    pairs: list[tuple[str, Tensor]], routes: Mapping[str, Mapping[str, Any]]
) -> list[list[tuple[str, Tensor]]]:
    """Cut named parameters into lists of one route each, in the order in which routes first appear."""
    parts: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    for name, param in pairs:
        parts.setdefault(tuple(routes[name].items()), []).append((name, param))
    return list(parts.values()) or [[]]


def label_of(routes: Mapping[str, Mapping[str, Any]], pairs: list[tuple[str, Tensor]]) -> str | None:
    """The labels that all parameters of a group share, for a person to read."""
    shared = {tuple(routes[name].values()) for name, _ in pairs}
    labels = [label for label in next(iter(shared)) if isinstance(label, str)] if len(shared) == 1 else []
    return "/".join(labels) or None


NOT_HYPERPARAMS = {"label", "param_names", "lr", "initial_lr"}
"""Entries of a group that need not be a number of the transform; "lr" is one where it has a learning rate."""


def hyperparams_of(tx: Transform, route: Route) -> dict[str, tuple[str, Any]]:
    """The hyperparameters that parameters of a route meet: key in the group -> (dotted name, default).

    The key is the dotted name without the route's labels; "lr" and "weight_decay" where there is one such.
    """
    in_state = injected(tx)
    met = {
        name: (short, value)
        for name, value in hyperparams(tx).items()
        if name not in in_state and (short := _short(name, route)) is not None
    }
    keys: dict[str, tuple[str, Any]] = {short: (name, value) for name, (short, value) in met.items()}
    for alias, found in _aliased(tx).items():
        here = [name for name in found if name in met]
        if len(here) == 1:
            keys[alias] = keys.pop(met[here[0]][0])
    return keys


_ALIASES = {"lr": ("scale_by_learning_rate", "learning_rate"), "weight_decay": ("add_decayed_weights", "weight_decay")}


def _aliased(tx: Transform, prefix: str = "") -> dict[str, list[str]]:
    """The dotted names of the numbers that have a short key: which transform they belong to decides, not its name."""
    found: dict[str, list[str]] = {alias: [] for alias in _ALIASES}
    for name, part in zip(part_names(tx), tx.parts, strict=True):
        if isinstance(part, Transform):
            for alias, names in _aliased(part, f"{prefix}{dotted(name)}").items():
                found[alias] += names
        for alias, (factory, argument) in _ALIASES.items():
            if (tx.name, name) == (factory, argument) and not isinstance(part, Recorded):
                found[alias].append(prefix + name)
    return found


def _short(name: str, route: Mapping[str, Any]) -> str | None:
    """A hyperparameter's name without the labels of a route; None where the route does not come by."""
    for prefix in sorted(route, key=len, reverse=True):
        label = route[prefix]
        if prefix and not name.startswith(prefix + "."):
            continue
        rest = name[len(prefix) + 1 :] if prefix else name
        if isinstance(label, bool):
            if not label and rest.startswith("inner."):
                return None
            continue
        if label is None or not rest.startswith(f"{label}."):
            return None
        name = (f"{prefix}." if prefix else "") + rest[len(label) + 1 :]
    return name
