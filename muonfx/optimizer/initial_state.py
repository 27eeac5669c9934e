"""The state of an optimizer before the first step: it follows parameters that are changed after construction.

Some transforms copy or measure the parameters in ``init``, such as the iterate of `schedule_free`. If weights are
loaded after the optimizer was created, such state would belong to the weights that they have replaced.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from typing import NamedTuple, TypeVar

from torch import Tensor

from muonfx import tree
from muonfx.optimizer.named_parameters import NamedTensors
from muonfx.sharding.digests import checksums
from muonfx.sharding.shards.dtensors import local_of
from muonfx.tree import PyTree

K = TypeVar("K", bound=Hashable)

Path = tuple[object, ...]


class _LeafRecord(NamedTuple):
    """By what a later write into a tensor of the state is found."""

    version: int
    """The number of writes into it. A caller may load the values that it has, such as zeros: it is written then."""
    checksum: int
    """The checksum of its values. A write through ``leaf.data`` does not change the version."""


class InitialState:
    """The tensors of the state that still have their initial values, and the parameters from which these were made.

    Args:
        params: the parameters by name, from whose values the state was made.
        state: the state after ``init``.
        paths: the paths of the leaves of ``state`` that have initial values; None for all.
    """

    def __init__(self, params: NamedTensors, state: PyTree, paths: Set[Path] | None = None) -> None:
        """Record the leaves and the parameters by checksums: a leaf counts as written if its checksum has changed."""
        leaves = _tensors(state)
        if paths is not None:
            leaves = {path: leaf for path, leaf in leaves.items() if path in paths}
        self._record_of_leaf = _recorded(leaves)
        self._checksum_of_param = _checksums(params)

    @classmethod
    def to_renew(cls, state: PyTree, paths: Set[Path]) -> InitialState:
        """Return a record of leaves that the next step initializes again, because it has no parameters to compare."""
        no_params: NamedTensors = {}
        return cls(no_params, state, paths)

    def is_of(self, params: NamedTensors) -> bool:
        """Return True if the parameters have the values from which the state was made. Syncs with the device."""
        return _checksums(params) == self._checksum_of_param

    def unwritten(self, state: PyTree) -> set[Path]:
        """Return the paths of the leaves that still have initial values and that no write has changed."""
        leaves = _tensors(state)
        new_record_of_leaf = _recorded({path: leaves[path] for path in self._record_of_leaf})
        unwritten: set[Path] = set()
        for path, record in self._record_of_leaf.items():
            if record == new_record_of_leaf[path]:
                unwritten.add(path)
        return unwritten

    def renew(self, params: NamedTensors, state: PyTree, new_values: PyTree) -> InitialState:
        """Copy the initial values for new weights into a state, and return a new record, of the tensors copied.

        For example, the iterate that `schedule_free` keeps becomes a copy of the new weights. Tensors that the caller
        has loaded or written since they were initialized keep their values.

        Args:
            params: the parameters with their new weights.
            state: the state to change.
            new_values: the initial state for the new weights.
        """
        unwritten_paths = self.unwritten(state)
        leaves = _tensors(state)
        new_value_at = _tensors(new_values)
        for path in unwritten_paths:
            leaves[path].copy_(new_value_at[path])
        return InitialState(params, state, unwritten_paths)


def with_new_leaves(
    record: InitialState | None,
    new_paths: Set[Path],
    params: NamedTensors,
    state: PyTree,
    former_state: PyTree,
) -> InitialState | None:
    """Return the record of initial values after some leaves of a state were initialized, such as an added parameter's.

    Args:
        record: the record so far; None after the first step, when no leaf has its initial value.
        new_paths: the paths of the leaves that were initialized just now.
        params: the parameters from which they were initialized.
        state: the state. Its other leaves have the values of ``former_state``.
        former_state: the state before.
    """
    is_before_first_step = record is not None
    if is_before_first_step:
        # Earlier leaves have initial values, too, perhaps of weights that were replaced since. So the next step
        # initializes all of them again, without a comparison of weights.
        return InitialState.to_renew(state, new_paths | record.unwritten(former_state))
    if new_paths:
        return InitialState(params, state, new_paths)
    return None


def _tensors(state: PyTree) -> dict[Path, Tensor]:
    """Return the tensors of a state by path. Over ranks, a leaf that only another rank has is None, and left out."""
    tensors: dict[Path, Tensor] = {}
    for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True):
        if isinstance(leaf, Tensor):
            tensors[path] = leaf
    return tensors


def _recorded(leaves: Mapping[Path, Tensor]) -> dict[Path, _LeafRecord]:
    """Return a record of each tensor by path. A later record differs if somebody has written into the tensor.

    A record has the version of the tensor, which is torch's count of writes, and a checksum of its values.
    """
    checksum_of = _checksums(leaves)
    recorded: dict[Path, _LeafRecord] = {}
    for path, leaf in leaves.items():
        # Torch counts no writes into inference tensors: with -1 in all records, only the checksum shows them.
        version = -1 if leaf.is_inference() else leaf._version
        recorded[path] = _LeafRecord(version, checksum_of[path])
    return recorded


def _checksums(tensors: Mapping[K, Tensor]) -> dict[K, int]:
    """Return the checksum of the values of each tensor on this rank, and 0 on the meta device."""
    return checksums({key: local_of(tensor) for key, tensor in tensors.items()})
