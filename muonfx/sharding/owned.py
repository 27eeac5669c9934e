"""State that lies at owners, as DTensors: at one rank, on a mesh of that rank alone; at several, as the parameter lies.

torch knows DTensors on a part of the ranks: elsewhere such a one has no elements, and torch.distributed.checkpoint
neither asks nor gives those ranks anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx.sharding.dtensors import dtensor_of
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.shares import Share

__all__ = ["at_owner", "like_parameter"]


def at_owner(layout: Layout, owner: int, local: Tensor | None, like: Tensor) -> Any:
    """A tensor that one rank has, as a DTensor on the mesh of this rank.

    Args:
        layout: whose ranks are meant.
        owner: the rank that has it.
        local: its values, at the owner; elsewhere None.
        like: a meta tensor of its shape and dtype.
    """
    from torch.distributed.tensor import Replicate

    mesh = _mesh_of(layout, owner)
    if local is None:
        local = torch.empty(0, dtype=like.dtype, device=_device(mesh.device_type))
    else:
        local = local.view(like.shape)
    return _dtensor(local, mesh, [Replicate()], like)


def like_parameter(layout: Layout, name: str, shares: Sequence[Share], local: Tensor | None, like: Tensor) -> Any:
    """State that several ranks own, as a DTensor on the parameter's mesh; or None.

    That can be where every rank owns all, and where every rank owns of a stack just what it holds, as of experts that
    are sharded by the first dim.

    Args:
        layout: who holds what.
        name: of the parameter.
        shares: of the parameter, of all owners.
        local: this rank's state.
        like: a meta tensor of the whole state's shape and dtype.
    """
    from torch.distributed.tensor import Replicate

    spec = layout.dtensors[name]
    if all(share.owner is None for share in shares):
        return _dtensor(local, spec.mesh, [Replicate()] * spec.mesh.ndim, like)
    if not _own_what_they_hold(layout, name, shares, like):
        return None
    if local is None:
        local = torch.empty(0, dtype=like.dtype, device=_device(spec.mesh.device_type))
    return _dtensor(local.reshape(-1, *like.shape[1:]), spec.mesh, spec.placements, like)


def _own_what_they_hold(layout: Layout, name: str, shares: Sequence[Share], like: Tensor) -> bool:
    """True if every rank owns of a stack's first dim just the range that it holds, and the state has this dim."""
    spec = layout.dtensors[name]
    if like.shape[:1] != spec.shape[:1] or any(getattr(placement, "dim", 0) for placement in spec.placements):
        return False
    by_owner = {share.owner: share for share in shares}
    for rank in range(layout.size):
        piece, share = layout.piece(name, rank), by_owner.get(rank)
        if piece.boxes != (() if share is None else share.piece.boxes):
            return False
    return len(by_owner) == len(shares)


def _dtensor(local: Tensor | None, mesh: Any, placements: Sequence[Any], like: Tensor) -> Any:
    assert local is not None
    return dtensor_of(local, mesh, placements, like.shape, like.stride())


def _mesh_of(layout: Layout, owner: int) -> Any:
    """The mesh of one rank; it has nobody to talk to, so no process group is made for it."""
    from torch.distributed.device_mesh import DeviceMesh

    meshes: dict[int, Any] = layout.derived.setdefault("meshes of owners", {})
    if owner not in meshes:
        kind = next(iter(layout.dtensors.values())).mesh.device_type
        meshes[owner] = DeviceMesh(kind, [_ranks(layout)[owner]], _init_backend=False)
    return meshes[owner]


def _ranks(layout: Layout) -> list[int]:
    """The layout's ranks, as the whole world counts them."""
    assert layout.group is not None
    return dist.get_process_group_ranks(layout.group)


def _device(kind: str) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
