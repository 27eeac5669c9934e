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
    So the results must be the same for other parameters, and for no parameters.

    >>> import muonfx as mfx
    >>> params_are_not_read_where_declared_so(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    # The same shapes with other values: an element 2.0 becomes -5.0.
    other_params = tree.map(lambda p: (p * -3 + 1).contiguous(), params)
    # First `init`: both states must have the same bits.
    state = tx.init(params)
    state_of_others = tx.init(other_params)
    require_same("state at init, for other values of the parameters", state_of_others, state, "for these")
    # Then `update`: each step runs from the same state with the usual parameters, with None, and with the others.
    for step, grads in enumerate(steps):
        expected = tx.run(grads, state, params)
        for which, params_of_run in {"no": None, "other": other_params}.items():
            results = tx.run(grads, state, params_of_run)
            require_same(f"step {step}, with {which} parameters, (updates, state)", results, expected, "with these")
        _, state = expected  # the next step continues the usual run


@law(on=Example.shortened, share=0.1)
def order_of_dicts_means_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that the insertion order of dicts in the trees does not change the update of any leaf.

    The order may differ between gradients, parameters and state, so a transform must pair their leaves by name.
    Checkpoints, ranks and ``torch.compile`` do not keep this order.

    >>> import muonfx as mfx
    >>> order_of_dicts_means_nothing(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3), "b": (3,)}))
    """
    _check_order(tx, params, steps)
    # A tree with one leaf has no order, so check it twice in one dict too: {"w": p} becomes {"z": {"w": p}, "a": ...}.
    twice = {"z": params, "a": params}
    if accepts_names(tx, twice):  # a transform for the parameter "w" may raise an error for "z.w"
        _check_order(tx, twice, [{"z": grads, "a": grads} for grads in steps])


def _check_order(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) if the update of a leaf depends on the order of items in a dict.

    The dicts of the gradients, of the parameters or of the state are put in the opposite order. For example, gradients
    ``{"w": g, "b": h}`` become ``{"b": h, "w": g}``. Each leaf, found by its name, must have the same update.
    """
    # The usual results of each step, by the names of leaves. A comparison by position would compare "w" with "b".
    expected = [dict(tree.named_leaves(results)) for results in history(tx, params, steps)]
    tolerance = tolerance_of(tx, expected, params)  # sums over leaves may be taken in another order
    # One run for each choice of the trees in the opposite order: one tree alone, or two of them together.
    for reversed_trees in (["gradients"], ["parameters"], ["state"], ["gradients", "parameters", "state"]):
        params_of_run = params
        if "parameters" in reversed_trees:
            params_of_run = _with_reversed_dicts(params)
        state = tx.init(params_of_run)
        # All steps in this order. The state is reversed again before each step, since the step returns a new one.
        for step, grads in enumerate(steps):
            grads_of_step = grads
            if "gradients" in reversed_trees:
                grads_of_step = _with_reversed_dicts(grads)
            if "state" in reversed_trees:
                state = _with_reversed_dicts(state)
            updates, state = tx.update(grads_of_step, state, params_of_run)
            results = dict(tree.named_leaves((updates, state)))
            what = f"step {step}, with the dicts of {reversed_trees} in the other order, (updates, state)"
            require_close(what, results, expected[step], "in this order", tolerance)


def _with_reversed_dicts(values: PyTree) -> PyTree:
    """Return a tree with the items of all dicts in the opposite order. Lists and tuples keep their order.

    >>> _with_reversed_dicts({"b": [1, 2], "a": 3})
    {'a': 3, 'b': [1, 2]}
    """
    if type(values) is dict:  # not a subclass, such as OrderedDict, whose order may have a meaning
        return {key: _with_reversed_dicts(item) for key, item in reversed(values.items())}
    if isinstance(values, tuple | list):
        items = [_with_reversed_dicts(item) for item in values]
        if hasattr(values, "_fields"):  # a NamedTuple, whose class takes each item as an argument
            return type(values)(*items)
        return type(values)(items)
    return values


@law(on=lambda example: enlarged(precise(example)), share=0.08)
def large_leaves_are_as_small_ones(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check leaves of several thousand elements: updates have the right shapes, and depend on no more than declared.

    A transform may use another algorithm for large leaves, such as one that works on parts of a leaf. For this reason
    the main checks of the declared `Locality` (the part of the tree that an update depends on) run again with large
    leaves. For the locality TREE, only the shapes are checked.

    >>> import muonfx as mfx
    >>> large_leaves_are_as_small_ones(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    # The declared locality decides which check applies: elements or leaves must not depend on each other.
    if tx.locality is Locality.ELEMENT:
        check_elements(tx, params, steps)
    elif tx.locality in (Locality.MATRIX, Locality.LEAF):
        check_leaves(tx, params, steps)
    # For every locality: each update has the shape, dtype and device of its gradient.
    for step, updates in enumerate(updates_of(tx, params, steps)):
        require_spec(f"step {step}, updates", updates, steps[step], "the gradients")


@law(on=precise, unless=_without("resolve"), share=0.3)
def resolving_changes_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that `Transform.resolve` returns a transform with the same updates and states.

    `resolve` makes all choices that depend on the names and shapes of parameters. For example, it replaces a condition
    on shapes by a mask. It receives meta tensors here, since it must not need the values of parameters.

    >>> import muonfx as mfx
    >>> resolving_changes_nothing(mfx.scale_by_shape(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    resolved = tx.resolve(on_meta(params))
    # A resolved transform has no choice left, so resolving it again returns an equal one.
    if resolved.resolve(on_meta(params)) != resolved:
        raise Breach(None, f"resolved once it is {resolved!r}, twice another")
    # Both transforms run on the same parameters and gradients.
    expected = history(tx, params, steps)
    tolerance = tolerance_of(tx, expected)
    require_close("(updates, state) once resolved", history(resolved, params, steps), expected, "before", tolerance)


def _does_not_round(tx: Transform) -> str | None:
    return "it declares no rounds_to" if tx.declaration.matrices.rounds_to is None else None


@law(on=Example.dense, unless=_does_not_round, share=0.5)
def rounding_first_changes_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that no bit of the result changes if updates are first rounded to the declared dtype ``rounds_to``.

    A transform that computes in bfloat16 declares this dtype, and ranks then send updates to each other in bfloat16.
    Its results are sent too, so they must not have more digits than this dtype.

    >>> import muonfx as mfx
    >>> rounding_first_changes_nothing(mfx.orthogonalize(dtype=torch.bfloat16), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    rounds_to = tx.declaration.matrices.rounds_to
    assert rounds_to is not None

    def rounded(leaf: Tensor) -> Tensor:
        """Round a leaf to the declared dtype if that is narrower, and convert it back to its own dtype."""
        declared_dtype = rounds_to(tx, leaf.dtype, leaf.device)
        if declared_dtype.itemsize >= leaf.dtype.itemsize:
            return leaf
        return leaf.to(declared_dtype).to(leaf.dtype)

    # The transform runs twice: on the usual gradients, and on gradients such as 1.001 that are rounded to 1.0 first.
    usual_updates = updates_of(tx, params, steps)
    updates_of_rounded = updates_of(tx, params, tree.map(rounded, steps))
    for step, updates in enumerate(updates_of_rounded):
        # Rounding the input has no effect: the transform itself begins with this rounding.
        what = f"step {step}, updates of gradients rounded first"
        require_same(what, updates, usual_updates[step], "of the gradients")
        # Rounding the output has no effect either: it can be sent in the narrow dtype without a loss.
        expected_is = "as they are: they have no more digits"
        require_same(f"step {step}, updates, rounded", tree.map(rounded, updates), updates, expected_is)


@law(on=lambda example: _stacked(precise(example)), share=0.2)
def stacks_are_as_their_matrices(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that each matrix of a leaf is updated independently if `MatrixWork.on_stacks` declares a stack of matrices.

    For example, a leaf of shape (4, 3) may hold the matrices of queries and keys, both of shape (2, 3). The updates
    must be the same for the leaf, for the same elements in the shape (2, 2, 3), and for the first matrix alone.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> tx = mfx.orthogonalize(dtype=torch.float64, view=mfx.MatrixView("(part=2 out) in -> part out in"))
    >>> stacks_are_as_their_matrices(tx, *Example.of({"w": (4, 3)}))
    """
    # The transform declares two things: a transform of stacks, and (rows, columns) for each leaf that is a stack.
    shapes = {name: tuple(leaf.shape) for name, leaf in tree.named_leaves(params)}
    tx_of_stacks, declared_shapes = stacked(tx, shapes)
    matrix_shapes = _shapes_of_stacked_matrices(shapes, declared_shapes)
    if not matrix_shapes:  # no leaf of this example is a stack of matrices
        return
    usual_updates = updates_of(tx, params, steps)
    tolerance = tolerance_of(tx, usual_updates)
    # The same elements in the shape (number of matrices, rows, columns), and then only the first of these matrices.
    stacks = Example(params, steps).map_trees(lambda values: _as_stacks(matrix_shapes, values))
    first_matrices = stacks.map(_first_matrix)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the names of a view may match none of these leaves
        updates_of_stacks = updates_of(tx_of_stacks, *stacks)
        updates_of_first = updates_of(tx_of_stacks, *first_matrices)
    # Only the updates of leaves that are stacks are compared, in the shape of the stack.
    expected = [_as_stacks(matrix_shapes, updates) for updates in usual_updates]
    require_close("updates of leaves as stacks", updates_of_stacks, expected, "of the leaves", tolerance)
    what = "updates of the first matrix of each stack alone"
    expected_of_first = tree.map(_first_matrix, expected)
    # A larger tolerance, since it is relative to the largest element, which may be in another matrix.
    require_close(what, updates_of_first, expected_of_first, "in the stack", tolerance * 1e2)


def _shapes_of_stacked_matrices(
    leaf_shapes: Mapping[str, tuple[int, ...]], declared_shapes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Return the declared shapes of matrices, by leaf, without empty leaves. Raise `Breach` for a wrong shape.

    A leaf of shape (4, 3) may be a stack of matrices of shape (2, 3), but not of matrices of shape (5, 3).

    >>> _shapes_of_stacked_matrices({"qk": (4, 3), "empty": (0, 3)}, {"qk": (2, 3), "empty": (2, 3)})
    {'qk': (2, 3)}
    """
    matrix_shapes: dict[str, tuple[int, int]] = {}
    for name, (rows, columns) in declared_shapes.items():
        numel = prod(leaf_shapes[name])  # 12 for the shape (4, 3): two matrices of shape (2, 3) have as many
        if numel == 0:  # a stack of any number of empty matrices
            continue
        if numel % (rows * columns):  # a remainder: these elements do not fill a whole number of matrices
            raise Breach(f"{name!r}", f"of shape {leaf_shapes[name]} is not a stack of matrices of ({rows}, {columns})")
        matrix_shapes[name] = (rows, columns)
    return matrix_shapes


def _as_stacks(matrix_shapes: Mapping[str, tuple[int, int]], values: PyTree) -> dict[str, Tensor]:
    """Return the leaves of a tree that are stacks of matrices by name, with the shape (number, rows, columns)."""
    leaf_of = dict(tree.named_leaves(values))
    return {name: leaf_of[name].reshape(-1, *shape) for name, shape in matrix_shapes.items()}


def _first_matrix(stack: Tensor) -> Tensor:
    return stack[:1]


def _stacked(example: Example) -> Example:
    """Return an example in which each leaf consists of three different matrices.

    A leaf of shape (4, 5) becomes (12, 5), joined along the rows. One of shape (2, 4, 5) becomes (6, 4, 5). The
    matrices differ, so a transform that mixes them returns other updates for the stack than for one matrix.
    """

    def three_matrices(leaf: Tensor) -> Tensor:
        matrix = leaf
        if leaf.ndim < 2:  # a scalar or a vector becomes a matrix with one row
            matrix = leaf.reshape(1, -1)
        # Two other matrices with the elements of this one: moved along the row and larger, and in the opposite order.
        large = 5.0 * matrix.roll(1, -1) - 0.5
        reversed_order = matrix.flip(-1) + 0.25
        dim = 0 if matrix.ndim == 2 else -3  # the rows of a matrix; of a batch, the dim that counts its matrices
        return torch.cat([matrix, large, reversed_order], dim=dim)

    return example.map(three_matrices)


def _calls_none(tx: Transform) -> str | None:
    if tx.declaration.combinator.own_locality is None:
        return "it declares no own_locality"
    if not any(isinstance(part, Transform) for part in tx.parts):
        return "it calls no transform"
    return None


@law(on=precise, unless=_calls_none, share=0.2)
def own_work_is_of_its_own_locality(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that the own computation of a wrapper reads no more of the tree than it declares as ``own_locality``.

    A wrapper is a transform that calls others. For example, `accumulate` declares ELEMENT: its own sum of gradients is
    elementwise, whatever the inner transform reads. The law puts an elementwise transform in place of each inner one.
    Whatever is read beyond an element is then read by the wrapper itself.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> own_work_is_of_its_own_locality(mfx.accumulate(mfx.clip_by_global_norm(1.0), 2), *Example.of({"w": (2, 3)}))
    """
    # Choices by names and shapes are made first: which leaves an inner transform receives, for example.
    names = tuple(tree.names(params))
    resolved = tx.resolve(on_meta(params))
    # The replacement also raises an error if the wrapper calls it with leaves that the wrapper has not received.
    elementwise = [_multiply_known_leaves(names) for _ in resolved.children]
    tx_of_elementwise = resolved.with_children(elementwise)
    # The wrapper with elementwise inner transforms has the declared locality as a whole, which a usual check tests.
    own_locality = tx.declaration.combinator.own_locality
    if own_locality is Locality.ELEMENT:
        check_elements(tx_of_elementwise, params, steps)
    elif own_locality is Locality.TREE and sums_over_leaves(tx):
        check_sums(tx_of_elementwise, params, steps)
    else:  # it may read what it likes, so only the names of leaves are checked
        history(tx_of_elementwise, params, steps)


@transform(locality=Locality.ELEMENT)
def _multiply_known_leaves(names: tuple[str, ...]) -> Any:
    """Multiply updates by -0.5, and raise `Breach` (a failed law) for a leaf that has none of the given names.

    A wrapper is a transform that calls others. In a law, this one replaces a transform that it calls. If the wrapper
    has the leaves ``names``, such as ``("w", "b")``, then a call with a leaf "c" is a mistake of the wrapper.
    """

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
