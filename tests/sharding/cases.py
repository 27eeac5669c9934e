"""Cases of the law as values: a model with gradients for some steps, and how its parameters are laid out over ranks.

A case is drawn in one process and sent to others, which all make the same tensors of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Leaf:
    """A parameter: its label says what `two_groups` does with it."""

    shape: tuple[int, ...]
    label: str = "adamw"
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Model:
    """Parameters, and gradients for some steps, of which some are None."""

    leaves: dict[str, Leaf]
    seed: int = 0
    absent: tuple[frozenset[str], ...] = (frozenset(), frozenset())

    @property
    def steps(self) -> int:
        return len(self.absent)

    @property
    def labels(self) -> dict[str, str]:
        return {name: leaf.label for name, leaf in self.leaves.items()}

    @property
    def numel(self) -> int:
        return sum(leaf.numel for leaf in self.leaves.values())

    def params(self) -> Params:
        return self.drawn(0)

    def grads(self, step: int, rank: int | None = None) -> dict[str, Tensor | None]:
        """Those of a step; of a rank, where each has its own."""
        drawn = self.drawn(1 + step + (0 if rank is None else 1000 * (rank + 1)))
        return {name: None if name in self.absent[step] else grad for name, grad in drawn.items()}

    def drawn(self, turn: int) -> Params:
        draw = torch.Generator().manual_seed(1_000_003 * turn + self.seed)
        return {
            name: torch.randn(leaf.shape, generator=draw, dtype=torch.float64).to(leaf.dtype)
            for name, leaf in self.leaves.items()
        }


def model(steps: int = 2, seed: int = 0, **leaves: tuple[int, ...] | Leaf) -> Model:
    """A model by shapes: those of two dims and more are Muon's."""
    return Model(
        {
            name: leaf if isinstance(leaf, Leaf) else Leaf(leaf, "muon" if len(leaf) >= 2 else "adamw")
            for name, leaf in leaves.items()
        },
        seed,
        (frozenset(),) * steps,
    )


def muon(**more: Any) -> mfx.Transform:
    return mfx.chain(mfx.momentum(0.9), mfx.orthogonalize(dtype=torch.float32, **more), mfx.scale_by_shape())


def two_groups(labels: dict[str, str], matrices: mfx.Transform | None = None, b1: float = 0.9) -> mfx.Transform:
    """Muon for some parameters, AdamW for others, nothing for the frozen ones."""
    parts = {"muon": matrices or muon(), "adamw": mfx.scale_by_adam(b1, 0.95), "frozen": mfx.set_to_zero()}
    return mfx.chain(
        mfx.partition({label: part for label, part in parts.items() if label in labels.values()}, labels),
        mfx.add_decayed_weights(0.1),
        mfx.scale_by_learning_rate(0.1),
    )


# ------------------------------------------------------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Replicated:
    def of(self, params: Params, group: Any, tx: Any = None) -> Any:
        return sharding.replicated(params, group)


@dataclass(frozen=True)
class Zero:
    stage: int = 1
    partition: str = "whole"
    alignment: int = 1
    knows_tx: bool = False

    def of(self, params: Params, group: Any, tx: Any = None) -> Any:
        settings = {"stage": self.stage, "partition": self.partition, "alignment": self.alignment}
        return sharding.zero(params, group, tx=tx if self.knows_tx else None, **settings)


@dataclass(frozen=True)
class Flat:
    """A flat buffer in any order, with room between parameters, cut anywhere."""

    order: tuple[str, ...]
    cuts: tuple[int, ...]
    room: tuple[int, ...] = ()

    def of(self, params: Params, group: Any, tx: Any = None) -> Any:
        starts: dict[str, int] | None = None
        if self.room:
            starts, end = {}, 0
            for name, gap in zip(self.order, self.room, strict=True):
                starts[name] = end + gap
                end = starts[name] + params[name].numel()
        return sharding.flat(params, group, order=list(self.order), cuts=list(self.cuts), starts=starts)


@dataclass(frozen=True)
class Placed:
    """DTensors on a mesh of one dim, or on the grid; "0" shards dim 0, "r" replicates; a word is not placed at all."""

    placements: dict[str, tuple[str, ...]]
    grid: bool = False

    def of(self, params: Params, group: Here, tx: Any = None) -> Any:
        return sharding.from_dtensors(self.dtensors(params, group))

    def dtensors(self, params: Params, here: Here) -> dict[str, Any]:
        mesh = here.grid if self.grid else here.mesh
        return {
            name: leaf
            if self.placements[name] == ("plain",)
            else distribute_tensor(leaf, mesh, [placement(p) for p in self.placements[name]], src_data_rank=None)
            for name, leaf in params.items()
        }


@dataclass(frozen=True)
class FullyShardedTensorParallel:
    """Tensor parallel by rows or columns over the inner dim of the grid, then `fully_shard` over the outer one."""

    parallel: dict[str, str] = field(default_factory=dict)

    def of(self, params: Params, group: Here, tx: Any = None) -> Any:
        return sharding.from_dtensors(self.dtensors(params, group))

    def dtensors(self, params: Params, here: Here) -> dict[str, Any]:
        module = nn.Module()
        alone: dict[str, Tensor] = {}
        for name, leaf in params.items():
            if leaf.ndim == 0 or leaf.numel() == 0:  # which fully_shard does not take
                alone[name] = leaf
                continue
            how = self.parallel.get(name, "r")
            placed = distribute_tensor(leaf, here.grid["inner"], [placement(how)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(placed))
        if dict(module.named_parameters()):
            fully_shard(module, mesh=here.grid["outer"])
        sharded = {name: leaf.detach() for name, leaf in module.named_parameters()}
        return {name: alone[name] if name in alone else sharded[name] for name in params}


LayoutCase = Replicated | Zero | Flat | Placed | FullyShardedTensorParallel


def placement(letter: str) -> Placement:
    return Replicate() if letter == "r" else Shard(int(letter))


def laid_out(case: LayoutCase, params: Params, here: Here, tx: Any = None) -> Any:
    """The layout on a real rank."""
    return case.of(params, here if isinstance(case, Placed | FullyShardedTensorParallel) else here.group, tx)


@dataclass(frozen=True)
class Case:
    """One run of the law; `exact`: bit for bit."""

    model: Model
    tx: mfx.Transform
    layout: LayoutCase
    exact: bool
    donate: bool = False


def distinct(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether no two matrices have one shape up to transposition: those are multiplied in one batch."""
    kinds = [tuple(sorted((shape[0], prod(shape[1:])))) for shape in shapes]
    return len(set(kinds)) == len(kinds)


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that cannot be told apart."""
    plain = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    flat = plain.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return tuple(plain.shape), plain.dtype, bytes(chain(flat.view(torch.uint8).tolist())) if flat.numel() else b""


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def flat(here: Here, params: dict[str, Tensor]) -> Any:
    layout = sharding.zero(params, here.group, partition="flat")
    return layout, layout.shard(params)


def all_same_bits(results: list[Any]) -> bool:
    return len({tuple(sorted((name, bits(leaf)) for name, leaf in tree.items())) for tree in results}) == 1


def placed(here: Here, tensor: Tensor, *placements: Any) -> DTensor:
    return distribute_tensor(tensor, here.mesh, list(placements), src_data_rank=None)
