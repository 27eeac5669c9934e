"""The report of a routing: a table of parameters, shapes, labels and the rules that decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from muonfx.core.recorded import Recorded
from muonfx.select.defaults import default_labels
from muonfx.select.matrix_view import MatrixView
from muonfx.select.params import ParamInfo, Params, read_params
from muonfx.select.rules import Label, Labels, Route
from muonfx.tree.display import Report, Shown, Table, format_list, format_shape

__all__ = ["Routing", "describe", "format_labels"]

Labelling: TypeAlias = Labels | Mapping[str, Label] | Callable[[Params], Mapping[str, Label]]
"""Labels, a mapping of name to label, or a function of the parameters that returns one."""


@dataclass(frozen=True, repr=False)
class Routing(Shown):
    """The label of every parameter and its reason; returned by `describe`, printed as tables."""

    params: tuple[ParamInfo, ...]
    labels: Labels
    groups: Mapping[str, int] | None = None
    """Of an optimizer, the index of each parameter's group by name; None for labels alone."""
    numbers: tuple[Mapping[str, Any], ...] = ()
    """Of an optimizer, the hyperparameters of each group."""

    def report(self) -> Report:
        """Return a row for each parameter, and totals by label or by the groups of an optimizer."""
        header = ("parameter", "shape", "label", "matrices", "stored", "rule")
        viewed = {self.labels[name] for name in self.labels.views}
        # Without views the columns "matrices" and "stored" have no information.
        shown = range(len(header)) if viewed else (0, 1, 2, 5)
        rows = [_row(info, self.labels.routes[info.name], viewed) for info in self.params]
        table = Table.of([header[at] for at in shown], [[row[at] for at in shown] for row in rows])
        if self.groups is None:
            titles = ("label", "tensors", "elements", "share")
            return Report((table, Table.of(titles, _totals(self.params, self.labels), right=(1, 2, 3))))
        titles = ("group", "label", "tensors", "elements", "share")
        totals = Table.of(titles, self._by_group(self.groups), right=(2, 3, 4))
        keys = dict.fromkeys(key for numbers in self.numbers for key in numbers)
        rows = [[key, *(_number(numbers[key]) if key in numbers else "" for numbers in self.numbers)] for key in keys]
        return Report((table, totals, Table.of(("number", *(f"group {at}" for at in range(len(self.numbers)))), rows)))

    def _by_group(self, groups: Mapping[str, int]) -> list[tuple[str, ...]]:
        whole = sum(info.numel for info in self.params) or 1
        rows: list[tuple[str, ...]] = []
        for place in range(len(self.numbers)):
            inside = [info for info in self.params if groups[info.name] == place]
            label = ", ".join(dict.fromkeys(_shown(self.labels[info.name]) for info in inside)) or "-"
            numel = sum(info.numel for info in inside)
            rows.append((str(place), label, f"{len(inside):,}", f"{numel:,}", f"{numel / whole:.1%}"))
        total = sum(info.numel for info in self.params)
        return [*rows, ("total", "", f"{len(self.params):,}", f"{total:,}", "100.0%")]


def describe(what: Labelling | torch.optim.Optimizer | Params, params: Params = None) -> Routing:
    """Describe where every parameter goes and why, with totals for each label.

    If a parameter holds several matrices, or one stored transposed, two columns say which: their number and sides, and
    the order in which they are stored. Notes on that follow the rule. Names are never shortened: they are what paths in
    rules are written from. The label None, which leaves a parameter out, shows as ``-``.

    Args:
        what: labels to look at, with ``params`` beside them: ``Labels``, a mapping of name to label, or a function of
            the parameters such as ``default_labels``. Or, alone: a model or named tensors, which are labelled by
            ``default_labels``; or a `TransformOptimizer`, of which two more tables have the groups and their numbers.
        params: a model, named tensors, or any pytree of tensors.

    Returns:
        A value that prints as the table: ``print(describe(model))``, or by itself in a console, or as HTML in a
        notebook.

    Raises:
        TypeError: labels without parameters, or an optimizer that knows no names.
        ValueError: a parameter has no label, or a label has no parameter.

    >>> import torch
    >>> from muonfx.select import default_labels_by_name
    >>> describe(default_labels_by_name, {"wte.weight": torch.zeros(16, 8), "fc.0.weight": torch.zeros(32, 8)})
    parameter    shape   label  rule
    wte.weight   16 x 8  adamw  name component 'wte'
    fc.0.weight  32 x 8  muon   hidden matrix (2-D)
    <BLANKLINE>
    label  tensors  elements   share
    adamw        1       128   33.3%
    muon         1       256   66.7%
    total        2       384  100.0%
    """
    if isinstance(what, torch.optim.Optimizer):
        return _of_optimizer(what)
    if params is None:
        is_labels = isinstance(what, Mapping) and any(isinstance(value, str) for value in what.values())
        if isinstance(what, Labels) or is_labels or (callable(what) and not isinstance(what, nn.Module)):
            raise TypeError("describe: labels alone have no shapes: give the model too, describe(labels, model)")
        params = list(what) if isinstance(what, Iterator) else what
        return _routing(default_labels, params)
    return _routing(cast("Labelling", what), list(params) if isinstance(params, Iterator) else params)


def format_labels(labels: Labelling, params: Params) -> str:
    """Write the table that ``describe`` returns, as a string.

    Args:
        labels: ``Labels``, a mapping of name to label, or a function of ``params`` such as ``default_labels``.
        params: a model, named tensors, or any pytree of tensors.

    Raises:
        ValueError: a parameter has no label, or a label has no parameter.

    >>> import torch
    >>> print(format_labels({"w": None}, {"w": torch.zeros(2, 2)}).splitlines()[1])
    w          2 x 2  -      given
    """
    return str(describe(labels, params))


def _routing(labels: Labelling, params: Params) -> Routing:
    infos, absent = read_params(params)
    found = labels if isinstance(labels, Mapping) else labels(params)
    chosen = found if isinstance(found, Labels) else Labels(found)
    if missing := [info.name for info in infos if info.name not in chosen]:
        raise ValueError(f"no label for {format_list(missing)}; expected one for every parameter (None leaves one out)")
    if unknown := sorted(set(chosen) - {info.name for info in infos} - set(absent)):
        raise ValueError(
            f"labels for {format_list(unknown)}, which are no parameters here; make the labels from these params"
        )
    return Routing(infos, chosen)


_NO_NUMBERS = {"params", "param_names", "label", "initial_lr"}


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Routing:
    """Return the routing of an optimizer's groups, with the reasons and views of its transform's labels."""
    groups = optimizer.param_groups
    if any("param_names" not in group or "label" not in group for group in groups):
        raise TypeError(
            f"describe: {type(optimizer).__name__} has no names and labels in its groups; expected a "
            "muonfx.TransformOptimizer, or muonfx.Muon"
        )
    pairs = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    known = _labels_within(getattr(optimizer, "tx", None))
    routes: dict[str, Route] = {}
    for name, label in ((name, group["label"]) for group in groups for name in group["param_names"]):
        same = (one.routes[name] for one in known if name in one and one[name] == label)
        routes[name] = next(same, Route(label, "the transform has no labels" if label is None else "given"))
    without_rate: Sequence[int] = getattr(optimizer, "groups_without_rate", ())  # torch requires an "lr" in these too
    return Routing(
        read_params(pairs)[0],
        Labels(routes),
        {name: place for place, group in enumerate(groups) for name in group["param_names"]},
        tuple(
            {
                key: value
                for key, value in group.items()
                if key not in _NO_NUMBERS and not (key == "lr" and place in without_rate)
            }
            for place, group in enumerate(groups)
        ),
    )


def _labels_within(value: object) -> list[Labels]:
    """Return the labels among the arguments of a transform and of its inner transforms."""
    if isinstance(value, Labels):
        return [value]
    inside: Sequence[Any] = ()
    if isinstance(value, Recorded):
        inside = list(value.arguments.values())
    elif isinstance(value, Mapping):
        inside = list(cast("Mapping[str, Any]", value).values())
    elif isinstance(value, tuple | list):
        inside = cast("Sequence[Any]", value)
    return [labels for item in inside for labels in _labels_within(item)]


def _number(value: object) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, tuple | list):
        return f"({', '.join(_number(item) for item in cast('Sequence[object]', value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _row(info: ParamInfo, route: Route, viewed: set[Label]) -> tuple[str, ...]:
    matrices, stored = (
        _matrices(route.shape or info.shape, route.view) if info.ndim > 1 and route.label in viewed else ("", "")
    )
    return info.name, format_shape(info.shape), _shown(route.label), matrices, stored, route.reason


def _matrices(shape: tuple[int, ...], view: MatrixView) -> tuple[str, str]:
    """Return the number and sides of the matrices in a parameter, and their order in memory."""
    found = view.split(torch.empty(shape, device="meta"), "")
    sides = [f"{matrix.shape[-2]}" for matrix in found]
    rows = sides[0] if len(sides) == 1 else f"({' + '.join(sides)})"
    count = prod(found[0].shape[:-2])
    is_transposed = isinstance(view.dims, tuple) and min(view.dims[0]) > min(view.dims[1])
    shown = (f"{count} of " if count > 1 else "") + f"{rows} x {found[0].shape[-1]}"
    return shown, "in, out" if is_transposed else "out, in"


def _totals(infos: Sequence[ParamInfo], labels: Labels) -> list[tuple[str, ...]]:
    sizes: dict[Label, list[int]] = {}
    for info in infos:
        sizes.setdefault(labels[info.name], []).append(info.numel)
    everything = [info.numel for info in infos]
    ordered = sorted(sizes, key=lambda label: (label is None, label or ""))
    rows = [(_shown(label) + (" (left out)" if label is None else ""), sizes[label]) for label in ordered]
    whole = sum(everything) or 1
    return [
        (name, f"{len(group):,}", f"{sum(group):,}", f"{sum(group) / whole:.1%}")
        for name, group in [*rows, ("total", everything)]
    ]


def _shown(label: Label) -> str:
    return "-" if label is None else label
