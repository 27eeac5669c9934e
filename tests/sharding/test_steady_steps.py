"""Laws of steady steps: what follows from shapes and structure is found at the first step, and never again."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import muonfx as mfx
from muonfx import sharding
from muonfx.program import execute
from muonfx.sharding import binding
from muonfx.sharding.shards import Piece
from tests.sharding.counting import count_calls

SHAPES = {"a": (6, 4), "b": (4, 6), "bias": (8,)}
LABELS = {"a": "muon", "b": "muon", "bias": "adamw"}


def nothing_comes(received: torch.Tensor, *args: Any, **kwargs: Any) -> mock.Mock:
    """The pretended group's own refuses a rank that only receives."""
    received.zero_()
    return mock.Mock()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often plans, windows and pieces are made, and constructors called; on one of two pretended ranks."""
    found: dict[str, int] = {}

    for owner, *names in (
        (binding, "plan_run"),
        (execute, "lower_node"),
        (Piece, "window", "grid", "interval"),
        (mfx.Transform, "resolve"),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, count_calls(found, name, getattr(owner, name)))
    for factory in (mfx.orthogonalize, mfx.partition, mfx.momentum, mfx.scale_by_adam):
        constructor = count_calls(found, f"built {factory.__name__}", factory.definition.constructor)
        monkeypatch.setattr(factory, "definition", dataclasses.replace(factory.definition, constructor=constructor))
    monkeypatch.setattr(dist, "all_to_all_single", nothing_comes)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield found
    dist.destroy_process_group()


def chain(rate: float = 0.1) -> mfx.Transform:
    return mfx.chain(
        mfx.partition(
            {"muon": mfx.chain(mfx.momentum(), mfx.orthogonalize(dtype=torch.float32)), "adamw": mfx.scale_by_adam()},
            LABELS,
        ),
        mfx.scale_by_learning_rate(rate),
    )


def laid_out(kind: str) -> tuple[Any, dict[str, Any]]:
    """A layout, and local tensors."""
    if kind == "from_dtensors":
        mesh = init_device_mesh("cpu", (2,))
        params = {n: DTensor.from_local(torch.ones(s[0] // 2, *s[1:]), mesh, [Shard(0)]) for n, s in SHAPES.items()}
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
    after, _ = mfx.with_hyperparams(tx, {"scale_by_learning_rate.learning_rate": 0.2}).update(params, state, params)
    assert done == {}
    torch.testing.assert_close({name: 2 * update for name, update in before.items()}, after)


@KINDS
def test_a_rate_that_a_scheduler_changes_resolves_plans_and_builds_nothing_but_itself(done: dict[str, int], kind: str):
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
