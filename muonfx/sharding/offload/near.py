"""Where values are, and how they come to where a transform computes."""

from __future__ import annotations

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.tree import PyTree

__all__ = ["device_of", "on_device", "with_numbers_on"]


def with_numbers_on(device: torch.device, tx: Transform) -> Transform:
    """A transform whose numbers, where they are tensors, can be used on a device: those of `inject_hyperparams`."""
    strange = [leaf for leaf in tree.tensors(tx) if leaf.device != device]
    if not strange or device.type != "cpu":
        return tx
    return tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tx)


def device_of(*values: PyTree) -> torch.device:
    """Where the first tensor is that is not on meta."""
    found = [leaf.device for some in values if some is not None for leaf in tree.tensors(some)]
    real = next((device for device in found if device.type != "meta"), None)
    return real or (found[0] if found else torch.get_default_device())


def on_device(device: torch.device, params: PyTree) -> PyTree:
    """A tree on a device."""
    return None if params is None else tree.map(lambda leaf: leaf.to(device), params)
