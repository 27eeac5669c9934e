"""Locate the shards of parameters in the flat tensors that DeepSpeed steps on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonfx.core.checks import warn_caller
from muonfx.engines.deepspeed.parallel import (
    block_group_of,
    gather_objects,
    local_shape_of,
    tensor_shards_of,
    whole_shape_of,
)
from muonfx.optimizer.named_parameters import NamedTensors
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards.cut import Cut, Intervals, Listed, Whole
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.shards.position import ShardPosition
from muonfx.tree import Spec


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict from name to parameter, with the parameters of a model that require grad."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {type(model).__name__}")
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def stage_3_of(params: Iterable[Tensor]) -> Any:
    """Return DeepSpeed's own optimizer that holds these parameters at ZeRO stage 3; None at other stages.

    ZeRO partitions the parameters themselves only at stage 3. DeepSpeed then sets an attribute on each of them.
    """
    for param in params:
        engine: Any = getattr(param, "_z3_optimizer", None)
        if engine:
            return engine
    return None


def are_partitioned(params: Iterable[Tensor]) -> bool:
    """Return True if ZeRO has partitioned these parameters or their optimizer state, as at stages 1 to 3.

    DeepSpeed then sets an attribute on each of them: ``_dp_group`` at stages 1 and 2, ``_z3_optimizer`` at stage 3.
    """
    return any(hasattr(param, "_dp_group") or hasattr(param, "_z3_optimizer") for param in params)


class FlatInterval(NamedTuple):
    """The shard of a parameter on one rank, which is an interval of DeepSpeed's flat tensor and of the parameter."""

    start_in_flat: int
    """First element of the shard in DeepSpeed's flat tensor."""
    start_in_param: int
    """First element of the shard in the flattened parameter."""
    length: int
    """Number of elements of the shard; 0 if the rank holds nothing of the parameter."""


class FlatParams(NamedTuple):
    """The parameters in one flat tensor that DeepSpeed steps on, with the positions of this rank's shards."""

    tensor_of: dict[str, Tensor]
    """A dict from parameter name to the tensor with its values: the flat tensor for all; at stage 0 a tensor each."""
    layout: Layout | None = None
    """The layout (which rank holds which shard of each parameter); None if this rank holds all of them whole."""
    intervals: Mapping[str, FlatInterval] = {}
    """A dict from parameter name to this rank's shard; empty at stage 0."""
    saved_elsewhere: frozenset[str] = frozenset()
    """The parameters that AutoTP has not split, if this is not the first tensor-parallel rank, which saves them."""

    @property
    def is_flat(self) -> bool:
        """True for one flat tensor; False at stage 0, where each parameter has its own tensor."""
        return bool(self.intervals)

    @property
    def tensors(self) -> list[Tensor]:
        """The flat tensor, alone in a list; at stage 0, the tensor of each parameter."""
        return list(dict.fromkeys(self.tensor_of.values()))

    def view(self, name: str, tensor: Any) -> Any:
        """Return a view of the shard of a parameter in a flat tensor, such as a gradient; at stage 0, ``tensor``."""
        if not self.is_flat:
            return tensor
        interval = self.intervals[name]
        return tensor.narrow(0, interval.start_in_flat, interval.length)

    def params(self) -> dict[str, Tensor]:
        """Return the parameters, or their shards, by name; they share memory with the tensors of DeepSpeed."""
        return {name: self.view(name, tensor.detach()) for name, tensor in self.tensor_of.items()}

    def to_save(self, name: str, value: Tensor) -> Tensor | FlatShard:
        """Return what this rank saves of a parameter or its state: its shard, or no element if another rank saves it.

        ``value`` is this rank's shard, which the result has with its position, as in `with_position`.
        """
        if self.layout is not None and name in self.saved_elsewhere:
            return FlatShard(self.layout.specs[name].shape, 0, value.new_empty(0))
        return self.with_position(name, value)

    def with_position(self, name: str, value: Tensor) -> Tensor | FlatShard:
        """Return a shard with its position in the parameter, for a checkpoint that other numbers of ranks can load.

        ``value`` is the shard of a parameter or of its state. A whole parameter is returned unchanged. For a shard with
        the rows 2 and 3 of a parameter of shape (4, 8), the result is a `FlatShard` of 16 elements, which begin at
        element 16 of the parameter.
        """
        if self.layout is None:  # each rank has whole parameters
            return value
        shape = self.layout.specs[name].shape  # of the whole parameter
        position = self.layout.position(name)  # which of its elements this rank holds
        if position == ShardPosition.whole(shape):
            return value
        flat_value = value.reshape(-1)
        # 1. ZeRO gives a rank an interval of the flattened parameter.
        if position.start is not None:
            return FlatShard(shape, position.start, flat_value)
        # 2. AutoTP gives a rank rows or columns, ``spans`` of a dim. Here they are flattened.
        if position.spans:
            flat_position = position.interval_of_shard(0, position.numel)
            return FlatShard(shape, 0, flat_value, elements=flat_position)
        # 3. With both, a rank has an interval of flattened rows or columns.
        return FlatShard(shape, 0, flat_value, elements=position)


WithPosition = Callable[[FlatParams, str, Tensor], Tensor | FlatShard]
"""`FlatParams.with_position` or `FlatParams.to_save`."""


def locate(
    flat_tensor: Tensor,
    params: NamedTensors,
    whole_params: NamedTensors,
    tensor_group: dist.ProcessGroup | None,
) -> FlatParams:
    """Find where the shards of ``params`` are in a flat tensor of ZeRO stage 1, 2 or 3.

    DeepSpeed concatenates parameters in one flat tensor, and steps on it. Muon needs the matrices in it, and therefore
    their positions. ``whole_params`` has all parameters of the model by name, as meta tensors of their whole shapes.
    ``tensor_group`` is the tensor-parallel group, if there is one. All ranks with parts of these parameters call this
    together.
    """
    # 1. Which elements of each parameter each rank has, and where this rank has its own in the flat tensor.
    engine = stage_3_of(params.values())
    if engine is None:
        stage = 2  # stage 1 has the same partition
        partition = _partition_of_buffer(flat_tensor, params)
    else:
        stage = 3
        partition = _partition_of_stage_3(flat_tensor, params, engine)
    # Up to here, of the rows or columns of AutoTP; now of the whole parameters.
    if tensor_group is not None:
        partition = _with_tensor_parallel(partition, params, tensor_group)
    layout = _layout(
        partition.cuts,
        whole_params,
        dict.fromkeys(params, flat_tensor),
        partition.group,
        stage=stage,
    )
    flat = FlatParams(
        tensor_of=dict.fromkeys(partition.intervals, flat_tensor),
        layout=layout,
        intervals=partition.intervals,
        saved_elsewhere=partition.saved_elsewhere,
    )
    # 2. Check the values.
    misplaced_name = partition.misplaced_name or _name_of_differing(flat, params)
    _require_none_misplaced(misplaced_name, partition.group)
    return flat


def _require_none_misplaced(misplaced_name: str | None, group: dist.ProcessGroup) -> None:
    """Raise on all ranks of a group if DeepSpeed's mapping is wrong for a parameter on one of them.

    ``misplaced_name`` is such a parameter of this rank; None if there is none. The mapping may be wrong on some ranks
    only.
    """
    for name in gather_objects(misplaced_name, group):  # of each rank
        if name is not None:
            raise _misplaced(name)


def locate_at_stage_0(
    stepped_tensors: dict[str, Tensor],
    params: NamedTensors,
    whole_params: NamedTensors,
    tensor_group: dist.ProcessGroup | None,
) -> FlatParams:
    """Return the `FlatParams` of ZeRO stage 0, where DeepSpeed steps on parameters, not on flat tensors.

    Without tensor parallelism, each rank has whole parameters, and the result has no layout. With AutoTP, DeepSpeed's
    tensor parallelism, a rank has some rows or columns of a parameter; the layout has these of each rank.

    Args:
        stepped_tensors: the tensors on which DeepSpeed steps, by name: the parameters, or copies of them in fp32.
        params: the parameters by name.
        whole_params: all parameters of the model by name, as meta tensors of their whole shapes.
        tensor_group: the tensor-parallel group; None without one.
    """
    stale_name = _name_of_stale_copy(stepped_tensors, params)
    if stale_name is not None:
        raise _stale(stale_name)
    if tensor_group is None:
        return FlatParams(stepped_tensors)
    cuts: dict[str, Cut] = {}
    for name, param in params.items():
        shards = tensor_shards_of(name, param, dist.get_world_size(tensor_group))
        if shards is not None:  # else each rank has the whole parameter
            cuts[name] = Listed(whole_shape_of(param), shards)
    layout = _layout(cuts, whole_params, stepped_tensors, tensor_group, stage=None)
    return FlatParams(stepped_tensors, layout)


def _layout(
    cuts: Mapping[str, Cut],
    whole_params: NamedTensors,
    tensor_of: NamedTensors,
    group: dist.ProcessGroup,
    *,
    stage: int | None,
) -> Layout:
    """Return the layout of the parameters of a model: which elements of each of them each rank of a group holds.

    A cut is this description for one parameter. On two ranks, "fc.weight" may have the elements 0 to 11 on rank 0 and
    12 to 23 on rank 1. If there is no cut for "fc.bias", it is whole on both.

    Args:
        cuts: for some parameters, which elements each rank holds. Others count as replicated: they are in no flat
            tensor, or in another one.
        whole_params: all parameters, as meta tensors of their whole shapes.
        tensor_of: the tensors that DeepSpeed steps on, whose dtypes the parameters have there, such as fp32 copies.
        group: the ranks.
        stage: the ZeRO stage.
    """
    specs: dict[str, Spec] = {}
    all_cuts: dict[str, Cut] = {}
    size = dist.get_world_size(group)
    # All parameters, so that the layouts of several flat tensors have the same names.
    for name, param in whole_params.items():
        stepped_tensor = tensor_of.get(name, param)
        specs[name] = Spec(tuple(param.shape), stepped_tensor.dtype)
        all_cuts[name] = cuts.get(name) or Whole(param.shape, size)
    return Layout("flat", specs, all_cuts, size, dist.get_rank(group), group, stage)


class _Partition(NamedTuple):
    """How the parameters in one flat tensor are partitioned over the ranks."""

    cuts: dict[str, Cut]
    """For each parameter, which of its elements each rank holds."""
    intervals: dict[str, FlatInterval]
    """For each parameter, the interval of this rank in its flat tensor."""
    group: dist.ProcessGroup
    """The ranks that hold parts of the parameters."""
    misplaced_name: str | None = None
    """The first parameter for which DeepSpeed's mapping is wrong, to be raised on all ranks."""
    saved_elsewhere: frozenset[str] = frozenset()
    """See `FlatParams`."""


def _partition_of_buffer(flat_tensor: Tensor, params: NamedTensors) -> _Partition:
    """Return the partition of stages 1 and 2: the parameters are concatenated, and each rank has an equal interval.

    If this buffer has 24 elements, rank 0 has the elements 0 to 11 and rank 1 the elements 12 to 23, each as its flat
    tensor. A parameter with the elements 8 to 15 of the buffer is on both ranks.
    """
    # 1. DeepSpeed's mapping gives a rank only its own interval of each parameter, so all ranks exchange them.
    intervals = _local_intervals(params)
    group = _data_group(flat_tensor, params)
    intervals_of_ranks: list[dict[str, FlatInterval]] = gather_objects(intervals, group)
    # 2. Where each rank's interval of the buffer begins and ends.
    length = flat_tensor.numel()
    # With flat tensors of 12 elements on 2 ranks, the borders are 0, 12 and 24.
    borders = tuple([rank * length for rank in range(len(intervals_of_ranks) + 1)])
    # 3. Where each parameter begins in the buffer.
    cuts: dict[str, Cut] = {}
    misplaced_name: str | None = None
    for name, param in params.items():
        shape = local_shape_of(param)
        # The start follows from any rank that holds elements; all of them must agree.
        interval_of_rank = [rank_intervals[name] for rank_intervals in intervals_of_ranks]
        start = _start_in_buffer(interval_of_rank, length, prod(shape))
        if start is not None:
            cuts[name] = Intervals(shape, start, borders)
        elif misplaced_name is None:  # the first one; `locate` raises on all ranks
            misplaced_name = name
    return _Partition(cuts, intervals, group, misplaced_name)


def _start_in_buffer(
    interval_of_rank: Sequence[FlatInterval], length: int, numel: int
) -> int | None:
    """Return where a parameter of ``numel`` elements begins in the buffer, the concatenated flat tensors of all ranks.

    The flat tensor of each rank has ``length`` elements. With 12 elements each, a parameter of 8 elements may have 4 at
    the end of rank 0, and 4 at the beginning of rank 1. It begins at element 8 of the buffer:

    >>> rank_0 = FlatInterval(start_in_flat=8, start_in_param=0, length=4)
    >>> rank_1 = FlatInterval(start_in_flat=0, start_in_param=4, length=4)
    >>> _start_in_buffer([rank_0, rank_1], length=12, numel=8)
    8

    The result is None if the mapping of DeepSpeed is wrong: it is right if all ranks agree on the start, and together
    hold every element once.
    """
    if numel == 0:  # AutoTP gives a rank no rows if there are fewer heads than ranks
        return 0
    starts: set[int] = set()  # one from each rank that holds elements
    for rank, interval in enumerate(interval_of_rank):
        if interval.length:
            # Before this rank's flat tensor, the buffer has the flat tensors of lower ranks: 0 x 12 + 8 = 8, and
            # 1 x 12 + 0 = 12.
            interval_in_buffer = rank * length + interval.start_in_flat
            # The parameter begins as many elements earlier as it has on lower ranks: 8 - 0 = 8, and 12 - 4 = 8.
            starts.add(interval_in_buffer - interval.start_in_param)
    mapped_elements = sum(interval.length for interval in interval_of_rank)
    if len(starts) != 1 or mapped_elements != numel:
        return None
    return starts.pop()


def _local_intervals(params: NamedTensors) -> dict[str, FlatInterval]:
    """Return the interval of each parameter that this rank holds at stages 1 and 2, as DeepSpeed's mapping gives it.

    DeepSpeed sets the attribute ``_hp_mapping`` of a parameter on the ranks that hold elements of it. "hp" is the flat
    tensor in high precision (fp32), and "lp" the parameter in low precision.
    """
    intervals: dict[str, FlatInterval] = {}
    for name, param in params.items():
        mapping: Any = getattr(param, "_hp_mapping", None)
        if mapping is None:  # other ranks hold all of its elements
            intervals[name] = FlatInterval(start_in_flat=0, start_in_param=0, length=0)
        else:
            in_flat = mapping.hp_fragment_address
            in_param = mapping.lp_fragment_address
            intervals[name] = FlatInterval(in_flat.start, in_param.start, in_flat.numel)
    return intervals


def _data_group(flat_tensor: Tensor, params: NamedTensors) -> Any:
    """Return the process group over which DeepSpeed has partitioned the parameters at stages 1 and 2.

    DeepSpeed sets it as an attribute of each parameter that it partitions at these stages. Raise if no parameter has
    it, because of an unknown stage.
    """
    for param in params.values():
        group: Any = getattr(param, "_dp_group", None)
        if group is not None:
            return group
    raise ValueError(
        f"{next(iter(params))!r}: found a flat tensor of {flat_tensor.numel()} elements in its group, and no mapping "
        "of DeepSpeed to the parameter; expected ZeRO stage 1, 2 or 3, or whole parameters"
    )


def _partition_of_stage_3(flat_tensor: Tensor, params: NamedTensors, engine: Any) -> _Partition:
    """Return the partition of stage 3: each parameter has an equal interval on each rank, the last ones padded.

    On two ranks, a parameter of 5 elements has the elements 0 to 2 on rank 0, and 3 to 4 and one of padding on rank 1.
    ``flat_tensor`` concatenates the shards of this rank. ``engine`` is DeepSpeed's own optimizer of stage 3.
    """
    # 1. The parameters in the flat tensor. It is found by identity, because ``==`` of tensors compares elements.
    flat_ids = [id(flat) for flat in engine.fp32_partitioned_groups_flat]
    members: list[Any] = engine.fp16_groups[flat_ids.index(id(flat_tensor))]
    name_of = {id(param): name for name, param in params.items()}
    group = members[0].ds_process_group
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    # 2. Their shards, one behind another.
    cuts: dict[str, Cut] = {}
    intervals: dict[str, FlatInterval] = {}
    start_in_flat = 0
    for param in members:
        name = name_of[id(param)]
        shape = local_shape_of(param)
        numel = prod(shape)
        padded_length = int(param.ds_tensor.ds_numel)  # of every rank's shard
        borders = [padded_length * index for index in range(size + 1)]
        # For 5 elements on two ranks, the borders are 0, 3 and 6.
        cuts[name] = Intervals(shape, 0, tuple(borders))
        # This rank's interval. With few elements, the last ranks have only padding, and an interval of length 0.
        start_in_param = min(rank * padded_length, numel)
        length = min(padded_length, numel - start_in_param)  # without the padding
        intervals[name] = FlatInterval(start_in_flat, start_in_param, length)
        start_in_flat += padded_length  # the padding is in the flat tensor, too
    return _Partition(cuts, intervals, group)


def _with_tensor_parallel(
    partition: _Partition, params: NamedTensors, tensor_group: dist.ProcessGroup
) -> _Partition:
    """Return the partition of whole parameters by both AutoTP and ZeRO.

    AutoTP gives each tensor-parallel rank some rows or columns of a parameter. ZeRO flattens them and partitions them
    once more, as ``partition`` describes. With 2 tensor-parallel ranks, which have 2 of 4 rows each, and 2 ranks of
    ZeRO for each of them, 4 ranks have one row each.
    """
    group = block_group_of(partition.group, tensor_group)
    tensor_size = dist.get_world_size(tensor_group)
    tensor_rank = dist.get_rank(tensor_group)
    # 1. For each rank, its tensor-parallel rank, and its interval of each parameter.
    ranks: list[tuple[int, dict[str, FlatInterval]]] = gather_objects(
        (tensor_rank, partition.intervals), group
    )
    # 2. For each parameter, which elements of the whole each rank holds.
    cuts: dict[str, Cut] = {}
    saved_elsewhere: set[str] = set()
    for name, param in params.items():
        shape = whole_shape_of(param)
        shards = tensor_shards_of(name, param, tensor_size)
        # If AutoTP has not split a parameter, every tensor-parallel rank has all of it, partitioned over its ranks of
        # ZeRO. The intervals of two of them may overlap, which shards of a checkpoint must not: rank 0 saves it.
        if shards is None and tensor_rank != 0:
            saved_elsewhere.add(name)
        interval_of_rank = [
            (rank_in_tensor_group, intervals[name]) for rank_in_tensor_group, intervals in ranks
        ]
        cuts[name] = Listed(shape, _positions_in_whole(shape, shards, interval_of_rank))
    return partition._replace(cuts=cuts, group=group, saved_elsewhere=frozenset(saved_elsewhere))


def _positions_in_whole(
    shape: tuple[int, ...],
    shards: Sequence[ShardPosition] | None,
    interval_of_rank: Iterable[tuple[int, FlatInterval]],
) -> list[ShardPosition]:
    """Return which elements of a whole parameter each rank holds, if both AutoTP and ZeRO partition it.

    Args:
        shape: the shape of the whole parameter.
        shards: the rows or columns of each tensor-parallel rank; None if AutoTP has not split the parameter.
        interval_of_rank: for each rank, its tensor-parallel rank, and its interval of the flattened rows or columns.
    """
    positions: list[ShardPosition] = []
    for tensor_rank, interval in interval_of_rank:
        start = interval.start_in_param
        stop = start + interval.length
        if shards is None:
            positions.append(ShardPosition.interval(shape, start, stop))
        else:
            positions.append(shards[tensor_rank].interval_of_shard(start, stop))
    return positions


def flats_of(engine: Any, params: Iterable[Tensor]) -> list[Tensor]:
    """Return the flat tensors in which DeepSpeed holds these parameters at stage 3, one for each sub-group.

    DeepSpeed divides the parameters of a group of the optimizer into sub-groups of limited size. A sub-group has
    parameters of one group only, so that its first parameter shows which group it is.
    """
    param_ids = set(map(id, params))
    flats: list[Tensor] = []
    for flat, members in zip(engine.fp32_partitioned_groups_flat, engine.fp16_groups, strict=True):
        if id(members[0]) in param_ids:
            flats.append(flat)
    return flats


def _name_of_differing(flat: FlatParams, params: NamedTensors) -> str | None:
    """Return the name of the first of ``params`` whose values are not those in the flat tensor; None if all are.

    This finds an error in DeepSpeed's mapping, because of which a step would change other parameters. If two parameters
    were exchanged in the flat tensor, the values of the first would differ, and its name is returned.
    """
    for name, view in flat.params().items():
        if name not in params:
            continue
        shard = _local_shard(params[name], flat.intervals[name].start_in_param, view.numel())
        # DeepSpeed stores the values elsewhere, so that nothing can be compared.
        if shard.numel() < view.numel():
            _warn_of_unknown_values(name)
            continue
        if not _is_copy(view.reshape(-1), shard):
            return name
    return None


def name_of_overwritten(flat: FlatParams, params: NamedTensors) -> str | None:
    """Return the name of the first of ``params`` that a step would overwrite by other values; None if there is none.

    ``params`` are parameters of a flat tensor, or at stage 0 of a group, into which something was written.
    """
    if flat.is_flat:
        return _name_of_differing(flat, params)
    return _name_of_stale_copy({name: flat.tensor_of[name] for name in params}, params)


def _name_of_stale_copy(stepped_tensors: NamedTensors, params: NamedTensors) -> str | None:
    """Return the name of the first parameter of stage 0 that differs from its copy in fp32; None if there is none.

    DeepSpeed steps on copies if the model has bf16, and overwrites the parameters by them. A copy has the values from
    before if weights were loaded into the parameters alone.
    """
    for name, tensor in stepped_tensors.items():
        if not _is_copy(tensor.detach(), params[name].detach()):
            return name
    return None


def _is_copy(copy: Tensor, param: Tensor) -> bool:
    """Return True if a tensor of DeepSpeed, in fp32, has the values of a parameter, which may have bf16."""
    values = copy.to(param.dtype)
    # A NaN is not equal to itself, and is replaced by 0. Infinities become the largest numbers of their sign.
    return torch.equal(values.nan_to_num(), param.to(values.device).nan_to_num())


def _stale(name: str) -> ValueError:
    """Return an error for a parameter of stage 0 whose copy in fp32 has other values."""
    return ValueError(
        f"{name!r}: its values differ from DeepSpeed's fp32 copy, which a step would write over them. Weights were "
        "loaded into the model alone, as by engine.load_checkpoint(path, load_optimizer_states=False) at stage 0: call "
        "engine.optimizer.refresh_fp32_params() after the load"
    )


def _warn_of_unknown_values(name: str) -> None:
    """Warn that the values of a parameter are not on this rank, so that its position is not checked."""
    warn_caller(
        f"{name!r}: its values cannot be compared with DeepSpeed's flat tensor, because DeepSpeed stores them "
        "elsewhere; DeepSpeed's mapping is assumed to be right"
    )


def _local_shard(param: Tensor, start: int, length: int) -> Tensor:
    """Return ``length`` elements of a flattened parameter, from ``start``; fewer if this rank has not all of them.

    >>> _local_shard(torch.arange(6.0).view(2, 3), start=2, length=3)
    tensor([2., 3., 4.])
    """
    partition: Tensor | None = getattr(param, "ds_tensor", None)
    if partition is not None:  # this rank's shard at stage 3, which begins at ``start``
        return partition.detach().reshape(-1)[:length]
    # At stages 1 and 2, each rank has the whole parameter.
    return param.detach().reshape(-1)[start : start + length]


def _misplaced(name: str) -> ValueError:
    """Return an error for a parameter that is not where DeepSpeed's mapping locates it in the flat tensor."""
    return ValueError(
        f"{name!r}: its values are not at the position that DeepSpeed's mapping gives in the flat tensor: the update "
        'would change other parameters. With "round_robin_gradients": true the mapping is wrong: set it to false. If '
        "weights were loaded into the model alone, call engine.optimizer.refresh_fp32_params() after the load"
    )
