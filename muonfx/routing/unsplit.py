"""Errors and warnings of parameters that hold several matrices, but would be updated as one matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def check_shapes(
    routes: Mapping[str, Route], transforms: Mapping[str, Transform], params: PyTree
) -> None:
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
        # Skip a parameter that no transform updates.
        if route.label is None or route.label not in transforms:
            continue
        # Fewer dims are allowed: a rank may hold a flat shard of a matrix.
        if leaf.ndim <= len(route.shape):
            continue
        # The transform of the label, and all transforms that it calls.
        for tx in within(transforms[route.label]):
            if _would_mix(tx, name):
                raise _mixed_matrices(tx, name, route, tuple(leaf.shape))


def _would_mix(tx: Transform, name: str) -> bool:
    """Return True if a transform would update a stack of several models' weights, in one tensor, as one matrix.

    Muon without a view flattens three weights (3, 8, 4) to one matrix (3, 32), so that the result is True. With the
    pattern "... out in -> ... out in", it updates three matrices, and the result is False. So it is for AdamW, which
    updates each element by itself.
    """
    view = view_of(tx)
    # The transform is not Muon, but may still combine all elements of a parameter, for example in a norm.
    if view is None:
        return tx.locality is Locality.LEAF and not tx.children
    (pattern,) = view.of([name])  # the pattern of this one parameter
    return pattern is None or pattern.flattens_more_dims


def _mixed_matrices(tx: Transform, name: str, route: Route, shape: tuple[int, ...]) -> ValueError:
    """Return an error for a stack of matrices that a transform would update as one matrix.

    The message has a remedy for each likely cause.

    Args:
        tx: the transform.
        name: the name of the parameter.
        route: its label, and the shape for which the label was chosen: (8, 4).
        shape: the shape of the tensor, which has more dims: (3, 8, 4).
    """
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
    routes_of_view = _routes_by_view(may_be_several, transforms)
    _warn_of_unused_views(routes_of_view)
    for view, used_routes in routes_of_view.items():  # most optimizers have one view
        _warn_of_suggestions(view, used_routes, routes)


def _routes_by_view(
    routes: Mapping[str, Route], transforms: Mapping[str, Transform]
) -> dict[MatrixView, dict[str, Route]]:
    """Return, for the view of each transform of matrices, the routes of the parameters that the transform updates.

    A view is how the transform divides parameters into matrices. The label of a route chooses the transform.
    """
    routes_of_view: dict[MatrixView, dict[str, Route]] = {}
    for label, tx in transforms.items():
        routes_of_label = {name: route for name, route in routes.items() if route.label == label}
        for transform in within(tx):  # the transform of the label, and all transforms that it calls
            view = view_of(transform)
            if view is not None:  # it works on matrices
                routes_of_view.setdefault(view, {}).update(routes_of_label)
    return routes_of_view


def _warn_of_unused_views(routes_of_view: Mapping[MatrixView, Mapping[str, Route]]) -> None:
    """Warn of parameters that hold several matrices by their labels, if the transform has no pattern to divide them.

    For a "c_attn" of GPT-2, the labels have the pattern "in (part=3 out) -> part out in". A transform without
    ``view=labels.view()`` does not use it, and updates query, key and value as one matrix.

    ``routes_of_view`` has, by the view of a transform, the routes of its parameters, with the patterns of the labels.
    """
    # {"attn.c_attn": "'attn.c_attn' (hidden matrix (2-D); query, key, value)"}
    text_of_name: dict[str, str] = {}
    for view, routes in routes_of_view.items():
        for name, route in routes.items():
            if route.view.pattern and not view.is_set_for(name):
                text_of_name[name] = f"{name!r} ({route.reason})"
    if not text_of_name:
        return
    warn_caller(
        f"partition: the labels have a view for {format_list(list(text_of_name.values()), str)}, but the "
        "transform of these parameters has no pattern for them, so each is treated as one matrix. Give the transform "
        "view=labels.view(), with labels = default_labels(model), or pass Labels(labels) if this is intended"
    )


def _warn_of_suggestions(
    view: MatrixView, used_routes: Mapping[str, Route], routes: Mapping[str, Route]
) -> None:
    """Warn of parameters that may hold several matrices, unless the user has set how their transform divides them.

    The evidence is only a name such as "qkv", or the widths of layers, so that the parameter is not split without the
    user. The warning has two patterns to copy. For a "qkv", these are "(part=3 out) in -> part out in", which splits
    it, and "whole ... -> whole (...)", which keeps it one matrix.

    Args:
        view: the view of a transform, with the patterns that are set already.
        used_routes: the routes of the parameters that the transform updates, with the suggested patterns.
        routes: the routes of all parameters of the model.
    """
    suggested: dict[str, str] = {}  # {"attn.qkv": "(part=3 out) in -> part out in"}
    for name, route in used_routes.items():
        if route.suggested is not None and not _is_set_by_user(name, route, view):
            suggested[name] = route.suggested
    if not suggested:
        return
    # The patterns are written with globs in place of names. A transform gets only the parameters of its label, so that
    # the globs must match no other parameter of these labels.
    labels = {routes[name].label for name in suggested}
    names_with_labels = [name for name, route in routes.items() if route.label in labels]
    whole_pattern_of_name = {name: _whole_pattern(routes[name]) for name in suggested}
    text = _text_of_suggestions(
        suggested,
        splitting_patterns=_with_patterns_of(view, patterns(suggested, names_with_labels)),
        whole_patterns=patterns(whole_pattern_of_name, names_with_labels),
    )
    warn_caller(text)


def _is_set_by_user(name: str, route: Route, view: MatrixView) -> bool:
    """Return True if the pattern of a parameter in the view of its transform is the choice of the user.

    `Labels.view` puts the patterns of the labels into a view. Any other pattern is the choice of the user.
    """
    pattern = view.text(name)
    return pattern is not None and pattern != route.view.pattern


def _text_of_suggestions(
    suggested: Mapping[str, str],
    splitting_patterns: Mapping[str, str],
    whole_patterns: Mapping[str, str],
) -> str:
    """Return the text of the warning of parameters that may hold several matrices, with code to copy.

    Args:
        suggested: the pattern that splits each parameter, by name: {"attn.qkv": "(part=3 out) in -> part out in"}.
        splitting_patterns: the same by glob, and the patterns that the transform has for other parameters:
            {"*attn.qkv": "(part=3 out) in -> part out in"}.
        whole_patterns: the patterns that keep each parameter one matrix, by glob:
            {"*attn.qkv": "whole ... -> whole (...)"}.
    """
    # The view is a text, because a pattern with placeholders is no valid `MatrixView`.
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


def _with_patterns_of(view: MatrixView, pattern_of_glob: Mapping[str, str]) -> dict[str, str]:
    """Return patterns by glob, and after them the patterns of a view, which apply where no earlier glob matches.

    >>> _with_patterns_of(
    ...     MatrixView("in out -> out in"), {"*.qkv": "(part=3 out) in -> part out in"}
    ... )
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
