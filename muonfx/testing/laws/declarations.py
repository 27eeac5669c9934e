"""Laws of declarations: a transform has the properties that its factory declares, and that sharded runs rely on.

These laws check the options ``reads_params``, ``combinator``, ``resolve``, ``rounds_to`` and ``on_stacks`` of
`muonfx.transform`, and that neither the order of a dict nor the size of a leaf changes a result. The laws of the option
``locality`` are in `muonfx.testing.laws.locality`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, EmptyState, Locality, Transform, transform
from muonfx.core.donation import NOTHING
from muonfx.core.transform import stacked
from muonfx.core.visit import sums_over_leaves
from muonfx.testing.examples import Example, accepts_names, history, on_meta, scaled, updates_of
from muonfx.testing.law import law
from muonfx.testing.laws.locality import check_elements, check_leaves, check_sums, enlarged, precise
from muonfx.testing.violation import Breach, require_close, require_same, require_spec, tolerance_of
from muonfx.tree import PyTree


def _without(option: str) -> Any:
    """Return a function from a transform to the reason why it has no such option of `muonfx.transform`, or to None."""
    return lambda tx: None if getattr(tx.declaration, option) is not None else f"it declares no {option}"


@law(unless=lambda tx: "it declares that it reads the parameters" if tx.reads_params else None, share=0.3)
def params_are_not_read_where_declared_so(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that with ``reads_params=False`` neither `init` nor `update` depends on the parameters' values.

    In a sharded run, `update` of such a transform receives None as parameters, and `init` parameters without values.

    >>> import muonfx as mfx
    >>> params_are_not_read_where_declared_so(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    other_params = tree.map(lambda p: (p * -3 + 1).contiguous(), params)
    state = tx.init(params)
    state_of_others = tx.init(other_params)
    require_same("state at init, for other values of the parameters", state_of_others, state, "for these")
    for step, grads in enumerate(steps):
        expected = tx.run(grads, state, params)
        for which, replaced_params in (("no", None), ("other", other_params)):
            results = tx.run(grads, state, replaced_params)
            require_same(f"step {step}, with {which} parameters, (updates, state)", results, expected, "with these")
        _, state = expected


@law(on=Example.shortened, share=0.1)
def order_of_dicts_means_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that the insertion order of dicts in the trees does not change the update of any leaf.

    The order may differ between gradients, parameters and state, so a transform must pair their leaves by name.
    Checkpoints, ranks and ``torch.compile`` do not keep this order.

    >>> import muonfx as mfx
    >>> order_of_dicts_means_nothing(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3), "b": (3,)}))
    """
    _check_order(tx, params, steps)
    twice = {"z": params, "a": params}  # so that at least one dict has two items
    if accepts_names(tx, twice):
        _check_order(tx, twice, [{"z": grads, "a": grads} for grads in steps])


def _check_order(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) if the update of a leaf depends on the order of items in one of the trees."""
    expected = [dict(tree.named_leaves(results)) for results in history(tx, params, steps)]
    tolerance = tolerance_of(tx, expected, params)  # sums over leaves may be taken in another order
    for reversed_trees in (["gradients"], ["parameters"], ["state"], ["gradients", "parameters", "state"]):
        ordered_params = _ordered(params, reverse="parameters" in reversed_trees)
        state = tx.init(ordered_params)
        for step, grads in enumerate(steps):
            ordered_grads = _ordered(grads, reverse="gradients" in reversed_trees)
            ordered_state = _ordered(state, reverse="state" in reversed_trees)
            updates, state = tx.update(ordered_grads, ordered_state, ordered_params)
            results = dict(tree.named_leaves((updates, state)))
            what = f"step {step}, with the dicts of {reversed_trees} in the other order, (updates, state)"
            require_close(what, results, expected[step], "in this order", tolerance)


def _ordered(values: PyTree, *, reverse: bool) -> PyTree:
    """Return a tree, with ``reverse`` with the items of all dicts reversed; lists and tuples keep their order."""
    if not reverse:
        return values
    if type(values) is dict:
        return {key: _ordered(item, reverse=True) for key, item in reversed(values.items())}
    if isinstance(values, tuple | list):
        items = [_ordered(item, reverse=True) for item in values]
        if hasattr(values, "_fields"):
            return type(values)(*items)
        return type(values)(items)
    return values


@law(on=lambda example: enlarged(precise(example)), share=0.08)
def large_leaves_are_as_small_ones(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check leaves of several thousand elements: updates have the right shapes and obey the declared locality.

    A transform may use another algorithm for large leaves, such as one that works on parts of a leaf. For this reason
    the main checks of locality run again with large leaves. For the locality TREE, only the shapes are checked.

    >>> import muonfx as mfx
    >>> large_leaves_are_as_small_ones(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    if tx.locality is Locality.ELEMENT:
        check_elements(tx, params, steps)
    elif tx.locality in (Locality.MATRIX, Locality.LEAF):
        check_leaves(tx, params, steps)
    for step, updates in enumerate(updates_of(tx, params, steps)):
        require_spec(f"step {step}, updates", updates, steps[step], "the gradients")


@law(on=precise, unless=_without("resolve"), share=0.3)
def resolving_changes_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that `Transform.resolve` returns a transform with the same updates and states.

    `resolve` makes all choices that depend on the names and shapes of parameters, and does not need their values.

    >>> import muonfx as mfx
    >>> resolving_changes_nothing(mfx.scale_by_shape(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    resolved = tx.resolve(on_meta(params))
    if resolved.resolve(on_meta(params)) != resolved:
        raise Breach(None, f"resolved once it is {resolved!r}, twice another")
    expected = history(tx, params, steps)
    tolerance = tolerance_of(tx, expected)
    require_close("(updates, state) once resolved", history(resolved, params, steps), expected, "before", tolerance)


def _does_not_round(tx: Transform) -> str | None:
    return "it declares no rounds_to" if tx.declaration.matrices.rounds_to is None else None


@law(on=Example.dense, unless=_does_not_round, share=0.5)
def rounding_first_changes_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that no bit of the result changes if updates are first rounded to the declared dtype ``rounds_to``.

    Ranks send updates in this dtype. The result must not have more precision than this dtype either.

    >>> import muonfx as mfx
    >>> rounding_first_changes_nothing(mfx.orthogonalize(dtype=torch.bfloat16), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    rounds_to = tx.declaration.matrices.rounds_to
    assert rounds_to is not None

    def rounded(leaf: Tensor) -> Tensor:
        narrow = rounds_to(tx, leaf.dtype, leaf.device)
        if narrow.itemsize >= leaf.dtype.itemsize:
            return leaf
        return leaf.to(narrow).to(leaf.dtype)

    usual = updates_of(tx, params, steps)
    results = updates_of(tx, params, tree.map(rounded, steps))
    for step, updates in enumerate(results):
        require_same(f"step {step}, updates of gradients rounded first", updates, usual[step], "of the gradients")
        expected_is = "as they are: they have no more digits"
        require_same(f"step {step}, updates, rounded", tree.map(rounded, updates), updates, expected_is)


@law(on=lambda example: _stacked(precise(example)), share=0.2)
def stacks_are_as_their_matrices(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that each matrix of a leaf is updated independently if `MatrixWork.on_stacks` declares a stack of matrices.

    The updates are the same if the stack is reshaped to (number, rows, columns), or shortened to its first matrix.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> tx = mfx.orthogonalize(dtype=torch.float64, view=mfx.MatrixView("(part=2 out) in -> part out in"))
    >>> stacks_are_as_their_matrices(tx, *Example.of({"w": (4, 3)}))
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in tree.named_leaves(params)}
    tx_of_stacks, declared_shapes = stacked(tx, shapes)
    matrix_shapes: dict[str, tuple[int, int]] = {}
    for name, (rows, columns) in declared_shapes.items():
        numel = prod(shapes[name])
        if numel == 0:
            continue  # without elements it is no stack of a certain number of matrices
        if numel % (rows * columns):
            raise Breach(f"{name!r}", f"of shape {shapes[name]} is not a stack of matrices of ({rows}, {columns})")
        matrix_shapes[name] = (rows, columns)
    if not matrix_shapes:
        return
    usual = updates_of(tx, params, steps)
    tolerance = tolerance_of(tx, usual)
    stacks = Example(params, steps).map_trees(lambda values: _as_stacks(matrix_shapes, values))
    first_matrices = stacks.map(_first_matrix)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the names of a view may match none of these leaves
        updates_of_stacks = updates_of(tx_of_stacks, *stacks)
        updates_of_first = updates_of(tx_of_stacks, *first_matrices)
    expected = [_as_stacks(matrix_shapes, updates) for updates in usual]
    require_close("updates of leaves as stacks", updates_of_stacks, expected, "of the leaves", tolerance)
    what = "updates of the first matrix of each stack alone"
    expected_of_first = tree.map(_first_matrix, expected)
    # A larger tolerance, since it is relative to the largest element, which may be in another matrix.
    require_close(what, updates_of_first, expected_of_first, "in the stack", tolerance * 1e2)


def _as_stacks(matrix_shapes: Mapping[str, tuple[int, int]], values: PyTree) -> dict[str, Tensor]:
    """Return the leaves of a tree that are stacks of matrices by name, with the shape (number, rows, columns)."""
    leaf_of = dict(tree.named_leaves(values))
    return {name: leaf_of[name].reshape(-1, *shape) for name, shape in matrix_shapes.items()}


def _first_matrix(stack: Tensor) -> Tensor:
    return stack[:1]


def _stacked(example: Example) -> Example:
    """Return an example in which each leaf consists of three different matrices, joined along rows or a batch dim."""

    def joined(leaf: Tensor) -> Tensor:
        if leaf.ndim < 2:
            leaf = leaf.reshape(1, -1)
        large = 5.0 * leaf.roll(1, -1) - 0.5
        reversed_order = leaf.flip(-1) + 0.25
        along = 0 if leaf.ndim == 2 else -3
        return torch.cat([leaf, large, reversed_order], dim=along)

    return example.map(joined)


def _calls_none(tx: Transform) -> str | None:
    if tx.declaration.combinator.own_locality is None:
        return "it declares no own_locality"
    if not any(isinstance(part, Transform) for part in tx.parts):
        return "it calls no transform"
    return None


@law(on=precise, unless=_calls_none, share=0.2)
def own_work_is_of_its_own_locality(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a wrapper of elementwise transforms reads no more than its declared ``own_locality``.

    A wrapper is a transform that calls other transforms. It must call them with leaves that it has received.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> own_work_is_of_its_own_locality(mfx.accumulate(mfx.clip_by_global_norm(1.0), 2), *Example.of({"w": (2, 3)}))
    """
    # With elementwise transforms inside, all that it reads beyond an element is read by the wrapper itself.
    names = tuple(tree.names(params))
    resolved = tx.resolve(on_meta(params))
    with_elementwise = resolved.with_children([_halve_leaves(names) for _ in resolved.children])
    own_locality = tx.declaration.combinator.own_locality
    if own_locality is Locality.ELEMENT:
        check_elements(with_elementwise, params, steps)
    elif own_locality is Locality.TREE and sums_over_leaves(tx):
        check_sums(with_elementwise, params, steps)
    else:  # only that it passes on leaves that it has received
        history(with_elementwise, params, steps)


@transform(locality=Locality.ELEMENT)
def _halve_leaves(names: tuple[str, ...]) -> Any:
    """Multiply updates by -0.5, and raise `Breach` (a failed law) for a leaf that has none of the given names."""

    def init(params: PyTree) -> EmptyState:
        _require_names("parameters", params, names)
        return EmptyState()

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        _require_names("updates", updates, names)
        return scaled(updates, -0.5), state

    return init, update


def _require_names(what: str, values: PyTree, names: tuple[str, ...]) -> None:
    """Raise `Breach` (a failed law) if a leaf, which a wrapper passes on, has none of the names of its own leaves."""
    for name in tree.names(values):
        if name not in names:
            text = "passed to the inner transform, but the wrapper has no leaf of this name"
            raise Breach(f"{what} {name!r}", text)
