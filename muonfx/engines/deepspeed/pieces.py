"""Locate the shards of parameters in the flat tensors that DeepSpeed steps on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonfx.sharding.cut import Intervals, Whole
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards import FlatPiece
from muonfx.tree import Spec

__all__ = ["Located", "Pieces", "flats_of", "locate", "shape_of", "stage_3_of", "trained_parameters"]


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict from name to parameter, with the parameters of a model that require grad."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {type(model).__name__}")
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def shape_of(param: Tensor) -> tuple[int, ...]:
    """Return the global shape of a parameter, which DeepSpeed may have partitioned."""
    return tuple(getattr(param, "ds_shape", param.shape))


def stage_3_of(params: Iterable[Tensor]) -> Any:
    """Return DeepSpeed's own optimizer that holds these parameters at ZeRO stage 3; None at other stages."""
    return next(filter(None, (getattr(param, "_z3_optimizer", None) for param in params)), None)


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
    """The layout (which rank holds which shard of each parameter); None at stage 0."""
    at: Mapping[str, Located] = {}
    """A dict from parameter name to the position of this rank's shard; empty at stage 0."""
    shapes: Mapping[str, tuple[int, ...]] = {}
    """A dict from parameter name to the shape of this rank's shard; empty at stage 0."""

    def as_leaf(self, name: str, value: Tensor) -> Tensor | FlatPiece:
        """Return ``value``, the shard of a parameter or of its state, as a `FlatPiece`; at stage 0, unchanged."""
        if self.layout is None:
            return value
        return FlatPiece(self.layout.specs[name].shape, self.at[name].begin, value.reshape(-1))

    def views(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Return a dict from parameter name to its shard in a flat tensor, such as a gradient; memory is shared."""
        if self.layout is None:
            return dict(zip(self.names, flat, strict=True))
        return {n: flat[0].narrow(0, at.start, at.length).view(self.shapes[n]) for n, at in self.at.items()}


def locate(flat: Tensor, params: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Pieces:
    """Find where the shards of ``params`` are in a flat tensor of ZeRO stage 1, 2 or 3.

    ``like`` has all parameters of the model by name, as meta tensors. All ranks of the flat tensor call this together.
    """
    engine = stage_3_of(params.values())
    cut = _cut_buffer(flat, params) if engine is None else _cut_parameters(flat, params, engine)
    # The layout has all other parameters as replicated ones; this flat tensor holds no data of theirs.
    specs = {name: Spec(tuple(x.shape), flat.dtype if name in cut.cuts else x.dtype) for name, x in like.items()}
    size, rank = dist.get_world_size(cut.group), dist.get_rank(cut.group)
    cuts = {name: cut.cuts.get(name) or Whole(spec.shape, size) for name, spec in specs.items()}
    layout = Layout("flat", specs, cuts, size, rank, cut.group, stage=2 if engine is None else 3)
    shapes = {name: layout.piece(name).shape for name in cut.at}
    pieces = Pieces(tuple(cut.at), [flat], layout, cut.at, shapes)
    found: list[str | None] = [None] * size
    dist.all_gather_object(found, _differing(pieces, params), group=cut.group)
    if wrong := [name for name in found if name is not None]:
        raise _misplaced(wrong[0])
    return pieces


class _Cut(NamedTuple):
    """Which interval of each parameter each rank holds, and where this rank's intervals are in its flat tensor."""

    cuts: dict[str, Intervals]
    at: dict[str, Located]
    group: dist.ProcessGroup


def _cut_buffer(flat: Tensor, params: Mapping[str, Tensor]) -> _Cut:
    """Find where each rank holds each parameter at stages 1 and 2, which partition the concatenated parameters."""
    own = dict.fromkeys(params, Located(0, 0, 0))
    for name, param in params.items():
        mapping: Any = getattr(param, "_hp_mapping", None)
        if mapping is not None:
            there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
            own[name] = Located(here.start, here.numel, there.start)
    group: Any = next(filter(None, (getattr(param, "_dp_group", None) for param in params.values())), None)
    if group is None:
        raise ValueError(
            f"{next(iter(params))!r}: found a flat tensor of {flat.numel()} elements in its group, and no mapping of "
            "DeepSpeed to the parameter; expected ZeRO stage 1, 2 or 3, or whole parameters"
        )
    size, length = dist.get_world_size(group), flat.numel()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, own, group=group)
    borders = tuple(rank * length for rank in range(size + 1))
    cuts: dict[str, Intervals] = {}
    for name, param in params.items():
        parts = [(rank, pieces[name]) for rank, pieces in enumerate(found) if pieces[name].length]
        starts = {rank * length + part.start - part.begin for rank, part in parts}
        if len(starts) != 1 or sum(part.length for _, part in parts) != prod(shape_of(param)):
            raise _misplaced(name)
        cuts[name] = Intervals(shape_of(param), starts.pop(), borders)
    return _Cut(cuts, own, group)


def _cut_parameters(flat: Tensor, params: Mapping[str, Tensor], engine: Any) -> _Cut:
    """Find where each rank holds each parameter at stage 3, where ``flat`` concatenates the shards of this rank."""
    place = next(i for i, mine in enumerate(engine.fp32_partitioned_groups_flat) if mine is flat)
    name_of = {id(param): name for name, param in params.items()}
    members: list[Any] = engine.fp16_groups[place]
    group = members[0].ds_process_group
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    found = _Cut({}, {}, group)
    offset = 0
    for param in members:
        name, part, numel = name_of[id(param)], int(param.ds_tensor.ds_numel), prod(shape_of(param))
        found.cuts[name] = Intervals(shape_of(param), 0, tuple(part * one for one in range(size + 1)))
        begin = min(rank * part, numel)
        found.at[name] = Located(offset, min(part, numel - begin), begin)
        offset += part
    return found


def flats_of(engine: Any, params: Iterable[Tensor]) -> list[Tensor]:
    """Return the flat tensors in which DeepSpeed holds these parameters at stage 3, one for each sub-group."""
    wanted = {id(param) for param in params}
    pairs = zip(engine.fp32_partitioned_groups_flat, engine.fp16_groups, strict=True)
    return [flat for flat, members in pairs if id(members[0]) in wanted]


def _differing(pieces: Pieces, params: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first parameter whose shard was not located correctly; None if all were."""
    for name, piece in pieces.views(pieces.flat).items():
        held = getattr(params[name], "ds_tensor", None)
        begin = 0 if held is not None else pieces.at[name].begin
        known = (params[name] if held is None else held).detach().reshape(-1)[begin : begin + piece.numel()]
        if known.numel() < piece.numel():
            warnings.warn(
                f"{name!r}: its values cannot be compared with DeepSpeed's flat tensor, because DeepSpeed stores them "
                "elsewhere; DeepSpeed's mapping is assumed to be right",
                stacklevel=2,
            )
        elif not torch.equal(piece.reshape(-1).to(known.dtype).nan_to_num(), known.to(piece.device).nan_to_num()):
            return name
    return None


def _misplaced(name: str) -> ValueError:
    return ValueError(
        f"{name!r}: its values are not at the position that DeepSpeed's mapping gives in the flat tensor: the update "
        'would change other parameters. With "round_robin_gradients": true the mapping is wrong: set it to false'
    )
