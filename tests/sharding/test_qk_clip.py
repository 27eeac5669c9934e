"""QK-clip over ranks: the same under every layout, with the largest logits of all ranks, for one more all-reduce."""

import functools

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from tests.processes import World
from tests.sharding import attention
from tests.sharding.cases import Case, Flat, LayoutCase, Params, Placed, Replicated, Zero, model

pytestmark = pytest.mark.dist

alone = functools.cache(attention.alone)


@pytest.mark.parametrize(("way", "size"), [("dp", 3), ("cp", 3), ("tp", 2), ("fsdp2", 2)])
def test_training_is_that_of_one_process(world: World, way: str, size: int):
    wanted_logits, wanted = alone()
    clipped = [int((seen > attention.TAU).sum()) for seen in wanted_logits]
    assert clipped == [4, 0, 1, 2]  # some heads at some steps
    results: list[tuple[list[Tensor], Params]] = world.check(size, attention.laid_out_as, way=way)
    for step, like in enumerate(wanted_logits):
        seen = torch.stack([logits[step] for logits, _ in results])
        torch.testing.assert_close(seen.amax(0), like, rtol=1e-9, atol=1e-9)
        assert not all(torch.equal(own, seen[0]) for own in seen)  # each rank has seen something else
    for _, params in results:
        for name, leaf in params.items():
            torch.testing.assert_close(leaf, wanted[name], rtol=1e-9, atol=1e-9)


MODEL = model(
    **{"a.q_proj.weight": (8, 3), "a.k_proj.weight": (4, 3), "a.k_proj.bias": (4,), "b.qkv": (12, 5), "c": (3, 2)}
)
HEADS = mfx.AttentionHeads("a", 4, 2), mfx.AttentionHeads("b", 2, query="qkv", key="qkv")
PLACED = {"a.q_proj.weight": "0", "a.k_proj.weight": "1", "a.k_proj.bias": "0", "b.qkv": "0", "c": "r"}
ORDER = tuple(MODEL.leaves)
GRID = {name: (letter, "0" if name == "b.qkv" else "r") for name, letter in PLACED.items()}
LAYOUTS: dict[int, list[LayoutCase]] = {
    1: [Replicated(), Zero(3, "flat")],
    2: [Replicated(), Zero(1), Zero(3, "flat"), Placed({name: (letter,) for name, letter in PLACED.items()})],
    3: [Replicated(), Zero(2), Flat(ORDER, (0, 5, 77, MODEL.numel)), Placed({n: (x,) for n, x in PLACED.items()})],
    4: [Placed(GRID, grid=True)],
}


@pytest.mark.parametrize("size", LAYOUTS)
def test_the_largest_logits_of_all_ranks_count_under_every_layout(world: World, size: int):
    draw = torch.Generator().manual_seed(0)
    logits = [
        {"a": 300 * torch.rand(4, generator=draw), "b": torch.tensor([500.0 if rank == 0 else -torch.inf, 20.0])}
        for rank in range(4)
    ]
    chains = [
        mfx.chain(mfx.momentum(0.9), mfx.scale_by_learning_rate(0.1), mfx.qk_clip(HEADS)),
        mfx.master_params(mfx.chain(mfx.clip_by_global_norm(1e9), mfx.qk_clip(HEADS, 150.0, alpha=0.3))),
    ]
    cases = [Case(MODEL, tx, layout, exact=True) for tx in chains for layout in LAYOUTS[size]]
    world.check(size, attention.own_logits, cases=cases, logits=logits)


def test_bad_logits_on_one_rank_are_an_error_on_all(world: World):
    for said in world.check(2, attention.bad_logits_on_one_rank):
        assert len(said) == 3
        assert "found none (did you mean 'h.atn'?)" in said[0]
        assert "found one of (2,)" in said[1]
        assert "the ranks have different named extras" in said[2]
