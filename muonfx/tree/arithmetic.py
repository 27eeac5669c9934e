"""`norm`: the 2-norm over all leaves of a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from muonfx.tree import elementwise as ew
from muonfx.tree.structure import Present, PyTree, device_of


def norm(tree: PyTree) -> Tensor:
    """Return the 2-norm over all elements of all leaves of a tree of floating-point tensors; None leaves are skipped.

    Squares do not overflow: the result is finite whenever the norm is.

    Returns:
        A 0-d tensor, in fp64 if the device supports it.

    >>> float(norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}))
    5.0
    """
    leaf_norms = ew.norms(Present(tree).pick(tree))
    if not leaf_norms:
        return ew.new_number(0.0, device_of(tree))
    # The norm of the tree is the norm of the vector of all leaf norms. Leaves may be on several devices.
    device = leaf_norms[0].device
    norms_on_device = [leaf_norm.to(device) for leaf_norm in leaf_norms]
    return ew.norms([torch.stack(norms_on_device)])[0]
