"""Parameter groups of an optimizer: their names, their hyperparameters, and the transforms that update them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muonfx.core import Locality, Transform
from muonfx.core.checks import warn_caller
from muonfx.core.hyperparams import hyperparams, with_hyperparams
from muonfx.core.order import combine_signs
from muonfx.program.nodes import Node, Program
from muonfx.tree.arguments import did_you_mean

Number = float | Tensor

Group = dict[str, Any]
"""A param group of a torch optimizer: a dict with "params", hyperparameters, and entries that schedulers add."""

NamedParameters = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor] | Tensor] | Iterable[Group]
"""The parameters of an optimizer: a model, named parameters, tensors of a known model, or groups of these."""


# ----------------------------------------------------------------------------------------------- the numbers of a group


class Hyperparam(NamedTuple):
    """An entry of a param group, such as "lr" or "betas", and the transform's numbers that the entry sets."""

    key: str
    """The key in the group, such as "betas"."""
    names: tuple[str, ...]
    """The dotted names of the numbers in the transform, as in `muonfx.hyperparams`."""
    is_tuple: bool = False
    """True if the value in the group is a tuple."""
    is_mirror: bool = False
    """True if other keys have the same numbers, as "momentum" repeats the first of "betas" for schedulers."""

    def numbers_in(self, value: Number | Sequence[Number]) -> Sequence[Number]:
        """Return the numbers in a param group's value for this key. Raise if their count or type is wrong."""
        values = value if isinstance(value, Sequence) else (value,)
        if self.is_tuple != isinstance(value, Sequence) or len(values) != len(self.names):
            wanted = f"{len(self.names)} numbers" if self.is_tuple else "a number"
            raise ValueError(f"{self.key!r} in a group must be {wanted}, found {value!r}")
        for one in values:
            if not isinstance(one, int | float | Tensor | Real) or isinstance(one, bool):
                raise TypeError(f"{self.key!r} in a group must be a number or a tensor of one element, found {one!r}")
        return values


class GroupNumbers:
    """Reads and writes the hyperparameters of one param group, in which two keys may hold the same number."""

    def __init__(self, hyperparams: Sequence[Hyperparam]) -> None:
        self.hyperparams = tuple(hyperparams)
        self.keys = frozenset({one.key for one in hyperparams})
        self._last: dict[str, Number] = {}
        self._entries: Group = {}

    @property
    def names(self) -> list[str]:
        """The dotted names of the hyperparameters in the transform, such as "momentum.decay"."""
        return [name for one in self.hyperparams if not one.is_mirror for name in one.names]

    def parse(self, values: Group, *, mirrors: bool = True) -> dict[str, Number]:
        """Return a group's hyperparameters by dotted name. If two keys set the same one, the changed value counts."""
        found: dict[str, Number] = {}
        said: dict[str, str] = {}
        for one in self.hyperparams:
            if one.key not in values or (one.is_mirror and not mirrors):
                continue
            for name, value in zip(one.names, one.numbers_in(values[one.key]), strict=True):
                if name in found and not equal(found[name], value):
                    if name in self._last and equal(value, self._last[name]):
                        continue
                    if name not in self._last or not equal(found[name], self._last[name]):
                        raise ValueError(
                            f"{said[name]!r} and {one.key!r} in a group both set {name}, to {found[name]!r} and "
                            f"{value!r}: set one of them"
                        )
                found[name], said[name] = value, one.key
        return found

    def complete(self, given: Group, defaults: Mapping[str, Number]) -> dict[str, Number]:
        """Return a new group's hyperparameters by dotted name, from ``defaults`` if ``given`` lacks them."""
        return {name: defaults[name] for name in self.names} | self.parse(given, mirrors=False)

    def entries(self, numbers: Mapping[str, Number]) -> Group:
        """Return the entries of a param group, such as ``lr`` and ``betas``, for numbers given by dotted name."""
        return {
            one.key: tuple(numbers[name] for name in one.names) if one.is_tuple else numbers[one.names[0]]
            for one in self.hyperparams
        }

    def read(self, group: Group) -> dict[str, Number]:
        """Return a group's current hyperparameters by dotted name, and synchronize keys that hold the same number.

        If no number has changed, return the same dict object as in the last call.
        """
        # torch.compile with dynamic=True cannot trace identities of tuples such as betas.
        may_skip = self._entries and not torch.compiler.is_compiling()
        if may_skip and all(map(is_, map(group.get, self._entries), self._entries.values())):
            return self._last
        numbers = self.parse(group)
        # torch.compile with dynamic=True cannot trace a comparison of sets.
        missing = [one for one in self.hyperparams if any(name not in numbers for name in one.names)]
        if missing:
            last = self._entries.get(missing[0].key)
            was = "" if last is None else f" (it was {last!r})"
            raise ValueError(
                f"param_groups: the group of {next(iter(group.get('param_names', ())), 'no parameter')!r} (label "
                f"{group.get('label')!r}) has no {missing[0].key!r}, which its transforms read: set it{was}"
            )
        for one in self.hyperparams:
            wanted = [numbers[name] for name in one.names]
            if one.key not in group or not all(map(equal, one.numbers_in(group[one.key]), wanted)):
                group[one.key] = tuple(wanted) if one.is_tuple else wanted[0]
        last = self._last
        if last.keys() != numbers.keys() or not all(equal(last[name], value) for name, value in numbers.items()):
            self._last = numbers
        self._entries = {one.key: group[one.key] for one in self.hyperparams}
        return self._last


class BoundGroup(NamedTuple):
    """A param group, its parameter names at the last step, and the object that reads its hyperparameters."""

    group: Group
    names: list[str]
    numbers: GroupNumbers


def own_copy(value: Any) -> Any:
    """Return a copy of a tensor, so that a scheduler that writes into it changes one group; return others unchanged."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def separate_tensors(groups: Iterable[BoundGroup]) -> None:
    """Replace a tensor that several groups or several hyperparameters have in common by a copy for each of them."""
    owned = set[int]()
    for bound in groups:
        numbers = dict(bound.numbers.read(bound.group))
        has_changed = False
        for name, value in numbers.items():
            if not isinstance(value, Tensor):
                continue
            if id(value) in owned:
                numbers[name] = own_copy(value)
                has_changed = True
            owned.add(id(numbers[name]))
        if has_changed:
            bound.group.update(bound.numbers.entries(numbers))


def scalar(name: str, value: Any) -> Any:
    """Return a hyperparameter. A tensor of one element becomes a 0-d view, and a larger one raises ValueError."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name} must be a number or a tensor of one element, found shape {tuple(value.shape)}")
    return value.reshape(()) if value.ndim else value


def fitted(defaults: Mapping[str, Number], values: Sequence[Mapping[str, Number]]) -> list[dict[str, Number]]:
    """Convert the numbers of each group to the types and shapes of the transform's own numbers, ``defaults``."""
    # One 0-d view of each tensor, because a scheduler may write into it.
    views: dict[int, Number] = {}

    def fit(name: str, value: Number) -> Number:
        if not isinstance(value, Tensor):
            return value if isinstance(value, int | float) else float(value)
        default = defaults[name]
        if not isinstance(default, Tensor) or not default.ndim:
            return views.setdefault(id(value), scalar(name, value))
        if value.shape != default.shape:
            shapes = f"{tuple(default.shape)}, found {tuple(value.shape)}"
            raise ValueError(f"{name} must be a number or a tensor of shape {shapes}")
        return value

    return [{name: fit(name, value) for name, value in own.items()} for own in values]


def equal(a: object, b: object) -> bool:
    """Return True if two numbers are equal, or if both are one tensor object. Tensor values are not compared."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


# ----------------------------------------------------------------------------------------------------- names and routes


class Route(NamedTuple):
    """The list of transforms that update a parameter. All parameters of one param group have the same list."""

    places: tuple[int, ...]
    """The indices of these transforms among all transforms of the lowered program (`Program.transforms`)."""
    label: str | None
    """The labels by which partitions select the parameter, joined by "/", or None without labels."""
    is_left_out: bool
    """True if a partition gives the parameter the label None, so that it is not trained."""
    hyperparams: tuple[Hyperparam, ...]
    """The hyperparameters of these transforms."""
    order: tuple[int, bool, tuple[int, ...]]
    """The sort key of the group: first Muon's, then Adam's, others, and groups that are not trained."""


def defaults_for_schedulers(groups: Sequence[Group]) -> dict[str, Any]:
    """Return ``optimizer.defaults``, as OneCycleLR needs it: each key with the value of the first group that has it."""
    usual = ("lr", "weight_decay", "momentum")
    return {key: group[key] for key in usual for group in reversed(groups) if key in group}


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


def routes_of(program: Program) -> dict[str, Route]:
    """Return a dict from parameter name to `Route` (the list of transforms that update the parameter)."""
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
    """Warn of trained parameters whose updates keep the sign of the gradient, so that a step increases the loss."""
    trained = [name for name, param in params.items() if param.requires_grad and not routes[name].is_left_out]
    # Check one parameter of each route: the same transforms update the others.
    one_of = {routes[name].places: name for name in trained}
    root = next(program.transforms())
    rising = {places for places, name in one_of.items() if 1 in _signs(root, name)}
    if found := [name for name in trained if routes[name].places in rising]:
        warn_caller(
            f"each step would increase the loss: the updates of {len(found)} of {len(params)} parameters, such as "
            f"{found[0]!r}, have the sign of the gradient. Put scale_by_learning_rate(...) at the end of their chain. "
            'If a transform of your own reverses the sign, declare position="learning_rate" for it'
        )


def _signs(node: Node, name: str) -> frozenset[int]:
    """Return the possible signs (1 same, -1 reversed, 0 unknown) of a parameter's update after a node (a transform)."""
    called = [_signs(one, name) for one in node.called if name in one.names]
    return combine_signs(node.tx, called)


def hyperparams_of(nodes: Iterable[Node]) -> list[Hyperparam]:
    """Return the hyperparameters of several nodes (transforms), each with its own key for a param group."""
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
    """Split (name, tensor) pairs into one list per route (the list of transforms that update a parameter)."""
    parts: dict[Route, list[tuple[str, Tensor]]] = {}
    for name, param in pairs:
        parts.setdefault(routes[name], []).append((name, param))
    return [parts[route] for route in sorted(parts, key=lambda route: route.order)]


NOT_HYPERPARAMS = {"params", "label", "param_names", "lr", "initial_lr"}
"""The keys that a group may have even if they are not hyperparameters of its transforms."""


def groups_by_route(
    tx: Transform, routes: Mapping[str, Route], given: Group, pairs: list[tuple[str, Tensor]]
) -> list[Group]:
    """Split a group so that the same transforms update all parameters of a part, and fill in all hyperparameters."""
    parts = [(routes[part[0][0]], part) for part in split_by_route(pairs, routes)]
    known = {one.key for route, _ in parts for one in route.hyperparams if not one.is_mirror}
    if unknown := sorted(given.keys() - known - NOT_HYPERPARAMS):
        there = ", ".join(sorted(known)) or "none"
        close = did_you_mean(unknown[0], known)
        raise ValueError(f"param_groups: unknown hyperparameter {', '.join(unknown)}{close}; there are {there}")
    defaults = hyperparams(tx)
    found: list[Group] = []
    for route, part in parts:
        numbers = GroupNumbers(route.hyperparams)
        values = {name: own_copy(value) for name, value in numbers.complete(given, defaults).items()}
        with_hyperparams(tx, fitted(defaults, [values])[0]).prepare_all()  # raises if one is out of range
        complete: Group = {
            "label": route.label,
            "lr": 0.0,  # PyTorch's schedulers require an lr in every group, even if no transform reads it
            **{key: own_copy(given[key]) for key in given.keys() & NOT_HYPERPARAMS},
            **numbers.entries(values),
        }
        found.append({**complete, "params": part})
    return found


def warn_of_unread_rates(groups: Sequence[Group]) -> bool:
    """Warn of the first param group with an "lr" that no transform reads. Return True after a warning."""
    for place, group in enumerate(groups):
        if "initial_lr" in group or (not isinstance(group["lr"], Tensor) and group["lr"] != 0.0):
            warnings.warn(
                f"param_groups[{place}]: 'lr' is {group['lr']!r}, expected no value: the chain has a schedule or no "
                "learning rate, and ignores it. To set the rate in groups, create the chain with a number as "
                "learning rate",
                UserWarning,
                stacklevel=5,  # torch wraps `step`
            )
            return True
    return False
