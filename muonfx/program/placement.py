"""The two arguments of an executor: a placement, which holds the shards of leaves, and a store for the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.core.contract import sum_over_leaves
from muonfx.tree import PyTree, Spec

if TYPE_CHECKING:
    from muonfx.program.nodes import Stage

__all__ = ["ALONE", "RESIDENT", "Alone", "Arguments", "Placement", "Resident", "Run", "Store", "Transfer"]

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

    def run(self, tx: Transform, **changes: Any) -> tuple[PyTree, PyTree]:
        """Run a transform with these arguments."""
        given = {**self.extras, "donate": self.donate, **changes}
        return tx.run(self.updates, self.state, self.params, **given)

    def finish(self, updates: PyTree) -> None:
        """Apply final updates if the call has an `apply` function."""
        if self.apply is not None:
            self.apply(self.params, updates)


class Placement(Protocol):
    """The shards of leaves that this rank holds, and the communication with other ranks."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def holds_all(self) -> bool:
        """True if this rank holds every leaf whole, in its own shape, and no other rank holds any."""
        ...

    def global_like(self, params: PyTree) -> PyTree:
        """Return meta tensors of the global shapes for local tensors."""
        ...

    def fits(self, like: PyTree, params: PyTree) -> bool:
        """Return True if a program lowered for one tree serves another tree with the same names."""
        ...

    def sum_over_leaves(self, scalars: PyTree) -> Tensor:
        """Sum scalars, one for each leaf, over all leaves and ranks."""
        ...

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over ranks; all ranks pass tensors of one shape."""
        ...

    def gather(self, values: PyTree) -> PyTree:
        """Gather the local leaves to whole leaves on every rank."""
        ...

    def shard(self, values: PyTree) -> PyTree:
        """Return the local shards of whole leaves."""
        ...

    def warn_of_gathering(self, tx: Transform, params: PyTree) -> None:
        """Warn once of a transform that requires every leaf to be gathered on every rank."""
        ...

    def init_stage(self, stage: Stage, run: Run, params: PyTree, store: Store) -> dict[str, PyTree]:
        """Return the states of a matrix stage's members."""
        ...

    def update_stage(self, stage: Stage, run: Run, call: Arguments, store: Store) -> tuple[PyTree, dict[str, PyTree]]:
        """Run a matrix stage bucket by bucket, each whole matrix on its owner."""
        ...


class Alone:
    """The placement of a single process, which holds every leaf."""

    size = 1
    holds_all = True

    def global_like(self, params: PyTree) -> PyTree:
        """Return meta tensors like the parameters."""
        return tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params)

    def fits(self, like: PyTree, params: PyTree) -> bool:
        """Return True if all present leaves have the lowered shapes; gradients may be None."""
        pairs = zip(tree.leaves(like), tree.leaves(params), strict=True)
        return all(theirs is None or (own is not None and own.shape == theirs.shape) for own, theirs in pairs)

    def sum_over_leaves(self, scalars: PyTree) -> Tensor:
        """Sum the scalars."""
        return sum_over_leaves(scalars)

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return values

    def gather(self, values: PyTree) -> PyTree:
        """Return the values unchanged."""
        return values

    def shard(self, values: PyTree) -> PyTree:
        """Return the values unchanged."""
        return values

    def warn_of_gathering(self, tx: Transform, params: PyTree) -> None:
        """Do nothing: a single process gathers no leaves."""

    def init_stage(self, stage: Stage, run: Run, params: PyTree, store: Store) -> dict[str, PyTree]:
        """Never called: in one process stages run leaf by leaf."""
        raise AssertionError("a stage needs no exchange in one process")

    def update_stage(self, stage: Stage, run: Run, call: Arguments, store: Store) -> tuple[PyTree, dict[str, PyTree]]:
        """Never called: in one process stages run leaf by leaf."""
        raise AssertionError("a stage needs no exchange in one process")


ALONE = Alone()


class Transfer(Protocol):
    """Copies of state between the store and the compute device, bucket by bucket."""

    def fetch(self, turn: int) -> list[Tensor]:
        """Return a bucket's leaves on the compute device, to be overwritten, and start to load the next bucket."""
        ...

    def put(self, turn: int, leaves: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Write a bucket's new leaves to the store in the background."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor is in a buffer that another bucket will reuse."""
        ...

    def finish(self) -> None:
        """Wait until all leaves are in the store."""
        ...

    def abandon(self) -> None:
        """Wait for pending copies after an error."""
        ...


class Store(Protocol):
    """Storage for the leaves of a state between steps."""

    @property
    def is_resident(self) -> bool:
        """True if the whole state stays on the device on which transforms compute."""
        ...

    @property
    def bucket_bytes(self) -> int:
        """About how many bytes of state are loaded at a time."""
        ...

    def device(self, given: torch.device) -> torch.device:
        """Return the device on which transforms compute, for updates on a given device."""
        ...

    def is_direct(self, device: torch.device) -> bool:
        """Return True if a transform on a device can update the stored state in place."""
        ...

    def has(self, leaf: Tensor, device: torch.device) -> bool:
        """Return True if a leaf is in this store, for a transform on a device."""
        ...

    def allocate(self, specs: Sequence[Spec], device: torch.device) -> list[Tensor]:
        """Allocate uninitialized tensors in the store."""
        ...

    def require(self, specs: Sequence[Spec]) -> None:
        """Raise OSError unless the store has room for further tensors."""
        ...

    def computing_with_updates(self) -> Store:
        """Return the same store for transforms that compute on the updates' device."""
        ...

    def release(self, leaf: Tensor) -> None:
        """Free the memory that a leaf in a file uses in this process; the file keeps the values."""
        ...

    def transfer(self, device: torch.device, buckets: Sequence[Sequence[Tensor]]) -> Transfer:
        """Start to load the leaves of some buckets."""
        ...


class Resident:
    """The store of a state on the parameters' device."""

    is_resident = True
    bucket_bytes = 0

    def device(self, given: torch.device) -> torch.device:
        """Return the device of the updates."""
        return given

    def is_direct(self, device: torch.device) -> bool:
        """Return True."""
        return True

    def has(self, leaf: Tensor, device: torch.device) -> bool:
        """Return True."""
        return True

    def allocate(self, specs: Sequence[Spec], device: torch.device) -> list[Tensor]:
        """Allocate uninitialized tensors on the device."""
        return [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]

    def require(self, specs: Sequence[Spec]) -> None:
        """Do nothing: running out of memory raises later, in `allocate`."""

    def computing_with_updates(self) -> Store:
        """Return this store."""
        return self

    def release(self, leaf: Tensor) -> None:
        """Do nothing."""

    def transfer(self, device: torch.device, buckets: Sequence[Sequence[Tensor]]) -> Transfer:
        """Never called: a resident state needs no transfer."""
        raise AssertionError("what is resident needs no transfer")


RESIDENT = Resident()
