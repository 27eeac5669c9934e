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
    """Return a process group of exactly the ranks of all meshes. `ranks_of` maps a mesh to its global ranks.

    A group that exists is preferred, because a new one takes memory and time: for one mesh of ranks 0 and 1 of four,
    its own group is returned; for two meshes of ranks (0, 1) and (2, 3), the group of all ranks.
    """
    ranks = sorted(set().union(*ranks_of.values()))
    # 1. The group of all ranks.
    if ranks == list(range(dist.get_world_size())):
        world = dist.group.WORLD
        assert world is not None
        return world
    # 2. The group of a mesh with these ranks. A mesh with several dims has a group for each dim; flattened, it has one.
    for mesh, ranks_of_mesh in ranks_of.items():
        if list(ranks_of_mesh) == ranks:  # this mesh has all ranks of all meshes
            return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    # 3. A new group, which ranks outside the meshes do not create.
    group = dist.new_group(ranks, use_local_synchronization=True)
    if not isinstance(group, dist.ProcessGroup):
        raise ShardingError(f"this process is not among the ranks {ranks} of the parameters' meshes")
    return group


def cuts_on_meshes(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    ranks_of: Mapping[DeviceMesh, tuple[int, ...]],
    group: dist.ProcessGroup,
) -> tuple[dict[str, Cut], tuple[str, ...]]:
    """Return the partition of each parameter by name, and the names of parameters with different meshes on ranks.

    If the meshes have different ranks, a parameter may have the mesh of ranks 0 and 2 on these two ranks, and the mesh
    of ranks 1 and 3 on the other two. All ranks then call this together.

    Args:
        specs: the shapes and dtypes of all parameters.
        dtensors: the mesh and the placements of each parameter that is a DTensor.
        ranks_of: for each mesh, the global ranks on it.
        group: the ranks of all meshes.
    """
    # 1. The coordinates of each rank on the meshes that this rank has.
    ranks = dist.get_process_group_ranks(group)
    coordinates_on = {mesh: MeshCoordinates.of(mesh, ranks) for mesh in ranks_of}
    different_meshes: set[DeviceMesh] = set()
    have_different_ranks = len(set(ranks_of.values())) > 1
    if have_different_ranks:  # this rank has its own meshes only, so all ranks send theirs
        placements = _digest_of_placements(specs, dtensors, coordinates_on)
        coordinates_on, different_meshes = _coordinates_of_all_ranks(placements, ranks_of, coordinates_on, group)
    # 2. The partitions that follow from the coordinates.
    cuts = cuts_of_dtensors(specs, dtensors, coordinates_on, len(ranks))
    on_several_meshes = [name for name, dtensor in dtensors.items() if dtensor.mesh in different_meshes]
    return cuts, tuple(on_several_meshes)


class _Message(NamedTuple):
    """The description of its parameters and meshes that a rank sends to the others."""

    placements: str
    """The digest of the parameters, of their placements, and of the shapes of the meshes."""
    meshes: list[tuple[str, tuple[int, ...] | None]]
    """For each mesh, the digest of the ranks on it, and the coordinates of the sending rank."""


def _coordinates_of_all_ranks(
    placements: str,
    ranks_of: Mapping[DeviceMesh, tuple[int, ...]],
    coordinates_on: dict[DeviceMesh, MeshCoordinates],
    group: dist.ProcessGroup,
) -> tuple[dict[DeviceMesh, MeshCoordinates], set[DeviceMesh]]:
    """Return the coordinates of all ranks on this rank's meshes, and the meshes that differ on other ranks.

    A rank has coordinates on its own meshes only, so all ranks send theirs. The first mesh of a rank corresponds to the
    first meshes of the other ranks, and so on. If anything but the ranks on these meshes differs between ranks (their
    `placements`, a digest), return `coordinates_on` unchanged.
    """
    # 1. All ranks send their coordinates on their meshes.
    rank = dist.get_rank(group)
    meshes = [(digest(ranks), coordinates_on[mesh].coordinates[rank]) for mesh, ranks in ranks_of.items()]
    wait_for_all(group, CONSTRUCTING)  # so that a rank that fails before this is reported, and not waited for
    messages: list[_Message] = all_objects(_Message(placements, meshes), group, "finding out who holds what")
    if any(message.placements != placements for message in messages):
        return coordinates_on, set()
    # 2. Each rank has, on each mesh, the coordinates that it sent. A mesh differs if it has other ranks elsewhere.
    all_coordinates: dict[DeviceMesh, MeshCoordinates] = {}
    different_meshes: set[DeviceMesh] = set()
    for index, mesh in enumerate(ranks_of):
        digests, coordinates = zip(*[message.meshes[index] for message in messages], strict=True)
        all_coordinates[mesh] = MeshCoordinates(coordinates_on[mesh].shape, coordinates)
        if len(set(digests)) > 1:
            different_meshes.add(mesh)
    return all_coordinates, different_meshes


def _digest_of_placements(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    coordinates_on: Mapping[DeviceMesh, MeshCoordinates],
) -> str:
    """Return a hash of all parameters, of their placements, and of the shapes of the meshes.

    Ranks compare it to find out if only the ranks on their meshes differ. A mesh is therefore identified by its index
    among the meshes: where one rank has the mesh of ranks 0 and 2, another has the mesh of ranks 1 and 3.
    """
    # The shape of each mesh, and then for each parameter its shape and dtype, its mesh by number, and its placements.
    meshes = list(coordinates_on)
    values: list[object] = [coordinates.shape for coordinates in coordinates_on.values()]
    for name, spec in specs.items():
        values.append((name, spec))
        if name in dtensors:
            index_of_mesh = meshes.index(dtensors[name].mesh)
            values.append((index_of_mesh, dtensors[name].placements))
    return digest(values)
