"""Laws of batching: ``torch.func.vmap`` over gradients and states, or over the transform itself, equals a loop."""

from __future__ import annotations

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.hyperparams import stack
from muonfx.testing.examples import history
from muonfx.testing.law import law
from muonfx.testing.violation import require_close, tolerance_of
from muonfx.tree import PyTree

FACTORS = (1.0, -0.5, 3.0)


@law(on=lambda example: example.precise().prolonged(3), share=0.25)
def vmap_over_gradients_equals_a_loop(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``torch.func.vmap`` of `update` over a batch of gradients and states equals a loop.

    >>> import muonfx as mfx
    >>> vmap_over_gradients_equals_a_loop(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    runs = [[tree.map(lambda g, f=factor: g * f, grads) for grads in steps] for factor in FACTORS]
    expected = [history(tx, params, run) for run in runs]
    state = _stacked([tx.init(params)] * len(FACTORS))
    step_once = torch.func.vmap(lambda grads, state: tx.update(grads, state, params))
    for step in range(len(steps)):
        grads = _stacked([run[step] for run in runs])
        has_tensors = any(True for _ in tree.tensors((grads, state)))  # vmap requires a tensor to batch
        updates, state = step_once(grads, state) if has_tensors else (grads, state)
        wanted = _stacked([one[step] for one in expected])
        tolerance = tolerance_of(tx, *expected[0][step])
        require_close(f"step {step}, vmapped (updates, state)", (updates, state), wanted, "in a loop", tolerance)


def _stacked(trees: list[PyTree]) -> PyTree:
    return tree.map(lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *trees)


def _has_no_numbers(tx: Transform) -> str | None:
    return None if tree.leaves(tx) else "it has no numeric arguments"


@law(on=lambda example: example.precise().prolonged(3), unless=_has_no_numbers, share=0.25)
def vmap_over_the_transform_equals_a_loop(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``torch.func.vmap`` over transforms with different numeric arguments equals a loop over them.

    >>> import muonfx as mfx
    >>> vmap_over_the_transform_equals_a_loop(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    leaves, treedef = tree.flatten(tx)
    variants = [tree.unflatten(treedef, [leaf * factor for leaf in leaves]) for factor in (1.0, 0.9, 0.5)]

    def final(tx: Transform) -> PyTree:
        updates, state = history(tx, params, steps)[-1]
        # Tensors only: vmap cannot return None. It repeats tensors that are equal for the whole batch.
        return [leaf for leaf in torch_pytree.tree_leaves((updates, state)) if isinstance(leaf, Tensor)]

    expected = [final(variant) for variant in variants]
    if not expected[0]:
        return
    found = torch.func.vmap(final)(stack(variants))
    what = "last step, vmapped [updates, state]"
    require_close(what, found, _stacked(expected), "in a loop", tolerance_of(tx, expected))
