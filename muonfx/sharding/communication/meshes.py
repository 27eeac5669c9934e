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
        if list(ranks_of_mesh) == ranks:
            return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    group = dist.new_group(ranks, use_local_synchronization=True)
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
    if len(set(ranks_of.values())) > 1:
        on_several_meshes = _cuts_on_several_meshes(specs, dtensors, ranks_of, coordinates_on, group)
        if on_several_meshes is not None:
            return on_several_meshes
    return CutsOnMeshes(cuts_of_dtensors(specs, dtensors, coordinates_on, len(ranks)), ())


class _MeshOnRank(NamedTuple):
    """The description of one mesh that a rank sends to the others."""

    ranks: str
    """The digest of the ranks on the mesh."""
    coordinates: tuple[int, ...] | None
    """The coordinates of the sending rank on the mesh."""


class _Message(NamedTuple):
    """The description of its parameters and meshes that a rank sends to the others."""

    facts: str
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

    The first mesh of a rank takes the place of the first meshes of the others, and so on. Return None if anything but
    the ranks on these meshes differs between ranks.
    """
    all_meshes = list(ranks_of)
    facts: list[object] = []  # they must be equal on all ranks
    for name, spec in specs.items():
        facts.append((name, spec))
        if name in dtensors:
            facts.append((all_meshes.index(dtensors[name].mesh), dtensors[name].placements))
    meshes: list[_MeshOnRank] = []
    for mesh, ranks in ranks_of.items():
        facts.append(coordinates_on[mesh].shape)
        meshes.append(_MeshOnRank(digest(ranks), coordinates_on[mesh].coordinates[dist.get_rank(group)]))
    wait_for_all(group, CONSTRUCTING)  # so that a rank that fails before this is reported, and not waited for
    messages: list[_Message] = all_objects(_Message(digest(facts), meshes), group, "finding out who holds what")
    if any(message.facts != messages[0].facts for message in messages):
        return None
    coordinates_of_all: dict[DeviceMesh, MeshCoordinates] = {}
    different_meshes: set[DeviceMesh] = set()
    for number, mesh in enumerate(ranks_of):
        meshes_of_ranks = [message.meshes[number] for message in messages]
        coordinates = [on_rank.coordinates for on_rank in meshes_of_ranks]
        coordinates_of_all[mesh] = MeshCoordinates(coordinates_on[mesh].shape, coordinates)
        if any(on_rank.ranks != meshes_of_ranks[0].ranks for on_rank in meshes_of_ranks):
            different_meshes.add(mesh)
    cuts = cuts_of_dtensors(specs, dtensors, coordinates_of_all, len(messages))
    return CutsOnMeshes(cuts, tuple([name for name in dtensors if dtensors[name].mesh in different_meshes]))
