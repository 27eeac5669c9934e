"""Other libraries' schemes: their figures by hand."""

import pytest
from hypothesis import given

from benchmarks.simulator.mesh import Mesh, Setting
from benchmarks.simulator.peers import PEERS, matrices_of
from benchmarks.simulator.tally import Tally
from tests.benchmarks.simulator.pretended import SETTINGS, setting

BY_NAME = {scheme.name: scheme for scheme in PEERS}


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


def test_llama_factory_gathers_on_every_rank_and_scatters_from_the_first():
    """A matrix of 256 bytes on two ranks: each sends its half to the other, and the first one half of the result."""
    assert one("LLaMA-Factory v1", Mesh(shard=2), [(8, 8)]).sent == [128 + 128, 128]


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
