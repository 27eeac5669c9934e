"""Laws of cuts: the lazy pieces of all ranks are those that a plain loop over ranks makes, and few of them are made."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding import cut
from muonfx.sharding.plan import shares
from muonfx.sharding.shards import Piece
from tests.sharding.counting import count_calls

SHAPES = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)


def held(piece: Piece, shape: Sequence[int]) -> list[int]:
    """The elements of a piece, in the order of its local tensor."""
    return piece.cut(torch.arange(prod(shape)).view(*shape)).flatten().tolist()


@st.composite
def on_meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    shape = draw(SHAPES)
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ways = st.one_of(
        st.just(Replicate()),
        st.integers(0, len(shape) - 1).map(Shard),
        st.builds(
            lambda dim, factor: _StridedShard(dim, split_factor=factor),
            st.integers(0, len(shape) - 1),
            st.integers(1, 3),
        ),
    )
    return shape, mesh, draw(st.lists(ways, min_size=len(mesh), max_size=len(mesh)))


@given(on_meshes(), st.randoms(use_true_random=False))
def test_pieces_on_a_mesh_are_those_that_torch_cuts_for_each_rank(case: Any, random: Any):
    shape, mesh, placements = case
    coordinates: list[Any] = [*product(*map(range, mesh)), None]  # the last is on no mesh
    random.shuffle(coordinates)
    found = cut.OnMesh(shape, cut.Places(mesh, coordinates), placements)
    for rank, at in enumerate(coordinates):
        whole = torch.arange(prod(shape)).view(shape)
        for place, placement, parts in zip(at or (), placements, mesh, strict=at is not None):
            if not isinstance(placement, Replicate):
                whole = placement._split_tensor(whole, parts, with_padding=False, contiguous=True)[0][place]
        if at is None:
            assert found[rank].numel == 0
        else:
            assert tuple(found[rank].shape) == tuple(whole.shape)
            assert held(found[rank], shape) == whole.flatten().tolist()


@st.composite
def cuts(draw: st.DrawFn) -> cut.Cut:
    shape, size = draw(SHAPES), draw(st.integers(1, 5))
    start = draw(st.integers(0, 5))
    places = sorted(draw(st.lists(st.integers(0, start + prod(shape)), min_size=size - 1, max_size=size - 1)))
    on_mesh = draw(on_meshes())
    return draw(
        st.sampled_from(
            [
                cut.Whole(shape, size, draw(st.none() | st.integers(0, size - 1))),
                cut.Intervals(shape, start, (0, *places, start + prod(shape))),
                cut.OnMesh(on_mesh[0], cut.Places(on_mesh[1], list(product(*map(range, on_mesh[1])))), on_mesh[2]),
            ]
        )
    )


@given(cuts())
def test_holders_are_found_as_by_a_loop_over_all_ranks(drawn: cut.Cut):
    naive: dict[Piece, list[int]] = {}
    for rank in range(drawn.size):
        if drawn[rank].numel:
            naive.setdefault(drawn[rank], []).append(rank)
    assert list(drawn.holders.items()) == [(piece, tuple(ranks)) for piece, ranks in naive.items()]
    assert drawn.copies == tuple(tuple(ranks) for ranks in naive.values() if len(ranks) > 1)
    numel = prod(drawn.shape)
    assert drawn.complete == tuple(sorted(r for p, ranks in naive.items() if p.numel == numel for r in ranks))
    assert drawn.taking_part == tuple(rank for rank in range(drawn.size) if drawn[rank].numel)


# --------------------------------------------------------------------------------------------- what it takes to bind


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many pieces are made, and how many transfers."""
    found: dict[str, int] = {}
    for owner, name in ((Piece, "grid"), (Piece, "interval"), (shares, "ShareTransfer")):
        monkeypatch.setattr(owner, name, count_calls(found, name, getattr(owner, name)))
    yield found
    if dist.is_initialized():
        dist.destroy_process_group()


def placed(mesh: Any, shape: tuple[int, ...], placements: Sequence[Placement]) -> Any:
    """A meta DTensor, without asking torch to cut anything."""
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), stride, torch.float32))
    local = cut.OnMesh(shape, cut.Places(mesh.shape, [tuple(mesh.get_coordinate())]), placements)[0].shape
    kind: Any = DTensor
    return kind(torch.empty(local, device="meta"), spec, requires_grad=False)


def bound(made: dict[str, int], layers: int, shard: int, parallel: int, kind: str) -> dict[str, int]:
    """What is made on the way to the plan of a model's step."""
    made.clear()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=shard * parallel)
    try:
        mesh = init_device_mesh("cpu", (shard, parallel))
        columns = [_StridedShard(0, split_factor=parallel), Shard(0)]
        shapes = {"q": (48, 32), "o": (32, 48), "norm": (48,)}
        ways = {"q": columns, "o": [Shard(0), Shard(1)], "norm": [Shard(0), Replicate()]}
        params = {
            f"{layer}.{name}": placed(mesh, shape, ways[name])
            if kind == "from_dtensors"
            else torch.empty(shape, device="meta")
            for layer in range(layers)
            for name, shape in shapes.items()
        }
        layout = {
            "from_dtensors": sharding.from_dtensors,
            "whole": sharding.zero,
            "flat": lambda params: sharding.zero(params, partition="flat"),
            "each": lambda params: sharding.zero(params, partition="each"),
            "replicated": sharding.replicated,
        }[kind](params)
        labels = {name: "adamw" if name.endswith("norm") else "muon" for name in params}
        tx = mfx.muon_with_adamw(0.1, labels=labels, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
        local = {
            name: leaf if kind == "from_dtensors" else torch.empty(layout.piece(name).shape, device="meta")
            for name, leaf in params.items()
        }
        sharding.sharded(tx, layout).init(local)
        assert layout.digest
    finally:
        dist.destroy_process_group()
    return dict(made)


@pytest.mark.parametrize("kind", ["from_dtensors", "whole", "flat", "each", "replicated"])
def test_what_is_made_to_bind_grows_with_ranks_plus_parameters(made: dict[str, int], kind: str):
    few = bound(made, 4, 16, 2, kind)
    deeper = bound(made, 16, 16, 2, kind)
    wider = bound(made, 4, 64, 2, kind)
    both = bound(made, 16, 64, 2, kind)
    ranks, params = 32, 12
    for found, r, p in ((few, ranks, params), (deeper, ranks, 4 * params), (wider, 4 * ranks, params)):
        assert sum(found.values()) <= 12 * (r + p) + 50, (kind, found)
    assert sum(both.values()) <= 12 * 4 * (ranks + params) + 50, (kind, both)  # a product would be 16 times
