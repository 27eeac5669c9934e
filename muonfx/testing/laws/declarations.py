"""Laws of declarations: a transform has the properties that its factory declares, and that sharded runs rely on.

These laws check the options ``reads_params``, ``combinator``, ``resolve``, ``rounds_to`` and ``on_stacks`` of
`muonfx.transform`, and that neither the order of a dict nor the size of a leaf changes a result. The laws of the option
``locality`` are in `muonfx.testing.laws.locality`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, EmptyState, Locality, Transform, transform
from muonfx.core.donation import NOTHING
from muonfx.core.transform import stacked
from muonfx.core.visit import sums_over_leaves
from muonfx.testing.examples import (
    Example,
    accepts_names,
    as_matrix,
    history,
    on_meta,
    scaled,
    updates_of,
)
from muonfx.testing.law import law
from muonfx.testing.laws.locality import check_elements, check_leaves, check_sums, enlarged, precise
from muonfx.testing.violation import Breach, require_close, require_same, require_spec, tolerance_of
from muonfx.tree import PyTree


@law(
    unless=lambda tx: "it declares that it reads the parameters" if tx.reads_params else None,
    share=0.3,
)
def params_are_not_read_where_declared_so(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that with ``reads_params=False`` neither `init` nor `update` depends on the parameters' values.

    In a sharded run, `update` of such a transform receives None as parameters, and `init` parameters without values.
    So the results must be the same for other parameters, and for no parameters.

    >>> import muonfx as mfx
    >>> params_are_not_read_where_declared_so(
    ...     mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    other_params = tree.map(lambda p: (p * -3 + 1).contiguous(), params)
    state = tx.init(params)
    require_same(
        "state at init, for other values of the parameters",
        tx.init(other_params),
        state,
        "for these",
    )
    for step, grads in enumerate(steps):
        expected = tx.run(grads, state, params)
        for which, values in {"no": None, "other": other_params}.items():
            results = tx.run(grads, state, values)
            require_same(
                f"step {step}, with {which} parameters, (updates, state)",
                results,
                expected,
                "with these",
            )
        _, state = expected


@law(on=Example.shortened, share=0.1)
def order_of_dicts_means_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that the insertion order of dicts in the trees does not change the update of any leaf.

    The order may differ between gradients, parameters and state, so a transform must pair their leaves by name.
    Checkpoints, ranks and ``torch.compile`` do not keep this order.

    >>> import muonfx as mfx
    >>> order_of_dicts_means_nothing(
    ...     mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3), "b": (3,)})
    ... )
    """
    _check_order(tx, params, steps)
    # A tree with one leaf has no order, so it is also checked twice in one dict: as "z.w" and "a.w".
    twice = Example(params, steps).map_trees(lambda values: {"z": values, "a": values})
    if accepts_names(tx, twice.params):
        _check_order(tx, *twice)


def _check_order(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) if the update of a leaf depends on the order of items in a dict.

    The dicts of the gradients, of the parameters or of the state are put in the opposite order. For example, gradients
    ``{"w": g, "b": h}`` become ``{"b": h, "w": g}``. Each leaf, found by its name, must have the same update.
    """
    reversed_params, reversed_steps = Example(params, steps).map_trees(_with_reversed_dicts)
    histories = {
        "the gradients": history(tx, params, reversed_steps),
        "the parameters": history(tx, reversed_params, steps),
        "the state": history(tx, params, steps, change_state=_with_reversed_dicts),
        "all three": history(
            tx, reversed_params, reversed_steps, change_state=_with_reversed_dicts
        ),
    }
    # Leaves are compared by name. A comparison by position would compare "w" with "b".
    expected = [_leaves_by_name(result) for result in history(tx, params, steps)]
    tolerance = tolerance_of(tx, expected, params)  # sums over leaves may be taken in another order
    for which, results_of_steps in histories.items():
        what = f"with the dicts of {which} in the other order, (updates, state) by step"
        results = [_leaves_by_name(result) for result in results_of_steps]
        require_close(what, results, expected, "in this order", tolerance)


def _leaves_by_name(values: PyTree) -> dict[str, Any]:
    return dict(tree.named_leaves(values))


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
    if tx.locality is Locality.ELEMENT:
        check_elements(tx, params, steps)
    elif tx.locality in (Locality.MATRIX, Locality.LEAF):
        check_leaves(tx, params, steps)
    require_spec("updates by step", updates_of(tx, params, steps), steps, "the gradients")


def _does_not_resolve(tx: Transform) -> str | None:
    return "it declares no resolve" if tx.declaration.resolve is None else None


@law(on=precise, unless=_does_not_resolve, share=0.3)
def resolving_changes_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that `Transform.resolve` returns a transform with the same updates and states.

    `resolve` makes all choices that depend on the names and shapes of parameters. For example, it replaces a condition
    on shapes by a mask. It receives meta tensors here, since it must not need the values of parameters.

    >>> import muonfx as mfx
    >>> resolving_changes_nothing(mfx.scale_by_shape(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    resolved = tx.resolve(on_meta(params))
    if resolved.resolve(on_meta(params)) != resolved:  # although it has no choice left
        raise Breach(None, f"resolved once it is {resolved!r}, twice another")
    expected = history(tx, params, steps)
    tolerance = tolerance_of(tx, expected)
    require_close(
        "(updates, state) once resolved",
        history(resolved, params, steps),
        expected,
        "before",
        tolerance,
    )


def _does_not_round(tx: Transform) -> str | None:
    return "it declares no rounds_to" if tx.declaration.matrices.rounds_to is None else None


@law(on=Example.dense, unless=_does_not_round, share=0.5)
def rounding_first_changes_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that no bit of the result changes if updates are first rounded to the declared dtype ``rounds_to``.

    A transform that computes in bfloat16 declares this dtype, and ranks then send updates to each other in bfloat16.
    Its results are sent too, so they must not have more digits than this dtype.

    >>> import muonfx as mfx
    >>> rounding_first_changes_nothing(
    ...     mfx.orthogonalize(dtype=torch.bfloat16), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    usual_updates = updates_of(tx, params, steps)
    updates_of_rounded = updates_of(tx, params, _rounded(tx, steps))
    require_same(
        "updates of gradients rounded first, by step",
        updates_of_rounded,
        usual_updates,
        "of the gradients",
    )
    expected_is = "as they are: they have no more digits"
    require_same(
        "updates, rounded, by step", _rounded(tx, usual_updates), usual_updates, expected_is
    )


def _rounded(tx: Transform, values: PyTree) -> PyTree:
    """Return a tree with each leaf rounded to the dtype that the transform declares for it, in the leaf's own dtype.

    For the dtype bfloat16, a float32 leaf of 1.001 becomes a float32 leaf of 1.0.
    """
    rounds_to = tx.declaration.matrices.rounds_to
    assert rounds_to is not None

    def rounded(leaf: Tensor) -> Tensor:
        declared_dtype = rounds_to(tx, leaf.dtype, leaf.device)
        if declared_dtype.itemsize >= leaf.dtype.itemsize:
            return leaf
        return leaf.to(declared_dtype).to(leaf.dtype)

    return tree.map(rounded, values)


@law(on=lambda example: _stacked(precise(example)), share=0.2)
def stacks_are_as_their_matrices(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that each matrix of a leaf is updated independently if `MatrixWork.on_stacks` declares a stack of matrices.

    A leaf of shape (4, 3) may hold the matrices of queries and keys, both of shape (2, 3). Its updates must be the same
    for the leaf, for the same elements in the shape (2, 2, 3), and in the shape (1, 2, 3) for the first matrix alone.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> tx = mfx.orthogonalize(
    ...     dtype=torch.float64, view=mfx.MatrixView("(part=2 out) in -> part out in")
    ... )
    >>> stacks_are_as_their_matrices(tx, *Example.of({"w": (4, 3)}))
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in tree.named_leaves(params)}
    # `shape_of_matrix` has (rows, columns) for each leaf that is a stack, by name.
    tx_of_stacks, shape_of_matrix = stacked(tx, shapes)
    stacks = Example(params, steps).map_trees(lambda values: _as_stacks(shape_of_matrix, values))
    if not stacks.params:  # no leaf of this example is a stack of matrices
        return
    # Three runs of the same gradients: as they are, as stacks of matrices, and the first matrix of each stack alone.
    usual_updates = updates_of(tx, params, steps)
    expected = [_as_stacks(shape_of_matrix, updates) for updates in usual_updates]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the names of a view may match none of these leaves
        updates_of_stacks = updates_of(tx_of_stacks, *stacks)
        updates_of_first = updates_of(tx_of_stacks, *stacks.map(_first_matrix))
    tolerance = tolerance_of(tx, usual_updates)
    require_close(
        "updates of leaves as stacks", updates_of_stacks, expected, "of the leaves", tolerance
    )
    what = "updates of the first matrix of each stack alone"
    # A larger tolerance, since it is relative to the largest element, which may be in another matrix.
    require_close(
        what, updates_of_first, tree.map(_first_matrix, expected), "in the stack", tolerance * 1e2
    )


def _as_stacks(shape_of_matrix: Mapping[str, tuple[int, int]], values: PyTree) -> dict[str, Tensor]:
    """Return the leaves of a tree that are stacks of matrices, by name, in the shape (number, rows, columns).

    Empty leaves are left out. A leaf that is no stack of matrices of the declared shape raises `Breach`.

    >>> stacks = _as_stacks(
    ...     {"qk": (2, 3), "empty": (2, 3)}, {"qk": torch.zeros(4, 3), "empty": torch.zeros(0, 3)}
    ... )
    >>> stacks["qk"].shape, len(stacks)
    (torch.Size([2, 2, 3]), 1)
    """
    leaf_of = dict(tree.named_leaves(values))
    stacks: dict[str, Tensor] = {}
    for name, (rows, columns) in shape_of_matrix.items():
        leaf = leaf_of[name]
        if not leaf.numel():
            continue
        if leaf.numel() % (rows * columns):  # these elements do not fill a whole number of matrices
            raise Breach(
                f"{name!r}",
                f"of shape {tuple(leaf.shape)} is not a stack of matrices of ({rows}, {columns})",
            )
        stacks[name] = leaf.reshape(-1, rows, columns)
    return stacks


def _first_matrix(stack: Tensor) -> Tensor:
    return stack[:1]


def _stacked(example: Example) -> Example:
    """Return an example in which each leaf consists of three different matrices.

    A leaf of shape (4, 5) becomes (12, 5), joined along the rows. One of shape (2, 4, 5) becomes (6, 4, 5). The
    matrices differ, so a transform that mixes them returns other updates for the stack than for one matrix.
    """

    def three_matrices(leaf: Tensor) -> Tensor:
        """Return a matrix, a larger one and a reversed one, joined along the rows or the dim that counts matrices."""
        matrix = as_matrix(leaf)
        # Two other matrices with the elements of this one: moved along the row and larger, and in the opposite order.
        large = 5.0 * matrix.roll(1, -1) - 0.5
        reversed_order = matrix.flip(-1) + 0.25
        dim = 0  # the rows of a matrix
        if matrix.ndim > 2:  # of a batch, the dim that counts its matrices
            dim = -3
        return torch.cat([matrix, large, reversed_order], dim=dim)

    return example.map(three_matrices)


def _is_no_wrapper(tx: Transform) -> str | None:
    """Return why a transform is no wrapper that declares its own locality; None if it is one."""
    if tx.declaration.combinator.own_locality is None:
        return "it declares no own_locality"
    if not tx.children:
        return "it calls no transform"
    return None


@law(on=precise, unless=_is_no_wrapper, share=0.2)
def own_work_is_of_its_own_locality(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a wrapper (a transform that calls others) reads no more of the tree itself than it declares.

    For example, `accumulate` declares the own locality ELEMENT: its sum of gradients is elementwise, whatever the inner
    transform reads. The law puts an elementwise transform in place of each inner one. Whatever is read beyond an
    element is then read by the wrapper itself.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> own_work_is_of_its_own_locality(
    ...     mfx.accumulate(mfx.clip_by_global_norm(1.0), 2), *Example.of({"w": (2, 3)})
    ... )
    """
    # Choices by names and shapes, such as which leaves `masked` passes on.
    resolved = tx.resolve(on_meta(params))
    elementwise = _multiply_known_leaves(tuple(tree.names(params)))
    wrapper_of_elementwise = resolved.with_children([elementwise] * len(resolved.children))
    own_locality = tx.declaration.combinator.own_locality
    if own_locality is Locality.ELEMENT:
        check_elements(wrapper_of_elementwise, params, steps)
    elif own_locality is Locality.TREE and sums_over_leaves(tx):
        check_sums(wrapper_of_elementwise, params, steps)
    else:  # it may read all leaves, so only the names that it passes on are checked, by `_multiply_known_leaves`
        history(wrapper_of_elementwise, params, steps)


@transform(locality=Locality.ELEMENT)
def _multiply_known_leaves(names: tuple[str, ...]) -> Any:
    """Multiply updates by -0.5, and raise `Breach` (a failed law) for a leaf that has none of the given names.

    `own_work_is_of_its_own_locality` puts it in place of each transform that a wrapper calls. If the wrapper has the
    leaves ``names``, such as ``("w", "b")``, then a call with a leaf "c" is a mistake of the wrapper. Any elementwise
    function would do; this one changes sizes and signs.
    """

    def init(params: PyTree) -> EmptyState:
        _require_names("parameters", params, names)
        return EmptyState()

    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING
    ):
        _require_names("updates", updates, names)
        return scaled(updates, -0.5), state

    return init, update


def _require_names(what: str, values: PyTree, names: tuple[str, ...]) -> None:
    """Raise `Breach` (a failed law) if a leaf, which a wrapper passes on, has none of the names of its own leaves."""
    for name in tree.names(values):
        if name not in names:
            text = "passed to the inner transform, but the wrapper has no leaf of this name"
            raise Breach(f"{what} {name!r}", text)
