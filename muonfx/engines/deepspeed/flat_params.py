"""Locate the shards of parameters in the flat tensors that DeepSpeed steps on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonfx.engines.deepspeed.parallel import block_group_of, gather_objects, tensor_shards_of
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


def local_shape_of(param: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter that ZeRO may have partitioned: under AutoTP, of this rank's rows or columns."""
    return tuple(getattr(param, "ds_shape", param.shape))


def stage_3_of(params: Iterable[Tensor]) -> Any:
    """Return DeepSpeed's own optimizer that holds these parameters at ZeRO stage 3; None at other stages."""
    for param in params:
        engine: Any = getattr(param, "_z3_optimizer", None)
        if engine:
            return engine
    return None


class Located(NamedTuple):
    """The position of this rank's shard of a parameter: in DeepSpeed's flat tensor, and in the parameter."""

    start: int
    """First element of the shard in DeepSpeed's flat tensor."""
    length: int
    """Number of elements of the shard."""
    begin: int
    """First element of the shard in the flattened parameter."""


class Pieces(NamedTuple):
    """The parameters in one flat tensor that DeepSpeed steps on, with the positions of this rank's shards."""

    names: tuple[str, ...]
    """The names of the parameters."""
    flat: list[Tensor]
    """A list of the flat tensor; at stage 0, a list of whole parameters, in the order of ``names``."""
    layout: Layout | None = None
    """The layout (which rank holds which shard of each parameter); None if this rank holds all of them whole."""
    at: Mapping[str, Located] = {}
    """A dict from parameter name to the position of this rank's shard; empty at stage 0."""
    shapes: Mapping[str, tuple[int, ...]] = {}
    """A dict from parameter name to the shape of this rank's shard; empty at stage 0."""
    saved_elsewhere: frozenset[str] = frozenset()
    """The parameters whose shards overlap with those of other tensor-parallel ranks, which save the same values."""

    @property
    def is_flat(self) -> bool:
        """True if ``flat`` is one flat tensor; False at stage 0, where it lists parameters."""
        return bool(self.at)

    def as_leaf(self, name: str, value: Tensor, *, to_load: bool) -> Tensor | FlatShard:
        """Return ``value``, the shard of a parameter or of its state, with its position; unchanged if it is whole.

        To save, an empty shard is returned if another rank saves the values.
        """
        if self.layout is None:
            return value
        shape = self.layout.specs[name].shape
        position = self.layout.position(name)
        if not self.is_flat and position == ShardPosition.whole(shape):
            return value
        if name in self.saved_elsewhere and not to_load:
            return FlatShard(shape, 0, value.new_empty(0))
        if not self.is_flat:
            position = position.interval_of_shard(0, position.numel)  # the same elements, flattened
        if position.start is None:
            return FlatShard(shape, 0, value.reshape(-1), position)
        return FlatShard(shape, position.start, value.reshape(-1))

    def views(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Return a dict from parameter name to its shard in a flat tensor, such as a gradient; memory is shared."""
        if not self.is_flat:
            return dict(zip(self.names, flat, strict=True))
        views: dict[str, Any] = {}
        for name, located in self.at.items():
            views[name] = flat[0].narrow(0, located.start, located.length).view(self.shapes[name])
        return views


def locate(
    flat: Tensor, params: Mapping[str, Tensor], like: Mapping[str, Tensor], tensor_group: dist.ProcessGroup | None
) -> Pieces:
    """Find where the shards of ``params`` are in a flat tensor of ZeRO stage 1, 2 or 3.

    ``like`` has all parameters of the model by name, as meta tensors of their whole shapes. ``tensor_group`` is the
    tensor-parallel group, if there is one. All ranks with parts of these parameters call this together.
    """
    engine = stage_3_of(params.values())
    if engine is None:
        stage = 2
        cut = _cut_buffer(flat, params)
    else:
        stage = 3
        cut = _cut_parameters(flat, params, engine)
    if tensor_group is not None:
        cut = _cut_shards(cut, params, like, tensor_group)
    dtypes = dict.fromkeys(params, flat.dtype)
    layout = _layout(cut.cuts, like, dtypes, cut.group, stage=stage)
    shapes = {name: layout.position(name).shape for name in cut.at}
    pieces = Pieces(tuple(cut.at), [flat], layout, cut.at, shapes, cut.saved_elsewhere)
    misplaced_name = cut.misplaced_name or _differing(pieces, params)
    for name in gather_objects(misplaced_name, cut.group):
        if name is not None:
            raise _misplaced(name)
    return pieces


def whole_pieces(
    local: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    like: Mapping[str, Tensor],
    tensor_group: dist.ProcessGroup | None,
) -> Pieces:
    """Return the `Pieces` of stage 0, where each rank holds its parameters unflattened: whole, or as AutoTP's shards.

    ``local`` has the tensors on which DeepSpeed steps, by name: the parameters, or copies of them in fp32.
    """
    names = tuple(local)
    tensors = list(local.values())
    if tensor_group is None:
        return Pieces(names, tensors)
    size = dist.get_world_size(tensor_group)
    cuts: dict[str, Cut] = {}
    for name, param in params.items():
        shards = tensor_shards_of(name, param, local_shape_of(param), size)
        if shards is not None:
            cuts[name] = Listed(like[name].shape, shards)
    dtypes = {name: tensor.dtype for name, tensor in local.items()}
    return Pieces(names, tensors, _layout(cuts, like, dtypes, tensor_group, stage=None))


def _layout(
    cuts: Mapping[str, Cut],
    like: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    group: dist.ProcessGroup,
    *,
    stage: int | None,
) -> Layout:
    """Return the layout of one flat tensor. Parameters without a cut are not in it, and count as replicated."""
    specs: dict[str, Spec] = {}
    all_cuts: dict[str, Cut] = {}
    size = dist.get_world_size(group)
    for name, param in like.items():
        specs[name] = Spec(tuple(param.shape), dtypes.get(name, param.dtype))
        all_cuts[name] = cuts.get(name) or Whole(param.shape, size)
    return Layout("flat", specs, all_cuts, size, dist.get_rank(group), group, stage)


class _Cut(NamedTuple):
    """Which interval of each parameter each rank holds, and where this rank's intervals are in its flat tensor."""

    cuts: dict[str, Cut]
    at: dict[str, Located]
    group: dist.ProcessGroup
    misplaced_name: str | None = None
    """The first parameter for which DeepSpeed's mapping is wrong, to be raised on all ranks."""
    saved_elsewhere: frozenset[str] = frozenset()
    """See `Pieces`."""


def _cut_buffer(flat: Tensor, params: Mapping[str, Tensor]) -> _Cut:
    """Find where each rank holds each parameter at stages 1 and 2, which partition the concatenated parameters."""
    located_here = _mappings(params)
    group = _data_group(flat, params)
    located_on_ranks: list[dict[str, Located]] = gather_objects(located_here, group)
    length = flat.numel()
    borders = tuple([rank * length for rank in range(len(located_on_ranks) + 1)])
    cuts: dict[str, Cut] = {}
    misplaced_name: str | None = None
    for name, param in params.items():
        shape = local_shape_of(param)
        cuts[name] = Intervals(shape, 0, borders)
        if not prod(shape):  # AutoTP gives a rank no rows if there are fewer heads than ranks
            continue
        starts: set[int] = set()  # of the parameter in the concatenation of the ranks' flat tensors, for each rank
        located_elements = 0  # on all ranks together
        for rank, located_on_rank in enumerate(located_on_ranks):
            located = located_on_rank[name]
            if located.length:
                starts.add(rank * length + located.start - located.begin)
                located_elements += located.length
        # The mapping is right if all ranks agree on the start, and together hold every element once.
        if len(starts) == 1 and located_elements == prod(shape):
            cuts[name] = Intervals(shape, starts.pop(), borders)
        elif misplaced_name is None:
            misplaced_name = name
    return _Cut(cuts, located_here, group, misplaced_name)


def _mappings(params: Mapping[str, Tensor]) -> dict[str, Located]:
    """Return where this rank holds each parameter at stages 1 and 2; a length of 0 if it holds nothing of it."""
    located: dict[str, Located] = {}
    for name, param in params.items():
        mapping: Any = getattr(param, "_hp_mapping", None)
        if mapping is None:
            located[name] = Located(0, 0, 0)
        else:
            in_flat = mapping.hp_fragment_address
            located[name] = Located(in_flat.start, in_flat.numel, mapping.lp_fragment_address.start)
    return located


def _data_group(flat: Tensor, params: Mapping[str, Tensor]) -> Any:
    """Return the process group over which DeepSpeed has partitioned the parameters at stages 1 and 2."""
    for param in params.values():
        group: Any = getattr(param, "_dp_group", None)
        if group is not None:
            return group
    raise ValueError(
        f"{next(iter(params))!r}: found a flat tensor of {flat.numel()} elements in its group, and no mapping of "
        "DeepSpeed to the parameter; expected ZeRO stage 1, 2 or 3, or whole parameters"
    )


def _cut_parameters(flat: Tensor, params: Mapping[str, Tensor], engine: Any) -> _Cut:
    """Find where each rank holds each parameter at stage 3, where ``flat`` concatenates the shards of this rank."""
    flat_ids = list(map(id, engine.fp32_partitioned_groups_flat))
    members: list[Any] = engine.fp16_groups[flat_ids.index(id(flat))]
    name_of = {id(param): name for name, param in params.items()}
    group = members[0].ds_process_group
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    cut = _Cut({}, {}, group)
    offset = 0
    for param in members:
        name = name_of[id(param)]
        shape = local_shape_of(param)
        length = int(param.ds_tensor.ds_numel)  # of every rank's shard: the last ones are padded
        borders = [length * index for index in range(size + 1)]
        cut.cuts[name] = Intervals(shape, 0, tuple(borders))
        begin = min(rank * length, prod(shape))
        cut.at[name] = Located(offset, min(length, prod(shape) - begin), begin)
        offset += length
    return cut


def _cut_shards(
    cut: _Cut, params: Mapping[str, Tensor], like: Mapping[str, Tensor], tensor_group: dist.ProcessGroup
) -> _Cut:
    """Compose the partition by ZeRO, of this tensor-parallel rank's shards, with the partition by AutoTP."""
    group = block_group_of(cut.group, tensor_group)
    tensor_rank = dist.get_rank(tensor_group)
    intervals_of_ranks: list[tuple[int, dict[str, Located]]] = gather_objects((tensor_rank, dict(cut.at)), group)
    cuts: dict[str, Cut] = {}
    overlapping: set[str] = set()
    for name, param in params.items():
        shape = tuple(like[name].shape)
        shards = tensor_shards_of(name, param, local_shape_of(param), dist.get_world_size(tensor_group))
        positions: list[ShardPosition] = []
        for shard_index, located in intervals_of_ranks:
            start = located[name].begin
            stop = start + located[name].length
            if shards is None:
                positions.append(ShardPosition.interval(shape, start, stop))
            else:
                positions.append(shards[shard_index].interval_of_shard(start, stop))
        cuts[name] = Listed(shape, positions)
        if shards is None and _do_overlap(positions):
            overlapping.add(name)
    # If AutoTP has split other parameters unevenly, the flat tensors of tensor-parallel ranks have different lengths,
    # so a parameter that they all hold is cut at different places. An update needs no more than equal values where the
    # shards overlap. A checkpoint needs shards without overlaps: those of one tensor-parallel rank.
    if tensor_rank == 0:
        overlapping.clear()  # this rank saves them
    saved_elsewhere = frozenset(overlapping)
    return _Cut(cuts, cut.at, group, cut.misplaced_name, saved_elsewhere)


def _do_overlap(positions: Iterable[ShardPosition]) -> bool:
    """Return whether different intervals of one tensor overlap."""
    intervals = sorted({(position.start or 0, position.numel) for position in positions if position.numel})
    neighbors = pairwise(intervals)
    return any(start + length > next_start for (start, length), (next_start, _) in neighbors)


def flats_of(engine: Any, params: Iterable[Tensor]) -> list[Tensor]:
    """Return the flat tensors in which DeepSpeed holds these parameters at stage 3, one for each sub-group."""
    param_ids = set(map(id, params))
    flats: list[Tensor] = []
    for flat, members in zip(engine.fp32_partitioned_groups_flat, engine.fp16_groups, strict=True):
        if id(members[0]) in param_ids:
            flats.append(flat)
    return flats


def _differing(pieces: Pieces, params: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first parameter whose shard was not located correctly; None if all were."""
    for name, view in pieces.views(pieces.flat).items():
        partition = getattr(params[name], "ds_tensor", None)  # this rank's shard at stage 3
        if partition is not None:
            shard = partition.detach().reshape(-1)[: view.numel()]
        else:
            begin = pieces.at[name].begin
            shard = params[name].detach().reshape(-1)[begin : begin + view.numel()]
        if shard.numel() < view.numel():
            warnings.warn(
                f"{name!r}: its values cannot be compared with DeepSpeed's flat tensor, because DeepSpeed stores them "
                "elsewhere; DeepSpeed's mapping is assumed to be right",
                stacklevel=2,
            )
            continue
        values = view.reshape(-1).to(shard.dtype)
        if not torch.equal(values.nan_to_num(), shard.to(view.device).nan_to_num()):
            return name
    return None


def _misplaced(name: str) -> ValueError:
    """Return an error for a parameter that is not where DeepSpeed's mapping locates it in the flat tensor."""
    return ValueError(
        f"{name!r}: its values are not at the position that DeepSpeed's mapping gives in the flat tensor: the update "
        'would change other parameters. With "round_robin_gradients": true the mapping is wrong: set it to false'
    )
