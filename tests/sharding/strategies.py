"""Strategies for cases of the law: models of odd shapes, chains, and layouts of all kinds."""

from typing import Any

import torch
from hypothesis import strategies as st

import muonfx as mfx
from muonfx.core import Locality
from muonfx.testing import chains, transforms
from tests.sharding.cases import (
    Case,
    Flat,
    FullyShardedTensorParallel,
    Leaf,
    Model,
    Placed,
    Replicated,
    Zero,
    distinct,
    two_groups,
)

_SIDES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 33, 0)
_SHORT = (1, 2, 3, 4, 5, 0)
_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)


@st.composite
def leaves(draw: st.DrawFn, ranks: tuple[int, int] = (0, 4)) -> Leaf:
    ndim = draw(st.sampled_from([rank for rank in (2, 2, 1, 3, 4, 0) if ranks[0] <= rank <= ranks[1]]))
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
    # fully_shard wants what is parallel over rows to be cut evenly, and leaves out what is empty
    ways = {
        name: draw(st.sampled_from(["r", *["0"] * (leaf.shape[0] % 4 == 0), *["1"] * (leaf.shape[1] > 1)]))
        for name, leaf in model.leaves.items()
        if len(leaf.shape) >= 2
    }
    return FullyShardedTensorParallel(ways)


def zeros() -> st.SearchStrategy[Zero]:
    return st.builds(
        Zero,
        st.integers(1, 3),
        st.sampled_from(("whole", "flat", "each")),
        st.sampled_from((1, 2, 3, 8, 64)),
        st.booleans(),
    )


def pretended(model: Model, size: int) -> st.SearchStrategy[Any]:
    """Layouts that need no process."""
    return st.one_of(zeros(), flats(model, size), st.just(Replicated()))


def layouts(model: Model, size: int) -> st.SearchStrategy[Any]:
    """Layouts of all kinds, over so many ranks."""
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
    """What people train with: a partition, with drawn neighbours and drawn parts."""
    aspects = st.sampled_from((None, ((-2,), (-1,)), ((0,), (1,))))
    names = st.sampled_from(("polar_express_5", "keller"))

    def orthogonal(dims: Any, coefficients: str, middle: list[mfx.Transform]) -> mfx.Transform:
        newton = mfx.orthogonalize(dtype=torch.float32, view=mfx.MatrixView(dims=dims), coefficients=coefficients)
        return mfx.chain(mfx.momentum(0.9), newton, *middle, mfx.scale_by_shape(view=mfx.MatrixView(dims=dims)))

    between = st.lists(transforms(["normalize_neurons", "scale", "clip_by_block_rms"]), max_size=1)
    inner = st.builds(orthogonal, aspects, names, between)
    before = st.lists(transforms(["clip_by_global_norm", "clip_by_value", "scale"]), max_size=1)
    wraps = st.sampled_from((None, mfx.skip_nonfinite, mfx.as_tensors, lambda tx: mfx.accumulate(tx, 2)))

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
    return "dims" not in text and "clip_by_global_norm" not in text and distinct(matrices)


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
