"""Laws of batching: leaves that are computed together have the results that they have alone.

This holds for ``torch.func.vmap`` over gradients and states, or over the transform itself, and for leaves of one shape.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from muonfx import tree
from muonfx.compact import QuantizedDtype
from muonfx.core import Locality, Transform
from muonfx.core.hyperparams import stack
from muonfx.testing.examples import accepts_names, history, only_leaf, updates_of
from muonfx.testing.law import law
from muonfx.testing.laws.locality import wider_than
from muonfx.testing.violation import require_close, require_same, tolerance_of, values_within
from muonfx.tree import PyTree

FACTORS = (1.0, -0.5, 3.0)


@law(on=lambda example: example.precise().prolonged(3), share=0.15)
def vmap_over_gradients_equals_a_loop(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``torch.func.vmap`` of `update` over a batch of gradients and states equals a loop.

    >>> import muonfx as mfx
    >>> vmap_over_gradients_equals_a_loop(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    runs = [_multiplied(steps, factor) for factor in FACTORS]
    histories = [history(tx, params, run) for run in runs]
    state = _stacked([tx.init(params)] * len(FACTORS))
    update_batch = torch.func.vmap(lambda grads, state: tx.update(grads, state, params))
    for step in range(len(steps)):
        updates = _stacked([run[step] for run in runs])
        has_tensors = any(True for _ in tree.tensors((updates, state)))
        if has_tensors:  # vmap requires a tensor to batch
            updates, state = update_batch(updates, state)
        expected = _stacked([results[step] for results in histories])
        tolerance = tolerance_of(tx, *histories[0][step])
        require_close(f"step {step}, vmapped (updates, state)", (updates, state), expected, "in a loop", tolerance)


def _multiplied(steps: list[PyTree], factor: float) -> list[PyTree]:
    """Return the gradients of all steps, multiplied by a factor."""
    return [tree.map(lambda grad: grad * factor, grads) for grads in steps]


def _stacked(trees: list[PyTree]) -> PyTree:
    """Return a tree with the corresponding tensors of several trees stacked along a new first dim."""

    def stacked(*leaves: Any) -> Any:
        if isinstance(leaves[0], Tensor):
            return torch.stack(leaves)
        return leaves[0]

    return tree.map(stacked, *trees)


def _has_no_numbers(tx: Transform) -> str | None:
    return None if tree.leaves(tx) else "it has no numeric arguments"


@law(on=lambda example: example.precise().prolonged(3), unless=_has_no_numbers, share=0.15)
def vmap_over_the_transform_equals_a_loop(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``torch.func.vmap`` over transforms with different numeric arguments equals a loop over them.

    >>> import muonfx as mfx
    >>> vmap_over_the_transform_equals_a_loop(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    variants = [tree.map(lambda number, factor=factor: number * factor, tx) for factor in (1.0, 0.9, 0.5)]

    def final(tx: Transform) -> PyTree:
        updates, state = history(tx, params, steps)[-1]
        # Tensors only: vmap cannot return None. It repeats tensors that are equal for the whole batch.
        return [leaf for leaf in torch_pytree.tree_leaves((updates, state)) if isinstance(leaf, Tensor)]

    expected = [final(variant) for variant in variants]
    if not expected[0]:
        return
    results = torch.func.vmap(final)(stack(variants))
    what = "last step, vmapped [updates, state]"
    require_close(what, results, _stacked(expected), "in a loop", tolerance_of(tx, expected))


def _rounds_at_random_or_reads_more(tx: Transform) -> str | None:
    for value in values_within(tx):
        if isinstance(value, QuantizedDtype) and value.resolved.seed is not None:
            return "its state is rounded at random, by the place of the leaf"
    return wider_than(Locality.LEAF)(tx)


@law(on=lambda example: example.dense().shortened(), unless=_rounds_at_random_or_reads_more, share=0.1)
def a_leaf_has_the_same_bits_in_any_company(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a leaf has the same bits alone as among others of its shape, at any place of the tree.

    Layouts put different matrices on one rank, so a difference in the last bit would depend on the layout.

    >>> import muonfx as mfx
    >>> a_leaf_has_the_same_bits_in_any_company(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    together = updates_of(tx, params, steps)
    for number, name in enumerate(tree.names(params)):
        results = updates_of(tx, only_leaf(number, params), [only_leaf(number, grads) for grads in steps])
        expected = [only_leaf(number, updates) for updates in together]
        require_same(f"updates of {name!r}, without the other leaves,", results, expected, "among them")

    if not accepts_names(tx, _with_others(params, 2)):
        return
    for copies in (2, 3):
        results = updates_of(tx, _with_others(params, copies), [_with_others(grads, copies) for grads in steps])
        first = [updates["copy0"] for updates in results]
        require_same(f"updates beside {copies - 1} others of each shape", first, together, "without them")


def _with_others(values: PyTree, copies: int) -> PyTree:
    """Return ``{"copy0": values, "copy1": ...}``, where later trees have leaves of the same shapes and other values."""
    trees: dict[str, PyTree] = {}
    for number in range(copies):
        trees[f"copy{number}"] = tree.map(lambda leaf, by=number: leaf.roll(by), values)
    return trees
