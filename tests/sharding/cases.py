"""Cases of the law as values: a model with gradients for some steps, and how its parameters are laid out over ranks.

A case is drawn in one process and sent to others, which all make the same tensors of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from muonfx.core import Locality
from muonfx.testing import chains, transforms
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
            name: leaf
            if isinstance(leaf, Leaf)
            else Leaf(leaf, "muon" if len(leaf) >= 2 else "adamw")
            for name, leaf in leaves.items()
        },
        seed,
        (frozenset(),) * steps,
    )


def muon(**more: Any) -> mfx.Transform:
    return mfx.chain(
        mfx.momentum(0.9), mfx.orthogonalize(dtype=torch.float32, **more), mfx.scale_by_shape()
    )


def two_groups(
    labels: dict[str, str], matrices: mfx.Transform | None = None, b1: float = 0.9
) -> mfx.Transform:
    """Muon for some parameters, AdamW for others, nothing for the frozen ones."""
    parts = {
        "muon": matrices or muon(),
        "adamw": mfx.scale_by_adam(b1, 0.95),
        "frozen": mfx.set_to_zero(),
    }
    return mfx.chain(
        mfx.partition(
            {label: part for label, part in parts.items() if label in labels.values()}, labels
        ),
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
    knows_tx: bool = False

    def of(self, params: Params, group: Any, tx: Any = None) -> Any:
        return sharding.zero(
            params,
            group,
            stage=self.stage,
            partition=self.partition,
            tx=tx if self.knows_tx else None,
        )


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
        return sharding.flat(
            params, group, order=list(self.order), cuts=list(self.cuts), starts=starts
        )


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
            else distribute_tensor(
                leaf, mesh, [placement(p) for p in self.placements[name]], src_data_rank=None
            )
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
            placed = distribute_tensor(
                leaf, here.grid["inner"], [placement(how)], src_data_rank=None
            )
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
    return case.of(
        params, here if isinstance(case, Placed | FullyShardedTensorParallel) else here.group, tx
    )


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


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def flat(here: Here, params: dict[str, Tensor]) -> Any:
    layout = sharding.zero(params, here.group, partition="flat")
    return layout, layout.shard(params)


_SIDES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 33, 0)
_SHORT = (1, 2, 3, 4, 5, 0)
_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)


@st.composite
def leaves(draw: st.DrawFn, ranks: tuple[int, int] = (0, 4)) -> Leaf:
    ndim = draw(
        st.sampled_from([rank for rank in (2, 2, 1, 3, 4, 0) if ranks[0] <= rank <= ranks[1]])
    )
    sides = _SIDES if ndim <= 2 else _SHORT
    shape = tuple(draw(st.lists(st.sampled_from(sides), min_size=ndim, max_size=ndim)))
    labels = ("muon", "muon", "adamw", "frozen") if ndim >= 2 else ("adamw", "adamw", "frozen")
    return Leaf(shape, draw(st.sampled_from(labels)), draw(st.sampled_from(_DTYPES)))


@st.composite
def models(draw: st.DrawFn, ranks: tuple[int, int] = (0, 4)) -> Model:
    # names whose order in the tree (sorted) is not that in the dict
    names = draw(st.permutations(["b", "head_weight", "a2", "a10"]))
    found = {name: draw(leaves(ranks)) for name in names[: draw(st.integers(1, 4))]}
    some = st.sets(st.sampled_from(list(found)), max_size=2).map(frozenset)
    absent = draw(st.lists(st.one_of(st.just(frozenset()), some), min_size=1, max_size=3))
    return Model(found, draw(st.integers(0, 2**16)), tuple(absent))


@st.composite
def flats(draw: st.DrawFn, model: Model, size: int) -> Flat:
    order = tuple(draw(st.permutations(list(model.leaves))))
    room = (
        tuple(draw(st.lists(st.integers(0, 3), min_size=len(order), max_size=len(order))))
        if draw(st.booleans())
        else ()
    )
    total = model.numel + sum(room)
    inner = sorted(draw(st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1)))
    return Flat(order, (0, *inner, total + draw(st.sampled_from((0, 0, 5)))), room)


@st.composite
def placed(draw: st.DrawFn, model: Model, dims: int) -> Placed:
    def letters(leaf: Leaf) -> st.SearchStrategy[tuple[str, ...]]:
        one = st.sampled_from(["r", *map(str, range(min(2, len(leaf.shape))))])
        return st.lists(one, min_size=dims, max_size=dims).map(tuple)

    found = {name: draw(letters(leaf)) for name, leaf in model.leaves.items()}
    if all(set(letter) == {"r"} for letter in found.values()) and draw(st.booleans()):
        first = next(iter(found))
        found |= {name: ("plain",) for name in found if name != first}
    return Placed(found, grid=dims == 2)


@st.composite
def fully_sharded(draw: st.DrawFn, model: Model) -> FullyShardedTensorParallel:
    # fully_shard requires row-parallel parameters to be split evenly, and skips empty parameters
    ways = {
        name: draw(
            st.sampled_from(["r", *["0"] * (leaf.shape[0] % 4 == 0), *["1"] * (leaf.shape[1] > 1)])
        )
        for name, leaf in model.leaves.items()
        if len(leaf.shape) >= 2
    }
    return FullyShardedTensorParallel(ways)


def zeros() -> st.SearchStrategy[Zero]:
    return st.builds(
        Zero,
        st.integers(1, 3),
        st.sampled_from(("whole", "flat", "each")),
        st.booleans(),
    )


def pretended(model: Model, size: int) -> st.SearchStrategy[Any]:
    """Layouts that need no process."""
    return st.one_of(zeros(), flats(model, size), st.just(Replicated()))


def layouts(model: Model, size: int) -> st.SearchStrategy[Any]:
    """Layouts of all kinds over ``size`` ranks."""
    kinds = [zeros(), flats(model, size), placed(model, 1), st.just(Replicated())]
    if size == 4:
        kinds += grids(model)
    return st.sampled_from(kinds).flatmap(lambda kind: kind)


def grids(model: Model) -> list[st.SearchStrategy[Any]]:
    """Layouts over two dims of two ranks each."""
    some = any(leaf.shape and leaf.numel for leaf in model.leaves.values())
    return [placed(model, 2), *([fully_sharded(model)] if some else [])]


def _is_compact(tx: mfx.Transform) -> bool:
    return "int8(" in repr(tx) or "fp8(" in repr(tx)


def whole_chains(model: Model) -> st.SearchStrategy[mfx.Transform]:
    """Chains of any transforms that take the model's leaves."""
    matrices = all(len(leaf.shape) >= 2 for leaf in model.leaves.values())
    return chains(max_size=3, matrices=matrices).map(lambda all_: mfx.chain(*all_))


def grouped_chains(model: Model) -> st.SearchStrategy[mfx.Transform]:
    """A chain as in training: a partition, with drawn neighbours and drawn parts."""
    patterns = st.sampled_from((None, "... out in -> ... out in", "out in ... -> ... out in"))
    names = st.sampled_from(("polar_express_5", "keller"))

    def orthogonal(pattern: Any, coefficients: str, middle: list[mfx.Transform]) -> mfx.Transform:
        newton = mfx.orthogonalize(
            dtype=torch.float32, view=mfx.MatrixView(pattern), coefficients=coefficients
        )
        return mfx.chain(
            mfx.momentum(0.9), newton, *middle, mfx.scale_by_shape(view=mfx.MatrixView(pattern))
        )

    between = st.lists(transforms(["normalize_neurons", "scale", "clip_by_block_rms"]), max_size=1)
    inner = st.builds(orthogonal, patterns, names, between)
    before = st.lists(transforms(["clip_by_global_norm", "clip_by_value", "scale"]), max_size=1)
    wraps = st.sampled_from(
        (None, mfx.skip_nonfinite, mfx.as_tensors, lambda tx: mfx.accumulate(tx, 2))
    )

    def build(matrices: mfx.Transform, first: list[mfx.Transform], wrap: Any) -> mfx.Transform:
        tx = mfx.chain(*first, two_groups(model.labels, matrices))
        return wrap(tx) if wrap else tx

    return st.builds(build, inner, before, wraps)


def is_exact(tx: mfx.Transform, model: Model) -> bool:
    """Whether sharding changes no order of summation: no sum over leaves, and no two matrices in a batch.

    Two more things make a last bit differ, in one process too. In a sum with a factor, as weight decay is, torch rounds
    bf16 otherwise in the last few elements of a tensor than in those that it adds in vectors. And a 0-d tensor, which
    in a flat piece is one of one element, computes with tensor numbers in their dtype.
    """
    text = repr(tx)
    if any(leaf.dtype == torch.bfloat16 or not leaf.shape for leaf in model.leaves.values()):
        return False
    matrices = [leaf.shape for leaf in model.leaves.values() if leaf.label == "muon"]
    return "->" not in text and "clip_by_global_norm" not in text and distinct(matrices)


@st.composite
def cases(draw: st.DrawFn, size: int) -> Case:
    model = draw(models(draw(st.sampled_from(((0, 4), (0, 4), (2, 4))))))
    if draw(st.booleans()):
        tx = draw(grouped_chains(model))
        exact = is_exact(tx, model)
    else:
        tx = draw(whole_chains(model).filter(lambda tx: not _is_compact(tx)))
        exact = tx.locality is Locality.ELEMENT
    return Case(model, tx, draw(layouts(model, size)), exact, draw(st.booleans()))
