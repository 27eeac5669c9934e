"""Errors and warnings of parameters that hold several matrices, but would be updated as one matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from muonfx import tree
from muonfx.core import Locality, Transform
from muonfx.core.checks import warn_caller
from muonfx.core.transform import within
from muonfx.internal.display import format_list
from muonfx.routing.globs import patterns
from muonfx.routing.route import Route
from muonfx.routing.views import ROWS
from muonfx.transforms.matrices import STACK, MatrixView, view_of
from muonfx.tree import PyTree


def check_shapes(routes: Mapping[str, Route], transforms: Mapping[str, Transform], params: PyTree) -> None:
    """Raise if a tensor has more dims than when its label was chosen, so that its transform would flatten them.

    For example, the label "muon" was chosen for a matrix of shape (8, 4), and the tensor of three models stacked is
    (3, 8, 4). Muon would orthogonalize it as one matrix of shape (3, 32).

    Args:
        routes: the label of each parameter, with the shape for which it was chosen.
        transforms: the transform of each label.
        params: the parameters.
    """
    leaves = tree.leaves(params)  # in the order of ``routes``
    for (name, route), leaf in zip(routes.items(), leaves, strict=True):
        if leaf is None or route.shape is None:  # nothing to compare
            continue
        if route.label is None or route.label not in transforms:  # no transform updates the parameter
            continue
        if leaf.ndim <= len(route.shape):  # fewer dims are allowed: a rank may hold a flat shard of a matrix
            continue
        for tx in within(transforms[route.label]):  # the transform of the label, and all transforms that it calls
            if _would_mix(tx, name):
                raise _mixed_matrices(tx, name, route, tuple(leaf.shape))


def _would_mix(tx: Transform, name: str) -> bool:
    """Return True if a transform would update a stack of several models' weights, in one tensor, as one matrix.

    Muon without a view flattens three weights (3, 8, 4) to one matrix (3, 32), so that the result is True. With the
    pattern "... out in -> ... out in", it updates three matrices, and the result is False. So it is for AdamW, which
    updates each element by itself.
    """
    view = view_of(tx)
    if view is None:  # not Muon: a transform may still combine all elements of a parameter, for example in a norm
        return tx.locality is Locality.LEAF and not tx.children
    (pattern,) = view.of([name])  # the pattern of this one parameter
    return pattern is None or pattern.flattens_more_dims


def _mixed_matrices(tx: Transform, name: str, route: Route, shape: tuple[int, ...]) -> ValueError:
    """Return the error of `check_shapes` for a parameter of this shape, with a remedy for each likely cause."""
    return ValueError(
        f"partition: {name!r} has shape {shape}, expected {route.shape}, the shape when its label {route.label!r} was "
        f"chosen: {tx.name} would treat a stack of matrices as one matrix. If the tensor stacks several models "
        "(torch.func.stack_module_state), use torch.func.vmap(tx.init)(params) and torch.func.vmap(tx.update)(grads, "
        "state, params). If it is one parameter with several matrices, give Muon's orthogonalize "
        f"view=muonfx.MatrixView({{{name!r}: {STACK!r}}}). If it is one matrix, create the labels from the current "
        "parameters"
    )


def warn_of_views(routes: Mapping[str, Route], transforms: Mapping[str, Transform]) -> None:
    """Warn if parameters hold several matrices, judged by label or name, but are updated as one matrix.

    For example, query, key and value are one weight "qkv", and the transform has no ``view`` that divides it.

    Args:
        routes: the label of each parameter, with the view (how it divides into matrices) that the labels have for it.
        transforms: the transform of each label.
    """
    # Most parameters are one matrix without doubt. Others are divided by the labels, or may have to be divided.
    may_be_several: dict[str, Route] = {}
    for name, route in routes.items():
        if route.view.pattern or route.suggested is not None:
            may_be_several[name] = route
    if not may_be_several:
        return
    used_views = list(_used_views(may_be_several, transforms))
    _warn_of_unused_views(used_views)
    _warn_of_suggestions(used_views, routes)


def _warn_of_unused_views(used_views: Iterable[_UsedView]) -> None:
    """Warn of parameters that hold several matrices by their labels, if the transform has no pattern to divide them.

    For a "c_attn" of GPT-2, the labels have the pattern "in (part=3 out) -> part out in". A transform without
    ``view=labels.view()`` does not use it, and updates query, key and value as one matrix.
    """
    text_of_name: dict[str, str] = {}  # {"attn.c_attn": "'attn.c_attn' (hidden matrix (2-D); query, key, value)"}
    for name, route, view in used_views:
        if route.view.pattern and not view.is_set_for(name):
            text_of_name[name] = f"{name!r} ({route.reason})"
    if not text_of_name:
        return
    warn_caller(
        f"partition: the labels have a view for {format_list(list(text_of_name.values()), str)}, but the "
        "transform of these parameters has no pattern for them, so each is treated as one matrix. Give the transform "
        "view=labels.view(), with labels = default_labels(model), or pass Labels(labels) if this is intended"
    )


def _warn_of_suggestions(used_views: Iterable[_UsedView], routes: Mapping[str, Route]) -> None:
    """Warn of parameters that may hold several matrices, unless the user has set how their transform divides them.

    The evidence is only a name such as "qkv", or the widths of layers, so that the parameter is not split without the
    user.

    Args:
        used_views: the parameters, each with its route (label and suggested pattern) and the view of its transform.
        routes: the route of every parameter of the model, also of those without a suggestion.
    """
    # By the view of the transform: {"attn.qkv": "(part=3 out) in -> part out in"}. Most optimizers have one view.
    suggested_for_view: dict[MatrixView, dict[str, str]] = {}
    for name, route, view in used_views:
        if route.suggested is not None and not _is_set_by_user(name, route, view):
            suggested_for_view.setdefault(view, {})[name] = route.suggested
    # Each warning shows one argument of Muon, with the patterns of its view.
    for view, suggested in suggested_for_view.items():
        _warn_of_suggested(suggested, view, routes)


def _is_set_by_user(name: str, route: Route, view: MatrixView) -> bool:
    """Return True if the pattern of a parameter in the view of its transform is the choice of the user.

    `Labels.view` puts the patterns of the labels into a view. Any other pattern is the choice of the user.
    """
    pattern = view.text(name)
    return pattern is not None and pattern != route.view.pattern


class _UsedView(NamedTuple):
    """The view of a transform that updates a parameter as matrices."""

    name: str
    """The name of the parameter."""
    route: Route
    """Its label, with the view that belongs to the label."""
    view: MatrixView
    """The view of the transform: how it divides parameters into matrices."""


def _used_views(routes: Mapping[str, Route], transforms: Mapping[str, Transform]) -> Iterator[_UsedView]:
    """Yield the view of each transform of matrices, for each parameter that it updates.

    ``routes`` has the labels of the parameters, and ``transforms`` the transform of each label.
    """
    for label, tx in transforms.items():
        for transform in within(tx):  # the transform of the label, and all transforms that it calls
            view = view_of(transform)
            if view is None:  # it does not work on matrices
                continue
            for name, route in routes.items():
                if route.label == label:
                    yield _UsedView(name, route, view)


def _warn_of_suggested(suggested: Mapping[str, str], view: MatrixView, routes: Mapping[str, Route]) -> None:
    """Warn of parameters that may hold several matrices, with two patterns for each: one splits it, one keeps it whole.

    For ``suggested`` = {"attn.qkv": "(part=3 out) in -> part out in"}, these are the patterns {"*attn.qkv": "(part=3
    out) in -> part out in"} and {"*attn.qkv": "whole ... -> whole (...)"}, to copy into the user's code.

    Args:
        suggested: the pattern that splits each parameter, by name.
        view: the view of the transform. Its patterns for other parameters remain among those that split.
        routes: the label of each parameter of the model.
    """
    # The patterns are written with globs in place of names. A transform gets only the parameters of its label, so that
    # the globs must match no other parameter of these labels.
    labels = {routes[name].label for name in suggested}
    names_with_labels = [name for name, route in routes.items() if route.label in labels]
    splitting_patterns = _before(patterns(suggested, names_with_labels), view)
    whole_pattern_of_name = {name: _whole_pattern(routes[name]) for name in suggested}
    whole_patterns = patterns(whole_pattern_of_name, names_with_labels)
    warn_caller(_text_of_suggestions(suggested, splitting_patterns, whole_patterns))


def _text_of_suggestions(
    suggested: Mapping[str, str], splitting_patterns: Mapping[str, str], whole_patterns: Mapping[str, str]
) -> str:
    """Return the text of the warning of parameters that may hold several matrices.

    Args:
        suggested: the pattern that splits each parameter, by name: {"attn.qkv": "(part=3 out) in -> part out in"}.
        splitting_patterns: the patterns that split the parameters, by glob.
        whole_patterns: the patterns that keep each parameter one matrix, by glob.
    """
    # As text, because a pattern with placeholders is no valid `MatrixView`.
    argument = f"orthogonalize=muonfx.orthogonalize(view=muonfx.MatrixView({splitting_patterns!r}))"
    return (
        "labels: these parameters may hold several matrices each, by their names or dims, or by the widths of the "
        f"layers beside them, and each is treated as one matrix: {format_list(list(suggested))}. If their parts are "
        "stored one after another, split them by this argument of Muon or of a recipe:\n"
        f"  {argument}\n"
        f"{_advice_on_patterns(argument, suggested.values())}A transform of your own takes the same view=. "
        "If a pattern has equal parts, and yours have other numbers of rows, as with fewer keys than queries, write "
        "your sizes, such as '(q=512 + k=128 + v=128) in -> q in, k in, v in'; for parts that are interleaved, see "
        "`muonfx.MatrixView`. To "
        f"keep a parameter whole without this warning, write its pattern of these instead:\n  {whole_patterns!r}"
    )


def _advice_on_patterns(argument: str, suggested: Iterable[str]) -> str:
    """Return sentences that explain the suggested patterns, each with a space at its end; "" if there is none.

    One explains "<rows>", a placeholder for a number in the code ``argument``. Another explains a stack of matrices,
    whose pattern begins with "...".
    """
    advice = ""
    if ROWS in argument:
        advice += f"Replace each {ROWS} by the number of rows of that part. "
    if any(pattern.startswith("...") for pattern in suggested):
        advice += (
            "More than two dims are taken for a stack of matrices (out, in): exchange the last two dims of a pattern "
            "if each is stored as (in, out), such as '... in (part=2 out) -> ... part out in'. "
        )
    return advice


def _before(pattern_of_glob: dict[str, str], view: MatrixView) -> dict[str, str]:
    """Return patterns by glob, and after them the patterns of a view, which apply where no earlier glob matches.

    >>> _before({"*.qkv": "(part=3 out) in -> part out in"}, MatrixView("in out -> out in"))
    {'*.qkv': '(part=3 out) in -> part out in', '*': 'in out -> out in'}
    """
    patterns_of_view = view.pattern or {}
    if isinstance(patterns_of_view, str):
        patterns_of_view = {"*": patterns_of_view}
    merged = dict(pattern_of_glob)
    for glob, pattern in patterns_of_view.items():
        merged.setdefault(glob, pattern)
    return merged


def _whole_pattern(route: Route) -> str:
    """Return the pattern with which a parameter remains one matrix, or one stack, as it is stored.

    For a weight stored as (in, out), whose view is ``"in out -> out in"``, it is ``"in whole -> whole in"``. A pattern
    that differs from the view of the labels counts as the choice of the user, so that the warning ends.
    """
    stored = route.view.text("") or "out ... -> out (...)"
    return stored.replace("out", "whole")
