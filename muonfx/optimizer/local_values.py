"""Choose this rank's part of a saved tensor, or explain why it does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from muonfx.sharding.shards.dtensors import is_dtensor, local_of
from muonfx.sharding.shards.flat_shard import FlatShardTensor
from muonfx.tree.dtypes import widens

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor


class Load(NamedTuple):
    """Values to copy into a leaf of the state."""

    leaf_index: int
    """The index of the leaf in the state."""
    value: Tensor
    """The values, of this rank or of the whole leaf."""


class Misfit(ValueError):
    """An error for a value that does not fit a leaf of the state. The message continues the name of the leaf."""


def apart_from(tensors: Iterable[object], loads: Iterable[Load]) -> list[Load]:
    """Clone each value that shares memory with one of ``tensors``, which the loads will overwrite.

    For example, the loads exchange the states ``a`` and ``b``. The copy of ``b`` into ``a`` overwrites ``a``, so the
    value that is copied into ``b`` afterwards must be a clone of the former ``a``.
    """
    addresses = {_address(tensor) for tensor in tensors if isinstance(tensor, Tensor)}
    separate: list[Load] = []
    for load in loads:
        # Its values could be overwritten before they are copied.
        if _address(load.value) in addresses:
            load = load._replace(value=load.value.clone())
        separate.append(load)
    return separate


def _address(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor, or of the local part of a DTensor."""
    return local_of(tensor).untyped_storage().data_ptr()


def require_fit(leaf: object, value: object) -> None:
    """Raise `Misfit` if a saved value cannot be copied into a tensor of the state without a loss.

    The shapes must be equal, and the value must not be on the meta device. A value in bfloat16 fits a leaf in float32,
    and a value in float32 does not fit bfloat16.
    """
    # Both must be tensors of one shape. Either may be None, as on a rank that has no part of the state.
    if not isinstance(leaf, Tensor) or not isinstance(value, Tensor) or value.shape != leaf.shape:
        raise Misfit(f"is {_shape_text(value)}, expected {_shape_text(leaf)}")
    if local_of(value).is_meta:
        raise Misfit("is on the meta device, expected a tensor with values")
    # Eight-bit values are codes of quantized state, which are not numbers and have no meaning in another dtype.
    is_codes = value.dtype.itemsize == 1 or leaf.dtype.itemsize == 1
    if is_codes and value.dtype != leaf.dtype:
        raise Misfit(f"holds codes of {value.dtype}, expected {leaf.dtype}")
    if not widens(value.dtype, leaf.dtype):
        raise Misfit(f"would narrow from {value.dtype} to {leaf.dtype}")


def _shape_text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)


def on_this_rank(leaf: Any, value: Any) -> Tensor:
    """Return this rank's part of a saved tensor: the values to copy into this rank's part of ``leaf``.

    ``leaf`` is a tensor of the state: plain, a DTensor, or an interval of a flattened tensor. The saved tensor must be
    whole, or sharded in the same way; otherwise raise `Misfit`. For example, if the shard of ``leaf`` has the elements
    2 to 4 of the flattened tensor, the result for the whole value ``[[0, 1], [2, 3]]`` is ``[2, 3]``.
    """
    local_value: Tensor | None = None
    if isinstance(leaf, FlatShardTensor):
        local_value = _in_flat_shard(leaf, value)
    elif is_dtensor(leaf):
        local_value = _in_dtensor(leaf, value)
    elif is_whole(value):  # the leaf is a plain tensor, which this rank has in full
        local_value = value
    if local_value is not None:
        return local_value
    raise Misfit(
        f"is placed as {_placement_text(value)}, here as {_placement_text(leaf)}: load through "
        "torch.distributed.checkpoint or muonfx.checkpoint, which move values between layouts"
    )


def is_whole(value: object) -> bool:
    """Return True if a saved tensor has all elements, so that it is neither a DTensor nor an interval of a tensor."""
    return not is_dtensor(value) and not isinstance(value, FlatShardTensor)


def _in_flat_shard(leaf: FlatShardTensor, value: Any) -> Tensor | None:
    """Return the part of a saved value that is in the interval of ``leaf``; None if it is sharded in another way.

    For example, if the interval is 2 to 4, the result for the whole value ``[[0, 1], [2, 3]]`` is ``[2, 3]``.
    """
    shard = leaf.shard
    if is_whole(value):
        return value.reshape(-1)[shard.start : shard.stop]
    # An interval, too: it fits only if it has the same ends.
    if isinstance(value, FlatShardTensor) and (value.shard.start, value.shard.stop) == (
        shard.start,
        shard.stop,
    ):
        return value.shard.data
    return None


def _in_dtensor(leaf: DTensor, value: Any) -> Tensor | None:
    """Return this rank's shard of a saved value, to load it into a DTensor; None if it is sharded in another way.

    For example, if ``leaf`` is sharded by rows over two ranks, the second rank has the lower half of the rows.
    """
    if is_whole(value):
        value = _sharded_like(leaf, value)
    if not is_dtensor(value):  # an interval of the flattened tensor
        return None
    # The same ranks (the mesh), and the same dims (the placements, such as Shard(0) for rows).
    is_sharded_alike = value.device_mesh == leaf.device_mesh and value.placements == leaf.placements
    if not is_sharded_alike:
        return None
    require_same_position(value, leaf.device_mesh)
    return local_of(value)


def _sharded_like(leaf: DTensor, value: Tensor) -> DTensor:
    """Return a whole tensor as a DTensor like ``leaf``."""
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: each rank cuts its shard out of its own copy, without communication.
    return distribute_tensor(
        value.to(leaf.device), leaf.device_mesh, leaf.placements, src_data_rank=None
    )


def _placement_text(value: Any) -> str:
    """Return how a tensor is sharded, as text: "a plain tensor" if it is not."""
    if is_dtensor(value):
        return f"{value.placements} on {value.device_mesh}"
    if isinstance(value, FlatShardTensor):
        return repr(value)
    return "a plain tensor"


def require_same_position(value: DTensor, mesh: DeviceMesh) -> None:
    """Raise `Misfit` if a loaded DTensor is the shard of another rank, as if rank 0 loads the file of rank 1.

    The mesh (the ranks of a DTensor) in the file keeps the coordinates of the rank that saved it. They are compared
    with the coordinates of this process in ``mesh``.
    """
    # A position is [0, 1], for example, or None for a rank that is not in the mesh.
    saved_position = value.device_mesh.get_coordinate()
    position = mesh.get_coordinate()
    has_same_shard = saved_position == position
    if saved_position and position:
        # Compare sharded dims only: if the first of two dims is replicated, ranks [0, 1] and [1, 1] have one shard.
        sharded_dims = [
            dim for dim, placement in enumerate(value.placements) if not placement.is_replicate()
        ]
        has_same_shard = all(saved_position[dim] == position[dim] for dim in sharded_dims)
    if not has_same_shard:
        raise Misfit(
            f"is the shard of the rank at {_position_text(saved_position)} of the mesh, expected "
            f"{_position_text(position)}: load the state that this rank saved"
        )


def _position_text(position: Sequence[int] | None) -> str:
    """Return "position (0, 1)" for the coordinates of a rank, and "no position" for a rank that is not in the mesh."""
    return "no position" if position is None else f"position {tuple(position)}"
