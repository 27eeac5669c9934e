"""Sums and norms of trees of floating-point tensors, computed in at least fp32. A None leaf counts as zero."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from muonfx.tree import elementwise as ew
from muonfx.tree.structure import Present, PyTree, device_of, flatten, subtrees, unflatten

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
        device = device_of(tree)
        return torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    return ew.norms([torch.stack([own.to(found[0].device) for own in found])])[0]
