"""The state of an optimizer before the first step: it follows parameters that are changed after construction.

Some transforms copy or measure the parameters in ``init``, such as the iterate of `schedule_free`. If weights are
loaded after the optimizer was created, such state would belong to the weights that they have replaced.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from muonfx import tree
from muonfx.sharding.shards.dtensors import local_of
from muonfx.tree import PyTree


def version_of(tensor: Tensor) -> int:
    """Return the number of writes into a tensor, or into the local tensor of a DTensor."""
    local = local_of(tensor)
    return -1 if local.is_inference() else local._version  # inference tensors have no version


class InitialState:
    """The tensors of the state that still have their initial values, and the parameters from which these were made.

    Args:
        params: the parameters by name.
        state: the state after ``init``.
        paths: the paths of the leaves of ``state`` that have initial values.
    """

    def __init__(self, params: Mapping[str, Tensor], state: PyTree, paths: set[tuple[object, ...]]) -> None:
        self._versions: dict[tuple[object, ...], int] = {}
        """The version of each leaf with an initial value, by path. A caller may write into a leaf."""
        for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True):
            if path in paths and isinstance(leaf, Tensor):
                self._versions[path] = version_of(leaf)
        self._params: dict[str, tuple[Tensor, int]] = {}
        """Each parameter with its version when the state was made."""
        self.note(params)

    def note(self, params: Mapping[str, Tensor]) -> None:
        """Record that the state was made from these parameters."""
        self._params = {name: (param, version_of(param)) for name, param in params.items()}

    def forget_written(self, state: PyTree) -> None:
        """Forget the leaves into which somebody has written, before the state is copied: copies have other versions."""
        paths = self.unwritten(state)
        self._versions = {path: version for path, version in self._versions.items() if path in paths}

    def note_copied(self, params: Mapping[str, Tensor], state: PyTree) -> None:
        """Record the tensors of a copied optimizer, which have other versions than those of the original."""
        self.note(params)
        for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True):
            if path in self._versions:
                self._versions[path] = version_of(leaf)

    def is_of(self, params: Mapping[str, Tensor]) -> bool:
        """Return True if no parameter was replaced or written to since the state was made from them."""
        for name, param in params.items():
            former_param, version = self._params[name]
            if param is not former_param or version_of(param) != version:
                return False
        return True

    def unwritten(self, state: PyTree) -> set[tuple[object, ...]]:
        """Return the paths of the leaves that still have initial values: nobody has written into them."""
        paths: set[tuple[object, ...]] = set()
        for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True):
            if path in self._versions and version_of(leaf) == self._versions[path]:
                paths.add(path)
        return paths

    def replace(self, state: PyTree, initial: PyTree) -> None:
        """Copy the values of ``initial``, the initial state for the present parameters, into the unwritten leaves."""
        paths = self.unwritten(state)
        leaves = tree.leaves(state)
        for path, leaf, value in zip(tree.paths(state), leaves, tree.leaves(initial), strict=True):
            if path in paths:
                leaf.copy_(value)
                self._versions[path] = version_of(leaf)
