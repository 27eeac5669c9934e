"""The device of some trees, and copies of them on the meta device."""

from __future__ import annotations

import torch

from muonfx import tree
from muonfx.tree import PyTree


def device_of(*trees: PyTree) -> torch.device:
    """Return the device of the first real (not meta) tensor in some trees; without one, the default device."""
    for tensor in tree.tensors(trees):
        if tensor.device.type != "meta":
            return tensor.device
    return tree.device_of(trees)


def meta_like(values: PyTree) -> PyTree:
    """Return a copy of a tree in which each tensor is replaced by a meta tensor of its shape and dtype."""
    return tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), values)
