"""The arguments of an update as a value, and `Placement`, by which the executor communicates with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.core.contract import sum_over_leaves
from muonfx.tree import PyTree

if TYPE_CHECKING:
    from muonfx.program.nodes import Stage
    from muonfx.program.offload.store import Store

__all__ = ["SINGLE_PROCESS", "Arguments", "Once", "Placement", "Run", "device_of", "meta_like"]

T = TypeVar("T")

Run = tuple[tuple[str, Transform], ...]
"""Consecutive transforms of a chain, as pairs (name, transform with its current numbers)."""


class Arguments(NamedTuple):
    """The arguments of one call of ``update``."""

    updates: PyTree
    """The gradients or incoming updates on this rank. A None leaf gets no update."""
    state: PyTree
    params: PyTree
    """The parameters on this rank, or None if they were not given."""
    donate: Donation
    extras: Mapping[str, Any]
    """Further named arguments for the transforms, such as ``value=loss``."""
    apply: Callable[[PyTree, PyTree], None] | None = None
    """A function ``(params, updates)`` that adds final updates to parameters, called for each bucket of leaves."""

    @property
    def like(self) -> PyTree:
        """The parameters, or the updates if there are no parameters."""
        return self.updates if self.params is None else self.params

    @property
    def device(self) -> torch.device:
        """The device of the updates, or of the parameters if there are no updates."""
        return device_of(self.updates, self.params)

    def run(self, tx: Transform, **extras: Any) -> tuple[PyTree, PyTree]:
        """Run a transform with these arguments; given extras replace those of the same name."""
        return tx.run(self.updates, self.state, self.params, donate=self.donate, **{**self.extras, **extras})

    def finish(self, updates: PyTree) -> None:
        """Add final updates to the parameters if this call has a function `apply`."""
        if self.apply is not None:
            self.apply(self.params, updates)


def device_of(*values: PyTree) -> torch.device:
    """Return the device of the first tensor in some trees that is not on meta; without tensors, the default device."""
    devices = (leaf.device for some in values if some is not None for leaf in tree.tensors(some))
    first = next(devices, None)
    if first is None:
        return torch.get_default_device()
    return first if first.type != "meta" else next((device for device in devices if device.type != "meta"), first)


def meta_like(values: PyTree) -> PyTree:
    """Return a tree with a meta tensor in place of each tensor."""
    return tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), values)


class Once:
    """A cache of results that depend on structure, names and shapes alone, so that each is computed once."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached result for a key, or call ``make()`` and cache its result."""
        if key not in self.found:
            self.found[key] = make()
        return self.found[key]


class Placement:
    """Which part of each leaf this process holds, with the gathers and reductions over ranks.

    This class is for a single process, which holds every leaf in full. The subclass
    `muonfx.sharding.binding.Binding` is for shards.
    """

    holds_all: bool = True
    """True in a single process: this rank holds every leaf in full, and no other rank has a part in the step."""

    def global_like(self, params: PyTree) -> PyTree:
        """Return meta tensors with the global shapes of parameters, given their local tensors."""
        return meta_like(params)

    def fits(self, like: PyTree, params: PyTree) -> bool:
        """Return True if a program that was lowered for the tree `like` can run on `params`: the shapes are equal."""
        pairs = zip(tree.leaves(like), tree.leaves(params), strict=True)
        return all(theirs is None or (own is not None and own.shape == theirs.shape) for own, theirs in pairs)

    def sum_over_leaves(self, scalars: PyTree) -> Tensor:
        """Return the sum of a tree of scalars, one for each local leaf, over all leaves and ranks."""
        return sum_over_leaves(scalars)

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over ranks of a tensor, which has the same shape on all ranks."""
        return values

    def shard(self, values: PyTree) -> PyTree:
        """Return this rank's shards of a tree of full tensors."""
        return values

    def gather(self, values: PyTree) -> PyTree:
        """Return full tensors on every rank, given a tree of this rank's shards."""
        return values

    # The following methods are called only if `holds_all` is False.

    def warn_of_gathering(self, tx: Transform, params: PyTree) -> None:
        """Warn once for a transform for which every leaf is gathered on every rank in each step."""
        raise NotImplementedError

    def init_stage(self, stage: Stage, run: Run, params: PyTree, store: Store) -> PyTree:
        """Return the state of a matrix stage: of its only transform, or a dict by name for several transforms."""
        raise NotImplementedError

    def update_stage(self, stage: Stage, run: Run, call: Arguments) -> tuple[PyTree, PyTree]:
        """Run a matrix stage bucket by bucket, each matrix on its owner (one rank); return updates and next state."""
        raise NotImplementedError


SINGLE_PROCESS = Placement()
