"""Laws of binding and of steady steps: what shapes decide is computed once, and grows with ranks plus parameters."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import muonfx as mfx
from muonfx import sharding
from muonfx.sharding import binding
from muonfx.sharding.communication.matrix_stage import Step, _boxes_of_entries
from muonfx.sharding.communication.messages import Exchange, host_device
from muonfx.sharding.plan import matrix_shards
from muonfx.sharding.plan.assignment import BUFFERS_PER_BUCKET, Settings
from muonfx.sharding.shards import cut
from muonfx.sharding.shards.position import ShardPosition
from tests.sharding.counting import count_calls

SHAPES = {"a": (6, 4), "b": (4, 6), "bias": (8,)}
LABELS = {"a": "muon", "b": "muon", "bias": "adamw"}


def nothing_comes(received: torch.Tensor, *args: Any, **kwargs: Any) -> mock.Mock:
    """The pretended group's own refuses a rank that only receives."""
    received.zero_()
    return mock.Mock()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often plans, views and pieces are made, and constructors called; on one of two pretended ranks."""
    found: dict[str, int] = {}

    for owner, *names in (
        (binding, "plan_run"),
        (sys.modules["muonfx.placement.placed"], "placed"),
        (ShardPosition, "view", "grid", "interval"),
        (mfx.Transform, "resolve"),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, count_calls(found, name, getattr(owner, name)))
    for factory in (mfx.orthogonalize, mfx.partition, mfx.momentum, mfx.scale_by_adam):
        constructor = count_calls(
            found, f"built {factory.__name__}", factory.definition.constructor
        )
        monkeypatch.setattr(
            factory, "definition", dataclasses.replace(factory.definition, constructor=constructor)
        )
    monkeypatch.setattr(dist, "all_to_all_single", nothing_comes)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield found
    dist.destroy_process_group()


def chain(rate: float = 0.1) -> mfx.Transform:
    return mfx.chain(
        mfx.partition(
            {
                "muon": mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.float32)),
                "adamw": mfx.scale_by_adam(),
            },
            LABELS,
        ),
        mfx.scale_by_learning_rate(rate),
    )


def laid_out(kind: str) -> tuple[Any, dict[str, Any]]:
    """A layout, and local tensors."""
    if kind == "from_dtensors":
        mesh = init_device_mesh("cpu", (2,))
        params = {
            n: DTensor.from_local(torch.ones(s[0] // 2, *s[1:]), mesh, [Shard(0)])
            for n, s in SHAPES.items()
        }
        return sharding.from_dtensors(params), params
    whole = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    if kind == "replicated":
        return sharding.replicated(whole), whole
    layout = sharding.zero(whole, partition=kind)
    return layout, layout.shard(whole)


KINDS = pytest.mark.parametrize("kind", ["replicated", "whole", "flat", "from_dtensors"])


@KINDS
def test_a_later_step_with_another_number_makes_no_piece_plan_or_window_and_builds_nothing(
    done: dict[str, int], kind: str
):
    layout, params = laid_out(kind)
    tx = sharding.sharded(chain(), layout)
    before, state = tx.update(params, tx.init(params), params)
    assert done["plan_run"]
    done.clear()
    tx.update(params, state, params)
    assert done == {}
    state = tx.init(params)
    done.clear()
    after, _ = mfx.with_hyperparams(tx, {"scale_by_learning_rate.learning_rate": 0.2}).update(
        params, state, params
    )
    assert done == {}
    torch.testing.assert_close({name: 2 * update for name, update in before.items()}, after)


@KINDS
def test_a_rate_that_a_scheduler_changes_resolves_plans_and_builds_nothing_but_itself(
    done: dict[str, int], kind: str
):
    layout, params = laid_out(kind)
    held = {name: torch.nn.Parameter(leaf) for name, leaf in params.items()}
    optimizer = mfx.TransformOptimizer(held, sharding.sharded(chain(), layout))

    def step() -> None:
        for name, param in held.items():
            param.grad = params[name].clone()
        optimizer.step()

    step()
    done.clear()
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    step()
    assert done == {}


def test_matrices_of_one_shape_are_received_with_as_many_calls_as_one(done: dict[str, int]):
    def calls(count: int) -> int:
        """The Python calls in which a rank allocates what it receives for its part of some equal matrices."""
        mesh = init_device_mesh("cpu", (2,))
        params = {
            f"w{index}": DTensor.from_local(torch.ones(6, 2), mesh, [Shard(1)])
            for index in range(count)
        }
        tx = sharding.sharded(
            mfx.orthogonalize(dtype=torch.float32), sharding.from_dtensors(params)
        )
        state = tx.init(params)
        found = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal found
            found += event == "call" and frame.f_back.f_code is _boxes_of_entries.__code__

        sys.setprofile(profile)
        try:
            tx.update(params, state, params)
        finally:
            sys.setprofile(None)
        return found

    assert calls(8) == calls(2) > 0  # two matrices: one for each rank


def test_a_bucket_is_computed_while_the_next_is_gathered_and_the_one_before_returned(
    done: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    """As docs/cost-memory-risk.md says; a bucket has 42 MiB of matrices on each rank by default."""
    assert Settings().bucket_bytes // BUFFERS_PER_BUCKET // 2**20 == 42
    events: list[str] = []
    exchange_init, exchange_arrived, compute = Exchange.__init__, Exchange.arrived, Step._compute

    def started(exchange: Exchange, *args: Any, operation: str, **options: Any) -> None:
        events.append(f"start {operation}")
        exchange_init(exchange, *args, operation=operation, **options)

    def waited(exchange: Exchange, shapes: Any) -> Any:
        events.append(f"wait for {exchange.operation}")
        return exchange_arrived(exchange, shapes)

    def computed(step: Step, *args: Any, **options: Any) -> Any:
        events.append("compute")
        return compute(step, *args, **options)

    mesh = init_device_mesh("cpu", (2,))
    params = {
        f"w{index}": DTensor.from_local(torch.ones(3, 6), mesh, [Shard(0)]) for index in range(6)
    }
    layout = sharding.from_dtensors(params)
    # Three buckets.
    tx = sharding.sharded(mfx.orthogonalize(dtype=torch.float32), layout, bucket_bytes=1)
    state = tx.init(params)
    monkeypatch.setattr(Exchange, "__init__", started)
    monkeypatch.setattr(Exchange, "arrived", waited)
    monkeypatch.setattr(Step, "_compute", computed)
    tx.update(params, state, params)
    gathering, returning = "gathering matrices", "returning matrices"
    assert events == [
        *(f"start {gathering}", f"wait for {gathering}"),
        *(f"start {gathering}", "compute", f"start {returning}", f"wait for {gathering}"),
        *(
            f"start {gathering}",
            "compute",
            f"wait for {returning}",
            f"start {returning}",
            f"wait for {gathering}",
        ),
        *("compute", f"wait for {returning}", f"start {returning}", f"wait for {returning}"),
    ]


@pytest.mark.parametrize(
    ("backends", "device"), [("cpu:gloo,cuda:gloo", "cpu"), ("cuda:gloo", "cuda")]
)
def test_ranks_agree_in_host_memory_if_the_group_has_a_backend_for_the_cpu(
    backends: str, device: str
):
    """As docs/cost-memory-risk.md says; ``cuda:gloo`` is in the place of NCCL, which needs a GPU."""
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert host_device(dist.group.WORLD).type == device
        assert host_device(dist.new_group([0])).type == device
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------- what it takes to bind


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many pieces are made, and how many transfers."""
    found: dict[str, int] = {}
    for owner, name in (
        (ShardPosition, "grid"),
        (ShardPosition, "interval"),
        (matrix_shards, "Transfer"),
    ):
        monkeypatch.setattr(owner, name, count_calls(found, name, getattr(owner, name)))
    yield found
    if dist.is_initialized():
        dist.destroy_process_group()


def on_meta(mesh: Any, shape: tuple[int, ...], placements: Sequence[Placement]) -> Any:
    """A meta DTensor, without asking torch to cut anything."""
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    spec = DTensorSpec(
        mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), stride, torch.float32)
    )
    local = cut.OnMesh(
        shape, cut.MeshCoordinates(mesh.shape, [tuple(mesh.get_coordinate())]), placements
    )[0].shape
    kind: Any = DTensor
    return kind(torch.empty(local, device="meta"), spec, requires_grad=False)


def bound(
    made: dict[str, int], layers: int, shard: int, parallel: int, kind: str
) -> dict[str, int]:
    """The objects that are created for the plan of a model's step."""
    made.clear()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=shard * parallel)
    try:
        mesh = init_device_mesh("cpu", (shard, parallel))
        columns = [_StridedShard(0, split_factor=parallel), Shard(0)]
        shapes = {"q": (48, 32), "o": (32, 48), "norm": (48,)}
        ways = {"q": columns, "o": [Shard(0), Shard(1)], "norm": [Shard(0), Replicate()]}
        params = {
            f"{layer}.{name}": on_meta(mesh, shape, ways[name])
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
        tx = mfx.muon_with_adamw(
            0.1, labels=labels, orthogonalize=mfx.orthogonalize(dtype=torch.float32)
        )
        local = {
            name: leaf
            if kind == "from_dtensors"
            else torch.empty(layout.position(name).shape, device="meta")
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
    for found, r, p in (
        (few, ranks, params),
        (deeper, ranks, 4 * params),
        (wider, 4 * ranks, params),
    ):
        assert sum(found.values()) <= 12 * (r + p) + 50, (kind, found)
    # A product would be 16 times.
    assert sum(both.values()) <= 12 * 4 * (ranks + params) + 50, (kind, both)
