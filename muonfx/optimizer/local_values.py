"""Choose this rank's part of a saved tensor, or explain why it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from muonfx.sharding.dtensors import is_dtensor, local_of
from muonfx.sharding.shards import IntervalTensor
from muonfx.tree.dtypes import widens

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor


Load = tuple[str, int, Tensor]


"""One tensor to load: a text for messages, the index of the leaf in the state, and the values (this rank's or all)."""


Take = Callable[[int, Any, Any], Tensor | str]


"""A function ``(index of a leaf, the leaf in optimizer.state, saved value) -> values of the Load, or an error``."""


def misfit(leaf: object, value: object) -> str | None:
    """Return an error message if a saved value has the wrong shape or dtype for a state tensor, else None."""
    if not isinstance(leaf, Tensor) or not isinstance(value, Tensor) or value.shape != leaf.shape:
        found, expected = (
            f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in (value, leaf)
        )
        return f"is {found}, expected {expected}"
    # Eight-bit values are codes of quantized state, which are not numbers and have no meaning in another dtype.
    if value.dtype != leaf.dtype and 1 in (value.dtype.itemsize, leaf.dtype.itemsize):
        return f"holds codes of {value.dtype}, expected {leaf.dtype}"
    return None if widens(value.dtype, leaf.dtype) else f"would narrow from {value.dtype} to {leaf.dtype}"


def on_this_rank(leaf: Any, value: Any) -> Tensor | str:
    """Return this rank's part of a saved tensor, sharded like the state tensor ``leaf``, or an error message."""
    if isinstance(leaf, IntervalTensor) and not is_dtensor(value):
        own = leaf.piece
        if not isinstance(value, IntervalTensor):
            return value.reshape(-1)[own.start : own.stop]
        if (own.start, own.stop) == (value.piece.start, value.piece.stop):
            return value.piece.data
    elif is_dtensor(leaf) and not isinstance(value, IntervalTensor):
        if not is_dtensor(value):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value.to(leaf.device), leaf.device_mesh, leaf.placements, src_data_rank=None)
        if value.device_mesh == leaf.device_mesh and value.placements == leaf.placements:
            return shard_error(value, leaf.device_mesh) or local_of(value)
    elif not is_dtensor(value) and not isinstance(value, IntervalTensor):
        return value
    found, expected = (
        f"{x.placements} on {x.device_mesh}"
        if is_dtensor(x)
        else repr(x)
        if isinstance(x, IntervalTensor)
        else "a plain tensor"
        for x in (value, leaf)
    )
    return (
        f"is placed as {found}, here as {expected}: load through torch.distributed.checkpoint or muonfx.checkpoint, "
        "which move values between layouts"
    )


def shard_error(value: DTensor, mesh: DeviceMesh) -> str | None:
    """Return an error message if a loaded DTensor is the shard of a rank at another mesh position, else None."""
    # A mesh is saved with the coordinates of the rank that saves it, and keeps them when it is loaded.
    sharded = [dim for dim, placement in enumerate(value.placements) if not placement.is_replicate()]
    theirs, ours = value.device_mesh.get_coordinate(), mesh.get_coordinate()
    if theirs == ours or (theirs and ours and all(theirs[dim] == ours[dim] for dim in sharded)):
        return None
    there, here = ("no position" if at is None else f"position {tuple(at)}" for at in (theirs, ours))
    return f"is the shard of the rank at {there} of the mesh, expected {here}: load the state that this rank saved"
