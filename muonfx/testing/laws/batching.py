"""Laws of batching: leaves that are computed together have the results that they have alone.

This holds for ``torch.func.vmap`` over gradients and states, or over the transform itself, and for leaves of one shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonfx import tree
from muonfx.compact import QuantizedDtype
from muonfx.core import Locality, Transform
from muonfx.core.hyperparams import stack
from muonfx.testing.examples import Example, accepts_names, history, only_leaf, scaled, updates_of
from muonfx.testing.law import law
from muonfx.testing.laws.locality import wider_than
from muonfx.testing.violation import (
    Breach,
    require_close,
    require_same,
    tolerance_of,
    values_within,
)
from muonfx.tree import PyTree


@law(on=lambda example: example.precise().prolonged(3), share=0.15)
def vmap_over_gradients_equals_a_loop(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``torch.func.vmap`` of `update` over a batch of gradients and states equals a loop.

    >>> import muonfx as mfx
    >>> vmap_over_gradients_equals_a_loop(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    steps_of_runs = [scaled(steps, 1.0), scaled(steps, -0.5), scaled(steps, 3.0)]
    expected = _stacked([history(tx, params, steps_of_run) for steps_of_run in steps_of_runs])
    initial_state = tx.init(params)
    if not list(tree.tensors((params, initial_state))):
        return  # vmap requires a tensor
    # `update` is written for one run; vmap lets it compute all three at once. The parameters have no batch dim.
    update_batch = torch.func.vmap(lambda grads, state: tx.update(grads, state, params))
    state = _stacked([initial_state] * 3)
    for step, grads in enumerate(_stacked(steps_of_runs)):
        results = update_batch(grads, state)
        tolerance = tolerance_of(tx, expected[step])
        require_close(
            f"step {step}, vmapped (updates, state)",
            results,
            expected[step],
            "in a loop",
            tolerance,
        )
        _, state = results


def _stacked(trees: list[PyTree]) -> PyTree:
    """Return a tree with the corresponding tensors of several trees stacked along a new first dim.

    The trees may be lists with a tree for each step.

    >>> _stacked([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])}])
    {'w': tensor([[1., 2.],
            [3., 4.]])}
    """
    return tree.map(lambda *leaves: torch.stack(leaves), *trees)


def _has_no_numbers(tx: Transform) -> str | None:
    return None if tree.leaves(tx) else "it has no numeric arguments"


def _precise_and_in_float32(example: Example) -> list[Example]:
    """Return the example in float64, and in float32: under vmap numbers are float64, which some functions refuse."""
    precise = example.precise()
    return [precise.prolonged(3), precise.map(torch.Tensor.float).shortened(1)]


@law(on=_precise_and_in_float32, unless=_has_no_numbers, share=0.15)
def vmap_over_the_transform_equals_a_loop(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that ``torch.func.vmap`` over transforms with different numeric arguments equals a loop over them.

    >>> import muonfx as mfx
    >>> vmap_over_the_transform_equals_a_loop(
    ...     mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    # All numeric arguments are multiplied.
    variants = [scaled(tx, 1.0), scaled(tx, 0.9), scaled(tx, 0.5)]

    def last_step(tx: Transform) -> list[Tensor]:
        """Return the tensors of the last updates and the last state, since vmap cannot return None."""
        return list(tree.tensors(history(tx, params, steps)[-1]))

    expected = _stacked([last_step(variant) for variant in variants])
    if not expected:  # there are no tensors, as in an empty tree
        return
    # `stack` returns one transform whose numbers are tensors of three elements, over which vmap runs.
    results = torch.func.vmap(last_step)(stack(variants))
    _require_dtypes(results, expected)
    require_close(
        "last step, vmapped [updates, state]",
        results,
        expected,
        "in a loop",
        tolerance_of(tx, expected),
    )


def _require_dtypes(results: list[Tensor], expected: list[Tensor]) -> None:
    """Raise `Breach` (a failed law) if a leaf without dims has become float64, which its equal in a loop is not.

    Under vmap a number of the transform is a float64 tensor without dims. Torch gives the product of it and a float32
    leaf the dtype of the leaf, except for a leaf without dims.
    """
    for result, expected_result in zip(results, expected, strict=True):
        is_leaf_without_dims = expected_result.ndim == 1  # its values of the runs are stacked
        if (
            is_leaf_without_dims
            and result.dtype == torch.float64
            and expected_result.dtype != torch.float64
        ):
            raise Breach(
                "a leaf without dims",
                f"found {result.dtype} under vmap, expected as in a loop {expected_result.dtype}: a number of the "
                "transform is a float64 tensor here, which makes the result float64; write "
                "(leaf * number).to(leaf.dtype), or use the functions of muonfx.tree.elementwise",
            )


@law(on=lambda example: example.dense().shortened(), unless=wider_than(Locality.LEAF), share=0.1)
def a_leaf_has_the_same_bits_in_any_company(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that a leaf has the same bits alone as among others of its shape, at any place of the tree.

    In a sharded run, the number of ranks determines which matrices are computed together, and must not change a bit. A
    state that is rounded at random depends on the place of its leaf, so the leaf is then computed alone at its place
    only.

    >>> import muonfx as mfx
    >>> a_leaf_has_the_same_bits_in_any_company(
    ...     mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    example = Example(params, steps)
    usual_updates = updates_of(tx, params, steps)
    for number, name in enumerate(tree.names(params)):
        # Trees in which all other leaves are None.
        alone = Example(only_leaf(number, params), [only_leaf(number, grads) for grads in steps])
        expected = [only_leaf(number, updates) for updates in usual_updates]
        what = f"updates of {name!r}, without the other leaves,"
        require_same(what, updates_of(tx, *alone), expected, "among them")
    if not _rounds_at_random(tx):
        for count in (1, 2):
            _check_among_others(count, tx, example, usual_updates)


def _check_among_others(
    count: int, tx: Transform, example: Example, usual_updates: list[PyTree]
) -> None:
    """Raise `Breach` (a failed law) if leaves have other updates before or after ``count`` others of their shapes.

    The tree of the example is put twice into a larger tree: first and last, with the other leaves between them.
    """
    params = _with_others(count, example.params)
    if not accepts_names(tx, params):  # the longer names, such as "copy0.w"
        return
    steps = [_with_others(count, grads) for grads in example.steps]
    updates_by_step = updates_of(tx, params, steps)
    updates_before = [updates["copy0"] for updates in updates_by_step]
    updates_after = [updates[f"copy{count + 1}"] for updates in updates_by_step]
    others = f"{count} others of each shape"
    require_same(f"updates before {others}", updates_before, usual_updates, "without them")
    require_same(f"updates after {others}", updates_after, usual_updates, "without them")


def _rounds_at_random(tx: Transform) -> bool:
    quantized_dtypes = [value for value in values_within(tx) if isinstance(value, QuantizedDtype)]
    return any(dtype.resolved.seed is not None for dtype in quantized_dtypes)


def _with_others(count: int, values: PyTree) -> PyTree:
    """Return a dict with a tree at its first and last place, and between them ``count`` trees with other values.

    These have leaves of the same shapes, each with its elements moved on by one more place.

    >>> _with_others(1, {"b": torch.tensor([1, 2, 3])})
    {'copy0': {'b': tensor([1, 2, 3])}, 'copy1': {'b': tensor([3, 1, 2])}, 'copy2': {'b': tensor([1, 2, 3])}}
    """
    # A copy has the strides of its leaf, on which the order of a sum may depend.
    trees: dict[str, PyTree] = {"copy0": values}
    for number in range(1, count + 1):
        trees[f"copy{number}"] = tree.map(lambda leaf, by=number: leaf.roll(by), values)
    trees[f"copy{count + 1}"] = tree.map(torch.clone, values)
    return trees
