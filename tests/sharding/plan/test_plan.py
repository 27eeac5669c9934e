"""Plans, on shapes alone: owners and how they are balanced, routes, stacks, buckets, and what is said about them."""

import itertools
from collections import Counter
from collections.abc import Sequence
from math import prod
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

import muonfx as mfx
from benchmarks.simulator.bounds import lower_bound
from benchmarks.simulator.models import MODELS, model
from benchmarks.simulator.operations import flops
from muonfx import polar, sharding
from muonfx.polar import policy
from muonfx.polar.cost import newton_schulz_cost
from muonfx.sharding.plan.assignment import Machine, RunPlan
from muonfx.sharding.plan.balance import Item, assign, assign_by_bytes
from muonfx.sharding.plan.matrix_shards import MatrixShard
from muonfx.sharding.shards.cut import MeshCoordinates, OnMesh
from muonfx.tree import Spec

EXPERTS = mfx.MatrixView("... out in -> ... out in")
FP32 = mfx.orthogonalize(dtype=torch.float32)


def run_of(tx: mfx.Transform, layout: sharding.Layout, **settings: object) -> RunPlan:
    (run,) = sharding.plan_for(tx, layout, **settings).runs
    return run


def covered(shards: tuple[MatrixShard, ...], name: str) -> list[int]:
    """How often each element of a parameter is computed by an owner."""
    own = [shard for shard in shards if shard.name == name]
    count = [0] * prod(own[0].whole)
    for shard in own:
        for i in range(shard.start, shard.stop):
            count[i] += 1
    return count


@st.composite
def stacks(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], sharding.Layout]:
    size = draw(st.integers(1, 5))
    batch = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    params = {
        "stack": torch.zeros(*batch, draw(st.integers(1, 4)), draw(st.integers(1, 4))),
        "w": torch.zeros(5, 3),
    }
    total = sum(p.numel() for p in params.values())
    inner = sorted(draw(st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1)))
    layout = draw(
        st.sampled_from(
            [
                sharding.replicated(params, size),
                sharding.zero(params, size, partition="whole"),
                sharding.zero(params, size, partition="flat"),
                sharding.flat(params, size, cuts=[0, *inner, total]),
            ]
        )
    )
    return params, layout


@given(stacks(), st.sampled_from(["split", "everyone"]))
def test_every_matrix_is_computed_once_by_a_rank_that_has_one_range_of_a_stack(
    drawn, replicas: str
):
    params, layout = drawn
    run = run_of(mfx.orthogonalize(view=EXPERTS, dtype=torch.float32), layout, replicas=replicas)
    for name in params:
        assert set(covered(run.shards, name)) == {1}
    owners = [(shard.name, shard.owner) for shard in run.shards]
    assert len(set(owners)) == len(owners)
    assert sorted(i for bucket in run.buckets for i in bucket) == list(range(len(run.shards)))
    for shard in run.shards:
        assert sum(transfer.numel for transfer in shard.transfers) == shard.numel
        assert shard.numel % prod(shard.shape[-2:]) == 0
        assert not shard.needs_gather or shard.needs_send


def test_heads_that_are_whole_on_a_rank_stay_there():
    params = {"qkv": torch.zeros(24, 6), "out": torch.zeros(6, 24)}
    # six rows of qkv on each, and out on the last
    layout = sharding.flat(params, 4, order=["qkv", "out"], cuts=[0, 36, 72, 108, 288])
    heads = run_of(
        mfx.orthogonalize(
            view=mfx.MatrixView({"qkv": "(heads=12 dim) in -> heads dim in"}), dtype=torch.float32
        ),
        layout,
    )
    assert [(s.name, s.shape, s.owner, s.route) for s in heads.shards] == [
        ("out", (6, 24), 3, "local"),
        *[("qkv", (3, 2, 6), rank, "local") for rank in range(4)],
    ]
    assert heads.sent == [0] * 4
    whole = run_of(mfx.orthogonalize(dtype=torch.float32), layout)
    assert sum(whole.sent) == 2 * 3 * 36 * 4


def test_unequal_parts_that_repeat_stay_on_the_rank_that_has_all_of_them():
    layout = sharding.zero({"kv": torch.zeros(24, 5)}, 4, partition="each")
    by_head = "(heads=4 (k=2 + v=4)) in -> heads k in, heads v in"
    run = run_of(mfx.orthogonalize(view=mfx.MatrixView(by_head), dtype=torch.float32), layout)
    assert [(s.shape, s.owner, s.route) for s in run.shards] == [
        ((1, 6, 5), rank, "local") for rank in range(4)
    ]
    assert run.sent == [0] * 4
    over_heads = "(heads=4 (k=2 + v=4)) in -> (heads k) in, (heads v) in"
    assert sum(
        run_of(mfx.orthogonalize(view=mfx.MatrixView(over_heads), dtype=torch.float32), layout).sent
    )


def experts_on(size: int, parts: int, stacks: int) -> sharding.Layout:
    """Stacks of four experts, divided among several ranks, each of which has some rows of an expert."""
    inner = size // parts
    places = MeshCoordinates((parts, inner), [divmod(rank, inner) for rank in range(size)])
    specs = {f"stack{i}": Spec((4, 16, 8), torch.float32) for i in range(stacks)}
    pieces = dict.fromkeys(specs, OnMesh((4, 16, 8), places, (Shard(0), Shard(1))))
    return sharding.Layout("from_dtensors", specs, pieces, size)


@pytest.mark.parametrize(("parts", "stacks"), [(2, 4), (2, 3), (1, 2), (1, 3), (4, 2)])
def test_experts_that_are_cut_further_than_their_number_go_to_all_ranks_of_their_part(
    parts: int, stacks: int
):
    layout = experts_on(8, parts, stacks)
    run = run_of(mfx.orthogonalize(view=EXPERTS, dtype=torch.float32), layout)
    for shard in run.shards:
        assert shard.transfer_of(shard.owner).numel
    computed = Counter(shard.owner for shard in run.shards for _ in range(shard.shape[0]))
    assert max(computed[rank] for rank in range(8)) == -(-4 * stacks // 8)
    owners = [(shard.name, shard.owner) for shard in run.shards]
    assert len(set(owners)) == len(owners)
    # There and back, all but what the owner holds.
    inner = 8 // parts
    assert sum(run.sent) == 2 * stacks * 4 * 16 * 8 * 4 * (inner - 1) // inner


@pytest.mark.parametrize(
    ("shapes", "size", "owned"),
    [
        ({"up": (10, 3, 5)}, 4, [(0, 2), (1, 3), (2, 2), (3, 3)]),
        ({"up": (3, 4, 5), "down": (3, 5, 4)}, 6, [(rank, 1) for rank in range(6)]),
    ],
)
def test_stacks_that_all_hold_are_divided(
    shapes: dict[str, tuple[int, ...]], size: int, owned: list[tuple[int, int]]
):
    layout = sharding.replicated({name: torch.zeros(shape) for name, shape in shapes.items()}, size)
    run = run_of(mfx.orthogonalize(view=EXPERTS, dtype=torch.float32), layout, replicas="split")
    assert sorted((shard.owner, shard.shape[0]) for shard in run.shards) == owned


def predicted(run: RunPlan, machine: Machine) -> float:
    """Seconds of a plan over replicas, by its own figures: compute at the busiest rank, and one exchange."""
    loads, sent = [0.0] * run.size, [0] * run.size
    for shard in run.shards:
        for rank in range(run.size) if shard.owner is None else (shard.owner,):
            loads[rank] += machine.computing(shard.cost)
        if shard.owner is not None:
            sent[shard.owner] += shard.numel * 4 * (run.size - 1)
    return max(loads) + (machine.sending(max(*sent, sum(sent) / run.size)) if any(sent) else 0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from((4, 64, 256, 700)), st.sampled_from((4, 64, 256))),
        min_size=1,
        max_size=12,
    ),
    st.integers(2, 5),
    st.builds(
        Machine,
        st.sampled_from((1e9, 1e11, 1e13)),
        st.sampled_from((1e6, 1e9, 1e11)),
        st.sampled_from((0.0, 1e-4, 1e-2)),
        st.sampled_from((0.0, 1e-5, 1e-3)),
    ),
)
def test_auto_is_predicted_to_be_no_slower_than_either_way(
    shapes: list[tuple[int, int]], size: int, machine: Machine
):
    layout = sharding.replicated(
        {f"w{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}, size
    )
    with mock.patch.object(Machine, "of", return_value=machine):
        auto, *others = (
            run_of(FP32, layout, replicas=replicas) for replicas in ("auto", "split", "everyone")
        )
    assert predicted(auto, machine) <= min(predicted(run, machine) for run in others) * (1 + 1e-9)
    # No bucket has matrices that every rank computes, and matrices that one rank owns.
    assert all(len({auto.shards[i].owner is None for i in bucket}) == 1 for bucket in auto.buckets)


@pytest.mark.parametrize("limit", [1, 6 * 400, 6 * 1000, 1 << 28])
def test_an_owner_has_no_more_of_a_bucket_than_its_share_of_the_bound(limit: int):
    params = {
        f"w{i}": torch.zeros(10, 10, dtype=(torch.float32, torch.bfloat16)[i % 2])
        for i in range(30)
    }
    run = run_of(FP32, sharding.zero(params, 3, partition="flat"), bucket_bytes=limit)
    for bucket in run.buckets:
        assert len({params[run.shards[i].name].dtype for i in bucket}) == 1
        for owner in range(3):
            shards = [run.shards[i] for i in bucket if run.shards[i].owner == owner]
            mine = [shard.numel * params[shard.name].itemsize for shard in shards]
            assert len(mine) <= 1 or sum(mine) <= limit // 6


@pytest.mark.parametrize(
    ("dtype", "held", "wire"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),  # rounded to it first of all anyway
        (torch.float32, torch.bfloat16, torch.bfloat16),  # never wider than they are
        (torch.float16, torch.float32, torch.float32),  # a power of two comes before that rounding
        (torch.float64, torch.float32, torch.float32),
    ],
)
def test_matrices_travel_in_what_they_are_rounded_to(
    dtype: torch.dtype, held: torch.dtype, wire: torch.dtype
):
    layout, orthogonalize = (
        sharding.zero({"w": torch.zeros(4, 4, dtype=held)}, 2, partition="flat"),
        mfx.orthogonalize,
    )
    assert run_of(orthogonalize(dtype=dtype), layout).wire_dtypes(held) == (wire, wire)
    longer = run_of(mfx.chain(orthogonalize(dtype=dtype), mfx.normalize_neurons()), layout)
    assert longer.wire_dtypes(held) == (wire, held)  # what is normalized has all its digits


GPT2 = {
    f"h.{i}.{n}": s
    for i in range(12)
    for n, s in {"qkv": (96, 32), "o": (32, 32), "up": (128, 32), "down": (32, 128)}.items()
}


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_owners_are_balanced(size: int):
    params = {name: torch.empty(shape, device="meta") for name, shape in GPT2.items()}
    # A flat cut leaves most matrices whole on one rank, which keeps them; only those across a cut have a choice.
    layouts = {"auto": (sharding.zero(params, size, partition="flat"), 2.0)}
    layouts["split"] = sharding.replicated(params, size), 1.05
    for replicas, (layout, most) in layouts.items():
        run = run_of(FP32, layout, replicas=replicas)
        assert max(run.flops) <= most * lower_bound([shard.cost for shard in run.shards], size)


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 33), st.integers(0, 33)), min_size=1, max_size=12),
)
def test_whole_partitions_hold_the_bytes_of_all_over_ranks_within_one_matrix(
    size: int, shapes: list[tuple[int, int]]
):
    params = {f"w{i}": torch.empty(shape, device="meta") for i, shape in enumerate(shapes)}
    layout = sharding.zero(params, size, partition="whole")
    total = sum(4 * p.numel() for p in params.values())
    largest = max(4 * p.numel() for p in params.values())
    assert all(layout.nbytes(rank) <= total / size + largest for rank in range(size))
    flat = sharding.zero(params, size, partition="flat")
    assert all(flat.nbytes(rank) <= total / size + 4 for rank in range(size))


def test_a_sharded_chain_has_the_plan_of_the_chain_and_a_chain_without_matrices_an_empty_one():
    layout = sharding.zero({"w": torch.zeros(8, 8), "v": torch.zeros(4, 8)}, 2, partition="flat")
    tx = mfx.muon(0.1, orthogonalize=FP32)
    assert (
        sharding.plan_for(sharding.sharded(tx, layout), layout).owners()
        == sharding.plan_for(tx, layout).owners()
    )
    plan = sharding.plan_for(mfx.adamw(0.1), layout)
    assert (plan.runs, plan.flops, plan.sent, plan.balance) == ((), [0.0, 0.0], [0, 0], 1.0)
    assert "balance" in str(plan.explain())


def test_an_explanation_may_leave_out_the_rows_of_matrices():
    layout = sharding.zero({"w": torch.zeros(8, 8), "v": torch.zeros(4, 8)}, 2)
    plan = sharding.plan_for(mfx.muon(0.1, orthogonalize=FP32), layout)
    *tables_of_runs, table_of_ranks, balance = str(plan.explain()).split("\n\n")
    assert len(tables_of_runs) == 1
    assert str(plan.explain(depth=0)) == f"{table_of_ranks}\n\n{balance}"


COSTS = st.lists(st.one_of(st.floats(0, 100), st.sampled_from([1.0, 3.0, 5.0])), max_size=40)
RANKS = st.integers(1, 9)


def assigned(costs: Sequence[float], ranks: int) -> list[int]:
    return assign([Item(cost, 0, tuple(range(ranks))) for cost in costs], ranks)


def balance(costs: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    """The sum of costs at each rank."""
    loads = [0.0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def busiest(costs: list[float], owners: list[int], ranks: int) -> float:
    return max(balance(costs, owners, ranks))


def best_possible(costs: list[float], ranks: int) -> float:
    return min(
        busiest(costs, list(owners), ranks)
        for owners in itertools.product(range(ranks), repeat=len(costs))
    )


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
    items = [Item(cost, 1, tuple(group)) for cost, group in zip(costs, candidates, strict=True)]
    owners = assign(items, ranks)
    assert all(owner in own for owner, own in zip(owners, candidates, strict=True))
    others = [item._replace(candidates=(*item.candidates,)) for item in items]
    assert assign(others, ranks) == owners, "equal groups, other objects"


@given(
    st.lists(st.tuples(st.floats(0, 100) | st.just(0.0), st.integers(0, 1000)), max_size=40), RANKS
)
def test_bytes_end_within_one_item_of_the_mean(items: list[tuple[float, int]], ranks: int):
    sizes = [size for _, size in items]
    owners = assign_by_bytes([Item(cost, size) for cost, size in items], ranks)
    held = balance(sizes, owners, ranks)
    assert max(held) <= sum(sizes) / ranks + max(sizes, default=0)


def test_an_item_with_one_candidate_is_first_and_ties_go_to_fewer_bytes_then_to_the_lowest_rank():
    assert assign([Item(1.0, 0, (0, 1)), Item(1.0, 0, (0, 1)), Item(9.0, 0, (0,))], 2) == [1, 1, 0]
    assert assign([Item(1.0, 10, (0, 1)), Item(1.0, 4, (0, 1)), Item(0.0, 1, (0, 1))], 2) == [
        0,
        1,
        1,
    ]
    assert assigned([0.0, 0.0], 3) == [0, 0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_balanced_at_all_sizes(name: str, device: str):
    kinds = [kind for kind in model(name).kinds for _ in range(kind.repeats)]
    costs = [newton_schulz_cost(kind.shape, device).load if kind.muon else 0.0 for kind in kinds]
    matrices = [cost for cost, kind in zip(costs, kinds, strict=True) if kind.muon]
    for ranks in (8, 64, 512):
        assert busiest(matrices, assigned(matrices, ranks), ranks) <= 1.05 * lower_bound(
            matrices, ranks
        ), ranks
    sizes = [kind.numel for kind in kinds]
    for ranks in (8, 64, 512):
        owners = assign_by_bytes(
            [Item(cost, size) for cost, size in zip(costs, sizes, strict=True)], ranks
        )
        assert busiest(costs, owners, ranks) <= 1.09 * lower_bound(costs, ranks)
        assert max(balance(sizes, owners, ranks)) <= sum(sizes) / ranks + max(sizes)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="method: found 'gram'"):
        newton_schulz_cost((4, 4), coefficients=torch.ones(2, 3), method="gram")


@given(st.integers(0, 3000), st.integers(0, 3000), st.sampled_from(["standard", "gram"]))
def test_the_cost_counts_products(rows: int, columns: int, method):
    n, m = sorted((rows, columns))
    cost = newton_schulz_cost(
        (rows, columns), coefficients="keller", method=method, products="batched"
    )
    # 20 n^2 m + 10 n^3 in the standard form; 12 n^2 m + 22 n^3 with two restarts.
    want = 20 * n**2 * m + 10 * n**3 if method == "standard" else 12 * n**2 * m + 22 * n**3
    assert flops(cost) == want


@pytest.mark.parametrize("shape", [(64, 64), (300, 3000), (4096, 1024)])
def test_the_cost_is_of_the_policy_of_this_machine(shape: tuple[int, int]):
    """Where the machine is as the facts say: a CPU that computes in fp32."""
    here = polar.explain(shape, "cpu", dtype=torch.float32)
    cost = newton_schulz_cost(shape, "cpu", dtype=torch.float32)
    assert cost.scratch_bytes == here.scratch_bytes
    assert cost.load == here.load


def test_the_cost_asks_no_machine(monkeypatch: pytest.MonkeyPatch):
    def asked(*_: object) -> bool:
        raise AssertionError("looked at this machine")

    for name in ("_fastest", "cpu_has_amx", "cpu_has_bf16", "cuda_capability"):
        monkeypatch.setattr(policy, name, asked)
    monkeypatch.setattr(policy.quack, "is_capable", asked)
    for device in ("cpu", "cuda", "meta"):
        for dtype in (torch.float32, torch.bfloat16):
            assert newton_schulz_cost((1111, 1300), device, dtype=dtype).load > 0


def test_a_pattern_that_matches_no_parameter_is_a_warning():
    tx = mfx.orthogonalize(view=mfx.MatrixView({"*.qkv.weight": "(qkv=3 out) in -> qkv out in"}))
    layout = sharding.zero({"qkv.weight": torch.zeros(12, 4)}, 2)
    with pytest.warns(UserWarning, match=r"'\*\.qkv\.weight' matches none of the 1 parameters"):
        sharding.plan_for(tx, layout)
