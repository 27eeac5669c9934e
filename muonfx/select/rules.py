"""Labels: assign each parameter to a group by an ordered list of rules."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar, cast

import torch

from muonfx.select.params import ParamInfo, Params, read_names
from muonfx.select.predicates import Predicate
from muonfx.select.views import Blocks, Dims, View, find_views, patterns
from muonfx.tree.display import Report, Table, format_list
from muonfx.tree.tracing import matches

__all__ = ["NO_DEFAULT", "Label", "Labels", "Rule", "apply_rules", "is_set_for", "labels", "make_labels"]

T = TypeVar("T")
Label: TypeAlias = str | None
Rule: TypeAlias = tuple[Predicate, Label]


class _Unset(enum.Enum):
    """Type of ``NO_DEFAULT``, since None is a label."""

    NO_DEFAULT = enum.auto()

    def __repr__(self) -> str:
        return self.name


NO_DEFAULT: Final = _Unset.NO_DEFAULT


class Labels(Mapping[str, Label]):
    """A frozen mapping from parameter name to label, which remembers the rule behind each, and the matrices in it.

    The label None leaves a parameter out of every group. Two ``Labels`` are equal when they give the same labels, in
    any order; reasons, views and shapes take no part in equality, hash or repr. It pickles as plain dicts.

    Args:
        labels: name to label.
        reasons: name to the rule that decided; a name without one shows as "given".
        views: name to the `muonfx.select.View` of a parameter that is not simply one matrix stored (out, in).
        shapes: name to the shape of the parameter for which the label was chosen. ``partition`` refuses a tensor with
            more dims, such as a stack over several models, where it would be flattened.

    Raises:
        TypeError: a name is no string, or a label neither a string nor None.
        ValueError: a reason, a view or a shape is given for a name that has no label.

    >>> labels = Labels({"fc.weight": "muon", "fc.bias": None}, {"fc.bias": "frozen"})
    >>> labels["fc.weight"], labels.reason("fc.bias")
    ('muon', 'frozen')
    >>> eval(repr(labels)) == labels
    True
    """

    __slots__ = ("_labels", "_reasons", "_shapes", "_views")

    def __init__(
        self,
        labels: Mapping[str, Label],
        reasons: Mapping[str, str] | None = None,
        views: Mapping[str, View] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._labels = dict(labels)
        self._reasons = dict(reasons or {})
        self._views = dict(views or {})
        self._shapes = dict(shapes or {})
        for name, label in self._labels.items():
            if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"found {name!r} as a parameter name, expected a string")
            _check_label(label, f"parameter {name!r}")
        for what, given in (("reasons", self._reasons), ("views", self._views), ("shapes", self._shapes)):
            if unknown := [name for name in given if name not in self._labels]:
                raise ValueError(f"{what} are given for parameters without a label: {format_list(unknown)}")

    def __getitem__(self, name: str) -> Label:
        return self._labels[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        return (
            self._labels == dict(cast("Mapping[str, Label]", other)) if isinstance(other, Mapping) else NotImplemented
        )

    def __hash__(self) -> int:
        return hash(frozenset(self._labels.items()))

    def __repr__(self) -> str:
        return f"Labels({self._labels!r})"

    def _repr_html_(self) -> str:
        """Return the labels and rules as an HTML table."""
        rows = [[name, "-" if label is None else label, self.reason(name)] for name, label in self._labels.items()]
        return Report((Table.of(["parameter", "label", "rule"], rows),)).to_html()

    def __reduce__(self) -> tuple[type[Labels], tuple[dict[str, Any], ...]]:
        return Labels, (self._labels, self._reasons, self._views, self._shapes)

    def reason(self, name: str) -> str:
        """Return the rule that decided the label of a parameter."""
        if name not in self._labels:
            raise KeyError(name)
        return self._reasons.get(name, "given")

    @property
    def views(self) -> Mapping[str, View]:
        """The view of each parameter that is not simply one matrix stored (out, in)."""
        return MappingProxyType(self._views)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each parameter for which the labels were chosen, where it is known."""
        return MappingProxyType(self._shapes)

    @property
    def dims(self) -> dict[str, Dims]:
        """The ``dims`` for ``orthogonalize`` and ``scale_by_shape``: by glob, dims of rows and dims of columns."""
        return cast("dict[str, Dims]", self.settings()[0] or {})

    @property
    def blocks(self) -> dict[str, Blocks]:
        """The ``blocks`` for ``orthogonalize`` and ``scale_by_shape``: by glob, a number or sizes."""
        return cast("dict[str, Blocks]", self.settings()[1] or {})

    def settings(
        self,
        dims: Dims | Mapping[str, Dims | None] | None = None,
        blocks: Blocks | Mapping[str, Blocks | None] | None = None,
    ) -> tuple[Dims | Mapping[str, Dims | None] | None, Blocks | Mapping[str, Blocks | None] | None]:
        """Fill in ``dims`` and ``blocks`` by the views, for parameters of which these settings say nothing.

        Blocks are along rows: one whose ``dims`` are given keeps to the ``blocks`` that are given.

        >>> expert = View(((-1,), (-2,)), 2)
        >>> labels = Labels({"experts.gate_up": "muon", "fc": "muon"}, views={"experts.gate_up": expert})
        >>> labels.settings()
        ({'*experts.gate_up': ((-1,), (-2,))}, {'*experts.gate_up': 2})
        >>> labels.settings(dims={"*experts*": ((-2,), (-1,))}), labels.settings(blocks=1)[1]
        (({'*experts*': ((-2,), (-1,))}, None), 1)
        """
        free = {name: view for name, view in self._views.items() if not is_set_for(dims, name)}
        return (
            _filled(dims, {name: view.dims for name, view in free.items() if view.dims is not None}, self),
            _filled(
                blocks,
                {n: v.blocks for n, v in free.items() if v.blocks is not None and not is_set_for(blocks, n)},
                self,
            ),
        )

    def restrict(self, names: Iterable[str]) -> Labels:
        """Keep the labels of these names, with their reasons, views and shapes.

        >>> Labels({"a": "x", "b": "y"}).restrict(["b"])
        Labels({'b': 'y'})
        """
        chosen = list(names)
        return Labels(
            {name: self._labels[name] for name in chosen},
            {name: self._reasons[name] for name in chosen if name in self._reasons},
            {name: self._views[name] for name in chosen if name in self._views},
            {name: self._shapes[name] for name in chosen if name in self._shapes},
        )


def is_set_for(setting: object, name: str) -> bool:
    """Return True if a setting, global or by globs, has an entry for a parameter."""
    if isinstance(setting, Mapping):
        return any(matches(name, pattern) for pattern in cast("Mapping[str, object]", setting))
    return setting is not None


def _filled(setting: T | Mapping[str, T] | None, found: Mapping[str, T], labels: Labels) -> T | Mapping[str, T] | None:
    """Append globs to a setting, for the parameters in `found` that it does not cover."""
    if not found:
        return setting
    alike = {labels[name] for name in found}  # the transforms for these labels receive no other leaves
    new = patterns(found, (name for name, label in labels.items() if label in alike))
    return {**cast("Mapping[str, T]", setting or {}), **new}


def labels(model_or_params: Params, rules: Sequence[Rule], default: Label | _Unset = NO_DEFAULT) -> Labels:
    """Label every parameter by the first rule whose predicate it satisfies.

    A leaf that is None instead of a tensor gets the label None.

    Args:
        model_or_params: an ``nn.Module``; a mapping or iterable of names and tensors; or any pytree of tensors.
        rules: (predicate, label) pairs, tried in order. The label None leaves a parameter out.
        default: the label of parameters that no rule matches; without it every parameter must be matched.

    Raises:
        TypeError: a rule is no (Predicate, label) pair, or a parameter no tensor.
        ValueError: a parameter is matched by no rule and there is no default, or a name occurs twice.

    Warns:
        UserWarning: a rule matches no parameter, which is most often a misspelt path.

    >>> import torch
    >>> from muonfx.select import ndim, path
    >>> params = {"fc.weight": torch.zeros(4, 4), "head.weight": torch.zeros(2, 4), "fc.bias": torch.zeros(4)}
    >>> labels(params, [(path("head.*"), "adamw"), (ndim(2), "muon")], default="adamw")
    Labels({'fc.weight': 'muon', 'head.weight': 'adamw', 'fc.bias': 'adamw'})
    """
    infos, absent = read_names(model_or_params)
    decided = apply_rules(infos, rules, "rule", stacklevel=3)
    if default is not NO_DEFAULT:
        _check_label(default, "default")
        decided |= {info.name: (default, "default") for info in infos if info.name not in decided}
    if open_names := [info.name for info in infos if info.name not in decided]:
        raise ValueError(
            f"{len(open_names)} of {len(infos)} parameters match no rule: {format_list(open_names)}; "
            "add a rule for them, or give a default (None leaves them out)"
        )
    return make_labels(model_or_params, infos, decided, absent)


def apply_rules(
    infos: Sequence[ParamInfo], rules: Sequence[Rule], kind: str, *, stacklevel: int
) -> dict[str, tuple[Label, str]]:
    """Return label and reason of every parameter that a rule matches; ``kind`` names the rules in the reasons."""
    for number, rule in enumerate(rules, 1):
        _check_rule(rule, number)
    decided: dict[str, tuple[Label, str]] = {}
    for number, (predicate, label) in enumerate(rules, 1):
        matching = [info.name for info in infos if predicate(info)]
        if infos and not matching:
            warnings.warn(
                f"{kind} {number}: {predicate!r} -> {label!r} matches none of the {len(infos)} parameters "
                f"({infos[0].name!r}, ...); correct or remove it",
                UserWarning,
                stacklevel=stacklevel,
            )
        for name in matching:
            decided.setdefault(name, (label, f"{kind} {number}: {predicate!r}"))
    return decided


def make_labels(
    model_or_params: Params,
    infos: Sequence[ParamInfo],
    decided: Mapping[str, tuple[Label, str]],
    absent: Sequence[str],
    other: Label = None,
) -> Labels:
    """Return ``Labels`` in the order of the parameters, with views unless the label is ``other`` or None."""
    known = {info.name: decided[info.name] for info in infos} | dict.fromkeys(absent, (None, "absent"))
    # A traced graph needs only the labels.
    viewed = () if torch.compiler.is_compiling() else infos
    return Labels(
        {name: label for name, (label, _) in known.items()},
        {name: reason for name, (_, reason) in known.items()},
        find_views(model_or_params, (info for info in viewed if known[info.name][0] not in (None, other))),
        {info.name: info.shape for info in viewed},
    )


def _check_rule(rule: object, number: int) -> None:
    pair = cast("tuple[object, ...]", rule) if isinstance(rule, tuple | list) else ()
    if len(pair) != 2 or not isinstance(pair[0], Predicate):
        raise TypeError(
            f"rule {number} is {rule!r}; expected a (Predicate, label) pair such as (path('*.gate.*'), 'adamw'); "
            "wrap a function of your own as where(fn)"
        )
    _check_label(pair[1], f"rule {number}")


def _check_label(label: object, where: str) -> None:
    if not (label is None or isinstance(label, str)):
        raise TypeError(f"{where}: found the label {label!r}; expected a string, or None to leave parameters out")
