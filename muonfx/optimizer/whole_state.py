"""Check a new state of an optimizer, and check and copy a state that `load_transform_state` loads into it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core.checks import ExpectedState, check_state_like
from muonfx.sharding.shards.dtensors import is_dtensor, local_of
from muonfx.tree import PyTree


def require_tensors(state: PyTree) -> None:
    """Raise TypeError if a leaf of a new state is no tensor: a state dict would have it, but it could not be loaded."""
    for index, leaf in enumerate(tree.leaves(state)):
        if leaf is not None and not isinstance(leaf, Tensor):  # None: only another rank has it
            # Names are made only for the error, because an optimizer of many leaves has many.
            name = tree.names(state)[index]
            raise TypeError(
                f"state: {name!r} is of type {type(leaf).__name__}, expected a tensor, so that it can be saved and "
                "loaded: use torch.tensor(0) for a count, and a dict or a NamedTuple for a group of tensors"
            )


def checked_state(state: PyTree, current_state: PyTree) -> PyTree:
    """Return a state with the structure of an optimizer's state. Raise if it cannot be copied into that state."""
    expected = ExpectedState.of(current_state)
    # An OrderedDict may stand for a dict, as in the state of model.state_dict().
    with suppress(ValueError):  # the check below names another difference of structure
        state = tree.unflatten(expected.structure, expected.structure.flatten_up_to(state))
    check_state_like("this optimizer", state, expected, with_dtypes=False)
    _require_copyable(state, current_state)
    return state


def copy_state(state: PyTree, current_state: PyTree) -> None:
    """Copy the values of a state, as `checked_state` has returned it, into the tensors of an optimizer's state."""
    with torch.no_grad():
        tree.map(_copy_into, current_state, state)


def _copy_into(leaf: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor of the state, unless it is that tensor itself.

    Torch counts the writes into each tensor, and the first step initializes those without a write again if weights were
    loaded. So a copy of the tensor into itself, which `load_changed` would make, must not count.
    """
    if is_dtensor(leaf):
        value = cast("Any", value).redistribute(leaf.device_mesh, leaf.placements)
    # A write into the DTensor would not count for the tensor of the state, which is the local one.
    local_leaf = local_of(leaf)
    local_value = local_of(value)
    is_itself = (
        local_leaf.data_ptr() == local_value.data_ptr()
        and local_leaf.stride() == local_value.stride()
    )
    if not is_itself:
        local_leaf.copy_(local_value)


_AS_IN_STATE = "as in `transform_state` of this optimizer"


def _require_copyable(state: PyTree, expected: PyTree) -> None:
    """Raise ValueError if a leaf of a state cannot be copied into the leaf that is expected there.

    Either only one of them is a DTensor, or the leaf is on the meta device, and has no values.
    """
    for (name, leaf), expected_leaf in zip(
        tree.named_leaves(state), tree.leaves(expected), strict=True
    ):
        if is_dtensor(leaf) and not is_dtensor(expected_leaf):
            raise ValueError(
                f"state: {name!r} is a DTensor, expected a plain tensor, {_AS_IN_STATE}"
            )
        if is_dtensor(expected_leaf) and not is_dtensor(leaf):
            raise ValueError(
                f"state: {name!r} is a plain tensor, expected a DTensor, {_AS_IN_STATE}"
            )
        if leaf is not None and local_of(leaf).is_meta:  # None: only another rank has it
            raise ValueError(
                f"state: {name!r} is on the meta device, expected a tensor with values"
            )
