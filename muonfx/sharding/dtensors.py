"""DTensors: told from other tensors, made of local tensors, and taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["as_dtensor", "dtensor_of", "dtensor_with", "is_dtensor", "local_of"]


def as_dtensor(local: Tensor, spec: Any) -> Any:
    """A local tensor as the DTensor that a spec describes; a DTensor as it is."""
    if is_dtensor(local):
        return local
    return dtensor_of(local, spec.mesh, spec.placements, spec.shape, spec.stride)


def dtensor_with(local: Tensor, spec: Any) -> Any:
    """A local tensor as a DTensor with a spec that is known to fit it."""
    from torch.distributed.tensor import DTensor

    made: Any = DTensor
    return made(local, spec, requires_grad=False)


def dtensor_of(
    local: Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int], stride: tuple[int, ...]
) -> Any:
    """A local tensor, where it lies, as a DTensor of a global shape."""
    from torch.distributed.tensor import DTensor

    if local.device.type in (mesh.device_type, "meta"):
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    # Offloaded: from_local would bring it to the mesh's devices.
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    about = TensorMeta(torch.Size(shape), stride, local.dtype)
    return dtensor_with(local, DTensorSpec(mesh, tuple(placements), tensor_meta=about))


def local_of(leaf: Any) -> Any:
    """The local tensor of a DTensor; any other leaf as it is."""
    return leaf._local_tensor if is_dtensor(leaf) else leaf


def is_dtensor(leaf: Any) -> bool:
    """True if a leaf is a DTensor; asks without importing what nobody has used."""
    kind = type(leaf)
    return kind is not Tensor and kind is not Parameter and isinstance(leaf, Tensor) and hasattr(leaf, "_local_tensor")
