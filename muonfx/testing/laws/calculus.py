"""Laws of calculus, in float64: derivatives by gradients, initial parameters and numbers, through several steps.

Transforms that take signs or clip are differentiable almost everywhere. Examples avoid zero, and other points without
a derivative have probability zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from muonfx import tree
from muonfx.core import Transform
from muonfx.testing.examples import Example, updates_of
from muonfx.testing.law import law, without_torchs_own_warnings
from muonfx.testing.laws.batching import _has_no_numbers
from muonfx.testing.violation import Breach, widened
from muonfx.tree import PyTree


def _state_is_narrow(tx: Transform) -> str | None:
    """Return why the derivatives of a transform are not checked, or None if they are.

    Derivatives are checked in float64. A state with fewer bits, such as int8 codes with float32 scales, is rounded at
    every step, and rounding has no derivative.

    >>> import muonfx as mfx
    >>> (
    ...     _state_is_narrow(mfx.momentum(dtype=mfx.int8())),
    ...     _state_is_narrow(mfx.momentum(dtype=torch.bfloat16)),
    ... )
    ('its state is torch.float32 for float64 parameters: rounding has no derivative', None)
    """
    params = {"w": torch.zeros(2, 2, dtype=torch.float64, device="meta")}
    try:
        # `widened` replaces bfloat16 and float32 by float64, but int8 stays
        state = widened(tx).init(params)
    except Exception:
        # The transform does not accept this tree; a real error is shown when the law is checked.
        return None
    for leaf in tree.tensors(state):
        is_count = leaf.ndim == 0  # such as the number of steps, which is not rounded
        if leaf.is_floating_point() and leaf.dtype != torch.float64 and not is_count:
            return f"its state is {leaf.dtype} for float64 parameters: rounding has no derivative"
    return None


def _as_vector(values: PyTree) -> Tensor:
    """Return one vector with the elements of all floating tensors in a tree, leaf after leaf.

    >>> _as_vector({"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3.0)})
    tensor([1., 2., 3.])
    """
    vectors = [leaf.reshape(-1) for leaf in tree.tensors(values) if leaf.is_floating_point()]
    if not vectors:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat(vectors)


def _as_tree(vector: Tensor, like: PyTree) -> PyTree:
    """Divide a vector into a tree of tensors with the structure and shapes of the tree ``like``; inverts `_as_vector`.

    >>> _as_tree(torch.tensor([1.0, 2.0, 3.0]), like={"a": torch.zeros(1, 2), "b": torch.zeros(())})
    {'a': tensor([[1., 2.]]), 'b': tensor(3.)}
    """
    leaves, treedef = tree.flatten(like)
    sizes = [leaf.numel() for leaf in leaves]
    for number, elements in enumerate(vector.split(sizes)):
        leaves[number] = elements.reshape(leaves[number].shape)
    return tree.unflatten(treedef, leaves)


def _numbers_as_tensors(tx: Transform) -> list[Tensor]:
    """Return the numeric arguments of a transform, such as its decay, as float64 tensors."""
    return [torch.as_tensor(number, dtype=torch.float64) for number in tree.leaves(tx)]


def _no_changes(tx: Transform) -> Tensor:
    """Return a vector of zeros, one for each element of the numeric arguments."""
    return torch.zeros_like(_as_vector(_numbers_as_tensors(tx)))


def _with_changed_numbers(tx: Transform, changes: Tensor) -> Transform:
    """Return a transform with tensors as its numeric arguments, each changed in units of its own size.

    Changes of 0.1 replace a learning rate of 2.0 by 2.2 and an eps of 1e-8 by 1.1e-8. So finite differences, which
    make all changes of one size, take a small step for every number.

    >>> import muonfx as mfx
    >>> _with_changed_numbers(mfx.scale(2.0), torch.tensor([0.1], dtype=torch.float64)).arguments[
    ...     "factor"
    ... ]
    tensor(2.2000, dtype=torch.float64)
    """
    numbers = _numbers_as_tensors(tx)
    vector = _as_vector(numbers)
    units = torch.where(vector == 0, 1e-3, vector.abs())  # the number 0 has no size of its own
    # A transform is a tree whose leaves are its numbers, so other numbers give another transform.
    _, treedef = tree.flatten(tx)
    return tree.unflatten(treedef, _as_tree(vector + units * changes, like=numbers))


def _updates_of_vectors(
    tx: Transform,
    example: Example,
    gradients: Tensor,
    parameters: Tensor,
    changes: Tensor | None = None,
) -> Tensor:
    """Run all steps, and return the elements of all updates as one vector, which torch can differentiate.

    Args:
        tx: the transform.
        example: the structure and shapes of the trees, and the usual values of the parameters.
        gradients: the elements of the gradients of all steps: 12 for two steps of a parameter of shape (2, 3).
        parameters: the elements of the initial parameters: 6 for this parameter.
        changes: the changes of the numbers of the transform, relative to their sizes. None: the numbers do not change.
    """
    params, steps = example
    if changes is not None:
        tx = _with_changed_numbers(tx, changes)
    # In training, gradients depend on the parameters through the loss. Let them here too: by 0.1 times each change.
    dependent_part = 0.1 * (parameters - _as_vector(params))
    dependent_gradients = gradients + dependent_part.repeat(len(steps))
    return _as_vector(
        updates_of(tx, _as_tree(parameters, params), _as_tree(dependent_gradients, steps))
    )


def _check_derivatives(
    check: Callable[..., bool],
    function: Callable[[Tensor], Tensor],
    point: Tensor,
    **options: float,
) -> None:
    """Compare the derivatives of a function of a vector at a point with finite differences.

    ``check`` is ``gradcheck``, or ``gradgradcheck`` for second derivatives, and raises an error if they differ.
    """
    if not point.numel() or not function(point).numel():
        return  # without inputs or outputs, there are no derivatives

    def differentiable_function(vector: Tensor) -> Tensor:
        # If the function does not depend on the vector, autograd has no derivative. Adding zero makes it zero.
        return function(vector) + 0.0 * vector.square().sum()

    # `fast_mode` compares one random projection of the derivatives, instead of the derivative by each element.
    check(differentiable_function, point.clone().requires_grad_(), fast_mode=True, **options)


@law(on=Example.smooth, unless=_state_is_narrow, share=0.1)
def derivatives_by_gradients_are_right(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check the derivatives of two steps' updates with respect to all gradients, by finite differences.

    >>> import muonfx as mfx
    >>> derivatives_by_gradients_are_right(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    _check_derivatives_by_gradients(gradcheck, tx, Example(params, steps))


def _check_derivatives_by_gradients(
    check: Callable[..., bool], tx: Transform, example: Example, **options: float
) -> None:
    """Compare derivatives of all updates with respect to all gradients with finite differences, in float64."""
    # One transform for all calls: what it keeps between them must not change the derivatives.
    wide_tx = widened(tx)
    parameters = _as_vector(example.params)

    def updates_by_gradients(gradients: Tensor) -> Tensor:
        return _updates_of_vectors(wide_tx, example, gradients, parameters)

    _check_derivatives(check, updates_by_gradients, _as_vector(example.steps), **options)


@law(on=Example.smooth, unless=_state_is_narrow, share=0.1)
def derivatives_by_parameters_are_right(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check the derivatives of two steps' updates with respect to the initial parameters, by finite differences.

    Updates depend on the parameters directly, as with weight decay, and through the state. For example, an average of
    the parameters starts as a copy of them, and `init` must not detach this copy.

    >>> import muonfx as mfx
    >>> derivatives_by_parameters_are_right(
    ...     mfx.add_decayed_weights(0.1), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    wide_tx = widened(tx)
    gradients = _as_vector(steps)

    def updates_by_parameters(parameters: Tensor) -> Tensor:
        return _updates_of_vectors(wide_tx, Example(params, steps), gradients, parameters)

    _check_derivatives(gradcheck, updates_by_parameters, _as_vector(params))


@law(on=Example.smooth, unless=lambda tx: _has_no_numbers(tx) or _state_is_narrow(tx), share=0.1)
def derivatives_by_hyperparameters_are_right(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check the derivatives of two steps' updates with respect to all numeric arguments, by finite differences.

    >>> import muonfx as mfx
    >>> derivatives_by_hyperparameters_are_right(
    ...     mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    wide_tx = widened(tx)
    gradients = _as_vector(steps)
    parameters = _as_vector(params)

    # The changes are relative: 0.1 for a decay times 1.1.
    def updates_by_changes(changes: Tensor) -> Tensor:
        return _updates_of_vectors(wide_tx, Example(params, steps), gradients, parameters, changes)

    _check_derivatives(gradcheck, updates_by_changes, _no_changes(wide_tx))


@law(on=Example.smooth, unless=_state_is_narrow, share=0.08)
def forward_mode_agrees_with_reverse_mode(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that ``torch.func.jvp`` and ``torch.func.vjp`` agree, by gradients, parameters and numbers together.

    Let ``J`` be the Jacobian of a run, from its inputs to its updates. For random vectors ``t`` and ``c``, forward mode
    computes ``J t`` and reverse mode ``c^T J``. Both give the same number ``c^T J t``.

    >>> import muonfx as mfx
    >>> forward_mode_agrees_with_reverse_mode(
    ...     mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    wide_tx = widened(tx)

    # All arguments are vectors.
    def run(gradients: Tensor, parameters: Tensor, changes: Tensor) -> Tensor:
        return _updates_of_vectors(wide_tx, Example(params, steps), gradients, parameters, changes)

    point = (_as_vector(steps), _as_vector(params), _no_changes(wide_tx))
    if not torch.cat(point).numel():
        return
    generator = torch.Generator().manual_seed(1)
    tangents = tuple(
        [torch.randn(vector.shape, dtype=vector.dtype, generator=generator) for vector in point]
    )
    with without_torchs_own_warnings():
        updates, j_t = torch.func.jvp(run, point, tangents)[:2]
    # The names are as above: t are the tangents, and j_t is J t.
    c = torch.randn(updates.shape, dtype=updates.dtype, generator=generator)
    vjp_function = torch.func.vjp(run, *point)[1]
    c_j = torch.cat(vjp_function(c))
    t = torch.cat(tangents)
    # Two ways to the same number c^T J t.
    by_forward = float(j_t.dot(c))
    by_reverse = float(t.dot(c_j))
    # The rounding errors of both products. If the exact derivative is zero, both are noise on the scale of the updates.
    rounding = 1e-9 * float(j_t.norm() * c.norm() + t.norm() * c_j.norm())
    noise = 1e-11 * (1.0 + float(updates.norm() * c.norm()))
    if not abs(by_forward - by_reverse) <= rounding + noise:  # NaN fails too
        raise Breach(None, f"forward mode gives {by_forward:.9g}, reverse mode {by_reverse:.9g}")


@law(on=lambda example: example.smooth(1), unless=_state_is_narrow, share=0.05)
def second_derivatives_are_right(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check the second derivatives of updates with respect to gradients, by finite differences of the first.

    >>> import muonfx as mfx
    >>> second_derivatives_are_right(mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 2)}))
    """
    _check_derivatives_by_gradients(gradgradcheck, tx, Example(params, steps), atol=1e-4)
