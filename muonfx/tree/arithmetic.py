"""Arithmetic of trees of floating-point tensors, computed in at least fp32. A None leaf counts as zero."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from muonfx.tree import elementwise as ew
from muonfx.tree.structure import Present, PyTree, device_of, flatten, map, subtrees, unflatten

T = TypeVar("T")


def add(first: T, *others: PyTree) -> T:
    """Add trees leaf by leaf.

    Each sum is rounded once, to the dtype of the first tree that has the leaf. A leaf that is None in every tree stays
    None.

    Raises:
        ValueError: the structures of the trees differ.

    >>> add({"w": torch.ones(1), "b": None}, {"w": torch.ones(1), "b": torch.ones(1)})
    {'w': tensor([2.]), 'b': tensor([1.])}
    """
    leaves, treedef = flatten(first)
    columns = zip(leaves, *[subtrees(treedef, other) for other in others], strict=True)
    return unflatten(treedef, [_sum([leaf for leaf in column if leaf is not None]) for column in columns])


def _sum(present: list[Tensor]) -> Tensor | None:
    if not present:
        return None
    wide = ew.wide_dtype(*[leaf.dtype for leaf in present])
    total = present[0].to(wide)
    for leaf in present[1:]:
        total = total + leaf
    return total.to(present[0].dtype)


def scale(factor: float | Tensor, tree: T) -> T:
    """Multiply every leaf by a number, and keep its dtype.

    >>> scale(3.0, {"w": torch.ones(1), "b": None})
    {'w': tensor([3.]), 'b': None}
    """
    return map(lambda leaf: (leaf.to(ew.wide_dtype(leaf.dtype)) * factor).to(leaf.dtype), tree)


def vdot(a: PyTree, b: PyTree) -> Tensor:
    """Return the inner product of two trees: the sum of the products of corresponding elements.

    Returns:
        A 0-d tensor, in fp64 if the device supports it.

    Raises:
        ValueError: the structures of the trees differ.

    >>> float(vdot({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])}))
    11.0
    """
    leaves, treedef = flatten(a)
    pairs = zip(leaves, subtrees(treedef, b), strict=True)
    return _total([_product(x, y) for x, y in pairs if x is not None and y is not None], a)


def _product(x: Tensor, y: Tensor) -> Tensor:
    wide = ew.wide_dtype(x.dtype) if x.device.type == "mps" else torch.float64  # products of fp32 are exact in fp64
    return (x.to(wide) * y.to(wide)).sum()


def _total(scalars: list[Tensor], like: PyTree) -> Tensor:
    if not scalars:
        device = device_of(like)
        return torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).sum()


def norm(tree: PyTree) -> Tensor:
    """Return the 2-norm over all elements of all leaves.

    Squares do not overflow: the result is finite if the norm is.

    Returns:
        A 0-d tensor, in fp64 if the device supports it.

    >>> float(norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}))
    5.0
    """
    found = ew.norms(Present(tree).pick(tree))
    if not found:
        return _total([], tree)
    return ew.norms([torch.stack([own.to(found[0].device) for own in found])])[0]
