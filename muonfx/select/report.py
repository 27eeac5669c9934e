"""`describe`: tables of parameters with their shapes, labels, and the rules that chose the labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import nn

from muonfx.core import Transform
from muonfx.core.contract import within
from muonfx.select.defaults import default_labels
from muonfx.select.matrix_view import MatrixView, split
from muonfx.select.params import ParamInfo, Params, read_params
from muonfx.select.partition import partition, view_of
from muonfx.select.rules import Label, Labels, Route
from muonfx.select.views import MAYBE_FUSED
from muonfx.tree.display import Report, Shown, Table, format_list, format_shape

__all__ = ["Routing", "describe"]


@dataclass(frozen=True, repr=False)
class Routing(Shown):
    """The labels of all parameters with their reasons, as `describe` returns them; prints as tables."""

    params: tuple[ParamInfo, ...]
    labels: Labels
    groups: tuple[Mapping[str, Any], ...] | None = None
    """The ``param_groups`` of the optimizer that was described; None if labels were described."""
    without_rate: Sequence[int] = ()
    """The indices of parameter groups that do not use ``lr``; the table does not show it for them."""

    def report(self) -> Report:
        """Return the tables: a row for each parameter, then totals by label or by the optimizer's parameter groups."""
        header = ("parameter", "shape", "label", "matrices", "stored", "rule")
        viewed = {self.labels[name] for name in self.labels.views}
        # Without views the columns "matrices" and "stored" have no information.
        columns = range(len(header)) if viewed else (0, 1, 2, 5)
        rows = [_row(info, self.labels.routes[info.name], viewed) for info in self.params]
        table = Table([header[at] for at in columns], [[row[at] for at in columns] for row in rows])
        if self.groups is None:
            found = sorted({self.labels[info.name] for info in self.params}, key=lambda own: (own is None, own or ""))
            parts = [
                ([_shown(own) + " (left out)" * (own is None)], [i for i in self.params if self.labels[i.name] == own])
                for own in found
            ]
            return Report((table, self._totals(["label"], parts)))
        parts = []
        for place, group in enumerate(self.groups):
            inside = [info for info in self.params if info.name in set(group["param_names"])]
            held = ", ".join(dict.fromkeys(_shown(self.labels[info.name]) for info in inside)) or "-"
            parts.append(([str(place), held], inside))
        return Report((table, self._totals(["group", "label"], parts), self._hyperparameters(self.groups)))

    def _totals(self, titles: Sequence[str], parts: Sequence[tuple[list[str], list[ParamInfo]]]) -> Table:
        """Return a table with the number of tensors and elements with each label, or in each group, and in all.

        ``parts`` has a pair for each row: the first cells, below the column titles ``titles``, and the parameters.
        """
        whole = sum(info.numel for info in self.params)
        rows = [
            [*words, f"{len(inside):,}", f"{(own := sum(i.numel for i in inside)):,}", f"{own / (whole or 1):.1%}"]
            for words, inside in [*parts, (["total", *[""] * (len(titles) - 1)], list(self.params))]
        ]
        at = len(titles)
        return Table([*titles, "tensors", "elements", "share"], rows, right=(at, at + 1, at + 2))

    def _hyperparameters(self, groups: Sequence[Mapping[str, Any]]) -> Table:
        shown = [
            {key: value for key, value in group.items() if key not in _NO_NUMBERS}
            | ({"lr": ""} if place in self.without_rate else {})  # torch requires an "lr" in these too
            for place, group in enumerate(groups)
        ]
        keys = dict.fromkeys(key for numbers in shown for key, value in numbers.items() if value != "")
        rows = [[key, *(_number(numbers.get(key, "")) for numbers in shown)] for key in keys]
        return Table(("number", *(f"group {at}" for at in range(len(groups)))), rows)


def describe(what: Mapping[str, Label] | torch.optim.Optimizer | Params, params: Params = None) -> Routing:
    """Return a table of every parameter's label and the reason for it, with totals for each label.

    If a parameter holds several matrices or a transposed matrix (it has a `MatrixView`), two more columns show the
    number and sides of the matrices, and the order in which they are stored. For an optimizer, a ``view`` given to
    its transform replaces the view of the labels. Names are never shortened, so that rules can be written from them.
    The label None is shown as ``-``.

    Args:
        what: labels, together with ``params``; a model or named tensors, to which `default_labels` is applied; or a
            `TransformOptimizer`, for which the totals are by parameter group, and a further table shows
            the hyperparameters of the groups.
        params: the parameters that were labelled: a model, named tensors, or any pytree of tensors. Required with
            labels only, which have no shapes.

    Returns:
        A value that prints as the table in a terminal, and is shown as HTML in a notebook.

    Raises:
        TypeError: labels are given without ``params``, or the groups of an optimizer have no names.
        ValueError: a parameter has no label, or a label has no parameter.

    >>> import torch
    >>> from muonfx.select import default_labels_by_name
    >>> params = {"wte.weight": torch.zeros(16, 8), "fc.0.weight": torch.zeros(32, 8)}
    >>> describe(default_labels_by_name(params), params)
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
            raise TypeError(
                "describe: found labels only, expected parameters too, for their shapes: describe(labels, model)"
            )
        params = list(what) if isinstance(what, Iterator) else what
        what = default_labels(params)
    if not isinstance(what, Mapping):
        raise TypeError(
            f"describe: found {type(what).__name__} with parameters, expected labels: describe(default_labels(model), "
            "model), or describe(optimizer)"
        )
    labels = what if isinstance(what, Labels) else Labels(cast("Mapping[str, Label]", what))
    infos, absent = read_params(params)
    if missing := [info.name for info in infos if info.name not in labels]:
        raise ValueError(f"no label for {format_list(missing)}; expected one for every parameter (None leaves one out)")
    if unknown := sorted(set(labels) - {info.name for info in infos} - set(absent)):
        raise ValueError(
            f"found labels for {format_list(unknown)}, expected labels for the given parameters only: create the "
            "labels from the same parameters"
        )
    return Routing(infos, labels)


_NO_NUMBERS = {"params", "param_names", "label", "initial_lr"}


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Routing:
    """Return the labels of the parameters of an optimizer, with the reasons and views in its transform."""
    groups = tuple(optimizer.param_groups)
    if any("param_names" not in group or "label" not in group for group in groups):
        raise TypeError(
            f"describe: found {type(optimizer).__name__}, whose groups have no names and labels, expected a "
            "muonfx.TransformOptimizer, or muonfx.Muon"
        )
    tx = getattr(optimizer, "tx", None)
    given = [part.arguments.get("labels") for part in within(tx)] if isinstance(tx, Transform) else []
    known = [labels for labels in given if isinstance(labels, Labels)]
    views = {
        label: next(filter(None, map(view_of, within(inner))), MatrixView())
        for part in (within(tx) if isinstance(tx, Transform) else ())
        if part.factory is partition
        for label, inner in part.arguments["transforms"].items()
    }
    routes: dict[str, Route] = {}
    for name, label in ((name, group["label"]) for group in groups for name in group["param_names"]):
        members = str(label).split("+")  # a group may have several labels: "muon+adamw"
        same = (one.routes[name] for one in known if name in one and str(one[name]) in members)
        route = next(same, Route(label, "the transform has no labels" if label is None else "given"))
        pattern = views[route.label].text(name) if route.label in views else None
        if pattern not in (None, route.view.pattern):  # the user's view takes precedence over the labels' view
            reason = f"{route.reason.partition(f'; {MAYBE_FUSED}')[0]}; view of the transform"
            route = route._replace(reason=reason, view=MatrixView(pattern))
        routes[name] = route
    infos, _ = read_params(
        [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    )
    return Routing(infos, Labels(routes), groups, getattr(optimizer, "groups_without_rate", ()))


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
    """Return two table cells for a parameter: the number and sides of its matrices, and their order in memory."""
    (pattern,) = view.of([""])
    found = split(pattern, torch.empty(shape, device="meta"), "")
    count, columns = prod(found[0].shape[:-2]), found[0].shape[-1]
    times = f"{count} of " if count > 1 else ""
    order = "in, out" if pattern is not None and pattern.is_transposed else "out, in"
    if len({(stack.shape[:-2], stack.shape[-1]) for stack in found}) > 1:
        return " + ".join(f"{prod(stack.shape[:-2])} of {format_shape(stack.shape[-2:])}" for stack in found), order
    rows = " + ".join(str(stack.shape[-2]) for stack in found)
    return f"{times}{rows if len(found) == 1 else f'({rows})'} x {columns}", order


def _shown(label: Label) -> str:
    return "-" if label is None else label
