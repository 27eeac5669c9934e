"""Owners: balanced within a few percent of what is possible, alike everywhere, and never outside their candidates."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator.bounds import lower_bound
from benchmarks.simulator.models import MODELS, model
from muonfx import polar
from muonfx.polar import policy
from muonfx.polar.cost import newton_schulz_cost
from muonfx.sharding.plan.balance import assign, assign_by_bytes

COSTS = st.lists(st.one_of(st.floats(0, 100), st.sampled_from([1.0, 3.0, 5.0])), max_size=40)
RANKS = st.integers(1, 9)


def assigned(costs: Sequence[float], ranks: int) -> list[int]:
    return assign(costs, [range(ranks)] * len(costs), ranks, [0] * len(costs))


def balance(costs: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    """The sum of costs at each rank."""
    loads = [0.0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def busiest(costs: list[float], owners: list[int], ranks: int) -> float:
    return max(balance(costs, owners, ranks))


def best_possible(costs: list[float], ranks: int) -> float:
    return min(busiest(costs, list(owners), ranks) for owners in itertools.product(range(ranks), repeat=len(costs)))


@given(COSTS, RANKS)
def test_no_rank_is_above_the_mean_and_one_item(costs: list[float], ranks: int):
    owners = assigned(costs, ranks)
    assert busiest(costs, owners, ranks) <= sum(costs) / ranks + max(costs, default=0) + 1e-9


@given(st.lists(st.integers(0, 12).map(float), max_size=7), st.integers(1, 3))
def test_the_bounds_hold_against_all_ways_to_give_out(costs: list[float], ranks: int):
    best = best_possible(costs, ranks)
    assert lower_bound(costs, ranks) <= best + 1e-9
    assert busiest(costs, assigned(costs, ranks), ranks) <= best * 4 / 3 + 1e-9  # Graham


@given(st.data(), COSTS, RANKS)
def test_an_item_goes_to_a_candidate(data: st.DataObject, costs: list[float], ranks: int):
    groups = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True).map(tuple)
    candidates = [data.draw(st.just(range(ranks)) | groups) for _ in costs]
    owners = assign(costs, candidates, ranks, [1] * len(costs))
    assert all(owner in own for owner, own in zip(owners, candidates, strict=True))
    assert assign(costs, list(map(list, candidates)), ranks, [1] * len(costs)) == owners, "equal groups, other objects"


@given(st.lists(st.tuples(st.floats(0, 100) | st.just(0.0), st.integers(0, 1000)), max_size=40), RANKS)
def test_bytes_end_within_one_item_of_the_mean(items: list[tuple[float, int]], ranks: int):
    costs, sizes = [cost for cost, _ in items], [size for _, size in items]
    owners = assign_by_bytes(costs, sizes, ranks)
    held = balance(sizes, owners, ranks)
    assert max(held) <= sum(sizes) / ranks + max(sizes, default=0)


def test_an_item_with_one_candidate_is_first_and_ties_go_to_fewer_bytes_then_to_the_lowest_rank():
    assert assign([1.0, 1.0, 9.0], [(0, 1), (0, 1), (0,)], 2, [0] * 3) == [1, 1, 0]
    assert assign([1.0, 1.0, 0.0], [(0, 1)] * 3, 2, [10, 4, 1]) == [0, 1, 1]
    assert assigned([0.0, 0.0], 3) == [0, 0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_balanced_at_all_sizes(name: str, device: str):
    kinds = [kind for kind in model(name).kinds for _ in range(kind.repeats)]
    costs = [newton_schulz_cost(kind.shape, device).load if kind.muon else 0.0 for kind in kinds]
    matrices = [cost for cost, kind in zip(costs, kinds, strict=True) if kind.muon]
    for ranks in (8, 64, 512):
        assert busiest(matrices, assigned(matrices, ranks), ranks) <= 1.05 * lower_bound(matrices, ranks), ranks
    sizes = [kind.numel for kind in kinds]
    for ranks in (8, 64, 512):
        owners = assign_by_bytes(costs, sizes, ranks)
        assert busiest(costs, owners, ranks) <= 1.09 * lower_bound(costs, ranks)
        assert max(balance(sizes, owners, ranks)) <= sum(sizes) / ranks + max(sizes)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="method: found 'gram'"):
        newton_schulz_cost((4, 4), coefficients=torch.ones(2, 3), method="gram")


@given(st.integers(0, 3000), st.integers(0, 3000), st.sampled_from(["standard", "gram"]))
def test_the_cost_counts_products(rows: int, columns: int, method):
    n, m = sorted((rows, columns))
    cost = newton_schulz_cost((rows, columns), coefficients="keller", method=method, products="batched")
    # 20 n^2 m + 10 n^3 in the standard form; 12 n^2 m + 22 n^3 with two restarts.
    want = 20 * n**2 * m + 10 * n**3 if method == "standard" else 12 * n**2 * m + 22 * n**3
    assert cost.flops == want


@pytest.mark.parametrize("shape", [(64, 64), (300, 3000), (4096, 1024)])
def test_the_cost_is_of_the_policy_of_this_machine(shape: tuple[int, int]):
    """Where the machine is as the facts say: a CPU that computes in fp32."""
    here = polar.explain(shape, "cpu", dtype=torch.float32)
    cost = newton_schulz_cost(shape, "cpu", dtype=torch.float32)
    assert cost.scratch_bytes == here.scratch_bytes
    assert cost.load == 2 * policy.work(here, torch.device("cpu"))


def test_the_cost_asks_no_machine(monkeypatch: pytest.MonkeyPatch):
    def asked(*_: object) -> bool:
        raise AssertionError("looked at this machine")

    for name in ("_fastest", "cpu_has_amx", "cpu_has_bf16", "cuda_capability"):
        monkeypatch.setattr(policy, name, asked)
    monkeypatch.setattr(policy.kernels, "available", asked)
    for device in ("cpu", "cuda", "meta"):
        for dtype in (torch.float32, torch.bfloat16):
            assert newton_schulz_cost((1111, 1300), device, dtype=dtype).flops > 0
