"""`describe`: tables of parameters with their shapes, labels, and the rules that chose the labels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import nn

from muonfx.core import Transform
from muonfx.core.partition import partition
from muonfx.core.transform import within
from muonfx.internal.display import Report, Shown, Table, format_list, format_shape
from muonfx.internal.wrappers import unwrapped_optimizer
from muonfx.routing.defaults import default_labels
from muonfx.routing.params import ParamInfo, Params, read_params
from muonfx.routing.route import NO_REASON, Label, Route
from muonfx.routing.rules import Labels
from muonfx.routing.views import MAYBE_FUSED, MAYBE_STACK
from muonfx.transforms.matrices import Matrices, MatrixView, first_view


@dataclass(frozen=True, repr=False)
class Routing(Shown):
    """The labels of all parameters with their reasons, as `describe` returns them; prints as tables."""

    params: tuple[ParamInfo, ...]
    labels: Labels
    groups: tuple[Mapping[str, Any], ...] = ()
    """The ``param_groups`` of the optimizer that was described; empty if labels were described."""
    without_rate: Sequence[int] = ()
    """The indices of parameter groups that do not use ``lr``; the table does not show it for them."""
    matrix_labels: Collection[Label] = ("muon",)
    """The labels whose transforms compute with matrices."""

    def report(self) -> Report:
        """Return the tables: a row for each parameter, then totals by label or by the optimizer's parameter groups."""
        if not self.groups:
            return Report((self._parameters(), self._totals_by_label()))
        return Report((self._parameters(), self._totals_by_group(), self._hyperparameters()))

    def _parameters(self) -> Table:
        """Return the table with a row for each parameter: its name, shape, label and the rule that chose the label.

        Columns about matrices are added if a label has parameters that hold several, or a transposed one.
        """
        divided_labels = self._divided_labels()
        header = ["parameter", "shape", "label"]
        if divided_labels:
            header += ["matrices", "stored"]
        header.append("rule")
        rows = [_row(info, self.labels.routes[info.name], divided_labels) for info in self.params]
        return Table(header, rows)

    def _divided_labels(self) -> set[Label]:
        """Return the labels, such as "muon", of parameters that are not one matrix of their own shape.

        Examples are a stack of experts, a transposed weight, and a convolution, which is flattened to a matrix. For the
        parameters of these labels, the table also shows the matrices.
        """
        # 1. A parameter with a view, which says how it divides into matrices.
        divided_labels = {self.labels[name] for name in self.labels.views}
        # 2. A parameter of more than two dims, if the transform of its label works on matrices.
        for info in self.params:
            label = self.labels[info.name]
            if info.ndim > 2 and label in self.matrix_labels:
                divided_labels.add(label)
        return divided_labels

    def _totals_by_label(self) -> Table:
        """Return a table with the numbers of tensors and elements of each label.

        A row is such as "muon  1  256  66.7%". Parameters with the label None, which are not trained, have the last row
        before the total, "- (left out)".
        """
        infos_of: dict[Label, list[ParamInfo]] = {}
        for info in self.params:
            infos_of.setdefault(self.labels[info.name], []).append(info)
        left_out = infos_of.pop(None, [])
        rows: list[list[str]] = []
        for label in sorted(infos_of, key=str):
            rows.append([str(label), *_counts(infos_of[label], self.params)])
        if left_out:
            rows.append(["- (left out)", *_counts(left_out, self.params)])
        rows.append(["total", *_counts(self.params, self.params)])
        return Table(["label", *_TITLES_OF_COUNTS], rows, right=(1, 2, 3))

    def _totals_by_group(self) -> Table:
        """Return a table with the numbers of tensors and elements of each of an optimizer's ``param_groups``.

        The first cells of a row are the index of the group and its labels: "0" and "muon", or "0" and "muon, adamw".
        """
        info_of = {info.name: info for info in self.params}
        rows: list[list[str]] = []
        for index, group in enumerate(self.groups):
            infos: list[ParamInfo] = []
            labels: dict[str, None] = {}  # a dict in place of a set, for the order
            for name in group["param_names"]:
                infos.append(info_of[name])
                labels[_shown(self.labels[name])] = None
            labels_cell = ", ".join(labels) or "-"  # "-" for a group without parameters
            rows.append([str(index), labels_cell, *_counts(infos, self.params)])
        rows.append(["total", "", *_counts(self.params, self.params)])
        return Table(["group", "label", *_TITLES_OF_COUNTS], rows, right=(2, 3, 4))

    def _hyperparameters(self) -> Table:
        """Return a table with a row for each number, such as "lr", and a column for each of the ``param_groups``.

        A group that does not use a number has an empty cell.
        """
        titles = ["number"]
        # The cells of each number, in the order of their first occurrence.
        row_of: dict[str, list[str]] = {}
        for index, group in enumerate(self.groups):
            titles.append(f"group {index}")
            for key, value in group.items():
                # Torch requires this "lr".
                if key in _NO_NUMBERS or (key == "lr" and index in self.without_rate):
                    continue
                row = row_of.setdefault(key, [key] + [""] * len(self.groups))
                row[index + 1] = _number(value)
        return Table(titles, list(row_of.values()))


_TITLES_OF_COUNTS = ("tensors", "elements", "share")
"""The titles of the columns of `_counts`."""


def _counts(infos: Sequence[ParamInfo], all_infos: Sequence[ParamInfo]) -> list[str]:
    """Return the cells of some of the parameters: the number of tensors, of elements, and their share of all elements.

    >>> fc, wte = ParamInfo("fc", (32, 8)), ParamInfo("wte", (16, 8))
    >>> _counts([fc], [fc, wte])
    ['1', '256', '66.7%']
    """
    elements = sum(info.numel for info in infos)
    all_elements = sum(info.numel for info in all_infos)
    share = elements / max(1, all_elements)  # a model without parameters has a share of 0
    return [f"{len(infos):,}", f"{elements:,}", f"{share:.1%}"]


def describe(
    what: Mapping[str, Label] | torch.optim.Optimizer | Params, params: Params = None
) -> Routing:
    """Return a table of every parameter's label and the reason for it, with totals for each label.

    Two more columns show the number and sides of the matrices, and the order in which they are stored. They are shown
    if a parameter holds several matrices or a transposed one (it has a `MatrixView`), or if more than two dims are
    flattened. For an optimizer, they are the matrices of the ``view`` of its transform, not of its labels. Names are
    never shortened, so that rules can be written from them. The label None is shown as ``-``.

    Args:
        what: labels, together with ``params``; a model or named tensors, to which `default_labels` is applied; or a
            `TransformOptimizer`, for which the totals are by parameter group, and a further table shows
            the hyperparameters of the groups.
        params: the parameters that were labelled: a model, named tensors, or any pytree of tensors. Required with
            labels only, which have no shapes.

    Returns:
        A value that prints as the table in a terminal, and is shown as HTML in a notebook.

    Raises:
        TypeError: labels are given without ``params``, parameters or the groups of an optimizer have no names, or
            ``what`` is a transform.
        ValueError: a parameter has no label, or a label has no parameter.

    >>> import torch
    >>> from muonfx.routing import default_labels_by_name
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
    if params is not None:
        return _of_labels(what, params)
    if _is_labels(what):  # without parameters
        raise TypeError(
            "describe: found labels only, expected parameters too, for their shapes: describe(labels, model)"
        )
    model_or_params = what
    # An iterator such as model.named_parameters() can be read only once.
    if isinstance(model_or_params, Iterator):
        model_or_params = list(model_or_params)
    _require_describable(model_or_params)
    return _of_labels(default_labels(model_or_params), model_or_params)


def _require_describable(what: object) -> None:
    """Raise TypeError for a transform, and for tensors without names, such as ``model.parameters()``."""
    if isinstance(what, Transform):
        raise TypeError(
            "describe: found a transform, expected a model, labels or an optimizer; print(tx.tree()) shows the "
            "structure of a transform"
        )
    if not isinstance(what, list | tuple):
        return
    has_tensors = any(isinstance(item, torch.Tensor) for item in what)
    if has_tensors:
        raise TypeError(
            "describe: found tensors without names, expected named parameters: pass the model or "
            "model.named_parameters(), because the default labels use names"
        )


def _of_labels(labels: object, params: Params) -> Routing:
    """Return what `describe` prints for labels and parameters, which must have the same names.

    ``labels`` is a mapping from name to label, such as ``{"fc.weight": "muon"}``. ``params``, a model or named tensors,
    has the shapes.
    """
    if not isinstance(labels, Mapping):
        raise TypeError(
            f"describe: found {type(labels).__name__} with parameters, expected labels: "
            "describe(default_labels(model), model), or describe(optimizer)"
        )
    if not isinstance(labels, Labels):  # a plain dict, without reasons
        labels = Labels(cast("Mapping[str, Label]", labels))
    infos, absent = read_params(params)
    _require_same_names(labels, [info.name for info in infos], absent)
    return Routing(infos, labels)


def _require_same_names(labels: Labels, names: Sequence[str], absent: Sequence[str]) -> None:
    """Raise ValueError unless each parameter has a label, and each label a parameter: the models may differ.

    ``absent`` are the names of parameters that are None.
    """
    missing = [name for name in names if name not in labels]
    if missing:
        raise ValueError(
            f"no label for {format_list(missing)}; expected one for every parameter (None leaves one out)"
        )
    unknown = sorted(set(labels).difference(names, absent))
    if unknown:
        raise ValueError(
            f"found labels for {format_list(unknown)}, expected labels for the given parameters only: create the "
            "labels from the same parameters"
        )


def _is_labels(argument: object) -> bool:
    """Return True for labels, or a function that returns labels; False for parameters, which have shapes.

    >>> (
    ...     _is_labels({"fc.weight": "muon"}),
    ...     _is_labels({"fc.weight": torch.zeros(2, 2)}),
    ...     _is_labels(default_labels),
    ... )
    (True, False, True)
    """
    if isinstance(argument, Labels):
        return True
    if isinstance(argument, Mapping):  # labels, some of which may be None, or tensors by name
        values = cast("Mapping[object, object]", argument).values()
        return any(isinstance(value, str) for value in values)
    is_model = isinstance(argument, nn.Module)  # a model is callable, too
    return callable(argument) and not is_model


_NO_NUMBERS = {"params", "param_names", "label", "initial_lr"}


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Routing:
    """Return what `describe` prints for an optimizer: the labels of its parameters, and the numbers of its groups.

    The label is in the ``param_groups``. The reason for it, and how a parameter divides into matrices (its view), are
    arguments of the transforms within the optimizer's ``tx``, such as a `partition`.
    """
    optimizer = unwrapped_optimizer(optimizer)
    groups = tuple(optimizer.param_groups)
    _require_names_and_labels(groups, optimizer)
    tx = getattr(optimizer, "tx", None)
    transforms: list[Transform] = []
    if isinstance(tx, Transform):
        transforms.extend(within(tx))
    view_of_label = _views_by_label(transforms)
    routes: dict[str, Route] = {}  # by parameter name: the label, its reason, and the view
    named_tensors: list[tuple[str, torch.Tensor]] = []
    for group in groups:
        for name, tensor in zip(group["param_names"], group["params"], strict=True):
            route = _known_route(name, group["label"], transforms)
            routes[name] = _with_view_of_transform(name, route, view_of_label)
            named_tensors.append((name, tensor))
    infos, _ = read_params(named_tensors)
    matrix_labels = [label for label, view in view_of_label.items() if view is not None]
    return Routing(
        params=infos,
        labels=Labels(routes),
        groups=groups,
        without_rate=getattr(optimizer, "groups_without_rate", ()),
        matrix_labels=matrix_labels,
    )


def _require_names_and_labels(
    groups: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer
) -> None:
    """Raise TypeError unless the param groups are of an optimizer of this package."""
    for group in groups:
        if "param_names" not in group or "label" not in group:
            raise TypeError(
                f"describe: found {type(optimizer).__name__}, whose groups have no names and labels, expected a "
                "muonfx.TransformOptimizer, or muonfx.Muon"
            )


def _with_view_of_transform(
    name: str, route: Route, views: Mapping[Label, MatrixView | None]
) -> Route:
    """Return the route of a parameter (its label and reason) with the view that its transform really uses.

    A view is how the parameter divides into matrices, such as "... out in -> ... out in". The labels suggest one. If
    the transform treats the parameter as one matrix, or has another view, the result has a note in the reason.

    Args:
        name: the name of the parameter.
        route: its label, such as "muon", the reason, and the view of the labels.
        views: the view of the transform of each label; None for a transform that does not work on matrices.
    """
    one_matrix = (
        MatrixView()
    )  # also for a transform such as AdamW, which updates element by element
    if (
        route.label not in views
    ):  # no `partition` has this label, so that the transform is not known
        return route
    view = views[route.label]
    if view is None:
        return route._replace(view=one_matrix)
    pattern = view.text(name)  # None for one matrix
    if pattern == route.view.pattern:  # the transform follows the labels
        return route
    if pattern is None:
        reason = f"{route.reason}; the transform has no view for it"
        return route._replace(reason=reason, view=one_matrix)
    # The transform has another pattern, so that a suggestion of the labels has no use.
    reason = f"{_without_suggestion(route.reason)}; view of the transform"
    return route._replace(reason=reason, view=MatrixView(pattern))


def _without_suggestion(reason: str) -> str:
    """Return the reason for a label without the note that the parameter may hold several matrices, which is the last.

    >>> _without_suggestion(
    ...     "hidden matrix (2-D); maybe fused, not split: (part=2 out) in -> part out in"
    ... )
    'hidden matrix (2-D)'
    """
    for note in (MAYBE_FUSED, MAYBE_STACK):
        reason, _, _ = reason.partition(f"; {note}")
    return reason


def _views_by_label(transforms: Sequence[Transform]) -> dict[Label, MatrixView | None]:
    """Return the view of the transform of each label: how it divides parameters into matrices.

    For ``partition({"muon": muon(...), "adamw": adamw(...)}, labels)``, it is {"muon": MatrixView(...), "adamw": None},
    since AdamW does not work on matrices. ``transforms`` are the transforms of an optimizer, with this `partition`.
    """
    views: dict[Label, MatrixView | None] = {}
    for transform in transforms:
        # Only `partition` applies one transform for each label.
        if transform.factory is not partition:
            continue
        for label, inner in transform.arguments["transforms"].items():
            works_on_matrices = any("view" in part.arguments for part in within(inner))
            views[label] = None
            if works_on_matrices:
                views[label] = first_view(inner)
    return views


def _known_route(name: str, label: Label, transforms: Sequence[Transform]) -> Route:
    """Return the route of a parameter of an optimizer: its label, and the reason for it.

    The reasons are in the argument ``labels`` of a `partition`, if these are `Labels` and no plain dict.

    Args:
        name: the name of the parameter.
        label: the label of its param group: "muon", or several labels as "muon+adamw".
        transforms: all transforms of the optimizer. The first one with labels for this parameter decides.
    """
    labels_of_group = str(label).split("+")
    for transform in transforms:
        labels = transform.arguments.get("labels")
        # The transform is no partition with this parameter.
        if not isinstance(labels, Labels) or name not in labels:
            continue
        if str(labels[name]) in labels_of_group:
            return labels.routes[name]
    reason = "the transform has no labels" if label is None else NO_REASON
    return Route(label, reason)


def _number(value: object) -> str:
    """Return a number of a parameter group as text.

    >>> _number(0.001), _number((0.9, 0.95)), _number(torch.tensor(0.5))
    ('0.001', '(0.9, 0.95)', '0.5')
    """
    if isinstance(value, torch.Tensor):
        return _number(value.tolist())
    if isinstance(value, tuple | list):
        items = cast("Sequence[object]", value)
        return f"({', '.join(map(_number, items))})"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _row(info: ParamInfo, route: Route, divided_labels: Collection[Label]) -> list[str]:
    """Return the cells of a parameter: name, shape, label, matrices, order in memory, reason for the label.

    For the labels in ``divided_labels``, a row shows the matrices, such as "8 of 64 x 32", and "out, in". If there are
    no such labels, the table does not have these two columns.

    >>> _row(
    ...     ParamInfo("fc.weight", (16, 8)), Route("muon", "hidden matrix (2-D)"), divided_labels=[]
    ... )
    ['fc.weight', '16 x 8', 'muon', 'hidden matrix (2-D)']
    """
    matrices: list[str] = []
    if info.ndim > 1 and route.label in divided_labels:
        matrices = [
            _matrices_text(info.name, route.shape or info.shape, route.view),
            _order_text(route.view),
        ]
    elif divided_labels:  # the table has the two columns for other parameters
        matrices = ["", ""]
    return [info.name, format_shape(info.shape), _shown(route.label), *matrices, route.reason]


def _order_text(view: MatrixView) -> str:
    """Return the order in which the dims of a parameter's matrices are stored: "out, in" or "in, out".

    >>> _order_text(MatrixView()), _order_text(MatrixView("in out -> out in"))
    ('out, in', 'in, out')
    """
    (pattern,) = view.of([""])  # the view of one parameter has the same pattern for every name
    if pattern is not None and pattern.is_transposed:
        return "in, out"
    return "out, in"


def _matrices_text(name: str, shape: tuple[int, ...], view: MatrixView) -> str:
    """Return the number and sides of the matrices of a parameter of this shape.

    >>> _matrices_text("w", (16, 8), MatrixView())
    '16 x 8'
    >>> _matrices_text("w", (4, 16, 8), MatrixView("... out in -> ... out in"))
    '4 of 16 x 8'
    >>> _matrices_text("w", (20, 8), MatrixView("(q=16 + k=4) in -> q in, k in"))
    '16 x 8 + 4 x 8'
    """
    # Has no memory: the shapes of its matrices are all that is needed.
    leaf = torch.empty(shape, device="meta")
    texts: list[str] = []
    for stack in Matrices(view, {name: leaf}).stacks:
        *batch, rows, columns = stack.shape
        text = f"{rows} x {columns}"
        if prod(batch) > 1:
            text = f"{prod(batch)} of {text}"
        texts.append(text)
    return " + ".join(texts)


def _shown(label: Label) -> str:
    """Return a label as it is printed: "-" for None, the label of a parameter that is left out."""
    return "-" if label is None else label
