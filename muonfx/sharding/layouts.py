"""Functions that build layouts: replicated parameters, DTensors, ZeRO partitions, and flat buffers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.checks import positive_int
from muonfx.internal.arguments import plain_arguments
from muonfx.internal.display import format_list
from muonfx.sharding.communication.meshes import cuts_on_meshes, group_of_meshes
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.balance import Item, assign_by_bytes
from muonfx.sharding.plan.cost import costs_of
from muonfx.sharding.shards.cut import (
    Cut,
    Intervals,
    Whole,
    equal_intervals,
    equal_parts,
    one_behind_another,
)
from muonfx.sharding.shards.dtensors import is_dtensor
from muonfx.sharding.shards.position import ShardPosition
from muonfx.sharding.shards.table import specs_of
from muonfx.tree import PyTree, Spec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


Group = dist.ProcessGroup | int | None
"""A process group; or None, for the default group; or a number of ranks, for a layout without processes."""


@plain_arguments
def replicated(params: PyTree, group: Group = None) -> Layout:
    """Build the layout in which every rank holds every parameter, as under `DistributedDataParallel`.

    The gradients passed to a transform must already be averaged over the ranks. By default a matrix is orthogonalized
    by one rank or by every rank, whichever is faster; see the argument ``replicas`` of `sharded`.

    Args:
        params: the parameters, on any device; only their names, shapes and dtypes are read.
        group: the process group. None: the default group. An int: a number of ranks, to inspect a layout without
            processes.

    Raises:
        TypeError: a leaf of ``params`` is no tensor, for example because a group was passed in its place.
        ShardingError: ``group`` is None, and torch.distributed is not initialized.

    >>> replicated({"w": torch.zeros(2)}, 4)
    <replicated of 1 parameters over 4 ranks>
    """
    specs = specs_of(params)
    size, rank, process_group = _ranks(group)
    # Parameters of one shape share a partition, with its remembered values.
    whole = functools.cache(Whole)
    cuts = {name: whole(spec.shape, size) for name, spec in specs.items()}
    return Layout("replicated", specs, cuts, size, rank, process_group)


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
    size, rank, process_group = _ranks(group)
    specs = specs_of(params)
    if partition == "flat":
        cuts = equal_intervals(specs, size)
    elif partition == "each":
        cuts = equal_parts(specs, size)
    else:  # "whole": one rank owns each parameter, so that ranks have about equal costs and bytes
        costs = costs_of(specs, tx)
        owners = assign_by_bytes(
            [Item(costs[name], spec.nbytes) for name, spec in specs.items()], size
        )
        cuts: dict[str, Cut] = {}
        for (name, spec), owner in zip(specs.items(), owners, strict=True):
            cuts[name] = Whole(spec.shape, size, owner)
    return Layout("zero", specs, cuts, size, rank, process_group, stage, is_flat=True)


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

    >>> layout = flat(
    ...     {"a": torch.zeros(2, 2), "b": torch.zeros(6)}, 3, order=["b", "a"], cuts=[0, 4, 9, 10]
    ... )
    >>> [layout.position("a", rank).numel for rank in range(3)]
    [0, 3, 1]
    """
    size, rank, process_group = _ranks(group)
    specs = specs_of(params)
    # 1. The order of the parameters in the buffer.
    if starts is not None:
        _require_each_once("starts", list(starts), specs)
    if order is not None:
        order = list(order)
    elif starts is not None:
        start_of = starts
        # If two parameters have the same start, the empty one is first.
        order = sorted(specs, key=lambda name: (start_of[name], prod(specs[name].shape)))
    else:
        _require_unambiguous_order(params, specs)
        order = list(specs)
    _require_each_once("order", order, specs)
    # 2. Their positions, and the intervals of the ranks.
    if starts is None:
        starts = one_behind_another(specs, order)
    _check_cuts(cuts, size)
    _check_buffer(specs, order, starts, cuts[-1])
    intervals: dict[str, Cut] = {}
    for name, (shape, _) in specs.items():
        intervals[name] = Intervals(shape, starts[name], tuple(cuts))
    return Layout("flat", specs, intervals, size, rank, process_group, stage, is_flat=True)


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
    # 1. The mesh and placements of each DTensor (its `_spec`), and the group of all ranks on the meshes.
    leaves = {name: leaf for name, leaf in tree.named_leaves(params) if is_dtensor(leaf)}
    if not leaves:
        raise TypeError(
            "params: found no DTensor; shard the model first, or use replicated(params) or zero(params)"
        )
    dtensors = {name: leaf._spec for name, leaf in leaves.items()}
    ranks_of = _ranks_of_meshes(dtensors)
    if group is None:
        group = group_of_meshes(ranks_of)
    ranks = dist.get_process_group_ranks(group)
    rank = dist.get_rank(group)
    if rank < 0:
        raise ShardingError(
            f"this process is not among the ranks {ranks} of the parameters' meshes"
        )
    # 2. For each parameter, the shards of all ranks (a cut). Those of this rank must have the shapes of its tensors.
    specs = specs_of(params)
    cuts, on_several_meshes = cuts_on_meshes(specs, dtensors, ranks_of, group)
    for name, leaf in leaves.items():
        _require_local_shape(name, leaf._local_tensor, cuts[name][rank])
    return Layout(
        "from_dtensors",
        specs,
        cuts,
        len(ranks),
        rank,
        group,
        dtensors=dtensors,
        on_several_meshes=on_several_meshes,
    )


def _ranks_of_meshes(dtensors: Mapping[str, DTensorSpec]) -> dict[DeviceMesh, tuple[int, ...]]:
    """Return the global ranks on each mesh, in ascending order. The meshes are in the order of their parameters."""
    ranks_of: dict[DeviceMesh, tuple[int, ...]] = {}
    for spec in dtensors.values():
        if spec.mesh not in ranks_of:
            ranks = spec.mesh.mesh.flatten().tolist()
            ranks_of[spec.mesh] = tuple(sorted(ranks))
    return ranks_of


def _require_local_shape(name: str, local: Tensor, position: ShardPosition) -> None:
    """Raise ShardingError unless the local tensor of a DTensor has the shape of this rank's shard."""
    if not position.fits(local):
        raise ShardingError(
            f"{name!r} has a local shape {tuple(local.shape)}, expected {position.shape} from its placements and full "
            "shape: create it with distribute_tensor or fully_shard"
        )


def _ranks(group: Group) -> tuple[int, int, dist.ProcessGroup | None]:
    """Return the number of ranks in a group, this process's rank in it, and the process group (None for an int).

    >>> _ranks(4)  # to inspect a layout for four ranks, without processes
    (4, 0, None)
    """
    # 1. A number of ranks: this process plays the role of rank 0.
    if isinstance(group, int):
        positive_int("group, a number of ranks,", group)
        return group, 0, None
    # 2. A process group, by default the group of all ranks.
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


def _require_unambiguous_order(params: PyTree, specs: Mapping[str, Spec]) -> None:
    """Raise an error for a missing argument ``order``, unless `params` is a flat dict with sorted names.

    Without ``order``, a buffer of the parameters ``{"a": ..., "b": ...}`` has this order. For ``{"b": ..., "a": ...}``
    it is not known whether it has the order of the dict or the sorted order. `specs` has the sorted names.
    """
    # Names of nested parameters, such as "layer.weight", are no keys of the dict, so a nested dict is refused.
    names_in_dict: list[str] = []
    if isinstance(params, Mapping):
        names_in_dict = [str(name) for name in params if name in specs]
    sorted_names = list(specs)
    if names_in_dict != sorted_names:
        raise ValueError(
            "order: found None, expected the names in their order in the buffer, because params is not a dict with "
            f"sorted names; they are {format_list(sorted_names)}: pass order=list(params) or order=sorted(params)"
        )


def _require_each_once(argument: str, names: Sequence[str], specs: Mapping[str, Spec]) -> None:
    """Raise ValueError unless an argument, "order" or "starts", has the name of each parameter once.

    >>> _require_each_once("order", ["w", "w"], {"w": Spec((2,), torch.float32)})
    Traceback (most recent call last):
    ValueError: order: found 'w' missing, unknown or repeated, expected every parameter once; there are 'w'
    """
    if sorted(names) == sorted(specs):
        return
    # Names that are wrong in themselves, before those that are only repeated.
    wrong_names = sorted(set(names) ^ set(specs))  # those that are missing or unknown
    if not wrong_names:
        wrong_names = [name for name, times in Counter(names).items() if times > 1]
    raise ValueError(
        f"{argument}: found {format_list(wrong_names)} missing, unknown or repeated, expected every parameter once; "
        f"there are {format_list(list(specs))}"
    )


def _check_cuts(cuts: Sequence[int], size: int) -> None:
    if len(cuts) != size + 1 or cuts[0] != 0 or any(start > stop for start, stop in pairwise(cuts)):
        raise ValueError(
            f"cuts: found {list(cuts)}, expected {size + 1} ascending positions that begin with 0, one more than "
            "ranks: rank r holds cuts[r]:cuts[r + 1]"
        )


def _check_buffer(
    specs: Mapping[str, Spec], order: Sequence[str], starts: Mapping[str, int], length: int
) -> None:
    """Raise ValueError unless each parameter begins after the one before it, and the last ends within the buffer.

    In a buffer of 10 elements, parameters of 4 and 6 elements may begin at 0 and 4, but not at 0 and 3, where they
    would overlap, nor at 0 and 5, where the second would end at 11.
    """
    # In the order of the buffer, so that only neighbours need to be compared.
    end = 0  # of the parameters before this one
    previous = "the beginning"  # the parameter before, as errors name it
    for name in order:
        start = starts[name]
        if start < end:
            raise ValueError(
                f"starts: {name!r} begins at {start}, expected {end} or more, where {previous} ends"
            )
        end = start + prod(specs[name].shape)
        previous = repr(name)
    if end > length:
        raise ValueError(
            f"cuts: found {length} as the last, expected at least {end}, the end of {previous}: extend the interval "
            "of the last rank"
        )
