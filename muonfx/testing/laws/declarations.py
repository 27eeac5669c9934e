"""Laws of declarations: a transform has the properties that its factory declares and the sharding layer uses.

The laws of locality are in their own file. These laws check `reads_params`, ``own_locality``, ``resolve``,
``rounds_to`` and ``on_stacks``, and that neither the order of a dict nor the size of a leaf changes a result.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, EmptyState, Locality, Transform, transform
from muonfx.core.contract import NOTHING
from muonfx.program.lower import resolve_within
from muonfx.testing.examples import Example, history, updates_of
from muonfx.testing.law import law
from muonfx.testing.laws.locality import (
    check_elements,
    check_sums,
    enlarged,
    flattened,
    precise,
    wider_than,
)
from muonfx.testing.violation import Breach, require_close, require_same, tolerance_of
from muonfx.tree import PyTree

__all__ = [
    "element_transforms_see_no_shape",
    "large_leaves_are_as_small_ones",
    "order_of_dicts_means_nothing",
    "own_work_is_of_its_own_locality",
    "params_are_not_read_where_declared_so",
    "resolving_changes_nothing",
    "rounding_first_changes_nothing",
    "stacks_are_as_their_matrices",
]


def _declared(tx: Transform, what: str) -> Any:
    return getattr(tx.declaration, what)


def _without(what: str) -> Any:
    return lambda tx: None if _declared(tx, what) is not None else f"it declares no {what}"


@law(unless=lambda tx: "it declares that it reads the parameters" if tx.reads_params else None, share=0.3)
def params_are_not_read_where_declared_so(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Neither `init` nor ``update`` depends on the values of the parameters if ``reads_params`` is false.

    A sharded run gives such a transform no parameters at an update, and none of their values at `init`.

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


@law()
def order_of_dicts_means_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Trees that differ in the order of insertion into their dicts only have the same updates, by name.

    Checkpoints, ranks and ``torch.compile`` do not keep that order.

    >>> import muonfx as mfx
    >>> order_of_dicts_means_nothing(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3), "b": (3,)}))
    """
    _check_order(tx, params, steps)
    twice = {"z": params, "a": params}  # a dict of two in any case
    try:
        tx.init(twice)
    except (KeyError, TypeError, ValueError):  # it accepts certain names only
        return
    _check_order(tx, twice, [{"z": grads, "a": grads} for grads in steps])


def _check_order(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    found = history(tx, _reversed(params), [_reversed(grads) for grads in steps])
    expected = history(tx, params, steps)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        by_name = [dict(zip(tree.names(values), tree.leaves(values), strict=True)) for values in (one, other)]
        tolerance = tolerance_of(tx, expected, params)  # sums over leaves may be taken in another order
        what = f"step {step}, with dicts in the other order, (updates, state)"
        require_close(what, by_name[0], by_name[1], "in this order", tolerance)


def _reversed(values: PyTree) -> PyTree:
    if type(values) is dict:
        return {key: _reversed(item) for key, item in reversed(values.items())}
    if isinstance(values, tuple | list):
        items = [_reversed(item) for item in values]
        return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)
    return values


@law(on=precise, unless=wider_than(Locality.ELEMENT), share=0.2)
def element_transforms_see_no_shape(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """A transform declared ELEMENT does on leaves made flat what it does on leaves of their own shapes.

    A flat partition (ZeRO) cuts leaves into intervals. What names and shapes decide is decided before, by ``resolve``.

    >>> import muonfx as mfx
    >>> element_transforms_see_no_shape(mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    resolved = resolve_within(tx, _on_meta(params))
    whole = updates_of(tx, params, steps)
    found = updates_of(resolved, *flattened(Example(params, steps)))
    expected = [tree.map(lambda leaf: leaf.reshape(-1), updates) for updates in whole]
    tolerance = tolerance_of(tx, whole)
    require_close("updates of leaves made flat", found, expected, "the whole's, made flat", tolerance)


@law(on=lambda example: enlarged(precise(example)), share=0.1)
def large_leaves_are_as_small_ones(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Declarations hold for leaves of some thousands of elements too, and updates still look like gradients.

    >>> import muonfx as mfx
    >>> large_leaves_are_as_small_ones(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    if tx.locality is Locality.ELEMENT:
        check_elements(tx, params, steps)
    elif tx.locality in (Locality.MATRIX, Locality.LEAF):
        _check_leaves_apart(tx, params, steps)
    for grads, (updates, _) in zip(steps, history(tx, params, steps), strict=True):
        for name, grad, update in zip(tree.names(grads), tree.leaves(grads), tree.leaves(updates), strict=True):
            if isinstance(update, Tensor) and update.shape != grad.shape:
                raise Breach(f"updates {name!r}", f"has shape {tuple(update.shape)}, expected {tuple(grad.shape)}")


def _check_leaves_apart(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that each leaf alone, with None for all others as on an owner rank, gets the same updates as among all."""
    whole = history(tx, params, steps)
    tolerance = tolerance_of(tx, whole)
    treedef = tree.flatten(params)[1]
    for place, name in enumerate(tree.names(params)):

        def alone(values: PyTree, place: int = place) -> PyTree:
            return tree.unflatten(treedef, [x if at == place else None for at, x in enumerate(tree.leaves(values))])

        apart = history(tx, alone(params), [alone(grads) for grads in steps])
        for step, ((found, _), (expected, _)) in enumerate(zip(apart, whole, strict=True)):
            one, other = ({name: tree.leaves(values)[place]} for values in (found, expected))
            require_close(
                f"step {step}, where other leaves are None, the update of", one, other, "among all", tolerance
            )


@law(on=precise, unless=_without("resolve"), share=0.3)
def resolving_changes_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """`Transform.resolve` takes names and shapes only, and gives a transform of the same updates and states.

    >>> import muonfx as mfx
    >>> resolving_changes_nothing(mfx.scale_by_shape(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    resolved = tx.resolve(_on_meta(params))
    if resolved.resolve(_on_meta(params)) != resolved:
        raise Breach(None, f"resolved once it is {resolved!r}, twice another")
    expected = history(tx, params, steps)
    tolerance = tolerance_of(tx, expected)
    require_close("(updates, state) once resolved", history(resolved, params, steps), expected, "before", tolerance)


@law(on=lambda example: example.dense(), unless=_without("rounds_to"), share=0.5)
def rounding_first_changes_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Updates rounded beforehand to the dtype that ``rounds_to`` says give the same bits, and no more digits come out.

    In that dtype they travel between ranks.

    >>> import muonfx as mfx
    >>> rounding_first_changes_nothing(mfx.orthogonalize(dtype=torch.bfloat16), *mfx.testing.Example.of({"w": (2, 3)}))
    """

    def rounded(leaf: Tensor) -> Tensor:
        narrow = _declared(tx, "rounds_to")(tx, leaf.dtype, leaf.device)
        return leaf.to(narrow).to(leaf.dtype) if narrow.itemsize < leaf.dtype.itemsize else leaf

    before = after = tx.init(params)
    for step, grads in enumerate(steps):
        expected, before = tx.run(grads, before, params)
        found, after = tx.run(tree.map(rounded, grads), after, params)
        require_same(f"step {step}, updates of gradients rounded first", found, expected, "of the gradients")
        again = tree.map(rounded, expected)
        require_same(f"step {step}, updates, rounded", again, expected, "as they are: they have no more digits")


@law(on=lambda example: _stacked(precise(example)), share=0.3)
def stacks_are_as_their_matrices(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Leaves that `Transform.on_stacks` says are stacks of matrices have the same updates as such, and one by one.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> tx = mfx.orthogonalize(dtype=torch.float64, view=mfx.MatrixView(blocks=2))
    >>> stacks_are_as_their_matrices(tx, *Example.of({"w": (4, 3)}))
    """
    named = [dict(zip(tree.names(values), tree.leaves(values), strict=True)) for values in (params, *steps)]
    shapes = {name: tuple(leaf.shape) for name, leaf in named[0].items()}
    stacked, matrices = tx.on_stacks(shapes)
    matrices = {name: matrix for name, matrix in matrices.items() if prod(shapes[name])}
    if not matrices:
        return
    for name, (rows, columns) in matrices.items():
        if prod(shapes[name]) % (rows * columns):
            raise Breach(f"{name!r}", f"of shape {shapes[name]} is no stack of matrices of ({rows}, {columns})")
    named = [{name: leaf for name, leaf in values.items() if name in matrices} for values in named]
    whole = updates_of(tx, named[0], named[1:])
    tolerance = tolerance_of(tx, whole)

    def as_stack(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: leaf.reshape(-1, *matrices[name]) for name, leaf in values.items()}

    views = [as_stack(values) for values in named]
    wanted = [as_stack(updates) for updates in whole]
    found = _updates(stacked, views)
    require_close("updates of leaves as stacks", found, wanted, "of the leaves", tolerance)
    first = [{name: leaf[:1] for name, leaf in values.items()} for values in views]
    alone = _updates(stacked, first)
    expected = [{name: leaf[:1] for name, leaf in updates.items()} for updates in wanted]
    require_close("updates of the first matrix of each stack alone", alone, expected, "in the stack", tolerance * 1e2)


def _updates(tx: Transform, values: list[PyTree]) -> list[PyTree]:
    """Return the updates of each step, without the warnings of `init`, which are for users."""
    params, *steps = values
    state = tx.functions.init(params)
    found: list[PyTree] = []
    for grads in steps:
        updates, state = tx.run(grads, state, params)
        found.append(updates)
    return found


def _stacked(example: Example) -> Example:
    """Concatenate three variants of every matrix along its rows or batch, so that a leaf may be a stack."""

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
    """A wrapper's ``own_locality`` holds once those that it calls are replaced, and they get the leaves it was given.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> own_work_is_of_its_own_locality(mfx.accumulate(mfx.clip_by_global_norm(1.0), 2), *Example.of({"w": (2, 3)}))
    """
    own = tx.declaration.combinator.own_locality
    resolved = tx.resolve(_on_meta(params))
    shapes = dict(zip(tree.names(params), (tuple(p.shape) for p in tree.leaves(params)), strict=True))
    plain = resolved.with_children(lambda part: _stand_in(_Seen(shapes)))
    if own is Locality.ELEMENT:
        check_elements(plain, params, steps)
    elif own is Locality.TREE and "sum_over_leaves" in tx.extras.named:
        check_sums(plain, params, steps)
    else:
        history(plain, params, steps)


class _Seen:
    """The names of a wrapper's leaves, to check the leaves that it passes to the transforms within."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.names = set(shapes)

    def require(self, what: str, values: PyTree) -> None:
        """Raise `Breach` if a tree has a leaf of another name."""
        for name in tree.names(values):
            if name not in self.names:
                raise Breach(f"{what} {name!r}", "handed to the transform within, but no leaf of that name was given")


@transform(locality=Locality.ELEMENT)
def _stand_in(seen: Any) -> Any:
    """Replace a transform that a wrapper calls by an elementwise transform."""

    def init(params: PyTree) -> EmptyState:
        seen.require("parameters", params)
        return EmptyState()

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        seen.require("updates", updates)
        return tree.map(lambda u: u * -0.5, updates), state

    return init, update


def _on_meta(params: PyTree) -> PyTree:
    return tree.map(lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"), params)
