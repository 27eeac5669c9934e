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
    """Return why derivatives are not checked: a state has fewer bits than float64 for float64 parameters. Or None.

    Rounding to fewer bits has no derivative.
    """
    params = {"w": torch.zeros(2, 2, dtype=torch.float64, device="meta")}
    try:
        state = widened(tx).init(params)
    except Exception:  # the transform does not accept this tree; a real error is shown when the law is checked
        return None
    for leaf in tree.tensors(state):
        if leaf.ndim and leaf.is_floating_point() and leaf.dtype != torch.float64:
            return f"its state is {leaf.dtype} for float64 parameters: rounding has no derivative"
    return None


def _joined(trees: PyTree) -> Tensor:
    """Return one vector of all elements of the floating tensors in a tree."""
    vectors = [leaf.reshape(-1) for leaf in tree.tensors(trees) if leaf.is_floating_point()]
    if not vectors:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat(vectors)


def _split_like(vector: Tensor, like: PyTree) -> PyTree:
    """Divide a vector of elements into a tree with the structure and shapes of ``like``; inverts `_joined`."""
    leaves, treedef = tree.flatten(like)
    start = 0
    for index, leaf in enumerate(leaves):
        leaves[index] = vector[start : start + leaf.numel()].reshape(leaf.shape)
        start += leaf.numel()
    return tree.unflatten(treedef, leaves)


def _function_at(tx: Transform, params: PyTree, steps: list[PyTree]) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    """Return a function of vectors to a vector of all updates, and its arguments for an example.

    The arguments are the elements of all "gradients" and "parameters", and "changes" of the numeric arguments, which
    are zero. Without "changes", the numeric arguments are not replaced by tensors.
    """
    tx = widened(tx)
    leaves, treedef = tree.flatten(tx)
    numbers = [torch.as_tensor(leaf, dtype=torch.float64) for leaf in leaves]
    values = _joined(numbers)
    # Scale by each number, so that finite differences take small steps even for an eps of 1e-8.
    units = torch.where(values == 0, 1e-3, values.abs())
    initial_parameters = _joined(params)

    def function(gradients: Tensor, parameters: Tensor, changes: Tensor | None = None) -> Tensor:
        changed_tx = tx
        if changes is not None:
            changed_tx = tree.unflatten(treedef, _split_like(values + units * changes, numbers))
        # The gradients depend on the parameters too, as those of a loss do.
        moved = 0.1 * (parameters - initial_parameters)
        changed_steps = _split_like(gradients + moved.repeat(len(steps)), steps)
        return _joined(updates_of(changed_tx, _split_like(parameters, params), changed_steps))

    point = {
        "gradients": _joined(steps),
        "parameters": initial_parameters,
        "changes": torch.zeros_like(values),
    }
    return function, point


def _check(
    check: Callable[..., bool], by: str, tx: Transform, params: PyTree, steps: list[PyTree], **options: float
) -> None:
    """Call ``gradcheck`` or ``gradgradcheck`` for the derivatives by one argument of the function of `_function_at`."""
    function, point = _function_at(tx, params, steps)
    if by != "changes":
        del point["changes"]
    if not point[by].numel() or not function(**point).numel():
        return

    def connected(x: Tensor) -> Tensor:
        """Add zero times the input, so that the result has a derivative by the input, as gradcheck requires."""
        return function(**{**point, by: x}) + 0.0 * x.square().sum()

    check(connected, point[by].clone().requires_grad_(), fast_mode=True, **options)


@law(on=Example.smooth, unless=_state_is_narrow, share=0.1)
def derivatives_by_gradients_are_right(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check the derivatives of two steps' updates with respect to all gradients, by finite differences.

    >>> import muonfx as mfx
    >>> derivatives_by_gradients_are_right(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    _check(gradcheck, "gradients", tx, params, steps)


@law(on=Example.smooth, unless=_state_is_narrow, share=0.1)
def derivatives_by_parameters_are_right(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check the derivatives of two steps' updates with respect to the initial parameters, by finite differences.

    `init` receives the parameters too, so a state that starts at the parameters keeps their graph.

    >>> import muonfx as mfx
    >>> derivatives_by_parameters_are_right(mfx.add_decayed_weights(0.1), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    _check(gradcheck, "parameters", tx, params, steps)


@law(on=Example.smooth, unless=lambda tx: _has_no_numbers(tx) or _state_is_narrow(tx), share=0.1)
def derivatives_by_hyperparameters_are_right(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check the derivatives of two steps' updates with respect to all numeric arguments, by finite differences.

    >>> import muonfx as mfx
    >>> derivatives_by_hyperparameters_are_right(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    _check(gradcheck, "changes", tx, params, steps)


@law(on=Example.smooth, unless=_state_is_narrow, share=0.08)
def forward_mode_agrees_with_reverse_mode(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``torch.func.jvp`` and ``torch.func.vjp`` agree, by gradients, parameters and numbers together.

    For a random tangent ``t`` and cotangent ``c`` of the function with the Jacobian ``J``, both compute ``c^T J t``.

    >>> import muonfx as mfx
    >>> forward_mode_agrees_with_reverse_mode(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    function, arguments = _function_at(tx, params, steps)
    point = tuple(arguments.values())
    if not torch.cat(point).numel():
        return
    generator = torch.Generator().manual_seed(1)
    tangents = tuple([torch.randn(vector.shape, dtype=vector.dtype, generator=generator) for vector in point])
    with without_torchs_own_warnings():
        out, j_t = torch.func.jvp(function, point, tangents)[:2]
    c = torch.randn(out.shape, dtype=out.dtype, generator=generator)
    t = torch.cat(tangents)
    c_j = torch.cat(torch.func.vjp(function, *point)[1](c))
    by_forward = float(j_t.dot(c))
    by_reverse = float(t.dot(c_j))
    # The rounding errors of both products. If the exact derivative is zero, both are noise on the scale of the values.
    rounding = 1e-9 * float(j_t.norm() * c.norm() + t.norm() * c_j.norm())
    noise = 1e-11 * (1.0 + float(out.norm() * c.norm()))
    if not abs(by_forward - by_reverse) <= rounding + noise:  # NaN fails too
        raise Breach(None, f"forward mode gives {by_forward:.9g}, reverse mode {by_reverse:.9g}")


@law(on=lambda example: example.smooth(1), unless=_state_is_narrow, share=0.05)
def second_derivatives_are_right(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check the second derivatives of updates with respect to gradients, by finite differences of the first.

    >>> import muonfx as mfx
    >>> second_derivatives_are_right(mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 2)}))
    """
    _check(gradgradcheck, "gradients", tx, params, steps, atol=1e-4)
