"""The two things that an executor is given: where the pieces of leaves are, and where the state lies."""

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
"""Neighbouring transforms of a chain, with their names in it and the numbers of now."""


class Arguments(NamedTuple):
    """The arguments of an update."""

    updates: PyTree
    """Local tensors; None is absent."""
    state: PyTree
    params: PyTree
    """Local tensors, or None."""
    donate: Donation
    extras: Mapping[str, Any]
    """Named values for the transforms."""
    apply: Callable[[PyTree, PyTree], None] | None = None
    """Is called with parameters, or pieces of them, and the updates for these as soon as they are final."""

    @property
    def like(self) -> PyTree:
        """The parameters, or what stands for them."""
        return self.updates if self.params is None else self.params

    def run(self, tx: Transform, **changes: Any) -> tuple[PyTree, PyTree]:
        """Arguments a transform with these arguments."""
        given = {**self.extras, "donate": self.donate, **changes}
        return tx.run(self.updates, self.state, self.params, **given)

    def finish(self, updates: PyTree) -> None:
        """Apply updates that are final, if they are to be."""
        if self.apply is not None:
            self.apply(self.params, updates)


class Placement(Protocol):
    """The pieces of leaves that this rank holds, and the exchanges for what one rank cannot do alone."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def holds_all(self) -> bool:
        """True if this rank holds every leaf whole, in its own shape, and nobody else does."""
        ...

    def global_like(self, params: PyTree) -> PyTree:
        """Meta tensors of the global shapes in the place of local tensors."""
        ...

    def fits(self, like: PyTree, params: PyTree) -> bool:
        """True if trees of the same names are of the same parameters: what was lowered for one serves the other."""
        ...

    def sum_over_leaves(self, scalars: PyTree) -> Tensor:
        """Add scalars, one for each leaf, over all leaves and ranks."""
        ...

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """The largest that any rank has, element by element; as many on all."""
        ...

    def gather(self, values: PyTree) -> PyTree:
        """Whole leaves of local ones, on every rank."""
        ...

    def shard(self, values: PyTree) -> PyTree:
        """Local leaves of whole ones."""
        ...

    def warn_of_gathering(self, tx: Transform, params: PyTree) -> None:
        """Warn, once, of a transform for which everything is gathered on every rank."""
        ...

    def init_stage(self, stage: Stage, run: Run, params: PyTree, store: Store) -> dict[str, PyTree]:
        """The states of the members of a matrix stage."""
        ...

    def update_stage(self, stage: Stage, run: Run, call: Arguments, store: Store) -> tuple[PyTree, dict[str, PyTree]]:
        """Update by a matrix stage: whole matrices at their owners, by buckets."""
        ...


class Alone:
    """The placement of one process, which holds all."""

    size = 1
    holds_all = True

    def global_like(self, params: PyTree) -> PyTree:
        """Meta tensors like the parameters."""
        return tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params)

    def fits(self, like: PyTree, params: PyTree) -> bool:
        """True if all leaves that are there have the shapes of what was lowered; some gradients may be None."""
        pairs = zip(tree.leaves(like), tree.leaves(params), strict=True)
        return all(theirs is None or (own is not None and own.shape == theirs.shape) for own, theirs in pairs)

    def sum_over_leaves(self, scalars: PyTree) -> Tensor:
        """Add scalars."""
        return sum_over_leaves(scalars)

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """The very values."""
        return values

    def gather(self, values: PyTree) -> PyTree:
        """The very values."""
        return values

    def shard(self, values: PyTree) -> PyTree:
        """The very values."""
        return values

    def warn_of_gathering(self, tx: Transform, params: PyTree) -> None:
        """Nothing is gathered."""

    def init_stage(self, stage: Stage, run: Run, params: PyTree, store: Store) -> dict[str, PyTree]:
        """Never asked: all is leaf by leaf in one process."""
        raise AssertionError("a stage needs no exchange in one process")

    def update_stage(self, stage: Stage, run: Run, call: Arguments, store: Store) -> tuple[PyTree, dict[str, PyTree]]:
        """Never asked: all is leaf by leaf in one process."""
        raise AssertionError("a stage needs no exchange in one process")


ALONE = Alone()


class Transfer(Protocol):
    """State on its way between where it lies and where a transform computes, bucket by bucket."""

    def fetch(self, turn: int) -> list[Tensor]:
        """A bucket's leaves where transforms compute, to be written to; the next bucket's are on their way."""
        ...

    def put(self, turn: int, leaves: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Write a bucket's new leaves to where they lie, in the background."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor lies in memory that is used again for another bucket."""
        ...

    def finish(self) -> None:
        """Wait until all is where it lies."""
        ...

    def abandon(self) -> None:
        """Wait for what is under way, after an error."""
        ...


class Store(Protocol):
    """The place of a state's leaves between steps."""

    @property
    def is_resident(self) -> bool:
        """True if all of it lies where transforms compute."""
        ...

    @property
    def bucket_bytes(self) -> int:
        """About how many bytes of state are brought in at a time."""
        ...

    def device(self, given: torch.device) -> torch.device:
        """The device to compute on, with updates that are on a device."""
        ...

    def is_direct(self, device: torch.device) -> bool:
        """True if a transform on a device can work in the state where it lies."""
        ...

    def has(self, leaf: Tensor, device: torch.device) -> bool:
        """True if a leaf lies here, for a transform on a device."""
        ...

    def allocate(self, specs: Sequence[Spec], device: torch.device) -> list[Tensor]:
        """Make tensors here, with any values."""
        ...

    def require(self, specs: Sequence[Spec]) -> None:
        """Require that there is room for further tensors; raises OSError."""
        ...

    def computing_with_updates(self) -> Store:
        """The same place, for transforms that compute where the updates are."""
        ...

    def release(self, leaf: Tensor) -> None:
        """Let go of the memory that a leaf takes in this process, where it lies in a file."""
        ...

    def transfer(self, device: torch.device, buckets: Sequence[Sequence[Tensor]]) -> Transfer:
        """Begin to bring the leaves of some buckets in."""
        ...


class Resident:
    """The store of a state that lies with the parameters."""

    is_resident = True
    bucket_bytes = 0

    def device(self, given: torch.device) -> torch.device:
        """The device of the updates."""
        return given

    def is_direct(self, device: torch.device) -> bool:
        """Always."""
        return True

    def has(self, leaf: Tensor, device: torch.device) -> bool:
        """Always."""
        return True

    def allocate(self, specs: Sequence[Spec], device: torch.device) -> list[Tensor]:
        """Make tensors on the device."""
        return [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]

    def require(self, specs: Sequence[Spec]) -> None:
        """There is room."""

    def computing_with_updates(self) -> Store:
        """Itself."""
        return self

    def release(self, leaf: Tensor) -> None:
        """It stays."""

    def transfer(self, device: torch.device, buckets: Sequence[Sequence[Tensor]]) -> Transfer:
        """Never asked."""
        raise AssertionError("what is resident needs no transfer")


RESIDENT = Resident()
