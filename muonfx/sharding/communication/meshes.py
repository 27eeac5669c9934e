"""Find the process group of DTensors, and their partition if a parameter has different meshes on different ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from muonfx.sharding.communication.messages import all_objects
from muonfx.sharding.communication.waiting import CONSTRUCTING, wait_for_all
from muonfx.sharding.digests import digest
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.cut import Cut, MeshCoordinates, cuts_of_dtensors
from muonfx.tree import Spec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def group_of_meshes(ranks_of: Mapping[DeviceMesh, tuple[int, ...]]) -> dist.ProcessGroup:
    """Return a process group of exactly the ranks of all meshes. `ranks_of` maps a mesh to its global ranks."""
    ranks = sorted(set().union(*ranks_of.values()))
    if ranks == list(range(dist.get_world_size())):
        world = dist.group.WORLD
        assert world is not None
        return world
    for mesh, ranks_of_mesh in ranks_of.items():
        if list(ranks_of_mesh) == ranks:
            return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    group = dist.new_group(ranks, use_local_synchronization=True)
    if not isinstance(group, dist.ProcessGroup):
        raise ShardingError(f"this process is not among the ranks {ranks} of the parameters' meshes")
    return group


def cuts_on_several_meshes(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    ranks_of: Mapping[DeviceMesh, tuple[int, ...]],
    coordinates_on: Mapping[DeviceMesh, MeshCoordinates],
    group: dist.ProcessGroup,
) -> tuple[dict[str, Cut], tuple[str, ...]] | None:
    """Return each parameter's partition by name, when ranks may have different device meshes for it.

    Also return the names of the parameters whose meshes differ between ranks. Return None if anything else differs.
    """
    rank = dist.get_rank(group)
    number_of = {mesh: number for number, mesh in enumerate(ranks_of)}
    parameters: list[object] = []
    for name, spec in specs.items():
        dtensor = dtensors.get(name)
        placed = None if dtensor is None else (number_of[dtensor.mesh], dtensor.placements)
        parameters.append((name, spec, placed))
    shapes: list[tuple[int, ...]] = []
    meshes: list[tuple[str, tuple[int, ...] | None]] = []  # of each mesh, a digest of its ranks, and our coordinates
    for mesh, ranks in ranks_of.items():
        shapes.append(coordinates_on[mesh].shape)
        meshes.append((digest(ranks), coordinates_on[mesh].coordinates[rank]))
    wait_for_all(group, CONSTRUCTING)  # so that a rank that fails before this is reported, and not waited for
    message = digest((parameters, shapes)), meshes
    messages = all_objects(message, group, "finding out who holds what")
    if len({parameters_digest for parameters_digest, _ in messages}) > 1:
        return None
    coordinates_of_all: dict[DeviceMesh, MeshCoordinates] = {}
    different_meshes: set[DeviceMesh] = set()
    for number, mesh in enumerate(ranks_of):
        of_ranks = [meshes_of_rank[number] for _, meshes_of_rank in messages]
        coordinates_of_all[mesh] = MeshCoordinates(shapes[number], [coordinates for _, coordinates in of_ranks])
        if len({ranks_digest for ranks_digest, _ in of_ranks}) > 1:
            different_meshes.add(mesh)
    on_several_meshes = [name for name, dtensor in dtensors.items() if dtensor.mesh in different_meshes]
    return cuts_of_dtensors(specs, dtensors, coordinates_of_all, len(messages)), tuple(on_several_meshes)
