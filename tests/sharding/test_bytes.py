"""Bytes on the wire, counted at the collectives, and in memory, each by its formula; each matrix is computed once."""

import pytest
import torch

import muonfx as mfx
from benchmarks.measure import PeakBytes
from muonfx import sharding
from muonfx.polar import explain
from tests.processes import Here, World, on_ranks
from tests.sharding import counting
from tests.sharding.cases import (
    Flat,
    LayoutCase,
    Leaf,
    Model,
    Placed,
    Replicated,
    Zero,
    laid_out,
    model,
    muon,
    two_groups,
)

pytestmark = pytest.mark.dist


def evenly(size: int) -> Model:
    """Matrices that are cut evenly, and as many for each owner."""
    return model(steps=2, **{f"m{i}": (4 * size, 6) for i in range(2 * size)})


def facts(drawn: Model) -> int:
    """Bytes that ranks may exchange to agree on a step: three numbers for each leaf, and a few more."""
    return 2 * 4 * (3 * len(drawn.leaves) + 16)


def total(drawn: Model) -> int:
    return sum(leaf.numel * leaf.dtype.itemsize for leaf in drawn.leaves.values())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["rows", "columns", "flat"])
def test_owners_get_and_give_2s_times_p_minus_1_over_p_squared(world: World, size: int, kind: str):
    """For an even cut; S bytes in all."""
    drawn = {
        "rows": evenly(size),
        "columns": model(steps=2, **{f"m{i}": (5, 2 * size) for i in range(2 * size)}),
        # Equal intervals of each matrix: an engine with a buffer for each.
        "flat": model(steps=2, m0=(size, 6)),
    }[kind]
    layout = Placed(dict.fromkeys(drawn.leaves, ("0" if kind == "rows" else "1",)))
    if kind == "flat":
        layout = Flat(("m0",), tuple(6 * rank for rank in range(size + 1)))
    found = world.check(size, counting.count_steps, model=drawn, tx=muon(), case=layout)
    expected = 2 * total(drawn) * (size - 1) // size**2
    for step in range(drawn.steps):
        by_rank = [counted[step].exchanged for counted in found]
        assert sum(by_rank) == expected * size
        if kind != "flat":  # one matrix has one owner
            assert by_rank == [expected] * size
        assert all(counted[step].else_sent <= facts(drawn) for counted in found)
        assert sum(counted[step].matrices for counted in found) == len(drawn.leaves)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_with_remainders_no_more_is_sent_than_what_the_owner_lacks(world: World, size: int):
    drawn = model(steps=1, a=(7, 5), b=(2, 9), c=(5, 3), d=(1, 4), e=Leaf((11,)))
    layout = Placed(dict.fromkeys(drawn.leaves, ("0",)))
    found = world.check(
        size, counting.count_steps, model=drawn, tx=two_groups(drawn.labels), case=layout
    )
    sent = sum(counted[0].exchanged for counted in found)
    # chunks of ceil(rows / P) rows, in order; an owner that has as much as any of them, or as little
    most = least = 0
    for shape in [leaf.shape for leaf in drawn.leaves.values() if leaf.label == "muon"]:
        chunk = -(-shape[0] // size)
        rows = [max(0, min(shape[0] - rank * chunk, chunk)) for rank in range(size)]
        least += 2 * 4 * shape[1] * (shape[0] - max(rows))
        most += 2 * 4 * shape[1] * (shape[0] - min(rows))
    assert least <= sent <= most
    assert sum(counted[0].matrices for counted in found) == 4


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_partitions_send_nothing(world: World, size: int, stage: int):
    drawn = model(steps=2, a=(7, 5), b=(2, 9), c=(5, 3), d=(6, 4), e=Leaf((11,)))
    case = Zero(stage, "whole")
    found = world.check(
        size, counting.count_steps, model=drawn, tx=two_groups(drawn.labels), case=case
    )
    assert [counted.exchanged for steps in found for counted in steps] == [0] * 2 * size
    assert all(counted.else_sent <= facts(drawn) for steps in found for counted in steps)
    assert sum(steps[0].matrices for steps in found) == 4


@pytest.mark.parametrize("layout", ["rows", "whole", "flat"])
def test_nothing_is_exchanged_and_no_matrix_computed_between_updates(world: World, layout: str):
    """With accumulation: once per optimizer step, never per micro-batch."""
    drawn = Model(evenly(3).leaves, 0, (frozenset(),) * 6)
    across = Flat(tuple(drawn.leaves), (0, 100, 300, drawn.numel))
    case = {"rows": Placed(dict.fromkeys(drawn.leaves, ("0",))), "whole": Zero(1), "flat": across}[
        layout
    ]
    found = world.check(
        3, counting.count_steps, model=drawn, tx=mfx.accumulate(muon(), 3), case=case
    )
    for step in range(6):
        last = step % 3 == 2
        assert sum(steps[step].matrices for steps in found) == (len(drawn.leaves) if last else 0)
        assert layout == "whole" or (sum(steps[step].exchanged for steps in found) > 0) == last


def test_matrices_without_a_gradient_are_neither_sent_nor_computed(world: World):
    leaves = evenly(2).leaves
    drawn = Model(leaves, 0, (frozenset(), frozenset(leaves), frozenset({"m0", "m1", "m2"})))
    case = Placed(dict.fromkeys(leaves, ("0",)))
    found = world.check(2, counting.count_steps, model=drawn, tx=muon(), case=case)
    assert [sum(steps[step].matrices for steps in found) for step in range(3)] == [4, 0, 1]
    one = total(drawn) // 4
    # of two ranks, the one sends its half to the owner, who sends that half back
    assert [sum(steps[step].exchanged for steps in found) for step in range(3)] == [4 * one, 0, one]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_replicated_matrices_are_computed_once_or_by_all(world: World, size: int):
    """Where computing is cheaper than sending all compute; large ones are split and their results sent."""
    drawn = model(steps=1, **{f"m{i}": (5 + i, 7) for i in range(4)})
    found = world.check(size, counting.count_steps, model=drawn, tx=muon(), case=Replicated())
    computed = sum(counted.matrices for (counted,) in found)
    sent = sum(counted.exchanged for (counted,) in found)
    assert 4 <= computed <= 4 * size
    # each matrix: at one owner who sends it to all others, or at every rank
    once = (4 * size - computed) // (size - 1) if size > 1 else 4
    assert computed == once + (4 - once) * size
    assert (sent > 0) == (once > 0)
    assert sent <= total(drawn) * (size - 1)


MATRICES = model(steps=3, a=(8, 6), b=(6, 8), c=(9, 4))
EXCHANGES = {
    "rows": (Placed(dict.fromkeys(MATRICES.leaves, ("0",))), 2),
    "whole": (Zero(2, "whole"), 0),
    "flat": (Zero(2, "flat"), 2),
}


@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize("how", ["functional", "optimizer"])
def test_a_steady_step_agrees_in_one_small_collective(world: World, kind: str, how: str):
    """And exchanges a bucket in one all_to_all there and one back."""
    case, exchanges = EXCHANGES[kind]
    for counted in world.check(
        3, counting.count_steps, model=MATRICES, tx=muon(), case=case, how=how
    ):
        calls = dict(counted[-1].calls)
        assert calls.pop("all_to_all_single", 0) == exchanges
        assert calls == {"all_reduce": 1}
        assert counted[-1].else_sent <= facts(MATRICES)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("partition", ["whole", "flat"])
def test_reducing_and_gathering_send_what_zero_sends(world: World, size: int, partition: str):
    """S (P - 1) / P per rank each, on average."""
    drawn = model(steps=1, a=(4 * size, 3), b=(7, 5), c=(5,))
    found = world.check(size, counting.count_reductions, model=drawn, case=Zero(2, partition))
    for way in (0, 1):
        sent = [counted[way].exchanged for counted in found]
        assert sum(sent) == total(drawn) * (size - 1)


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
    return most.most + layout.buffers.nbytes, sum(
        leaf.numel() * 4 for leaf in mfx.tree.tensors(updates)
    )


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", [ROWS, Zero(1, "flat")], ids=["rows", "flat"])
@pytest.mark.parametrize("matrices", [1, 2])
def test_an_exchange_takes_no_more_than_its_bound(
    world: World, size: int, case: LayoutCase, matrices: int
):
    bound = 6 * matrices * EACH
    newton_schulz = matrices * explain((96, 64), dtype=torch.float32).scratch_bytes * 2
    whole = max(
        most - results for most, results in world.check(size, peak, case=case, bucket_bytes=1 << 28)
    )
    for most, results in world.check(size, peak, case=case, bucket_bytes=bound):
        assert results < most  # the counting sees what it must
        assert most - results <= bound + newton_schulz
        assert size > 3 or most - results < whole


@on_ranks(3)
def test_the_memory_of_messages_is_that_of_the_first_step(here: Here):
    params = MANY.params()
    layout = laid_out(ROWS, params, here)
    tx = sharding.sharded(mfx.orthogonalize(dtype=torch.float32), layout, bucket_bytes=12 * EACH)
    state, kept = tx.init(layout.shard(params)), []
    for _ in range(3):
        updates, state = tx.update(layout.reduce_scatter(MANY.grads(0)), state)
        layout.gather(updates)
        kept.append(layout.buffers.nbytes)
    assert 0 < kept[0] <= 4 * 12 * EACH
    assert kept[1:] == kept[:1] * 2


def state_bytes(here: Here, drawn: Model, case: LayoutCase, kind: str) -> int:
    params = drawn.params()
    layout = laid_out(case, params, here)
    matrices = (
        muon()
        if kind == "muon"
        else mfx.chain(mfx.momentum(), mfx.orthogonalize(), mfx.normalize_neurons())
    )
    state = sharding.sharded(two_groups(drawn.labels, matrices), layout).init(layout.shard(params))
    return sum(leaf.numel() * leaf.element_size() for leaf in mfx.tree.tensors(state))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["muon", "normuon"])
@pytest.mark.parametrize(
    "case", [Zero(1, "whole"), Zero(1, "flat"), Placed(dict.fromkeys("abcdefg", ("0",)))]
)
def test_state_is_the_total_over_the_ranks_within_one_matrix(
    world: World, size: int, kind: str, case: LayoutCase
):
    drawn = model(
        steps=1, a=(24, 8), b=(12, 8), c=(8, 36), d=(48, 4), e=(7,), f=(4, 24), g=(12, 12)
    )
    found = world.check(size, state_bytes, drawn=drawn, case=case, kind=kind)
    counters = 8 * 8
    largest = max(
        (2 if leaf.label == "adamw" else 1) * leaf.numel * 4 for leaf in drawn.leaves.values()
    )
    assert max(found) <= sum(found) / size + largest + counters
