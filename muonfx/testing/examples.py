"""Examples on which laws are checked: parameters, and gradients for a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.testing.violation import shown
from muonfx.tree import PyTree

__all__ = ["DTYPES", "Example"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The floating dtypes, the plainest first."""


class Example(NamedTuple):
    """Parameters and the gradients of some steps, trees of one structure; unpacks as ``params, steps``.

    >>> Example.of({"w": (2, 1)}, steps=1)
    params   'w': float32 (2, 1) [[...], [...]]
    step 0   'w': float32 (2, 1) [[...], [...]]
    """

    params: PyTree
    steps: list[PyTree]

    @classmethod
    def of(cls, shapes: PyTree, *, steps: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> Example:
        """Build an example from a flat dict of shapes, with normal values from a seed.

        >>> params, steps = Example.of({"w": (2, 3), "b": ()}, steps=4)
        >>> params["w"].shape, len(steps)
        (torch.Size([2, 3]), 4)
        """
        generator = torch.Generator().manual_seed(seed)

        def normal(shape: Sequence[int]) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        params, *grads = [{name: normal(shape) for name, shape in shapes.items()} for _ in range(1 + steps)]
        return cls(params, grads)

    def __repr__(self) -> str:
        """Show names, dtypes, shapes and small values, a line for each leaf."""
        lines: list[str] = []
        for title, values in (("params", self.params), *((f"step {i}", grads) for i, grads in enumerate(self.steps))):
            found = [f"{name!r}: {shown(leaf)}" for name, leaf in tree.named_leaves(values)]
            found = found or [f"no leaves: {values!r}"]
            lines += [f"{'' if place else title:9}{line}" for place, line in enumerate(found)]
        return "\n".join(lines)

    def map(self, function: Any) -> Example:
        """Apply a function to every tensor."""
        return Example(tree.map(function, self.params), [tree.map(function, grads) for grads in self.steps])

    def clone(self) -> Example:
        """Copy every tensor, strides included."""
        return self.map(copied)

    def dense(self) -> Example:
        """Replace parameters and gradients that are None by tensors."""
        leaves, treedef = tree.flatten(self.params)
        full = [torch.full((2, 2), 0.25) if leaf is None else leaf for leaf in leaves]

        def filled(grads: PyTree) -> PyTree:
            pairs = zip(full, tree.leaves(grads), strict=True)
            return tree.unflatten(treedef, [0.5 * own + 0.5 if grad is None else grad for own, grad in pairs])

        return Example(tree.unflatten(treedef, full), [filled(grads) for grads in self.steps])

    def precise(self) -> Example:
        """Convert every tensor to contiguous float64, in which two computations of one value agree closely."""
        return self.dense().map(lambda leaf: leaf.detach().double().clone(memory_format=torch.contiguous_format))

    def smooth(self, steps: int = 2) -> Example:
        """Keep structure and shapes, in dense float64, with values away from zero: roots have no derivative there."""
        generator = torch.Generator().manual_seed(0)

        def away(leaf: Tensor) -> Tensor:
            drawn = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
            return drawn + drawn.sign() * 0.1

        params = self.dense().params
        return Example(tree.map(away, params), [tree.map(away, params) for _ in range(steps)])

    def in_every_dtype(self) -> list[Example]:
        """Return one example for each floating dtype of the first leaf; later leaves have the next dtypes in turn."""
        leaves, treedef = tree.flatten(self.params)
        places = tree.unflatten(treedef, list(range(len(leaves))))

        def turned(values: PyTree, shift: int) -> PyTree:
            return tree.map(lambda leaf, place: leaf.to(DTYPES[(place + shift) % len(DTYPES)]), values, places)

        shifts = range(len(DTYPES)) if any(leaf is not None for leaf in leaves) else ()
        return [Example(turned(self.params, n), [turned(grads, n) for grads in self.steps]) for n in shifts]

    def prolonged(self, steps: int) -> Example:
        """Repeat the steps until there are this many."""
        return Example(self.params, [self.steps[i % len(self.steps)] for i in range(max(steps, len(self.steps)))])


def copied(leaf: Tensor) -> Tensor:
    """Copy a tensor with its strides, so that a view with gaps stays one."""
    if leaf.device.type == "meta" or leaf.is_contiguous() or 0 in leaf.stride():
        return leaf.detach().clone()
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf.detach())


def copied_tree(values: PyTree) -> PyTree:
    """Copy every tensor of a tree."""
    return tree.map(lambda leaf: copied(leaf) if isinstance(leaf, Tensor) else leaf, values)


def on_meta(values: PyTree) -> PyTree:
    """Return tensors of the same shapes and dtypes on the meta device."""
    return tree.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), values)


def updates_of(tx: Any, params: PyTree, steps: Sequence[PyTree]) -> list[PyTree]:
    """Return the updates of each step, from a fresh state."""
    return [updates for updates, _ in history(tx, params, steps)]


def history(tx: Any, params: PyTree, steps: Sequence[PyTree]) -> list[tuple[PyTree, PyTree]]:
    """Return the updates and the state after each step, from a fresh state."""
    state = tx.init(params)
    found: list[tuple[PyTree, PyTree]] = []
    for grads in steps:
        updates, state = tx.update(grads, state, params)
        found.append((updates, state))
    return found
