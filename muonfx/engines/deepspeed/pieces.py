"""Locate the shards of parameters in the flat tensors that DeepSpeed steps on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonfx.sharding.cut import Intervals, Whole
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards import FlatPiece
from muonfx.tree import Spec

__all__ = [
    "Pieces",
    "check_values",
    "cut_buffer",
    "cut_parameters",
    "differing",
    "flats_of",
    "global_parameters",
    "untyped",
    "whole_parameters",
]


def global_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return meta tensors with the global shapes of the trained parameters, which DeepSpeed may have partitioned."""
    return {
        name: torch.empty(tuple(getattr(param, "ds_shape", param.shape)), dtype=param.dtype, device="meta")
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def untyped(param: Tensor) -> Any:
    """Return a parameter as Any, for the attributes that DeepSpeed adds to it."""
    return param


class Pieces(NamedTuple):
    """The shards of parameters in the tensors that DeepSpeed steps on."""

    flat: list[Tensor]
    """One flat tensor, or at stage 0 the whole parameters."""
    at: dict[str, tuple[int, int]]
    """By name, the start and length of a shard in the flat tensor; empty at stage 0."""
    begins: dict[str, int]
    """By name, the start of the shard in the flattened parameter."""
    layout: Layout | None
    """The layout of the ranks that share the parameters; None at stage 0."""
    names: tuple[str, ...]

    def among(self, like: Mapping[str, Tensor]) -> Pieces:
        """Add all other parameters to the layout, as replicated; this flat tensor holds no data of theirs."""
        layout = self.layout
        assert layout is not None
        others = {name: x for name, x in like.items() if name not in layout.specs}
        specs = {name: Spec(tuple(x.shape), x.dtype) for name, x in others.items()}
        cuts = {name: Whole(spec.shape, layout.size) for name, spec in specs.items()}
        whole = replace(layout, specs={**layout.specs, **specs}, pieces={**layout.pieces, **cuts}, derived={})
        return self._replace(layout=whole)

    def as_leaf(self, name: str, value: Tensor) -> Tensor | FlatPiece:
        """Wrap a shard, or a state of its size, as a leaf that records its position in the whole tensor."""
        if self.layout is None:
            return value
        return FlatPiece(self.layout.specs[name].shape, self.begins[name], value.reshape(-1))

    def views(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return by name the views of the shards in a flat tensor of the same length."""
        if self.layout is None:
            return dict(zip(self.names, flat, strict=True))
        shapes = self.shapes
        return {name: flat[0].narrow(0, *self.at[name]).view(shapes[name]) for name in self.names}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of this rank's shards by name."""
        layout = self.layout
        assert layout is not None
        if "shapes of pieces" not in layout.derived:
            layout.derived["shapes of pieces"] = {name: layout.piece(name).shape for name in self.names}
        return layout.derived["shapes of pieces"]


def whole_parameters(names: Sequence[str], given: list[Tensor]) -> Pieces:
    """Stage 0: every rank has every parameter whole."""
    return Pieces(given, {}, dict.fromkeys(names, 0), None, tuple(names))


def cut_buffer(flat: Tensor, params: Mapping[str, Tensor]) -> Pieces:
    """Stages 1 and 2: the parameters are concatenated, padded, and partitioned equally among the ranks."""
    own: dict[str, tuple[int, int, int]] = {}
    for name, param in params.items():
        mapping = getattr(param, "_hp_mapping", None)
        if mapping is not None:
            there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
            own[name] = (there.start, here.start, here.numel)
    group = next((untyped(x)._dp_group for x in params.values() if hasattr(x, "_dp_group")), None)
    if group is None:
        raise ValueError(
            f"{next(iter(params))!r}: found a flat tensor of {flat.numel()} elements in its group, and nothing that "
            "says where the parameter lies in it; expected ZeRO stage 1, 2 or 3, or whole parameters"
        )
    size = dist.get_world_size(group)
    found: list[Any] = [None] * size
    dist.all_gather_object(found, (flat.numel(), own), group=group)
    length = flat.numel()
    if any(theirs != length for theirs, _ in found):
        raise ValueError(f"ranks have flat tensors of {[theirs for theirs, _ in found]} elements; expected equal parts")
    starts: dict[str, int] = {}
    covered = dict.fromkeys(params, 0)
    for rank, (_, pieces) in enumerate(found):
        for name, (begin, at, numel) in pieces.items():
            start = rank * length + at - begin
            if starts.setdefault(name, start) != start:
                raise misplaced(name)
            covered[name] += numel
    specs = {name: Spec(shape_of(param), flat.dtype) for name, param in params.items()}
    for name, spec in specs.items():
        if covered[name] != prod(spec.shape):
            raise misplaced(name)
    places = tuple(rank * length for rank in range(size + 1))
    cuts = {name: Intervals(spec.shape, starts[name], places) for name, spec in specs.items()}
    layout = Layout("flat", specs, cuts, size, dist.get_rank(group), group, stage=2)
    at = {name: own[name][1:] if name in own else (0, 0) for name in params}
    begins = {name: own[name][0] if name in own else 0 for name in params}
    return Pieces([flat], at, begins, layout, tuple(params))


def cut_parameters(flat: Tensor, params: Mapping[str, Tensor], engine: Any) -> Pieces:
    """Stage 3: each parameter is padded and partitioned equally; a rank's shards are concatenated."""
    place = next(i for i, mine in enumerate(engine.fp32_partitioned_groups_flat) if mine is flat)
    name_of = {id(param): name for name, param in params.items()}
    members: list[Any] = engine.fp16_groups[place]
    group = members[0].ds_process_group
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    specs: dict[str, Spec] = {}
    cuts: dict[str, Intervals] = {}
    at: dict[str, tuple[int, int]] = {}
    begins: dict[str, int] = {}
    offset = 0
    for param in members:
        name, part = name_of[id(param)], int(param.ds_tensor.ds_numel)
        specs[name] = Spec(shape_of(param), flat.dtype)
        cuts[name] = Intervals(specs[name].shape, 0, tuple(part * one for one in range(size + 1)))
        begins[name] = min(rank * part, prod(specs[name].shape))
        at[name] = (offset, min(part, prod(specs[name].shape) - begins[name]))
        offset += part
    layout = Layout("flat", specs, cuts, size, rank, group, stage=3)
    return Pieces([flat], at, begins, layout, tuple(specs))


def flats_of(engine: Any, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the flat tensors of some parameters at stage 3, one for each sub-group."""
    wanted = {id(param) for param in params}
    pairs = zip(engine.fp32_partitioned_groups_flat, engine.fp16_groups, strict=True)
    return [flat for flat, members in pairs if id(members[0]) in wanted]


def shape_of(param: Tensor) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


def check_values(pieces: Pieces, params: Mapping[str, Tensor]) -> None:
    """Require on all ranks that each shard equals its parameter, rounded to the dtype of the parameter."""
    layout = pieces.layout
    assert layout is not None
    found: list[str | None] = [None] * layout.size
    dist.all_gather_object(found, differing(pieces, params), group=layout.group)
    if wrong := [name for name in found if name is not None]:
        raise misplaced(wrong[0])


def differing(pieces: Pieces, params: Mapping[str, Tensor]) -> str | None:
    """Return the first parameter whose values differ from its shard on this rank."""
    for name, piece in pieces.views(pieces.flat).items():
        held = getattr(params[name], "ds_tensor", None)
        begin = 0 if held is not None else pieces.begins[name]
        source = (params[name] if held is None else held).detach().reshape(-1)
        if piece.numel() == 0:
            continue
        if source.numel() < begin + piece.numel():
            warnings.warn(
                f"{name!r}: DeepSpeed has its values elsewhere, so that nothing shows whether the flat tensor "
                "has them where DeepSpeed says: that is assumed",
                stacklevel=2,
            )
            continue
        known = source[begin : begin + piece.numel()].to(piece.device)
        if not torch.equal(piece.reshape(-1).to(known.dtype).nan_to_num(), known.nan_to_num()):
            return name
    return None


def misplaced(name: str) -> ValueError:
    return ValueError(
        f"{name!r}: its values are not where DeepSpeed says that they are in the flat tensor, so the update would go "
        'to other parameters. It is so with "round_robin_gradients": true, whose mapping is wrong: set it to false'
    )
