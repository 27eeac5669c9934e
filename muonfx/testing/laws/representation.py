"""Laws of representation: equal values give equal results, however the tensors that hold them are stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from muonfx import tree
from muonfx.core import Transform
from muonfx.testing.examples import (
    LAYOUTS,
    Example,
    accepts_names,
    copied_tree,
    history,
    laid_out,
    updates_of,
)
from muonfx.testing.law import law
from muonfx.testing.laws.purity import names_by_storage
from muonfx.testing.violation import (
    TOLERANCES,
    Breach,
    require_close,
    require_same,
    tolerance_of,
    widened,
)
from muonfx.tree import PyTree


def _contiguous(example: Example) -> Example:
    return example.contiguous().shortened()


def _with_reversed_strides(leaf: Tensor) -> Tensor:
    """Return a tensor with the same values and shape whose first dim is the innermost in memory.

    >>> _with_reversed_strides(torch.zeros(2, 3, 4)).stride(), torch.zeros(2, 3, 4).stride()
    ((1, 2, 6), (12, 4, 1))
    """
    # The first permute reverses the dims, `contiguous` stores them so, and the second permute restores the shape.
    order = list(reversed(range(leaf.ndim)))
    return leaf.permute(order).contiguous().permute(order)


STORED: dict[str, Callable[[Tensor], Tensor]] = {
    **{layout: lambda leaf, layout=layout: laid_out(leaf, layout) for layout in LAYOUTS[1:]},
    "reversed": _with_reversed_strides,
}
"""Functions that store the values of a contiguous tensor in another way, by name."""


def _mapped(function: Callable[[Tensor], Tensor], values: PyTree) -> PyTree:
    """Apply a function to the tensors of a tree, apart from eight-bit codes, on which torch has no arithmetic."""

    def apply(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype.itemsize == 1:  # None, a number, or codes
            return leaf
        return function(leaf)

    return tree.map(apply, values)


@law(on=_contiguous, share=0.15)
def strides_change_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that gradients, parameters or states with other strides, gaps or an offset in memory change no result.

    Sums may be taken in another order, so results are compared with a tolerance.

    >>> import muonfx as mfx
    >>> strides_change_nothing(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    expected = history(tx, params, steps)
    tolerance = tolerance_of(tx, expected, params)
    # The name of a layout in memory, and a function that copies a tensor into it.
    for how, store in STORED.items():
        histories = {
            "parameters are": history(tx, _mapped(store, params), steps),
            "gradients are": history(tx, params, _mapped(store, steps)),
            "the state is": history(tx, params, steps, change_state=partial(_mapped, store)),
        }
        for which, results in histories.items():  # as in "gradients are stored transposed"
            what = f"if {which} stored {how}, (updates, state) by step"
            require_close(what, results, expected, "contiguous", tolerance)
    # Strides of zero: one element in memory is all elements of the tensor, as in the gradient of a sum.
    expanded_steps = tree.map(_first_repeated, steps)
    results = history(tx, params, expanded_steps)
    expected = history(tx, params, _mapped(torch.Tensor.contiguous, expanded_steps))
    require_close(
        "if gradients are expanded, (updates, state) by step",
        results,
        expected,
        "contiguous",
        tolerance,
    )


def _first_repeated(leaf: Tensor) -> Tensor:
    """Return the first element of a tensor, expanded to its shape with strides of zero."""
    if not leaf.numel():
        return leaf
    return leaf.reshape(-1)[0].expand(leaf.shape)


@law(on=lambda example: example.dense().shortened(), share=0.15)
def requires_grad_changes_no_value(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that updates have the same values if parameters are ``nn.Parameter``, or if gradients require grad.

    Such parameters also have a ``.grad``, as in an optimizer, which no transform may read.

    >>> import muonfx as mfx
    >>> requires_grad_changes_no_value(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    # First parameters that require grad, with the usual gradients.
    expected = updates_of(tx, params, steps)
    tolerance = tolerance_of(tx, expected, params)
    parameters = tree.map(_parameter_with_gradient, params)
    results = updates_of(tx, parameters, steps)
    require_close(
        "updates if the parameters are nn.Parameter",
        results,
        expected,
        "of detached tensors",
        tolerance,
    )
    # Then check gradients that require grad, in float64.
    _check_gradients_that_require_grad(widened(tx), *Example(params, steps).smooth())


def _parameter_with_gradient(leaf: Tensor) -> nn.Parameter:
    """Return a parameter with the values of a tensor, and a gradient of ones."""
    parameter = nn.Parameter(leaf.clone())
    parameter.grad = torch.ones_like(parameter)
    return parameter


def _check_gradients_that_require_grad(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) unless updates of gradients that require grad have the usual values.

    ``tx``, ``params`` and ``steps`` are in float64, the widest dtype. In a narrow dtype, a transform may compute in a
    wider one if derivatives are needed, and the values would differ.
    """
    expected = updates_of(tx, params, steps)
    tolerance = max(tolerance_of(tx, expected), TOLERANCES[torch.float32])
    differentiable = tree.map(lambda leaf: leaf.clone().requires_grad_(), steps)
    results = updates_of(tx, params, differentiable)
    require_close(
        "updates if the gradients require grad", results, expected, "of detached tensors", tolerance
    )


@law(on=Example.shortened, share=0.1)
def one_tensor_may_be_two_leaves(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that two leaves that are one tensor have the same results as two leaves with equal values.

    Tied weights are such leaves. If the gradients are donated, so that they may be overwritten, the update of one leaf
    must not overwrite the gradient of the other.

    >>> import muonfx as mfx
    >>> one_tensor_may_be_two_leaves(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    # Each parameter twice, as "a.w" and "z.w": once as two tensors with equal values, once as one tensor.
    example = Example(params, steps)
    of_copies = example.map_trees(
        lambda values: {"a": copied_tree(values), "z": copied_tree(values)}
    )
    of_one_tensor = example.map_trees(lambda values: {"a": values, "z": values})
    if not accepts_names(tx, of_copies.params):
        return
    expected = history(tx, *of_copies)
    results = history(tx, *of_one_tensor)
    require_same("(updates, state) of leaves that are one tensor", results, expected, "of copies")
    # Repeat this with donated gradients, each of which is one tensor for two leaves.
    tolerance = tolerance_of(tx, expected, params)
    state = copied_tree(tx.init(of_copies.params))
    for step, grads in enumerate(steps):
        donated = copied_tree(grads)
        results = tx.update({"a": donated, "z": donated}, state, of_one_tensor.params, donate=True)
        what = f"step {step}, donated (updates, state) of leaves that are one tensor"
        require_close(what, results, expected[step], "of copies", tolerance)
        _, state = results


@law(share=0.3)
def leaves_of_the_state_share_no_storage(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that no two tensors of a state share storage: writing to one, as a donated step does, would change both.

    >>> import muonfx as mfx
    >>> leaves_of_the_state_share_no_storage(
    ...     mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    _require_own_storages("state from init", tx.init(params))
    for step, (_, state) in enumerate(history(tx, params, steps)):
        _require_own_storages(f"step {step}, new state", state)


def _require_own_storages(what: str, state: PyTree) -> None:
    """Raise `Breach` (a failed law) if two tensors of a state share storage."""
    for names in names_by_storage(state).values():
        if len(names) > 1:
            raise Breach(
                f"{what} {names[0]!r}",
                f"shares its storage with {names[1]!r}; writing to one changes both",
            )
