"""Different transforms for different parameters: `partition` and `masked`.

Each inner transform receives only the parameters chosen for it, as a flat dict from dotted name to tensor, whatever
the structure of the whole tree. Its state, such as ``state["muon"]["momentum"].trace["blocks.0.attn.q.weight"]``,
contains no placeholders for other parameters, because ``torch.func.vmap`` would not accept them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from muonfx import tree
from muonfx.core import Combinator, Donation, Locality, Transform, transform
from muonfx.core.chain import widest
from muonfx.core.checks import warn_caller
from muonfx.core.donation import NOTHING
from muonfx.core.patterns import NamePatterns
from muonfx.core.transform import left_out, within
from muonfx.core.value import Memory, with_memory
from muonfx.internal.display import format_list
from muonfx.internal.wrappers import unwrapped
from muonfx.select.matrix_view import STACK, MatrixView
from muonfx.select.params import read_params
from muonfx.select.predicates import Predicate, asks_for_modules, path_patterns
from muonfx.select.rules import Labels, Route
from muonfx.select.views import patterns, undivided
from muonfx.tree import PyTree


class _Assignment:
    """A label or bool for each parameter, from the argument ``labels`` of `partition` or ``mask`` of `masked`."""

    # `given` is a tree, a mapping by name, or a function of the parameters that returns either and depends on names,
    # shapes and dtypes only. `kinds` are the types of its values. `what` names the argument in errors. Results are
    # cached by the names (and shapes) of parameters: in `memory` for a transform that is rebuilt at every step.
    def __init__(self, what: str, given: object, kinds: tuple[type, ...], memory: Memory | None = None) -> None:
        if asks_for_modules(given):
            raise ValueError(
                f"{what}: found {given!r}, expected a condition on names and shapes, because a transform receives "
                "named tensors without module types. Evaluate it on the model: {name: label == 'yes' for name, label "
                "in muonfx.labels(model, [(predicate, 'yes')], 'no').items()}"
            )
        if isinstance(given, torch.nn.Module):
            raise TypeError(
                f"{what}: found the model {type(given).__name__}, expected a dict by parameter name: for "
                "partition, muonfx.default_labels(model)"
            )
        self.what, self.given, self.kinds = what, given, kinds
        self.expected = "True or False" if bool in kinds else "a label (a string, or None for no update)"
        self._resolved: dict[Any, dict[str, Any]] = {} if memory is None else memory

    def __call__(self, params: PyTree, *, quiet: bool = False) -> dict[str, Any]:
        """Return a dict from the name of each parameter to its label or bool; ``quiet`` suppresses warnings."""
        names = tree.names(params)
        # The key is not the tree's structure, which cannot be hashed under compilation.
        key: object = tuple(names)
        if callable(self.given):
            shown = [None if leaf is None else (leaf.shape, leaf.dtype) for leaf in tree.leaves(params)]
            key = tuple(zip(names, shown, strict=True))
        if torch.compiler.is_compiling():
            return self._resolved[key] if key in self._resolved else self._resolve(params, names)
        if key not in self._resolved:
            with warnings.catch_warnings():
                if quiet:
                    warnings.simplefilter("ignore")
                self._resolved[key] = self._resolve(params, names)
        return self._resolved[key]

    def of_updates(self, updates: PyTree, params: PyTree) -> dict[str, Any]:
        """Return a dict from parameter name to label or bool. Without ``params``, the updates give the names."""
        if params is None and callable(self.given):
            absent = [name for name, leaf in tree.named_leaves(updates) if leaf is None]
            if absent:
                raise ValueError(
                    f"{self.what}: found no parameters, and no gradient for {absent[0]!r}, so the function that "
                    "chooses values cannot read its shape; expected parameters: call update(updates, state, params)"
                )
        return self(updates if params is None else params, quiet=True)  # init has warned already

    def _resolve(self, params: PyTree, names: list[str]) -> dict[str, Any]:
        given = self.given
        if isinstance(given, Predicate):
            given = dict.fromkeys(names, False) | {info.name: given(info) for info in read_params(params)[0]}
        elif callable(given) and not isinstance(given, Mapping):
            given = given(params)
        if isinstance(given, Labels):
            given = dict(given.routes)
        # A mapping with other keys is a tree.
        if isinstance(given, Mapping) and all(
            isinstance(key, str) and isinstance(value, (*self.kinds, Route)) for key, value in given.items()
        ):
            given = _by_wrapped_name(given, names)
            if missing := [name for name in names if name not in given]:
                raise ValueError(
                    f"{self.what}: found no value for {format_list(missing)}, expected {self.expected} for each "
                    "parameter: add them, or select a whole subtree with a pattern, as in muonfx.select.path('head.*')"
                )
            values = {name: given[name] for name in names}
        elif set(tree.names(given)) == set(names):  # also a nest of dicts for parameters with dotted names
            values = dict(zip(tree.names(given), tree.leaves(given), strict=True))
        else:
            raise ValueError(
                f"{self.what}: found a {type(given).__name__} with the leaves {format_list(tree.names(given))}, "
                f"expected a dict from the name of each parameter to {self.expected}, or a tree with the structure of "
                f"the parameters; their names are {format_list(names)}"
            )
        for name, value in values.items():
            label = _label_of(value)
            if not isinstance(label, self.kinds):
                raise TypeError(f"{self.what}: the value for {name!r} is {label!r}, expected {self.expected}")
        return values


def _by_wrapped_name(given: Mapping[str, Any], names: list[str]) -> Mapping[str, Any]:
    """Return a dict that also has the names that wrappers give to parameters, such as "module.fc.weight" under DDP."""
    if all(name in given for name in names):
        return given
    plain = {new: given[old] for old, new in unwrapped(given).items()}
    if len(plain) < len(given):
        return given
    return {**{name: plain[new] for name, new in unwrapped(names).items() if new in plain}, **given}


def _routes(labels: object, memory: Memory | None = None) -> _Assignment:
    return _Assignment("partition: labels", labels, (str, type(None)), memory)


def _label_of(value: Any) -> Any:
    return value.label if isinstance(value, Route) else value


def _by_route(values: Mapping[str, Any]) -> dict[str, Route]:
    """Convert the labels in a dict by parameter name to `Route` values, which also have a reason and a view."""
    return {name: value if isinstance(value, Route) else Route(value) for name, value in values.items()}


def _part(chosen: Mapping[str, Any], value: object, leaves: list[Any]) -> dict[str, Any]:
    """Return a dict from name to leaf, for the leaves whose label (or bool) in ``chosen`` equals ``value``."""
    pairs = zip(chosen.items(), leaves, strict=True)
    return {name: leaf for (name, choice), leaf in pairs if choice is not None and choice == value}


def _why(routes: Mapping[str, Route]) -> str:
    """Return text to append to a warning about labels: how many parameters have each label, and up to five reasons."""
    if not routes:
        return ": there are no parameters"
    chosen = [route.label for route in routes.values()]
    there = ", ".join(f"{label!r} for {chosen.count(label)}" for label in dict.fromkeys(chosen))
    known = [f"{name!r} is {label!r}: {why}" for name, (label, why, *_) in routes.items() if why != "given"]
    some = f". {'; '.join(known[:5])}" + "; ..." * (len(known) > 5) if known else ""
    return f". The labels of the {len(routes)} parameters are {there}{some}"


def view_of(tx: Transform) -> MatrixView | None:
    """Return the argument ``view`` of a transform (how parameters divide into matrices); None if it is not set."""
    view = tx.arguments["view"] if "view" in tx.factory.definition.parameters else None
    return view if isinstance(view, MatrixView) else None


def _warn_of_views(transforms: Mapping[str, Transform], routes: Mapping[str, Route]) -> None:
    """Warn if parameters hold several matrices, judged by label or name, but are updated as one matrix."""
    unused: list[str] = []
    suspected: dict[str, str] = {}
    given = MatrixView()
    for label, tx in transforms.items():
        for view in [view for view in map(view_of, within(tx)) if view is not None]:
            for name, route in routes.items():
                if route.label != label:
                    continue
                if route.view.pattern and not view.is_set_for(name):
                    unused.append(f"{name!r} ({route.reason})")
                # A view that has the pattern of the label was extended by the labels: the user chose nothing.
                if route.suspected and view.text(name) in (None, route.view.pattern):
                    given = given if suspected else view
                    suspected[name] = route.suspected
    if unused:
        warn_caller(
            f"partition: the labels have a view for {format_list(list(dict.fromkeys(unused)), str)}, but the transform "
            "of these parameters has no pattern for them, so each is treated as one matrix. Give the transform "
            "view=labels.view(), with labels = default_labels(model), or pass Labels(labels) if this is intended"
        )
    if suspected:
        _warn_of_suspected(suspected, given, routes)


def _warn_of_suspected(suspected: Mapping[str, str], given: MatrixView, routes: Mapping[str, Route]) -> None:
    """Warn of fused matrices in unknown code, with one argument of `Muon` that splits them, and one that does not.

    ``suspected`` is a dict from parameter name to the pattern that splits it, and ``given`` the view of the transform.
    """
    labels = {routes[name].label for name in suspected}
    others = [name for name, route in routes.items() if route.label in labels]

    def argument(pattern_of: Mapping[str, str]) -> str:
        view = MatrixView(patterns(pattern_of, others)).extended(given.pattern)
        return f"orthogonalize=muonfx.orthogonalize(view=muonfx.{view!r})"

    whole = {name: undivided(pattern) for name, pattern in suspected.items()}
    warn_caller(
        f"partition: by their names, these parameters hold several matrices each, and each is treated as one matrix: "
        f"{format_list(list(suspected))}. If their parts have equal numbers of rows, and are stored one after another, "
        f"split them by this argument of Muon:\n  {argument(suspected)}\n"
        "A transform of your own takes the same view=. "
        "If the numbers differ, as with fewer keys than queries, write a pattern with your sizes, such as "
        "'(q=512 + k=128 + v=128) in -> q in, k in, v in'; for parts that are interleaved, see `muonfx.MatrixView`. If "
        f"each is one matrix, keep it whole without this warning:\n  {argument(whole)}"
    )


def _check_dims(transforms: Mapping[str, Transform], routes: Mapping[str, Route], params: PyTree) -> None:
    """Raise if a tensor has more dims than when its label was chosen, so that its transform would flatten them.

    An example is a stack of weights of several models under ``torch.func.vmap``.
    """
    # Fewer dims are allowed: a rank may hold a flat shard of a matrix.
    for (name, route), leaf in zip(routes.items(), tree.leaves(params), strict=True):
        own = transforms.get(route.label or "")
        if route.shape is None or leaf is None or leaf.ndim <= len(route.shape) or own is None:
            continue
        for tx in within(own):
            view = view_of(tx)
            by_leaf = tx.locality is Locality.LEAF and not tx.children
            pattern = None if view is None else view.of([name])[0]
            mixes = by_leaf if view is None else pattern is None or pattern.flattens_more_dims
            if mixes:
                raise ValueError(
                    f"partition: {name!r} has shape {tuple(leaf.shape)}, expected {route.shape}, the shape when its "
                    f"label {route.label!r} was chosen: {tx.name} would treat a stack of matrices as one matrix. If "
                    "the tensor stacks several models (torch.func.stack_module_state), use "
                    "torch.func.vmap(tx.init)(params) and torch.func.vmap(tx.update)(grads, state, params). If it is "
                    "one parameter with several matrices, give Muon's orthogonalize "
                    f"view=muonfx.MatrixView({{{name!r}: {STACK!r}}}). If it is one matrix, create the labels from "
                    "the current parameters"
                )


def mask_patterns(tx: Transform) -> list[NamePatterns]:
    """Return the globs over parameter names in the ``mask`` of a transform, to report globs that match no name."""
    groups = path_patterns(tx.arguments["mask"])
    return [NamePatterns("mask", groups)] if groups else []


def _resolve_partition(tx: Transform, params: PyTree) -> Transform:
    routes = _by_route(_routes(tx.arguments["labels"])(params))
    _check_dims(tx.arguments["transforms"], routes, params)
    # The resolved transform may run on shards, whose dims differ: a 0-d parameter is 1-d in a flat buffer.
    return tx.replace(labels=Labels({name: route._replace(shape=None) for name, route in routes.items()}))


def _left_out_by_labels(tx: Transform, params: PyTree) -> set[str]:
    labels = {name: _label_of(value) for name, value in _routes(tx.arguments["labels"])(params, quiet=True).items()}
    found = {name for name, label in labels.items() if label is None}
    leaves = tree.leaves(params)
    for label, inner in tx.arguments["transforms"].items():
        found |= left_out(inner, _part(labels, label, leaves))
    return found


def _left_out_by_mask(tx: Transform, params: PyTree) -> set[str]:
    chosen = _Assignment("masked: mask", tx.arguments["mask"], (bool,))(params, quiet=True)
    return left_out(tx.arguments["inner"], _part(chosen, True, tree.leaves(params)))


@transform(
    locality=lambda transforms, labels: widest(transforms.values()),
    combinator=Combinator(Locality.ELEMENT, leaves_out=_left_out_by_labels),
    resolve=_resolve_partition,
)
@with_memory
def partition(
    _memory: Memory,
    transforms: dict[str, Transform],
    labels: PyTree | Mapping[str, str | None] | Callable[[PyTree], PyTree],
):
    """Apply a different transform to each group of parameters; labels assign the parameters to groups.

    A label is the name of a group, such as "muon". The state is a dict from label to the state of the group's
    transform. Follows Optax's ``partition``.

    Args:
        transforms: a dict from label to transform.
        labels: a tree of labels with the structure of the parameters; a mapping from dotted name to label, as
            `default_labels` returns; or a function of the parameters that returns either. The function must depend on
            names, shapes and dtypes only. A parameter with the label None has no state, and its update is None.

    Raises:
        TypeError: a label is neither a string nor None, or a value of ``transforms`` is not a transform.
        ValueError: a parameter has no label, or its label has no transform; or a tensor has more dims than when its
            label was chosen, and its transform would flatten them. The message names the parameter.

    Warns:
        UserWarning: at ``init``, in three cases. No parameter has the label of a transform; the message lists labels
            and reasons. Or a parameter holds several matrices according to `Labels.views`, but the argument ``view``
            of its transform has no pattern for it. Or the name of a parameter suggests a fused matrix
            (``qkv``, ``c_attn``) that is not split; the message has the code that splits it.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.partition({"slow": mfx.scale(-0.1), "fast": mfx.scale(-1.0)}, {"w": "slow", "b": "fast"})
        >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> tx.update(params, tx.init(params))[0]
        {'w': tensor([-0.1000]), 'b': tensor([-1.])}
    """
    if not isinstance(transforms, dict):
        raise TypeError(
            f"partition: transforms must be a dict with a Transform for each label, found {transforms!r}; write "
            'partition({"muon": muon(...), "adamw": adamw(...)}, labels)'
        )
    for label, tx in transforms.items():
        if not isinstance(tx, Transform):
            raise TypeError(f"partition: the entry for label {label!r} must be a Transform, found {tx!r}")
    assign = _routes(labels, _memory)

    def checked(found: dict[str, Any]) -> dict[str, str | None]:
        chosen = {name: _label_of(value) for name, value in found.items()}
        for name, label in chosen.items():
            if label is not None and label not in transforms:
                raise ValueError(
                    f"partition: {name!r} has the label {label!r}, expected a label that has a transform, "
                    f"{format_list(list(transforms))}: change the label, or add a transform for {label!r}"
                )
        return chosen

    def init(params: PyTree) -> dict[str, PyTree]:
        found = assign(params)
        chosen, routes = checked(found), _by_route(found)
        _check_dims(transforms, routes, params)
        _warn_of_views(transforms, routes)
        for label in transforms:
            if label not in chosen.values():
                warn_caller(
                    f"partition: no parameter has the label {label!r}; its transform does nothing" + _why(routes)
                )
        leaves = tree.leaves(params)
        return {label: tx.functions.init(_part(chosen, label, leaves)) for label, tx in transforms.items()}

    def update(
        updates: PyTree, state: dict[str, PyTree], params: PyTree = None, *, donate: Donation = NOTHING, **extras: Any
    ):
        chosen = checked(assign.of_updates(updates, params))
        leaves, treedef = tree.flatten(updates)
        held = None if params is None else tree.leaves(params)
        results: dict[str, Any] = {}
        new_state: dict[str, PyTree] = {}
        for label, tx in transforms.items():
            mine = None if held is None else _part(chosen, label, held)
            out, new_state[label] = tx.run(_part(chosen, label, leaves), state[label], mine, donate=donate, **extras)
            results.update(out)
        return tree.unflatten(treedef, [results.get(name) for name in chosen]), new_state

    return init, update


@transform(
    locality=lambda inner, mask: inner.locality,
    combinator=Combinator(Locality.ELEMENT, leaves_out=_left_out_by_mask),
    resolve=lambda tx, params: tx.replace(mask=_Assignment("masked: mask", tx.arguments["mask"], (bool,))(params)),
    name_patterns=mask_patterns,
)
@with_memory
def masked(
    _memory: Memory, inner: Transform, mask: PyTree | Mapping[str, bool] | Predicate | Callable[[PyTree], PyTree]
):
    """Apply a transform to the parameters that a mask selects; the updates of others are returned unchanged.

    The inner transform receives the selected parameters as a flat dict from name to tensor, and its state is for this
    dict. Follows Optax's ``masked``.

    Args:
        inner: the transform for the selected parameters.
        mask: True for the parameters to select, in one of these forms: a tree of bools with the structure of the
            parameters; a mapping from dotted name to bool; a predicate, such as ``muonfx.select.ndim(2)``; or a
            function of the parameters that returns a tree or mapping and depends on names, shapes and dtypes only.

    Raises:
        TypeError: a value of the mask is not a bool.
        ValueError: a parameter has no value in the mask (the message names it), or a predicate needs module types,
            which named tensors do not have.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.masked(mfx.scale(-1.0), mfx.select.ndim(min=2))
        >>> params = {"w": torch.ones(1, 1), "b": torch.ones(1)}
        >>> tx.update(params, tx.init(params))[0]
        {'w': tensor([[-1.]]), 'b': tensor([1.])}
    """
    if not isinstance(inner, Transform):
        raise TypeError(f"masked: inner must be a Transform, found {inner!r}; the transform comes first, then the mask")
    assign = _Assignment("masked: mask", mask, (bool,), _memory)

    def init(params: PyTree) -> PyTree:
        return inner.functions.init(_part(assign(params), True, tree.leaves(params)))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING, **extras: Any):
        chosen = assign.of_updates(updates, params)
        leaves, treedef = tree.flatten(updates)
        mine = None if params is None else _part(chosen, True, tree.leaves(params))
        results, state = inner.run(_part(chosen, True, leaves), state, mine, donate=donate, **extras)
        merged = [results[name] if chosen[name] else leaf for name, leaf in zip(chosen, leaves, strict=True)]
        return tree.unflatten(treedef, merged), state

    return init, update


def resolve_mask(what: str, mask: object, memory: Memory | None = None) -> Callable[[PyTree], list[bool]]:
    """Return a function from parameters to a list of bools: for each parameter, True if the mask selects it.

    ``mask`` has a form that `masked` accepts; None selects all parameters. ``what`` names the mask in errors.
    """
    if mask is None:
        return lambda params: [True] * len(tree.leaves(params))
    assign = _Assignment(what, mask, (bool,), memory)
    return lambda params: list(assign(params).values())
