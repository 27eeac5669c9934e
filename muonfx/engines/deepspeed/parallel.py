"""Read how DeepSpeed has divided a model over ranks: by AutoTP over a tensor-parallel group, and by experts.

AutoTP replaces linear layers by layers that hold some rows or columns of the weight. The parameter stays the same
object with a smaller shape, and has a dict of metadata for DeepSpeed's universal checkpoints. A partitioned dim is
split as a whole (``partition_sizes``), or, in fused layers, part by part (``sub_param_shard_widths``).
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from muonfx.sharding.communication.agree import agree, errors_on_all_ranks
from muonfx.sharding.communication.messages import all_objects
from muonfx.sharding.shards.position import ShardPosition, Span

METADATA = "ds_autotp_universal_checkpoint_meta"
"""The attribute of a parameter in which AutoTP describes its partition."""


def whole_shape_of(param: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter before ZeRO stage 3 and AutoTP partitioned it."""
    metadata: dict[str, Any] = getattr(param, METADATA, None) or {}
    shape = metadata.get("logical_shape") or getattr(param, "ds_shape", param.shape)
    return tuple(shape)


def local_shape_of(param: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter that ZeRO may have partitioned: under AutoTP, of this rank's rows or columns."""
    return tuple(getattr(param, "ds_shape", param.shape))


def tensor_group_of(modules: Iterable[nn.Module]) -> dist.ProcessGroup | None:
    """Return the tensor-parallel group of a model's layers; None if no layer is partitioned."""
    for module in modules:
        if getattr(module, "is_tp_parallel", False):
            return module.mp_group  # type: ignore[return-value]
    return None


def tensor_shards_of(name: str, param: Tensor, size: int) -> tuple[ShardPosition, ...] | None:
    """Return which elements of a parameter each tensor-parallel rank holds; None if every rank holds all of them.

    AutoTP describes its partition in the metadata of a parameter. If the rows 0 and 1 of a weight (4, 8) are on rank 0,
    and the rows 2 and 3 on rank 1, it is ``{"logical_shape": (4, 8), "partition_dim": 0, "partition_sizes": (2, 2)}``.
    The result then has two `ShardPosition`, of 16 elements each.

    Args:
        name: the name of the parameter, for errors.
        param: the parameter.
        size: the number of tensor-parallel ranks.

    Raises:
        ValueError: the partition is not described, or its shards overlap; the message names the parameter.
    """
    # A partition is known by its metadata. Some layers only mark the parameter: then the first error below is raised.
    is_marked = getattr(param, "tensor_model_parallel", False)
    metadata: dict[str, Any] = getattr(param, METADATA, None) or {}
    is_partitioned = is_marked or metadata
    if metadata.get("replicated") or not is_partitioned:
        return None
    dim = metadata.get("partition_dim")
    widths = _widths_of_parts(metadata)  # of the shards along this dim
    if dim is None or widths is None:
        raise _undescribed(name, metadata)
    # A shard has some indices of this dim, and all indices of the others.
    shape = whole_shape_of(param)
    shards: list[ShardPosition] = []
    for rank in range(size):
        # ``spans[dim]`` lists the ranges of indices of a dim: [[(0, 4)], [(0, 8)]] is the whole of a weight (4, 8).
        spans: list[list[Span]] = [[(0, length)] for length in shape]  # (start, stop)
        spans[dim] = _spans_of_rank(widths, rank)
        shards.append(ShardPosition.grid(spans))
    if not _are_shards_of(shape, shards, local_shape_of(param)):
        raise _undescribed(name, metadata)
    return tuple(shards)


def _are_shards_of(
    shape: tuple[int, ...], shards: Sequence[ShardPosition], local_shape: tuple[int, ...]
) -> bool:
    """Return True if shards have each element of a tensor of this shape once, and one has the shape of this rank's.

    >>> first_rows = ShardPosition.grid([[(0, 2)], [(0, 8)]])
    >>> last_rows = ShardPosition.grid([[(2, 4)], [(0, 8)]])
    >>> _are_shards_of((4, 8), [first_rows, last_rows], local_shape=(2, 8))
    True
    """
    numel_of_shards = sum(shard.numel for shard in shards)
    if numel_of_shards != prod(shape):  # more elements if they overlap
        return False
    return any(shard.shape == local_shape for shard in shards)


def _widths_of_parts(metadata: dict[str, Any]) -> Sequence[Sequence[int]] | None:
    """Return the widths of the shards along the partitioned dim, for each part of a layer: on each rank.

    A layer that is not fused is a single part. The result is None if AutoTP has not described the widths.

    >>> _widths_of_parts(
    ...     {"sub_param_shard_widths": [(2, 2), (1, 1), (1, 1)]}
    ... )  # query, key and value are fused
    [(2, 2), (1, 1), (1, 1)]
    >>> _widths_of_parts({"partition_sizes": [2, 2]})
    [[2, 2]]
    """
    widths: Sequence[Sequence[int]] | None = metadata.get("sub_param_shard_widths")
    if widths is not None:
        return widths
    sizes: Sequence[int] | None = metadata.get("partition_sizes")
    if sizes is not None:
        return [sizes]
    return None


def _spans_of_rank(widths: Sequence[Sequence[int]], rank: int) -> list[Span]:
    """Return the indices of one rank along the partitioned dim. ``widths[part][rank]`` is the width of its shard.

    >>> _spans_of_rank(
    ...     [(2, 2), (1, 1), (1, 1)], 1
    ... )  # query, key and value of a fused projection, on two ranks
    [(2, 4), (5, 6), (7, 8)]
    """
    spans: list[Span] = []
    part_start = 0  # where the current part, such as the key, begins
    for shard_widths in widths:
        # Within the part, the shards of lower ranks are first.
        start = part_start + sum(shard_widths[:rank])
        spans.append((start, start + shard_widths[rank]))
        part_start += sum(shard_widths)
    return spans


def block_group_of(
    data_group: dist.ProcessGroup, tensor_group: dist.ProcessGroup
) -> dist.ProcessGroup:
    """Return the group of all ranks that hold parts of the same parameters: all tensor-parallel groups of a data group.

    For example, ranks 0 and 2 partition the parameters by ZeRO (the data group), and AutoTP splits them over ranks 0
    and 1, and over ranks 2 and 3. Then ranks 0 to 3 hold parts. All of these ranks must call this together.
    """
    # 1. The ranks of the tensor-parallel group of each rank of the data group: [[0, 1], [2, 3]] in the example.
    tensor_ranks = dist.get_process_group_ranks(tensor_group)
    ranks_of_groups: list[list[int]] = gather_objects(tensor_ranks, data_group)
    ranks = sorted(set(chain.from_iterable(ranks_of_groups)))
    # 2. A group that exists, if possible, because a new one takes memory.
    if ranks == sorted(tensor_ranks):
        return tensor_group
    group: Any = dist.group.WORLD
    # Only the ranks of the new group call this, so they create it among themselves, without the other ranks of the job.
    if len(ranks) < dist.get_world_size():
        group = dist.new_group(ranks, use_local_synchronization=True)
    return group


def _undescribed(name: str, metadata: dict[str, Any]) -> ValueError:
    """Return an error for a parameter whose partition by AutoTP is not described by disjoint shards."""
    conversion: dict[str, Any] = metadata.get("conversion") or {}
    reason = (
        conversion.get("unsupported_reason") or "its metadata does not describe disjoint shards"
    )
    return ValueError(
        f"{name!r}: found a partition by DeepSpeed's AutoTP that cannot be gathered ({reason}), expected rows or "
        'columns of each rank: exclude this layer in "tensor_parallel", or train with another optimizer. '
        "Nothing was changed"
    )


# ------------------------------------------------------------------------------------------------------------ experts


def expert_group_name(param: Tensor) -> str | None:
    """Return DeepSpeed's name of the group of an expert's parameter, such as "ep_size_2"; None for other parameters."""
    if getattr(param, "allreduce", True):
        return None
    return getattr(param, "group_name", None)


def global_names(model: nn.Module) -> dict[str, str]:
    """Return a dict from the name of an expert's parameter on this rank to a name that no other rank uses.

    Only experts that are divided among ranks are in the dict. Each rank numbers its own experts from 0. With 2 experts
    on each rank, the parameter ``"moe.deepspeed_moe.experts.deepspeed_experts.0.weight"`` of rank 1 gets the name of
    expert 2.
    """
    global_name_of: dict[str, str] = {}
    for layer_name, layer in model.named_modules():
        # 1. A layer of experts that are divided among ranks.
        experts: Any = getattr(getattr(layer, "experts", None), "deepspeed_experts", None)
        expert_group: Any = getattr(layer, "ep_group", None)
        if experts is None or expert_group is None:
            continue
        # This rank has all experts, so that the indices are global.
        if dist.get_world_size(expert_group) == 1:
            continue
        # 2. The index of this rank's first expert is added to each of its own indices.
        first_expert = dist.get_rank(expert_group) * len(experts)
        prefix = f"{layer_name}.experts.deepspeed_experts"
        for local_index, expert in enumerate(experts):
            global_index = first_expert + local_index
            for name, _ in expert.named_parameters():
                global_name_of[f"{prefix}.{local_index}.{name}"] = f"{prefix}.{global_index}.{name}"
    return global_name_of


# -------------------------------------------------------------------------------------------------------- communication


def all_ranks() -> dist.ProcessGroup | None:
    """Return the group of all ranks; None in a single process."""
    return dist.group.WORLD if dist.is_initialized() else None


def ranks_of_step(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that step the same parameters together; None for a single rank, or without DeepSpeed.

    They are the ranks over which DeepSpeed averages gradients, and those with other rows or columns of AutoTP. The
    ranks of another pipeline stage are not among them. All of these ranks must call this together.
    """
    if not dist.is_initialized() or "deepspeed" not in sys.modules:
        return None
    from deepspeed.utils import groups

    group: Any = groups._get_sequence_data_parallel_group()
    tensor_group = tensor_group_of(model.modules())
    if group is not None and tensor_group is not None:
        group = block_group_of(group, tensor_group)
    if group is None or dist.get_world_size(group) == 1:
        return None
    return group


@contextmanager
def raising_on_all_ranks(
    operation: str, group: dist.ProcessGroup | None
) -> Generator[dict[str, object]]:
    """Return a context manager: if its block raises on one rank of a group, all ranks of the group raise.

    Otherwise the other ranks would wait for this one until the timeout of the group. Rank 1 of two ranks raises in its
    own block here, and rank 0 raises an error with the text of rank 1:

        with raising_on_all_ranks("a step", group):
            if dist.get_rank(group) == 1:
                raise ValueError("a wrong number")

    The ``with`` statement gives an empty dict. If the block puts facts into it, such as ``{"numbers": {"lr": 0.02}}``,
    and they differ between ranks, all ranks raise, too.

    Args:
        operation: the name of the block in errors.
        group: the ranks that enter the block together; None for a single rank.
    """
    facts: dict[str, object] = {}
    with errors_on_all_ranks(group):
        yield facts
    if group is not None:
        agree(operation, group, same=facts)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group, by default of all ranks of the job, in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    world: Any = dist.group.WORLD
    return all_objects(value, group or world, "an exchange of DeepSpeed's partition")
