"""`labels` and `Labels`: assign each parameter to a group, such as "muon", by an ordered list of rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import EllipsisType, MappingProxyType
from typing import TypeAlias, cast

import torch

from muonfx.core import Transform
from muonfx.core.checks import warn_caller
from muonfx.core.partition import RoutedLabels
from muonfx.core.patterns import names_close_to
from muonfx.internal.display import format_list
from muonfx.routing.globs import patterns
from muonfx.routing.params import ParamInfo, Params, read_params
from muonfx.routing.predicates import Predicate
from muonfx.routing.route import NO_REASON, Label, Route
from muonfx.routing.structure import structure_of
from muonfx.routing.unsplit import check_shapes, warn_of_views
from muonfx.routing.views import ONE_MATRIX, find_divisions
from muonfx.transforms.matrices import MatrixView
from muonfx.tree import PyTree

Rule: TypeAlias = tuple[Predicate, Label]


class Labels(RoutedLabels):
    """An immutable mapping from parameter name to label, which also stores the reason and view of each parameter.

    A label is the name of a group, such as "muon"; a parameter with the label None is in no group. Two `Labels` are
    equal if their labels are; order, reasons and views do not count, and are not printed.

    Args:
        routes: for each name a label, or a `Route`: label, reason and view (how the parameter divides into matrices).
            ``Labels(labels)`` keeps the labels and drops reasons and views.

    Raises:
        TypeError: a name is not a string, or a label is neither a string nor None.

    >>> labels = Labels({"fc.weight": "muon", "fc.bias": Route(None, "frozen")})
    >>> labels["fc.weight"], labels.reason("fc.bias")
    ('muon', 'frozen')
    >>> eval(repr(labels)) == labels
    True
    """

    __slots__ = ("_routes",)

    def __init__(self, routes: Mapping[str, Label | Route]) -> None:
        """Check the names and labels, and store a route for each name."""
        self._routes: dict[str, Route] = {}
        # A label alone becomes a route without a reason and a view.
        for name, label in routes.items():
            route = label if isinstance(label, Route) else Route(label)
            self._routes[name] = route
            if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"found {name!r} as a parameter name, expected a string")
            _check_label(route.label, f"parameter {name!r}")

    def __getitem__(self, name: str) -> Label:
        return self._routes[name].label

    def __iter__(self) -> Iterator[str]:
        return iter(self._routes)

    def __len__(self) -> int:
        return len(self._routes)

    # `Mapping` compares the labels of two mappings, without their routes and their order.
    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return f"Labels({dict(self)!r})"

    @property
    def routes(self) -> Mapping[str, Route]:
        """A read-only mapping from parameter name to `Route`: the label, its reason, and the division into matrices."""
        return MappingProxyType(self._routes)

    def reason(self, name: str) -> str:
        """Return the reason for the label of a parameter, as text, such as "embedding (module type Embedding)"."""
        return self._routes[name].reason

    @property
    def views(self) -> dict[str, MatrixView]:
        """A dict from parameter name to `MatrixView` (how the parameter divides into matrices).

        Parameters that are one matrix stored as (out, in) are left out.
        """
        return {
            name: route.view for name, route in self._routes.items() if route.view != MatrixView()
        }

    def view(self, given: MatrixView = MatrixView()) -> MatrixView:
        """Return one `MatrixView` for all parameters, to pass to transforms as ``view=``.

        A view describes how parameters divide into matrices. It has a pattern for each parameter that is not one matrix
        (out, in): the one of ``given``, or else the one that is stored with the label. The globs, such as
        ``"*mlp.experts"``, also match the names that a wrapper of the model gives its parameters. An optimizer for some
        of the parameters does not warn of a stored pattern that none of them needs.

        >>> experts = Route("muon", view=MatrixView("... in out -> ... out in"))
        >>> labels = Labels({"mlp.experts": experts, "fc": "muon"})
        >>> labels.view()
        MatrixView({'*mlp.experts': '... in out -> ... out in'})
        >>> labels.view(MatrixView({"*experts*": "... out in -> ... out in"}))
        MatrixView({'*experts*': '... out in -> ... out in'})
        """
        # 1. The stored patterns by parameter name, where ``given`` has none: {"mlp.experts": "... in out -> ..."}.
        pattern_of: dict[str, str] = {}
        labels_with_views: set[Label] = set()
        for name, view in self.views.items():
            if isinstance(view.pattern, str) and not given.is_set_for(name):
                pattern_of[name] = view.pattern
                labels_with_views.add(self[name])
        # 2. Globs in place of names. They must match no other parameter of these labels. They may match parameters of
        # other labels, since a transform receives only the parameters of its own label.
        names = [name for name, label in self.items() if label in labels_with_views]
        pattern_of_glob = patterns(pattern_of, names)
        return given.extended(pattern_of_glob)

    def restrict(self, names: Iterable[str]) -> Labels:
        """Return the `Labels` of some of the parameters, in the order of ``names``.

        Each parameter keeps its label, the reason for it, and its view, the division into matrices.

        >>> Labels({"fc.weight": "muon", "fc.bias": "adamw"}).restrict(["fc.bias"])
        Labels({'fc.bias': 'adamw'})
        """
        routes: dict[str, Route] = {}
        for name in names:
            routes[name] = self._routes[name]  # the label, its reason and the view
        return Labels(routes)

    def for_names(self, key_of: Mapping[str, str]) -> Labels:
        """Return `Labels` for the names in ``key_of``, a dict from the new name of a parameter to its name in these."""
        return Labels({name: self._routes[key] for name, key in key_of.items()})

    def without_shapes(self) -> Labels:
        """Return the same `Labels` for parameters that may be shards, whose shapes differ from the recorded ones."""
        return Labels({name: route._replace(shape=None) for name, route in self._routes.items()})

    def check_shapes(self, transforms: Mapping[str, Transform], params: PyTree) -> None:
        """Raise if a tensor is a stack of matrices, but had the shape of one matrix when its label was chosen.

        For example, Muon would update a tensor (3, 8, 4), the weights (8, 4) of three models, as one matrix (3, 32).

        Args:
            transforms: the transform of each label.
            params: the parameters whose names, in the same order, these labels have.

        Raises:
            ValueError: a transform would flatten a tensor that has more dims than recorded; the message names it.
        """
        check_shapes(self._routes, transforms, params)

    def warn_of_views(self, transforms: Mapping[str, Transform]) -> None:
        """Warn of parameters that hold several matrices, but are updated as one by the transform of their label.

        ``transforms`` has the transform of each label.
        """
        warn_of_views(self._routes, transforms)

    def reasons(self) -> list[str]:
        """Return a sentence for each parameter whose label was chosen by a rule.

        >>> Labels({"wte": Route("adamw", "embedding"), "fc": "muon"}).reasons()
        ["'wte' is 'adamw': embedding"]
        """
        sentences: list[str] = []
        for name, route in self._routes.items():
            if route.reason != NO_REASON:
                sentences.append(f"{name!r} is {route.label!r}: {route.reason}")
        return sentences


def labels(
    model_or_params: Params, rules: Sequence[Rule], default: Label | EllipsisType = ...
) -> Labels:
    """Label every parameter by the first rule, a (predicate, label) pair, whose predicate matches it.

    A label is the name of a group of parameters; `partition` applies one transform per label. A parameter that is
    None instead of a tensor gets the label None.

    Args:
        model_or_params: an ``nn.Module``; a mapping or iterable of names and tensors; or any pytree of tensors.
        rules: pairs such as ``(ndim(2), "muon")``, tried in order. The label None leaves a parameter out.
        default: the label of parameters that no rule matches. Without a default, such a parameter is an error.

    Raises:
        TypeError: a rule is not a (Predicate, label) pair, or a parameter is not a tensor.
        ValueError: no rule matches a parameter and there is no default, or a name occurs twice.

    Warns:
        UserWarning: a rule matches no parameter, for example because its path is misspelt.

    >>> import torch
    >>> from muonfx.routing import ndim, path
    >>> params = {
    ...     "fc.weight": torch.zeros(4, 4),
    ...     "head.weight": torch.zeros(2, 4),
    ...     "fc.bias": torch.zeros(4),
    ... }
    >>> labels(params, [(path("head.*"), "adamw"), (ndim(2), "muon")], default="adamw")
    Labels({'fc.weight': 'muon', 'head.weight': 'adamw', 'fc.bias': 'adamw'})
    """
    infos, absent_names = read_params(model_or_params)
    decided = apply_rules(infos, rules, "rule")  # {"fc.weight": ("muon", "rule 2: ndim(2)")}
    unmatched = [info.name for info in infos if info.name not in decided]
    if default is not ...:  # an ellipsis means no default, because None is a label
        _check_label(default, "default")
        decided |= dict.fromkeys(unmatched, (default, "default"))
    elif unmatched:
        raise ValueError(
            f"{len(unmatched)} of {len(infos)} parameters match no rule: {format_list(unmatched)}; "
            "add a rule for them, or give a default (None leaves them out)"
        )
    # The layers that return several vectors: {"fc1": 2}.
    read_in_parts = structure_of(model_or_params).read_in_parts
    return make_labels(model_or_params, infos, decided, absent_names, read_in_parts)


def apply_rules(
    infos: Sequence[ParamInfo], rules: Sequence[Rule], rule_kind: str
) -> dict[str, tuple[Label, str]]:
    """Return a dict from parameter name to (label, reason), for the parameters that one of the rules matches.

    The first rule that matches a parameter decides. A reason is a text such as "user rule 1: ndim(2)"; ``rule_kind`` is
    its beginning, here "user rule".
    """
    decided: dict[str, tuple[Label, str]] = {}
    for number, rule in enumerate(rules, 1):
        _check_rule(rule, number)
        predicate, label = rule
        matching_names = [info.name for info in infos if predicate(info)]
        for name in matching_names:
            if name not in decided:  # an earlier rule has precedence
                decided[name] = (label, f"{rule_kind} {number}: {predicate!r}")
        if infos and not matching_names:
            _warn_of_unmatched_rule(f"{rule_kind} {number}", rule, infos)
    return decided


def _warn_of_unmatched_rule(title: str, rule: Rule, infos: Sequence[ParamInfo]) -> None:
    """Warn of a rule, with a title such as "user rule 1", that matches none of the parameters.

    A rule that only matches parameters of earlier rules is no mistake, and is not reported.
    """
    predicate, label = rule
    names = [info.name for info in infos]
    # These are the globs of `path` in the rule. A rule of other predicates has none.
    globs = chain.from_iterable(predicate.globs())
    warn_caller(
        f"{title}: {predicate!r} -> {label!r} matches none of the {len(infos)} parameters; "
        f"{names_close_to([*globs], names)}; correct or remove it"
    )


def _check_rule(rule: object, number: int) -> None:
    """Raise TypeError unless a rule is a pair of a predicate and a label, such as ``(ndim(2), "muon")``.

    ``number`` is the position of the rule in the list, from 1, for the message.
    """
    pair: Sequence[object] = ()
    if isinstance(rule, tuple | list):
        pair = cast("Sequence[object]", rule)
    # A lambda in place of a predicate is wrong, for example.
    if len(pair) != 2 or not isinstance(pair[0], Predicate):
        raise TypeError(
            f"rule {number} is {rule!r}; expected a (Predicate, label) pair such as (path('*.gate.*'), 'adamw'); "
            "wrap a function of your own as where(fn)"
        )
    _check_label(pair[1], f"rule {number}")


def make_labels(
    model_or_params: Params,
    infos: Sequence[ParamInfo],
    decided: Mapping[str, tuple[Label, str]],
    absent: Sequence[str],
    read_in_parts: Mapping[str, int],
    whole_labels: Collection[Label] = (),
) -> Labels:
    """Return `Labels` from the label of each parameter, with its reason, and the view that divides it into matrices.

    Args:
        model_or_params: the model, or named tensors.
        infos: its parameters.
        decided: the label of each parameter and the reason for it, by name: {"wte": ("adamw", "embedding")}.
        absent: the names of parameters that are None. They get the label None.
        read_in_parts: how many vectors a layer returns, if other layers read them one by one: {"mlp.fc1": 2}.
        whole_labels: labels, such as "adamw", whose parameters are not divided: their transform needs no matrices.
    """
    label_of = {info.name: decided[info.name][0] for info in infos}
    if torch.compiler.is_compiling():  # a traced graph needs only the labels
        return Labels(label_of | dict.fromkeys(absent))
    divisible = [info for info in infos if label_of[info.name] not in (None, *whole_labels)]
    division_of = find_divisions(model_or_params, divisible, read_in_parts)
    routes: dict[str, Route] = {}
    for info in infos:
        label, reason = decided[info.name]
        division = division_of.get(info.name, ONE_MATRIX)
        if division.note:
            reason = f"{reason}; {division.note}"  # "hidden matrix (2-D); query, key, value"
        routes[info.name] = Route(label, reason, division.view, info.shape, division.suggested)
    for name in absent:
        routes[name] = Route(None, "absent")
    return Labels(routes)


def _check_label(label: object, where: str) -> None:
    if not (label is None or isinstance(label, str)):
        raise TypeError(
            f"{where}: found the label {label!r}, expected a string, or None to leave parameters out"
        )
