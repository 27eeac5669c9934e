"""The arguments of an update, and the interface through which an executor uses the ranks (`Placement`)."""

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
"""Neighbouring transforms of a chain with their names and current numbers."""


class Arguments(NamedTuple):
    """The arguments of an update."""

    updates: PyTree
    """Local tensors; None is an absent leaf."""
    state: PyTree
    params: PyTree
    """Local tensors, or None."""
    donate: Donation
    extras: Mapping[str, Any]
    """Named values for the transforms."""
    apply: Callable[[PyTree, PyTree], None] | None = None
    """Called with the parameters and the final updates of each bucket; the updates of other leaves are None."""

    @property
    def like(self) -> PyTree:
        """The parameters, or the updates if there are no parameters."""
        return self.updates if self.params is None else self.params

    @property
    def device(self) -> torch.device:
        """The device of the updates, or of the parameters if there are no updates."""
        return device_of(self.updates, self.params)

    def run(self, tx: Transform, **extras: Any) -> tuple[PyTree, PyTree]:
        """Run a transform with these arguments and some other extras."""
        return tx.run(self.updates, self.state, self.params, donate=self.donate, **{**self.extras, **extras})

    def finish(self, updates: PyTree) -> None:
        """Apply final updates if the call has an `apply` function."""
        if self.apply is not None:
            self.apply(self.params, updates)


def device_of(*values: PyTree) -> torch.device:
    """Return the device of the first tensor that is not on meta."""
    devices = (leaf.device for some in values if some is not None for leaf in tree.tensors(some))
    first = next(devices, None)
    if first is None:
        return torch.get_default_device()
    return first if first.type != "meta" else next((device for device in devices if device.type != "meta"), first)


def meta_like(values: PyTree) -> PyTree:
    """Replace the tensors of a tree by meta tensors."""
    return tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), values)


class Once:
    """A cache of values that depend on structure, names and shapes alone."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a function, called once for each key."""
        if key not in self.found:
            self.found[key] = make()
        return self.found[key]


class Placement:
    """Which part of each leaf this process holds, with the reductions and gathers over ranks.

    This class is for a single process that holds everything. `muonfx.sharding.binding.Binding` holds shards.
    """

    holds_all: bool = True
    """True if this rank holds every leaf whole, in its own shape, and no other rank holds any."""

    def global_like(self, params: PyTree) -> PyTree:
        """Return meta tensors of the global shapes for local tensors."""
        return meta_like(params)

    def fits(self, like: PyTree, params: PyTree) -> bool:
        """Return True if a program lowered for one tree serves another tree with the same names."""
        pairs = zip(tree.leaves(like), tree.leaves(params), strict=True)
        return all(theirs is None or (own is not None and own.shape == theirs.shape) for own, theirs in pairs)

    def sum_over_leaves(self, scalars: PyTree) -> Tensor:
        """Sum scalars, one for each leaf, over all leaves and ranks."""
        return sum_over_leaves(scalars)

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over ranks; all ranks pass tensors of one shape."""
        return values

    def shard(self, values: PyTree) -> PyTree:
        """Return the local shards of whole leaves."""
        return values

    def gather(self, values: PyTree) -> PyTree:
        """Gather the local leaves to whole leaves on every rank."""
        return values

    # The following methods are called only if `holds_all` is False.

    def warn_of_gathering(self, tx: Transform, params: PyTree) -> None:
        """Warn once of a transform that requires every leaf to be gathered on every rank."""
        raise NotImplementedError

    def init_stage(self, stage: Stage, run: Run, params: PyTree, store: Store) -> PyTree:
        """Return the state of a matrix stage: the state of its member, or the states of several members by name."""
        raise NotImplementedError

    def update_stage(self, stage: Stage, run: Run, call: Arguments) -> tuple[PyTree, PyTree]:
        """Run a matrix stage bucket by bucket, each whole matrix on its owner."""
        raise NotImplementedError


SINGLE_PROCESS = Placement()
