"""Functions that build layouts: replicated parameters, DTensors, ZeRO partitions, and flat buffers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from muonfx import tree
from muonfx.core import Transform
from muonfx.internal.arguments import did_you_mean, plain_arguments
from muonfx.internal.display import format_list
from muonfx.sharding.communication.messages import all_objects
from muonfx.sharding.communication.waiting import CONSTRUCTING, wait_for_all
from muonfx.sharding.digests import digest
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.balance import assign_by_bytes
from muonfx.sharding.plan.cost import costs_of
from muonfx.sharding.shards.cut import (
    Cut,
    Intervals,
    OnMesh,
    Places,
    Whole,
    equal_intervals,
    equal_parts,
    one_behind_another,
)
from muonfx.sharding.shards.dtensors import is_dtensor
from muonfx.sharding.shards.table import specs_of
from muonfx.tree import PyTree, Spec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


Group = dist.ProcessGroup | int | None
"""A process group; or None, for the default group; or a number of ranks, for a layout without processes."""


def replicated(params: PyTree = None, group: Group = None) -> Layout:
    """Build the layout in which every rank holds every parameter, as under `DistributedDataParallel`.

    The gradients passed to a transform must already be averaged over the ranks. By default a matrix is orthogonalized
    by one rank or by every rank, whichever is faster; see the argument ``replicas`` of `sharded`.

    Args:
        params: the parameters, on any device; only their names, shapes and dtypes are read.
        group: the process group. None: the default group. An int: a number of ranks, to inspect a layout without
            processes.

    Raises:
        TypeError: ``params`` is missing, or a group was passed in its place.
        ShardingError: ``group`` is None, and torch.distributed is not initialized.

    >>> replicated({"w": torch.zeros(2)}, 4)
    <replicated of 1 parameters over 4 ranks>
    """
    if params is None or isinstance(params, int | dist.ProcessGroup):
        raise TypeError(
            f"params: found {params!r}, expected the parameters: write replicated(params) or "
            "replicated(params, group), with params=dict(model.named_parameters()) for a model"
        )
    size, rank, process_group = _ranks(group)
    specs = specs_of(params)
    cuts = {shape: Whole(shape, size) for shape in dict.fromkeys(spec.shape for spec in specs.values())}
    pieces = {name: cuts[spec.shape] for name, spec in specs.items()}
    return Layout("replicated", specs, pieces, size, rank, process_group)


Partition = Literal["whole", "flat", "each"]
"""How `zero` partitions the parameters: by whole parameters, as one flat buffer, or each parameter by itself."""


@plain_arguments
def zero(
    params: PyTree,
    group: Group = None,
    *,
    stage: int = 1,
    partition: Partition = "whole",
    tx: Transform | None = None,
) -> Layout:
    """Build a ZeRO layout: the parameters are partitioned over the ranks in one of three ways.

    "whole" assigns each parameter to one rank, so an update needs no exchange of matrices. "flat" concatenates the
    parameters of each dtype and splits the buffer equally, even within a matrix or a row, like FSDP1 and DeepSpeed's
    stages 1 and 2. "each" splits every flattened parameter equally, like DeepSpeed's stage 3; the last part may be
    shorter. For a buffer with padding or with unequal parts, use `flat`.

    Args:
        params: the whole parameters, on any device; only their names, shapes and dtypes are read.
        group: as in `replicated`.
        stage: what the training loop shards: 1 the optimizer's state, 2 also gradients, 3 also parameters. It does
            not change the partition.
        partition: "whole", "flat" or "each".
        tx: for "whole", the transform whose cost is balanced: matrices by their operations, other parameters by
            bytes. None: every parameter of two or more dims counts as a matrix.

    Raises:
        ValueError: ``stage`` or ``partition`` has an unknown value.

    >>> layout = zero({"w": torch.zeros(4, 5), "b": torch.zeros(3)}, 2, partition="flat")
    >>> [layout.position("w", rank).shape for rank in range(2)]
    [(9,), (11,)]
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage: found {stage!r}, expected 1, 2 or 3")
    if partition not in ("whole", "flat", "each"):
        raise ValueError(f"partition: found {partition!r}, expected 'whole', 'flat' or 'each'")
    size, rank, process_group = _ranks(group)
    specs = specs_of(params)
    if partition == "whole":
        costs = costs_of(specs, tx)
        nbytes = [spec.nbytes for spec in specs.values()]
        owners = assign_by_bytes([costs[name] for name in specs], nbytes, size)
        rows = zip(specs.items(), owners, strict=True)
        pieces: dict[str, Cut] = {name: Whole(spec.shape, size, owner) for (name, spec), owner in rows}
    else:
        pieces = equal_intervals(specs, size) if partition == "flat" else equal_parts(specs, size)
    return Layout("zero", specs, pieces, size, rank, process_group, stage, is_flat=True)


@plain_arguments
def flat(
    params: PyTree,
    group: Group = None,
    *,
    cuts: Sequence[int],
    order: Sequence[str] | None = None,
    starts: Mapping[str, int] | None = None,
    stage: int = 1,
) -> Layout:
    """Build the layout of a flat buffer that is split at given positions, such as a training engine's own partition.

    The buffer contains the flattened parameters one after another. Each rank holds one interval of it.

    Args:
        params: the whole parameters; only their names, shapes and dtypes are read.
        group: as in `replicated`.
        cuts: for P ranks, P + 1 ascending positions in the buffer, in elements, from 0. Rank r holds
            ``cuts[r]:cuts[r + 1]``.
        order: the names of the parameters in the order of the buffer. None: the order of ``starts``. Without
            ``starts``, ``params`` must be a flat dict with sorted names, so that the order is unambiguous.
        starts: the position of each parameter's first element in the buffer; gaps are padding. None: no gaps.
        stage: as in `zero`.

    Raises:
        ValueError: ``cuts``, ``order`` or ``starts`` do not place every parameter exactly once; the message says why.

    >>> layout = flat({"a": torch.zeros(2, 2), "b": torch.zeros(6)}, 3, order=["b", "a"], cuts=[0, 4, 9, 10])
    >>> [layout.position("a", rank).numel for rank in range(3)]
    [0, 3, 1]
    """
    size, rank, process_group = _ranks(group)
    specs = specs_of(params)
    order = _order_of_buffer(params, specs, starts) if order is None else list(order)
    if sorted(order) != sorted(specs):
        different = sorted(set(order) ^ set(specs)) or sorted({name for name in order if order.count(name) > 1})
        raise ValueError(
            f"order: found {format_list(different)} missing, unknown or repeated, expected every parameter once"
        )
    if starts is None:
        starts = one_behind_another(specs, order)
    elif unknown := sorted(starts.keys() - specs.keys()):
        close = did_you_mean(unknown[0], specs)
        raise ValueError(f"starts: {unknown[0]!r} is not a parameter{close}; there are {format_list(list(specs))}")
    _check_cuts(specs, order, starts, cuts, size)
    places = tuple(cuts)
    pieces = {name: Intervals(spec.shape, starts[name], places) for name, spec in specs.items()}
    return Layout("flat", specs, pieces, size, rank, process_group, stage, is_flat=True)


def from_dtensors(params: PyTree, group: dist.ProcessGroup | None = None) -> Layout:
    """Build the layout of DTensor parameters, as under FSDP2, HSDP, tensor parallelism or expert parallelism.

    Parameters may have different meshes. A single parameter may also have different meshes on different ranks. Under
    FSDP2 with tensor parallelism, for example, a parameter that is not tensor-parallel has one data-parallel mesh for
    each tensor-parallel rank. All ranks must then call this function together. The copies on these meshes are assumed
    to be replicas; `sharded` verifies this.

    Args:
        params: a tree of DTensors. A plain tensor in the tree counts as replicated on all ranks.
        group: a process group that contains all ranks of the meshes. None: the default group if it has exactly these
            ranks, else a mesh's group or a new group.

    Raises:
        TypeError: no leaf is a DTensor, or a placement is neither Shard nor Replicate.
        ShardingError: this process is not in the group, or a local tensor does not fit its placements.

    >>> from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> from_dtensors({"w": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])})
    <from_dtensors of 1 parameters over 1 rank>
    >>> dist.destroy_process_group()
    """
    named = {n: p for n, p in zip(tree.names(params), tree.leaves(params), strict=True) if p is not None}
    dtensors = {name: leaf._spec for name, leaf in named.items() if is_dtensor(leaf)}
    if not dtensors:
        raise TypeError("params: found no DTensor; shard the model first, or use replicated(params) or zero(params)")
    meshes = {
        mesh: tuple(sorted(map(int, mesh.mesh.flatten().tolist())))
        for mesh in dict.fromkeys(spec.mesh for spec in dtensors.values())
    }
    if group is None:
        group = _group_of(meshes)
    ranks = dist.get_process_group_ranks(group)
    specs = specs_of(params)
    rank = dist.get_rank(group)
    if rank < 0:
        raise ShardingError(f"this process is not among the ranks {ranks} of the parameters' meshes")
    places = {mesh: _places(mesh, ranks) for mesh in meshes}
    found = _cuts_on_several_meshes(specs, dtensors, meshes, places, group) if len(set(meshes.values())) > 1 else None
    pieces, on_several = found or (_cuts(specs, dtensors, places, len(ranks)), ())
    for name in dtensors:
        local, position = named[name]._local_tensor, pieces[name][rank]
        if not position.fits(local):
            raise ShardingError(
                f"{name!r} has a local shape {tuple(local.shape)}, expected {position.shape} from its placements and full "
                "shape: create it with distribute_tensor or fully_shard"
            )
    return Layout(
        "from_dtensors", specs, pieces, len(ranks), rank, group, dtensors=dtensors, on_several_meshes=on_several
    )


def _cuts_on_several_meshes(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    meshes: Mapping[DeviceMesh, tuple[int, ...]],
    places: Mapping[DeviceMesh, Places],
    group: dist.ProcessGroup,
) -> tuple[dict[str, Cut], tuple[str, ...]] | None:
    """Return each parameter's partition by name, when ranks may have different device meshes for it.

    Also return the names of the parameters whose meshes differ between ranks. Return None if anything else differs.
    """
    number = {mesh: place for place, mesh in enumerate(meshes)}
    ways = [(n, spec, (number[d.mesh], d.placements) if (d := dtensors.get(n)) else None) for n, spec in specs.items()]
    rank = dist.get_rank(group)
    mine = (
        digest((ways, [own.shape for own in places.values()])),
        [(digest(meshes[mesh]), own.coordinates[rank]) for mesh, own in places.items()],
    )
    wait_for_all(group, CONSTRUCTING)  # so that a rank that fails before this is reported, and not waited for
    said = all_objects(mine, group, "finding out who holds what")
    if len({way for way, _ in said}) > 1:
        return None
    columns = dict(zip(places, zip(*(theirs for _, theirs in said), strict=True), strict=True))
    own = {mesh: Places(places[mesh].shape, [at for _, at in column]) for mesh, column in columns.items()}
    differ = {mesh for mesh, column in columns.items() if len({ranks for ranks, _ in column}) > 1}
    return _cuts(specs, dtensors, own, len(said)), tuple(n for n, spec in dtensors.items() if spec.mesh in differ)


def _ranks(group: Group) -> tuple[int, int, dist.ProcessGroup | None]:
    """Return the number of ranks in a group, this process's rank in it, and the process group (None for an int)."""
    if isinstance(group, int):
        if isinstance(group, bool) or group < 1:
            raise ValueError(f"group: found {group!r}, expected a process group or a number of ranks, 1 or more")
        return group, 0, None
    if group is None:
        if not dist.is_initialized():
            raise ShardingError(
                "group: torch.distributed is not initialized; call init_process_group, or give a number of ranks to "
                "inspect a layout without processes"
            )
        group = dist.group.WORLD
        assert group is not None
    return dist.get_world_size(group), dist.get_rank(group), group


# -------------------------------------------------------------------------------------------------------- flat buffers


def _order_of_buffer(params: PyTree, specs: Mapping[str, Spec], starts: Mapping[str, int] | None) -> list[str]:
    """Return parameter names in the order of a flat buffer: by `starts`, or as in `params`, a dict sorted by name."""
    if starts is not None:
        # Of two parameters with the same start, the empty parameter is first.
        return sorted(specs, key=lambda name: (starts.get(name, -1), prod(specs[name].shape)))
    given = [str(name) for name in params if name in specs] if isinstance(params, Mapping) else []
    if given != list(specs):
        raise ValueError(
            "order: found None, expected the names in their order in the buffer, because params is not a dict with "
            f"sorted names; they are {format_list(list(specs))}: pass order=list(params) or order=sorted(params)"
        )
    return given


def _check_cuts(
    specs: Mapping[str, Spec], order: Sequence[str], starts: Mapping[str, int], cuts: Sequence[int], size: int
) -> None:
    if len(cuts) != size + 1 or cuts[0] != 0 or any(a > b for a, b in pairwise(cuts)):
        raise ValueError(
            f"cuts: found {list(cuts)}, expected {size + 1} ascending positions that begin with 0, one more than "
            "ranks: rank r holds cuts[r]:cuts[r + 1]"
        )
    end, before = 0, "the beginning"
    for name in order:
        if name not in starts or starts[name] < end:
            found = starts.get(name)
            raise ValueError(f"starts: {name!r} begins at {found}, expected {end} or more, where {before} ends")
        end, before = starts[name] + prod(specs[name].shape), repr(name)
    if end > cuts[-1]:
        raise ValueError(
            f"cuts: found {cuts[-1]} as the last, expected at least {end}, the end of {before}: extend the last rank's "
            "part"
        )


# ------------------------------------------------------------------------------------------------------------ DTensors


def _cuts(
    specs: Mapping[str, Spec],
    dtensors: Mapping[str, DTensorSpec],
    places: Mapping[DeviceMesh, Places],
    size: int,
) -> dict[str, Cut]:
    """Return a dict from parameter name to its partition over ranks. Plain tensors are whole on every rank."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    made: dict[Hashable, Cut] = {}
    cuts: dict[str, Cut] = {}
    for name, spec in specs.items():
        placed = dtensors.get(name)
        key = spec.shape if placed is None else (spec.shape, placed.mesh, placed.placements)
        if key not in made:
            for placement in () if placed is None else placed.placements:
                if not isinstance(placement, Shard | _StridedShard | Replicate):
                    raise TypeError(f"{name!r} has the placement {placement}, expected Shard or Replicate")
            made[key] = (
                Whole(spec.shape, size)
                if placed is None
                else OnMesh(spec.shape, places[placed.mesh], placed.placements)
            )
        cuts[name] = made[key]
    return cuts


def _places(mesh: DeviceMesh, ranks: Sequence[int]) -> Places:
    """Return the mesh coordinates of some global ranks, in the order of `ranks`."""
    shape = tuple(mesh.shape)
    at = dict(zip(mesh.mesh.flatten().tolist(), product(*map(range, shape)), strict=True))
    return Places(shape, [at.get(rank) for rank in ranks])


def _group_of(meshes: Mapping[DeviceMesh, tuple[int, ...]]) -> dist.ProcessGroup:
    """Return a process group of exactly the ranks of all given meshes. A mesh maps to a tuple of its global ranks."""
    ranks = sorted(set().union(*meshes.values()))
    if ranks == list(range(dist.get_world_size())):
        world = dist.group.WORLD
        assert world is not None
        return world
    for mesh, own in meshes.items():
        if list(own) == ranks:
            return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    found = dist.new_group(ranks, use_local_synchronization=True)
    if not isinstance(found, dist.ProcessGroup):
        raise ShardingError(f"this process is not among the ranks {ranks} of the parameters' meshes")
    return found
