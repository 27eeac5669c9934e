"""Laws of declarations: a transform has the properties that its factory declares, and that sharded runs rely on.

These laws check the options ``reads_params``, ``combinator``, ``resolve``, ``rounds_to`` and ``on_stacks`` of
`muonfx.transform`, and that neither the order of a dict nor the size of a leaf changes a result. The laws of the option
``locality`` are in `muonfx.testing.laws.locality`.
"""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, EmptyState, Locality, Transform, transform
from muonfx.core.donation import NOTHING
from muonfx.core.transform import stacked
from muonfx.core.visit import resolve_within
from muonfx.testing.examples import Example, accepts_names, history, on_meta, updates_of
from muonfx.testing.law import law
from muonfx.testing.laws.locality import (
    check_elements,
    check_leaves_alone,
    check_sums,
    enlarged,
    precise,
    wider_than,
)
from muonfx.testing.violation import Breach, require_close, require_same, tolerance_of
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
    others = tree.map(lambda p: (p * -3 + 1).contiguous(), params)
    state, elsewhere = tx.init(params), tx.init(others)
    require_same("state at init, for other values of the parameters", elsewhere, state, "for these")
    for step, grads in enumerate(steps):
        expected = tx.run(grads, state, params)
        for what, given in (("without parameters", None), ("with others", others)):
            found = tx.run(grads, state, given)
            require_same(f"step {step}, {what}, (updates, state)", found, expected, "with the parameters")
        state = expected[1]


@law(on=lambda example: example.shortened().clone(), share=0.1)
def order_of_dicts_means_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that the insertion order of dicts in the trees does not change the update of any leaf.

    The order may differ between gradients, parameters and state, so a transform must pair their leaves by name.
    Checkpoints, ranks and ``torch.compile`` do not keep this order.

    >>> import muonfx as mfx
    >>> order_of_dicts_means_nothing(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3), "b": (3,)}))
    """
    twice = {"z": params, "a": params}
    if accepts_names(tx, twice):  # so that at least one dict has two items
        params = twice
        steps = [{"z": grads, "a": grads} for grads in steps]
    expected = history(tx, params, steps)
    tolerance = tolerance_of(tx, expected, params)  # sums over leaves may be taken in another order
    # Whether the dicts of (gradients, parameters, state) are reversed.
    cases = {
        "all dicts": (True, True, True),
        "the gradients' dicts": (True, False, False),
        "the parameters' dicts": (False, True, False),
        "the state's dicts": (False, False, True),
    }
    for which, (of_grads, of_params, of_state) in cases.items():
        case_params = _reversed(params) if of_params else params
        state = tx.init(case_params)
        for step, grads in enumerate(steps):
            case_grads = _reversed(grads) if of_grads else grads
            case_state = _reversed(state) if of_state else state
            results = tx.update(case_grads, case_state, case_params)
            by_name = [dict(tree.named_leaves(values)) for values in (results, expected[step])]
            what = f"step {step}, with {which} in the other order, (updates, state)"
            require_close(what, by_name[0], by_name[1], "in this order", tolerance)
            state = results[1]


def _reversed(values: PyTree) -> PyTree:
    """Return a tree in which the items of all dicts are in reversed order; lists and tuples keep their order."""
    if type(values) is dict:
        return {key: _reversed(item) for key, item in reversed(values.items())}
    if isinstance(values, tuple | list):
        items = [_reversed(item) for item in values]
        if hasattr(values, "_fields"):
            return type(values)(*items)
        return type(values)(items)
    return values


@law(on=precise, unless=wider_than(Locality.ELEMENT), share=0.2)
def element_transforms_see_no_shape(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that an elementwise transform (locality ELEMENT) has the same updates if leaves are flattened.

    ZeRO splits flattened leaves into intervals. A choice that depends on the original shapes must be made before, by
    the option ``resolve`` of `muonfx.transform`.

    >>> import muonfx as mfx
    >>> element_transforms_see_no_shape(mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    resolved = resolve_within(tx, on_meta(params))
    whole = updates_of(tx, params, steps)
    found = updates_of(resolved, *Example(params, steps).map(torch.flatten))
    expected = [tree.map(torch.flatten, updates) for updates in whole]
    require_close("updates of flattened leaves", found, expected, "the whole's, flattened", tolerance_of(tx, whole))


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
        check_leaves_alone(tx, params, steps)
    # Each update has the shape of its gradient.
    for grads, (updates, _) in zip(steps, history(tx, params, steps), strict=True):
        for (name, grad), update in zip(tree.named_leaves(grads), tree.leaves(updates), strict=True):
            if isinstance(update, Tensor) and update.shape != grad.shape:
                raise Breach(f"updates {name!r}", f"has shape {tuple(update.shape)}, expected {tuple(grad.shape)}")


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


@law(on=lambda example: example.dense(), unless=_does_not_round, share=0.5)
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

    state = tx.init(params)
    state_of_rounded = state
    for step, grads in enumerate(steps):
        updates, state = tx.run(grads, state, params)
        updates_of_rounded, state_of_rounded = tx.run(tree.map(rounded, grads), state_of_rounded, params)
        what = f"step {step}, updates of gradients rounded first"
        require_same(what, updates_of_rounded, updates, "of the gradients")
        rounded_updates = tree.map(rounded, updates)
        require_same(
            f"step {step}, updates, rounded", rounded_updates, updates, "as they are: they have no more digits"
        )


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
    tx_of_stacks, matrices = stacked(tx, shapes)
    matrices = {name: matrix for name, matrix in matrices.items() if prod(shapes[name])}
    if not matrices:
        return
    for name, (rows, columns) in matrices.items():
        if prod(shapes[name]) % (rows * columns):
            raise Breach(f"{name!r}", f"of shape {shapes[name]} is not a stack of matrices of ({rows}, {columns})")

    def as_dict(values: PyTree) -> dict[str, Tensor]:
        return {name: leaf for name, leaf in tree.named_leaves(values) if name in matrices}

    params = as_dict(params)
    steps = [as_dict(grads) for grads in steps]
    whole = updates_of(tx, params, steps)
    tolerance = tolerance_of(tx, whole)

    def as_stack(values: dict[str, Tensor], size: int | None = None) -> dict[str, Tensor]:
        return {name: leaf.reshape(-1, *matrices[name])[:size] for name, leaf in values.items()}

    def compare(what: str, size: int | None, expected_is: str, tolerance: float) -> None:
        """Compare updates of stacks with those of whole leaves. ``size`` limits the stack; None is the whole."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the names of a view may match none of these leaves
            results = updates_of(tx_of_stacks, as_stack(params, size), [as_stack(grads, size) for grads in steps])
        expected = [as_stack(updates, size) for updates in whole]
        require_close(what, results, expected, expected_is, tolerance)

    compare("updates of leaves as stacks", None, "of the leaves", tolerance)
    compare("updates of the first matrix of each stack alone", 1, "in the stack", tolerance * 1e2)


def _stacked(example: Example) -> Example:
    """Return an example in which each leaf consists of three different matrices, joined along rows or a batch dim."""

    def more(leaf: Tensor) -> Tensor:
        if leaf.ndim < 2:
            leaf = leaf.reshape(1, -1)
        parts = [leaf, 5.0 * leaf.roll(1, -1) - 0.5, leaf.flip(-1) + 0.25]
        return torch.cat(parts, dim=0 if leaf.ndim == 2 else -3)

    return example.map(more)


def _calls_none(tx: Transform) -> str | None:
    if tx.declaration.combinator.own_locality is None:
        return "it declares no own_locality"
    return None if any(isinstance(part, Transform) for part in tx.parts) else "it calls no transform"


@law(on=precise, unless=_calls_none, share=0.2)
def own_work_is_of_its_own_locality(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a wrapper of elementwise transforms reads no more than its declared ``own_locality``.

    A wrapper is a transform that calls other transforms. It must call them with leaves that it has received.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> own_work_is_of_its_own_locality(mfx.accumulate(mfx.clip_by_global_norm(1.0), 2), *Example.of({"w": (2, 3)}))
    """
    own = tx.declaration.combinator.own_locality
    plain = tx.resolve(on_meta(params)).with_children(lambda part: _stand_in(tuple(tree.names(params))))
    if own is Locality.ELEMENT:
        check_elements(plain, params, steps)
    elif own is Locality.TREE and "sum_over_leaves" in tx.extras.named:
        check_sums(plain, params, steps)
    else:
        history(plain, params, steps)


@transform(locality=Locality.ELEMENT)
def _stand_in(names: tuple[str, ...]) -> Any:
    """The transform that the law wraps: it multiplies updates by a number and checks the names of the leaves."""

    def check(what: str, values: PyTree) -> None:
        for name in tree.names(values):
            if name not in names:
                raise Breach(
                    f"{what} {name!r}", "passed to the inner transform, but the wrapper has no leaf of this name"
                )

    def init(params: PyTree) -> EmptyState:
        check("parameters", params)
        return EmptyState()

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        check("updates", updates)
        return tree.map(lambda u: u * -0.5, updates), state

    return init, update
