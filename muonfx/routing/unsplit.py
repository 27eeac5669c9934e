"""Errors and warnings of parameters that hold several matrices, but would be updated as one matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from muonfx import tree
from muonfx.core import Locality, Transform
from muonfx.core.checks import warn_caller
from muonfx.core.transform import within
from muonfx.internal.display import format_list
from muonfx.routing.route import Route
from muonfx.routing.views import patterns, undivided
from muonfx.transforms.matrices import STACK, MatrixView, view_of
from muonfx.tree import PyTree


def check_shapes(routes: Mapping[str, Route], transforms: Mapping[str, Transform], params: PyTree) -> None:
    """Raise if a tensor has more dims than when its label was chosen, so that its transform would flatten them.

    An example is a stack of weights of several models under ``torch.func.vmap``.
    """
    # Fewer dims are allowed: a rank may hold a flat shard of a matrix.
    for (name, route), leaf in zip(routes.items(), tree.leaves(params), strict=True):
        if route.shape is None or leaf is None or leaf.ndim <= len(route.shape):
            continue
        if route.label is None or route.label not in transforms:
            continue
        for tx in within(transforms[route.label]):
            if _would_mix(tx, name):
                raise _mixed_matrices(tx, name, route, tuple(leaf.shape))


def _would_mix(tx: Transform, name: str) -> bool:
    """Return True if a transform flattens a further dim of a parameter into the rows or columns of a matrix."""
    view = view_of(tx)
    if view is None:
        return tx.locality is Locality.LEAF and not tx.children
    (pattern,) = view.of([name])
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
    """Warn if parameters hold several matrices, judged by label or name, but are updated as one matrix."""
    unused: list[str] = []  # parameters with a view in the labels, which the transform does not use
    suspected: dict[str, str] = {}  # the pattern of each parameter whose name alone suggests several matrices
    view_to_extend = MatrixView()
    for label, tx in transforms.items():
        routes_of_label = {name: route for name, route in routes.items() if route.label == label}
        for view in _views_within(tx):
            for name, route in routes_of_label.items():
                if route.view.pattern and not view.is_set_for(name):
                    unused.append(f"{name!r} ({route.reason})")
                # A view that has the pattern of the label was extended by the labels: the user chose nothing.
                if route.suspected and view.text(name) in (None, route.view.pattern):
                    if not suspected:
                        view_to_extend = view
                    suspected[name] = route.suspected
    if unused:
        _warn_of_unused_views(list(dict.fromkeys(unused)))
    if suspected:
        _warn_of_suspected(suspected, view_to_extend, routes)


def _views_within(tx: Transform) -> list[MatrixView]:
    """Return the views of a transform and of all transforms in it."""
    views = [view_of(transform) for transform in within(tx)]
    return [view for view in views if view is not None]


def _warn_of_unused_views(parameters: list[str]) -> None:
    warn_caller(
        f"partition: the labels have a view for {format_list(parameters, str)}, but the transform of these parameters "
        "has no pattern for them, so each is treated as one matrix. Give the transform view=labels.view(), with "
        "labels = default_labels(model), or pass Labels(labels) if this is intended"
    )


def _warn_of_suspected(suspected: Mapping[str, str], view: MatrixView, routes: Mapping[str, Route]) -> None:
    """Warn of fused matrices in unknown code, with one argument of `Muon` that splits them, and one that does not.

    ``suspected`` is a dict from parameter name to the pattern that splits it, and ``view`` the view of the transform.
    """
    labels = {routes[name].label for name in suspected}
    names = [name for name, route in routes.items() if route.label in labels]
    undivided_patterns = {name: undivided(pattern) for name, pattern in suspected.items()}
    warn_caller(
        "partition: these parameters may hold several matrices each, by their names or by the widths of the layers "
        f"beside them, and each is treated as one matrix: {format_list(list(suspected))}. If their parts have equal "
        "numbers of rows, and are stored one after another, "
        f"split them by this argument of Muon:\n  {_argument(view, suspected, names)}\n"
        "A transform of your own takes the same view=. "
        "If the numbers differ, as with fewer keys than queries, write a pattern with your sizes, such as "
        "'(q=512 + k=128 + v=128) in -> q in, k in, v in'; for parts that are interleaved, see `muonfx.MatrixView`. If "
        f"each is one matrix, keep it whole without this warning:\n  {_argument(view, undivided_patterns, names)}"
    )


def _argument(view: MatrixView, pattern_of: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the argument of `Muon` for a view with further patterns, "orthogonalize=...".

    ``pattern_of`` is a dict from parameter name to pattern. It is written with globs that match no others of ``names``.
    """
    extended = MatrixView(patterns(pattern_of, names)).extended(view.pattern)
    return f"orthogonalize=muonfx.orthogonalize(view=muonfx.{extended!r})"
