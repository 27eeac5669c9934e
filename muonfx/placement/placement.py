"""`Arguments`, the arguments of one update, and `Placement`, with which the executor communicates with other ranks."""

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
    from muonfx.placement.nodes import Stage
    from muonfx.placement.store import Store

__all__ = ["SINGLE_PROCESS", "Arguments", "Once", "Placement", "Run", "device_of", "meta_like"]

T = TypeVar("T")

Run = tuple[tuple[str, Transform], ...]
"""Consecutive transforms of a chain, as pairs (name, transform with its current numbers)."""


class Arguments(NamedTuple):
    """The arguments of one call of a transform's ``update``, with an optional function to apply the result."""

    updates: PyTree
    """The gradients or incoming updates on this rank. A None leaf gets no update."""
    state: PyTree
    params: PyTree
    """The parameters on this rank, or None if they were not given."""
    donate: Donation
    extras: Mapping[str, Any]
    """The extra arguments for the transforms, such as ``value=loss``."""
    apply: Callable[[PyTree, PyTree], None] | None = None
    """A function ``(params, updates)`` that adds final updates to parameters, called for each bucket of leaves."""

    @property
    def like(self) -> PyTree:
        """The parameters if they were given, else the updates: the tree that gives names and shapes."""
        return self.updates if self.params is None else self.params

    @property
    def device(self) -> torch.device:
        """The device of the updates, or of the parameters if there are no updates."""
        return device_of(self.updates, self.params)

    def run(self, tx: Transform, **extras: Any) -> tuple[PyTree, PyTree]:
        """Call the update of a transform with these arguments. `extras` replace extra arguments of the same name."""
        return tx.run(self.updates, self.state, self.params, donate=self.donate, **{**self.extras, **extras})

    def finish(self, updates: PyTree) -> None:
        """Apply final updates to the parameters by calling `apply`, if this call has such a function."""
        if self.apply is not None:
            self.apply(self.params, updates)


def device_of(*values: PyTree) -> torch.device:
    """Return the device of the first real (not meta) tensor in some trees; without one, the default device."""
    devices = (leaf.device for some in values if some is not None for leaf in tree.tensors(some))
    first = next(devices, None)
    if first is None:
        return tree.device_of(None)
    return first if first.type != "meta" else next((device for device in devices if device.type != "meta"), first)


def meta_like(values: PyTree) -> PyTree:
    """Return a copy of a tree in which each tensor is replaced by a meta tensor of its shape and dtype."""
    return tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), values)


class Once:
    """A cache for results that depend on structure, names and shapes alone. Each is computed at most once."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached result for a key. If there is none, call ``make()`` and cache its result."""
        if key not in self.found:
            self.found[key] = make()
        return self.found[key]


class Placement:
    """Which shard of each parameter this process holds, with the gathers and reductions over ranks.

    This class is for a single process, which holds every parameter in full. Its subclass
    `muonfx.sharding.binding.Binding` is for shards.
    """

    holds_all: bool = True
    """True in a single process: this rank holds every leaf in full, and no other rank has a part in the step."""

    def global_like(self, params: PyTree) -> PyTree:
        """Return a meta tensor of the global shape for each parameter. `params` has the local tensors."""
        return meta_like(params)

    def fits(self, like: PyTree, params: PyTree) -> bool:
        """Return True if `params` has the shapes of `like`, so that a program for `like` can be used again."""
        pairs = zip(tree.leaves(like), tree.leaves(params), strict=True)
        return all(theirs is None or (own is not None and own.shape == theirs.shape) for own, theirs in pairs)

    def sum_over_leaves(self, scalars: PyTree) -> Tensor:
        """Return the sum of the scalars in a tree, which has one per leaf, over all leaves and ranks."""
        return sum_over_leaves(scalars)

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of a tensor over all ranks. It must have the same shape on each of them."""
        return values

    def shard(self, values: PyTree) -> PyTree:
        """Cut this rank's shards out of a tree of full tensors, and return them as a tree."""
        return values

    def gather(self, values: PyTree) -> PyTree:
        """Gather a tree of shards, this rank's part, into a tree of full tensors on every rank."""
        return values

    # The following methods are called only if `holds_all` is False.

    def warn_of_gathering(self, tx: Transform, params: PyTree) -> None:
        """Warn once if a transform makes every rank gather all parameters in full at each step."""
        raise NotImplementedError

    def init_stage(self, stage: Stage, run: Run, params: PyTree, store: Store) -> PyTree:
        """Return the initial state of a matrix stage (neighbouring transforms that need whole matrices)."""
        raise NotImplementedError

    def update_stage(self, stage: Stage, run: Run, call: Arguments) -> tuple[PyTree, PyTree]:
        """Run a matrix stage with each matrix on one rank. Return this rank's updates and the stage's next state."""
        raise NotImplementedError


SINGLE_PROCESS = Placement()
