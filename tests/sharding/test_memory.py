"""What a step takes beside what it is given and gives back, and what a rank's state takes; counted in bytes."""

import pytest
import torch

import muonfx as mfx
from benchmarks.measure import PeakBytes
from muonfx import sharding
from muonfx.polar import explain
from tests.processes import Here, World
from tests.sharding.cases import LayoutCase, Model, Placed, Zero, laid_out, model, muon, two_groups

pytestmark = pytest.mark.dist

MANY = model(steps=2, **{f"w{i}": (96, 64) for i in range(12)})
EACH = 96 * 64 * 4
ROWS = Placed(dict.fromkeys(MANY.leaves, ("0",)))


def peak(here: Here, case: LayoutCase, bucket_bytes: int) -> tuple[int, int]:
    """The bytes of a step at its peak beyond its inputs, memory kept for messages included; those of its results."""
    params = MANY.params()
    layout = laid_out(case, params, here)
    tx = sharding.sharded(mfx.orthogonalize(dtype=torch.float32), layout, bucket_bytes=bucket_bytes)
    state = tx.init(layout.shard(params))
    tx.update(layout.shard(MANY.grads(0)), state)
    local = layout.shard(MANY.grads(1))
    with PeakBytes() as most:
        updates, _ = tx.update(local, state)
    return most.most + layout.buffers.nbytes, sum(leaf.numel() * 4 for leaf in mfx.tree.tensors(updates))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", [ROWS, Zero(1, "flat")], ids=["rows", "flat"])
@pytest.mark.parametrize("matrices", [1, 2])
def test_an_exchange_takes_no_more_than_its_bound(world: World, size: int, case: LayoutCase, matrices: int):
    bound = 6 * matrices * EACH
    newton_schulz = matrices * explain((96, 64), dtype=torch.float32).scratch_bytes * 2
    whole = max(most - results for most, results in world.check(size, peak, case=case, bucket_bytes=1 << 28))
    for most, results in world.check(size, peak, case=case, bucket_bytes=bound):
        assert results < most  # the counting sees what it must
        assert most - results <= bound + newton_schulz
        assert size > 3 or most - results < whole


def kept(here: Here, case: LayoutCase) -> list[int]:
    """The bytes kept for messages after each of a loop's steps."""
    params = MANY.params()
    layout = laid_out(case, params, here)
    tx = sharding.sharded(mfx.orthogonalize(dtype=torch.float32), layout, bucket_bytes=12 * EACH)
    state, found = tx.init(layout.shard(params)), []
    for _ in range(3):
        updates, state = tx.update(layout.reduce_scatter(MANY.grads(0)), state)
        layout.gather(updates)
        found.append(layout.buffers.nbytes)
    return found


def test_the_memory_of_messages_is_that_of_the_first_step(world: World):
    for first, *later in world.check(3, kept, case=ROWS):
        assert 0 < first <= 4 * 12 * EACH
        assert later == [first, first]


def state_bytes(here: Here, drawn: Model, case: LayoutCase, kind: str) -> int:
    params = drawn.params()
    layout = laid_out(case, params, here)
    matrices = muon() if kind == "muon" else mfx.chain(mfx.momentum(), mfx.orthogonalize(), mfx.normalize_neurons())
    state = sharding.sharded(two_groups(drawn.labels, matrices), layout).init(layout.shard(params))
    return sum(leaf.numel() * leaf.element_size() for leaf in mfx.tree.tensors(state))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["muon", "normuon"])
@pytest.mark.parametrize("case", [Zero(1, "whole"), Zero(1, "flat"), Placed(dict.fromkeys("abcdefg", ("0",)))])
def test_state_is_the_total_over_the_ranks_within_one_matrix(world: World, size: int, kind: str, case: LayoutCase):
    drawn = model(steps=1, a=(24, 8), b=(12, 8), c=(8, 36), d=(48, 4), e=(7,), f=(4, 24), g=(12, 12))
    found = world.check(size, state_bytes, drawn=drawn, case=case, kind=kind)
    counters = 8 * 8
    largest = max((2 if leaf.label == "adamw" else 1) * leaf.numel * 4 for leaf in drawn.leaves.values())
    assert max(found) <= sum(found) / size + largest + counters
