"""Parameter groups of an optimizer: their names, their hyperparameters, and the transforms that update them."""

from __future__ import annotations

import difflib
import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Real
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muonfx.core import Transform
from muonfx.core.checks import warn_caller
from muonfx.core.hyperparams import hyperparams, with_hyperparams
from muonfx.core.order import combine_signs
from muonfx.core.value import prepared
from muonfx.core.visit import Visit
from muonfx.placement.placed import needs_matrices

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
    copies: int = 1
    """How many transforms the value sets: with 2, ``names`` are the numbers of one transform, then of the other."""

    @property
    def length(self) -> int:
        """The count of numbers in the group's value: 2 for "betas", else 1."""
        return len(self.names) // self.copies

    def numbers_in(self, value: Number | Sequence[Number]) -> Sequence[Number]:
        """Return one number for each of ``names``, from a param group's value. Raise if its count or type is wrong."""
        values = value if isinstance(value, Sequence) else (value,)
        if self.is_tuple != isinstance(value, Sequence) or len(values) != self.length:
            expected = f"{self.length} numbers" if self.is_tuple else "a number"
            raise ValueError(f"{self.key!r} in a group must be {expected}, found {value!r}")
        for number in values:
            if not isinstance(number, int | float | Tensor | Real) or isinstance(number, bool):
                raise TypeError(
                    f"{self.key!r} in a group must be a number or a tensor of one element, found {number!r}"
                )
        return [*values] * self.copies

    def value_of(self, numbers: Mapping[str, Number]) -> Any:
        """Return the value for a param group, such as ``(0.9, 0.95)``, from numbers by dotted name."""
        values = tuple([numbers[name] for name in self.names[: self.length]])
        return values if self.is_tuple else values[0]


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
        return {hyperparam.key: hyperparam.value_of(numbers) for hyperparam in self.hyperparams}

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
            current = [numbers[name] for name in one.names]
            if one.key not in group or not all(map(equal, one.numbers_in(group[one.key]), current)):
                group[one.key] = one.value_of(numbers)
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
    """The indices of these transforms among all visits of the optimizer's transform."""
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


def routes_of(visits: Sequence[Visit]) -> dict[str, Route]:
    """Return a dict from parameter name to `Route` (the list of transforms that update the parameter)."""
    indices_of: dict[str, list[int]] = {}
    for index, visited in enumerate(visits):
        for name in visited.names:
            indices_of.setdefault(name, []).append(index)
    known: dict[tuple[int, ...], Route] = {}
    routes: dict[str, Route] = {}
    for name, indices in indices_of.items():
        places = tuple(indices)
        if places not in known:
            known[places] = _route(name, places, [visits[index] for index in places])
        routes[name] = known[places]
    return routes


def _route(name: str, places: tuple[int, ...], visits: Sequence[Visit]) -> Route:
    labels = [visited.label for visited in visits if visited.label is not None]
    is_left_out = any(_leaves_out(visited, name) for visited in visits)
    hyperparams = hyperparams_of(visits)
    by_matrix = [visited for visited in visits if needs_matrices(visited.tx)]
    rank = _rank_of_group(is_left_out, {hyperparam.key for hyperparam in hyperparams})
    return Route(places, "/".join(labels) or None, is_left_out, tuple(hyperparams), (rank, not by_matrix, places))


def _leaves_out(visited: Visit, name: str) -> bool:
    """Return True if a transform is a partition that gives a parameter the label None."""
    is_partition = any(call.label is not None for call in visited.calls)
    return is_partition and not any(name in call.names for call in visited.calls)


def _rank_of_group(is_left_out: bool, keys: Set[str]) -> int:
    """Return the place of a group in the order of groups: Muon's, Adam's, others, and those that are not trained."""
    if is_left_out or not keys:
        return 3
    if "betas" in keys:
        return 1
    return 0 if "momentum" in keys else 2


def warn_of_ascent(root: Visit, routes: Mapping[str, Route], params: Mapping[str, Tensor]) -> None:
    """Warn of trained parameters whose updates keep the sign of the gradient, so that a step increases the loss."""
    trained = [name for name, param in params.items() if param.requires_grad and not routes[name].is_left_out]
    # Check one parameter of each route: the same transforms update the others.
    one_of = {routes[name].places: name for name in trained}
    rising = {places for places, name in one_of.items() if 1 in _signs(root, name)}
    if found := [name for name in trained if routes[name].places in rising]:
        warn_caller(
            f"each step would increase the loss: the updates of {len(found)} of {len(params)} parameters, such as "
            f"{found[0]!r}, have the sign of the gradient. Put scale_by_learning_rate(...) at the end of their chain. "
            'If a transform of your own reverses the sign, declare position="learning_rate" for it'
        )


def _signs(visited: Visit, name: str) -> frozenset[int]:
    """Return the possible signs (1 same, -1 reversed, 0 unknown) of a parameter's update after a transform."""
    inner = [_signs(call, name) for call in visited.calls if name in call.names]
    return combine_signs(visited.tx, inner)


def hyperparams_of(visits: Iterable[Visit]) -> list[Hyperparam]:
    """Return the hyperparameters of several transforms, each with its own key for a param group."""
    owns = [visited.numbers for visited in visits]
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


# -------------------------------------------------------------------------------------------------------- new groups

NOT_HYPERPARAMS = {"params", "label", "param_names", "lr", "initial_lr"}
"""The keys that a group may have even if they are not hyperparameters of its transforms."""


def distinct_routes(names: Iterable[str], routes: Mapping[str, Route]) -> list[Route]:
    """Return each route of the named parameters once, in the order of groups: Muon's, Adam's, then others."""
    return sorted({routes[name] for name in names}, key=lambda route: route.order)


def group_hyperparams(routes: Sequence[Route], group: Group) -> tuple[Hyperparam, ...]:
    """Return the hyperparameters of a param group whose parameters have these routes.

    A key that several routes have, such as "lr", sets the numbers of all of them. If the group lacks the key, each
    route has its own, with its label in front: "muon.weight_decay" and "adamw.weight_decay".
    """
    if len(routes) == 1:
        return routes[0].hyperparams
    merged: list[Hyperparam] = []
    for key, holders in _holders(routes).items():
        alike = _merged(key, holders)
        if alike is not None and (key in group or alike.copies == 1):
            merged.append(alike)
        else:
            merged += [hyperparam._replace(key=f"{label}.{key}") for label, hyperparam in holders.items()]
    return tuple(merged)


def keys_by_label(routes: Sequence[Route]) -> set[str]:
    """Return all keys such as "adamw.weight_decay" that a group of several labels may have."""
    if len(routes) < 2:
        return set()
    return {f"{label}.{key}" for key, holders in _holders(routes).items() for label in holders}


def _holders(routes: Iterable[Route]) -> dict[str, dict[str, Hyperparam]]:
    """Return, for each key such as "lr", a dict from label to the `Hyperparam` that the route of the label has."""
    found: dict[str, dict[str, Hyperparam]] = {}
    for route in routes:
        for hyperparam in route.hyperparams:
            # "momentum" would set Muon's momentum and repeat Adam's first beta: only the former.
            if hyperparam.is_mirror:
                continue
            labels = found.setdefault(hyperparam.key, {})
            label = str(route.label)
            # Two routes may have one label, if a mask selects some of its parameters.
            labels[label if label not in labels else hyperparam.names[0]] = hyperparam
    return found


def _merged(key: str, holders: Mapping[str, Hyperparam]) -> Hyperparam | None:
    """Return one `Hyperparam` that sets the numbers of several; None if their values have different forms."""
    first, *others = holders.values()
    if any(other.is_tuple != first.is_tuple or other.length != first.length for other in others):
        return None
    targets = dict.fromkeys([hyperparam.names for hyperparam in holders.values()])
    return Hyperparam(key, tuple(itertools.chain(*targets)), first.is_tuple, copies=len(targets))


def with_agreed(routes: Sequence[Route], group: Group, defaults: Mapping[str, Number]) -> Group:
    """Return a group with an entry for each key of several routes in whose numbers the routes agree."""
    agreed: Group = {}
    for key, holders in _holders(routes).items():
        first, *others = [hyperparam.value_of(defaults) for hyperparam in holders.values()]
        if others and all(equal(first, other) for other in others):
            agreed[key] = first
    return {**agreed, **group}


def new_groups(
    tx: Transform, routes: Mapping[str, Route], given: Group, pairs: list[tuple[str, Tensor]], *, as_one: bool
) -> list[Group]:
    """Return the param groups for a list of parameters, with all hyperparameters of their transforms.

    With ``as_one``, the list is one group, unless its parameters have different rates and ``given`` has none. Else
    it is split, so that the same transforms update all parameters of a group.
    """
    parts = split_by_route(pairs, routes)
    members = distinct_routes([name for name, _ in pairs], routes)
    _warn_of_unread_keys(given, pairs[0][0], members, routes)
    whole = with_agreed(members, given, hyperparams(tx))
    if as_one and ("lr" in whole or len(_holders(members).get("lr", ())) < 2):
        return [_complete_group(tx, members, whole, pairs)]
    groups: list[Group] = []
    all_keys = set[str]().union(*map(read_keys, members))
    for part in parts:
        route = routes[part[0][0]]
        of_other_parts = all_keys - read_keys(route) - NOT_HYPERPARAMS
        own_entries = {key: value for key, value in given.items() if key not in of_other_parts}
        groups.append(_complete_group(tx, [route], own_entries, part))
    return groups


def _complete_group(tx: Transform, members: Sequence[Route], given: Group, pairs: list[tuple[str, Tensor]]) -> Group:
    entries = {key: own_copy(value) for key, value in given.items()}
    group = {"label": label_of(members), **entries, "params": pairs}
    complete_entries(tx, members, group)
    return {"label": group["label"], "lr": group["lr"], **group}  # the rate first, as it is what people look for


def complete_entries(tx: Transform, members: Sequence[Route], group: Group) -> None:
    """Put the hyperparameters that a group lacks into it, from the transform. Raise if a number is out of range."""
    defaults = hyperparams(tx)
    whole = with_agreed(members, group, defaults)
    numbers = GroupNumbers(group_hyperparams(members, whole))
    values = {name: own_copy(value) for name, value in numbers.complete(whole, defaults).items()}
    prepared(with_hyperparams(tx, fitted(defaults, [values])[0]))
    group.update(numbers.entries(values))
    group.setdefault("lr", 0.0)  # PyTorch's schedulers require it, even if no transform reads it


def label_of(routes: Sequence[Route]) -> str | None:
    """Return the label of a group: that of its parameters, or all of their labels, as in "muon+adamw"."""
    if len(routes) < 2:
        return routes[0].label if routes else None
    return "+".join(dict.fromkeys([str(route.label) for route in routes])) or None


# ------------------------------------------------------------------------------------------- keys that set no number

_SYNONYMS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "beta": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "b1": "betas",
    "b2": "betas",
    "epsilon": "eps",
}
"""The names of torch's keys in other libraries."""

_SIMILAR = 0.85
"""From this ratio of `difflib` on, a key is a misspelling: "weight_dacay" has 0.92, "max_momentum" 0.8."""


def meant(key: str, known: Iterable[str]) -> str | None:
    """Return the hyperparameter that a key of a group is probably meant to be, or None if it is a key of the user's.

    >>> meant("weight_dacay", ["lr", "weight_decay"]), meant("lr_scale", ["lr", "weight_decay"])
    ('weight_decay', None)
    """
    # The last component, because "eps_root" is written for "scale_by_adam.eps_root".
    full_names = {name.rpartition(".")[2]: name for name in known}
    plain = key.lower().replace("-", "_")
    plain = _SYNONYMS.get(plain, plain)
    if plain in full_names:
        return full_names[plain]
    close = difflib.get_close_matches(plain, full_names, n=1, cutoff=_SIMILAR)
    return full_names[close[0]] if close else None


_OF_OTHERS = frozenset({"use_muon", "ns_steps", "nesterov", "maximize", "amsgrad", "dampening", "adjust_lr_fn"})
"""Keys of other optimizers that change their updates, and not ours."""


def unread_key_warning(key: str, value: Any, of: str, own: Iterable[str], known: Iterable[str]) -> str | None:
    """Return a warning if a key of a group looks like a hyperparameter and sets none, else None.

    ``of`` is a parameter of the group, ``own`` are the hyperparameters of the group and ``known`` those of all groups.
    """
    own = set(own)
    if key in own or key in NOT_HYPERPARAMS:
        return None
    name = meant(key, own) or meant(key, known)
    if name is None and key in _OF_OTHERS and value:
        return (
            f"param_groups: {key!r} in the group of {of!r} is kept, but has no effect: the labels choose the "
            "transform of a parameter, and the arguments of the transform choose its update"
        )
    if name is None:
        return None
    advice = f"did you mean {name!r}?" if name in own else f"the group has {', '.join(sorted(own)) or 'none'}"
    return f"param_groups: {key!r} in the group of {of!r} is kept, but it is no hyperparameter of the group: {advice}"


def _warn_of_unread_keys(given: Group, of: str, members: Sequence[Route], routes: Mapping[str, Route]) -> None:
    own = {hyperparam.key for hyperparam in group_hyperparams(members, given)}
    own = own.union(*[read_keys(route) for route in members])
    known = set[str]().union(*[read_keys(route) for route in set(routes.values())])
    for key, value in given.items():
        message = unread_key_warning(key, value, of, own, known)
        if message is not None:
            warn_caller(message)


def read_keys(route: Route) -> set[str]:
    """Return the keys of a new group from which a route takes its numbers."""
    return {hyperparam.key for hyperparam in route.hyperparams if not hyperparam.is_mirror}


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
