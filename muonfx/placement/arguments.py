"""`Arguments`, the arguments of one update as a value, and helpers for trees of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from muonfx import tree
from muonfx.core import Donation
from muonfx.tree import PyTree


class Arguments(NamedTuple):
    """The arguments of one call of a transform's ``update``."""

    updates: PyTree
    """The gradients or incoming updates on this rank. A None leaf gets no update."""
    state: PyTree
    params: PyTree
    """The parameters on this rank, or None if they were not given."""
    donate: Donation
    extras: Mapping[str, Any]
    """The extra arguments for the transforms, such as ``value=loss``."""

    @property
    def like(self) -> PyTree:
        """The parameters if they were given, else the updates: the tree that gives names and shapes."""
        return self.updates if self.params is None else self.params


def device_of(*trees: PyTree) -> torch.device:
    """Return the device of the first real (not meta) tensor in some trees; without one, the default device."""
    for tensor in tree.tensors(trees):
        if tensor.device.type != "meta":
            return tensor.device
    return tree.device_of(trees)


def meta_like(values: PyTree) -> PyTree:
    """Return a copy of a tree in which each tensor is replaced by a meta tensor of its shape and dtype."""
    return tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), values)
