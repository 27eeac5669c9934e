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
        raise ShardingError(
            f"this process is not among the ranks {ranks} of the parameters' meshes"
        )
    return group


def cuts_on_meshes(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    ranks_of: Mapping[DeviceMesh, tuple[int, ...]],
    group: dist.ProcessGroup,
) -> tuple[dict[str, Cut], tuple[str, ...]]:
    """Return the partition of each parameter by name, and the names of parameters with different meshes on ranks.

    If the meshes have different ranks, all ranks call this together. On four ranks, "w" may be split over the mesh of
    ranks 0 and 2 on these two ranks, and over the mesh of ranks 1 and 3 on the other two. Ranks 0 and 1 then hold its
    first part, ranks 2 and 3 its second part, and the names are ``("w",)``.

    Args:
        specs: the shapes and dtypes of all parameters.
        dtensors: the mesh and the placements of each parameter that is a DTensor.
        ranks_of: for each mesh, the global ranks on it.
        group: the ranks of all meshes.
    """
    ranks = dist.get_process_group_ranks(group)
    coordinates_on = {mesh: MeshCoordinates.of(mesh, ranks) for mesh in ranks_of}
    meshes_that_differ: list[DeviceMesh] = []
    have_different_ranks = len(set(ranks_of.values())) > 1
    if have_different_ranks:  # another rank may have a mesh that this rank does not have
        meshes_of_ranks = _meshes_of_all_ranks(specs, dtensors, ranks_of, coordinates_on, group)
        for mesh, mesh_of_each_rank in meshes_of_ranks.items():
            # In the example, ranks 1 and 3 are not on the mesh of ranks 0 and 2. They have the coordinates 0 and 1 on
            # their own mesh, so that the four ranks have the coordinates 0, 0, 1 and 1.
            coordinates = [mesh_of_rank.coordinates for mesh_of_rank in mesh_of_each_rank]
            coordinates_on[mesh] = MeshCoordinates(tuple(mesh.shape), coordinates)
            digests = {mesh_of_rank.digest_of_ranks for mesh_of_rank in mesh_of_each_rank}
            if len(digests) > 1:
                meshes_that_differ.append(mesh)
    cuts = cuts_of_dtensors(specs, dtensors, coordinates_on, len(ranks))
    on_several_meshes = [
        name for name, dtensor in dtensors.items() if dtensor.mesh in meshes_that_differ
    ]
    return cuts, tuple(on_several_meshes)


class _MeshOfRank(NamedTuple):
    """One mesh of a rank, as the rank describes it to the others."""

    digest_of_ranks: str
    """A hash of the ranks on the mesh, which may be many."""
    coordinates: tuple[int, ...] | None
    """The coordinates of this rank on the mesh; None if it is not on it."""


def _meshes_of_all_ranks(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    ranks_of: Mapping[DeviceMesh, tuple[int, ...]],
    coordinates_on: Mapping[DeviceMesh, MeshCoordinates],
    group: dist.ProcessGroup,
) -> dict[DeviceMesh, list[_MeshOfRank]]:
    """Return, for each mesh of this rank, the mesh that each rank has in its place. All ranks call this together.

    The first mesh of a rank is in the place of the first mesh of any other, and so on. For example, "w" is split over
    the mesh of ranks 0 and 2 on these two ranks, and over the mesh of ranks 1 and 3 on the other two. Each rank then
    has one mesh, and the result is a list of four for it: the digests of the ranks 0 and 2, 1 and 3, 0 and 2, and 1 and
    3, with the coordinates (0,), (0,), (1,) and (1,).

    `cuts_on_meshes` describes the arguments; ``coordinates_on`` has the coordinates of all ranks on each mesh. The
    result is empty if the ranks have different parameters: the binding of a transform to the layout is then an error
    later.
    """
    # 1. A digest of everything that must be equal on all ranks, and the meshes of this rank.
    description = digest(_description(specs, dtensors, coordinates_on))
    rank = dist.get_rank(group)
    meshes_of_this_rank: list[_MeshOfRank] = []
    for mesh, ranks in ranks_of.items():
        meshes_of_this_rank.append(
            _MeshOfRank(digest(ranks), coordinates_on[mesh].coordinates[rank])
        )
    # 2. The same of all ranks. If a rank has failed before this, its error is raised here.
    wait_for_all(group, CONSTRUCTING)
    messages = all_objects((description, meshes_of_this_rank), group, "finding out who holds what")
    have_different_models = any(
        other_description != description for other_description, _ in messages
    )
    if have_different_models:
        return {}
    meshes_of_ranks: dict[DeviceMesh, list[_MeshOfRank]] = {}
    for index, mesh in enumerate(ranks_of):
        meshes_of_ranks[mesh] = [meshes_of_rank[index] for _, meshes_of_rank in messages]
    return meshes_of_ranks


def _description(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    coordinates_on: Mapping[DeviceMesh, MeshCoordinates],
) -> list[object]:
    """Return values that must be equal on all ranks: the shapes of the meshes, and how each parameter is split.

    For "w" on a mesh of two ranks, they are ``[(2,), ("w", Spec(...)), (0, (Shard(dim=0),))]``. The 0 is the index of
    the mesh. The ranks on the mesh are not among the values, because they may differ between ranks.
    """
    meshes = list(coordinates_on)
    values: list[object] = [coordinates.shape for coordinates in coordinates_on.values()]
    for name, spec in specs.items():
        values.append((name, spec))
        if name in dtensors:
            index_of_mesh = meshes.index(dtensors[name].mesh)
            values.append((index_of_mesh, dtensors[name].placements))
    return values
