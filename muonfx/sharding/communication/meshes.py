"""Find the process group of DTensors, and their partition if a parameter has different meshes on different ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

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
        if list(ranks_of_mesh) == ranks:  # a mesh with several dims has a group for each: flattened, it has one
            return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    group = dist.new_group(ranks, use_local_synchronization=True)  # ranks outside the meshes do not call this
    if not isinstance(group, dist.ProcessGroup):
        raise ShardingError(f"this process is not among the ranks {ranks} of the parameters' meshes")
    return group


class CutsOnMeshes(NamedTuple):
    """How DTensors are partitioned over all ranks."""

    cuts: dict[str, Cut]
    """The partition of each parameter, by name."""
    on_several_meshes: tuple[str, ...]
    """The names of the parameters that have different meshes on different ranks."""


def cuts_on_meshes(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    ranks_of: Mapping[DeviceMesh, tuple[int, ...]],
    group: dist.ProcessGroup,
) -> CutsOnMeshes:
    """Return the partition of each parameter. If the meshes have different ranks, all ranks call this together."""
    ranks = dist.get_process_group_ranks(group)
    coordinates_on = {mesh: MeshCoordinates.of(mesh, ranks) for mesh in ranks_of}
    have_different_ranks = len(set(ranks_of.values())) > 1
    if have_different_ranks:
        cuts_on_several = _cuts_on_several_meshes(specs, dtensors, ranks_of, coordinates_on, group)
        if cuts_on_several is not None:
            return cuts_on_several
    cuts = cuts_of_dtensors(specs, dtensors, coordinates_on, len(ranks))
    return CutsOnMeshes(cuts, on_several_meshes=())


class _MeshOnRank(NamedTuple):
    """The description of one mesh that a rank sends to the others."""

    ranks: str
    """The digest of the ranks on the mesh."""
    coordinates: tuple[int, ...] | None
    """The coordinates of the sending rank on the mesh."""


class _Message(NamedTuple):
    """The description of its parameters and meshes that a rank sends to the others."""

    placements: str
    """The digest of the parameters, of their placements, and of the shapes of the meshes."""
    meshes: list[_MeshOnRank]


def _cuts_on_several_meshes(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    ranks_of: Mapping[DeviceMesh, tuple[int, ...]],
    coordinates_on: Mapping[DeviceMesh, MeshCoordinates],
    group: dist.ProcessGroup,
) -> CutsOnMeshes | None:
    """Return each parameter's partition, when ranks may have different meshes for it.

    For example, a parameter has the mesh of ranks 0 and 2 on these two ranks, and the mesh of ranks 1 and 3 on the
    other two. A rank has coordinates on its own meshes only, so all ranks send theirs. The first mesh of a rank
    corresponds to the first meshes of the other ranks, and so on. Return None if anything but the ranks on these meshes
    differs between ranks.
    """
    # 1. All ranks send their coordinates on their meshes.
    rank = dist.get_rank(group)
    message = _Message(_digest_of_placements(specs, dtensors, coordinates_on), meshes=[])
    for mesh, ranks in ranks_of.items():
        message.meshes.append(_MeshOnRank(digest(ranks), coordinates_on[mesh].coordinates[rank]))
    wait_for_all(group, CONSTRUCTING)  # so that a rank that fails before this is reported, and not waited for
    messages: list[_Message] = all_objects(message, group, "finding out who holds what")
    if any(received.placements != message.placements for received in messages):
        return None
    # 2. Each rank has, on each mesh, the coordinates that it sent.
    coordinates_of_all_ranks: dict[DeviceMesh, MeshCoordinates] = {}
    different_meshes: set[DeviceMesh] = set()
    for index, mesh in enumerate(ranks_of):
        mesh_on_each_rank = [received.meshes[index] for received in messages]
        coordinates = [mesh_on_rank.coordinates for mesh_on_rank in mesh_on_each_rank]
        coordinates_of_all_ranks[mesh] = MeshCoordinates(coordinates_on[mesh].shape, coordinates)
        if len({mesh_on_rank.ranks for mesh_on_rank in mesh_on_each_rank}) > 1:
            different_meshes.add(mesh)
    cuts = cuts_of_dtensors(specs, dtensors, coordinates_of_all_ranks, len(messages))
    on_several_meshes = [name for name, dtensor in dtensors.items() if dtensor.mesh in different_meshes]
    return CutsOnMeshes(cuts, tuple(on_several_meshes))


def _digest_of_placements(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    coordinates_on: Mapping[DeviceMesh, MeshCoordinates],
) -> str:
    """Return a hash of all parameters, of their placements, and of the shapes of the meshes.

    A mesh is identified by its index among the meshes, because the ranks on it may differ from rank to rank: where one
    rank has the mesh of ranks 0 and 2, another has the mesh of ranks 1 and 3.
    """
    meshes = list(coordinates_on)
    values: list[object] = [coordinates.shape for coordinates in coordinates_on.values()]
    for name, spec in specs.items():
        values.append((name, spec))
        if name in dtensors:
            index_of_mesh = meshes.index(dtensors[name].mesh)
            values.append((index_of_mesh, dtensors[name].placements))
    return digest(values)
