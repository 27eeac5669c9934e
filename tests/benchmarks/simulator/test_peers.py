"""Other libraries' schemes: their figures against counting every message of a small run, and by hand."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator import peers
from benchmarks.simulator.mesh import Mesh, Setting
from benchmarks.simulator.peers import PEERS, Ledger, flat_cuts, matrices_of
from benchmarks.simulator.tally import Tally
from tests.benchmarks.simulator.pretended import SETTINGS, setting

BY_NAME = {scheme.name: scheme for scheme in PEERS}


class Run:
    """Ranks that hold named blocks of bytes and send them to each other; what is not held cannot be sent."""

    def __init__(self, ranks: int):
        self.sent = [0.0] * ranks
        self.held: list[set[object]] = [set() for _ in range(ranks)]

    def send(self, source: int, target: int, block: object, size: float) -> None:
        assert block in self.held[source], f"rank {source} does not hold {block}"
        if source != target:
            self.sent[source] += size
            self.held[target].add(block)

    def ring(self, ranks: Iterable[int], first: int, block: object, size: float) -> None:
        order = list(ranks)
        at = order.index(first)
        order = order[at:] + order[:at]
        for source, target in itertools.pairwise(order):
            self.send(source, target, block, size)


def everywhere(on: Setting) -> Run:
    """Rings of all_gather; then the first rank's result along replicas, sharding and tensor parallel dims."""
    mesh, run = on.mesh, Run(on.mesh.ranks)
    for i, (matrix, size) in enumerate(zip(matrices_of(on), on.sizes, strict=True)):
        holders = matrix.holders(mesh)
        piece = size / len(holders)
        for replica in range(mesh.dp):
            ranks = [replica * mesh.pieces + rank for rank in holders]
            for rank in ranks:
                run.held[rank].add((i, rank))
            # each rank gives its piece to its neighbour, and so on
            for rank in ranks:
                run.ring(ranks, rank, (i, rank), piece)
            assert all((i, rank) in run.held[other] for rank in ranks for other in ranks)
        for rank in holders:  # broadcast along replicas
            run.held[rank].add((i, "done", rank))
            run.ring(range(rank, mesh.ranks, mesh.pieces), rank, (i, "done", rank), size)
        rows = len(holders) // mesh.tp
        for replica in range(mesh.dp):
            grid = [[replica * mesh.pieces + holders[s * mesh.tp + t] for t in range(mesh.tp)] for s in range(rows)]
            for t in range(mesh.tp):  # scatter along the sharding dim
                run.sent[grid[0][t]] += (rows - 1) * size / rows
            for s in range(rows):  # and along the tensor parallel one
                run.sent[grid[s][0]] += (mesh.tp - 1) * piece
    return run


@given(on=SETTINGS)
def test_bytes_of_llama_factory_are_those_of_every_message(on: Setting):
    tally = BY_NAME["LLaMA-Factory v1"].tally(on)
    assert tally is not None
    assert tally.sent == pytest.approx(everywhere(on).sent, abs=1e-6)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 5))
def test_flat_cuts_are_those_of_every_element(numels: list[int], ranks: int):
    each, at = -(-sum(numels) // ranks), 0
    held: list[dict[int, int]] = []
    for numel in numels:
        mine: dict[int, int] = {}
        for element in range(at, at + numel):
            mine[element // each] = mine.get(element // each, 0) + 1
        held.append(mine)
        at += numel
    assert flat_cuts(numels, ranks) == held


@given(SETTINGS)
def test_zero_3_computes_each_matrix_once(on: Setting):
    tally = BY_NAME["DeepSpeed ZeRO-3"].tally(on)
    assert tally is not None
    assert sum(tally.flops) == pytest.approx(sum(on.cost(matrix.shape).flops for matrix in matrices_of(on)))
    assert sum(tally.load) == pytest.approx(sum(on.loads))


def one(name: str, mesh: Mesh, shapes: list[tuple[int, int]]) -> Tally:
    found = BY_NAME[name].tally(setting(mesh, shapes))
    assert found is not None
    return found


def test_deepspeed_zero_3_pads_rounds():
    """Matrices of 64, 256 and 64 elements on two ranks: a round is padded to 256, the next has a dummy of 64."""
    tally = one("DeepSpeed ZeRO-3", Mesh(shard=2), [(8, 8), (8, 32), (8, 8)])
    assert tally.sent == [4 * (2 * (32 + 128 + 32) + 2 * (256 + 64))] * 2
    small, large, _ = setting(Mesh(), [(8, 8), (8, 32), (8, 8)]).loads
    assert tally.load == [2 * small, large]


def test_deepspeed_zero_1_computes_what_crosses_a_cut_twice():
    tally = one("DeepSpeed ZeRO-1/2", Mesh(shard=2), [(8, 8)] * 3)
    assert tally.load[0] == tally.load[1]
    assert sum(tally.load) == pytest.approx(4 / 3 * sum(setting(Mesh(shard=2), [(8, 8)] * 3).loads))
    assert sum(tally.state) == 4 * 4 * 64 + 2 * 4 * 21


def test_dions_batches_are_filled_up():
    """Three matrices on two ranks are two batches of two: a rank sends half a matrix, there and back, in each."""
    tally = one("Dion's Muon", Mesh(shard=2), [(8, 8)])
    alike = one("Dion's Muon", Mesh(shard=2), [(8, 8)] * 3)
    assert alike.sent == [2 * (2 * 64 * 4 / 2)] * 2
    assert alike.load == [2 * load for load in tally.load]


def test_torchtitans_owners_send_what_is_not_theirs():
    """Four ranks: one owns the large matrix, two a small one each, one none; all send a quarter of what others own."""
    tally = one("torchtitan's Muon", Mesh(shard=4), [(8, 8), (8, 32), (8, 8)])
    small, large, _ = setting(Mesh(), [(8, 8), (8, 32), (8, 8)]).loads
    assert tally.load == [large, small, small, 0]
    assert tally.sent == [(256 + 256) / 4 + 3 / 4 * 1024, *[(256 + 1024) / 4 + 3 / 4 * 256] * 2, (1024 + 512) / 4]
    assert tally.exchanges == 2


def test_torchtitan_balances_a_bucket_before_all_of_them():
    """A bucket with the large matrix, then one with two small ones: each rank gets one of these."""
    on = setting(Mesh(shard=2), [(8, 32), (8, 8), (8, 8)])
    small, large = on.loads[1], on.loads[0]
    found = [BY_NAME["torchtitan's Muon"].tally(replace(on, bucket=bucket)) for bucket in (on.bucket, 6 * 512)]
    assert [tally.load for tally in found if tally] == [[large, 2 * small], [large + small, small]]
    assert [tally.exchanges for tally in found if tally] == [2, 4]


@given(SETTINGS)
def test_torchtitan_computes_each_matrix_once_a_replica_and_sends_it_there_and_back(on: Setting):
    tally = BY_NAME["torchtitan's Muon"].tally(on)
    if on.mesh.shard > 1 and on.mesh.tp > 1:
        assert tally is None
        return
    assert tally is not None
    assert sum(tally.load) == pytest.approx(on.mesh.dp * sum(on.loads))
    there = [size * (1 - 1 / own.pieces(on.mesh)) for own, size in zip(matrices_of(on), on.sizes, strict=True)]
    assert sum(tally.sent) == pytest.approx(on.mesh.dp * 2 * sum(there))


def test_entries_for_many_ranks_make_no_ledger_each():
    """A ledger has a place for every rank: with one an entry, 100,000 ranks would take minutes."""
    made = []

    class Counting(Ledger):
        def __init__(self, ranks: int) -> None:
            made.append(ranks)
            super().__init__(ranks)

    mesh = Mesh(shard=1000)
    small = setting(mesh, [(16, 48)] * 3 + [(32, 64)] * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "Ledger", Counting)
        for scheme in PEERS:
            scheme.tally(small)
    assert len(made) <= 10 * len(PEERS)
